// Boxes of bytes in two memories: what KV is moved by.
//
// A box is [heads, planes] pieces, a plane being K or V of one layer; either axis has a stride of
// its own in either memory.
#pragma once
#include <cstdint>

namespace ekiden {

struct Axis {
  int64_t count, from, to;  // strides in bytes
};

// Many boxes of one shape, the i-th at from + from_at[i], to go to to + to_at[i].
struct Boxes {
  const char* from;
  const int64_t* from_at;
  char* to;
  const int64_t* to_at;
  int64_t count;
  Axis heads, planes;
};

// Calls piece(to, from) for every piece of every box.
template <class Piece>
void each_piece(const Boxes& boxes, Piece piece) {
  const Axis &heads = boxes.heads, &planes = boxes.planes;
  for (int64_t box = 0; box < boxes.count; ++box)
    for (int64_t i = 0; i < heads.count; ++i)
      for (int64_t j = 0; j < planes.count; ++j)
        piece(boxes.to + boxes.to_at[box] + i * heads.to + j * planes.to,
              boxes.from + boxes.from_at[box] + i * heads.from + j * planes.from);
}

}  // namespace ekiden
