// A tile of 64 keys of one KV head, read from the cache's blocks into the order that dot products
// take. One per thread.
#pragma once
#include "scaled.h"

namespace ekiden {

constexpr int kTile = 64;
constexpr int kMaxDim = 256;

// Where one sequence's keys of one layer and KV head lie. Strides in bytes.
struct Paged {
  const char* cache;  // the layer's and head's first key of block 0
  const int32_t* table;
  int64_t block_stride, value_offset, row_stride;
  int32_t block_size;
  int32_t head_dim;
  CacheFormat format;

  // Row of a position, which must lie in the table.
  const char* key(int64_t position) const {
    const int64_t block = table[position / block_size];
    return cache + block * block_stride + position % block_size * row_stride;
  }
};

// Asks for the memory of the next tile while this one is computed, a few lines at a time: blocks
// lie too far apart for the processor to foresee, and a burst of requests would stall it.
class Feed {
 public:
  // `count` keys from `start` on, asked for within `sites` calls of `some`.
  void aim(const Paged& from, int64_t start, int64_t count, int sites) {
    int lines = 0;
    for (int64_t at = 0; at < count; at += kLanes) {
      const char* keys = from.key(start + at);
      for (int64_t byte = 0; byte < kLanes * from.row_stride; byte += 64) {
        lines_[lines++] = keys + byte;
        lines_[lines++] = keys + from.value_offset + byte;
      }
    }
    pace_ = (lines + sites - 1) / sites;
    // What is asked for twice is there.
    for (int i = lines; i < sites * pace_; ++i) lines_[i] = lines_[lines - 1];
    next_ = lines_;
  }

  // Nothing is asked for until the next aim.
  void rest() { pace_ = 0; }

  void some() {
    for (int i = 0; i < pace_; ++i) _mm_prefetch(next_[i], _MM_HINT_T1);
    next_ += pace_;
  }

 private:
  // Rows of float32 and a scale, plus one more line a site at most.
  const char* lines_[2 * kTile * (kMaxDim * 4 + 64) / 64 + 2048];
  const char* const* next_ = lines_;
  int pace_ = 0;
};

template <class T>
class Tile {
 public:
  using Element = typename T::Element;

  // `count` keys from position `start` on, a multiple of the tile.
  void load(const Paged& from, int64_t start, int count, Feed& feed) {
    feed_ = &feed;
    words_ = (from.head_dim + T::kPack - 1) / T::kPack;
    columns_ = (from.head_dim + 31) / 32 * 32;
    for (int at = 0; at < count; at += kLanes) {
      const int rows = count - at < kLanes ? count - at : kLanes;
      const char* keys = from.key(start + at);
      const char* values = keys + from.value_offset;
      if (from.format == kPlain && from.block_size % kLanes == 0) {
        load_keys(keys, from.row_stride, at, rows);
        load_values(values, from.row_stride, from.head_dim, at, rows);
      } else {
        collect(from, start + at, 0, rows);
        load_keys(collected(), kMaxDim * sizeof(Element), at, rows);
        collect(from, start + at, from.value_offset, rows);
        load_values(collected(), kMaxDim * sizeof(Element), from.head_dim, at, rows);
      }
    }
  }

  // How often a load calls the feed.
  static int sites(int head_dim) {
    const int squares = (head_dim / T::kPack + kLanes - 1) / kLanes;
    return kTile / kLanes * (2 * squares + kLanes / 4);
  }

  // Words [words][kTile]: word w of every key side by side.
  const uint32_t* keys() const { return keys_; }
  int words() const { return words_; }
  // Words [keys / kPack][columns]: a column holds kPack neighbouring keys. Zero past the last key.
  const uint32_t* values() const { return values_; }
  int columns() const { return columns_; }

 private:
  // Rows of any format, in any block, as rows of elements kMaxDim apart.
  void collect(const Paged& from, int64_t position, int64_t offset, int count) {
    for (int r = 0; r < count; ++r) {
      const char* row = from.key(position + r) + offset;
      if (from.format == kPlain) {
        __builtin_memcpy(rows_ + r * kMaxDim, row, from.head_dim * sizeof(Element));
      } else {
        decode_row<T>(row, from.head_dim, from.format, rows_ + r * kMaxDim);
      }
    }
  }
  const char* collected() const { return reinterpret_cast<const char*>(rows_); }

  void load_keys(const char* rows, int64_t stride, int at, int count) {
    for (int w = 0; w < words_; w += kLanes) {
      const __mmask16 lanes = first(words_ - w);
      __m512i square[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        // Past the last key its row again: never read, but nothing that was not written.
        const int row = r < count ? r : count - 1;
        square[r] = _mm512_maskz_loadu_epi32(lanes, rows + row * stride + w * 4);
      }
      feed_->some();
      transpose(square);
      feed_->some();
      const int last = words_ - w < kLanes ? words_ - w : kLanes;
      for (int i = 0; i < last; ++i) _mm512_store_si512(keys_ + (w + i) * kTile + at, square[i]);
    }
  }

  void load_values(const char* rows, int64_t stride, int dim, int at, int count);

  alignas(64) uint32_t keys_[kMaxDim / T::kPack * kTile];
  alignas(64) uint32_t values_[kMaxDim * kTile / T::kPack];
  alignas(64) Element rows_[kLanes * kMaxDim];
  int words_ = 0, columns_ = 0;
  Feed* feed_ = nullptr;
};

template <>
inline void Tile<Float>::load_values(const char* rows, int64_t stride, int dim, int at, int count) {
  for (int r = 0; r < count; ++r) {
    if (r % 4 == 0) feed_->some();
    const char* row = rows + r * stride;
    uint32_t* to = values_ + (at + r) * columns_;
    for (int d = 0; d < columns_; d += kLanes) {
      _mm512_store_si512(to + d, _mm512_maskz_loadu_epi32(first(dim - d), row + d * 4));
    }
  }
}

template <>
inline void Tile<BFloat>::load_values(const char* rows, int64_t stride, int dim, int at,
                                      int count) {
  // From 16 keys' columns 0..31 of two rows: a0 b0 a1 b1 ...
  alignas(64) static const uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,
                                                37, 6, 38, 7, 39, 8,  40, 9,  41, 10, 42,
                                                11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int r = 0; r < count; r += 2) {
    if (r % 4 == 0) feed_->some();
    const char* row = rows + r * stride;
    uint32_t* to = values_ + (at + r) / 2 * columns_;
    for (int d = 0; d < columns_; d += 32) {
      const int left = dim - d;
      const __mmask32 lanes = left >= 32 ? 0xffffffffu : (1u << left) - 1;
      const __m512i a = _mm512_maskz_loadu_epi16(lanes, row + d * 2);
      const __m512i b =
          _mm512_maskz_loadu_epi16(r + 1 < count ? lanes : 0, row + stride + d * 2);
      _mm512_store_si512(to + d, _mm512_permutex2var_epi16(a, low, b));
      _mm512_store_si512(to + d + 16, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

}  // namespace ekiden
