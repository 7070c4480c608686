// Products of packed weights: one panel at a time for a few rows, in AMX tiles for many. Included once per instruction set.

// ---- what is shared: scales, one row, the end of a product ----

static inline const uint8_t* panel_of(const Weight& w, int64_t panel) { return w.data + panel * w.panel_bytes; }
static inline const uint8_t* scales_of(const Weight& w, const uint8_t* panel, int group) { return panel + w.scale_offset + group * 32; }
static inline const uint8_t* minima_of(const Weight& w, const uint8_t* panel, int group) { return panel + w.min_offset + group * 32; }

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
  if (w.format == kInt4) {
    const u16v words = load_words(group + pair / 4 * 64);
    const i16v codes = (i16v)((words >> (4 * (pair % 4) + 16 * parity)) & 15);
    return __builtin_convertvector(codes, f16v) - w.zero;
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

static inline int64_t group_bytes(const Weight& w) { return w.format == kInt4 ? 256 : w.format == kInt8 ? 512 : 1024; }

static void dequantize_row(const Weight* weight, int64_t row, float* out) {
  const Weight& w = *weight;
  const uint8_t* panel = panel_of(w, row / kLanes);
  const int lane = static_cast<int>(row % kLanes);
  for (int group = 0; group < w.groups; ++group) {
    const f16v scale = w.format == kBFloat16 ? splat(1.0f) : from_f16(scales_of(w, panel, group));
    const f16v minimum = w.has_min ? from_f16(minima_of(w, panel, group)) : f16v{};
    for (int k = 0; k < kGroup && group * kGroup + k < w.in_features; ++k) {
      const f16v codes = codes_of(w, panel + group * group_bytes(w), k / 2, k % 2);
      out[group * kGroup + k] = codes[lane] * scale[lane] + minimum[lane];
    }
  }
}

// ---- float32 activations: any instruction set ----

template <int kRows, int kFormat>
static inline void panel_f32(const Weight& w, const uint8_t* panel, const float* x, int64_t ldx, const float* sums, f16v* y) {
  for (int m = 0; m < kRows; ++m) y[m] = f16v{};
  for (int group = 0; group < w.groups; ++group) {
    const uint8_t* codes = panel + group * (kFormat == kInt4 ? 256 : kFormat == kInt8 ? 512 : 1024);
    const float* xg = x + group * kGroup;
    f16v acc[kRows];
    for (int m = 0; m < kRows; ++m) acc[m] = f16v{};
    for (int z = 0; z < 4; ++z) {
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
    const f16v scale = from_f16(scales_of(w, panel, group));
    for (int m = 0; m < kRows; ++m) y[m] += acc[m] * scale;
    if (kFormat == kInt4 && w.has_min) {
      const f16v minimum = from_f16(minima_of(w, panel, group));
      for (int m = 0; m < kRows; ++m) y[m] += minimum * sums[m * w.groups + group];
    }
  }
}

#if HX_BF16
// ---- bfloat16 activations, one dot product at a time: codes are exact in bfloat16, scales are applied in float32 ----

static inline __m512i pair_bits(const uint16_t* x, int pair) {
  uint32_t bits;
  memcpy(&bits, x + 2 * pair, 4);
  return _mm512_set1_epi32(static_cast<int>(bits));
}

static inline __m512i code_table(float zero) {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i) table[i] = round_bf16(static_cast<float>(i % 16) - zero);  // bit 4 of an index is a neighbour's: ignored
  return _mm512_load_si512(table);
}

template <int kFormat>
static inline __m512bh code_pairs(const uint8_t* group, int z, int i, __m512i table) {
  if (kFormat == kInt4) {
    const __m512i words = _mm512_loadu_si512(group + 64 * z);
    return (__m512bh)_mm512_permutexvar_epi16(i == 0 ? words : _mm512_srli_epi16(words, 4 * i), table);
  }
  if (kFormat == kInt8) {
    const uint8_t* bytes = group + 32 * (4 * z + i);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16))));
    return _mm512_cvtne2ps_pbh(high, low);
  }
  return (__m512bh)_mm512_loadu_si512(group + 64 * (4 * z + i));
}

template <int kRows, int kFormat>
static inline void panel_bf16(const Weight& w, const uint8_t* panel, const uint16_t* x, int64_t ldx, const float* sums, f16v* y) {
  constexpr int kChains = kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;  // independent sums hide the latency of the dot product
  const __m512i table = code_table(w.zero);
  for (int m = 0; m < kRows; ++m) y[m] = f16v{};
  for (int group = 0; group < w.groups; ++group) {
    constexpr int kBytes = kFormat == kInt4 ? 256 : kFormat == kInt8 ? 512 : 1024;
    const uint8_t* codes = panel + group * kBytes;
    for (int line = 0; line < kBytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(codes + 4096 + line), _MM_HINT_T0);
    const uint16_t* xg = x + group * kGroup;
    __m512 acc[kRows][kChains];
    for (int m = 0; m < kRows; ++m) {
      for (int c = 0; c < kChains; ++c) acc[m][c] = _mm512_setzero_ps();
    }
#pragma GCC unroll 4
    for (int z = 0; z < 4; ++z) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512bh pairs = code_pairs<kFormat>(codes, z, i, table);
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
          const int c = i % kChains;
          acc[m][c] = _mm512_dpbf16_ps(acc[m][c], pairs, (__m512bh)pair_bits(xg + m * ldx, 4 * z + i));
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      f16v total = (f16v)acc[m][0];
      for (int c = 1; c < kChains; ++c) total += (f16v)acc[m][c];
      y[m] += kFormat == kBFloat16 ? total : total * (f16v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)scales_of(w, panel, group)));
    }
    if (kFormat == kInt4 && w.has_min) {
      const f16v minimum = (f16v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)minima_of(w, panel, group)));
      for (int m = 0; m < kRows; ++m) y[m] += minimum * sums[m * w.groups + group];
    }
  }
}
#endif

// ---- the two, over any number of rows ----

template <int kRows, int kFormat>
static inline void panel_rows(const LinearTask& t, const uint8_t* panel, int row, f16v* y) {
  const Weight& w = *t.weight;
  const float* sums = t.sums == nullptr ? nullptr : t.sums + static_cast<int64_t>(row) * w.groups;
#if HX_BF16
  if (t.x_dtype == kBF16) return panel_bf16<kRows, kFormat>(w, panel, static_cast<const uint16_t*>(t.x) + row * t.ldx, t.ldx, sums, y);
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
static void linear_rows(const LinearTask& t, int64_t first, int64_t last) {
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
#if HX_AMX
  if (t.x_dtype == kBF16 && t.rows >= HX_TILE_ROWS) return linear_tiles(t, first, last, scratch);
#endif
  (void)scratch;
  if (t.weight->format == kInt4) return linear_rows<kInt4>(t, first, last);
  if (t.weight->format == kInt8) return linear_rows<kInt8>(t, first, last);
  linear_rows<kBFloat16>(t, first, last);
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
