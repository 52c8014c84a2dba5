// Weights into panels, once, when they are loaded.
#include "panels.h"
#include "quantised.h"

namespace ekiden {
namespace {

uint8_t weight_at(const uint8_t* weight, int64_t n, int64_t k, int64_t outputs, int64_t inputs) {
  return n < outputs && k < inputs ? weight[n * inputs + k] : 0;
}

// 32 outputs' header of one group; outputs past the last have scale 0.
void pack_header(const float* scales, const uint8_t* zeros, int64_t panel, int64_t group,
                 int64_t outputs, int64_t groups, char* to) {
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    const int64_t n = panel * kPanel + lane;
    const float scale = n < outputs ? scales[n * groups + group] : 0;
    std::memcpy(to + lane * 4, &scale, 4);
    if (zeros) to[kPanel * 4 + lane] = n < outputs ? zeros[n * groups + group] : 0;
  }
}

}  // namespace
}  // namespace ekiden

// weight [outputs, inputs] of 32-bit (pair 1) or 16-bit (pair 2) elements, `stride` apart by rows,
// to [outputs / 32][inputs / pair][32][pair], zero where there is no weight.
EKIDEN_API void ekiden_pack_dense(const void* weight, void* panels, int64_t outputs,
                                  int64_t inputs, int64_t stride, int32_t pair) {
  using namespace ekiden;
  const int64_t steps = ceil_div(inputs, pair), element = 4 / pair;
  const char* from = static_cast<const char*>(weight);
  char* to = static_cast<char*>(panels);
  for (int64_t panel = 0; panel < ceil_div(outputs, kPanel); ++panel)
    for (int64_t step = 0; step < steps; ++step)
      for (int64_t lane = 0; lane < kPanel; ++lane)
        for (int64_t k = step * pair; k < (step + 1) * pair; ++k, to += element) {
          const int64_t n = panel * kPanel + lane;
          if (n < outputs && k < inputs)
            std::memcpy(to, from + (n * stride + k) * element, element);
          else
            std::memset(to, 0, element);
        }
}

// Bytes of the panels of a quantised matrix; 0 for what no kernel takes.
EKIDEN_API int64_t ekiden_quantised_bytes(int64_t outputs, int64_t inputs, int64_t group,
                                          int64_t bits, int32_t zeros) {
  const ekiden::QuantisedLayout layout{inputs, group, bits, zeros != 0};
  if (!layout.valid()) return 0;
  return ekiden::ceil_div(outputs, ekiden::kPanel) * layout.panel_bytes();
}

// weight u8 [outputs, inputs], scales float32 [outputs, groups], zeros u8 of the same or null.
EKIDEN_API void ekiden_pack_quantised(const uint8_t* weight, const float* scales,
                                      const uint8_t* zeros, void* panels, int64_t outputs,
                                      int64_t inputs, int64_t group, int64_t bits) {
  using namespace ekiden;
  const QuantisedLayout layout{inputs, group, bits, zeros != nullptr};
  char* to = static_cast<char*>(panels);
  for (int64_t panel = 0; panel < ceil_div(outputs, kPanel); ++panel)
    for (int64_t g = 0; g < layout.groups(); ++g) {
      pack_header(scales, zeros, panel, g, outputs, layout.groups(), to);
      to += layout.header_bytes();
      for (int64_t step = 0; step < layout.steps(g); ++step)
        for (int64_t lane = 0; lane < kPanel; ++lane)
          for (int64_t i = 0; i < 4; ++i) {
            const int64_t n = panel * kPanel + lane, k = g * group + step * 32 / bits + i;
            const uint8_t low = weight_at(weight, n, k, outputs, inputs);
            *to++ = bits == 8 ? low : low | weight_at(weight, n, k + 4, outputs, inputs) << 4;
          }
    }
}
