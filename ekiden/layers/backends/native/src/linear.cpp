// kLinear: y[m, n] = scale[n] * sum_k x[m, k] w[n, k] + bias[n].
//
// p: 0 x, 1 panels (pack.cpp), 2 y, 3 bias float32 [N] or null, 4 scale float32 [N] or null.
// n: 0 M, 1 N, 2 K, 3 elements from row to row of x, 4 of y, 5 whether y is float32.
#include "ekiden.h"
#include "panels.h"

namespace ekiden {
namespace {

float weight_at(const Op& op, int64_t n, int64_t k) {
  const int64_t panel = n / kPanel, lane = n % kPanel;
  if (op.dtype == kFloat32)
    return static_cast<const float*>(op.p[1])[(panel * op.n[2] + k) * kPanel + lane];
  const int64_t pairs = (op.n[2] + 1) / 2;
  return widen(static_cast<const uint16_t*>(
      op.p[1])[((panel * pairs + k / 2) * kPanel + lane) * 2 + k % 2]);
}

}  // namespace

int linear(const Op& op, Team& team) {
  const float* bias = static_cast<const float*>(op.p[3]);
  const float* scale = static_cast<const float*>(op.p[4]);
  const Share share(op.n[1], team);
  for (int64_t m = 0; m < op.n[0]; ++m)
    for (int64_t n = share.begin; n < share.end; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < op.n[2]; ++k)
        sum += load(op.p[0], op.dtype, m * op.n[3] + k) * weight_at(op, n, k);
      if (scale) sum *= scale[n];
      if (bias) sum += bias[n];
      store(op.p[2], op.n[5] ? int32_t{kFloat32} : op.dtype, m * op.n[4] + n, sum);
    }
  return kOk;
}

}  // namespace ekiden
