// Vectors of 16 numbers in the compiler's own extension, which becomes whatever the instruction set has. Included inside a namespace of
// its own by each instruction set, so that the linker cannot mix their code.

typedef float f16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t h16v __attribute__((vector_size(32)));
typedef int16_t s16v __attribute__((vector_size(32)));
typedef uint8_t b16v __attribute__((vector_size(16)));
typedef int8_t c16v __attribute__((vector_size(16)));

static inline f16v load(const float* p) {
  f16v v;
  memcpy(&v, p, 64);
  return v;
}

static inline void store(float* p, f16v v) { memcpy(p, &v, 64); }

static inline u16v load_words(const void* p) {
  u16v v;
  memcpy(&v, p, 64);
  return v;
}

static inline u16v load_halves(const void* p) {
  h16v v;
  memcpy(&v, p, 32);
  return __builtin_convertvector(v, u16v);
}

static inline f16v splat(float x) { return f16v{} + x; }

static inline f16v from_uint8(const uint8_t* p) {
#if HX_AVX512
  return (f16v)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  b16v v;
  memcpy(&v, p, 16);
  return __builtin_convertvector(__builtin_convertvector(v, i16v), f16v);
#endif
}

static inline f16v from_int8(const uint8_t* p) {
#if HX_AVX512
  return (f16v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  c16v v;
  memcpy(&v, p, 16);
  return __builtin_convertvector(__builtin_convertvector(v, i16v), f16v);
#endif
}

static inline f16v from_bf16(const uint16_t* p) {
  return (f16v)(load_halves(p) << 16);
}

static inline f16v from_f16(const void* p) {
#if HX_AVX512
  return (f16v)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif HX_NEON
  f16v wide;
  for (int i = 0; i < 4; ++i) {
    float16x4_t half;
    memcpy(&half, static_cast<const uint8_t*>(p) + 8 * i, 8);
    const float32x4_t part = vcvt_f32_f16(half);
    memcpy(reinterpret_cast<uint8_t*>(&wide) + 16 * i, &part, 16);
  }
  return wide;
#else
  const u16v bits = load_halves(p);
  const f16v magnitude = (f16v)((bits & 0x7fff) << 13) * 0x1p112f;
  const u16v special = (u16v)(i16v)(magnitude >= splat(65536.0f)) & 0x7f800000;  // infinity and NaN stay what they are
  return (f16v)((u16v)magnitude | special | ((bits & 0x8000) << 16));
#endif
}

static inline uint16_t round_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline void store_bf16(uint16_t* p, f16v v) {
#if HX_BF16
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &rounded, 32);
#else
  const u16v bits = (u16v)v;
  const u16v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const u16v quiet = (bits >> 16) | 0x40;
  const u16v is_nan = (u16v)(v != v);
  const h16v words = __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), h16v);
  memcpy(p, &words, 32);
#endif
}

#if HX_NEON
struct Quarters {
  float32x4_t part[4];
};

static inline Quarters quarters(f16v v) {
  Quarters q;
  memcpy(&q, &v, 64);
  return q;
}
#endif

static inline float sum(f16v v) {
#if HX_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#elif HX_NEON
  const Quarters q = quarters(v);
  return vaddvq_f32(vaddq_f32(vaddq_f32(q.part[0], q.part[1]), vaddq_f32(q.part[2], q.part[3])));
#else
  float total = 0;
  for (int i = 0; i < 16; ++i) total += v[i];
  return total;
#endif
}

static inline float largest(f16v v) {
#if HX_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#elif HX_NEON
  const Quarters q = quarters(v);
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(q.part[0], q.part[1]), vmaxq_f32(q.part[2], q.part[3])));
#else
  float best = v[0];
  for (int i = 1; i < 16; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

static inline f16v max(f16v a, f16v b) { return a > b ? a : b; }

static inline f16v round_nearest(f16v x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction
  return (x + magic) - magic;
}

// e^x to about 1e-7 of its value; NaN stays NaN.
static inline f16v exp(f16v x) {
  x = x < splat(-87.3f) ? splat(-87.3f) : x;
  x = x > splat(88.3f) ? splat(88.3f) : x;
  const f16v n = round_nearest(x * 1.44269504088896341f);
  const f16v r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  f16v p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const i16v power = (__builtin_convertvector(n, i16v) + 127) << 23;
  const f16v value = p * (f16v)power;
  return x != x ? x : value;
}

static inline f16v tanh(f16v x) {
  const f16v e = exp(2.0f * x);
  return 1.0f - 2.0f / (e + 1.0f);
}

static inline f16v activate(f16v x, int activation) {
  if (activation == kSilu) return x / (1.0f + exp(-x));
  if (activation == kGeluTanh) {
    const f16v inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh(inner));
  }
  if (activation == kGelu) {
    f16v y;
    for (int i = 0; i < 16; ++i) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678118654752f));
    return y;
  }
  if (activation == kRelu) return x > splat(0.0f) ? x : f16v{};
  return x;
}

#if defined(__clang__)
#define HX_SHUFFLE(u, v, ...) __builtin_shufflevector(u, v, __VA_ARGS__)
#else
#define HX_SHUFFLE(u, v, ...) __builtin_shuffle(u, v, (i16v){__VA_ARGS__})
#endif

// Sums of 16 vectors as one vector: lane j is the sum of rows[j].
static inline f16v sums_of(const f16v* rows) {
  f16v a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    const f16v u = rows[2 * i], v = rows[2 * i + 1];
    a[i] = HX_SHUFFLE(u, v, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           HX_SHUFFLE(u, v, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const f16v u = a[2 * i], v = a[2 * i + 1];
    b[i] = HX_SHUFFLE(u, v, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           HX_SHUFFLE(u, v, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    const f16v u = b[2 * i], v = b[2 * i + 1];
    c[i] = HX_SHUFFLE(u, v, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           HX_SHUFFLE(u, v, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  }
  return HX_SHUFFLE(c[0], c[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         HX_SHUFFLE(c[0], c[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
