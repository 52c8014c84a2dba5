// Sixteen floats at a time: loads and stores of either dtype, exponentials, a transpose.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace ekiden {

constexpr int kLanes = 16;

inline __mmask16 first(int64_t lanes) {
  return lanes >= kLanes ? __mmask16(0xffff) : __mmask16((1u << (lanes < 0 ? 0 : lanes)) - 1);
}

// How activations lie in memory. `kPack` neighbours along a sum share one 32-bit word, which is
// what one step of a dot product takes.
struct Float {
  using Element = float;
  static constexpr int kPack = 1;
  static __m512 load(const float* from, __mmask16 lanes = 0xffff) {
    return _mm512_maskz_loadu_ps(lanes, from);
  }
  static void store(float* to, __m512 x, __mmask16 lanes = 0xffff) {
    _mm512_mask_storeu_ps(to, lanes, x);
  }
  static void store(float* to, __m512 x, __m512 next) {
    store(to, x);
    store(to + kLanes, next);
  }
  static __m512 rounded(__m512 x) { return x; }
  static __m512 step(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

struct BFloat {
  using Element = uint16_t;
  static constexpr int kPack = 2;
  static __m512 load(const uint16_t* from, __mmask16 lanes = 0xffff) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static void store(uint16_t* to, __m512 x, __mmask16 lanes = 0xffff) {
    _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(x));
  }
  static void store(uint16_t* to, __m512 x, __m512 next) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(next, x));
  }
  static __m512 rounded(__m512 x) {
    const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static __m512 step(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

// The second operand of a vector minimum or maximum is what comes out where one is not a number:
// nothing here may turn such a value into an ordinary one.

// 2 ** x; 0 for minus infinity, exactly 1 at 0; relative error under 2e-7. The polynomial is a
// minimax fit of 2 ** f on [0, 1) whose constant is held at 1.
inline __m512 exp2(__m512 x) {
  constexpr int kFromFloor = 0x09;
  const __m512 f = _mm512_reduce_ps(x, kFromFloor);  // x less its floor, which scalef takes
  __m512 p = _mm512_set1_ps(0x1.e974fep-10f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.277854p-7f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c91ce6p-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ebdb56p-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e4bap-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

constexpr float kLog2E = 1.44269504088896340736f;

// e ** x for x in [-150, 88.7], and that range's ends outside of it; relative error under 2e-7.
inline __m512 exp(__m512 any) {
  const __m512 x =
      _mm512_min_ps(_mm512_set1_ps(88.7f), _mm512_max_ps(_mm512_set1_ps(-150.0f), any));
  // The product's rounding error is added back: it would cost |x| ulps.
  const __m512 log2e = _mm512_set1_ps(kLog2E);
  const __m512 high = _mm512_mul_ps(x, log2e);
  const __m512 low = _mm512_fmsub_ps(x, log2e, high);
  const __m512 rest = _mm512_fmadd_ps(x, _mm512_set1_ps(1.925963033500e-8f), low);
  const __m512 big = exp2(high);
  return _mm512_fmadd_ps(big, _mm512_mul_ps(rest, _mm512_set1_ps(0.6931471805599453f)), big);
}

// Relative error under 3e-7. Near 0, where the quotient would lose digits, a minimax fit of the odd
// polynomial.
inline __m512 tanh(__m512 x) {
  const __m512 z = _mm512_mul_ps(x, x);
  __m512 p = _mm512_set1_ps(-0x1.75e1c8p-8f);
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(0x1.52269ap-6f));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-0x1.b83c5ap-5f));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(0x1.110726p-3f));
  p = _mm512_fmadd_ps(p, z, _mm512_set1_ps(-0x1.555532p-2f));
  const __m512 near = _mm512_fmadd_ps(_mm512_mul_ps(p, z), x, x);
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 twice = _mm512_add_ps(_mm512_abs_ps(x), _mm512_abs_ps(x));
  const __m512 quotient = _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(exp(twice), one));
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  const __m512 far = _mm512_or_ps(_mm512_sub_ps(one, quotient), sign);
  const __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0.625f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(far, small, near);
}

// Rows i of 16 words each become columns i.
inline void transpose(__m512i r[kLanes]) {
  __m512i t[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

}  // namespace ekiden
