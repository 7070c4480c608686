// Causal attention over paged keys and values, for one row and one key head at a time: scores of every visible key, softmax, sum of
// values. Query heads that share a key head go together, so that keys and values are read once. Included once per instruction set.

constexpr int kHeadBlock = 4;  // query heads whose sums stay in registers together

struct Keys {
  const AttentionTask& t;
  const int32_t* table;
  int head;

  int64_t place(int key) const {
    const int64_t slot = static_cast<int64_t>(table[key / t.block_size]) * t.block_size + key % t.block_size;
    return (slot * t.kv_heads + head) * t.dim;
  }
};


// Scores of keys [first, first + 16) for kHeads queries; keys at `end` and beyond repeat the last one.
template <int kHeads>
static inline void score_block(const Keys& keys, const float* q, int first, int end, f16v* scores) {
  const AttentionTask& t = keys.t;
  f16v terms[kHeads][16];
  for (int j = 0; j < 16; ++j) {
    const int64_t at = keys.place(first + j < end ? first + j : end - 1);
    f16v acc[kHeads];
    for (int h = 0; h < kHeads; ++h) acc[h] = f16v{};
    for (int i = 0; i < t.dim; i += kLanes) {
      const f16v k = load_as_float(t.k, t.kv_dtype, at + i);
      for (int h = 0; h < kHeads; ++h) acc[h] += load(q + h * t.dim + i) * k;
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

// out [kHeads][64 features from `feature`] = sum of p * v over keys [first, end).
template <int kHeads, int kVectors>
static inline void mix(const Keys& keys, const float* scores, int64_t stride, int first, int end, int feature, f16v (*acc)[4]) {
  const AttentionTask& t = keys.t;
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kVectors; ++i) acc[h][i] = f16v{};
  }
  for (int key = first; key < end; ++key) {
    const int64_t at = keys.place(key) + feature;
    f16v v[kVectors];
    for (int i = 0; i < kVectors; ++i) v[i] = load_as_float(t.v, t.kv_dtype, at + i * kLanes);
    for (int h = 0; h < kHeads; ++h) {
      const float p = scores[h * stride + key - first];
      for (int i = 0; i < kVectors; ++i) acc[h][i] += p * v[i];
    }
  }
}

template <int kHeads>
static inline void attend_heads(const Keys& keys, int token, int head, int first, int end, float* scores, int64_t stride) {
  const AttentionTask& t = keys.t;
  float q[kHeads * 256];
  const int64_t width = static_cast<int64_t>(t.heads) * t.dim;
  for (int i = 0; i < kHeads * t.dim; i += kLanes) {
    store(q + i, load_as_float(t.q, t.q_dtype, token * width + static_cast<int64_t>(head) * t.dim + i) * t.scale);
  }
  for (int key = first; key < end; key += kLanes) {
    f16v block[kHeads];
    score_block<kHeads>(keys, q, key, end, block);
    for (int h = 0; h < kHeads; ++h) {
      const f16v s = t.softcap > 0 ? t.softcap * tanh(block[h] / t.softcap) : block[h];
      store(scores + h * stride + key - first, s);
    }
  }
  float inverse[kHeads];
  for (int h = 0; h < kHeads; ++h) inverse[h] = 1.0f / softmax(scores + h * stride, end - first);
  for (int feature = 0; feature < t.dim; feature += 4 * kLanes) {
    const int vectors = t.dim - feature < 4 * kLanes ? (t.dim - feature) / kLanes : 4;
    f16v acc[kHeads][4];
    if (vectors == 4) {
      mix<kHeads, 4>(keys, scores, stride, first, end, feature, acc);
    } else if (vectors == 3) {
      mix<kHeads, 3>(keys, scores, stride, first, end, feature, acc);
    } else if (vectors == 2) {
      mix<kHeads, 2>(keys, scores, stride, first, end, feature, acc);
    } else {
      mix<kHeads, 1>(keys, scores, stride, first, end, feature, acc);
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < vectors; ++i) {
        const int64_t at = token * t.ldo + static_cast<int64_t>(head + h) * t.dim + feature + i * kLanes;
        store_from_float(t.out, t.out_dtype, at, acc[h][i] * inverse[h]);
      }
    }
  }
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
  const int64_t stride = (static_cast<int64_t>(length) + kLanes - 1) / kLanes * kLanes;
  float* scores = reinterpret_cast<float*>(scratch);
  for (int query = low; query < high; ++query) {
    const int end = length - queries + query + 1;
    const int first = t.window > 0 && end > t.window ? end - t.window : 0;
    const int token = t.query_start[row] + query;
    int head = kv_head * group;
    const int last = head + group;
    for (; head + kHeadBlock <= last; head += kHeadBlock) attend_heads<kHeadBlock>(keys, token, head, first, end, scores, stride);
    if (last - head == 3) attend_heads<3>(keys, token, head, first, end, scores, stride);
    if (last - head == 2) attend_heads<2>(keys, token, head, first, end, scores, stride);
    if (last - head == 1) attend_heads<1>(keys, token, head, first, end, scores, stride);
  }
}
