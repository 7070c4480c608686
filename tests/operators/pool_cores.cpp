// Which cores the pool's threads take, on a machine that is played: cores of any number, and every thread starts on the first that it may
// use. Built with -Wl,--wrap=sched_getcpu,--wrap=sched_getaffinity,--wrap=sched_setaffinity (Linux).
//
// pool_cores next                  lines "CORE ALLOWED TAKEN" (lists with commas, - for none) -> the core that next_core chooses for each
// pool_cores pool CORES THREADS    phases of a pool that may use CORES -> the core of each thread in the end, then who may not use all
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cores.h"
#include "pool.h"

static std::vector<int> process;  // the cores that the system grants
static thread_local std::vector<int> mine;
static thread_local int here = -1;

static void arrive() {
  if (here >= 0) return;
  mine = process;
  here = process[0];
}

extern "C" int __wrap_sched_getcpu() {
  arrive();
  return here;
}

extern "C" int __wrap_sched_getaffinity(pid_t, size_t size, cpu_set_t* set) {
  arrive();
  CPU_ZERO_S(size, set);
  for (const int core : mine) CPU_SET_S(static_cast<size_t>(core), size, set);
  return 0;
}

extern "C" int __wrap_sched_setaffinity(pid_t, size_t size, const cpu_set_t* set) {
  arrive();
  std::vector<int> wanted;
  bool stays = false;
  for (const int core : process) {
    if (!CPU_ISSET_S(static_cast<size_t>(core), size, set)) continue;
    wanted.push_back(core);
    stays = stays || core == here;
  }
  if (wanted.empty()) return -1;
  mine = wanted;
  if (!stays) here = mine[0];
  return 0;
}

static std::vector<int> numbers(const std::string& text) {
  std::vector<int> found;
  std::stringstream parts(text == "-" ? "" : text);
  for (std::string part; std::getline(parts, part, ',');) found.push_back(atoi(part.c_str()));
  return found;
}

// Every thread has worked, may use every core again, and shares its core only if there are fewer cores than threads.
static bool parted(const std::vector<int>& core, const std::vector<int>& whole) {
  const std::set<int> distinct(core.begin(), core.end());
  const bool all = std::find(whole.begin(), whole.end(), 0) == whole.end();
  return all && distinct.count(-1) == 0 && distinct.size() == std::min(core.size(), process.size());
}

static int play_pool(int threads) {
  std::vector<int> core(static_cast<size_t>(threads), -1), whole(core.size(), 0);
  hx::Pool pool(threads);
  const auto start = std::chrono::steady_clock::now();
  do {
    pool.run(4 * threads, [&](int, int thread) {
      core[static_cast<size_t>(thread)] = __wrap_sched_getcpu();
      whole[static_cast<size_t>(thread)] = mine == process;
      std::this_thread::sleep_for(std::chrono::microseconds(50));  // a thread alone must not do all of it
    });
  } while (!parted(core, whole) && std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
  for (const int found : core) std::cout << found << " ";
  for (size_t thread = 0; thread < whole.size(); ++thread) {
    if (!whole[thread]) std::cout << "thread " << thread << " is left on its core ";
  }
  std::cout << std::endl;
  return 0;
}

int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "pool") {
    process = numbers(argv[2]);
    return play_pool(atoi(argv[3]));
  }
  if (argc != 2 || std::string(argv[1]) != "next") return 2;
  int core = 0;
  for (std::string allowed, taken; std::cin >> core >> allowed >> taken;) std::cout << hx::next_core(numbers(allowed), core, numbers(taken)) << "\n";
  return 0;
}
