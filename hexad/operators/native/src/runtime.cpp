#include "runtime.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace hx {

uint8_t* Buffer::ensure(size_t bytes) {
  if (bytes <= size_) return memory_;
  free(memory_);
  size_ = 0;
  void* memory = nullptr;
  const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
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
  if (pool == nullptr || pool->threads() != threads || pool_owner != getpid()) {
    if (pool != nullptr && pool_owner == getpid()) delete pool;
    pool = new Pool(threads);
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

bool run_linear(Runtime& r, LinearTask& task) {
  const Weight& w = *task.weight;
  const Kernels& kernels = *r.kernels;
  const bool tiles = kernels.tile_rows && task.x_dtype == kBF16 && task.rows >= kernels.tile_rows;
  task.sums = nullptr;
  if (tiles) {
    if (!r.reserve_scratch(static_cast<size_t>(w.groups) * 2048)) return false;
  } else if (w.has_min) {
    float* sums = reinterpret_cast<float*>(r.sums.ensure(static_cast<size_t>(task.rows) * w.groups * sizeof(float)));
    if (sums == nullptr) return false;
    kernels.sums(task.x, task.ldx, task.x_dtype, task.rows, w.groups, sums);
    task.sums = sums;
  }
  const int units = task.epilogue == kGated ? w.panels / 2 : w.panels;
  const int wanted = r.threads == 1 ? 1 : std::min(r.threads * 8, std::max(1, units));
  int size = (units + wanted - 1) / wanted;
  if (tiles && task.epilogue != kGated && size % 2) ++size;
  task.units_per_chunk = size;
  r.workers().run((units + size - 1) / size, [&](int chunk, int thread) { kernels.linear(&task, chunk, r.scratch_of(thread)); });
  return true;
}

}  // namespace hx
