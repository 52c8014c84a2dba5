// Query rows against one tile of keys, in the manner of FlashAttention (arXiv:2205.14135).
//
// A row's result is the same bits whatever other rows are computed with it: its sums run over
// absolute tiles of keys, and what a row does not see adds exact zeros.
#pragma once
#include "tile.h"

namespace ekiden {

constexpr int kStrip = 6;  // rows at once: 6 x 4 vectors of sums, and room for the operands
constexpr int kRows = 96;  // rows that share a tile
constexpr float kNone = -__builtin_inff();

// How products of queries and keys become weights: 2 ** (unit * squashed(product)).
struct Scoring {
  float scale;
  float cap;  // 0 for none
  int64_t window;

  // log2(e) is taken in, since weights are powers of 2.
  float unit() const { return (cap == 0.0f ? scale : cap) * kLog2E; }
};

// Sums of a run of rows over some keys.
struct Sums {
  float* values;  // [rows][columns], each row times 2 ** -peak
  float* peaks;   // largest score so far, in powers of 2
  float* totals;  // [rows][kLanes], what the sum of weights is the sum of, times 2 ** -peak

  void clear(int rows, int columns) const {
    for (int i = 0; i < rows * columns; i += kLanes) {
      _mm512_store_ps(values + i, _mm512_setzero_ps());
    }
    for (int r = 0; r < rows; ++r) {
      peaks[r] = kNone;
      _mm512_store_ps(totals + r * kLanes, _mm512_setzero_ps());
    }
  }
};

// What a row must be multiplied by when its peak rises from `from` to `to`.
inline float shrink(float from, float to) {
  return to == kNone ? 0.0f : _mm512_cvtss_f32(exp2(_mm512_set1_ps(from - to)));
}

// Adds a row's sums over some keys to those over the keys before them.
inline void merge(const Sums& whole, int row, const float* values, float peak, const float* totals,
                  int columns) {
  const float to = peak > whole.peaks[row] ? peak : whole.peaks[row];
  const __m512 keep = _mm512_set1_ps(shrink(whole.peaks[row], to));
  const __m512 take = _mm512_set1_ps(shrink(peak, to));
  const auto add = [&](float* sums, const float* more) {
    const __m512 kept = _mm512_mul_ps(_mm512_load_ps(sums), keep);
    _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_load_ps(more), take, kept));
  };
  for (int d = 0; d < columns; d += kLanes) add(whole.values + row * columns + d, values + d);
  add(whole.totals + row * kLanes, totals);
  whole.peaks[row] = to;
}

// c[r] = c[r] * keep[r] + a[r] x b, over `steps` words; keep null: c is only written.
template <class T, int R, int V>
inline void multiply(const uint32_t* a, int lda, const uint32_t* b, int ldb, int steps, float* c,
                     int ldc, const float* keep, Feed& feed) {
  __m512 sum[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      sum[r][v] = _mm512_setzero_ps();
      if (keep != nullptr) {
        const __m512 old = _mm512_load_ps(c + r * ldc + v * kLanes);
        sum[r][v] = _mm512_mul_ps(old, _mm512_set1_ps(keep[r]));
      }
    }
  }
  for (int k = 0; k < steps; ++k) {
    if (k % 2 == 0) feed.some();
    __m512i column[V];
    for (int v = 0; v < V; ++v) column[v] = _mm512_load_si512(b + k * ldb + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const __m512i word = _mm512_set1_epi32(a[r * lda + k]);
      for (int v = 0; v < V; ++v) sum[r][v] = T::step(sum[r][v], word, column[v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) _mm512_store_ps(c + r * ldc + v * kLanes, sum[r][v]);
  }
}

// Lanes of vector `v` of a tile that lie in [begin, end), counted from the tile's first key.
inline __mmask16 between(int64_t begin, int64_t end, int v) {
  return first(end - v * kLanes) & ~first(begin - v * kLanes);
}

// A row's products become weights, in T's numbers; its peak and totals follow. `begin` and `end`
// are the keys that the row sees. Returns what its earlier sums must be multiplied by.
template <class T>
inline float weigh(const float* products, uint32_t* weights, float& peak, float* totals,
                   int64_t begin, int64_t end, const Scoring& how) {
  constexpr int kVectors = kTile / kLanes;
  const bool masked = begin > 0 || end < kTile;
  const auto hide = [&](__m512 x, int v) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(kNone), between(begin, end, v), x);
  };
  __m512 s[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    s[v] = _mm512_load_ps(products + v * kLanes);
    if (how.cap != 0.0f) s[v] = tanh(_mm512_mul_ps(s[v], _mm512_set1_ps(how.scale / how.cap)));
    if (masked) s[v] = hide(s[v], v);
  }
  const float unit = how.unit();
  __m512 most = s[0];
  for (int v = 1; v < kVectors; ++v) most = _mm512_max_ps(most, s[v]);
  const float highest = unit * _mm512_reduce_max_ps(most);
  const float to = highest > peak ? highest : peak;
  const __m512 base = _mm512_set1_ps(to == kNone ? 0.0f : to);
  for (int v = 0; v < kVectors; ++v) s[v] = exp2(_mm512_fmsub_ps(s[v], _mm512_set1_ps(unit), base));
  auto* out = reinterpret_cast<typename T::Element*>(weights);
  for (int v = 0; v < kVectors; v += 2) T::store(out + v * kLanes, s[v], s[v + 1]);
  const float keep = peak == to ? 1.0f : shrink(peak, to);
  peak = to;
  __m512 sum = s[0];
  for (int v = 1; v < kVectors; ++v) sum = _mm512_add_ps(sum, s[v]);
  const __m512 before = _mm512_load_ps(totals);
  _mm512_store_ps(totals, _mm512_fmadd_ps(before, _mm512_set1_ps(keep), sum));
  return keep;
}

}  // namespace ekiden
