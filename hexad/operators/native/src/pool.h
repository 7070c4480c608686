// One pool of threads for everything in this library. A phase is a number of chunks that threads claim one by one; it ends when all
// chunks are done, not when all threads have come by, so that a thread which the system has taken off its core delays nobody unless it
// holds a chunk. Waiting threads spin briefly, then sleep. A thread that wakes on the core of another thread of the pool moves to a free
// one: phases are too short for the system to notice, and it has been seen to leave both on one core for minutes.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hx {

class Pool {
 public:
  using Function = void (*)(void* context, int chunk, int thread);

  // pinned: thread i > 0 keeps to core pinned[i], if there is one (Linux).
  explicit Pool(int threads, std::vector<int> pinned = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  const std::vector<int>& pinned() const { return pinned_; }

  // Runs function(context, chunk, thread) for chunks 0 .. chunks - 1; the caller is thread 0. One caller at a time.
  void run(int chunks, Function function, void* context);

  template <class Body>
  void run(int chunks, Body&& body) {
    run(chunks, [](void* context, int chunk, int thread) { (*static_cast<Body*>(context))(chunk, thread); }, &body);
  }

 private:
  bool claim(int* chunk);
  void work(int thread);
  void part(int thread);
  void sleep();

  // [phase 24 bits | chunks 20 bits | next chunk 20 bits]: a claim of a chunk and the check that it exists are one operation, and a
  // claimed chunk keeps its phase, and so function_ and context_, from ending.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> done_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  Function function_ = nullptr;
  void* context_ = nullptr;
  uint64_t phase_ = 0;
  std::unique_ptr<std::atomic<int>[]> cores_;  // where each thread was last seen; -1: nowhere yet
  int threads_;
  std::vector<int> pinned_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace hx
