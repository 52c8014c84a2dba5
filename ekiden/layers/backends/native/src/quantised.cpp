// kQuantisedLinear: y[m, n] = sum_g scale[n, g] sum_k (w[n, k] - zero[n, g]) x[m, k] + bias[n].
//
// p: 0 x, 1 panels (quantised.h), 2 y, 3 bias float32 [N] or null.
// n: 0 M, 1 N, 2 K, 3 elements from row to row of x, 4 of y, 5 whether y is float32,
//    6 bits of a weight (4, 8), 7 weights of a group (8 to 128), 8 whether groups have zero points.
//
// Of each row, a group's activations become 16-bit numbers 256 hi + lo of signed bytes, with a scale
// of their own. Two vpdpbusd then give their products with unsigned weights exactly, so that the
// result is right to 2^-16 of a group's largest activation and the same for every M.
#include <cfloat>
#include <utility>

#include "loads.h"
#include "quantised.h"

// Sums stay in registers only where nothing is called with them.
#define EKIDEN_INLINE inline __attribute__((always_inline))

namespace ekiden {
namespace {

// A row takes four registers of sums: 24 of 32.
constexpr int64_t kStripRows = 6;
constexpr float kLargest = 32512.0f;  // 256 * 127

// Words of one row's quantised form: a scale and a sum a group, hi and lo of each four inputs.
int64_t row_words(const QuantisedLayout& layout) {
  return 2 * layout.groups() + ceil_div(layout.inputs, 8) * 4;
}

// One group of one row: scale to to[0], sum to to[rows], then hi and lo words `rows` apart.
template <class D>
void quantise_group(const typename D::Element* x, int64_t inputs, int64_t length, int64_t rows,
                    uint32_t* to) {
  __m512 values[kMaxGroup / kLanes];
  // Compared as integers: infinity and NaN are the largest, and come out as NaN.
  __m512i largest = _mm512_setzero_si512();
  for (int64_t k = 0; k < length; k += kLanes) {
    const __m512 value = D::load(x + k, first(std::min(inputs, length) - k));
    values[k / kLanes] = value;
    largest = _mm512_max_epi32(largest, _mm512_castps_si512(_mm512_abs_ps(value)));
  }
  const float scale =
      _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(largest)))) /
      kLargest;
  const __m512 inverse = _mm512_set1_ps(scale >= FLT_MIN ? 1 / scale : 0);
  const __m512i half = _mm512_set1_epi32(128);
  __m512i sum = _mm512_setzero_si512();
  std::memcpy(to, &scale, 4);
  uint32_t* word = to + 2 * rows;
  for (int64_t k = 0; k < length; k += kLanes) {
    const __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(values[k / kLanes], inverse));
    const __m512i hi = _mm512_srai_epi32(_mm512_add_epi32(number, half), 8);
    const __m512i lo = _mm512_sub_epi32(number, _mm512_slli_epi32(hi, 8));
    sum = _mm512_add_epi32(sum, number);
    alignas(16) uint32_t highs[4], lows[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(highs), _mm512_cvtepi32_epi8(hi));
    _mm_store_si128(reinterpret_cast<__m128i*>(lows), _mm512_cvtepi32_epi8(lo));
    for (int64_t i = 0; i < std::min<int64_t>(4, (length - k) / 4); ++i, word += 2 * rows) {
      word[0] = highs[i];
      word[rows] = lows[i];
    }
  }
  to[rows] = static_cast<uint32_t>(_mm512_reduce_add_epi32(sum));
}

// Rows x[rows][stride] to their quantised form: groups in order, within one the rows side by side.
template <class D>
void quantise(const typename D::Element* x, int64_t stride, int64_t rows,
              const QuantisedLayout& layout, uint32_t* to) {
  for (int64_t group = 0; group < layout.groups(); ++group) {
    const int64_t k = group * layout.group, length = layout.length(group);
    for (int64_t row = 0; row < rows; ++row)
      quantise_group<D>(x + row * stride + k, layout.inputs - k, length, rows, to + row);
    to += (2 + length / 2) * rows;
  }
}

struct Tile {
  const uint32_t* x;
  const char* panel;
  float* sums;        // [rows][32]
  const char* ahead;  // weights to fetch into L2, `ahead_bytes` more with each step
  int64_t ahead_bytes;
};

// Four products a lane onto the sums, in place: from the intrinsic GCC 12 makes copies, and spills.
EKIDEN_INLINE void dot(__m512i* sums, __m512i weights, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(*sums) : "v"(weights), "v"(x));
}

// Exact sums of products with hi and lo bytes, of 16 outputs each.
template <int kRows>
struct Products {
  __m512i hi[kRows][2], lo[kRows][2];

  EKIDEN_INLINE void clear() {
    for (int r = 0; r < kRows; ++r)
      for (int h = 0; h < 2; ++h) hi[r][h] = lo[r][h] = _mm512_setzero_si512();
  }
  EKIDEN_INLINE void add(const uint32_t* x, __m512i left, __m512i right) {
    for (int r = 0; r < kRows; ++r) {
      const __m512i high = _mm512_set1_epi32(x[r]), low = _mm512_set1_epi32(x[kRows + r]);
      dot(&hi[r][0], left, high);
      dot(&lo[r][0], left, low);
      dot(&hi[r][1], right, high);
      dot(&lo[r][1], right, low);
    }
  }
  EKIDEN_INLINE __m512i whole(int r, int h) const {
    return _mm512_add_epi32(_mm512_slli_epi32(hi[r][h], 8), lo[r][h]);
  }
};

// The sums of one group, less the zero points' part, times both scales, into the sums of all.
template <int kRows>
EKIDEN_INLINE void add_group(const Products<kRows>& products, const QuantisedLayout& layout, const char* header,
               const uint32_t* x, float* sums) {
  for (int h = 0; h < 2; ++h) {
    const __m512 scale = _mm512_loadu_ps(reinterpret_cast<const float*>(header) + h * kLanes);
    const auto* zeros = reinterpret_cast<const __m128i*>(header + kPanel * 4) + h;
    const __m512i zero = layout.zeros ? _mm512_cvtepu8_epi32(_mm_loadu_si128(zeros))
                                      : _mm512_set1_epi32(1 << (layout.bits - 1));
    for (int r = 0; r < kRows; ++r) {
      float own;
      std::memcpy(&own, x + r, 4);
      const __m512i surplus = _mm512_mullo_epi32(zero, _mm512_set1_epi32(x[kRows + r]));
      const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(products.whole(r, h), surplus));
      float* sum = sums + r * kPanel + h * kLanes;
      const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(own));
      _mm512_storeu_ps(sum, _mm512_fmadd_ps(exact, both, _mm512_loadu_ps(sum)));
    }
  }
}

template <int kBits, int kRows>
void multiply(const Tile& tile, const QuantisedLayout& layout) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const uint32_t* x = tile.x;
  const char *panel = tile.panel, *ahead = tile.ahead;
  std::fill(tile.sums, tile.sums + kRows * kPanel, 0.0f);
  for (int64_t group = 0; group < layout.groups(); ++group) {
    const char* header = panel;
    const uint32_t* own = x;
    Products<kRows> products;
    products.clear();
    panel += layout.header_bytes();
    x += 2 * kRows;
    for (const char* end = panel + layout.steps(group) * kStepBytes; panel < end;
         panel += kStepBytes, ahead += tile.ahead_bytes) {
      _mm_prefetch(ahead, _MM_HINT_T1);
      _mm_prefetch(ahead + 64, _MM_HINT_T1);
      const __m512i left = _mm512_load_si512(panel), right = _mm512_load_si512(panel + 64);
      if (kBits == 8) {
        products.add(x, left, right);
        x += 2 * kRows;
      } else {
        products.add(x, _mm512_and_si512(left, nibble), _mm512_and_si512(right, nibble));
        products.add(x + 2 * kRows, _mm512_and_si512(_mm512_srli_epi16(left, 4), nibble),
                     _mm512_and_si512(_mm512_srli_epi16(right, 4), nibble));
        x += 4 * kRows;
      }
    }
    add_group(products, layout, header, own, tile.sums);
  }
}

template <int... kRows>
void multiply_rows(const Tile& tile, const QuantisedLayout& layout, int64_t rows,
                   std::integer_sequence<int, kRows...>) {
  using Multiply = void (*)(const Tile&, const QuantisedLayout&);
  static constexpr Multiply of_4[] = {multiply<4, kRows + 1>...};
  static constexpr Multiply of_8[] = {multiply<8, kRows + 1>...};
  (layout.bits == 4 ? of_4 : of_8)[rows - 1](tile, layout);
}

template <class Out>
void multiply_piece(const Op& op, const QuantisedLayout& layout, const Load& load,
                    const Piece& piece, float* sums) {
  const int64_t bytes = layout.panel_bytes(), strips = piece.end - piece.begin;
  const char* panels = static_cast<const char*>(op.p[1]);
  for (int64_t i = 0; i < strips; ++i) {
    const int64_t strip = piece.begin + i, rows = load.strips.size(strip);
    const char* weights = panels + piece.panel * bytes;
    const char* next = panels + piece.next * bytes + bytes / strips * i;
    multiply_rows({load.strip(strip), weights, sums, strips == 1 ? weights + lead(rows) : next,
                   kStepBytes / strips},
                  layout, rows, std::make_integer_sequence<int, kStripRows>());
    finish<Out>(op, nullptr, sums, load.row + load.strips.begin(strip), rows, piece.panel);
  }
}

template <class D, class Out>
void run(const Op& op, const QuantisedLayout& layout, Team& team) {
  auto* sums = reinterpret_cast<float*>(team.scratch);
  by_loads(
      Job{op.n[0], kStripRows, row_words(layout), ceil_div(op.n[1], kPanel)},
      team.scratch + kStripRows * kPanel * 4, team,
      [&](const Load& load, int64_t strip) {
        const auto* x = static_cast<const typename D::Element*>(op.p[0]);
        const int64_t row = load.row + load.strips.begin(strip);
        quantise<D>(x + row * op.n[3], op.n[3], load.strips.size(strip), layout,
                    load.strip(strip));
      },
      [&](const Load& load, const Piece& piece) {
        multiply_piece<Out>(op, layout, load, piece, sums);
      });
}

}  // namespace

int quantised_linear(const Op& op, Team& team) {
  const QuantisedLayout layout{op.n[2], op.n[7], op.n[6], op.n[8] != 0};
  if (!fits(op) || !layout.valid()) return kBadArgument;
  if (!fits_shared(row_words(layout))) return kNoRoom;
  if (op.dtype == kFloat32)
    run<Float, Float>(op, layout, team);
  else if (op.n[5])
    run<BFloat, Float>(op, layout, team);
  else
    run<BFloat, BFloat>(op, layout, team);
  return kOk;
}

}  // namespace ekiden
