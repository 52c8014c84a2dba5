// Weights into panels, once, when they are loaded.
#include "ekiden.h"
#include "panels.h"

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
