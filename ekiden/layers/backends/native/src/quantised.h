// How quantised weights lie in memory.
//
// A panel of 32 outputs is a row of groups along k. A group is a header, float32 scales [32] and,
// if the weights have them, zero points u8 [32] in 64 bytes; then its steps, 128 bytes each:
// u8 [32][4], four neighbours along k of each output; of 4-bit weights a byte holds the weight of
// k in its low and of k + 4 in its high half, so that a step has eight. Past the last weight of a
// row stand zeros up to a multiple of 8; a group is never longer than kMaxGroup.
#pragma once
#include <algorithm>

#include "panels.h"

namespace ekiden {

constexpr int64_t kMaxGroup = 128;  // 255 * 32512 * 128 fits an int32

struct QuantisedLayout {
  int64_t inputs, group, bits;
  bool zeros;

  bool valid() const {
    return inputs > 0 && (bits == 4 || bits == 8) && group >= 8 && group <= kMaxGroup &&
           group % 8 == 0;
  }
  int64_t groups() const { return ceil_div(inputs, group); }
  // Weights of a group along k, padding counted.
  int64_t length(int64_t index) const {
    return std::min(group, ceil_div(inputs, 8) * 8 - index * group);
  }
  int64_t steps(int64_t index) const { return length(index) * bits / 32; }
  int64_t header_bytes() const { return kPanel * 4 + (zeros ? 64 : 0); }
  int64_t panel_bytes() const {
    return groups() * header_bytes() + ceil_div(inputs, 8) * bits / 4 * kPanel * 4;
  }
};

}  // namespace ekiden
