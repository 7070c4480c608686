// Products of many rows in AMX tiles: weights become bfloat16 tiles in this thread's scratch, two panels at a time, and every row uses
// them. Included before linear.h where the instruction set has AMX.

static inline void finish(const LinearTask& t, int64_t row, int64_t n0, f16v y);
static inline void finish_gated(const LinearTask& t, int64_t row, int64_t n0, f16v gate, f16v up);
static inline const uint8_t* panel_of(const Weight& w, int64_t panel);
static inline const uint8_t* scales_of(const Weight& w, const uint8_t* panel, int group);
static inline const uint8_t* minima_of(const Weight& w, const uint8_t* panel, int group);
struct GroupScales;
static inline GroupScales group_scales(const Weight& w, const uint8_t* panel, int group);
static inline void group_tile_wide(const Weight& w, const uint8_t* panel, int group, uint8_t* tile);

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

static inline void configure_tiles() {
  const TileConfig config;
  asm volatile("" : : "r"(&config) : "memory");  // GCC 12 drops the stores to `config` without this
  _tile_loadconfig(&config);
}

static inline __m512 spread(__m512 v, bool upper) {  // lanes 0..7 (or 8..15), each twice
  const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  return _mm512_permutexvar_ps(upper ? _mm512_add_epi32(low, _mm512_set1_epi32(8)) : low, v);
}

static inline __m512 half_floats(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// One group of a panel -> a tile [16 pairs][16 rows][2] bfloat16, 1024 bytes.
static inline void group_tile(const Weight& w, const uint8_t* panel, int group, uint8_t* tile) {
  if (w.format >= kInt6) return group_tile_wide(w, panel, group, tile);
  const __m512 scale = half_floats(scales_of(w, panel, group));
  const __m512 minimum = w.has_min ? half_floats(minima_of(w, panel, group)) : _mm512_setzero_ps();
  const __m512 scale_a = spread(scale, false), scale_b = spread(scale, true);
  if (w.format == kInt8) {
    const uint8_t* codes = panel + group * 512;
    for (int r = 0; r < 16; ++r) {
      const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 32 * r))));
      const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 32 * r + 16))));
      _mm512_store_si512(tile + 64 * r, (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(b, scale_b), _mm512_mul_ps(a, scale_a)));
    }
    return;
  }
  const __m512 counting = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 table = _mm512_sub_ps(counting, _mm512_set1_ps(w.zero));
  const __m512 min_a = spread(minimum, false), min_b = spread(minimum, true);
  const uint8_t* codes = panel + group * 256;
  for (int z = 0; z < 4; ++z) {
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

static inline const uint8_t* panel_tiles(const Weight& w, int64_t panel, uint8_t* scratch) {
  const uint8_t* source = panel_of(w, panel);
  if (w.format == kBFloat16) return source;
  for (int group = 0; group < w.groups; ++group) group_tile(w, source, group, scratch + group * 1024);
  return scratch;
}

// Rows [row, row + 16 kBlocks) times two panels; out [16 kBlocks][32].
template <int kBlocks>
static inline void block_tiles(const uint16_t* x, int64_t ldx, int groups, const uint8_t* left, const uint8_t* right, float* out) {
  _tile_zero(0);
  _tile_zero(1);
  if (kBlocks == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int group = 0; group < groups; ++group) {
    _tile_loadd(4, x + group * kGroup, ldx * 2);
    _tile_loadd(6, left + group * 1024, 64);
    _tile_loadd(7, right + group * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kBlocks == 2) {
      _tile_loadd(5, x + 16 * ldx + group * kGroup, ldx * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + 16, 128);
  if (kBlocks == 2) {
    _tile_stored(2, out + 16 * 32, 128);
    _tile_stored(3, out + 16 * 32 + 16, 128);
  }
}

// The same for packed weights and one block of rows: tiles of the next group are made while the current ones multiply, so that vector
// units and tile unit work at once.
template <int kBlocks>
static inline void stream_tiles(const Weight& w, int64_t unit, int64_t other, const uint16_t* x, int64_t ldx, uint8_t* scratch, float* out) {
  const uint8_t* left = panel_of(w, unit);
  const uint8_t* right = panel_of(w, other);
  _tile_zero(0);
  _tile_zero(1);
  if (kBlocks == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  group_tile(w, left, 0, scratch);
  group_tile(w, right, 0, scratch + 1024);
  for (int group = 0; group < w.groups; ++group) {
    const uint8_t* tiles = scratch + (group & 1) * 2048;
    _tile_loadd(4, x + group * kGroup, ldx * 2);
    _tile_loadd(6, tiles, 64);
    _tile_loadd(7, tiles + 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kBlocks == 2) {
      _tile_loadd(5, x + 16 * ldx + group * kGroup, ldx * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    if (group + 1 < w.groups) {
      uint8_t* next = scratch + (~group & 1) * 2048;
      group_tile(w, left, group + 1, next);
      group_tile(w, right, group + 1, next + 1024);
    }
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + 16, 128);
  if (kBlocks == 2) {
    _tile_stored(2, out + 16 * 32, 128);
    _tile_stored(3, out + 16 * 32 + 16, 128);
  }
}

static void linear_tiles(const LinearTask& t, int64_t first, int64_t last, uint8_t* scratch) {
  const Weight& w = *t.weight;
  const bool gated = t.epilogue == kGated;
  const int64_t panel_scratch = static_cast<int64_t>(w.groups) * 1024;
  alignas(64) float out[32 * 32];
  configure_tiles();
  for (int64_t unit = first; unit < last; unit += gated ? 1 : 2) {
    const int64_t other = gated ? unit + w.panels / 2 : unit + 1 < last ? unit + 1 : unit;
    const bool stream = t.rows <= 32 && w.format != kBFloat16;
    const uint8_t* left = stream ? nullptr : panel_tiles(w, unit, scratch);
    const uint8_t* right = stream ? nullptr : other == unit ? left : panel_tiles(w, other, scratch + panel_scratch);
    for (int row = 0; row < t.rows; row += 32) {
      const uint16_t* x = static_cast<const uint16_t*>(t.x) + row * t.ldx;
      const int rows = t.rows - row < 32 ? t.rows - row : 32;
      if (stream && rows > 16) {
        stream_tiles<2>(w, unit, other, x, t.ldx, scratch, out);
      } else if (stream) {
        stream_tiles<1>(w, unit, other, x, t.ldx, scratch, out);
      } else if (rows > 16) {
        block_tiles<2>(x, t.ldx, w.groups, left, right, out);
      } else {
        block_tiles<1>(x, t.ldx, w.groups, left, right, out);
      }
      for (int m = 0; m < rows; ++m) {
        const f16v one = load(out + 32 * m), two = load(out + 32 * m + 16);
        if (gated) {
          finish_gated(t, row + m, unit * kLanes, one, two);
        } else {
          finish(t, row + m, unit * kLanes, one);
          if (other != unit) finish(t, row + m, other * kLanes, two);
        }
      }
    }
  }
  _tile_release();
}
