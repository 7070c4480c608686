// The processor cores that a thread may run on, and which of them it should move to. Where the system has no such calls every core is
// unknown (-1, an empty list), and nothing moves.
#pragma once
#include <vector>

namespace hx {

// The one that the calling thread is on.
int current_core();

// Those that the calling thread may use, ascending. They need not start at 0 nor be without gaps (taskset, cpusets of containers).
std::vector<int> allowed_cores();

// The first of `allowed` (ascending) after `core`, and from the start again, that is neither `core` nor taken; -1: there is none.
int next_core(const std::vector<int>& allowed, int core, const std::vector<int>& taken);

// The calling thread moves to `core`, then the system may choose among `allowed` again. A core that the system refuses changes nothing.
void move_to(int core, const std::vector<int>& allowed);

// From now on the calling thread runs on `core` alone. A core that the system refuses changes nothing.
void keep_to(int core);

}  // namespace hx
