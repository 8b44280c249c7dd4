/* A token drawn from a draft's logits: temperature, then argmax, race or inverse of the cumulative sum.
 *
 * The same draws as ``probs.logits_to_probs`` and ``draft.base.choose`` make of the same distribution, over the columns
 * that the draft has: what it lacks has probability 0 and neither wins a race nor adds to a sum.
 */
#ifndef FORETELL_DRAW_H
#define FORETELL_DRAW_H
#include "../race_logits.h"
#include "vectors.h"

enum { DRAW_FIXED, DRAW_COUPLED, DRAW_IID };

typedef struct {
  int64_t how;                      /* one of the above, for rows whose temperature is not 0 */
  int64_t depth, vocab;             /* guesses a row at most; V */
  const float *inverse_temperature; /* [batch]; 0: greedy */
  const uint64_t *keys, *table;     /* COUPLED: [batch, depth], and the hashed id of each column */
  const double *uniforms;           /* IID: [batch, depth] */
  const int64_t *top_k;             /* [batch], 0: all; or NULL */
  const float *top_p, *min_p;       /* [batch], or NULL */
  float *q;                         /* [batch, depth + 1, vocab] zeros, or NULL: the distribution of each draw */
} Draw;

/* Scores of n columns to probabilities at this inverse temperature, in place. NaN has none; where all are NaN, all are 0. */
static void soften(float *z, int64_t n, float inverse) {
  vec top = v_all(-INFINITY), sum = v_zero();
  for (int64_t i = 0; i < n; i++) z[i] = z[i] == z[i] ? MIN(z[i] * inverse, 3e38f) : -INFINITY;
  for (int64_t i = 0; i < n; i += 16) top = v_max_some(first_lanes(n - i), top, v_load_some(first_lanes(n - i), z + i));
  const float largest = v_largest(top);
  if (!(largest > -INFINITY)) {
    memset(z, 0, n * sizeof(float));
    return;
  }
  const vec least = exp16(v_all(-INFINITY)); /* what exp16 returns for all that is too small */
  for (int64_t i = 0; i < n; i += 16) {
    const Lanes lanes = first_lanes(n - i);
    const vec e = v_sub(exp16(v_sub(v_load_some(lanes, z + i), v_all(largest))), least);
    sum = v_add(sum, v_keep(lanes, e));
    v_store_some(z + i, lanes, e);
  }
  const float scale = 1.0f / sum1(sum);
  for (int64_t i = 0; i < n; i++) z[i] *= scale;
}

/* The k-th largest of n values, 1 <= k <= n, which are reordered (Hoare's selection, the middle of three as pivot). */
static float kth_largest(float *x, int64_t n, int64_t k) {
  int64_t a = 0, b = n - 1;
  while (a < b) {
    const float u = x[a], v = x[a + (b - a) / 2], w = x[b];
    const float pivot = MAX(MIN(u, v), MIN(MAX(u, v), w));
    int64_t i = a, j = b;
    while (i <= j) {
      while (x[i] > pivot) i++;
      while (x[j] < pivot) j--;
      if (i <= j) {
        const float y = x[i];
        x[i++] = x[j], x[j--] = y;
      }
    }
    if (k - 1 <= j) b = j;
    else if (k - 1 >= i) a = i;
    else break;
  }
  return x[k - 1];
}

static void sift_down(float *heap, int64_t n, int64_t i) {
  const float x = heap[i];
  for (int64_t child; (child = 2 * i + 1) < n; i = child) {
    if (child + 1 < n && heap[child + 1] > heap[child]) child++;
    if (!(heap[child] > x)) break;
    heap[i] = heap[child];
  }
  heap[i] = x;
}

/* The least probability in the smallest set of most probable tokens whose mass reaches top_p; heap [n] is overwritten. */
static float nucleus_edge(float *heap, int64_t n, float top_p) {
  float mass = 0, edge = heap[0];
  for (int64_t i = n / 2 - 1; i >= 0; i--) sift_down(heap, n, i);
  for (int64_t first = 1; n > 0; first = 0) {
    const float p = heap[0];
    mass += p;
    if (!first && !(mass - p < top_p)) break; /* the first is always kept */
    edge = p;
    heap[0] = heap[--n];
    if (n) sift_down(heap, n, 0);
  }
  return edge;
}

/* Temperature, top-k, top-p and min-p, each on what the one before left, as ``probs._temper`` has them. `spare` [n]. */
static void temper(const Draw *d, int64_t b, float *z, int64_t n, float *spare) {
  const int64_t k = d->top_k ? d->top_k[b] : 0;
  const float top_p = d->top_p ? d->top_p[b] : 1.0f, min_p = d->min_p ? d->min_p[b] : 0.0f;
  if (k > 0 && k < n) {
    for (int64_t i = 0; i < n; i++) spare[i] = z[i] == z[i] ? z[i] : -INFINITY;
    const float edge = kth_largest(spare, n, k);
    for (int64_t i = 0; i < n; i++) z[i] = z[i] >= edge ? z[i] : -INFINITY;
  }
  soften(z, n, d->inverse_temperature[b]);
  if (top_p >= 1 && min_p <= 0) return;
  float edge = 0, most = 0, sum = 0;
  if (top_p < 1) {
    memcpy(spare, z, n * sizeof(float));
    edge = nucleus_edge(spare, n, top_p);
  }
  for (int64_t i = 0; i < n; i++) most = MAX(most, z[i]);
  edge = MAX(edge, min_p * most);
  for (int64_t i = 0; i < n; i++) sum += z[i] = z[i] >= edge ? z[i] : 0;
  for (int64_t i = 0; sum > 0 && i < n; i++) z[i] /= sum;
}

/* Where the largest of z [n] stands, the lowest of equal ones. */
static int64_t largest_of(const float *z, int64_t n) {
  int64_t best = 0;
  float most = -INFINITY;
  for (int64_t from = 0; from < n; from += 256) {
    const int64_t stop = MIN(n, from + 256);
    int any = 0;
    for (int64_t i = from; i < stop; i++) any |= z[i] > most;
    for (int64_t i = from; any && i < stop; i++)
      if (z[i] > most) most = z[i], best = i;
  }
  return best;
}

/* The first index at which the sum of p exceeds `uniform` of its total: ``kernels/cdf.c`` for one row. */
static int64_t invert_sum(const float *p, int64_t n, double uniform) {
  double total = 0, sum = 0;
  for (int64_t i = 0; i < n; i++) total += (double)p[i];
  const double point = uniform * total;
  for (int64_t i = 0; i < n; i++)
    if ((sum += (double)p[i]) > point) return i;
  return n - 1;
}

/* The token after guess `at` (0: after the pending one) of row b, from logits z [n], which are overwritten, as spare [n] is.
 * ids [n] are the columns' tokens, ascending, or NULL. */
static int64_t draw_token(const Draw *d, int64_t b, int64_t at, float *z, int64_t n, const int64_t *ids, float *spare) {
  const float inverse = d->inverse_temperature[b];
  float *q = d->q ? d->q + (b * (d->depth + 1) + at) * d->vocab : 0;
  int64_t column;
  if (inverse == 0) {
    column = largest_of(z, n);
    if (q) q[ids ? ids[column] : column] = z[column] > -INFINITY;
    return ids ? ids[column] : column;
  }
  if (d->how == DRAW_COUPLED && !q) { /* nobody reads the probabilities */
    const Warp warp = {inverse, d->top_p ? d->top_p[b] : 1.0f, d->min_p ? d->min_p[b] : 0.0f,
                       d->top_k ? (int32_t)d->top_k[b] : 0};
    column = draw_logits(z, n, &warp, d->keys[b * d->depth + at], d->table);
    if (column >= 0) return ids ? ids[column] : column;
  }
  temper(d, b, z, n, spare);
  if (d->how == DRAW_COUPLED) column = race_row(z, n, d->keys[b * d->depth + at], d->table);
  else if (d->how == DRAW_IID) column = invert_sum(z, n, d->uniforms[b * d->depth + at]);
  else column = largest_of(z, n);
  for (int64_t i = 0; q && i < n; i++) q[ids ? ids[i] : i] = z[i];
  return ids ? ids[column] : column;
}

#endif
