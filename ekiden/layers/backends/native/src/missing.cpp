// Kernels not written yet: an operation that names one ends its list with kUnknownKind.
#include "ekiden.h"

namespace ekiden {

#define EKIDEN_MISSING(name) \
  __attribute__((weak)) int name(const Op&, Team&) { return kUnknownKind; }

EKIDEN_MISSING(norm)
EKIDEN_MISSING(add_norm)
EKIDEN_MISSING(gated)
EKIDEN_MISSING(rotate_store)
EKIDEN_MISSING(attend)
EKIDEN_MISSING(embed)
EKIDEN_MISSING(all_reduce)

}  // namespace ekiden
