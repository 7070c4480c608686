#include "cores.h"

#include <algorithm>

#if defined(__linux__)
#include <sched.h>
#endif

namespace hx {
namespace {

#if defined(__linux__)
// The calling thread may use these cores alone. False: the system refuses.
bool restrict_to(const std::vector<int>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) {
    if (core < 0 || core >= CPU_SETSIZE) return false;
    CPU_SET(core, &set);
  }
  return sched_setaffinity(0, sizeof(set), &set) == 0;
}
#else
bool restrict_to(const std::vector<int>&) { return false; }
#endif

}  // namespace

int current_core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

std::vector<int> allowed_cores() {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
#endif
  return cores;
}

int next_core(const std::vector<int>& allowed, int core, const std::vector<int>& taken) {
  const size_t start = static_cast<size_t>(std::upper_bound(allowed.begin(), allowed.end(), core) - allowed.begin());
  for (size_t step = 0; step < allowed.size(); ++step) {
    const int wanted = allowed[(start + step) % allowed.size()];
    if (wanted != core && std::find(taken.begin(), taken.end(), wanted) == taken.end()) return wanted;
  }
  return -1;
}

void move_to(int core, const std::vector<int>& allowed) {
  if (restrict_to({core})) restrict_to(allowed);
}

void keep_to(int core) { restrict_to({core}); }

}  // namespace hx
