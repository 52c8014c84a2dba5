// The sum of every rank's tensor through memory that the ranks of one host share. The protocol is
// that of ekiden/parallel/shm.py, whose Python form may go before and after on the same memory.
//
//   p[0] x, which becomes the sum   p[1] counters of operations entered, a cache line each
//   p[2] slots [2][ranks][slot bytes]   p[3] failure flags, a cache line each
//   p[4] this rank's books: Books below
//   n[0] elements   n[1] ranks   n[2] this rank   n[3] slot bytes   n[4] failure flags
//   n[5] deadline of one wait, ns
//
// In operation n a rank writes slot n mod 2, sets its counter to n, and reads the others' slots
// once their counters say n. A rank that says n + 1 has done with n, so one wait an operation
// suffices. The sum is taken in rank order in float32: every rank gets the same bits.
#include <sched.h>
#include <time.h>

#include <atomic>
#include <chrono>

#include "ekiden.h"
#include "vector.h"

namespace ekiden {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::nanoseconds;

constexpr int64_t kLine = 64;
constexpr int64_t kAlone = 64 << 10;  // bytes up to which waking the team costs more than it saves

// Mirrored by all_reduce.py.
struct Books {
  uint64_t operation;   // the last one entered
  int64_t calls, bytes, ns;  // since Python last asked
  int64_t absent;       // the rank that a failed wait was for
};

std::atomic<uint64_t>& counter(void* base, int64_t rank) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(static_cast<char*>(base) + rank * kLine);
}

// How long to wait and how hard: ranks may outnumber cores, so nobody spins for long.
class Patience {
 public:
  explicit Patience(nanoseconds deadline) : start_(Clock::now()), deadline_(deadline) {}

  // One turn of waiting; false when the deadline has passed.
  bool turn() {
    if (++turns_ % 64 != 0) {
      _mm_pause();
      return true;
    }
    const auto waited = Clock::now() - start_;
    if (waited < kHot) return true;
    if (waited < kYielding) {
      sched_yield();
      turns_ = 63;
      return true;
    }
    if (waited >= deadline_) return false;
    const timespec nap{0, kNapNs};
    nanosleep(&nap, nullptr);
    turns_ = 63;
    napping_ = true;
    return true;
  }
  bool napping() const { return napping_; }

 private:
  static constexpr nanoseconds kHot{20'000}, kYielding{1'000'000};
  static constexpr long kNapNs = 50'000;
  const Clock::time_point start_;
  const nanoseconds deadline_;
  int turns_ = 0;
  bool napping_ = false;
};

class AllReduce {
 public:
  explicit AllReduce(const Op& op)
      : op_(op), books_(*static_cast<Books*>(op.p[4])), ranks_(op.n[1]), rank_(op.n[2]) {}

  // Until every rank has entered `operation`.
  int wait(uint64_t operation) const {
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      Patience patience{nanoseconds(op_.n[5])};
      while (counter(op_.p[1], rank).load(std::memory_order_acquire) < operation) {
        if (!patience.turn() || (patience.napping() && failed())) {
          books_.absent = rank;
          return kRankMissing;
        }
      }
    }
    return kOk;
  }

  char* slot(int64_t rank) const {
    const int64_t parity = int64_t(books_.operation % 2);
    return static_cast<char*>(op_.p[2]) + (parity * ranks_ + rank) * op_.n[3];
  }

  void enter() const {
    counter(op_.p[1], rank_).store(books_.operation, std::memory_order_release);
  }

  // Elements [begin, end) of all slots into `to`, in rank order.
  template <class T>
  void sum(typename T::Element* to, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; i += kLanes) {
      const __mmask16 lanes = first(end - i);
      __m512 total = T::load(part<T>(0) + i, lanes);
      for (int64_t rank = 1; rank < ranks_; ++rank) {
        total = _mm512_add_ps(total, T::load(part<T>(rank) + i, lanes));
      }
      T::store(to + i, total, lanes);
    }
  }

  template <class T>
  typename T::Element* part(int64_t rank) const {
    return reinterpret_cast<typename T::Element*>(slot(rank));
  }

  Books& books() const { return books_; }

 private:
  bool failed() const {
    for (int64_t i = 0; i < op_.n[4]; ++i) {
      if (counter(op_.p[3], i).load(std::memory_order_relaxed) != 0) return true;
    }
    return false;
  }

  const Op& op_;
  Books& books_;
  const int64_t ranks_, rank_;
};

// What fits one slot. Thread 0 alone speaks with other ranks; `team` is null where it works alone.
template <class T>
int reduce_piece(const AllReduce& group, const Op& op, typename T::Element* x, int64_t count,
                 Team* team) {
  const bool leads = team == nullptr || team->thread == 0;
  const int64_t begin = team != nullptr ? Share(count, *team).begin : 0;
  const int64_t end = team != nullptr ? Share(count, *team).end : count;
  int error = kOk;
  const auto agree = [&] {  // thread 0's verdict reaches all
    if (team == nullptr) return error;
    auto& verdict = *reinterpret_cast<std::atomic<int>*>(team->shared);
    if (leads) verdict.store(error);
    team->barrier();
    return verdict.load();
  };
  if (leads) {
    error = group.wait(group.books().operation);  // so all have done with the one before that
    if (error == kOk) ++group.books().operation;
  }
  if ((error = agree()) != kOk) return error;
  auto* mine = group.part<T>(op.n[2]);
  __builtin_memcpy(mine + begin, x + begin,
                   (end - begin) * sizeof(typename T::Element));
  if (team != nullptr) team->barrier();
  if (leads) {
    group.enter();
    error = group.wait(group.books().operation);
  }
  if ((error = agree()) != kOk) return error;
  group.sum<T>(x, begin, end);
  // The next piece's thread 0 must not enter while another thread still reads this one's slots.
  if (team != nullptr) team->barrier();
  return kOk;
}

template <class T>
int reduce(const Op& op, Team& team) {
  using Element = typename T::Element;
  const int64_t bytes = op.n[0] * int64_t(sizeof(Element));
  Team* const helpers = team.threads > 1 && bytes > kAlone ? &team : nullptr;
  if (helpers == nullptr && team.thread != 0) return kOk;
  const AllReduce group(op);
  const auto start = Clock::now();
  const int64_t step = op.n[3] / int64_t(sizeof(Element));
  for (int64_t at = 0; at < op.n[0]; at += step) {
    const int64_t count = op.n[0] - at < step ? op.n[0] - at : step;
    const int error =
        reduce_piece<T>(group, op, static_cast<Element*>(op.p[0]) + at, count, helpers);
    if (error != kOk) return error;
  }
  if (team.thread == 0) {
    group.books().calls += 1;
    group.books().bytes += bytes;
    group.books().ns += (Clock::now() - start).count();
  }
  return kOk;
}

}  // namespace

int all_reduce(const Op& op, Team& team) {
  return op.dtype == kBFloat16 ? reduce<BFloat>(op, team) : reduce<Float>(op, team);
}

}  // namespace ekiden
