/* Guesses drawn from logits that were all made at once: Medusa's heads. */
#ifndef FORETELL_BLOCK_H
#define FORETELL_BLOCK_H
#include "draw.h"
#include "linear.h"

int64_t foretell_draw_scratch(int64_t n, int64_t threads) {
  return aligned(threads * n * 4);
}

/* A chain of limits[b] guesses of row b, from logits [batch, depth, n] of the tokens ids [n] (NULL: of token i the i-th), which
 * are overwritten; guesses [batch, depth] holds 0 behind them. */
int64_t foretell_draw(const Draw *draw, int64_t batch, int64_t n, int64_t threads, const int64_t *ids, const int64_t *limits,
                       float *logits, int64_t *guesses, char *scratch) {
  const int64_t depth = draw->depth;
#pragma omp parallel num_threads((int)threads)
  {
    const int t = omp_get_thread_num();
    for (int64_t i = t; i < batch * depth; i += omp_get_num_threads()) {
      const int64_t b = i / depth, at = i % depth;
      guesses[i] = at < limits[b] ? draw_token(draw, b, at, logits + i * n, n, ids, (float *)scratch + t * n) : 0;
    }
  }
  return 0;
}

#endif
