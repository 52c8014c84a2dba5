// Rows of activations in the order of a kernel that broadcasts them.
#pragma once
#include <algorithm>

#include "panels.h"
#include "vector.h"

namespace ekiden {

// Up to 16 words (a float, or two bfloat16) from `k` on of a row of `inputs`; zeros past its end.
template <class D>
inline __m512i words(const typename D::Element* row, int64_t k, int64_t inputs) {
  const int64_t left = inputs - k;
  if constexpr (D::kPack == 1) return _mm512_maskz_loadu_epi32(first(left), row + k);
  const __mmask32 some = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
  return _mm512_maskz_loadu_epi16(some, row + k);
}

// Rows x[rows][stride] to to[words of a row][rows], a word of each row side by side.
template <class D>
void interleave(const typename D::Element* x, int64_t stride, int64_t rows, int64_t inputs,
                uint32_t* to) {
  const int64_t steps = ceil_div(inputs, D::kPack);
  for (int64_t step = 0; step < steps; step += kLanes) {
    __m512i block[kLanes] = {};
    for (int64_t row = 0; row < rows; ++row)
      block[row] = words<D>(x + row * stride, step * D::kPack, inputs);
    if (rows > 1) transpose(block);
    const int64_t some = rows > 1 ? std::min<int64_t>(kLanes, steps - step) : 1;
    const __mmask16 lanes = first(rows > 1 ? rows : steps - step);
    for (int64_t i = 0; i < some; ++i)
      _mm512_mask_storeu_epi32(to + (step + i) * rows, lanes, block[i]);
  }
}

}  // namespace ekiden
