// One random token of a row: temperature, min_p, top_k, top_p, the draw (operators/draw.py has the definitions). Included once per
// instruction set.
//
// Nothing is sorted but the tokens at a border: weights are added up in buckets of (best - logit) / temperature, and only the bucket in
// which top_k or top_p ends is looked at token by token. Buckets far from the best, where most tokens are, are filled when a border is there.

typedef int64_t l8v __attribute__((vector_size(64)));
typedef float f8v __attribute__((vector_size(32)));

constexpr float kDrawSteps = 64.0f;  // buckets per unit: kDrawBuckets reach up to 32, beyond 27.8 weights are 0
constexpr int kNearBuckets = 448;    // filled at once: up to 7
constexpr float kWeightScale = 0x1p40f;

struct DrawRow {
  const float* logits;
  const float* weights;  // [vocab padded to 16] whole numbers
  float best, temperature;
  int64_t vocab;
  int32_t* counts;  // tokens with weight in each bucket
  int64_t* masses;
  uint64_t* keys;  // room for vocab of them
};

static inline l8v whole_pairs(f16v w) {
  f8v low, high;
  memcpy(&low, &w, 32);
  memcpy(&high, reinterpret_cast<const char*>(&w) + 32, 32);
  return __builtin_convertvector(low, l8v) + __builtin_convertvector(high, l8v);
}

static inline int64_t sum_of(l8v v) {
  int64_t total = 0;
  for (int i = 0; i < 8; ++i) total += v[i];
  return total;
}

static inline bool any(i16v v) {
#if HX_AVX512
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#else
  uint64_t words[8], all = 0;
  memcpy(words, &v, 64);
  for (int i = 0; i < 8; ++i) all |= words[i];
  return all != 0;
#endif
}

// 16 logits from `at` on; beyond the vocabulary -infinity.
static inline f16v some_logits(const float* logits, int64_t at, int64_t vocab) {
  if (at + kLanes <= vocab) return load(logits + at);
  f16v v = splat(-INFINITY);
  for (int64_t i = at; i < vocab; ++i) v[i - at] = logits[i];
  return v;
}

// How far below the best, after temperature: at least 0, NaN where a logit is one.
static inline f16v below_best(f16v logits, float best, float temperature) { return (f16v)((u16v)((logits - best) / splat(temperature)) & 0x7fffffff); }

static inline i16v buckets_of(f16v below) {
  const f16v at = below * kDrawSteps;
  const f16v last = splat(static_cast<float>(kDrawBuckets - 1));
  return __builtin_convertvector(at < last ? at : last, i16v);
}

static inline void sift(uint64_t* keys, int64_t root, int64_t count) {
  const uint64_t key = keys[root];
  for (int64_t child; (child = 2 * root + 1) < count; root = child) {
    if (child + 1 < count && keys[child + 1] > keys[child]) ++child;
    if (keys[child] <= key) break;
    keys[root] = keys[child];
  }
  keys[root] = key;
}

static void sort_keys(uint64_t* keys, int64_t count) {
  for (int64_t root = count / 2 - 1; root >= 0; --root) sift(keys, root, count);
  for (int64_t last = count - 1; last > 0; --last) {
    const uint64_t largest_key = keys[0];
    keys[0] = keys[last];
    keys[last] = largest_key;
    sift(keys, 0, last);
  }
}

// Counts 16 tokens of buckets [first, end).
static inline void count_tokens(const DrawRow& r, f16v below, f16v weights, int first, int end) {
  const i16v bucket = buckets_of(below == below ? below : splat(32.0f));
  const i16v hits = (bucket >= first) & (bucket < end) & (i16v)(weights > f16v{});
  if (!any(hits)) return;
  for (int i = 0; i < kLanes; ++i) {
    if (!hits[i]) continue;
    ++r.counts[bucket[i]];
    r.masses[bucket[i]] += static_cast<int64_t>(weights[i]);
  }
}

// The far buckets, once a walk over the buckets comes to them.
static void fill_far(const DrawRow& r, int bucket) {
  if (bucket != kNearBuckets) return;
  memset(r.counts + kNearBuckets, 0, (kDrawBuckets - kNearBuckets) * sizeof(int32_t));
  memset(r.masses + kNearBuckets, 0, (kDrawBuckets - kNearBuckets) * sizeof(int64_t));
  for (int64_t at = 0; at < r.vocab; at += kLanes) {
    count_tokens(r, below_best(some_logits(r.logits, at, r.vocab), r.best, r.temperature), load(r.weights + at), kNearBuckets, kDrawBuckets);
  }
}

// The ranks of a bucket's tokens below `limit`, best first: (bits of `below`, id).
static int64_t bucket_keys(const DrawRow& r, int bucket, uint64_t limit) {
  int64_t count = 0;
  for (int64_t at = 0; at < r.vocab; at += kLanes) {
    const f16v below = below_best(some_logits(r.logits, at, r.vocab), r.best, r.temperature);
    const i16v hits = (buckets_of(below) == bucket) & (i16v)(load(r.weights + at) > f16v{});
    if (!any(hits)) continue;
    const u16v bits = (u16v)below;
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t key = static_cast<uint64_t>(bits[i]) << 32 | static_cast<uint64_t>(at + i);
      if (hits[i] && key < limit) r.keys[count++] = key;
    }
  }
  sort_keys(r.keys, count);
  return count;
}

static inline int64_t weight_of(const DrawRow& r, uint64_t key) { return static_cast<int64_t>(r.weights[key & 0xffffffff]); }

// The tokens ranked before the returned key stay; `mass` becomes theirs.
static uint64_t after_top_k(const DrawRow& r, int64_t top_k, int64_t* mass) {
  int64_t count = 0, kept = 0;
  for (int bucket = 0; bucket < kDrawBuckets; ++bucket) {
    fill_far(r, bucket);
    if (count + r.counts[bucket] >= top_k) {
      const int64_t wanted = top_k - count, found = bucket_keys(r, bucket, UINT64_MAX);
      int64_t place = 0;
      for (; place < wanted && place < found; ++place) kept += weight_of(r, r.keys[place]);
      *mass = kept;
      return place > 0 ? r.keys[place - 1] + 1 : static_cast<uint64_t>(0);
    }
    count += r.counts[bucket];
    kept += r.masses[bucket];
  }
  return UINT64_MAX;
}

static uint64_t after_top_p(const DrawRow& r, double top_p, uint64_t limit, int64_t* mass) {
  const double wanted = top_p * static_cast<double>(*mass);
  int64_t before = 0;
  bool first = true;
  for (int bucket = 0; bucket < kDrawBuckets; ++bucket) {
    fill_far(r, bucket);
    if (r.counts[bucket] == 0) continue;
    if (static_cast<double>(before + r.masses[bucket]) < wanted) {
      before += r.masses[bucket];
      first = false;
      continue;
    }
    const int64_t found = bucket_keys(r, bucket, limit);
    int64_t place = 0;
    for (; place < found && ((first && place == 0) || static_cast<double>(before) < wanted); ++place) before += weight_of(r, r.keys[place]);
    *mass = before;
    return place > 0 ? r.keys[place - 1] + 1 : static_cast<uint64_t>(r.keys[0]);
  }
  return limit;
}

// The first kept token, by id, whose running weight exceeds `target`.
static int64_t pick(const DrawRow& r, uint64_t limit, int64_t target) {
  const uint32_t border = static_cast<uint32_t>(limit >> 32), border_id = static_cast<uint32_t>(limit);
  int64_t running = 0;
  for (int64_t at = 0; at < r.vocab; at += kLanes) {
    f16v weights = load(r.weights + at);
    if (limit != UINT64_MAX) {
      const u16v bits = (u16v)below_best(some_logits(r.logits, at, r.vocab), r.best, r.temperature);
      const u16v ids = u16v{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + static_cast<uint32_t>(at);
      const u16v stays = (u16v)(bits < border) | ((u16v)(bits == border) & (u16v)(ids < border_id));
      weights = (f16v)((u16v)weights & stays);
    }
    const int64_t mass = sum_of(whole_pairs(weights));
    if (running + mass <= target) {
      running += mass;
      continue;
    }
    for (int i = 0; i < kLanes; ++i) {
      running += static_cast<int64_t>(weights[i]);
      if (running > target) return at + i;
    }
  }
  return 0;
}

// Whole weights of 16 tokens; a NaN has none, nor has what is below `least`.
static inline f16v whole_weights(f16v below, f16v least) {
  f16v w = exp(-below) * kWeightScale;
  w = w >= splat(1.0f) && w >= least ? w : f16v{};
  const f16v small = w < splat(0x1p24f) ? w : f16v{};
  return w < splat(0x1p24f) ? __builtin_convertvector(__builtin_convertvector(small, i16v), f16v) : w;
}

// The least float that is not below `value`.
static inline float at_least(int64_t value) {
  const float rounded = static_cast<float>(value);
  uint32_t bits;
  memcpy(&bits, &rounded, 4);
  bits += static_cast<int64_t>(rounded) < value;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

static void draw(const DrawTask* task, int row, uint8_t* scratch) {
  const DrawTask& t = *task;
  const int64_t padded = (t.vocab + kLanes - 1) / kLanes * kLanes;
  uint64_t* keys = reinterpret_cast<uint64_t*>(scratch);
  int64_t* masses = reinterpret_cast<int64_t*>(keys + padded);
  int32_t* counts = reinterpret_cast<int32_t*>(masses + kDrawBuckets);
  float* weights = reinterpret_cast<float*>(counts + kDrawBuckets);
  const DrawRow r{t.logits + row * t.stride, weights, t.best[row], t.temperature[row], t.vocab, counts, masses, keys};
  const bool few = t.top_k[row] < t.vocab, nucleus = t.top_p[row] < 1.0, ranked = few || nucleus;
  const f16v least = splat(t.min_weight != nullptr ? at_least(t.min_weight[row]) : 0.0f);
  if (ranked) {
    memset(counts, 0, kNearBuckets * sizeof(int32_t));
    memset(masses, 0, kNearBuckets * sizeof(int64_t));
  }
  l8v sums = {};
  for (int64_t at = 0; at < t.vocab; at += kLanes) {
    const f16v below = below_best(some_logits(r.logits, at, t.vocab), r.best, r.temperature);
    const f16v w = whole_weights(below, least);
    store(weights + at, w);
    sums += whole_pairs(w);
    if (ranked) count_tokens(r, below, w, 0, kNearBuckets);
  }
  int64_t mass = sum_of(sums);
  uint64_t limit = UINT64_MAX;
  if (few) limit = after_top_k(r, t.top_k[row], &mass);
  if (nucleus && mass > 0) limit = after_top_p(r, t.top_p[row], limit, &mass);
  int64_t target = static_cast<int64_t>(t.uniforms[row] * static_cast<double>(mass));
  if (target > mass - 1) target = mass - 1;
  t.out[row] = mass > 0 ? pick(r, limit, target) : 0;
}

// The place of one token, the best few, and the sum of all weights.
static void rank(const RankTask* task, int row) {
  const RankTask& t = *task;
  const float* logits = t.logits + row * t.stride;
  const float own = t.best[row] - logits[t.token_ids[row]];
  uint32_t own_bits;
  memcpy(&own_bits, &own, 4);
  own_bits &= 0x7fffffff;
  const uint32_t own_id = static_cast<uint32_t>(t.token_ids[row]);
  uint64_t best_keys[kMostRanked];
  int found = 0;
  uint32_t worst = 0xffffffff;  // magnitude of the last of them, once there are enough
  l8v sums = {};
  i16v before = {};
  for (int64_t at = 0; at < t.vocab; at += kLanes) {
    const f16v below = below_best(some_logits(logits, at, t.vocab), t.best[row], 1.0f);
    const u16v bits = (u16v)below;
    const u16v ids = u16v{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + static_cast<uint32_t>(at);
    const i16v live = (i16v)(ids < static_cast<uint32_t>(t.vocab));
    sums += whole_pairs(whole_weights(below, f16v{}));
    before -= live & ((i16v)(bits < own_bits) | ((i16v)(bits == own_bits) & (i16v)(ids < own_id)));
    const i16v hits = live & (i16v)(bits < worst);  // ids ascend: an equal one that comes later ranks later
    if (t.top == 0 || !any(hits)) continue;
    for (int i = 0; i < kLanes; ++i) {
      if (!hits[i] || bits[i] >= worst) continue;
      const uint64_t key = static_cast<uint64_t>(bits[i]) << 32 | static_cast<uint64_t>(at + i);
      int place = found < t.top ? found++ : t.top - 1;
      for (; place > 0 && best_keys[place - 1] > key; --place) best_keys[place] = best_keys[place - 1];
      best_keys[place] = key;
      if (found == t.top) worst = static_cast<uint32_t>(best_keys[found - 1] >> 32);
    }
  }
  int64_t rank = 1;
  for (int i = 0; i < kLanes; ++i) rank += before[i];
  t.ranks[row] = rank;
  t.totals[row] = sum_of(sums);
  for (int i = 0; i < t.top; ++i) t.top_ids[static_cast<int64_t>(row) * t.top + i] = i < found ? static_cast<int64_t>(best_keys[i] & 0xffffffff) : 0;
}
