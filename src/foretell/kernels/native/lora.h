/* Low-rank terms of rows that have an adapter (LoRA): scale * B (A x) on top of a product W x, by arXiv 2106.09685.
 *
 * A is [rank, columns], row by row; B stands in groups of 16 rows, [groups, rank, 16], so that a thread's rows lie together.
 * Every sum has one accumulator and one order, whatever the number of rows, of threads, and the company of a row. */
#ifndef FORETELL_LORA_H
#define FORETELL_LORA_H
#include "pass.h"

/* Kinds of a layer's products, in the order of Layer.loras. */
enum { OF_Q, OF_K, OF_V, OF_O, OF_GATE, OF_UP, OF_DOWN, NUM_KINDS };

/* What row i has for products of a kind (NULL: nothing), and the end of the rows from i on that have the same. */
INLINE const LowRank *low_rank(const Pass *p, const Layer *l, int kind, int64_t i, int64_t *end) {
  const int64_t lora = p->loras[p->owner[i]];
  int64_t b = p->owner[i] + 1;
  while (b < p->batch && p->loras[b] == lora) b++;
  *end = p->start[b];
  const LowRank *w = lora ? l->loras + (lora - 1) * NUM_KINDS + kind : 0;
  return w && w->a ? w : 0;
}

INLINE float *reduced_of(const Pass *p, int64_t i, int place) { return p->reduced + (3 * i + place) * p->model->low_rank; }

/* Ask for n values of the model's type from p on. */
INLINE void fetch(const Pass *pass, const void *p, int64_t n) {
  const int64_t bytes = n * (pass->model->bf16 ? 2 : 4);
  for (int64_t i = 0; i < bytes; i += 64) prefetch((const char *)p + i);
}

INLINE void reduce_tile(const int R, const int M, const Pass *p, const LowRank *w, int64_t r, int x_is_bf16, const char *x,
                        int64_t ldx, float *to) {
  const int is_bf16 = (int)p->model->bf16;
  vec acc[4][4], xs[4];
  UNROLL for (int i = 0; i < R; i++) UNROLL for (int m = 0; m < M; m++) acc[i][m] = v_zero();
  for (int64_t k = 0; k < w->columns; k += 16) {
    const Lanes lanes = first_lanes(w->columns - k);
    UNROLL for (int m = 0; m < M; m++) xs[m] = load_as(x_is_bf16, x + m * ldx * (x_is_bf16 ? 2 : 4), k, lanes);
    UNROLL for (int i = 0; i < R; i++) {
      const vec a = load_as(is_bf16, w->a, (r + i) * w->columns + k, lanes);
      UNROLL for (int m = 0; m < M; m++) acc[i][m] = v_fma(a, xs[m], acc[i][m]);
    }
  }
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int m = 0; m < M; m++) to[3 * m * p->model->low_rank + r + i] = (float)w->scale * sum1(acc[i][m]);
}

/* scale * A x for kinds [first, last] of all rows of x [rows, ldx]: thread t's share of each. A barrier must follow. */
static void reduce(Pass *p, const Layer *l, int first, int last, int x_is_bf16, const void *x, int64_t ldx, int t) {
  for (int64_t i = 0, end; i < p->rows; i = end)
    for (int kind = first; kind <= last; kind++) {
      const LowRank *w = low_rank(p, l, kind, i, &end);
      int64_t r0, r1;
      if (!w) continue;
      share_by(w->rank >= 4 * p->threads ? 4 : 1, w->rank, t, p->threads, &r0, &r1);
      for (int64_t m = i; m < end;) {
        const char *at = (const char *)x + m * ldx * (x_is_bf16 ? 2 : 4);
        const int four = m + 4 <= end;
        float *to = reduced_of(p, m, kind - first);
        int64_t r = r0;
        for (; r + 4 <= r1; r += 4)
          if (four) reduce_tile(4, 4, p, w, r, x_is_bf16, at, ldx, to);
          else reduce_tile(4, 1, p, w, r, x_is_bf16, at, ldx, to);
        for (; r < r1; r++)
          if (four) reduce_tile(1, 4, p, w, r, x_is_bf16, at, ldx, to);
          else reduce_tile(1, 1, p, w, r, x_is_bf16, at, ldx, to);
        m += four ? 4 : 1;
      }
    }
}

INLINE void raise_tile(const int M, const Pass *p, const LowRank *w, int64_t j, int64_t b, const float *x, float *out, int64_t ldo) {
  const int64_t n = MIN(16 - j % 16, b - j), at = j / 16 * 16 * w->rank + j % 16;
  const Lanes lanes = first_lanes(n);
  vec acc[4];
  UNROLL for (int m = 0; m < M; m++) acc[m] = v_zero();
  for (int64_t r = 0; r < w->rank; r++) {
    const vec column = load_as((int)p->model->bf16, w->b, at + 16 * r, lanes);
    UNROLL for (int m = 0; m < M; m++) acc[m] = v_fma(v_all(x[3 * m * p->model->low_rank + r]), column, acc[m]);
  }
  UNROLL for (int m = 0; m < M; m++) {
    float *to = out + m * ldo + j;
    v_store_some(to, lanes, v_add(v_load_some(lanes, to), acc[m]));
  }
}

/* B times what `reduce` has left at `place`, onto columns [a, b) of out [rows, ldo]. */
static void raise_onto(const Pass *p, const Layer *l, int kind, int place, int64_t a, int64_t b, float *out, int64_t ldo) {
  for (int64_t i = 0, end; i < p->rows; i = end) {
    const LowRank *w = low_rank(p, l, kind, i, &end);
    for (int64_t m = i; w && m < end;) {
      const int four = m + 4 <= end;
      for (int64_t j = a; j < b; j += 16 - j % 16)
        if (four) raise_tile(4, p, w, j, b, reduced_of(p, m, place), out + m * ldo, ldo);
        else raise_tile(1, p, w, j, b, reduced_of(p, m, place), out + m * ldo, ldo);
      m += four ? 4 : 1;
    }
  }
}

/* Ask for B's rows [a, b) of a kind ahead of `raise_onto`. */
static void fetch_raise(const Pass *p, const Layer *l, int kind, int64_t a, int64_t b) {
  for (int64_t i = 0, end; i < p->rows && a < b; i = end) {
    const LowRank *w = low_rank(p, l, kind, i, &end);
    if (w) fetch(p, (const char *)w->b + a / 16 * 16 * w->rank * (p->model->bf16 ? 2 : 4), (b - a) * w->rank);
  }
}

#endif
