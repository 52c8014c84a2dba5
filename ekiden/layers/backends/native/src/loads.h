// How the rows and panels of a linear are dealt to threads.
#pragma once
#include <algorithm>

#include "strips.h"
#include "turns.h"

namespace ekiden {

// Rows of which a panel of weights is read once: little enough to stay in L2 or L3.
constexpr int64_t kChunkRows = 192;
// Rows in the form that a kernel takes are held for so many bytes at once, or one chunk.
constexpr int64_t kLoadBytes = int64_t{8} << 20;
// Pieces of the work for each thread, at least, where there are so many strips.
constexpr int64_t kPiecesEach = 8;

// Rows in a kernel's form: words[row_words][rows of the strip] for each strip.
struct Load {
  int64_t row;  // the first
  Strips strips;
  uint32_t* words;
  int64_t row_words;

  uint32_t* strip(int64_t index) const { return words + strips.begin(index) * row_words; }
};

// Strips [begin, end) of a load, to be multiplied by one panel.
struct Piece {
  int64_t panel;
  int64_t begin, end;
  int64_t next;  // the panel that this thread probably takes next
};

inline bool fits_shared(int64_t row_words) { return row_words * 4 <= kSharedRoom / kChunkRows; }

// What there is to do: rows, in strips of at most so many, times panels of 32 outputs.
struct Job {
  int64_t rows, strip_rows, row_words, panels;
};

// One strip is quicker made by every thread for itself than waited for, and weights that are used
// once are read fastest in the order in which they lie. `own` has room for the prepared strip.
template <class Prepare, class Multiply>
void one_strip(const Job& job, char* own, const Team& team, Prepare prepare, Multiply multiply) {
  const Load load{0, Strips(job.rows, job.strip_rows), reinterpret_cast<uint32_t*>(own),
                  job.row_words};
  prepare(load, 0);
  const Share share(job.panels, team);
  for (int64_t panel = share.begin; panel < share.end; ++panel)
    multiply(load, Piece{panel, 0, 1, panel + 1});
}

template <class Prepare, class Multiply>
void one_load(const Load& load, const Job& job, Team& team, Prepare prepare, Multiply multiply) {
  const int64_t strips = load.strips.count, panels = job.panels;
  take_turns(team, Phase::First, strips, [&](int64_t strip) { prepare(load, strip); });
  team.barrier();
  const int64_t even = panels * strips / (kPiecesEach * team.threads);
  const Strips chunks(strips, std::clamp<int64_t>(even, 1, kChunkRows / job.strip_rows));
  take_turns(team, Phase::Last, chunks.count * panels, [&](int64_t item) {
    const int64_t panel = item % panels, chunk = item / panels;
    multiply(load, Piece{panel, chunks.begin(chunk), chunks.begin(chunk + 1),
                         std::min(panel + team.threads, panels - 1)});
  });
}

// Calls prepare(load, strip) for every strip, and multiply(load, piece) for the pieces that strips
// and panels make.
template <class Prepare, class Multiply>
void by_loads(const Job& job, char* own, Team& team, Prepare prepare, Multiply multiply) {
  if (job.rows == 0) return;
  if (job.rows <= job.strip_rows) return one_strip(job, own, team, prepare, multiply);
  const Strips loads(job.rows, std::max(kChunkRows, kLoadBytes / (job.row_words * 4)));
  for (int64_t i = 0; i < loads.count; ++i) {
    if (i > 0) team.barrier();
    const Load load{loads.begin(i), Strips(loads.size(i), job.strip_rows),
                    reinterpret_cast<uint32_t*>(team.shared), job.row_words};
    one_load(load, job, team, prepare, multiply);
  }
}

}  // namespace ekiden
