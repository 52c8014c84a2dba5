// Paged attention: decode and prefill in one kernel that walks the block tables in place.
//
//   p[0] q [T, N, D], p[5] out [T, N, D]   activations, rows side by side
//   p[1] cache of this layer, [blocks, K, 2, block_size, row], read through strides in bytes
//   p[2] query_starts [S + 1], p[3] kv_lengths [S], p[4] block tables [S, M], all int32
//   n[0] S   n[1] N   n[2] K   n[3] D   n[4] block_size   n[5] M
//   n[6..9] strides of a block, a head, K to V, a row   n[10] window, 0 for none
//   n[11] CacheFormat   n[12] blocks of the cache
//   f[0] scale   f[1] soft cap, 0 for none
//
// An item is a run of query rows of one sequence that share a KV head: its queries times the query
// heads of that head. Keys are cut into chunks at fixed positions; every chunk's sums are taken
// from nothing and merged in order, by whatever thread. So a row's result does not depend on the
// batch, on how a prompt was cut into steps, or on the number of threads.
#include <optional>
#include <type_traits>

#include "items.h"
#include "turns.h"

namespace ekiden {
namespace {

constexpr int kFedStrips = 4;  // beyond, arithmetic takes longer than memory

// A thread's own memory.
template <class T>
struct Workspace {
  Tile<T> tile;
  alignas(64) uint32_t queries[kRows * kMaxDim / T::kPack];
  alignas(64) float products[2][kStrip * kTile];
  alignas(64) uint32_t weights[kStrip * kTile / T::kPack];
  alignas(64) float chunk_values[kRows * kMaxDim];
  alignas(64) float whole_values[kRows * kMaxDim];
  alignas(64) float chunk_totals[kRows * kLanes];
  alignas(64) float whole_totals[kRows * kLanes];
  float chunk_peaks[kRows], whole_peaks[kRows];
  Sums chunk, whole;

  void aim() {
    chunk = {chunk_values, chunk_peaks, chunk_totals};
    whole = {whole_values, whole_peaks, whole_totals};
  }
};

// An item that another thread has the later chunks of.
struct Pending {
  Item item;
  int64_t head, next;
};

// Calls visit with a constant, `rows` in [1, kStrip].
template <class Visit>
void by_rows(int rows, Visit visit) {
  switch (rows) {
    case 1: return visit(std::integral_constant<int, 1>());
    case 2: return visit(std::integral_constant<int, 2>());
    case 3: return visit(std::integral_constant<int, 3>());
    case 4: return visit(std::integral_constant<int, 4>());
    case 5: return visit(std::integral_constant<int, 5>());
    default: return visit(std::integral_constant<int, 6>());
  }
}

template <class T>
class Attention {
 public:
  using Element = typename T::Element;
  static constexpr int kWords = kTile / T::kPack;

  Attention(const Call& call, Team& team)
      : call_(call), team_(team), work_(*reinterpret_cast<Workspace<T>*>(team.scratch)) {
    static_assert(sizeof(Workspace<T>) <= kScratchBytes);
    work_.aim();
    dim_ = call.paged.head_dim;
    words_ = (dim_ + T::kPack - 1) / T::kPack;
    columns_ = call.columns();
  }

  int run();

 private:
  int run_turns();
  bool readable(const Item& item);
  void merge_chunk(const Item& item, int64_t chunk);
  void load_queries(const Item& item, int64_t head);
  void look_ahead(const Item& item, int64_t next, int strips);
  void add_chunk(const Item& item, int64_t chunk);
  void add_tile(const Item& item, int64_t start, int keys, int strips);
  template <int R>
  void score(int row, float* products);
  void weigh_rows(const Item& item, int row, int rows, int64_t start, int keys,
                  const float* products, float* keep);
  template <int R>
  void add_values(int row, int keys, const float* keep);
  void begin(const Item& item, int64_t head);
  void save(const Item& item, float* to) const;
  void finish(const Pending& pending);
  void write(const Item& item, int64_t head);
  // Where the sums of chunk `c` of the one item that `owner` shares with others lie.
  float* saved(const Item& item, int owner, int64_t c) const {
    const int64_t begin = Division::room(team_.threads) * owner;
    return reinterpret_cast<float*>(team_.shared + begin + c * item.saved_bytes(columns_));
  }
  Element* row_of(char* base, const Item& item, int64_t head, int64_t row) const {
    const int64_t token = call_.starts[item.sequence] + row / call_.group;
    const int64_t at = token * call_.heads + head * call_.group + row % call_.group;
    return reinterpret_cast<Element*>(base) + at * dim_;
  }

  const Call& call_;
  Team& team_;
  Workspace<T>& work_;
  Paged paged_, following_;  // of this item, and of the one that probably comes next
  int64_t following_keys_ = 0;
  int error_ = kOk;
  Feed feed_;
  int dim_, words_, columns_;
};

template <class T>
void Attention<T>::load_queries(const Item& item, int64_t head) {
  for (int r = 0; r < item.rows(); ++r) {
    const Element* from = row_of(const_cast<char*>(call_.q), item, head, item.begin + r);
    uint32_t* to = work_.queries + r * words_;
    __builtin_memcpy(to, from, dim_ * sizeof(Element));
  }
}

template <class T>
void Attention<T>::add_chunk(const Item& item, int64_t chunk) {
  work_.chunk.clear(item.rows(), columns_);
  const int64_t low = std::max(chunk * kChunk, item.from / kTile * kTile);
  const int64_t high = std::min((chunk + 1) * kChunk, item.to);
  for (int64_t start = low; start < high; start += kTile) {
    const int keys = int(std::min<int64_t>(kTile, high - start));
    const int strips = (item.rows() + kStrip - 1) / kStrip;
    look_ahead(item, start + kTile, strips);
    work_.tile.load(paged_, start, keys, feed_);
    add_tile(item, start, keys, strips);
  }
}

// A strip's weights are worked out while the next one's products are: they are long chains of
// short sums, and products are what the processor has room for beside them.
template <class T>
void Attention<T>::add_tile(const Item& item, int64_t start, int keys, int strips) {
  const auto edge = [&](int i) { return item.rows() * i / strips; };
  int i = 0;  // the first strip that sees a key of the tile
  while (item.position + (item.begin + edge(i + 1) - 1) / call_.group < start) ++i;
  by_rows(edge(i + 1) - edge(i), [&](auto rows) { score<rows>(edge(i), work_.products[i % 2]); });
  for (; i < strips; ++i) {
    const int row = edge(i), next = edge(i + 1);
    float keep[kStrip];
    weigh_rows(item, row, next - row, start, keys, work_.products[i % 2], keep);
    if (i + 1 < strips) {
      by_rows(edge(i + 2) - next, [&](auto n) { score<n>(next, work_.products[(i + 1) % 2]); });
    }
    by_rows(next - row, [&](auto n) { add_values<n>(row, keys, keep); });
  }
}

// Where few rows share a tile, its memory is what takes the time.
template <class T>
void Attention<T>::look_ahead(const Item& item, int64_t next, int strips) {
  feed_.rest();
  if (strips > kFedStrips) return;
  const int products = kTile / 64 * words_ + columns_ / 64 * kWords;
  const int sites = Tile<T>::sites(dim_) + strips * products / 2;
  if (next < item.to) {
    feed_.aim(paged_, next, std::min<int64_t>(kTile, item.to - next), sites);
  } else if (following_keys_ > 0) {
    feed_.aim(following_, 0, std::min<int64_t>(kTile, following_keys_), sites);
  }
}

template <class T>
template <int R>
void Attention<T>::score(int row, float* products) {
  for (int at = 0; at < kTile; at += 64) {
    multiply<T, R, 4>(work_.queries + row * words_, words_, work_.tile.keys() + at, kTile, words_,
                      products + at, kTile, nullptr, feed_);
  }
}

template <class T>
void Attention<T>::weigh_rows(const Item& item, int row, int rows, int64_t start, int keys,
                              const float* products, float* keep) {
  for (int r = 0; r < rows; ++r) {
    const int64_t position = item.position + (item.begin + row + r) / call_.group;
    const int64_t end = std::min<int64_t>(position + 1 - start, keys);
    const int64_t window = call_.scoring.window;
    const int64_t begin = window > 0 ? position + 1 - window - start : 0;
    keep[r] = weigh<T>(products + r * kTile, work_.weights + r * kWords,
                       work_.chunk.peaks[row + r], work_.chunk.totals + (row + r) * kLanes, begin,
                       end, call_.scoring);
  }
}

template <class T>
template <int R>
void Attention<T>::add_values(int row, int keys, const float* keep) {
  const int steps = (keys + T::kPack - 1) / T::kPack;
  float* sums = work_.chunk.values + row * columns_;
  int at = 0;
  for (; at + 64 <= columns_; at += 64) {
    multiply<T, R, 4>(work_.weights, kWords, work_.tile.values() + at, columns_, steps, sums + at,
                      columns_, keep, feed_);
  }
  if (at < columns_) {
    multiply<T, R, 2>(work_.weights, kWords, work_.tile.values() + at, columns_, steps, sums + at,
                      columns_, keep, feed_);
  }
}

template <class T>
void Attention<T>::write(const Item& item, int64_t head) {
  for (int r = 0; r < item.rows(); ++r) {
    Element* to = row_of(call_.out, item, head, item.begin + r);
    const float total = _mm512_reduce_add_ps(_mm512_load_ps(work_.whole.totals + r * kLanes));
    const __m512 inverse = _mm512_set1_ps(total > 0.0f ? 1.0f / total : 0.0f);
    for (int d = 0; d < dim_; d += kLanes) {
      const __m512 x = _mm512_load_ps(work_.whole.values + r * columns_ + d);
      T::store(to + d, _mm512_mul_ps(x, inverse), first(dim_ - d));
    }
  }
}

template <class T>
void Attention<T>::begin(const Item& item, int64_t head) {
  paged_ = call_.pages(item.sequence, head);
  const bool last_head = head + 1 == call_.kv_heads;
  const int64_t s = item.sequence + last_head;
  following_keys_ = s < call_.sequences ? call_.lengths[s] : 0;
  following_ = call_.pages(s, last_head ? 0 : head + 1);
  load_queries(item, head);
}

template <class T>
void Attention<T>::save(const Item& item, float* to) const {
  for (int r = 0; r < item.rows(); ++r, to += columns_ + 2 * kLanes) {
    __builtin_memcpy(to, work_.chunk.values + r * columns_, columns_ * sizeof(float));
    __builtin_memcpy(to + columns_, work_.chunk.totals + r * kLanes, kLanes * sizeof(float));
    to[columns_ + kLanes] = work_.chunk.peaks[r];
  }
}

template <class T>
bool Attention<T>::readable(const Item& item) {
  const bool all = call_.holds(item.sequence, item.from / kTile * kTile, item.to);
  if (!all) error_ = kBadArgument;
  return all;
}

template <class T>
void Attention<T>::merge_chunk(const Item& item, int64_t chunk) {
  add_chunk(item, item.first_chunk + chunk);
  for (int r = 0; r < item.rows(); ++r) {
    merge(work_.whole, r, work_.chunk.values + r * columns_, work_.chunk.peaks[r],
          work_.chunk.totals + r * kLanes, columns_);
  }
}

template <class T>
int Attention<T>::run() {
  const Division division(call_, team_.threads);
  if (division.in_turns()) return run_turns();
  std::optional<Pending> pending;
  each_item(call_, [&](const Item& item, int64_t head, int64_t before) {
    const Part part = division.part(item, before, team_.thread);
    if ((!part.mine && part.begin == part.end) || !readable(item)) return;
    begin(item, head);
    if (part.mine) work_.whole.clear(item.rows(), columns_);
    for (int64_t c = part.begin; c < part.end; ++c) {
      if (part.mine) {
        merge_chunk(item, c);
      } else {
        add_chunk(item, item.first_chunk + c);
        save(item, saved(item, division.owner(before), c));
      }
    }
    if (!part.mine) return;
    if (part.end == item.chunks) return write(item, head);
    pending = Pending{item, head, part.end};  // a thread's last item: its sums stay where they are
  });
  if (team_.threads > 1) {
    team_.barrier();
    if (pending) finish(*pending);
  }
  return error_;
}

template <class T>
int Attention<T>::run_turns() {
  Turns turns(team_, Phase::First);
  int64_t index = 0, mine = turns.next();
  each_item(call_, [&](const Item& item, int64_t head, int64_t) {
    if (index++ != mine) return;
    if (readable(item)) {
      begin(item, head);
      work_.whole.clear(item.rows(), columns_);
      for (int64_t c = 0; c < item.chunks; ++c) merge_chunk(item, c);
      write(item, head);
    }
    mine = turns.next();
  });
  team_.barrier();
  Turns(team_, Phase::Last);
  return error_;
}

template <class T>
void Attention<T>::finish(const Pending& pending) {
  const Item& item = pending.item;
  for (int64_t c = pending.next; c < item.chunks; ++c) {
    const float* row = saved(item, team_.thread, c);
    for (int r = 0; r < item.rows(); ++r, row += columns_ + 2 * kLanes) {
      merge(work_.whole, r, row, row[columns_ + kLanes], row + columns_, columns_);
    }
  }
  write(item, pending.head);
}

}  // namespace

int attend(const Op& op, Team& team) {
  const Call call(op);
  if (!call.valid()) return kBadArgument;
  return op.dtype == kBFloat16 ? Attention<BFloat>(call, team).run()
                               : Attention<Float>(call, team).run();
}

}  // namespace ekiden
