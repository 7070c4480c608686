// Attention of many queries in AMX tiles. Scores are computed transposed, S^T = K Q^T, so that keys are read as they lie in the pages and
// the softmax over keys runs down whole vectors, a query a lane. Then O^T = V^T P^T with V transposed once a chunk. The query heads of a
// key head are stacked: lane m of all tiles is query m / group, head m % group.

static inline bool tiles_serve(const AttentionTask& t, int queries) {
  return t.q_dtype == kBF16 && t.kv_dtype != kF32 && t.softcap == 0 && t.dim % 32 == 0 && t.block_size % 16 == 0 && queries >= 4;
}

static inline void transpose_words(u16v* rows) {  // 16 x 16
  u16v other[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {  // 8 apart
    const u16v a = rows[i & 7], b = rows[(i & 7) + 8];
    other[i] = i < 8 ? HX_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
                     : HX_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {  // 4 apart
    const int base = (i & 8) | (i & 3);
    const u16v a = other[base], b = other[base + 4];
    rows[i] = i & 4 ? HX_SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
                    : HX_SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {  // 2 apart
    const int base = (i & 12) | (i & 1);
    const u16v a = rows[base], b = rows[base + 2];
    other[i] = i & 2 ? HX_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
                     : HX_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {  // neighbours
    const u16v a = other[i & 14], b = other[(i & 14) + 1];
    rows[i] = i & 1 ? HX_SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
                    : HX_SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
  }
}

// int8 keys or values of 32 keys -> bfloat16 [32][dim]. Keys outside [begin, end) are zero.
static inline void widen_keys(const Keys& keys, const void* pages, int first, int begin, int end, uint16_t* out) {
  const AttentionTask& t = keys.t;
  for (int j = 0; j < 32; ++j, out += t.dim) {
    if (first + j < begin || first + j >= end) {
      memset(out, 0, static_cast<size_t>(t.dim) * 2);
      continue;
    }
    const int64_t at = keys.place(first + j);
    const float scale = scale_at(pages, at, t.dim);
    for (int i = 0; i < t.dim; i += kLanes) store_bf16(out + i, load_page<kI8>(pages, at + i) * scale);
  }
}

// Values of 32 keys -> dim / 16 tiles [16 features][32 keys]. Keys outside [begin, end) are zero: their memory may hold anything.
static inline void transpose_values(const Keys& keys, int first, int begin, int end, uint8_t* tiles) {
  const AttentionTask& t = keys.t;
  const uint16_t* v = static_cast<const uint16_t*>(t.v);
  const uint16_t* rows[32];
  alignas(64) uint16_t wide[32 * 256];
  if (t.kv_dtype == kI8) {
    widen_keys(keys, t.v, first, begin, end, wide);
    for (int j = 0; j < 32; ++j) rows[j] = wide + static_cast<int64_t>(j) * t.dim;
  } else {
    for (int j = 0; j < 32; ++j) rows[j] = first + j >= begin && first + j < end ? v + keys.place(first + j) : nullptr;
  }
  for (int feature = 0; feature < t.dim; feature += 16) {
    u16v pairs[16];
    for (int r = 0; r < 16; ++r) {
      const u16v even = rows[2 * r] ? load_halves(rows[2 * r] + feature) : u16v{};
      const u16v odd = rows[2 * r + 1] ? load_halves(rows[2 * r + 1] + feature) : u16v{};
      pairs[r] = even | (odd << 16);
    }
    transpose_words(pairs);
    memcpy(tiles + feature / 16 * 1024, pairs, 1024);
  }
}

// Up to 16 stacked queries from `lane` on -> dim / 32 tiles [16 pairs of features][16 queries][2].
static inline void query_tiles(const AttentionTask& t, int first_token, int head, int group, int lane, int lanes, uint8_t* tiles) {
  const uint16_t* q = static_cast<const uint16_t*>(t.q);
  for (int feature = 0; feature < t.dim; feature += 32) {
    u16v rows[16];
    for (int m = 0; m < 16; ++m) {
      const int64_t token = first_token + (lane + m) / group;
      const uint16_t* source = q + (token * t.heads + head + (lane + m) % group) * t.dim + feature;
      rows[m] = m < lanes ? load_words(source) : u16v{};
    }
    transpose_words(rows);
    memcpy(tiles + feature / 32 * 1024, rows, 1024);
  }
}

// Scores of 16 keys, `stride` bytes apart, for 16 queries -> out [16 keys][16].
static inline void score_tile(const AttentionTask& t, const uint16_t* k, int64_t stride, const uint8_t* queries, float* out) {
  _tile_zero(0);
  for (int feature = 0; feature < t.dim; feature += 32) {
    _tile_loadd(4, k + feature, stride);
    _tile_loadd(5, queries + feature / 32 * 1024, 64);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, out, 64);
}

struct Span {
  int base;  // first key of the first block of 32; a multiple of 16
  int end;   // keys at this one and beyond are not visible to any query of the tile
};

constexpr float kHidden = -1e30f;  // a score that nothing sees; finite, so that differences are not NaN

// 2^x to about 1e-5 of its value, which the rounding to bfloat16 swallows; NaN stays NaN.
static inline __m512 exp2_tile(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(0.009618129f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.055504109f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240226507f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693147181f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// Hides keys [from, to) (places in `scores`) that a lane's query may not see.
static inline void hide(const AttentionTask& t, int base, int from, int to, i16v last_key, float* scores) {
  const i16v first_key = t.window > 0 ? last_key - (t.window - 1) : i16v{};
  for (int j = from; j < to; ++j) {
    const i16v key = i16v{} + (base + j);
    store(scores + 16 * j, ((key <= last_key) & (key >= first_key)) ? load(scores + 16 * j) : splat(kHidden));
  }
}

// Scores [keys][16] -> probabilities (not yet divided) as tiles [16 pairs of keys][16 queries][2]; returns the sums.
static inline f16v softmax_tile(const AttentionTask& t, const Span& span, i16v last_key, float* scores, uint8_t* probabilities) {
  const int count = (span.end - span.base + 31) / 32 * 32;
  const int clear = last_key[0] + 1 - span.base;  // keys before this one are seen by every query, but for the window
  hide(t, span.base, t.window > 0 || clear < 0 ? 0 : clear, count, last_key, scores);
  f16v best[4] = {splat(kHidden), splat(kHidden), splat(kHidden), splat(kHidden)};
  for (int j = 0; j < count; j += 4) {
    for (int i = 0; i < 4; ++i) best[i] = max(best[i], load(scores + 16 * (j + i)));
  }
  const float to_base_2 = t.scale * 1.44269504088896341f;
  const __m512 factor = _mm512_set1_ps(to_base_2), top = (__m512)(max(max(best[0], best[1]), max(best[2], best[3])) * to_base_2);
  f16v total = {};
#pragma GCC unroll 2
  for (int j = 0; j < count; j += 2) {
    const __m512 even = exp2_tile(_mm512_fmsub_ps((__m512)load(scores + 16 * j), factor, top));
    const __m512 odd = exp2_tile(_mm512_fmsub_ps((__m512)load(scores + 16 * j + 16), factor, top));
    total += (f16v)even + (f16v)odd;
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    _mm512_storeu_si512(probabilities + 32 * j, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  return total;
}

// out [16 queries][64 features from `feature`] = P V.
static inline void mix_tiles(const AttentionTask& t, int blocks, int feature, const uint8_t* probabilities, const uint8_t* values, float* out) {
  const int parts = t.dim - feature < 64 ? (t.dim - feature) / 16 : 4;
  const int64_t block_bytes = static_cast<int64_t>(t.dim) / 16 * 1024;
  values += feature / 16 * 1024;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int block = 0; block < blocks; ++block) {
    const uint8_t* v = values + block * block_bytes;
    _tile_loadd(5, probabilities + block * 1024, 64);
    _tile_loadd(4, v, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, v + 1024, 64);
    _tile_dpbf16ps(1, 6, 5);
    if (parts == 4) {
      _tile_loadd(4, v + 2048, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, v + 3072, 64);
      _tile_dpbf16ps(3, 6, 5);
    }
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  if (parts == 4) {
    _tile_stored(2, out + 512, 64);
    _tile_stored(3, out + 768, 64);
  }
  for (int part = 0; part < parts; ++part) transpose_words(reinterpret_cast<u16v*>(out + 256 * part));
}

static void attend_tiles(const Keys& keys, int row, int low, int high, uint8_t* scratch) {
  const AttentionTask& t = keys.t;
  const int group = t.heads / t.kv_heads, head = keys.head * group;
  const int queries = t.query_start[row + 1] - t.query_start[row], computed = t.seq_lens[row] - queries;
  const int oldest = computed + low + 1 - t.window;  // first key that the first query sees
  const int begin = t.window > 0 && oldest > 0 ? oldest : 0, base = begin / 16 * 16;
  const int end = computed + high;
  const int blocks = (end - base + 31) / 32;
  uint8_t* values = scratch;
  uint8_t* queries_at = values + static_cast<int64_t>(blocks) * t.dim * 64;
  uint8_t* probabilities = queries_at + t.dim * 32;
  float* scores = reinterpret_cast<float*>(probabilities + static_cast<int64_t>(blocks) * 1024);
  // keys of int8 pages, widened once a chunk: each 16 queries read them again
  uint16_t* wide = reinterpret_cast<uint16_t*>(scores + static_cast<int64_t>(blocks) * 512);
  const bool widened = t.kv_dtype == kI8;
  const int64_t stride = widened ? t.dim * 2 : static_cast<int64_t>(t.kv_heads) * t.dim * 2;
  for (int block = 0; block < blocks; ++block) {
    if (widened) widen_keys(keys, t.k, base + 32 * block, begin, end, wide + static_cast<int64_t>(block) * t.dim * 32);
    transpose_values(keys, base + 32 * block, begin, end, values + static_cast<int64_t>(block) * t.dim * 64);
  }
  configure_tiles();
  alignas(64) float out[1024];
  const int first_token = t.query_start[row] + low, lanes_total = (high - low) * group;
  for (int lane = 0; lane < lanes_total; lane += 16) {
    const int lanes = lanes_total - lane < 16 ? lanes_total - lane : 16;
    query_tiles(t, first_token, head, group, lane, lanes, queries_at);
    const Span span{base, computed + low + (lane + lanes - 1) / group + 1};
    const int count = (span.end - base + 31) / 32;
    for (int key = base; key < base + 32 * count; key += 16) {
      if (key >= end) continue;
      const uint16_t* k = widened ? wide + static_cast<int64_t>(key - base) * t.dim : static_cast<const uint16_t*>(t.k) + keys.place(key);
      score_tile(t, k, stride, queries_at, scores + static_cast<int64_t>(key - base) * 16);
    }
    i16v last_key;
    for (int m = 0; m < 16; ++m) last_key[m] = computed + low + (lane + (m < lanes ? m : lanes - 1)) / group;
    const f16v total = softmax_tile(t, span, last_key, scores, probabilities);
    const f16v inverse = 1.0f / total;
    for (int feature = 0; feature < t.dim; feature += 64) {
      mix_tiles(t, count, feature, probabilities, values, out);
      const int parts = t.dim - feature < 64 ? (t.dim - feature) / 16 : 4;
      for (int m = 0; m < lanes; ++m) {
        const int64_t token = first_token + (lane + m) / group;
        const int64_t at = token * t.ldo + static_cast<int64_t>(head + (lane + m) % group) * t.dim + feature;
        for (int part = 0; part < parts; ++part) {
          store_from_float(t.out, t.out_dtype, at + 16 * part, load(out + 256 * part + 16 * m) * inverse[m]);
        }
      }
    }
  }
  _tile_release();
}
