// kLinear: y[m, n] = scale[n] * sum_k x[m, k] w[n, k] + bias[n].
//
// p: 0 x, 1 panels (pack.cpp), 2 y, 3 bias float32 [N] or null, 4 scale float32 [N] or null.
// n: 0 M, 1 N, 2 K, 3 elements from row to row of x, 4 of y, 5 whether y is float32.
//
// A panel of weights is read from memory once, and from the cache for every strip of 12 rows but
// the first. An output is summed in float32 along k in one chain, whatever M and the threads are.
#include <algorithm>
#include <utility>

#include "interleave.h"
#include "strips.h"

namespace ekiden {
namespace {

// Two registers of sums a row, and two of weights: 26 of 32.
constexpr int64_t kStripRows = 12;
// Steps along k between which the sums rest in memory, so that the weights between stay in L2.
constexpr int64_t kBlockSteps = 2048;
// Rows whose interleaved form is held at once: little enough to stay near, in L2 or L3.
constexpr int64_t kChunkRows = 16 * kStripRows;
constexpr int64_t kStripSums = kStripRows * kPanel;
constexpr int64_t kSumsBytes = kChunkRows / kStripRows * kStripSums * 4;

struct Tile {
  const uint32_t* x;   // [steps][rows]
  const char* panel;   // [steps][32] words
  int64_t steps;
  float* sums;         // [rows][32]
  bool fresh;          // whether the sums begin at zero
  const char* ahead;   // weights to fetch into L2, `ahead_bytes` more with each step
  int64_t ahead_bytes;
};

template <class D, int kRows>
void multiply(const Tile& tile) {
  __m512 sums[kRows][2];
  for (int r = 0; r < kRows; ++r)
    for (int h = 0; h < 2; ++h)
      sums[r][h] = tile.fresh ? _mm512_setzero_ps()
                              : _mm512_loadu_ps(tile.sums + r * kPanel + h * kLanes);
  const uint32_t* x = tile.x;
  const char* panel = tile.panel;
  const char* ahead = tile.ahead;
  for (int64_t step = 0; step < tile.steps; ++step) {
    const __m512i low = _mm512_load_si512(panel), high = _mm512_load_si512(panel + 64);
    for (int r = 0; r < kRows; ++r) {
      const __m512i all = _mm512_set1_epi32(x[r]);
      sums[r][0] = D::step(sums[r][0], low, all);
      sums[r][1] = D::step(sums[r][1], high, all);
    }
    _mm_prefetch(ahead, _MM_HINT_T1);
    _mm_prefetch(ahead + 64, _MM_HINT_T1);
    x += kRows;
    panel += kStepBytes;
    ahead += tile.ahead_bytes;
  }
  for (int r = 0; r < kRows; ++r)
    for (int h = 0; h < 2; ++h)
      _mm512_storeu_ps(tile.sums + r * kPanel + h * kLanes, sums[r][h]);
}

template <class D, int... kRows>
void multiply_rows(const Tile& tile, int64_t rows, std::integer_sequence<int, kRows...>) {
  using Multiply = void (*)(const Tile&);
  static constexpr Multiply table[] = {multiply<D, kRows + 1>...};
  table[rows - 1](tile);
}

// One chunk of rows, from `row` on, whose strips lie interleaved at `x`.
template <class D, class Out>
class Chunk {
 public:
  Chunk(const Op& op, int64_t row, const Strips& strips, const uint32_t* x, float* sums)
      : op_(op), row_(row), strips_(strips), x_(x), sums_(sums),
        steps_(ceil_div(op.n[2], D::kPack)), panels_(ceil_div(op.n[1], kPanel)) {}

  void run(const Team& team) const {
    deal(panels_, strips_, team, [this](int64_t panel, int64_t begin, int64_t end) {
      run_panel(panel, begin, end);
    });
  }

 private:
  void run_panel(int64_t panel, int64_t begin, int64_t end) const {
    const char* weights = static_cast<const char*>(op_.p[1]) + panel * steps_ * kStepBytes;
    const bool whole = steps_ <= kBlockSteps;
    for (int64_t step = 0; step < steps_; step += kBlockSteps) {
      const int64_t steps = std::min(kBlockSteps, steps_ - step);
      for (int64_t strip = begin; strip < end; ++strip) {
        const int64_t rows = strips_.size(strip), row = strips_.begin(strip);
        Tile tile{x_ + row * steps_ + step * rows,
                  weights + step * kStepBytes,
                  steps,
                  sums_ + (whole ? 0 : (strip - begin) * kStripSums),
                  step == 0,
                  nullptr,
                  kStepBytes / (end - begin)};
        tile.ahead = tile.panel + (end - begin == 1 ? lead(rows)
                                                    : steps * kStepBytes +
                                                          (strip - begin) * steps * tile.ahead_bytes);
        multiply_rows<D>(tile, rows, std::make_integer_sequence<int, kStripRows>());
        if (step + steps == steps_) finish<Out>(op_, static_cast<const float*>(op_.p[4]), tile.sums, row_ + row, rows, panel);
      }
    }
  }

  const Op& op_;
  const int64_t row_;
  const Strips& strips_;
  const uint32_t* x_;
  float* sums_;
  const int64_t steps_, panels_;
};

template <class D, class Out>
void run(const Op& op, Team& team) {
  const auto* x = static_cast<const typename D::Element*>(op.p[0]);
  const int64_t steps = ceil_div(op.n[2], D::kPack);
  float* sums = reinterpret_cast<float*>(team.scratch);
  const Strips chunks(op.n[0], kChunkRows);
  for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
    const int64_t row = chunks.begin(chunk);
    const Strips strips(chunks.size(chunk), kStripRows);
    // One strip is quicker made by every thread for itself than waited for.
    const bool alone = strips.count == 1;
    auto* words = reinterpret_cast<uint32_t*>(alone ? team.scratch + kSumsBytes : team.shared);
    const Share share(strips.count, team);
    for (int64_t strip = alone ? 0 : share.begin; strip < (alone ? 1 : share.end); ++strip) {
      const int64_t begin = strips.begin(strip);
      interleave<D>(x + (row + begin) * op.n[3], op.n[3], strips.size(strip), op.n[2],
                    words + begin * steps);
    }
    if (!alone) team.barrier();
    Chunk<D, Out>(op, row, strips, words, sums).run(team);
    if (chunk + 1 < chunks.count) team.barrier();
  }
}

}  // namespace

int linear(const Op& op, Team& team) {
  if (!fits(op)) return kBadArgument;
  if (op.n[2] * 4 > kSharedBytes / kChunkRows) return kNoRoom;
  if (op.dtype == kFloat32)
    run<Float, Float>(op, team);
  else if (op.n[5])
    run<BFloat, Float>(op, team);
  else
    run<BFloat, BFloat>(op, team);
  return kOk;
}

}  // namespace ekiden
