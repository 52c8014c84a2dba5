// Norms, gated activations and embedding rows. Arithmetic is float32; results are rounded to the
// activations' dtype where the plain torch backend rounds them.
#include "ekiden.h"
#include "norm.h"

namespace ekiden {
namespace {

constexpr int64_t kBlock = 256;  // columns that one thread takes at once

template <class T>
typename T::Element* at(void* base, int64_t offset) {
  return static_cast<typename T::Element*>(base) + offset;
}

template <class T>
int norm_rows(const Op& op, Team& team) {
  const Share rows(op.n[0], team);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    norm_row<T>(at<T>(op.p[0], r * op.n[2]), static_cast<const float*>(op.p[1]),
                at<T>(op.p[2], r * op.n[3]), op.n[1], op.f[0]);
  }
  return kOk;
}

template <class T>
int add_norm_rows(const Op& op, Team& team) {
  const int64_t width = op.n[1];
  const Share rows(op.n[0], team);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    auto* residual = at<T>(op.p[0], r * op.n[2]);
    const auto* x = at<T>(op.p[1], r * op.n[3]);
    for (int64_t c = 0; c < width; c += kLanes) {
      const __mmask16 lanes = first(width - c);
      const __m512 sum = _mm512_add_ps(T::load(residual + c, lanes), T::load(x + c, lanes));
      T::store(residual + c, sum, lanes);
    }
    norm_row<T>(residual, static_cast<const float*>(op.p[2]), at<T>(op.p[3], r * op.n[4]), width,
                op.f[0]);
  }
  return kOk;
}

inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// The tanh form of GELU (arXiv:1606.08415).
inline __m512 gelu_tanh(__m512 x) {
  const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
  const __m512 turn = tanh(_mm512_mul_ps(inner, _mm512_set1_ps(0.7978845608028654f)));
  const __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
  return _mm512_mul_ps(half, _mm512_add_ps(_mm512_set1_ps(1.0f), turn));
}

template <class T>
int gated_blocks(const Op& op, Team& team) {
  const int64_t width = op.n[1], blocks = (width + kBlock - 1) / kBlock;
  const Share share(op.n[0] * blocks, team);
  for (int64_t i = share.begin; i < share.end; ++i) {
    const int64_t row = i / blocks, begin = i % blocks * kBlock;
    const int64_t end = begin + kBlock < width ? begin + kBlock : width;
    const auto* gate = at<T>(op.p[0], row * op.n[2]);
    auto* out = at<T>(op.p[1], row * width);
    for (int64_t c = begin; c < end; c += kLanes) {
      const __mmask16 lanes = first(end - c);
      const __m512 x = T::load(gate + c, lanes);
      const __m512 active = T::rounded(op.n[3] == 0 ? silu(x) : gelu_tanh(x));
      T::store(out + c, _mm512_mul_ps(active, T::load(gate + width + c, lanes)), lanes);
    }
  }
  return kOk;
}

template <class T>
int embed_rows(const Op& op, Team& team) {
  const auto* tokens = static_cast<const int64_t*>(op.p[0]);
  const int64_t width = op.n[1];
  const __m512 scale = _mm512_set1_ps(op.f[0]);
  const Share rows(op.n[0], team);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const int64_t row = tokens[r] - op.n[3];
    const bool here = row >= 0 && row < op.n[2];
    const auto* from = at<T>(op.p[1], here ? row * op.n[4] : 0);
    auto* out = at<T>(op.p[2], r * width);
    for (int64_t c = 0; c < width; c += kLanes) {
      const __mmask16 lanes = first(width - c);
      const __m512 x = here ? T::load(from + c, lanes) : _mm512_setzero_ps();
      T::store(out + c, _mm512_mul_ps(x, scale), lanes);
    }
  }
  return kOk;
}

}  // namespace

// p[0] x, p[1] weight float32, p[2] out; n[0] rows, n[1] width, n[2] and n[3] elements from row to
// row of x and out; f[0] eps.
int norm(const Op& op, Team& team) {
  return op.dtype == kBFloat16 ? norm_rows<BFloat>(op, team) : norm_rows<Float>(op, team);
}

// p[0] residual, which becomes the sum, p[1] x, p[2] weight float32, p[3] out; n[0] rows,
// n[1] width, n[2..4] elements from row to row of residual, x and out; f[0] eps.
int add_norm(const Op& op, Team& team) {
  return op.dtype == kBFloat16 ? add_norm_rows<BFloat>(op, team) : add_norm_rows<Float>(op, team);
}

// p[0] gates and behind them the ups of a row, p[1] out; n[0] rows, n[1] width of out,
// n[2] elements from row to row of p[0], n[3] 0 for silu, 1 for gelu_tanh.
int gated(const Op& op, Team& team) {
  return op.dtype == kBFloat16 ? gated_blocks<BFloat>(op, team) : gated_blocks<Float>(op, team);
}

// p[0] tokens int64, p[1] table, p[2] out; n[0] tokens, n[1] width, n[2] rows of the table,
// n[3] token of its first row, n[4] elements from row to row; f[0] scale.
int embed(const Op& op, Team& team) {
  return op.dtype == kBFloat16 ? embed_rows<BFloat>(op, team) : embed_rows<Float>(op, team);
}

}  // namespace ekiden
