// Tiles of 6-bit codes and of k-quants. Included after linear.h where the instruction set has AMX.

// One group of a panel -> a tile [16 pairs][16 rows][2] bfloat16, 1024 bytes.
static inline void group_tile_wide(const Weight& w, const uint8_t* panel, int group, uint8_t* tile) {
  const GroupScales scales = group_scales(w, panel, group);
  const bool six = has_6_bits(w.format);
  const uint8_t* codes = panel + static_cast<int64_t>(group) * code_bytes(w.format);
  const __m512 zero = _mm512_set1_ps(w.zero);
  const __m512 min_a = spread((__m512)scales.minimum, false), min_b = spread((__m512)scales.minimum, true);
  const __m512i low_bits = _mm512_set1_epi32(15), high_bits = _mm512_set1_epi32(0x30);
  for (int z = 0; z < 4; ++z) {
    const __m512 scale = (__m512)(z < 2 ? scales.first : scales.second);
    const __m512 scale_a = spread(scale, false), scale_b = spread(scale, true);
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(codes + 64 * z)));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(codes + 64 * z + 32)));
    const uint8_t* upper = codes + (six ? 256 + z / 2 * 64 : 0);
    // moved so that a pair's upper bits are at 4 and 5
    const __m512i upper_a = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(upper))), 4);
    const __m512i upper_b = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(upper + 32))), 4);
    for (int i = 0; i < 4; ++i) {
      const __m128i low_shift = _mm_cvtsi32_si128(4 * i), high_shift = _mm_cvtsi32_si128(2 * (4 * (z % 2) + i));
      __m512i ka = _mm512_and_si512(_mm512_srl_epi32(a, low_shift), low_bits);
      __m512i kb = _mm512_and_si512(_mm512_srl_epi32(b, low_shift), low_bits);
      if (six) {
        ka = _mm512_or_si512(ka, _mm512_and_si512(_mm512_srl_epi32(upper_a, high_shift), high_bits));
        kb = _mm512_or_si512(kb, _mm512_and_si512(_mm512_srl_epi32(upper_b, high_shift), high_bits));
      }
      const __m512 wa = _mm512_fmadd_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(ka), zero), scale_a, min_a);
      const __m512 wb = _mm512_fmadd_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(kb), zero), scale_b, min_b);
      _mm512_store_si512(tile + 64 * (4 * z + i), (__m512i)_mm512_cvtne2ps_pbh(wb, wa));
    }
  }
}
