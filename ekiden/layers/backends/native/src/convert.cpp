// Rows of KV from one dtype to another, by way of float32: the bytes that a cache of that dtype
// would hold had the numbers been computed for it.
#include "boxes.h"
#include "ekiden.h"
#include "scaled.h"

namespace ekiden {
namespace {

constexpr int64_t kMostNumbers = 2048;  // of a row

// By the number that copies.py knows them by.
enum RowFormat : int32_t { kFloat32Row, kBFloat16Row, kFloat16Row, kInt8Row, kE4M3Row, kRowFormats };

struct Half {
  static __m512 load(const uint16_t* from, __mmask16 lanes) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, from));
  }
  static void store(uint16_t* to, __m512 x, __mmask16 lanes) {
    const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16(to, lanes, half);
  }
};

// The processor's own conversion takes numbers below the smallest normal one for 0.
struct ExactBFloat {
  static __m512 load(const uint16_t* from, __mmask16 lanes) { return BFloat::load(from, lanes); }
  static void store(uint16_t* to, __m512 x, __mmask16 lanes) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i nan = _mm512_or_si512(bits, _mm512_set1_epi32(1 << 22));
    const __mmask16 broken = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i high = _mm512_srli_epi32(_mm512_mask_mov_epi32(nearest, broken, nan), 16);
    _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(high));
  }
};

template <class D, class Element>
void read_plain(const char* row, int width, float* to) {
  for (int d = 0; d < width; d += kLanes) {
    const __mmask16 lanes = first(width - d);
    Float::store(to + d, D::load(reinterpret_cast<const Element*>(row) + d, lanes), lanes);
  }
}

template <class D, class Element>
void write_plain(const float* row, int width, char* to) {
  for (int d = 0; d < width; d += kLanes) {
    const __mmask16 lanes = first(width - d);
    D::store(reinterpret_cast<Element*>(to) + d, Float::load(row + d, lanes), lanes);
  }
}

template <CacheFormat format>
void read_scaled(const char* row, int width, float* to) {
  decode_row<Float>(row, width, format, to);
}

template <CacheFormat format>
void write_scaled(const float* row, int width, char* to) {
  encode_row<Float>(row, width, format, to);
}

struct Format {
  void (*read)(const char* row, int width, float* to);
  void (*write)(const float* row, int width, char* to);
  int64_t bytes, scale_bytes;  // of an element, of what lies behind a row

  int64_t row_bytes(int64_t width) const { return width * bytes + scale_bytes; }
};

const Format formats[kRowFormats] = {
    {read_plain<Float, float>, write_plain<Float, float>, 4, 0},
    {read_plain<ExactBFloat, uint16_t>, write_plain<ExactBFloat, uint16_t>, 2, 0},
    {read_plain<Half, uint16_t>, write_plain<Half, uint16_t>, 2, 0},
    {read_scaled<kInt8>, write_scaled<kInt8>, 1, 4},
    {read_scaled<kE4M3>, write_scaled<kE4M3>, 1, 4},
};

}  // namespace
}  // namespace ekiden

// Every piece is `rows` rows of `width` numbers. Returns an Error: a format or a width that no row
// can have; nothing is written then.
EKIDEN_API int32_t ekiden_convert_boxes(const ekiden::Boxes* boxes, int64_t rows, int64_t width,
                                        int32_t from_format, int32_t to_format) {
  using namespace ekiden;
  const auto known = [](int32_t format) { return format >= 0 && format < kRowFormats; };
  if (!known(from_format) || !known(to_format) || width < 1 || width > kMostNumbers)
    return kBadArgument;
  const Format &there = formats[from_format], &here = formats[to_format];
  const int64_t from_step = there.row_bytes(width), to_step = here.row_bytes(width);
  alignas(64) float numbers[kMostNumbers];
  each_piece(*boxes, [&](char* to, const char* from) {
    for (int64_t row = 0; row < rows; ++row) {
      there.read(from + row * from_step, int(width), numbers);
      here.write(numbers, int(width), to + row * to_step);
    }
  });
  return kOk;
}
