#include "pack.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

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

// 32 codes of 4 bits of one row: low nibbles of the 16 bytes are columns 0 .. 15, high ones 16 .. 31.
void pack_int4(uint8_t* group, int lane, const uint8_t* nibbles) {
  for (int z = 0; z < 4; ++z) {
    uint32_t word = 0;
    for (int t = 0; t < 8; ++t) {
      const int k = 8 * z + (t < 4 ? 2 * t : 2 * (t - 4) + 1);
      const uint32_t code = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
      word |= code << (4 * t);
    }
    memcpy(group + 64 * z + 4 * lane, &word, 4);
  }
}

void pack_int8(uint8_t* group, int lane, const uint8_t* codes) {
  for (int k = 0; k < kGroup; ++k) group[k / 2 * 32 + 2 * lane + k % 2] = codes[k];
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

void pack_row(Weight* w, int32_t source, int64_t row, const uint8_t* blocks) {
  uint8_t* panel = w->data + row / kLanes * w->panel_bytes;
  const int lane = static_cast<int>(row % kLanes);
  for (int group = 0; group < w->groups; ++group) {
    uint8_t* scale = panel + w->scale_offset + group * 32 + lane * 2;
    if (source == kQ40) {
      const uint8_t* block = blocks + group * 18;
      memcpy(scale, block, 2);
      pack_int4(panel + group * 256, lane, block + 2);
    } else if (source == kQ41) {
      const uint8_t* block = blocks + group * 20;
      memcpy(scale, block, 2);
      memcpy(panel + w->min_offset + group * 32 + lane * 2, block + 2, 2);
      pack_int4(panel + group * 256, lane, block + 4);
    } else if (source == kQ80) {
      const uint8_t* block = blocks + group * 34;
      memcpy(scale, block, 2);
      pack_int8(panel + group * 512, lane, block + 2);
    } else {
      const int64_t left = w->in_features - static_cast<int64_t>(group) * kGroup;
      const int64_t item = source == kRowsBF16 ? 2 : 4;
      pack_bf16(panel + group * 1024, lane, blocks + group * kGroup * item, source, static_cast<int>(left < kGroup ? left : kGroup));
    }
  }
}

int64_t row_bytes(const Weight* w, int32_t source) {
  switch (source) {
    case kQ40: return w->groups * int64_t{18};
    case kQ41: return w->groups * int64_t{20};
    case kQ80: return w->groups * int64_t{34};
    case kRowsBF16: return w->in_features * int64_t{2};
    default: return w->in_features * int64_t{4};
  }
}

}  // namespace

Weight* new_weight(int32_t source, int64_t out_features, int64_t in_features) {
  Owned* w = new (std::nothrow) Owned{};
  if (w == nullptr) return nullptr;
  w->format = source == kQ80 ? kInt8 : source >= kRowsBF16 ? kBFloat16 : kInt4;
  w->out_features = static_cast<int32_t>(out_features);
  w->in_features = static_cast<int32_t>(in_features);
  w->groups = static_cast<int32_t>((in_features + kGroup - 1) / kGroup);
  w->panels = static_cast<int32_t>((out_features + kLanes - 1) / kLanes);
  w->has_min = source == kQ41;
  w->zero = source == kQ40 ? 8.0f : 0.0f;
  const int64_t codes = static_cast<int64_t>(w->groups) * (w->format == kInt4 ? 256 : w->format == kInt8 ? 512 : 1024);
  const int64_t scales = w->format == kBFloat16 ? 0 : static_cast<int64_t>(w->groups) * 32;
  w->scale_offset = codes;
  w->min_offset = codes + scales;
  w->panel_bytes = (codes + scales * (w->has_min ? 2 : 1) + kLine - 1) / kLine * kLine;
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
  const int64_t bytes = row_bytes(weight, source);
  for (int64_t row = 0; row < count; ++row) pack_row(weight, source, first + row, rows + row * bytes);
}

}  // namespace hx
