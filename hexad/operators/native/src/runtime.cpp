#include "runtime.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace hx {

uint8_t* Buffer::ensure(size_t bytes) {
  if (HX_EXACT_MEMORY ? bytes == size_ : bytes <= size_) return memory_;
  free(memory_);
  size_ = 0;
  void* memory = nullptr;
  const size_t size = HX_EXACT_MEMORY ? bytes : (bytes + bytes / 4 + 4095) / 4096 * 4096;
  if (posix_memalign(&memory, 4096, size) != 0) {
    memory_ = nullptr;
    return nullptr;
  }
  memory_ = static_cast<uint8_t*>(memory);
  memset(memory_, 0, size);
  size_ = size;
  return memory_;
}

Pool& Runtime::workers() {
  if (pool == nullptr || pool->threads() != threads || pool->pinned() != cores || pool_owner != getpid()) {
    if (pool != nullptr && pool_owner == getpid()) delete pool;
    pool = new Pool(threads, cores);
    pool_owner = getpid();
  }
  return *pool;
}

bool Runtime::reserve_scratch(size_t bytes_per_thread) {
  scratch_bytes = std::max(scratch_bytes, (bytes_per_thread + 4095) / 4096 * 4096);
  scratch_base = scratch.ensure(scratch_bytes * static_cast<size_t>(threads));
  return scratch_base != nullptr;
}

Runtime& runtime() {
  static Runtime* instance = new Runtime();  // never destroyed: threads may outlive static destructors
  return *instance;
}

namespace {

// A product's parts: a weight's rows may be in several formats, one below the other.
constexpr int kMaxParts = 8;

struct Parts {
  LinearTask tasks[kMaxParts];
  int ends[kMaxParts];  // chunks up to and with this part's
  int count = 0;

  int chunks() const { return ends[count - 1]; }
};

int output_bytes(const LinearTask& task) { return task.epilogue != kAdd && task.out_dtype == kBF16 ? 2 : 4; }

Parts split(const LinearTask& task, int threads, bool tiles) {
  Parts parts;
  int64_t row = 0;
  for (const Weight* w = task.weight; w != nullptr && parts.count < kMaxParts; w = w->next) {
    LinearTask& part = parts.tasks[parts.count];
    part = task;
    part.weight = w;
    part.out = static_cast<uint8_t*>(task.out) + row * output_bytes(task);
    const int units = task.epilogue == kGated ? w->panels / 2 : w->panels;
    const int wanted = threads == 1 ? 1 : std::min(threads * 8, std::max(1, units));
    int size = (units + wanted - 1) / wanted;
    if (tiles && task.epilogue != kGated && size % 2) ++size;
    part.units_per_chunk = size;
    parts.ends[parts.count] = (parts.count ? parts.ends[parts.count - 1] : 0) + (units + size - 1) / size;
    ++parts.count;
    row += w->out_features;
  }
  return parts;
}

bool sum_groups(Runtime& r, LinearTask& task) {
  const int groups = task.weight->groups;
  float* sums = reinterpret_cast<float*>(r.sums.ensure(static_cast<size_t>(task.rows) * groups * sizeof(float)));
  if (sums == nullptr) return false;
  r.kernels->sums(task.x, task.ldx, task.x_dtype, task.rows, groups, sums);
  task.sums = sums;
  return true;
}

bool round_words(Runtime& r, LinearTask& task) {
  const size_t groups = static_cast<size_t>(task.rows) * task.weight->groups;
  uint8_t* memory = r.words.ensure(groups * (kGroup * sizeof(int16_t) + 2 * sizeof(float) + 2 * sizeof(int32_t)));
  if (memory == nullptr) return false;
  int16_t* words = reinterpret_cast<int16_t*>(memory);
  int32_t* word_sums = reinterpret_cast<int32_t*>(words + groups * kGroup);
  float* scales = reinterpret_cast<float*>(word_sums + 2 * groups);
  float* sums = scales + groups;
  r.kernels->round_words(task.x, task.ldx, task.rows, task.weight->groups, words, scales, word_sums, sums);
  task.words = words;
  task.word_sums = word_sums;
  task.word_scales = scales;
  task.sums = sums;
  return true;
}

bool run_parts(Runtime& r, LinearTask& task) {
  const Kernels& kernels = *r.kernels;
  const int groups = task.weight->groups;
  bool has_min = false, packed = false, plain = false;
  for (const Weight* w = task.weight; w != nullptr; w = w->next) {
    has_min = has_min || w->has_min;
    (w->format == kBFloat16 ? plain : packed) = true;
  }
  const bool words = packed && task.x_dtype == kBF16 && task.rows < kernels.word_rows;
  const bool tiles = kernels.tile_rows && task.x_dtype == kBF16 && task.rows >= kernels.tile_rows && (plain || !words);
  task.sums = nullptr;
  task.words = nullptr;
  if (tiles && !r.reserve_scratch(static_cast<size_t>(groups) * 2048)) return false;
  if (words ? !round_words(r, task) : !tiles && has_min && !sum_groups(r, task)) return false;
  const Parts parts = split(task, r.threads, tiles);
  r.workers().run(parts.chunks(), [&](int chunk, int thread) {
    int part = 0;
    while (chunk >= parts.ends[part]) ++part;
    kernels.linear(&parts.tasks[part], chunk - (part ? parts.ends[part - 1] : 0), r.scratch_of(thread));
  });
  return true;
}

// A gate and an up in formats of their own: their products first, then what becomes of them.
bool run_gated_parts(Runtime& r, const LinearTask& task) {
  const int64_t both = total_features(*task.weight);
  float* products = reinterpret_cast<float*>(r.products.ensure(static_cast<size_t>(task.rows * both) * sizeof(float)));
  if (products == nullptr) return false;
  LinearTask plain = task;
  plain.epilogue = kStore;
  plain.out_dtype = kF32;
  plain.out = products;
  plain.ldo = both;
  if (!run_parts(r, plain)) return false;
  for (int row = 0; row < task.rows; ++row) {
    uint8_t* out = static_cast<uint8_t*>(task.out) + row * task.ldo * item_bytes(task.out_dtype);
    r.kernels->gate(products + row * both, task.activation, both / 2, out, task.out_dtype);
  }
  return true;
}

}  // namespace

bool run_linear(Runtime& r, LinearTask& task) {
  return task.epilogue == kGated && task.weight->next != nullptr ? run_gated_parts(r, task) : run_parts(r, task);
}

}  // namespace hx
