// Products of packed weights: one panel at a time for a few rows, in AMX tiles for many. Included once per instruction set.

// ---- what is shared: scales, one row, the end of a product ----

static inline const uint8_t* panel_of(const Weight& w, int64_t panel) { return w.data + panel * w.panel_bytes; }
static inline const uint8_t* scales_of(const Weight& w, const uint8_t* panel, int group) {
  return panel + w.scale_offset + group * w.scale_stride;
}
static inline const uint8_t* minima_of(const Weight& w, const uint8_t* panel, int group) { return panel + w.min_offset + group * 32; }

constexpr bool has_k_scales(int format) { return format == kInt4K || format == kInt6K; }
constexpr bool has_6_bits(int format) { return format == kInt6 || format == kInt6K; }
constexpr bool has_minima(int format) { return format != kInt8 && format != kBFloat16; }  // it may
constexpr int code_bytes(int format) {
  return has_6_bits(format) ? 384 : format == kInt8 ? 512 : format == kBFloat16 ? 1024 : 256;
}

// What scales one group: its first 16 columns, the other 16, all.
struct GroupScales {
  f16v first, second, minimum;
};

// Products of a float16 and 6 or 8 bits are exact in float32.
static inline GroupScales k_scales(const Weight& w, const uint8_t* panel, int group) {
  const uint8_t* bytes = panel + w.scale_offset + group * 32;
  const uint8_t* multipliers = panel + w.min_offset + group / kSuper * (w.halves ? 32 : 64);
  const f16v step = from_f16(multipliers);
  if (w.halves) return {step * from_int8(bytes), step * from_int8(bytes + 16), f16v{}};
  const f16v scale = step * from_uint8(bytes);
  return {scale, scale, -(from_f16(multipliers + 32) * from_uint8(bytes + 16))};
}

static inline GroupScales group_scales(const Weight& w, int format, const uint8_t* panel, int group) {
  if (has_k_scales(format)) return k_scales(w, panel, group);
  const f16v scale = format == kBFloat16 ? splat(1.0f) : from_f16(scales_of(w, panel, group));
  return {scale, scale, w.has_min ? from_f16(minima_of(w, panel, group)) : f16v{}};
}

// Lanes [n0, n0 + 16) of one row of a product -> where the task wants them.
static inline void finish(const LinearTask& t, int64_t row, int64_t n0, f16v y) {
  const int64_t end = t.weight->out_features;
  const int count = end - n0 < kLanes ? static_cast<int>(end - n0) : kLanes;
  if (t.weight->bias != nullptr) y += load(t.weight->bias + n0);
  if (t.epilogue == kAct) y = activate(y, t.activation);
  if (t.out_dtype == kBF16) {
    uint16_t* out = static_cast<uint16_t*>(t.out) + row * t.ldo + n0;
    if (count == kLanes) return store_bf16(out, y);
    for (int i = 0; i < count; ++i) out[i] = round_bf16(y[i]);
    return;
  }
  float* out = static_cast<float*>(t.out) + row * t.ldo + n0;
  if (count == kLanes) return store(out, t.epilogue == kAdd ? load(out) + y : y);
  for (int i = 0; i < count; ++i) out[i] = t.epilogue == kAdd ? out[i] + y[i] : y[i];
}

// A gate's and an up's lanes -> act(gate) * up. The halves are whole panels.
static inline void finish_gated(const LinearTask& t, int64_t row, int64_t n0, f16v gate, f16v up) {
  if (t.weight->bias != nullptr) {
    gate += load(t.weight->bias + n0);
    up += load(t.weight->bias + t.weight->out_features / 2 + n0);
  }
  const f16v y = activate(gate, t.activation) * up;
  if (t.out_dtype == kBF16) {
    store_bf16(static_cast<uint16_t*>(t.out) + row * t.ldo + n0, y);
  } else {
    store(static_cast<float*>(t.out) + row * t.ldo + n0, y);
  }
}

// Column 2 * pair + parity of one group, for the 16 rows of a panel, without scale.
static inline f16v codes_of(const Weight& w, const uint8_t* group, int pair, int parity) {
  if (w.format != kInt8 && w.format != kBFloat16) {
    const u16v words = load_words(group + pair / 4 * 64);
    u16v codes = (words >> (4 * (pair % 4) + 16 * parity)) & 15;
    if (has_6_bits(w.format)) codes |= ((load_words(group + 256 + pair / 8 * 64) >> (2 * (pair % 8) + 16 * parity)) & 3) << 4;
    return __builtin_convertvector((i16v)codes, f16v) - w.zero;
  }
  if (w.format == kInt8) {
    s16v both;
    memcpy(&both, group + pair * 32, 32);
    const i16v wide = __builtin_convertvector(both, i16v);
    return __builtin_convertvector(parity ? wide >> 8 : (i16v)((u16v)wide << 24) >> 24, f16v);
  }
  const u16v both = load_words(group + pair * 64);
  return (f16v)(parity ? both & 0xffff0000u : both << 16);
}

static void dequantize_row(const Weight* weight, int64_t row, float* out) {
  const Weight& w = *weight;
  const uint8_t* panel = panel_of(w, row / kLanes);
  const int lane = static_cast<int>(row % kLanes);
  for (int group = 0; group < w.groups; ++group) {
    const GroupScales scales = group_scales(w, w.format, panel, group);
    for (int k = 0; k < kGroup && group * kGroup + k < w.in_features; ++k) {
      const f16v codes = codes_of(w, panel + static_cast<int64_t>(group) * code_bytes(w.format), k / 2, k % 2);
      out[group * kGroup + k] = codes[lane] * (k < kGroup / 2 ? scales.first : scales.second)[lane] + scales.minimum[lane];
    }
  }
}

// Whether GCC inlines a panel by itself depends on how many formats there are: a call would cost a small product 4 %.
#define HX_INLINE __attribute__((always_inline)) static inline

// ---- float32 activations: any instruction set ----

template <int kRows, int kFormat>
static inline void panel_f32(const Weight& w, const uint8_t* panel, const float* x, int64_t ldx, const float* sums, f16v* y) {
  for (int m = 0; m < kRows; ++m) y[m] = f16v{};
  for (int group = 0; group < w.groups; ++group) {
    const uint8_t* codes = panel + group * code_bytes(kFormat);
    const float* xg = x + group * kGroup;
    GroupScales scales{};
    if (has_k_scales(kFormat)) scales = k_scales(w, panel, group);
    f16v acc[kRows];
    for (int m = 0; m < kRows; ++m) acc[m] = f16v{};
    for (int z = 0; z < 4; ++z) {
      if (has_k_scales(kFormat) && z == 2 && w.halves) {
        for (int m = 0; m < kRows; ++m) y[m] += acc[m] * scales.first, acc[m] = f16v{};
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {  // unrolled, so that shifts are by constants
#pragma GCC unroll 2
        for (int parity = 0; parity < 2; ++parity) {
          Weight local;  // codes_of reads the format and the zero alone; constants here fold its branches away
          local.format = kFormat;
          local.zero = w.zero;
          const f16v c = codes_of(local, codes, 4 * z + i, parity);
          for (int m = 0; m < kRows; ++m) acc[m] += c * xg[m * ldx + 8 * z + 2 * i + parity];
        }
      }
    }
    if (kFormat == kBFloat16) {
      for (int m = 0; m < kRows; ++m) y[m] += acc[m];
      continue;
    }
    const f16v scale = has_k_scales(kFormat) ? scales.second : from_f16(scales_of(w, panel, group));
    for (int m = 0; m < kRows; ++m) y[m] += acc[m] * scale;
    if (has_minima(kFormat) && w.has_min) {
      const f16v minimum = has_k_scales(kFormat) ? scales.minimum : from_f16(minima_of(w, panel, group));
      for (int m = 0; m < kRows; ++m) y[m] += minimum * sums[m * w.groups + group];
    }
  }
}

#if HX_BF16
// ---- bfloat16 weights and activations, one dot product at a time ----

// Columns 2 * pair and the next, 16 bits each, in every lane.
static inline __m512i pair_bits(const void* x, int64_t pair) {
  uint32_t bits;
  memcpy(&bits, static_cast<const uint8_t*>(x) + 4 * pair, 4);
  return _mm512_set1_epi32(static_cast<int>(bits));
}

// 6-bit codes of pairs 4 z + i as indices; what lies above their six bits is a neighbour's.
static inline __m512i wide_codes(const uint8_t* group, int z, int i) {
  const __m512i low = _mm512_srli_epi16(_mm512_loadu_si512(group + 64 * z), 4 * i);
  const __m512i upper = _mm512_loadu_si512(group + 256 + z / 2 * 64);
  const int at = 2 * (4 * (z % 2) + i);
  const __m512i high = at < 4 ? _mm512_slli_epi16(upper, 4 - at) : _mm512_srli_epi16(upper, at - 4);
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xca);  // the mask's bits of `low`, the others of `high`
}

template <int kRows>
HX_INLINE void panel_bf16(const Weight& w, const uint8_t* panel, const uint16_t* x, int64_t ldx, f16v* y) {
  constexpr int kChains = kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;  // independent sums hide the latency of the dot product
  __m512 acc[kRows][kChains];
  for (int m = 0; m < kRows; ++m) {
    for (int c = 0; c < kChains; ++c) acc[m][c] = _mm512_setzero_ps();
  }
  for (int group = 0; group < w.groups; ++group) {
    constexpr int kBytes = code_bytes(kBFloat16);
    const uint8_t* numbers = panel + group * kBytes;
    for (int line = 0; line < kBytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(numbers + 4096 + line), _MM_HINT_T0);
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const __m512bh pairs = (__m512bh)_mm512_loadu_si512(numbers + 64 * pair);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) {
        const int c = pair % kChains;
        acc[m][c] = _mm512_dpbf16_ps(acc[m][c], pairs, (__m512bh)pair_bits(x + m * ldx + group * kGroup, pair));
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    y[m] = (f16v)acc[m][0];
    for (int c = 1; c < kChains; ++c) y[m] += (f16v)acc[m][c];
  }
}

// ---- bfloat16 activations as 16-bit whole numbers: codes stay whole numbers, and so does their sum over a group ----
//
// A group's activations are rounded to 1 / 32767 of the largest, finer than bfloat16 does where it matters. Sums are below 2^27. Half the
// instructions of bfloat16 products: no look-up, and twice the rate.

constexpr float kSmallestWord = 1e-30f;  // groups whose largest number is below are zero: 32767 / largest stays finite

// A group that holds a NaN or an infinity has the scale NaN.
static void round_words(const void* x, int64_t ldx, int rows, int groups, int16_t* words, float* scales, int32_t* word_sums, float* sums) {
  for (int row = 0; row < rows; ++row) {
    const uint16_t* from = static_cast<const uint16_t*>(x) + row * ldx;
    for (int group = 0; group < groups; ++group) {
      const f16v a = from_bf16(from + group * kGroup), b = from_bf16(from + group * kGroup + kLanes);
      const float bad = sum(a * 0.0f + b * 0.0f), top = largest(max(max(a, -a), max(b, -b)));
      const bool clean = bad == 0, spread = clean && top >= kSmallestWord;
      const float inverse = spread ? 32767.0f / top : 0.0f, scale = clean ? (spread ? top / 32767.0f : 0.0f) : bad;
      const i16v first = __builtin_convertvector(clean ? round_nearest(a * inverse) : f16v{}, i16v);
      const i16v second = __builtin_convertvector(clean ? round_nearest(b * inverse) : f16v{}, i16v);
      const int64_t at = static_cast<int64_t>(row) * groups + group;
      const s16v low = __builtin_convertvector(first, s16v), high = __builtin_convertvector(second, s16v);
      memcpy(words + at * kGroup, &low, 32);
      memcpy(words + at * kGroup + kLanes, &high, 32);
      const int32_t first_sum = _mm512_reduce_add_epi32((__m512i)first), second_sum = _mm512_reduce_add_epi32((__m512i)second);
      word_sums[2 * at] = first_sum;
      word_sums[2 * at + 1] = second_sum;
      scales[at] = scale;
      sums[at] = scale * static_cast<float>(first_sum + second_sum);
    }
  }
}

template <int kFormat>
static inline __m512i code_words(const uint8_t* group, int z, int i) {
  if (has_6_bits(kFormat)) return _mm512_and_si512(wide_codes(group, z, i), _mm512_set1_epi16(63));
  if (kFormat == kInt8) return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 32 * (4 * z + i))));
  const __m512i words = _mm512_loadu_si512(group + 64 * z);
  const __m512i moved = i == 0 ? words : _mm512_srli_epi16(words, 4 * i);
  return i == 3 ? moved : _mm512_and_si512(moved, _mm512_set1_epi16(15));
}

template <int kChains>
static inline f16v total_of(const __m512i* chains) {
  __m512i total = chains[0];
  for (int c = 1; c < kChains; ++c) total = _mm512_add_epi32(total, chains[c]);
  return (f16v)_mm512_cvtepi32_ps(total);
}

template <int kRows, int kFormat>
HX_INLINE void panel_words(const LinearTask& t, const Weight& w, const uint8_t* panel, int row, f16v* y) {
  constexpr int kChains = kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;  // independent sums hide the latency of the dot product
  const int zero = kFormat == kInt8 ? 0 : static_cast<int>(w.zero);
  const bool halves = has_k_scales(kFormat) && w.halves;
  for (int m = 0; m < kRows; ++m) y[m] = f16v{};
  for (int group = 0; group < w.groups; ++group) {
    constexpr int kBytes = code_bytes(kFormat);
    const uint8_t* codes = panel + group * kBytes;
    for (int line = 0; line < kBytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(codes + 4096 + line), _MM_HINT_T0);
    const int64_t at = static_cast<int64_t>(row) * w.groups + group;
    const int16_t* xg = t.words + at * kGroup;
    __m512i acc[kRows][kChains];
    for (int m = 0; m < kRows; ++m) {
      const int32_t* sums = t.word_sums + 2 * (at + static_cast<int64_t>(m) * w.groups);
      acc[m][0] = _mm512_set1_epi32(-zero * (halves ? sums[0] : sums[0] + sums[1]));
      for (int c = 1; c < kChains; ++c) acc[m][c] = _mm512_setzero_si512();
    }
    GroupScales scales{};
    if (has_k_scales(kFormat)) scales = k_scales(w, panel, group);
#pragma GCC unroll 4
    for (int z = 0; z < 4; ++z) {
      if (has_k_scales(kFormat) && z == 2 && halves) {
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
          const int64_t place = at + static_cast<int64_t>(m) * w.groups;
          y[m] += total_of<kChains>(acc[m]) * (scales.first * t.word_scales[place]);
          acc[m][0] = _mm512_set1_epi32(-zero * t.word_sums[2 * place + 1]);
          for (int c = 1; c < kChains; ++c) acc[m][c] = _mm512_setzero_si512();
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i pairs = code_words<kFormat>(codes, z, i);
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
          const int c = i % kChains;
          acc[m][c] = _mm512_dpwssd_epi32(acc[m][c], pairs, pair_bits(xg + static_cast<int64_t>(m) * w.groups * kGroup, 4 * z + i));
        }
      }
    }
    const f16v scale =
        has_k_scales(kFormat) ? scales.second : (f16v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)scales_of(w, panel, group)));
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) y[m] += total_of<kChains>(acc[m]) * (scale * t.word_scales[at + static_cast<int64_t>(m) * w.groups]);
    if (has_minima(kFormat) && w.has_min) {
      const f16v minimum =
          has_k_scales(kFormat) ? scales.minimum : (f16v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)minima_of(w, panel, group)));
      for (int m = 0; m < kRows; ++m) y[m] += minimum * t.sums[at + static_cast<int64_t>(m) * w.groups];
    }
  }
}
#else
static void round_words(const void*, int64_t, int, int, int16_t*, float*, int32_t*, float*) {}
#endif

// ---- all of them, over any number of rows ----

template <int kRows, int kFormat>
HX_INLINE void panel_rows(const LinearTask& t, const uint8_t* panel, int row, f16v* y) {
  const Weight& w = *t.weight;
  const float* sums = t.sums == nullptr ? nullptr : t.sums + static_cast<int64_t>(row) * w.groups;
#if HX_BF16
  if (t.x_dtype == kBF16) {  // packed codes come with `words` here, or in tiles
    if constexpr (kFormat == kBFloat16) return panel_bf16<kRows>(w, panel, static_cast<const uint16_t*>(t.x) + row * t.ldx, t.ldx, y);
    else return panel_words<kRows, kFormat>(t, w, panel, row, y);
  }
#endif
  panel_f32<kRows, kFormat>(w, panel, static_cast<const float*>(t.x) + row * t.ldx, t.ldx, sums, y);
}

template <int kRows, int kFormat>
static inline void unit_rows(const LinearTask& t, int64_t unit, int row) {
  const Weight& w = *t.weight;
  f16v y[kRows];
  panel_rows<kRows, kFormat>(t, panel_of(w, unit), row, y);
  if (t.epilogue != kGated) {
    for (int m = 0; m < kRows; ++m) finish(t, row + m, unit * kLanes, y[m]);
    return;
  }
  f16v up[kRows];
  panel_rows<kRows, kFormat>(t, panel_of(w, unit + w.panels / 2), row, up);
  for (int m = 0; m < kRows; ++m) finish_gated(t, row + m, unit * kLanes, y[m], up[m]);
}

template <int kFormat>
static void linear_units(const LinearTask& t, int64_t first, int64_t last, uint8_t* scratch) {
#if HX_AMX
  if (t.x_dtype == kBF16 && t.rows >= HX_TILE_ROWS && (kFormat == kBFloat16 || t.words == nullptr)) return linear_tiles<kFormat>(t, first, last, scratch);
#endif
  (void)scratch;
  for (int64_t unit = first; unit < last; ++unit) {
    int row = 0;
    for (; row + 4 <= t.rows; row += 4) unit_rows<4, kFormat>(t, unit, row);
    if (t.rows - row == 3) unit_rows<3, kFormat>(t, unit, row);
    if (t.rows - row == 2) unit_rows<2, kFormat>(t, unit, row);
    if (t.rows - row == 1) unit_rows<1, kFormat>(t, unit, row);
  }
}

static void linear(const LinearTask* task, int chunk, uint8_t* scratch) {
  const LinearTask& t = *task;
  const int64_t units = t.epilogue == kGated ? t.weight->panels / 2 : t.weight->panels;
  const int64_t first = static_cast<int64_t>(chunk) * t.units_per_chunk;
  const int64_t last = first + t.units_per_chunk < units ? first + t.units_per_chunk : units;
  switch (t.weight->format) {
    case kInt4: return linear_units<kInt4>(t, first, last, scratch);
    case kInt8: return linear_units<kInt8>(t, first, last, scratch);
    case kInt6: return linear_units<kInt6>(t, first, last, scratch);
    case kInt4K: return linear_units<kInt4K>(t, first, last, scratch);
    case kInt6K: return linear_units<kInt6K>(t, first, last, scratch);
    default: return linear_units<kBFloat16>(t, first, last, scratch);
  }
}

// What kGated does, for a gate and an up whose products are there already.
static void gate(const float* both, int32_t activation, int64_t half, void* out, int32_t out_dtype) {
  for (int64_t i = 0; i < half; i += kLanes) {  // halves are whole panels
    const f16v y = activate(load(both + i), activation) * load(both + half + i);
    if (out_dtype == kBF16) {
      store_bf16(static_cast<uint16_t*>(out) + i, y);
    } else {
      store(static_cast<float*>(out) + i, y);
    }
  }
}

static void sums(const void* x, int64_t ldx, int32_t dtype, int rows, int groups, float* out) {
  for (int row = 0; row < rows; ++row) {
    for (int group = 0; group < groups; ++group) {
      const int64_t at = row * ldx + group * kGroup;
      const f16v both = dtype == kBF16
                            ? from_bf16(static_cast<const uint16_t*>(x) + at) + from_bf16(static_cast<const uint16_t*>(x) + at + 16)
                            : load(static_cast<const float*>(x) + at) + load(static_cast<const float*>(x) + at + 16);
      out[static_cast<int64_t>(row) * groups + group] = sum(both);
    }
  }
}
