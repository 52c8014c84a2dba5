// Cores that the ranks of one host share, by a table in shared memory with a seat for each rank.
//
// A rank says in its seat until when it is to be taken for computing. Another that wants to know how
// many threads it may run counts the cores that those who compute leave, but never takes fewer than
// its own share. A rank that dies or is stopped counts no more after kWhileWorking.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace ekiden {

// Mirrored by cores.py, which fills all but `until`.
struct Seat {
  std::atomic<int64_t> until;  // nanoseconds of CLOCK_MONOTONIC; computing before, idle after
  int32_t share;               // threads that the rank may always run
  int32_t pid;                 // 0: nobody's seat
  char unused[48];
  cpu_set_t cores;             // where the rank may run
};
static_assert(sizeof(Seat) == 192 && sizeof(cpu_set_t) == 128);

class CoreShare {
 public:
  using Clock = std::chrono::steady_clock;  // the same in every process
  static constexpr int64_t kWhileWorking = 1000000000;
  static constexpr int64_t kBetweenSteps = 5000000;  // a rank that decodes is back by then

  CoreShare(Seat* seats, int count, int own, int threads)
      : seats_(seats), count_(count), own_(own), share_(seats ? seats[own].share : threads) {}

  // Threads that this rank may always run.
  int own() const { return share_; }

  // Threads that it may run now, at most `most`.
  int threads(int most) const {
    if (seats_ == nullptr) return most;
    const int64_t now = nanoseconds(Clock::now());
    int left = CPU_COUNT(&seats_[own_].cores);
    for (int i = 0; i < count_; ++i)
      if (i != own_ && seats_[i].until.load(std::memory_order_relaxed) > now && meets(seats_[i]))
        left -= seats_[i].share;
    return std::clamp(left, share_, most);
  }

  // What the others are told: that it computes, and that it has ended a list.
  void work(Clock::time_point now) { tell(now, kWhileWorking); }
  void rest() { tell(Clock::now(), kBetweenSteps); }

 private:
  bool meets(const Seat& other) const {
    cpu_set_t both;
    CPU_AND(&both, &other.cores, &seats_[own_].cores);
    return CPU_COUNT(&both) != 0;
  }

  void tell(Clock::time_point now, int64_t later) {
    if (seats_ != nullptr)
      seats_[own_].until.store(nanoseconds(now) + later, std::memory_order_relaxed);
  }

  static int64_t nanoseconds(Clock::time_point now) {
    return std::chrono::nanoseconds(now.time_since_epoch()).count();
  }

  Seat* seats_;
  int count_;
  int own_;
  int share_;
};

}  // namespace ekiden
