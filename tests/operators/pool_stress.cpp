// The pool by itself: phases of random size from one caller, pools made and ended while their threads sleep, spin or work, pinned ones.
// Every chunk must run exactly once, and what it wrote must be seen by the caller. Usage: pool_stress SEED (for ThreadSanitizer).
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "pool.h"

static bool phases(hx::Pool& pool, std::mt19937& make, int count) {
  std::vector<long> found(1 << 12);
  for (int phase = 0; phase < count; ++phase) {
    const int chunks = static_cast<int>(make() % (phase % 7 ? 40 : found.size()));
    for (int i = 0; i < chunks; ++i) found[static_cast<size_t>(i)] = 0;
    bool bad_thread = false;
    pool.run(chunks, [&](int chunk, int thread) {
      found[static_cast<size_t>(chunk)] += chunk + phase;  // plain memory: a chunk that two threads take is a race
      if (thread < 0 || thread >= pool.threads()) bad_thread = true;
    });
    for (int i = 0; i < chunks; ++i) {
      if (found[static_cast<size_t>(i)] != i + phase || bad_thread) return false;
    }
    if (make() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(make() % 600));  // let them fall asleep
  }
  return true;
}

int main(int argc, char** argv) {
  std::mt19937 make(argc > 1 ? static_cast<unsigned>(atoll(argv[1])) : 1);
  for (int round = 0; round < 60; ++round) {
    const int threads = 1 + static_cast<int>(make() % 6);
    hx::Pool pool(threads, round % 3 ? std::vector<int>{} : std::vector<int>{0, 0, 1, 9999, -1});
    if (!phases(pool, make, round % 5 ? 60 : 600)) {
      printf("a chunk was lost or ran twice (round %d, %d threads)\n", round, threads);
      return 1;
    }
  }
  printf("done\n");
  return 0;
}
