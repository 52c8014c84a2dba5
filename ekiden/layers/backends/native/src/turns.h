// Work that threads take as they come for it, so that one that the system holds up does less of it.
#pragma once
#include <atomic>

#include "ekiden.h"

namespace ekiden {

// Items in order, each to whichever thread is free. There are two counters at the end of shared
// memory. While threads take turns by one of them, which is zero at first, thread 0 sets the other
// one back: between two phases all threads meet, so nobody looks at it any more. An operation's
// phases are First and Last in turn, and the last of them is Last.
enum class Phase { First, Last };

class Turns {
 public:
  Turns(Team& team, Phase phase) : next_(counter(team, phase)) {
    const Phase other = phase == Phase::First ? Phase::Last : Phase::First;
    if (team.thread == 0) counter(team, other).store(0);
  }
  int64_t next() { return next_.fetch_add(1); }

 private:
  using Counter = std::atomic<int64_t>;
  static Counter& counter(Team& team, Phase phase) {
    char* counters = team.shared + kSharedRoom;
    return *reinterpret_cast<Counter*>(phase == Phase::First ? counters : counters + 64);
  }
  Counter& next_;
};

// Runs run(item) for every item in [0, count) on whichever thread is free.
template <class Run>
void take_turns(Team& team, Phase phase, int64_t count, Run run) {
  Turns turns(team, phase);
  for (int64_t item; (item = turns.next()) < count;) run(item);
}

}  // namespace ekiden
