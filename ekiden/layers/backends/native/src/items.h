// The work of one attention call, cut into items, and who does what.
#pragma once
#include <algorithm>

#include "ekiden.h"
#include "softmax.h"

namespace ekiden {

constexpr int kChunk = 512;      // keys of one partial sum
constexpr int kSplitRows = 16;   // items of at most so many rows may be shared by threads
constexpr int64_t kItemsEach = 8;  // of the largest, that a thread must have to take turns
constexpr int64_t kTileCost = 12;  // reading a tile costs what so many rows' arithmetic does

struct Call {
  const char* q;
  char* out;
  const int32_t *starts, *lengths, *tables;
  Paged paged;
  int64_t sequences, heads, kv_heads, group, table_width, head_stride, blocks;
  Scoring scoring;

  explicit Call(const Op& op)
      : q(static_cast<const char*>(op.p[0])),
        out(static_cast<char*>(op.p[5])),
        starts(static_cast<const int32_t*>(op.p[2])),
        lengths(static_cast<const int32_t*>(op.p[3])),
        tables(static_cast<const int32_t*>(op.p[4])),
        paged{static_cast<const char*>(op.p[1]), nullptr, op.n[6], op.n[8], op.n[9],
              int32_t(op.n[4]), int32_t(op.n[3]), CacheFormat(op.n[11])},
        sequences(op.n[0]),
        heads(op.n[1]),
        kv_heads(op.n[2]),
        group(kv_heads > 0 ? heads / kv_heads : 0),
        table_width(op.n[5]),
        head_stride(op.n[7]),
        blocks(op.n[12]),
        scoring{op.f[0], op.f[1], op.n[10]} {}

  int columns() const { return (paged.head_dim + 31) / 32 * 32; }

  // Whether the cache holds keys [from, to) of sequence s.
  bool holds(int64_t s, int64_t from, int64_t to) const {
    const int64_t size = paged.block_size;
    if (to > table_width * size) return false;
    bool all = true;
    for (int64_t i = from / size; i * size < to; ++i) {
      all &= uint64_t(tables[s * table_width + i]) < uint64_t(blocks);
    }
    return all;
  }

  // What KV head `head` of sequence `s` attends to.
  Paged pages(int64_t s, int64_t head) const {
    Paged made = paged;
    made.cache += head * head_stride;
    made.table = tables + s * table_width;
    return made;
  }

  bool valid() const {
    return kv_heads > 0 && heads % kv_heads == 0 && paged.head_dim > 0 &&
           paged.head_dim <= kMaxDim && paged.head_dim % 2 == 0 && paged.block_size > 0 &&
           scoring.scale > 0.0f && paged.format >= kPlain && paged.format <= kE4M3;
  }
};

// Rows [begin, end) of sequence s: row r is query r / group, head r % group of a KV head.
struct Item {
  int64_t sequence, begin, end;
  int64_t position;        // of the sequence's first query
  int64_t from, to;        // keys that any of its rows sees
  int64_t first_chunk, chunks;

  Item(const Call& call, int64_t s, int64_t at, int64_t rows)
      : sequence(s), begin(at), end(std::min(at + kRows, rows)) {
    const int64_t queries = call.starts[s + 1] - call.starts[s];
    position = call.lengths[s] - queries;
    to = std::max<int64_t>(position + (end - 1) / call.group + 1, 0);
    const int64_t seen = position + begin / call.group + 1 - call.scoring.window;
    from = call.scoring.window > 0 ? std::max<int64_t>(seen, 0) : 0;
    first_chunk = from / kChunk;
    chunks = to > from ? (to - 1) / kChunk + 1 - first_chunk : 0;
  }

  int rows() const { return int(end - begin); }
  // One chunk's sums; behind each row's values its totals and its peak.
  int64_t saved_bytes(int columns) const {
    return rows() * (columns + 2 * kLanes) * int64_t(sizeof(float));
  }
  int64_t chunk_cost() const { return kTileCost + rows(); }
  // An item without keys still has rows to write.
  int64_t cost() const { return std::max<int64_t>(chunks, 1) * chunk_cost(); }
};

// Calls visit(item, kv head, cost of all before it) for every item, in order.
template <class Visit>
void each_item(const Call& call, Visit visit) {
  int64_t before = 0;
  for (int64_t s = 0; s < call.sequences; ++s) {
    const int64_t rows = int64_t(call.starts[s + 1] - call.starts[s]) * call.group;
    for (int64_t head = 0; head < call.kv_heads; ++head) {
      for (int64_t at = 0; at < rows; at += kRows) {
        const Item item(call, s, at, rows);
        visit(item, head, before);
        before += item.cost();
      }
    }
  }
}

// Chunks [begin, end) of an item.
struct Part {
  int64_t begin, end;
  bool mine;  // this thread has the first chunk, and writes the item's rows
};

// Deals the items to threads: contiguous runs of equal cost, cut between items or, where an item
// has few rows, between its chunks.
class Division {
 public:
  Division(const Call& call, int threads) : threads_(threads), columns_(call.columns()) {
    int64_t most = 0, many = 0;
    each_item(call, [&](const Item& item, int64_t, int64_t) {
      total_ += item.cost();
      most = std::max(most, item.cost());
      if (item.rows() > kSplitRows) many += item.cost();
    });
    in_turns_ = threads > 1 && 2 * many >= total_ && most * threads * kItemsEach <= total_;
  }

  // Whether threads take whole items as they come for them instead: prompts have so many that none
  // needs to be shared, and a thread that is held up then takes fewer.
  bool in_turns() const { return in_turns_; }

  Part part(const Item& item, int64_t before, int thread) const {
    const int64_t low = total_ * thread / threads_, high = total_ * (thread + 1) / threads_;
    const bool mine = before >= low && before < high;
    if (!splits(item)) return {0, mine ? item.chunks : 0, mine};
    return {chunk_at(item, low - before), chunk_at(item, high - before), mine};
  }

  // Bytes of shared memory for the chunks that others compute of one thread's last item.
  static int64_t room(int threads) { return kSharedRoom / threads / 64 * 64; }

  // The thread that has an item's first chunk.
  int owner(int64_t before) const {
    int thread = 0;
    while (total_ * (thread + 1) / threads_ <= before) ++thread;
    return thread;
  }

 private:
  bool splits(const Item& item) const {
    return item.rows() <= kSplitRows &&
           item.chunks * item.saved_bytes(columns_) <= room(threads_);
  }

  // Index of the first chunk that begins at or after `cost`, counted from the item's start.
  static int64_t chunk_at(const Item& item, int64_t cost) {
    const int64_t each = item.chunk_cost();
    return std::clamp<int64_t>((cost + each - 1) / each, 0, item.chunks);
  }

  int threads_;
  int columns_;
  int64_t total_ = 0;
  bool in_turns_ = false;
};

}  // namespace ekiden
