// Queries, keys and values of a step: q and k normed and rotated, k and v put into the cache.
//
//   p[0] qkv [T, E]   p[1] cos, p[2] sin [T, R] float32   p[3] slots [T] int64, negative: nowhere
//   p[4] cache of this layer, in bytes   p[5] q out [T, N, D]   p[6], p[7] weights [D] float32 of
//   the norms of q and k, or null
//   n[0] T   n[1] N   n[2] K   n[3] D   n[4] R   n[5] elements from row to row of qkv
//   n[6..9] strides in bytes of a block, a head, K to V, a row   n[10] block_size
//   n[11] CacheFormat   n[12] blocks of the cache
//   f[0] eps of the norms
//
// What is rounded to the activations' dtype on the way is what the plain torch backend rounds.
#include "ekiden.h"
#include "norm.h"
#include "scaled.h"

namespace ekiden {
namespace {

constexpr int kMaxDim = 256;

// The first `width` of a head turned by the token's angles; halves are the pairs.
template <class T>
void turn(typename T::Element* head, const float* cosines, const float* sines, int width) {
  const int half = width / 2;
  for (int d = 0; d < half; d += kLanes) {
    const __mmask16 lanes = first(half - d);
    const __m512 a = T::load(head + d, lanes), b = T::load(head + half + d, lanes);
    const __m512 turned_a = _mm512_sub_ps(_mm512_mul_ps(a, Float::load(cosines + d, lanes)),
                                          _mm512_mul_ps(b, Float::load(sines + d, lanes)));
    const __m512 turned_b = _mm512_add_ps(_mm512_mul_ps(b, Float::load(cosines + half + d, lanes)),
                                          _mm512_mul_ps(a, Float::load(sines + half + d, lanes)));
    T::store(head + d, turned_a, lanes);
    T::store(head + half + d, turned_b, lanes);
  }
}

template <class T>
class RotateStore {
 public:
  using Element = typename T::Element;
  explicit RotateStore(const Op& op) : op_(op), dim_(int(op.n[3])) {}

  // Head `head` of token `t`: q first, then k, then v.
  void run(int64_t t, int64_t head) const {
    const auto* from = static_cast<const Element*>(op_.p[0]) + t * op_.n[5] + head * dim_;
    const int64_t queries = op_.n[1], keys = op_.n[2];
    if (head >= queries + keys) return store(t, head - queries - keys, 1, from);
    Element row[kMaxDim];
    const auto* weight = static_cast<const float*>(op_.p[head < queries ? 6 : 7]);
    if (weight != nullptr) {
      norm_row<T>(from, weight, row, dim_, op_.f[0]);
    } else {
      __builtin_memcpy(row, from, dim_ * sizeof(Element));
    }
    const int width = int(op_.n[4]);
    turn<T>(row, static_cast<const float*>(op_.p[1]) + t * width,
            static_cast<const float*>(op_.p[2]) + t * width, width);
    if (head >= queries) return store(t, head - queries, 0, row);
    auto* out = static_cast<Element*>(op_.p[5]) + (t * queries + head) * dim_;
    __builtin_memcpy(out, row, dim_ * sizeof(Element));
  }

 private:
  void store(int64_t t, int64_t head, int part, const Element* row) const {
    const int64_t slot = static_cast<const int64_t*>(op_.p[3])[t], size = op_.n[10];
    if (slot < 0) return;
    char* to = static_cast<char*>(op_.p[4]) + slot / size * op_.n[6] + head * op_.n[7] +
               part * op_.n[8] + slot % size * op_.n[9];
    if (op_.n[11] == kPlain) {
      __builtin_memcpy(to, row, dim_ * sizeof(Element));
    } else {
      encode_row<T>(row, dim_, CacheFormat(op_.n[11]), to);
    }
  }

  const Op& op_;
  const int dim_;
};

template <class T>
void run_all(const Op& op, Team& team) {
  const RotateStore<T> work(op);
  const int64_t heads = op.n[1] + 2 * op.n[2];
  const Share share(op.n[0] * heads, team);
  for (int64_t i = share.begin; i < share.end; ++i) work.run(i / heads, i % heads);
}

}  // namespace

int rotate_store(const Op& op, Team& team) {
  if (op.n[3] <= 0 || op.n[3] > kMaxDim || op.n[4] > op.n[3] || op.n[4] % 2 != 0 ||
      op.n[11] < kPlain || op.n[11] > kE4M3) {
    return kBadArgument;
  }
  const auto* slots = static_cast<const int64_t*>(op.p[3]);
  for (int64_t t = 0; t < op.n[0]; ++t) {
    if (slots[t] >= op.n[12] * op.n[10]) return kBadArgument;
  }
  op.dtype == kBFloat16 ? run_all<BFloat>(op, team) : run_all<Float>(op, team);
  return kOk;
}

}  // namespace ekiden
