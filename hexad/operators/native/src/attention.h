// Causal attention over paged keys and values, for one row and one key head at a time: scores of every visible key, softmax, sum of
// values. Query heads that share a key head go together, so that keys and values are read once. Included once per instruction set.

constexpr int kHeadBlock = 4;  // query heads whose sums stay in registers together

struct Keys {
  const AttentionTask& t;
  const int32_t* table;
  int head;

  int64_t place(int key) const {
    const int64_t slot = static_cast<int64_t>(table[key / t.block_size]) * t.block_size + key % t.block_size;
    return (slot * t.kv_heads + head) * t.kv_width;
  }
};


constexpr int kAhead = 32;  // keys whose memory is asked for before it is needed

// Where keys [first, end) lie -> out[0 ...], padded by repeating the last one to whole vectors and kAhead keys more.
static inline void places(const Keys& keys, int first, int end, int64_t* out) {
  const AttentionTask& t = keys.t;
  const int64_t step = static_cast<int64_t>(t.kv_heads) * t.kv_width;
  int count = 0;
  for (int key = first; key < end;) {
    const int in_page = t.block_size - key % t.block_size, run = end - key < in_page ? end - key : in_page;
    const int64_t at = keys.place(key);
    for (int j = 0; j < run; ++j) out[count++] = at + j * step;
    key += run;
  }
  const int padded = (count + kLanes - 1) / kLanes * kLanes + kAhead;
  for (const int64_t last = out[count - 1]; count < padded; ++count) out[count] = last;
}

static inline void prefetch(const void* base, int32_t dtype, int64_t at, int dim) {
  const int bytes = dtype == kI8 ? 1 : dtype == kBF16 ? 2 : 4;
  const char* memory = static_cast<const char*>(base) + at * bytes;
  for (int line = 0; line < dim * bytes; line += 64) __builtin_prefetch(memory + line);
}

// 16 numbers of a page; those of int8 ones without their scale.
template <int kKvDtype>
static inline f16v load_page(const void* base, int64_t at) {
  return kKvDtype == kI8 ? from_int8(static_cast<const uint8_t*>(base) + at) : load_as_float(base, kKvDtype, at);
}

// The scale of the int8 head at `at`.
static inline float scale_at(const void* base, int64_t at, int dim) {
  float scale;
  memcpy(&scale, static_cast<const uint8_t*>(base) + at + dim, kScaleBytes);
  return scale;
}

// The scales of 16 of them.
static inline f16v scales_at(const void* base, const int64_t* at, int dim) {
  f16v scales;
  for (int j = 0; j < kLanes; ++j) scales[j] = scale_at(base, at[j], dim);
  return scales;
}

// Queries of kHeads heads as the scores take them: float32 times the scale, or bfloat16 pairs.
template <int kHeads>
struct Queries {
  alignas(64) float wide[kHeads * 256];
  const uint16_t* narrow;  // null: use `wide`, which is scaled
};

// Scores of 16 keys for kHeads queries, unscaled if they come from bfloat16.
template <int kHeads, int kKvDtype>
static inline void score_block(const AttentionTask& t, const Queries<kHeads>& q, const int64_t* at, f16v* scores) {
  f16v terms[kHeads][16];
  for (int j = 0; j < 16; ++j) {
    prefetch(t.k, kKvDtype, at[j + kAhead], t.dim);
#if HX_BF16
    if (kKvDtype == kBF16 && q.narrow != nullptr) {
      __m512 acc[kHeads];
      for (int h = 0; h < kHeads; ++h) acc[h] = _mm512_setzero_ps();
      for (int i = 0; i < t.dim; i += 32) {
        const __m512bh k = (__m512bh)_mm512_loadu_si512(static_cast<const uint16_t*>(t.k) + at[j] + i);
        for (int h = 0; h < kHeads; ++h) acc[h] = _mm512_dpbf16_ps(acc[h], k, (__m512bh)_mm512_loadu_si512(q.narrow + h * t.dim + i));
      }
      for (int h = 0; h < kHeads; ++h) terms[h][j] = (f16v)acc[h];
      continue;
    }
#endif
    f16v acc[kHeads];
    for (int h = 0; h < kHeads; ++h) acc[h] = f16v{};
    for (int i = 0; i < t.dim; i += kLanes) {
      const f16v k = load_page<kKvDtype>(t.k, at[j] + i);
      for (int h = 0; h < kHeads; ++h) acc[h] += load(q.wide + h * t.dim + i) * k;
    }
    for (int h = 0; h < kHeads; ++h) terms[h][j] = acc[h];
  }
  for (int h = 0; h < kHeads; ++h) scores[h] = sums_of(terms[h]);
}

// Softmax of scores[0, count), padded to whole vectors, in place (not yet divided); returns the sum.
static inline float softmax(float* scores, int count) {
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int i = count; i < padded; ++i) scores[i] = -INFINITY;
  f16v best = load(scores);
  for (int i = kLanes; i < padded; i += kLanes) best = max(best, load(scores + i));
  const f16v top = splat(largest(best));
  f16v total = {};
  for (int i = 0; i < padded; i += kLanes) {
    const f16v p = exp(load(scores + i) - top);
    store(scores + i, p);
    total += p;
  }
  for (int i = count; i < padded; ++i) scores[i] = 0;
  // e^(-inf) is clamped to about 1e-38, so the padding adds nothing that float32 can hold beside the largest term, which is 1.
  return sum(total);
}

// acc [kHeads][kVectors] = sum of p * v over `count` keys, features from `feature` on.
template <int kHeads, int kVectors, int kKvDtype>
static inline void mix(const AttentionTask& t, const int64_t* at, int count, const float* scores, int64_t stride, int feature, f16v (*acc)[4]) {
  f16v total[kHeads][kVectors];
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kVectors; ++i) total[h][i] = f16v{};
  }
  for (int j = 0; j < count; ++j) {
    prefetch(t.v, kKvDtype, at[j + kAhead] + feature, kVectors * kLanes);
    f16v v[kVectors];
    for (int i = 0; i < kVectors; ++i) v[i] = load_page<kKvDtype>(t.v, at[j] + feature + i * kLanes);
    for (int h = 0; h < kHeads; ++h) {
      const float p = scores[h * stride + j];
      for (int i = 0; i < kVectors; ++i) total[h][i] += p * v[i];
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kVectors; ++i) acc[h][i] = total[h][i];
  }
}

template <int kHeads, int kKvDtype>
static inline void attend_heads(const AttentionTask& t, int token, int head, const int64_t* at, int count, float* scores, int64_t stride) {
  Queries<kHeads> q;
  const int64_t own = (static_cast<int64_t>(token) * t.heads + head) * t.dim;
  const bool pairs = HX_BF16 && kKvDtype == kBF16 && t.q_dtype == kBF16 && t.dim % 32 == 0;
  q.narrow = pairs ? static_cast<const uint16_t*>(t.q) + own : nullptr;
  if (!pairs) {
    for (int i = 0; i < kHeads * t.dim; i += kLanes) store(q.wide + i, load_as_float(t.q, t.q_dtype, own + i));
  }
  for (int key = 0; key < count; key += kLanes) {
    f16v block[kHeads];
    score_block<kHeads, kKvDtype>(t, q, at + key, block);
    if (kKvDtype == kI8) {
      const f16v scales = scales_at(t.k, at + key, t.dim);
      for (int h = 0; h < kHeads; ++h) block[h] *= scales;
    }
    for (int h = 0; h < kHeads; ++h) {
      const f16v s = block[h] * t.scale;
      store(scores + h * stride + key, t.softcap > 0 ? t.softcap * tanh(s / t.softcap) : s);
    }
  }
  float inverse[kHeads];
  for (int j = 0; j < kAhead && j < count; ++j) prefetch(t.v, kKvDtype, at[j], t.dim);
  for (int h = 0; h < kHeads; ++h) inverse[h] = 1.0f / softmax(scores + h * stride, count);
  if (kKvDtype == kI8) {
    for (int key = 0; key < count; key += kLanes) {  // padding repeats a visible key's place, and its probability is 0
      const f16v scales = scales_at(t.v, at + key, t.dim);
      for (int h = 0; h < kHeads; ++h) store(scores + h * stride + key, load(scores + h * stride + key) * scales);
    }
  }
  for (int feature = 0; feature < t.dim;) {
    const int left = (t.dim - feature) / kLanes, vectors = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    f16v acc[kHeads][4];
    if (vectors == 4) {
      mix<kHeads, 4, kKvDtype>(t, at, count, scores, stride, feature, acc);
    } else if (vectors == 2) {
      mix<kHeads, 2, kKvDtype>(t, at, count, scores, stride, feature, acc);
    } else {
      mix<kHeads, 1, kKvDtype>(t, at, count, scores, stride, feature, acc);
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < vectors; ++i) {
        const int64_t to = token * t.ldo + static_cast<int64_t>(head + h) * t.dim + feature + i * kLanes;
        store_from_float(t.out, t.out_dtype, to, acc[h][i] * inverse[h]);
      }
    }
    feature += vectors * kLanes;
  }
}

// One query's heads [head, last) over `count` keys.
template <int kKvDtype>
static inline void attend_group(const AttentionTask& t, int token, int head, int last, const int64_t* at, int count, float* scores) {
  const int64_t stride = (static_cast<int64_t>(count) + kLanes - 1) / kLanes * kLanes;
  for (; head + kHeadBlock <= last; head += kHeadBlock) attend_heads<kHeadBlock, kKvDtype>(t, token, head, at, count, scores, stride);
  if (last - head == 3) attend_heads<3, kKvDtype>(t, token, head, at, count, scores, stride);
  if (last - head == 2) attend_heads<2, kKvDtype>(t, token, head, at, count, scores, stride);
  if (last - head == 1) attend_heads<1, kKvDtype>(t, token, head, at, count, scores, stride);
}

// A chunk is a row, a key head and a run of the row's queries.
static void attention(const AttentionTask* task, int chunk, uint8_t* scratch) {
  const AttentionTask& t = *task;
  const int part = chunk % t.chunks_per_row_head, row = chunk / t.chunks_per_row_head / t.kv_heads;
  const int kv_head = chunk / t.chunks_per_row_head % t.kv_heads;
  const int queries = t.query_start[row + 1] - t.query_start[row], length = t.seq_lens[row];
  const int low = part * t.queries_per_chunk;
  const int high = low + t.queries_per_chunk < queries ? low + t.queries_per_chunk : queries;
  if (low >= high || length < queries) return;
  const Keys keys{t, t.block_table + row * t.table_stride, kv_head};
#if HX_AMX
  if (tiles_serve(t, high - low)) return attend_tiles(keys, row, low, high, scratch);
#endif
  const int group = t.heads / t.kv_heads;
  int64_t* at = reinterpret_cast<int64_t*>(scratch);
  float* scores = reinterpret_cast<float*>(at + (length + kLanes - 1) / kLanes * kLanes + kAhead);
  for (int query = low; query < high; ++query) {
    const int end = length - queries + query + 1;
    const int first = t.window > 0 && end > t.window ? end - t.window : 0;
    const int token = t.query_start[row] + query;
    const int head = kv_head * group;
    places(keys, first, end, at);
    if (t.kv_dtype == kBF16) {
      attend_group<kBF16>(t, token, head, head + group, at, end - first, scores);
    } else if (t.kv_dtype == kI8) {
      attend_group<kI8>(t, token, head, head + group, at, end - first, scores);
    } else {
      attend_group<kF32>(t, token, head, head + group, at, end - first, scores);
    }
  }
}
