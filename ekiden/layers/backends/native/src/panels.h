// How packed weights lie in memory, and single elements of either dtype.
#pragma once
#include <cstdint>
#include <cstring>

#include "ekiden.h"

namespace ekiden {

// Outputs that lie side by side: two AVX-512 registers of float32.
constexpr int64_t kPanel = 32;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline float widen(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// To nearest, ties to even, as torch rounds; NaN stays NaN.
inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float load(const void* data, int32_t dtype, int64_t index) {
  return dtype == kFloat32 ? static_cast<const float*>(data)[index]
                           : widen(static_cast<const uint16_t*>(data)[index]);
}

inline void store(void* data, int32_t dtype, int64_t index, float value) {
  if (dtype == kFloat32)
    static_cast<float*>(data)[index] = value;
  else
    static_cast<uint16_t*>(data)[index] = narrow(value);
}

}  // namespace ekiden
