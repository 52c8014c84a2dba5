// What every kernel sees: one operation's arguments, and the team of threads that runs it.
//
// A step is a list of operations. Every thread of the team runs every operation, each on its own
// share of the work, and meets the others after each one. Nothing here allocates, throws or locks.
#pragma once
#include <cstdint>

// What Python calls.
#define EKIDEN_API extern "C" __attribute__((visibility("default")))

namespace ekiden {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1 };

// Numbers of the operations; library.py names the same ones.
enum Kind : int32_t {
  kLinear = 0,
  kQuantisedLinear = 1,
  kNorm = 2,
  kAddNorm = 3,
  kGated = 4,
  kRotateStore = 5,
  kAttend = 6,
  kEmbed = 7,
  kAllReduce = 8,
  kKinds = 9,
};

// Mirrored by library.Op. What each field holds is said where the kernel is.
struct Op {
  int32_t kind;
  int32_t dtype;  // of activations
  void* p[12];
  int64_t n[16];
  float f[4];
};

// What a kernel may return; library.py says each in words.
enum Error : int32_t {
  kOk = 0,
  kUnknownKind = 1,
  kBadArgument = 2,
  kNoRoom = 3,   // wants more scratch than a team has
  kForked = 4,   // the threads stayed in the parent process
  kRankMissing = 5,  // another rank did not come in time, or gave up
};

// Address space for scratch, in bytes: a page is real once it is touched.
constexpr int64_t kScratchBytes = int64_t{64} << 20;
constexpr int64_t kSharedBytes = int64_t{256} << 20;
// What an operation may use of it; behind lie the counters of turns.h.
constexpr int64_t kSharedRoom = kSharedBytes - 128;

// One thread's view of the team.
class Team {
 public:
  virtual ~Team() = default;
  int thread = 0;
  int threads = 1;
  // Memory for one operation, aligned to a page; what it holds at first means nothing.
  char* scratch = nullptr;  // this thread's own, kScratchBytes
  char* shared = nullptr;   // the same for every thread, kSharedRoom
  // Until every thread of the team is here; what they wrote before is visible after.
  virtual void barrier() = 0;
};

// The part of [0, count) that a thread of the team computes: contiguous, equal to within one.
struct Share {
  int64_t begin, end;
  Share(int64_t count, const Team& team)
      : begin(count * team.thread / team.threads), end(count * (team.thread + 1) / team.threads) {}
};

// kOk, or an error that ends the list. A thread that returns early must not leave others at a
// barrier: errors are found from the arguments, which all threads see alike.
using Kernel = int (*)(const Op&, Team&);

int linear(const Op&, Team&);
int quantised_linear(const Op&, Team&);
int norm(const Op&, Team&);
int add_norm(const Op&, Team&);
int gated(const Op&, Team&);
int rotate_store(const Op&, Team&);
int attend(const Op&, Team&);
int embed(const Op&, Team&);
int all_reduce(const Op&, Team&);

}  // namespace ekiden
