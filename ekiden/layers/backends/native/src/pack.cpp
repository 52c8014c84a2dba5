// Weights into panels, once, when they are loaded: blocks of 16 rows by 16 words, transposed.
#include "interleave.h"
#include "panels.h"
#include "quantised.h"
#include "strips.h"

namespace ekiden {
namespace {

// The words of 16 outputs from `n` on, read by row(n), to every kStepBytes of `to`.
template <class Row>
void pack_block(int64_t n, int64_t outputs, int64_t steps, char* to, Row row) {
  __m512i block[kLanes] = {};
  for (int64_t i = 0; i < std::min<int64_t>(kLanes, outputs - n); ++i) block[i] = row(n + i);
  transpose(block);
  for (int64_t i = 0; i < std::min<int64_t>(kLanes, steps); ++i)
    _mm512_store_si512(to + i * kStepBytes, block[i]);
}

template <class D>
void pack_dense(const typename D::Element* weight, char* to, int64_t outputs, int64_t inputs,
                int64_t stride) {
  const int64_t steps = ceil_div(inputs, D::kPack);
  for (int64_t n = 0; n < outputs; n += kPanel)
    for (int64_t step = 0; step < steps; step += kLanes)
      for (int64_t half = n; half < n + kPanel; half += kLanes)
        pack_block(half, outputs, steps - step,
                   to + (n / kPanel * steps + step) * kStepBytes + (half - n) * 4, [&](int64_t row) {
                     return words<D>(weight + row * stride, step * D::kPack, inputs);
                   });
}

__m512i bytes(const uint8_t* from, int64_t count) {
  const __mmask64 some = count >= 64 ? ~__mmask64{0}
                                     : (__mmask64{1} << std::max<int64_t>(0, count)) - 1;
  return _mm512_maskz_loadu_epi8(some, from);
}

// Of every eight bytes below 16, four: the first four low, the others high.
__m256i halved(__m512i bytes) {
  return _mm512_cvtepi64_epi32(_mm512_or_si512(bytes, _mm512_srli_epi64(bytes, 28)));
}

// The next 16 words of a row of weights, zeros past `count`.
__m512i quantised_words(const uint8_t* from, int64_t count, int64_t bits) {
  if (bits == 8) return bytes(from, count);
  const __m512i first_eight = _mm512_castsi256_si512(halved(bytes(from, count)));
  return _mm512_inserti64x4(first_eight, halved(bytes(from + 64, count - 64)), 1);
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

void pack_group(const uint8_t* weight, const QuantisedLayout& layout, int64_t panel, int64_t group,
                int64_t outputs, char* to) {
  const int64_t per_word = 32 / layout.bits;
  for (int64_t step = 0; step < layout.steps(group); step += kLanes) {
    const int64_t k = group * layout.group + step * per_word;
    const int64_t count = std::min(layout.inputs - k, layout.length(group) - step * per_word);
    for (int64_t half = 0; half < kPanel; half += kLanes)
      pack_block(panel * kPanel + half, outputs, layout.steps(group) - step,
                 to + step * kStepBytes + half * 4, [&](int64_t row) {
                   return quantised_words(weight + row * layout.inputs + k, count, layout.bits);
                 });
  }
}

}  // namespace
}  // namespace ekiden

// weight [outputs, inputs] of 32-bit (pair 1) or 16-bit (pair 2) elements, `stride` apart by rows,
// to [outputs / 32][inputs / pair][32][pair], zero where there is no weight.
EKIDEN_API void ekiden_pack_dense(const void* weight, void* panels, int64_t outputs,
                                  int64_t inputs, int64_t stride, int32_t pair) {
  using namespace ekiden;
  char* to = static_cast<char*>(panels);
  if (pair == 1)
    pack_dense<Float>(static_cast<const float*>(weight), to, outputs, inputs, stride);
  else
    pack_dense<BFloat>(static_cast<const uint16_t*>(weight), to, outputs, inputs, stride);
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
      pack_group(weight, layout, panel, g, outputs, to);
      to += layout.steps(g) * kStepBytes;
    }
}
