// kLinear: y[m, n] = scale[n] * sum_k x[m, k] w[n, k] + bias[n].
//
// p: 0 x, 1 panels (pack.cpp), 2 y, 3 bias float32 [N] or null, 4 scale float32 [N] or null.
// n: 0 M, 1 N, 2 K, 3 elements from row to row of x, 4 of y, 5 whether y is float32.
//
// A panel of weights is read from memory once for a chunk of rows, and from the cache for every
// strip of 12 but the first. An output is summed in float32 along k in one chain, whatever M and
// the threads are.
#include <algorithm>
#include <utility>

#include "interleave.h"
#include "loads.h"

namespace ekiden {
namespace {

// Two registers of sums a row, and two of weights: 26 of 32.
constexpr int64_t kStripRows = 12;
// Steps along k between which the sums rest in memory, so that the weights between stay in L2.
constexpr int64_t kBlockSteps = 2048;
// From so many rows on, arithmetic leaves room to bring what comes so many steps later into L1.
constexpr int64_t kNearRows = 9, kNearSteps = 32;
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
    if constexpr (kRows >= kNearRows) {
      _mm_prefetch(panel + kNearSteps * kStepBytes, _MM_HINT_T0);
      _mm_prefetch(panel + kNearSteps * kStepBytes + 64, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(x + kNearSteps * kRows), _MM_HINT_T0);
    }
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

template <class D, class Out>
class Linear {
 public:
  Linear(const Op& op, Team& team)
      : op_(op), team_(team), sums_(reinterpret_cast<float*>(team.scratch)),
        steps_(ceil_div(op.n[2], D::kPack)) {}

  void run() const {
    by_loads(
        Job{op_.n[0], kStripRows, steps_, ceil_div(op_.n[1], kPanel)},
        team_.scratch + kSumsBytes, team_,
        [this](const Load& load, int64_t strip) { prepare(load, strip); },
        [this](const Load& load, const Piece& piece) { multiply_piece(load, piece); });
  }

 private:
  void prepare(const Load& load, int64_t strip) const {
    const auto* x = static_cast<const typename D::Element*>(op_.p[0]);
    const int64_t row = load.row + load.strips.begin(strip);
    interleave<D>(x + row * op_.n[3], op_.n[3], load.strips.size(strip), op_.n[2],
                  load.strip(strip));
  }

  const char* weights(int64_t panel, int64_t step) const {
    return static_cast<const char*>(op_.p[1]) + (panel * steps_ + step) * kStepBytes;
  }

  void multiply_piece(const Load& load, const Piece& piece) const {
    for (int64_t step = 0; step < steps_; step += kBlockSteps)
      multiply_block(load, piece, step, std::min(kBlockSteps, steps_ - step));
  }

  // Steps [step, step + steps) of all strips, each of which fetches its part of the next block.
  void multiply_block(const Load& load, const Piece& piece, int64_t step, int64_t steps) const {
    const bool whole = steps == steps_, last = step + steps == steps_;
    const int64_t strips = piece.end - piece.begin;
    const char* next = last ? weights(piece.next, 0) : weights(piece.panel, step + steps);
    for (int64_t i = 0; i < strips; ++i) {
      const int64_t strip = piece.begin + i, rows = load.strips.size(strip);
      Tile tile{load.strip(strip) + step * rows,
                weights(piece.panel, step),
                steps,
                sums_ + (whole ? 0 : i * kStripSums),
                step == 0,
                next + i * steps * (kStepBytes / strips),
                kStepBytes / strips};
      if (strips == 1) tile.ahead = tile.panel + lead(rows);
      if (last) fetch_outputs(load.row + load.strips.begin(strip), rows, piece.panel);
      multiply_rows<D>(tile, rows, std::make_integer_sequence<int, kStripRows>());
      if (!last) continue;
      finish<Out>(op_, static_cast<const float*>(op_.p[4]), tile.sums,
                  load.row + load.strips.begin(strip), rows, piece.panel);
    }
  }

  // Lines of y that were last seen by another core, or in memory, come while the sums are made.
  void fetch_outputs(int64_t row, int64_t rows, int64_t panel) const {
    const auto* y = static_cast<const typename Out::Element*>(op_.p[2]) + panel * kPanel;
    for (int64_t r = row; r < row + rows; ++r) __builtin_prefetch(y + r * op_.n[4], 1);
  }

  const Op& op_;
  Team& team_;
  float* sums_;
  const int64_t steps_;
};

template <class D, class Out>
void run(const Op& op, Team& team) {
  Linear<D, Out>(op, team).run();
}

}  // namespace

int linear(const Op& op, Team& team) {
  if (!fits(op)) return kBadArgument;
  if (!fits_shared(op.n[2])) return kNoRoom;
  if (op.dtype == kFloat32)
    run<Float, Float>(op, team);
  else if (op.n[5])
    run<BFloat, Float>(op, team);
  else
    run<BFloat, BFloat>(op, team);
  return kOk;
}

}  // namespace ekiden
