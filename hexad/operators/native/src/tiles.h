// Products of many rows in AMX tiles: weights become bfloat16 tiles in this thread's scratch, two panels at a time, and every row uses
// them. Included after code_tiles.h where the instruction set has AMX.

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

template <int kFormat>
static inline const uint8_t* panel_tiles(const Weight& w, int64_t panel, uint8_t* scratch) {
  const uint8_t* source = panel_of(w, panel);
  if (kFormat == kBFloat16) return source;
  for (int group = 0; group < w.groups; ++group) group_tile<kFormat>(w, source, group, scratch + group * 1024);
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
template <int kBlocks, int kFormat>
static inline void stream_tiles(const Weight& w, int64_t unit, int64_t other, const uint16_t* x, int64_t ldx, uint8_t* scratch, float* out) {
  const uint8_t* left = panel_of(w, unit);
  const uint8_t* right = panel_of(w, other);
  _tile_zero(0);
  _tile_zero(1);
  if (kBlocks == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  group_tile<kFormat>(w, left, 0, scratch);
  group_tile<kFormat>(w, right, 0, scratch + 1024);
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
      group_tile<kFormat>(w, left, group + 1, next);
      group_tile<kFormat>(w, right, group + 1, next + 1024);
    }
  }
  _tile_stored(0, out, 128);
  _tile_stored(1, out + 16, 128);
  if (kBlocks == 2) {
    _tile_stored(2, out + 16 * 32, 128);
    _tile_stored(3, out + 16 * 32 + 16, 128);
  }
}

template <int kFormat>
static void linear_tiles(const LinearTask& t, int64_t first, int64_t last, uint8_t* scratch) {
  const Weight& w = *t.weight;
  const bool gated = t.epilogue == kGated;
  const int64_t panel_scratch = static_cast<int64_t>(w.groups) * 1024;
  alignas(64) float out[32 * 32];
  configure_tiles();
  for (int64_t unit = first; unit < last; unit += gated ? 1 : 2) {
    const int64_t other = gated ? unit + w.panels / 2 : unit + 1 < last ? unit + 1 : unit;
    const bool stream = t.rows <= 32 && kFormat != kBFloat16;
    const uint8_t* left = stream ? nullptr : panel_tiles<kFormat>(w, unit, scratch);
    const uint8_t* right = stream ? nullptr : other == unit ? left : panel_tiles<kFormat>(w, other, scratch + panel_scratch);
    for (int row = 0; row < t.rows; row += 32) {
      const uint16_t* x = static_cast<const uint16_t*>(t.x) + row * t.ldx;
      const int rows = t.rows - row < 32 ? t.rows - row : 32;
      if (stream && rows > 16) {
        stream_tiles<2, kFormat>(w, unit, other, x, t.ldx, scratch, out);
      } else if (stream) {
        stream_tiles<1, kFormat>(w, unit, other, x, t.ldx, scratch, out);
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
