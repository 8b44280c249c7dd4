/* What attention does with slots of a cache: keys against queries, and values by their weights. */
#ifndef FORETELL_SLOTS_H
#define FORETELL_SLOTS_H
#include "core.h"

/* Keys and values of one head, `bytes` from slot to slot. */
typedef struct {
  const char *keys, *values;
  int64_t bytes, capacity, dim;
  int is_bf16;
} Slots;

#ifdef __AVX512BF16__
enum { PAIRED = 1 }; /* products of bf16 take two numbers at a time, the second first; what is not paired stands in that order */
INLINE part p_dot(part acc, part q, part k) { return v_dot_bf16(acc, (bf16x32)q, (bf16x32)k); }
#else
enum { PAIRED = 0 };
INLINE part p_dot(part acc, part q, part k) { return p_fma(q, k, acc); }
#endif
enum { LANES = 16 / PARTS, TILED = 6 /* queries of a tile at most */ };

/* How many vectors of 16 keys a score's sum goes through, one number of 32 bits a key each. */
INLINE int64_t key_steps(const Slots *s) { return s->is_bf16 && PAIRED ? s->dim / 2 : s->dim; }

/* A query as keys meet it: x [dim] is rounded as keys are. */
static void put_query(const Slots *s, const float *x, float *to) {
  bf16 rounded[MAX_DIM];
  if (!s->is_bf16) {
    memcpy(to, x, s->dim * sizeof(float));
    return;
  }
  for (int64_t d = 0; d < s->dim; d += 16) store_as(1, rounded, d, 0xffff, v_load(x + d));
  if (PAIRED) memcpy(to, rounded, s->dim * sizeof(bf16));
  for (int64_t d = 0; !PAIRED && d < s->dim; d += 32) {
    const int64_t n = MIN(32, s->dim - d);
    float odd[16], even[16];
    const bf16x32 x32 = v_load_bf16(rounded + d, n);
    v_store(odd, odd_floats(x32)), v_store(even, even_floats(x32));
    for (int64_t i = 0; i < n / 2; i++) to[d + 2 * i] = odd[i], to[d + 2 * i + 1] = even[i];
  }
}

/* 16 keys, turned: to [steps, 16]. Key i is in slot at[i], or in slot `first` + i where that is NULL: behind the capacity the
 * last is taken again. Values of these slots are fetched meanwhile. */
static void turn_keys(const Slots *s, int64_t first, const int64_t *at, float *to) {
  const int64_t words = s->is_bf16 ? s->dim / 2 : s->dim;
  const char *keys[16];
  for (int i = 0; i < 16; i++) {
    const int64_t slot = at ? at[i] : MIN(first + i, s->capacity - 1);
    keys[i] = s->keys + slot * s->bytes;
    if (!at)
      for (int64_t b = 0; b < s->bytes; b += 64) prefetch_l2(s->values + slot * s->bytes + b);
  }
  UNROLL for (int h = 0; h < PARTS; h++) {
    for (int64_t d = 0; d < words; d += LANES) {
      const int64_t n = MIN(LANES, words - d);
      part v[LANES];
      UNROLL for (int i = 0; i < LANES; i++) {
        const float *key = (const float *)keys[LANES * h + i] + d;
        v[i] = n == LANES ? p_load(key) : p_tail(key, n);
      }
      p_turn(v);
      if (s->is_bf16 && !PAIRED) {
        UNROLL for (int i = 0; i < LANES; i++) {
          if (i >= n) break;
          p_store(to + (2 * (d + i)) * 16 + LANES * h, p_odd(v[i]));
          p_store(to + (2 * (d + i) + 1) * 16 + LANES * h, p_even(v[i]));
        }
      } else {
        UNROLL for (int i = 0; i < LANES; i++) {
          if (i >= n) break;
          p_store(to + (d + i) * 16 + LANES * h, v[i]);
        }
      }
    }
  }
}

/* Scores of R queries with G groups of 16 turned keys. */
INLINE void score_tile(const int R, const int G, const int pairs, int64_t steps, const float *keys,
                       const float *const *queries, float *const *to) {
  part acc[TILED][8];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int g = 0; g < G * PARTS; g++) acc[r][g] = p_zero();
  for (int64_t i = 0; i < steps; i++) {
    part k[8];
    UNROLL for (int g = 0; g < G * PARTS; g++) k[g] = p_load(keys + (g / PARTS * steps + i) * 16 + g % PARTS * LANES);
    UNROLL for (int r = 0; r < R; r++) {
      const part q = p_all(queries[r][i]);
      UNROLL for (int g = 0; g < G * PARTS; g++) acc[r][g] = pairs ? p_dot(acc[r][g], q, k[g]) : p_fma(q, k[g], acc[r][g]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int g = 0; g < G * PARTS; g++) p_store(to[r] + g * LANES, acc[r][g]);
}

/* Groups that as many queries take at once: accumulators fit into the registers. */
INLINE int groups_of(int R) { return R * 4 <= HELD ? 4 : R * 2 <= HELD ? 2 : 1; }

static void score_some(int R, int G, int pairs, int64_t steps, const float *keys, const float *const *queries,
                       float *const *to) {
#define SCORE(N)                                                                                                       \
  case N:                                                                                                              \
    if (groups_of(N) > 1 && G == groups_of(N)) {                                                                       \
      if (PAIRED && pairs) score_tile(N, groups_of(N), 1, steps, keys, queries, to);                                   \
      else score_tile(N, groups_of(N), 0, steps, keys, queries, to);                                                   \
    } else {                                                                                                           \
      if (PAIRED && pairs) score_tile(N, 1, 1, steps, keys, queries, to);                                              \
      else score_tile(N, 1, 0, steps, keys, queries, to);                                                              \
    }                                                                                                                  \
    break;
  switch (R) { SCORE(1) SCORE(2) SCORE(3) SCORE(4) SCORE(5) SCORE(6) }
#undef SCORE
}

/* Scores of `count` queries with n groups of 16 turned keys, to [count, ld]. */
static void score_all(const Slots *s, int64_t count, const float *queries, int64_t ld_queries, int64_t n, const float *keys,
                  float *to, int64_t ld) {
  const int64_t steps = key_steps(s);
  for (int64_t i = 0, left = count, R; left; i += R, left -= R) {
    const int64_t tiles = (left + TILED - 1) / TILED;
    R = (left + tiles - 1) / tiles;
    const float *from[TILED];
    for (int64_t g = 0, G; g < n; g += G) {
      float *into[TILED];
      G = n - g >= groups_of((int)R) ? groups_of((int)R) : 1;
      for (int64_t r = 0; r < R; r++) from[r] = queries + (i + r) * ld_queries, into[r] = to + (i + r) * ld + 16 * g;
      score_some((int)R, (int)G, s->is_bf16, steps, keys + g * steps * 16, from, into);
    }
  }
}

/* mixed[r] += sum over i in [from, to) of weights[r][i] * values[i], in order, for R queries that share the reads; for the
 * columns of C vectors from `first` on. */
INLINE void mix_tile(const int R, const int C, const int is_bf16, const float *const *weights, const char *values,
                     int64_t bytes, int64_t from, int64_t to, int64_t first, float *const *mixed) {
  part acc[TILED][8];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C * PARTS; c++) acc[r][c] = p_load(mixed[r] + first + LANES * c);
  for (int64_t i = from; i < to; i++) {
    part value[8];
    UNROLL for (int c = 0; c < C * PARTS; c++) {
      const char *row = values + i * bytes;
      value[c] = is_bf16 ? p_of_bf16((const bf16 *)row + first + LANES * c) : p_load((const float *)row + first + LANES * c);
    }
    UNROLL for (int r = 0; r < R; r++) {
      const part weight = p_all(weights[r][i]);
      UNROLL for (int c = 0; c < C * PARTS; c++) acc[r][c] = p_fma(weight, value[c], acc[r][c]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C * PARTS; c++) p_store(mixed[r] + first + LANES * c, acc[r][c]);
}

/* The same of all columns. */
static void mix(int R, int is_bf16, const float *const *weights, const char *values, int64_t bytes, int64_t from, int64_t to,
                int64_t dim, float *const *mixed) {
#define MIX(N, C)                                                                                                      \
  (is_bf16 ? mix_tile(N, C, 1, weights, values, bytes, from, to, first, mixed)                                         \
           : mix_tile(N, C, 0, weights, values, bytes, from, to, first, mixed))
#define MIX_CASE(N)                                                                                                    \
  case N:                                                                                                              \
    if (N * 4 <= HELD && left >= 4) C = 4, MIX(N, 4);                                                                  \
    else if (N * 2 <= HELD && left >= 2) C = 2, MIX(N, 2);                                                             \
    else C = 1, MIX(N, 1);                                                                                             \
    break;
  for (int64_t first = 0, left = dim / 16, C; left && from < to; left -= C, first += 16 * C) {
    switch (R) { MIX_CASE(1) MIX_CASE(2) MIX_CASE(3) MIX_CASE(4) MIX_CASE(5) default: MIX_CASE(6) }
  }
#undef MIX
#undef MIX_CASE
}

#endif
