/* Guesses drawn from logits that were all made at once: Medusa's heads, and DFlash's blocks with their Markov head. */
#ifndef FORETELL_BLOCK_H
#define FORETELL_BLOCK_H
#include "draw.h"
#include "linear.h"
#include "rows.h"

/* A bigram of low rank: logits of a token get first[token before it] times second; data NULL: there is none. */
typedef struct {
  Matrix first, second; /* [vocab, rank], [n, rank] for n outputs */
} Markov;

int64_t foretell_draw_scratch(const Markov *markov, int64_t batch, int64_t n, int64_t threads) {
  Rows before;
  const int64_t spare = aligned(threads * n * 4);
  if (!markov) return spare;
  return spare + place_rows(&before, batch, markov->first.columns, (int)threads, 0) + aligned(markov->first.columns * 4);
}

/* A chain of limits[b] guesses of row b after pending[b], from logits [batch, depth, n] of the tokens ids [n] (NULL: of token
 * i the i-th), which are overwritten; guesses [batch, depth] holds 0 behind them. */
int64_t foretell_draw(const Draw *draw, const Markov *markov, int64_t batch, int64_t n, int64_t threads,
                       const int64_t *ids, const int64_t *limits, const int64_t *pending, float *logits,
                       int64_t *guesses, char *scratch) {
  const int64_t depth = draw->depth;
  Pass pass = {.threads = (int)threads}, *p = &pass;
  Rows before;
  float *row = 0, *spare = (float *)scratch;
  scratch += aligned(threads * n * 4);
  if (markov) row = (float *)(scratch + place_rows(&before, batch, markov->first.columns, p->threads, scratch));
  for (int64_t i = 0; markov && i < batch; i++)
    if (pending[i] < 0 || pending[i] >= draw->vocab) return 1;
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
    int64_t v0, v1;
#pragma omp single
    p->threads = omp_get_num_threads();
    for (int64_t i = t; !markov && i < batch * depth; i += p->threads) {
      const int64_t b = i / depth, at = i % depth;
      guesses[i] = at < limits[b] ? draw_token(draw, b, at, logits + i * n, n, ids, spare + t * n) : 0;
    }
    for (int64_t at = 0; markov && at < depth; at++) {
      const Input all = (Input){before.plain, (Block *)before.blocks};
      share_rows(&markov->second, n, t, p->threads, &v0, &v1);
      for (int64_t i = 0; t == 0 && i < batch; i++) {
        read_row(&markov->first, at ? guesses[i * depth + at - 1] : pending[i], row);
        put_row(&before, &all, reads(&markov->second), markov->second.format == BF16, i, row);
      }
      barrier(p, &phase);
      linear(&markov->second, v0, v1, input_of(&all, &markov->second), before.ld, batch, 0, logits + at * n, depth * n, 1,
             row_of(&markov->second, v0));
      barrier(p, &phase);
      for (int64_t i = t; i < batch; i += p->threads)
        guesses[i * depth + at] =
            at < limits[i] ? draw_token(draw, i, at, logits + (i * depth + at) * n, n, ids, spare + t * n) : 0;
      barrier(p, &phase);
    }
  }
  return 0;
}

#endif
