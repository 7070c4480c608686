// What every entry point shares: the chosen instruction set, the pool, and memory for a step's intermediate values.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "pool.h"
#include "weight.h"

// Under AddressSanitizer memory is given out by the byte, so that a step beyond the end is seen.
#if defined(__SANITIZE_ADDRESS__)
#define HX_EXACT_MEMORY 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HX_EXACT_MEMORY 1
#endif
#endif
#ifndef HX_EXACT_MEMORY
#define HX_EXACT_MEMORY 0
#endif

namespace hx {

// Memory that grows and is never given back before the process ends. Zeroed when it grows: padding rows hold no stale NaN at first use.
class Buffer {
 public:
  ~Buffer() { free(memory_); }
  uint8_t* ensure(size_t bytes);  // null: no memory

 private:
  uint8_t* memory_ = nullptr;
  size_t size_ = 0;
};

struct Runtime {
  const Kernels* kernels = nullptr;
  Pool* pool = nullptr;
  int threads = 1;
  std::vector<int> cores;  // of the threads; empty: not pinned
  std::mutex mutex;  // one step at a time: the pool and the buffers are shared
  Buffer scratch;    // one part a thread
  Buffer input, sums, words, products;
  size_t scratch_bytes = 0;  // of one thread

  // The pool, made in the process that computes (a forked child has none of its parent's threads).
  Pool& workers();
  bool reserve_scratch(size_t bytes_per_thread);
  uint8_t* scratch_of(int thread) { return scratch_base + static_cast<size_t>(thread) * scratch_bytes; }

  uint8_t* scratch_base = nullptr;
  int64_t pool_owner = 0;
};

Runtime& runtime();

// Fills what the kernel will read of x beside x (sums, whole numbers), then runs the product over the pool. False: no memory.
bool run_linear(Runtime& r, LinearTask& task);

// The dtype that products take for a caller's dtype.
inline int32_t product_dtype(const Runtime& r, int32_t dtype) { return dtype == kBF16 && r.kernels->bf16 ? kBF16 : kF32; }

// Rows of a weight and of those that follow it.
inline int64_t total_features(const Weight& weight) {
  int64_t total = 0;
  for (const Weight* w = &weight; w != nullptr; w = w->next) total += w->out_features;
  return total;
}

// What `draw` needs of a thread's memory: keys and weights, and a mass and a count a bucket.
inline size_t draw_scratch_bytes(int64_t vocab) {
  const size_t padded = static_cast<size_t>((vocab + kLanes - 1) / kLanes * kLanes);
  return padded * (sizeof(uint64_t) + sizeof(float)) + kDrawBuckets * (sizeof(int64_t) + sizeof(int32_t));
}

inline int64_t padded_columns(int64_t columns) { return (columns + kGroup - 1) / kGroup * kGroup; }
inline int64_t padded_rows(int64_t rows) { return (rows + kRowBlock - 1) / kRowBlock * kRowBlock; }
inline int64_t item_bytes(int32_t dtype) { return dtype == kBF16 ? 2 : 4; }

}  // namespace hx
