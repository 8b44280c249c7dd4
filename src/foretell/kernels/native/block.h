/* Guesses drawn from logits that were all made at once: Medusa's heads, and DFlash's blocks with their Markov head or selector. */
#ifndef FORETELL_BLOCK_H
#define FORETELL_BLOCK_H
#include "draw.h"
#include "linear.h"
#include "rows.h"

/* A bigram of low rank: logits of a token get first[token before it] times second; data NULL: there is none. */
typedef struct {
  Matrix first, second; /* [vocab, rank], [n, rank] for n outputs */
} Markov;

/* A choice among the `top` best tokens of each logit row by the token before it: theirs gain the product of its code, of the
 * row's gate and of their own code; all others are -inf. data NULL: there is none. */
typedef struct {
  Matrix before, after; /* [n, rank] codes */
  const float *gates;   /* [batch, depth, rank] */
  int64_t top;
} Selector;

/* Logits z [n] of guess i of all after token `before`, of which `columns` [count] are the best, become those of the choice. */
static void choose_among(const Selector *s, int64_t i, int64_t before, const int64_t *columns, int64_t count, float *code,
                         float *z, int64_t n) {
  const int64_t rank = s->before.columns;
  float *own = code + padded(rank), *scores = own + padded(rank);
  read_row(&s->before, before, code);
  for (int64_t r = 0; r < rank; r++) code[r] *= s->gates[i * rank + r];
  for (int64_t c = 0; c < count; c++) {
    float sum = 0;
    read_row(&s->after, columns[c], own);
    for (int64_t r = 0; r < rank; r++) sum += code[r] * own[r];
    scores[c] = z[columns[c]] + sum;
  }
  for (int64_t j = 0; j < n; j++) z[j] = -INFINITY;
  for (int64_t c = 0; c < count; c++) z[columns[c]] = scores[c];
}

INLINE int64_t selector_bytes(const Selector *s, int64_t batch, int64_t depth, int64_t threads) {
  return aligned(batch * depth * (s->top + 1) * 8) + aligned(threads * (2 * padded(s->before.columns) + s->top) * 4);
}

int64_t foretell_draw_scratch(const Markov *markov, const Selector *selector, int64_t batch, int64_t depth, int64_t n,
                               int64_t threads) {
  Rows before;
  const int64_t spare = aligned(threads * n * 4) + (selector ? selector_bytes(selector, batch, depth, threads) : 0);
  if (!markov) return spare;
  return spare + place_rows(&before, batch, markov->first.columns, (int)threads, 0) + aligned(markov->first.columns * 4);
}

/* A chain of limits[b] guesses of row b after pending[b], from logits [batch, depth, n] of the tokens ids [n] (NULL: of token
 * i the i-th), which are overwritten; guesses [batch, depth] holds 0 behind them. */
int64_t foretell_draw(const Draw *draw, const Markov *markov, const Selector *selector, int64_t batch, int64_t n,
                       int64_t threads, const int64_t *ids, const int64_t *limits, const int64_t *pending, float *logits,
                       int64_t *guesses, char *scratch) {
  const int64_t depth = draw->depth;
  Pass pass = {.threads = (int)threads}, *p = &pass;
  Rows before;
  float *row = 0, *spare = (float *)scratch;
  scratch += aligned(threads * n * 4);
  int64_t *best = (int64_t *)scratch;
  float *codes = 0;
  if (selector) codes = (float *)(scratch + aligned(batch * depth * (selector->top + 1) * 8));
  if (markov) row = (float *)(scratch + place_rows(&before, batch, markov->first.columns, p->threads, scratch));
  for (int64_t i = 0; (markov || selector) && i < batch; i++)
    if (pending[i] < 0 || pending[i] >= draw->vocab) return 1;
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
    int64_t v0, v1;
#pragma omp single
    p->threads = omp_get_num_threads();
    for (int64_t i = t; selector && i < batch * depth; i += p->threads) {
      int64_t *columns = best + i * (selector->top + 1);
      columns[selector->top] = i % depth < limits[i / depth] ? best_of(logits + i * n, n, selector->top, columns) : 0;
    }
    if (selector) barrier(p, &phase);
    for (int64_t b = t; selector && b < batch; b += p->threads)
      for (int64_t at = 0; at < depth; at++) {
        const int64_t i = b * depth + at, *columns = best + i * (selector->top + 1);
        float *code = codes + t * (2 * padded(selector->before.columns) + selector->top);
        guesses[i] = 0;
        if (at >= limits[b]) continue;
        choose_among(selector, i, at ? guesses[i - 1] : pending[b], columns, columns[selector->top], code, logits + i * n, n);
        guesses[i] = draw_token(draw, b, at, logits + i * n, n, ids, spare + t * n);
      }
    for (int64_t i = t; !markov && !selector && i < batch * depth; i += p->threads) {
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
