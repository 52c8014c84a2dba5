// Rows of a quantised KV cache: bytes, and behind them the float32 scale that they are times.
#pragma once
#include "vector.h"

namespace ekiden {

// A cache row: numbers in the activations' dtype, or bytes and a scale.
enum CacheFormat : int64_t { kPlain = 0, kInt8 = 1, kE4M3 = 2 };

// Sixteen bytes as floats, not scaled yet.
inline __m512 decode(const char* from, __mmask16 lanes, CacheFormat format) {
  const __m128i bytes = _mm_maskz_loadu_epi8(lanes, from);
  if (format == kInt8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  // Shifted into place, e4m3 is a float16 whose exponent is 8 too small, subnormals included.
  const __m256i wide = _mm256_cvtepi8_epi16(bytes);
  const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0x8000)));
  const __m256i rest =
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0x3f80)));
  const __m512 small = _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
  return _mm512_mul_ps(small, _mm512_set1_ps(256.0f));
}

// Floats of at most 448 in size to the nearest e4m3, halves to even.
inline __m128i to_e4m3(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i sign = _mm512_srli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(1 << 31)), 24);
  const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  // Twenty bits of the float's 23 go, and what they say of the next one stays.
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(size, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
  const __m512i normal =
      _mm512_sub_epi32(_mm512_srli_epi32(nearest, 20), _mm512_set1_epi32((127 - 7) << 3));
  // Below 2 ** -6 the byte counts steps of 2 ** -9.
  const __m512 steps = _mm512_mul_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(512.0f));
  const __m512i subnormal = _mm512_cvtps_epi32(steps);
  const __mmask16 tiny = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32((127 - 6) << 23));
  const __m512i code = _mm512_mask_mov_epi32(normal, tiny, subnormal);
  return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

// A row of `width` elements as bytes and their scale: the largest becomes the largest byte.
template <class T>
inline void encode_row(const typename T::Element* row, int width, CacheFormat format, char* to) {
  __m512 most = _mm512_setzero_ps();
  __mmask16 broken = 0;
  for (int d = 0; d < width; d += kLanes) {
    const __m512 x = T::load(row + d, first(width - d));
    broken |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    most = _mm512_max_ps(_mm512_abs_ps(x), most);
  }
  const float largest = broken ? __builtin_nanf("") : _mm512_reduce_max_ps(most);
  const float scale = largest / (format == kInt8 ? 127.0f : 448.0f);
  const __m512 divisor = _mm512_set1_ps(scale == 0.0f ? 1.0f : scale);
  for (int d = 0; d < width; d += kLanes) {
    const __mmask16 lanes = first(width - d);
    const __m512 x = _mm512_div_ps(T::load(row + d, lanes), divisor);
    const __m128i bytes =
        format == kInt8 ? _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)) : to_e4m3(x);
    _mm_mask_storeu_epi8(to + d, lanes, bytes);
  }
  __builtin_memcpy(to + width, &scale, sizeof scale);
}

// The numbers of such a row as elements.
template <class T>
inline void decode_row(const char* row, int width, CacheFormat format, typename T::Element* to) {
  float scale;
  __builtin_memcpy(&scale, row + width, sizeof scale);
  for (int d = 0; d < width; d += kLanes) {
    const __mmask16 lanes = first(width - d);
    T::store(to + d, _mm512_mul_ps(decode(row + d, lanes, format), _mm512_set1_ps(scale)), lanes);
  }
}

}  // namespace ekiden
