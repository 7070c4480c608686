#include "pack.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "runtime.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hx {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kArena = size_t{32} << 20;

// Weights lie together in large regions on huge pages: a step reads all of them, and small pages cost it look-ups.
struct Arena {
  uint8_t* base;
  size_t used, size;
  int weights;
};

std::mutex arena_mutex;
Arena* open_arena = nullptr;

struct Owned : Weight {
  Arena* arena;
};

uint8_t* allocate(size_t bytes, Arena** owner) {
  std::lock_guard<std::mutex> lock(arena_mutex);
  if (HX_EXACT_MEMORY) {
    void* base = nullptr;
    if (posix_memalign(&base, kLine, bytes) != 0) return nullptr;
    *owner = new Arena{static_cast<uint8_t*>(base), bytes, bytes, 1};
    return static_cast<uint8_t*>(base);
  }
  if (open_arena == nullptr || open_arena->used + bytes > open_arena->size) {
    const size_t size = (bytes > kArena ? bytes + kHuge - 1 : kArena) / kHuge * kHuge;
    void* base = nullptr;
    if (posix_memalign(&base, kHuge, size) != 0) return nullptr;
#if defined(__linux__)
    madvise(base, size, MADV_HUGEPAGE);
#endif
    if (open_arena != nullptr && open_arena->weights == 0) {
      free(open_arena->base);
      delete open_arena;
    }
    open_arena = new Arena{static_cast<uint8_t*>(base), 0, size, 0};
  }
  uint8_t* memory = open_arena->base + open_arena->used;
  open_arena->used += bytes;
  ++open_arena->weights;
  *owner = open_arena;
  return memory;
}

void release(Arena* arena) {
  std::lock_guard<std::mutex> lock(arena_mutex);
  if (--arena->weights > 0) return;
  if (arena == open_arena) open_arena = nullptr;
  free(arena->base);
  delete arena;
}

uint16_t bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// How a source's rows are stored and what they become.
struct Layout {
  int32_t format;
  int32_t block, block_bytes;  // columns and bytes of a block; plain numbers: 1 and their size
  float zero;
  bool has_min, halves;
};

constexpr Layout kLayouts[kSources] = {
    {kInt4, 32, 18, 8, false, false},    // kQ40
    {kInt4, 32, 20, 0, true, false},     // kQ41
    {kInt8, 32, 34, 0, false, false},    // kQ80
    {kBFloat16, 1, 2, 0, false, false},  // kRowsBF16
    {kBFloat16, 1, 4, 0, false, false},  // kRowsF32
    {kInt6, 32, 22, 16, false, false},   // kQ50
    {kInt6, 32, 24, 0, true, false},     // kQ51
    {kInt4K, 256, 144, 0, true, false},  // kQ4K
    {kInt6K, 256, 176, 0, true, false},  // kQ5K
    {kInt6K, 256, 210, 32, false, true},  // kQ6K
    {kInt4K, 256, 110, 4, false, true},  // kQ3K
    {kInt8, 1, 1, 0, false, false},      // kRowsInt8
};

int64_t code_bytes(int32_t format) {
  switch (format) {
    case kInt8: return 512;
    case kBFloat16: return 1024;
    case kInt6: case kInt6K: return 384;
    default: return 256;
  }
}

bool has_k_scales(int32_t format) { return format == kInt4K || format == kInt6K; }

// The lower 4 bits of a row's 32 codes; of 6-bit ones the upper bits follow.
void pack_codes(uint8_t* group, int lane, const uint8_t* codes, bool six) {
  for (int z = 0; z < 4; ++z) {
    uint32_t word = 0;
    for (int t = 0; t < 8; ++t) {
      const int k = 8 * z + (t < 4 ? 2 * t : 2 * (t - 4) + 1);
      word |= static_cast<uint32_t>(codes[k] & 15) << (4 * t);
    }
    memcpy(group + 64 * z + 4 * lane, &word, 4);
  }
  if (!six) return;
  for (int v = 0; v < 2; ++v) {
    uint32_t word = 0;
    for (int k = 0; k < 16; ++k) word |= static_cast<uint32_t>(codes[16 * v + k] >> 4 & 3) << (k / 2 * 2 + k % 2 * 16);
    memcpy(group + 256 + 64 * v + 4 * lane, &word, 4);
  }
}

// 16 bytes: the low nibbles are columns 0 .. 15, the high ones 16 .. 31.
void split_nibbles(uint8_t* codes, const uint8_t* nibbles) {
  for (int k = 0; k < 16; ++k) {
    codes[k] = nibbles[k] & 15;
    codes[k + 16] = nibbles[k] >> 4;
  }
}

void add_fifth_bits(uint8_t* codes, const uint8_t* bits) {
  for (int k = 0; k < kGroup; ++k) codes[k] = static_cast<uint8_t>(codes[k] | (bits[k / 8] >> (k % 8) & 1) << 4);
}

void pack_int8(uint8_t* group, int lane, const uint8_t* codes, int count) {
  for (int k = 0; k < count; ++k) group[k / 2 * 32 + 2 * lane + k % 2] = codes[k];
}

void pack_bf16(uint8_t* group, int lane, const uint8_t* row, int32_t source, int count) {
  for (int k = 0; k < count; ++k) {
    uint16_t value = 0;
    if (source == kRowsBF16) {
      memcpy(&value, row + 2 * k, 2);
    } else {
      float wide;
      memcpy(&wide, row + 4 * k, 4);
      value = bf16_of(wide);
    }
    memcpy(group + k / 2 * 64 + (2 * lane + k % 2) * 2, &value, 2);
  }
}

// One block of 32 columns.
void pack_block(Weight* w, int32_t source, uint8_t* panel, int lane, int group, const uint8_t* block) {
  uint8_t codes[kGroup];
  uint8_t* target = panel + group * code_bytes(w->format);
  memcpy(panel + w->scale_offset + group * 32 + lane * 2, block, 2);
  if (w->has_min) memcpy(panel + w->min_offset + group * 32 + lane * 2, block + 2, 2);
  if (source == kQ80) return pack_int8(target, lane, block + 2, kGroup);
  const uint8_t* rest = block + (w->has_min ? 4 : 2);
  const bool six = w->format == kInt6;
  split_nibbles(codes, rest + (six ? 4 : 0));
  if (six) add_fifth_bits(codes, rest);
  pack_codes(target, lane, codes, six);
}

// Scale and minimum `j` of the 8 that k-quants keep in 12 bytes, 6 bits each.
void k_scale(const uint8_t* packed, int j, uint8_t* scale, uint8_t* minimum) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *minimum = packed[j + 4] & 63;
  } else {
    *scale = static_cast<uint8_t>((packed[j + 4] & 15) | packed[j - 4] >> 6 << 4);
    *minimum = static_cast<uint8_t>(packed[j + 4] >> 4 | packed[j] >> 6 << 4);
  }
}

// Signed scale `j` of the 16 that Q3_K keeps in 12 bytes, 6 bits each.
uint8_t q3_scale(const uint8_t* packed, int j) {
  const int low = j < 8 ? packed[j] & 15 : packed[j - 8] >> 4, high = packed[8 + j % 4] >> (j / 4 * 2) & 3;
  return static_cast<uint8_t>((low | high << 4) - 32);
}

// Codes and the two bytes of scales of columns 32 j .. 32 j + 31 of one block of 256.
void unpack_super(int32_t source, const uint8_t* block, int j, uint8_t* codes, uint8_t* scales) {
  const int shift = 4 * (j % 2), pair = 2 * (j % 4);
  switch (source) {
    case kQ4K:
      k_scale(block + 4, j, scales, scales + 1);
      for (int k = 0; k < kGroup; ++k) codes[k] = block[16 + j / 2 * 32 + k] >> shift & 15;
      break;
    case kQ5K:
      k_scale(block + 4, j, scales, scales + 1);
      for (int k = 0; k < kGroup; ++k) {
        codes[k] = static_cast<uint8_t>((block[48 + j / 2 * 32 + k] >> shift & 15) | (block[16 + k] >> j & 1) << 4);
      }
      break;
    case kQ6K:
      memcpy(scales, block + 192 + 2 * j, 2);
      for (int k = 0; k < kGroup; ++k) {
        const int low = block[j / 4 * 64 + j % 2 * 32 + k] >> (j % 4 / 2 * 4) & 15, high = block[128 + j / 4 * 32 + k] >> pair & 3;
        codes[k] = static_cast<uint8_t>(low | high << 4);
      }
      break;
    default:
      scales[0] = q3_scale(block + 96, 2 * j);
      scales[1] = q3_scale(block + 96, 2 * j + 1);
      for (int k = 0; k < kGroup; ++k) {
        codes[k] = static_cast<uint8_t>((block[32 + j / 4 * 32 + k] >> pair & 3) | (block[k] >> j & 1) << 2);
      }
  }
}

// One block of 256 columns, groups `group` .. `group` + 7.
void pack_super(Weight* w, int32_t source, uint8_t* panel, int lane, int group, const uint8_t* block) {
  uint8_t codes[kGroup], scales[2];
  for (int j = 0; j < kSuper; ++j) {
    unpack_super(source, block, j, codes, scales);
    pack_codes(panel + (group + j) * code_bytes(w->format), lane, codes, w->format == kInt6K);
    uint8_t* target = panel + w->scale_offset + (group + j) * 32 + lane;
    target[0] = scales[0];
    target[16] = scales[1];
  }
  uint8_t* multipliers = panel + w->min_offset + group / kSuper * (w->halves ? 32 : 64) + 2 * lane;
  memcpy(multipliers, block + (source == kQ6K ? 208 : source == kQ3K ? 108 : 0), 2);
  if (!w->halves) memcpy(multipliers + 32, block + 2, 2);
}

// One group of plain numbers.
void pack_plain(Weight* w, int32_t source, uint8_t* panel, int lane, int group, const uint8_t* row) {
  const int64_t first = static_cast<int64_t>(group) * kGroup, left = w->in_features - first;
  const int count = static_cast<int>(left < kGroup ? left : kGroup);
  if (source == kRowsInt8) return pack_int8(panel + group * int64_t{512}, lane, row + 2 + first, count);
  pack_bf16(panel + group * int64_t{1024}, lane, row + first * kLayouts[source].block_bytes, source, count);
}

void pack_row(Weight* w, int32_t source, int64_t row, const uint8_t* stored) {
  uint8_t* panel = w->data + row / kLanes * w->panel_bytes;
  const int lane = static_cast<int>(row % kLanes);
  const Layout& layout = kLayouts[source];
  if (source == kRowsInt8) memcpy(panel + w->scale_offset + lane * 2, stored, 2);
  const int step = layout.block == 256 ? kSuper : 1;
  for (int group = 0; group < w->groups; group += step) {
    const uint8_t* block = stored + static_cast<int64_t>(group / step) * layout.block_bytes;
    if (layout.block == 256) {
      pack_super(w, source, panel, lane, group, block);
    } else if (layout.block == 32) {
      pack_block(w, source, panel, lane, group, block);
    } else {
      pack_plain(w, source, panel, lane, group, stored);
    }
  }
}

}  // namespace

int64_t stored_row_bytes(int32_t source, int64_t in_features) {
  const Layout& layout = kLayouts[source];
  return in_features / layout.block * layout.block_bytes + (source == kRowsInt8 ? 2 : 0);
}

Weight* new_weight(int32_t source, int64_t out_features, int64_t in_features) {
  if (source < 0 || source >= kSources || out_features < 1 || in_features < 1 || in_features % kLayouts[source].block) return nullptr;
  const Layout& layout = kLayouts[source];
  Owned* w = new (std::nothrow) Owned{};
  if (w == nullptr) return nullptr;
  w->format = layout.format;
  w->out_features = static_cast<int32_t>(out_features);
  w->in_features = static_cast<int32_t>(in_features);
  w->groups = static_cast<int32_t>((in_features + kGroup - 1) / kGroup);
  w->panels = static_cast<int32_t>((out_features + kLanes - 1) / kLanes);
  w->has_min = layout.has_min;
  w->halves = layout.halves;
  w->zero = layout.zero;
  w->scale_stride = source == kRowsInt8 ? 0 : 32;
  const int64_t groups = w->groups, codes = groups * code_bytes(w->format);
  const int64_t scales = w->format == kBFloat16 ? 0 : w->scale_stride ? groups * 32 : 32;
  const int64_t minima = has_k_scales(w->format) ? groups / kSuper * (w->halves ? 32 : 64) : w->has_min ? scales : 0;
  w->scale_offset = codes;
  w->min_offset = codes + scales;
  w->panel_bytes = (codes + scales + minima + kLine - 1) / kLine * kLine;
  const size_t bytes = static_cast<size_t>(w->panel_bytes) * w->panels;
  w->data = allocate(bytes, &w->arena);
  if (w->data == nullptr) {
    delete w;
    return nullptr;
  }
  memset(w->data, 0, bytes);
  return w;
}

void delete_weight(Weight* weight) {
  Owned* w = static_cast<Owned*>(weight);
  release(w->arena);
  free(w->bias);
  delete w;
}

void pack_rows(Weight* weight, int32_t source, int64_t first, int64_t count, const uint8_t* rows) {
  const int64_t bytes = stored_row_bytes(source, weight->in_features);
  for (int64_t row = 0; row < count; ++row) pack_row(weight, source, first + row, rows + row * bytes);
}

}  // namespace hx
