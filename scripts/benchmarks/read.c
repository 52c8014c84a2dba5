/* Reads a buffer once, as fast as it goes: how many bytes a second come from memory at best. */

#include <stddef.h>
#include <stdint.h>

typedef uint64_t lane __attribute__((vector_size(64)));

enum { STREAMS = 8, AHEAD = 16 };

/* The sum of all words, so that no read can be left out. `bytes` is a multiple of 64 * STREAMS.
   Several streams, because one alone leaves the prefetchers of most cores idle at page ends. */
uint64_t read_all(const void *memory, size_t bytes) {
  const size_t lanes = bytes / sizeof(lane) / STREAMS;
  lane sums[STREAMS] = {0};
  for (size_t i = 0; i < lanes; i++)
    for (size_t s = 0; s < STREAMS; s++) {
      const lane *at = (const lane *)memory + s * lanes + i;
      __builtin_prefetch(at + AHEAD, 0, 3);
      sums[s] += *at;
    }
  uint64_t total = 0;
  for (size_t s = 0; s < STREAMS; s++)
    for (size_t word = 0; word < sizeof(lane) / sizeof(uint64_t); word++) total += sums[s][word];
  return total;
}
