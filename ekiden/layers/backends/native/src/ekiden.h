// What every kernel sees: one operation's arguments, and the team of threads that runs it.
//
// A step is a list of operations. Every thread of the team runs every operation, each on its own
// share of the work, and meets the others after each one. Nothing here allocates, throws or locks.
#pragma once
#include <cstdint>

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

// One thread's view of the team.
class Team {
 public:
  virtual ~Team() = default;
  int thread = 0;
  int threads = 1;
  // Until every thread of the team is here; what they wrote before is visible after.
  virtual void barrier() = 0;
};

// 0, or an error that ends the list: what was computed after it means nothing.
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
