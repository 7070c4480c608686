#include "pool.h"

#include <chrono>
#include <utility>

#include "cores.h"

namespace hx {
namespace {

constexpr int kBits = 20;
constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
constexpr int kSpins = 4000;        // about 100 microseconds, the gap between two phases of a step at most
constexpr int kSpinsForChunk = 20000;  // the caller waits for a chunk that another thread holds
constexpr int kYields = 200;

bool has_chunk(uint64_t ticket) { return (ticket & kMask) < ((ticket >> kBits) & kMask); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads, std::vector<int> pinned) : threads_(threads < 1 ? 1 : threads), pinned_(std::move(pinned)) {
  cores_.reset(new std::atomic<int>[threads_]);
  for (int thread = 0; thread < threads_; ++thread) cores_[thread].store(-1);
  for (int thread = 1; thread < threads_; ++thread) {
    workers_.emplace_back([this, thread] {
      if (thread < static_cast<int>(pinned_.size())) keep_to(pinned_[thread]);
      work(thread);
    });
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool Pool::claim(int* chunk) {
  if (!has_chunk(ticket_.load(std::memory_order_relaxed))) return false;
  const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
  *chunk = static_cast<int>(ticket & kMask);
  return has_chunk(ticket);
}

void Pool::run(int chunks, Function function, void* context) {
  if (chunks <= 0) return;
  if (threads_ == 1 || chunks == 1) {
    for (int chunk = 0; chunk < chunks; ++chunk) function(context, chunk, 0);
    return;
  }
  cores_[0].store(current_core(), std::memory_order_relaxed);
  function_ = function;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  phase_ = (phase_ + 1) & ((uint64_t{1} << (64 - 2 * kBits)) - 1);
  ticket_.store((phase_ << (2 * kBits)) | (static_cast<uint64_t>(chunks) << kBits));
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  int chunk = 0;
  while (claim(&chunk)) {
    function(context, chunk, 0);
    done_.fetch_add(1, std::memory_order_release);
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) < chunks; ++spins) {
    if (spins < kSpinsForChunk) {
      pause();
    } else if (spins < kSpinsForChunk + kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

// Two threads of the pool never stay on one core while there is one without any that this thread may use. What it may use is asked for
// when it matters, not kept: a pinned thread has one core, and an administrator may change it at any time.
void Pool::part(int thread) {
  const int core = current_core();
  cores_[thread].store(core, std::memory_order_relaxed);
  bool shared = false;
  for (int other = 0; other < thread; ++other) shared = shared || cores_[other].load(std::memory_order_relaxed) == core;
  if (!shared || core < 0) return;
  const std::vector<int> allowed = allowed_cores();
  std::vector<int> taken;
  for (int other = 0; other < threads_; ++other) taken.push_back(cores_[other].load(std::memory_order_relaxed));
  const int wanted = next_core(allowed, core, taken);
  if (wanted < 0) return;
  move_to(wanted, allowed);
  cores_[thread].store(wanted, std::memory_order_relaxed);
}

void Pool::work(int thread) {
  int idle = 1;
  while (!stop_.load(std::memory_order_relaxed)) {
    int chunk = 0;
    if (claim(&chunk)) {
      if (idle != 0) part(thread);
      function_(context_, chunk, thread);
      done_.fetch_add(1, std::memory_order_release);
      idle = 0;
    } else if (++idle < kSpins) {
      pause();
    } else {
      sleep();
      idle = 1;
    }
  }
}

void Pool::sleep() {
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [this] { return stop_.load() || has_chunk(ticket_.load()); });
  sleepers_.fetch_sub(1);
}

}  // namespace hx
