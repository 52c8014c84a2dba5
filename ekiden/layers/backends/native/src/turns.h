// Work that threads take as they come for it, so that one that the system holds up does less of it.
#pragma once
#include <atomic>

#include "ekiden.h"

namespace ekiden {

// Two counters at the end of shared memory. While threads take turns by one of them, which is zero
// at first, thread 0 sets the other one back: between two phases all threads meet, so nobody looks
// at it any more. An operation's phases are First and Last in turn, and the last of them is Last.
enum class Phase { First, Last };

// Runs run(item) for every item in [0, count), in order, on whichever thread is free.
template <class Run>
void take_turns(Team& team, Phase phase, int64_t count, Run run) {
  using Counter = std::atomic<int64_t>;
  const auto at = [&](Phase phase) {
    return reinterpret_cast<Counter*>(team.shared + kSharedRoom + (phase == Phase::First ? 0 : 64));
  };
  if (team.thread == 0) at(phase == Phase::First ? Phase::Last : Phase::First)->store(0);
  Counter& next = *at(phase);
  for (int64_t item; (item = next.fetch_add(1)) < count;) run(item);
}

}  // namespace ekiden
