// What happens to a token between products: norm, rotation with the KV write, changes of dtype. Included once per instruction set.

static inline f16v load_as_float(const void* p, int32_t dtype, int64_t at) {
  return dtype == kBF16 ? from_bf16(static_cast<const uint16_t*>(p) + at) : load(static_cast<const float*>(p) + at);
}

static inline void store_from_float(void* p, int32_t dtype, int64_t at, f16v v) {
  if (dtype == kBF16) return store_bf16(static_cast<uint16_t*>(p) + at, v);
  store(static_cast<float*>(p) + at, v);
}

static inline float scalar_as_float(const void* p, int32_t dtype, int64_t at) {
  if (dtype == kF32) return static_cast<const float*>(p)[at];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(p)[at]) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline void scalar_from_float(void* p, int32_t dtype, int64_t at, float v) {
  if (dtype == kF32) {
    static_cast<float*>(p)[at] = v;
  } else {
    static_cast<uint16_t*>(p)[at] = round_bf16(v);
  }
}

static void widen(const void* in, int32_t in_dtype, void* out, int32_t out_dtype, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_from_float(out, out_dtype, i, load_as_float(in, in_dtype, i));
  for (; i < count; ++i) scalar_from_float(out, out_dtype, i, scalar_as_float(in, in_dtype, i));
}

static inline float inverse_rms(const float* x, int count, float eps) {
  f16v total = {};
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) total += load(x + i) * load(x + i);
  float squares = sum(total);
  for (; i < count; ++i) squares += x[i] * x[i];
  return 1.0f / sqrtf(squares / static_cast<float>(count) + eps);
}

static void norm(const NormTask* task, int chunk) {
  const NormTask& t = *task;
  const int first = chunk * t.rows_per_chunk;
  const int last = first + t.rows_per_chunk < t.rows ? first + t.rows_per_chunk : t.rows;
  for (int row = first; row < last; ++row) {
    const float* x = t.x + static_cast<int64_t>(row) * t.hidden;
    const float factor = inverse_rms(x, t.hidden, t.eps);
    const int64_t at = row * t.ldo;
    int i = 0;
    for (; i + kLanes <= t.hidden; i += kLanes) store_from_float(t.out, t.out_dtype, at + i, load(x + i) * factor * load(t.weight + i));
    for (; i < t.hidden; ++i) scalar_from_float(t.out, t.out_dtype, at + i, x[i] * factor * t.weight[i]);
  }
}

constexpr float kSmallestTop = 1e-30f;  // int8 heads whose largest number is below are zero: 127 / largest stays finite

// One head: (norm,) turn the first `rotary` features, write to `out`.
static inline void turn(const RopeTask& t, const float* x, const float* weight, const float* turns, void* out, int32_t dtype, int64_t at) {
  float normed[512];
  if (weight != nullptr) {
    const float factor = inverse_rms(x, t.dim, t.eps);
    for (int i = 0; i < t.dim; ++i) normed[i] = x[i] * factor * weight[i];
    x = normed;
  }
  const int half = t.rotary / 2;
  if (!t.interleaved && half % kLanes == 0) {
    for (int i = 0; i < half; i += kLanes) {
      const f16v a = load(x + i), b = load(x + half + i), c = load(turns + i), s = load(turns + half + i);
      store_from_float(out, dtype, at + i, a * c - b * s);
      store_from_float(out, dtype, at + half + i, b * c + a * s);
    }
  } else {
    for (int i = 0; i < half; ++i) {
      const int first = t.interleaved ? 2 * i : i, second = t.interleaved ? 2 * i + 1 : i + half;
      const float a = x[first], b = x[second], c = turns[i], s = turns[half + i];
      scalar_from_float(out, dtype, at + first, a * c - b * s);
      scalar_from_float(out, dtype, at + second, b * c + a * s);
    }
  }
  widen(x + t.rotary, kF32, static_cast<uint8_t*>(out) + (at + t.rotary) * (dtype == kBF16 ? 2 : 4), dtype, t.dim - t.rotary);
}

// One head's keys or values -> int8 codes and their scale, largest / 127. A head that holds a NaN or an infinity reads back as NaN.
static inline void quantize_head(const float* x, int dim, uint8_t* out) {
  f16v tops = {}, poison = {};
  for (int i = 0; i < dim; i += kLanes) {
    const f16v value = load(x + i);
    tops = max(max(value, -value), tops);
    poison += value * 0.0f;
  }
  const float top = largest(tops), bad = sum(poison);
  const bool clean = bad == 0, spread = clean && top >= kSmallestTop;
  const float scale = clean ? (spread ? top / 127.0f : 0.0f) : bad, inverse = spread ? 127.0f / top : 0.0f;
  for (int i = 0; i < dim; i += kLanes) {
    const f16v code = clean ? round_nearest(load(x + i) * inverse) : f16v{};
    const c16v bytes = __builtin_convertvector(__builtin_convertvector(code, i16v), c16v);
    memcpy(out + i, &bytes, kLanes);
  }
  memcpy(out + dim, &scale, kScaleBytes);
}

// As `turn` and `widen`, into int8 pages.
static inline void write_int8(const RopeTask& t, const float* k, const float* turns, int64_t place) {
  alignas(64) float turned[512];
  const float* v = k + static_cast<int64_t>(t.kv_heads) * t.dim;
  for (int head = 0; head < t.kv_heads; ++head) {
    const int64_t at = place + static_cast<int64_t>(head) * t.kv_width;
    turn(t, k + head * t.dim, t.k_norm, turns, turned, kF32, 0);
    quantize_head(turned, t.dim, static_cast<uint8_t*>(t.k) + at);
    quantize_head(v + head * t.dim, t.dim, static_cast<uint8_t*>(t.v) + at);
  }
}

static void rope(const RopeTask* task, int chunk) {
  const RopeTask& t = *task;
  const int first = chunk * t.tokens_per_chunk;
  const int last = first + t.tokens_per_chunk < t.tokens ? first + t.tokens_per_chunk : t.tokens;
  const int64_t width = static_cast<int64_t>(t.heads + 2 * t.kv_heads) * t.dim, kv_width = static_cast<int64_t>(t.kv_heads) * t.dim;
  const int64_t page_width = static_cast<int64_t>(t.kv_heads) * t.kv_width;
  for (int token = first; token < last; ++token) {
    const float* qkv = t.qkv + token * width;
    const float* turns = t.rotary ? t.cos_sin + t.positions[token] * t.rotary : nullptr;
    for (int head = 0; head < t.heads; ++head) {
      turn(t, qkv + head * t.dim, t.q_norm, turns, t.q, t.q_dtype, static_cast<int64_t>(token) * t.heads * t.dim + head * t.dim);
    }
    if (t.slots[token] < 0) continue;
    const int64_t place = t.slots[token] * page_width;
    const float* k = qkv + static_cast<int64_t>(t.heads) * t.dim;
    if (t.kv_dtype == kI8) {
      write_int8(t, k, turns, place);
      continue;
    }
    for (int head = 0; head < t.kv_heads; ++head) turn(t, k + head * t.dim, t.k_norm, turns, t.k, t.kv_dtype, place + head * t.dim);
    const int bytes = t.kv_dtype == kBF16 ? 2 : 4;
    widen(k + kv_width, kF32, static_cast<uint8_t*>(t.v) + place * bytes, t.kv_dtype, kv_width);
  }
}
