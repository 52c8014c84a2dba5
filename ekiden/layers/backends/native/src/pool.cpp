// The team of threads, and the call that runs a list of operations on it.
//
// The calling thread is thread 0. The others wait for work and for each other at gates: spin for a
// bounded time, since the next operation is microseconds away, then sleep, since threads may
// outnumber cores.
//
// Where ranks of one host share its cores (cores.h), a list starts with as many threads as there
// are cores that nobody else computes on, and gives threads back between two operations.
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cores.h"
#include "ekiden.h"

namespace ekiden {
namespace {

using Clock = std::chrono::steady_clock;

const Kernel kernels[kKinds] = {linear, quantised_linear, norm,  add_norm,  gated,
                                rotate_store, attend,     embed, all_reduce};

// Pauses that a list waits for a thread that is on its way home: about as long as one sleeps.
constexpr int kTries = 5000;

std::atomic<uint32_t> forks{0};

// A number that only grows, and threads that wait for it to move.
class Gate {
 public:
  explicit Gate(std::chrono::nanoseconds spin) : spin_(spin) {}

  uint32_t count() const { return count_.load(std::memory_order_acquire); }

  void advance() {
    count_.fetch_add(1);
    if (sleepers_.load() != 0) futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
  }

  void wait_past(uint32_t seen) {
    if (spun_past(seen)) return;
    sleepers_.fetch_add(1);
    while (count_.load() == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    sleepers_.fetch_sub(1);
  }

 private:
  // Half of the time hot, half giving way to whoever wants this core.
  bool spun_past(uint32_t seen) const {
    const auto start = Clock::now();
    for (;;) {
      for (int i = 0; i < 32; ++i) {
        if (count() != seen) return true;
        _mm_pause();
      }
      const auto elapsed = Clock::now() - start;
      if (elapsed >= spin_) return false;
      if (elapsed >= spin_ / 2) sched_yield();
    }
  }

  void futex(int operation, uint32_t value) {
    syscall(SYS_futex, &count_, operation, value, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
  const std::chrono::nanoseconds spin_;
};

// Address space without memory until it is touched. Null when the system refuses.
class Mapping {
 public:
  explicit Mapping(int64_t bytes) : bytes_(bytes) {
    void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    start_ = static_cast<char*>(start);
    madvise(start_, bytes, MADV_HUGEPAGE);
  }
  Mapping(const Mapping&) = delete;
  ~Mapping() { munmap(start_, bytes_); }
  char* start() const { return start_; }

 private:
  char* start_;
  int64_t bytes_;
};

// Keeps workers off the core that their caller is on. Left alone, a system may wake a worker there,
// and two threads that wait for each other by spinning then take turns of milliseconds (seen: 2.7 ms
// for 45 us of work). With more threads than cores nothing is pinned.
class Cores {
 public:
  explicit Cores(int threads) : threads_(threads) {
    CPU_ZERO(&allowed_);
    if (sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) CPU_ZERO(&allowed_);
  }

  void spread(std::vector<std::thread>& workers) {
    const int here = sched_getcpu(), cores = CPU_COUNT(&allowed_);
    if (here == caller_ || here < 0 || threads_ > cores) return;
    caller_ = here;
    int core = -1;
    for (auto& worker : workers) {
      cpu_set_t others = allowed_;
      CPU_CLR(here, &others);
      if (threads_ == cores) {
        do ++core;
        while (!CPU_ISSET(core, &others));
        CPU_ZERO(&others);
        CPU_SET(core, &others);
      }
      pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
    }
  }

 private:
  const int threads_;
  cpu_set_t allowed_;
  int caller_ = -1;
};

class Pool {
 public:
  Pool(int threads, std::chrono::nanoseconds spin, const CoreShare& share)
      : most_(threads),
        share_(share),
        cores_(threads),
        meet_(spin),
        shared_(kSharedBytes),
        forks_(forks.load()) {
    for (int i = 0; i < threads; ++i) members_.push_back(std::make_unique<Member>(*this, i, spin));
    for (int i = 1; i < threads; ++i) start_worker(i);
  }

  ~Pool() {
    const std::lock_guard<std::mutex> after_the_last_list(mutex_);
    end_workers();
  }

  bool forked() const { return forks_ != forks.load(); }

  int run(const Op* ops, int64_t count, int64_t* failed) {
    if (forked()) return kForked;
    if (count <= 0) return kOk;
    const std::lock_guard<std::mutex> one_list_at_a_time(mutex_);
    list_ = {ops, count, list_.error == &errors_[0] ? &errors_[1] : &errors_[0]};
    list_.error->store(0);
    share_.work(Clock::now());
    team_ = gather();
    if (team_ > 1) cores_.spread(workers_);
    for (int i = 1, invited = team_; i < invited; ++i) members_[i]->work.advance();
    run_as(*members_[0], list_);
    share_.rest();
    const uint64_t error = list_.error->load();
    *failed = static_cast<int64_t>(error >> 32) - 1;
    return static_cast<int>(error & 0xffffffff);
  }

  // Threads that the last operation ran on.
  int team() const { return team_; }

  // Nanoseconds that thread 0 spent in each kind, the wait for the others included.
  void times(int64_t* ns) const {
    for (int kind = 0; kind < kKinds; ++kind) ns[kind] = ns_[kind];
  }

 private:
  struct List {
    const Op* ops;
    int64_t count;
    std::atomic<uint64_t>* error;  // (operation + 1) << 32 | code
  };

  struct Member final : Team {
    Member(Pool& owner, int index, std::chrono::nanoseconds spin)
        : pool(owner), work(spin), memory(kScratchBytes) {
      thread = index;
      scratch = memory.start();
      shared = owner.shared_.start();
    }
    void barrier() override { pool.meet(threads); }
    Pool& pool;
    Gate work;
    std::atomic<bool> home{true};  // has nothing to do with any list
    Mapping memory;
  };

  // Threads for the next list: as many as may compute now, less those that are not back yet from
  // the list before, for the system may have put them aside.
  int gather() {
    const int wanted = share_.threads(most_);
    for (int i = 1; i < wanted; ++i) {
      Member& member = *members_[i];
      for (int tries = 0; !member.home.load() && tries < kTries; ++tries) _mm_pause();
      if (!member.home.load()) return i;
      member.home.store(false);
    }
    return wanted;
  }

  void start_worker(int index) {
    // Signals are for the threads that know what to do with them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      workers_.emplace_back([this, index] { work(index); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      end_workers();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void end_workers() {
    stopping_ = true;
    for (auto& member : members_) member->work.advance();
    for (auto& worker : workers_) worker.join();
  }

  void work(int index) {
    pthread_setname_np(pthread_self(), "ekiden-kernels");
    Member& self = *members_[index];
    for (uint32_t seen = 0;; ++seen) {
      self.work.wait_past(seen);
      if (stopping_) return;
      run_as(self, list_);
      self.home.store(true);
    }
  }

  // A thread that leaves the last barrier late looks at its own list still, while the next one is
  // set up: hence a copy, and an error that only every other list uses. A thread that the team
  // shrank by reads a team_ that does not hold it, however late: it is not asked again before it is
  // home.
  void run_as(Member& self, const List list) {
    self.threads = team_;
    for (int64_t i = 0; i < list.count; ++i) {
      const auto start = Clock::now();
      const int error = run_one(list.ops[i], self);
      if (error != kOk) fail(list, i, error);
      end_operation(self.threads);
      // An error of a later operation may be there already; its turn comes.
      const uint64_t failed = list.error->load();
      if (failed != 0 && static_cast<int64_t>(failed >> 32) - 1 <= i) return;
      if (self.thread == 0) {
        const auto now = Clock::now();
        ns_[list.ops[i].kind] += (now - start).count();
        share_.work(now);
      }
      self.threads = team_;
      if (self.thread >= self.threads) return;
    }
  }

  static int run_one(const Op& op, Team& team) {
    if (op.kind < 0 || op.kind >= kKinds || kernels[op.kind] == nullptr) return kUnknownKind;
    return kernels[op.kind](op, team);
  }

  void fail(const List& list, int64_t index, int error) {
    uint64_t none = 0;
    list.error->compare_exchange_strong(none, (uint64_t(index) + 1) << 32 | uint32_t(error));
  }

  // Whoever comes last decides with how many the list goes on: fewer, when others want their cores.
  void end_operation(int threads) {
    meet(threads, [this, threads] {
      if (threads > share_.own()) team_ = std::min(threads, share_.threads(most_));
    });
  }

  void meet(int threads) {
    meet(threads, [] {});
  }

  // Without a deadline: only a thread that still computes keeps the others, and its memory is ours.
  template <typename Last>
  void meet(int threads, Last last) {
    if (threads == 1) return;
    const uint32_t seen = meet_.count();
    if (arrived_.fetch_add(1) + 1 == threads) {
      arrived_.store(0);
      last();
      meet_.advance();
    } else {
      meet_.wait_past(seen);
    }
  }

  const int most_;
  CoreShare share_;
  Cores cores_;
  Gate meet_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint64_t> errors_[2] = {};
  std::atomic<bool> stopping_{false};
  std::atomic<int> team_{1};
  List list_ = {nullptr, 0, nullptr};
  int64_t ns_[kKinds] = {};
  std::mutex mutex_;
  Mapping shared_;
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<std::thread> workers_;
  const uint32_t forks_;
};

}  // namespace
}  // namespace ekiden

// `seats` is null where cores are not shared; else this pool has seat `own` of `count`. Null when
// threads or memory cannot be had.
EKIDEN_API void* ekiden_pool_create(int32_t threads, int64_t spin_ns, void* seats, int32_t count,
                                    int32_t own) {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { ekiden::forks.fetch_add(1); });
  if (threads < 1 || registered != 0) return nullptr;
  try {
    const ekiden::CoreShare share(static_cast<ekiden::Seat*>(seats), count, own, threads);
    return new ekiden::Pool(threads, std::chrono::nanoseconds(spin_ns), share);
  } catch (...) {
    return nullptr;
  }
}

// In the child of a fork, where there are no threads to end, it does nothing.
EKIDEN_API void ekiden_pool_destroy(void* pool) {
  auto* mine = static_cast<ekiden::Pool*>(pool);
  if (!mine->forked()) delete mine;
}

// Runs ops[0..count) in order, each on all threads. Returns an Error; *failed is the operation's.
EKIDEN_API int32_t ekiden_run(void* pool, const ekiden::Op* ops, int64_t count,
                              int64_t* failed) {
  return static_cast<ekiden::Pool*>(pool)->run(ops, count, failed);
}

EKIDEN_API void ekiden_times(void* pool, int64_t* ns) {
  static_cast<ekiden::Pool*>(pool)->times(ns);
}

EKIDEN_API int32_t ekiden_team(void* pool) { return static_cast<ekiden::Pool*>(pool)->team(); }

// What library.py compares with its own view.
EKIDEN_API int64_t ekiden_op_bytes() { return sizeof(ekiden::Op); }
EKIDEN_API int64_t ekiden_kinds() { return ekiden::kKinds; }
EKIDEN_API int64_t ekiden_seat_bytes() { return sizeof(ekiden::Seat); }
