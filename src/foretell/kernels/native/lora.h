/* Low-rank terms of rows that have an adapter (LoRA): scale * B (A x) on top of a product W x, by arXiv 2106.09685. */
#ifndef FORETELL_LORA_H
#define FORETELL_LORA_H
#include "pass.h"

/* Kinds of a layer's products, in the order of Layer.loras. */
enum { OF_Q, OF_K, OF_V, OF_O, OF_GATE, OF_UP, OF_DOWN, NUM_KINDS };

/* What row i has for products of a kind; NULL: nothing. */
INLINE const LowRank *low_rank(const Pass *p, const Layer *l, int kind, int64_t i) {
  const int64_t lora = p->loras[i / p->nodes];
  const LowRank *w = lora ? l->loras + (lora - 1) * NUM_KINDS + kind : 0;
  return w && w->a ? w : 0;
}

INLINE float *reduced_of(const Pass *p, int64_t i, int place) { return p->reduced + (3 * i + place) * p->model->low_rank; }

/* One sum, in one order: four accumulators of 16 lanes, whoever's row it is. */
static float dot_as(int x_is_bf16, const void *x, int a_is_bf16, const void *a, int64_t at, int64_t n) {
  vec acc[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
  for (int64_t k = 0; k < n; k += 64)
    UNROLL for (int i = 0; i < 4; i++) {
      const int64_t from = k + 16 * i;
      if (from < n)
        acc[i] = v_fma(load_as(a_is_bf16, a, at + from, first_lanes(n - from)), load_as(x_is_bf16, x, from, first_lanes(n - from)), acc[i]);
    }
  return sum1(v_add(v_add(acc[0], acc[1]), v_add(acc[2], acc[3])));
}

/* scale * A x for kinds [first, last] of all rows of x [rows, ldx]: thread t's share of each. A barrier must follow. */
static void reduce(Pass *p, const Layer *l, int first, int last, int x_is_bf16, const void *x, int64_t ldx, int t) {
  const int is_bf16 = (int)p->model->bf16;
  for (int64_t i = 0; i < p->rows; i++)
    for (int kind = first; kind <= last; kind++) {
      const LowRank *w = low_rank(p, l, kind, i);
      float *to = reduced_of(p, i, kind - first);
      for (int64_t r = t; w && r < w->rank; r += p->threads)
        to[r] = (float)w->scale *
                dot_as(x_is_bf16, (const char *)x + i * ldx * (x_is_bf16 ? 2 : 4), is_bf16, w->a, r * w->columns, w->columns);
    }
}

/* B times what `reduce` has left at `place`, onto columns [a, b) of out [rows, ldo]. */
static void raise_onto(const Pass *p, const Layer *l, int kind, int place, int64_t a, int64_t b, float *out, int64_t ldo) {
  const int is_bf16 = (int)p->model->bf16;
  for (int64_t i = 0; i < p->rows && a < b; i++) {
    const LowRank *w = low_rank(p, l, kind, i);
    const float *x = reduced_of(p, i, place);
    for (int64_t j = a; w && j < b; j += 64) {
      vec acc[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
      for (int64_t r = 0; r < w->rank; r++)
        UNROLL for (int k = 0; k < 4; k++)
          if (j + 16 * k < b)
            acc[k] = v_fma(v_all(x[r]), load_as(is_bf16, w->b, r * w->rows + j + 16 * k, first_lanes(b - j - 16 * k)), acc[k]);
      for (int k = 0; k < 4 && j + 16 * k < b; k++) {
        const Lanes lanes = first_lanes(b - j - 16 * k);
        float *to = out + i * ldo + j + 16 * k;
        v_store_some(to, lanes, v_add(v_load_some(lanes, to), acc[k]));
      }
    }
  }
}

#endif
