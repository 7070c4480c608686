// Groups of packed codes -> AMX tiles of bfloat16. Included after linear.h where the instruction set has AMX.

// 0 .. 63 as bfloat16.
struct alignas(64) WideCodes {
  uint16_t values[64];
};

static constexpr WideCodes make_wide_codes() {
  WideCodes table{};
  for (int code = 1; code < 64; ++code) {
    int power = 0;
    while (code >> (power + 1)) ++power;
    table.values[code] = static_cast<uint16_t>((127 + power) << 7 | (code << 7 >> power & 127));
  }
  return table;
}

static constexpr WideCodes kWideCodes = make_wide_codes();

// One row of 32 words (2 n + p) of a tile from the numbers of both parities.
static inline void store_pairs(uint8_t* tile, __m512 even, __m512 odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18,
                                         2, 17, 1, 16, 0);
  _mm512_store_si512(tile, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
}

static inline void tile_of_6_bits(const uint8_t* codes, const GroupScales& scales, float zero, uint8_t* tile) {
  const __m512i low = _mm512_load_si512(kWideCodes.values), high = _mm512_load_si512(kWideCodes.values + 32);
  const __m512i upper_half = _mm512_set1_epi32(static_cast<int>(0xffff0000));
#pragma GCC unroll 4
  for (int z = 0; z < 4; ++z) {
    const __m512 scale = (__m512)(z < 2 ? scales.first : scales.second);
    // exact: a format has either a zero or minima, and zeros are powers of two
    const __m512 base = _mm512_fnmadd_ps(scale, _mm512_set1_ps(zero), (__m512)scales.minimum);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512i both = _mm512_permutex2var_epi16(low, wide_codes(codes, z, i), high);
      const __m512 even = (__m512)_mm512_slli_epi32(both, 16), odd = (__m512)_mm512_and_si512(both, upper_half);
      store_pairs(tile + 64 * (4 * z + i), _mm512_fmadd_ps(even, scale, base), _mm512_fmadd_ps(odd, scale, base));
    }
  }
}

static inline __m512 spread(__m512 v, bool upper) {  // lanes 0..7 (or 8..15), each twice
  const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_ps(upper ? _mm512_add_epi32(low, _mm512_set1_epi32(8)) : low, v);
}

static inline void tile_of_4_bits(const uint8_t* codes, const GroupScales& scales, bool halves, float zero, uint8_t* tile) {
  const __m512 counting = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 table = _mm512_sub_ps(counting, _mm512_set1_ps(zero));
  const __m512 minimum = (__m512)scales.minimum;
  const __m512 min_a = spread(minimum, false), min_b = spread(minimum, true);
  __m512 scale_a = spread((__m512)scales.first, false), scale_b = spread((__m512)scales.first, true);
  for (int z = 0; z < 4; ++z) {
    if (halves && z == 2) scale_a = spread((__m512)scales.second, false), scale_b = spread((__m512)scales.second, true);
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(codes + 64 * z)));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(codes + 64 * z + 32)));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 wa = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(a, 4 * i), table), scale_a, min_a);
      const __m512 wb = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(b, 4 * i), table), scale_b, min_b);
      _mm512_store_si512(tile + 64 * (4 * z + i), (__m512i)_mm512_cvtne2ps_pbh(wb, wa));
    }
  }
}

static inline void tile_of_8_bits(const uint8_t* codes, f16v scale, uint8_t* tile) {
  const __m512 scale_a = spread((__m512)scale, false), scale_b = spread((__m512)scale, true);
  for (int r = 0; r < 16; ++r) {
    const __m512 a = (__m512)from_int8(codes + 32 * r), b = (__m512)from_int8(codes + 32 * r + 16);
    _mm512_store_si512(tile + 64 * r, (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(b, scale_b), _mm512_mul_ps(a, scale_a)));
  }
}

// One group of a panel -> a tile [16 pairs][16 rows][2] bfloat16, 1024 bytes.
template <int kFormat>
static inline void group_tile(const Weight& w, const uint8_t* panel, int group, uint8_t* tile) {
  const GroupScales scales = group_scales(w, kFormat, panel, group);
  const uint8_t* codes = panel + group * code_bytes(kFormat);
  if (has_6_bits(kFormat)) return tile_of_6_bits(codes, scales, w.zero, tile);
  if (kFormat == kInt8) return tile_of_8_bits(codes, scales.first, tile);
  tile_of_4_bits(codes, scales, has_k_scales(kFormat) && w.halves, w.zero, tile);
}
