// Root mean square normalisation of one row (arXiv:1910.07467).
#pragma once
#include "vector.h"

namespace ekiden {

// 1 / root of the mean square of a row, whose sum runs in four fixed strands.
template <class T>
inline float inverse_root(const typename T::Element* row, int64_t width, float eps) {
  __m512 strand[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                      _mm512_setzero_ps()};
  for (int64_t c = 0; c < width; c += kLanes) {
    const __m512 x = T::load(row + c, first(width - c));
    __m512& sum = strand[c / kLanes % 4];
    sum = _mm512_fmadd_ps(x, x, sum);
  }
  const float total = _mm512_reduce_add_ps(
      _mm512_add_ps(_mm512_add_ps(strand[0], strand[1]), _mm512_add_ps(strand[2], strand[3])));
  return 1.0f / __builtin_sqrtf(total / float(width) + eps);
}

template <class T>
inline void norm_row(const typename T::Element* row, const float* weight, typename T::Element* out,
              int64_t width, float eps) {
  const __m512 scale = _mm512_set1_ps(inverse_root<T>(row, width, eps));
  for (int64_t c = 0; c < width; c += kLanes) {
    const __mmask16 lanes = first(width - c);
    const __m512 x = _mm512_mul_ps(T::load(row + c, lanes), scale);
    T::store(out + c, _mm512_mul_ps(x, Float::load(weight + c, lanes)), lanes);
  }
}

}  // namespace ekiden
