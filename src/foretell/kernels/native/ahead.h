/* Where weights are fetched to before they are used. One row is faster with them in L1. Of several rows the tiles waited for
 * their weights and for the requests themselves: on Zen 4, eight rows of SmolLM2 in bf16 took 12.8 ms by way of L1, about
 * as long as reading and products one after the other, and take 9.2 by way of L2. Which is faster here, passes tell when a
 * model is loaded (llama/ahead.py). It changes no bit. */
#ifndef FORETELL_AHEAD_H
#define FORETELL_AHEAD_H
#include "amx.h"
#include "vectors.h"

/* Rows of a tile from which on its weights are fetched into L2; never, until it is measured, where that is not known to be
 * faster. */
#if defined(__AVX512F__) && !AMX
static int64_t l2_rows = 2;
#else
static int64_t l2_rows = 1 << 20;
#endif

/* Activation rows from which AMX is used, for all formats; below 0: where it was measured to be faster; 0: never. It
 * changes no bit. */
static int64_t amx_rows = -1;

INLINE void prefetch_weights(const int M, const char *p) {
  if (M > 1 && M >= l2_rows) prefetch_l2(p);
  else prefetch(p);
}

#endif
