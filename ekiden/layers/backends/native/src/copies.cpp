// Boxes of bytes copied as they are, on the caller's thread.
#include <immintrin.h>

#include <cstring>
#include <initializer_list>

#include "boxes.h"
#include "ekiden.h"

namespace ekiden {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kStep = 4 * kLine;
// So far ahead a source is fetched: past the end of a small page, where the processor's own
// fetching stops.
constexpr int64_t kAhead = 8192;
// Pieces below this go by memcpy.
constexpr int64_t kLong = 1024;

// Pieces that touch on both sides become one; `piece` is its bytes.
void merge(Boxes& boxes, int64_t& piece) {
  for (Axis* axis : {&boxes.planes, &boxes.heads}) {
    if (axis->count != 1 && (axis->from != piece || axis->to != piece)) break;
    piece *= axis->count;
    axis->count = 1;
  }
}

void copy_short(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, bytes); }

// Into the cache. Half a line at a time and no fetching ahead: both were a tenth faster.
void copy_long(char* to, const char* from, int64_t bytes) {
  int64_t at = 0;
  for (; at + kStep <= bytes; at += kStep)
    for (int64_t i = 0; i < kStep; i += 32)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + at + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + i)));
  std::memcpy(to + at, from + at, bytes - at);
}

inline void stream_lines(char* to, const char* from) {
  for (int64_t i = 0; i < kStep; i += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
}

// Past the cache: a line that is written whole need not be read first, and pushes nothing out.
void stream(char* to, const char* from, int64_t bytes) {
  const int64_t head = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + kAhead + kStep <= bytes; at += kStep) {
    for (int64_t i = 0; i < kStep; i += kLine) _mm_prefetch(from + at + kAhead + i, _MM_HINT_NTA);
    stream_lines(to + at, from + at);
  }
  for (; at + kStep <= bytes; at += kStep) stream_lines(to + at, from + at);
  std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace
}  // namespace ekiden

// `piece`: bytes that lie together. `streamed`: the target is not read soon. What is written may not
// overlap what is read.
EKIDEN_API void ekiden_copy_boxes(const ekiden::Boxes* given, int64_t piece, int32_t streamed) {
  using namespace ekiden;
  Boxes boxes = *given;
  merge(boxes, piece);
  const auto copy = piece < kLong ? copy_short : streamed ? stream : copy_long;
  each_piece(boxes, [=](char* to, const char* from) { copy(to, from, piece); });
  _mm_sfence();  // what went past the cache is seen before whatever follows
}
