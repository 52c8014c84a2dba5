// What linears have in common: rows by strips, and the way out of float32.
#pragma once
#include <algorithm>

#include "panels.h"
#include "vector.h"

namespace ekiden {

// One step of a panel: a word of 4 bytes for each output.
constexpr int64_t kStepBytes = kPanel * 4;

// Rows dealt to as few strips as hold them (or strips to chunks), equal to within one.
struct Strips {
  int64_t rows, count;
  Strips(int64_t rows, int64_t most) : rows(rows), count(ceil_div(rows, most)) {}
  int64_t begin(int64_t strip) const { return rows * strip / count; }
  int64_t size(int64_t strip) const { return begin(strip + 1) - begin(strip); }
};

// How far before its use a weight is fetched when it is used once: what was fastest here. With
// several strips, each fetches its part of what the next block of weights takes.
constexpr int64_t lead(int64_t rows) { return rows < 3 ? 4096 : rows < 4 ? 6144 : 8192; }

// sums[rows][32] of a panel, times scale, plus bias, to rows of y from `row` on.
template <class Out>
void finish(const Op& op, const float* scale, const float* sums, int64_t row, int64_t rows,
            int64_t panel) {
  const int64_t column = panel * kPanel;
  const float* bias = static_cast<const float*>(op.p[3]);
  auto* y = static_cast<typename Out::Element*>(op.p[2]);
  for (int64_t h = column; h < std::min(column + kPanel, op.n[1]); h += kLanes) {
    const __mmask16 lanes = first(op.n[1] - h);
    const __m512 factor = scale ? Float::load(scale + h, lanes) : _mm512_set1_ps(1.0f);
    const __m512 added = bias ? Float::load(bias + h, lanes) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; ++r) {
      __m512 sum = _mm512_loadu_ps(sums + r * kPanel + (h - column));
      if (scale) sum = _mm512_mul_ps(sum, factor);
      if (bias) sum = _mm512_add_ps(sum, added);
      Out::store(y + (row + r) * op.n[4] + h, sum, lanes);
    }
  }
}

// Whether a linear has its matrices. Without rows it needs none.
inline bool fits(const Op& op) {
  const bool there = op.p[0] && op.p[1] && op.p[2];
  return op.n[1] > 0 && op.n[2] > 0 && (op.n[0] == 0 || (op.n[0] > 0 && there));
}

}  // namespace ekiden
