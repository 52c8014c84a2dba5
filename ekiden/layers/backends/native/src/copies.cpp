// Boxes of bytes from place to place: what carries KV between caches and messages.
//
// A box is [heads, planes] pieces of so many bytes each, a plane being K or V of one layer; either
// axis has a stride of its own on either side. A call copies many boxes of one shape, on the
// caller's thread.
#include <immintrin.h>

#include <cstring>
#include <initializer_list>

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

struct Axis {
  int64_t count, from, to;  // strides in bytes
};

struct Box {
  Axis heads, planes;
  int64_t piece;
};

// The same box in larger pieces, where they touch on both sides.
Box merged(Box box) {
  for (Axis* axis : {&box.planes, &box.heads}) {
    if (axis->count != 1 && (axis->from != box.piece || axis->to != box.piece)) break;
    box.piece *= axis->count;
    axis->count = 1;
  }
  return box;
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

using Copy = void (*)(char* to, const char* from, int64_t bytes);

void copy_box(const Box& box, char* to, const char* from, Copy copy) {
  for (int64_t i = 0; i < box.heads.count; ++i)
    for (int64_t j = 0; j < box.planes.count; ++j)
      copy(to + i * box.heads.to + j * box.planes.to,
           from + i * box.heads.from + j * box.planes.from, box.piece);
}

}  // namespace
}  // namespace ekiden

// Copies `count` boxes, the i-th from `from + from_at[i]` to `to + to_at[i]`. `axes`: (count, stride
// there, stride here) in bytes of the heads, then of the planes; `piece`: bytes that lie together.
// `streamed`: the target is not read soon. What is written may not overlap what is read.
EKIDEN_API void ekiden_copy_boxes(const char* from, const int64_t* from_at, char* to,
                                  const int64_t* to_at, int64_t count, const int64_t* axes,
                                  int64_t piece, int32_t streamed) {
  using namespace ekiden;
  const Box box = merged({{axes[0], axes[1], axes[2]}, {axes[3], axes[4], axes[5]}, piece});
  const Copy copy = box.piece < kLong ? copy_short : streamed ? stream : copy_long;
  for (int64_t i = 0; i < count; ++i) copy_box(box, to + to_at[i], from + from_at[i], copy);
  _mm_sfence();  // what went past the cache is seen before whatever follows
}
