/* What attention does with slots of a cache: keys against queries, and values by their weights.
 *
 * A score is summed in 16 lanes, which one tree adds up (v_dot_bf16, sums16). Of few queries each meets 16 keys so. Of many,
 * keys are turned first, so that a vector has one number of each of 16 keys: a lane's sum is then a chain of products and the
 * tree adds chains, with the same bits. Weights of bf16 values are rounded as these are; of two positions, an even one and the
 * next, the second is added first: what AVX512_BF16 does.
 *
 * Coded slots hold `dim` codes of int8 and behind them a float, the scale: number i is scale * code i. Codes are whole
 * numbers below 128, so bf16 holds them exactly: slots are opened as codes in the model's type, once for all queries that
 * meet them, and are then read as any others. A score is multiplied by its key's scale, a weight by its value's. */
#ifndef FORETELL_SLOTS_H
#define FORETELL_SLOTS_H
#include "core.h"

/* Keys and values of one head, `bytes` from slot to slot. */
typedef struct {
  const char *keys, *values;
  int64_t bytes, capacity, dim, value_dim;
  int is_bf16, coded;
} Slots;

/* Asks for what lies AHEAD of some slots' bytes: a CPU fetches by itself to the end of a page alone, and else memory would wait
 * for the products and they for it. To L2: what is on its way to L1 holds up what is read now. */
enum { AHEAD = 6144 };
INLINE void fetch_ahead(const char *from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch_l2(from + AHEAD + i);
}

/* Codes of one slot in the model's type: returns bytes of these. */
INLINE int64_t open_slot(const Slots *s, const char *slot, char *to) {
  if (!s->is_bf16) {
    for (int64_t d = 0; d < s->dim; d += 16) v_store((float *)to + d, v_int8(slot + d));
    return 4 * s->dim;
  }
  int64_t d = 0;
#ifdef __AVX512BF16__
  for (; d + 32 <= s->dim; d += 32)
    _mm512_storeu_si512(to + 2 * d, (__m512i)_mm512_cvtne2ps_pbh(v_int8(slot + d + 16), v_int8(slot + d)));
#endif
  for (; d < s->dim; d += 16) h_store_some((bf16 *)to + d, 0xffff, high_half(v_int8(slot + d)));
  return 2 * s->dim;
}

INLINE float scale_of(const Slots *s, const char *slot) {
  float scale;
  memcpy(&scale, slot + s->dim, SCALE);
  return scale;
}

/* n slots, of which the first is now slot 0; coded ones are opened to `to`. Behind the capacity the last is taken again. */
static Slots open_run(const Slots *s, int64_t first, int64_t n, char *to, int of_values) {
  Slots run = *s;
  run.keys += first * s->bytes, run.values += first * s->bytes, run.capacity -= first;
  if (!s->coded) return run;
  const char *from = of_values ? run.values : run.keys;
  run.keys = run.values = to, run.coded = 0, run.bytes = s->dim * (s->is_bf16 ? 2 : 4);
  for (int64_t i = 0; i < n; i++) {
    const char *slot = from + MIN(i, run.capacity - 1) * s->bytes;
    fetch_ahead(slot, s->bytes);
    open_slot(s, slot, to + i * run.bytes);
  }
  run.capacity = n;
  return run;
}

/* Round a key or a value to codes: scale = largest / 127, ties to even. What is not finite gives a scale that is not. */
static void code_slot(const float *x, int64_t dim, char *slot) {
  vec most = v_zero();
  for (int64_t d = 0; d < dim; d += 16) {
    const float largest = v_largest_bits(v_load(x + d), most);
    most = v_all(largest);
  }
  const float largest = v_largest_bits(most, most);
  const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f, scale = largest <= 1e-30f ? 0.0f : largest / 127.0f;
  for (int64_t d = 0; d < dim; d += 16) i_store_int8((int8_t *)slot + d, i_round(v_mul(v_load(x + d), v_all(inverse))));
  memcpy(slot + dim, &scale, SCALE);
}

enum { LANES = 16 / PARTS, TILED = 6 /* queries of a tile of values at most */ };

/* Numbers of a turned key, or of a query that meets such: bf16 split into odd and even ones where they are not paired. */
INLINE int64_t turned_size(const Slots *s) { return s->is_bf16 ? (s->dim + 31) / 32 * (PAIRED ? 16 : 32) : s->dim; }

/* Dot products of one query with 16 keys: key i at keys[i], or at run + i * bytes where keys is NULL. */
INLINE vec scores_dim(const int64_t dim, const int is_bf16, const void *query, const char *run, int64_t bytes,
                      const char *const *keys) {
  vec acc[16];
#define KEY(T, i) ((const T *)(keys ? keys[i] : run + (i) * bytes) + d)
  for (int some = 0; some < 16; some += SCORES) { /* as many at once as the registers hold */
    vec *const sum = acc + some;
    UNROLL for (int i = 0; i < SCORES; i++) sum[i] = v_zero();
    if (is_bf16) {
      for (int64_t d = 0; d < dim; d += 32) {
        const bf16x32 q = v_load_bf16((const bf16 *)query + d, dim - d);
        UNROLL for (int i = 0; i < SCORES; i++)
            sum[i] = v_dot_bf16(sum[i], q, v_load_bf16(KEY(bf16, some + i), dim - d));
      }
    } else {
      for (int64_t d = 0; d < dim; d += 16) {
        const vec q = v_load((const float *)query + d);
        UNROLL for (int i = 0; i < SCORES; i++) sum[i] = v_fma(q, v_load(KEY(float, some + i)), sum[i]);
      }
    }
  }
#undef KEY
  return sums16(acc);
}

/* The same with compile-time constants: common head dimensions, and whether keys are contiguous. */
static vec scores16(const Slots *s, const void *query, const char *run, const char *const *keys) {
  const int64_t dim = s->dim;
  if (keys) return s->is_bf16 ? scores_dim(dim, 1, query, 0, 0, keys) : scores_dim(dim, 0, query, 0, 0, keys);
  if (dim == 64) return s->is_bf16 ? scores_dim(64, 1, query, run, 128, 0) : scores_dim(64, 0, query, run, 256, 0);
  if (dim == 128) return s->is_bf16 ? scores_dim(128, 1, query, run, 256, 0) : scores_dim(128, 0, query, run, 512, 0);
  return s->is_bf16 ? scores_dim(dim, 1, query, run, 2 * dim, 0) : scores_dim(dim, 0, query, run, 4 * dim, 0);
}

/* 16 keys in slots from `first` on, turned to [turned size, 16]; behind the capacity the last is taken again. */
INLINE void turn_some(const int split, int64_t words, const char *const *keys, float *to) {
  const int64_t each = split ? 2 : 1;
  for (int h = 0; h < PARTS; h++) {
    for (int64_t d = 0; d < words; d += 8) { /* head dimensions are multiples of 16 */
      part v[8];
      p_turn(keys + LANES * h, d, v);
      UNROLL for (int i = 0; i < 8; i++) {
        float *at = to + LANES * h + (d + i) * each * 16;
        if (split) p_store(at, p_odd(v[i])), p_store(at + 16, p_even(v[i]));
        else p_store(at, v[i]);
      }
    }
  }
  for (int64_t d = words; d < (words + 15) / 16 * 16; d++) memset(to + d * each * 16, 0, each * 64);
}

static void turn_keys(const Slots *s, int64_t first, float *to) {
  const char *keys[16];
  UNROLL for (int i = 0; i < 16; i++) keys[i] = s->keys + MIN(first + i, s->capacity - 1) * s->bytes;
  if (s->is_bf16) turn_some(!PAIRED, s->dim / 2, keys, to);
  else turn_some(0, s->dim, keys, to);
}

/* Scores of R queries with G times 16 turned keys, `ld` floats apart: `each` numbers follow each other in a lane's chain. The
 * tree adds chains 8 apart, then 4, 2 and 1: such four as it joins first are summed by themselves, AT_ONCE of them at a time. */
INLINE void score_tile(const int R, const int G, const int each, const int paired, int64_t size, const float *keys, int64_t ld,
                       const float *queries, int64_t ld_queries, float *to) {
  static const int8_t first[4] = {0, 2, 1, 3}, behind[4] = {0, 8, 4, 12};
  part sums[4][CHAINED][ABREAST * PARTS];
  for (int n = 0; n < 4; n++) { /* not unrolled: gcc would load ahead what registers do not hold */
    UNROLL for (int some = 0; some < 4; some += AT_ONCE) {
      part acc[CHAINED][ABREAST * PARTS][AT_ONCE];
      UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < G * PARTS; h++)
        UNROLL for (int c = 0; c < AT_ONCE; c++) acc[r][h][c] = p_zero();
      for (int64_t i = first[n] * each; i < size; i += 16 * each) {
        UNROLL for (int c = 0; c < AT_ONCE; c++) {
          UNROLL for (int e = 0; e < each; e++) {
            const int64_t at = i + behind[some + c] * each + e;
            part k[ABREAST * PARTS];
            UNROLL for (int h = 0; h < G * PARTS; h++) {
              k[h] = p_load(keys + h / PARTS * ld + at * 16 + h % PARTS * LANES);
              HERE(k[h]); /* gcc would load it again for every query */
            }
            UNROLL for (int r = 0; r < R; r++) {
              const part q = p_all(queries[r * ld_queries + at]);
              UNROLL for (int h = 0; h < G * PARTS; h++)
                  acc[r][h][c] = paired ? p_dot(acc[r][h][c], q, k[h]) : p_fma_here(acc[r][h][c], q, k[h]);
            }
          }
        }
      }
      UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < G * PARTS; h++) {
        part x = p_add(acc[r][h][0], acc[r][h][1]);
        if (AT_ONCE == 4) x = p_add(x, p_add(acc[r][h][AT_ONCE - 2], acc[r][h][AT_ONCE - 1]));
        sums[n][r][h] = some ? p_add(sums[n][r][h], x) : x;
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < G * PARTS; h++)
    p_store(to + r * LD_SCORES + h * LANES, p_add(p_add(sums[0][r][h], sums[1][r][h]), p_add(sums[2][r][h], sums[3][r][h])));
}

/* Of R queries with all of n times 16 turned keys. */
static void score_turned(const Slots *s, int R, int64_t n, const float *keys, const float *queries, int64_t ld_queries, float *to) {
  const int64_t size = turned_size(s), ld = 16 * size;
#define SCORE(N, M, EACH, PAIRS) score_tile(MIN(N, CHAINED), M, EACH, PAIRS, size, keys, ld, queries, ld_queries, to)
#define SCORE_CASE(N, M)                                                                                               \
  case N:                                                                                                              \
    if (!s->is_bf16) SCORE(N, M, 1, 0);                                                                                \
    else if (PAIRED) SCORE(N, M, 1, 1);                                                                                \
    else SCORE(N, M, 2, 0);                                                                                            \
    break;
#define SCORES_OF(M) SCORE_CASE(1, M) SCORE_CASE(2, M) default: SCORE_CASE(3, M)
  for (int64_t G; n; n -= G, keys += G * ld, to += 16 * G) {
    G = n >= ABREAST ? ABREAST : 1;
    if (G == 1) switch (R) { SCORES_OF(1) }
    else switch (R) { SCORES_OF(ABREAST) }
  }
#undef SCORES_OF
#undef SCORE_CASE
#undef SCORE
}

/* Whether values stand in pairs of bf16, and weights so; else both are floats, rounded before. */
INLINE int in_pairs(const Slots *s) { return PAIRED && s->is_bf16; }

INLINE float from_bf16(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

/* How values are read: each for itself, two at a time, or two floats each of a panel that has been made (see make_panel). */
enum { ONE, TWO, MADE };

INLINE part value_of(const int is_bf16, const char *row, int64_t d) {
  return is_bf16 ? p_of_bf16((const bf16 *)row + d) : p_load((const float *)row + d);
}

/* mixed[r] += sum over i in [from, to) of weights[r][i] * values[i] for R queries that share the reads, for the columns of C
 * vectors from `first` on; rows of weights are LD_SCORES floats apart, those of mixed ld. */
INLINE void mix_tile(const int R, const int C, const int is_bf16, const int how, const float *weights, const char *values,
                     int64_t bytes, int64_t from, int64_t to, int64_t first, float *mixed, int64_t ld) {
  part acc[TILED][8];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C * PARTS; c++) acc[r][c] = p_load(mixed + r * ld + first + LANES * c);
  for (int64_t i = from; i < to; i += how == ONE ? 1 : 2) {
    part value[8];
    if (how == TWO)
      UNROLL for (int k = 0; k < 2; k++) fetch_ahead(values + (i + k) * bytes + first * (is_bf16 ? 2 : 4), 16 * C * (is_bf16 ? 2 : 4));
    if (PAIRED && is_bf16 && how != ONE) {
      const bf16 *row = (const bf16 *)(values + i * bytes) + first;
      UNROLL for (int c = 0; c < C * PARTS; c++) value[c] = p_pairs(row + LANES * c, row + bytes / 2 + LANES * c);
      UNROLL for (int r = 0; r < R; r++) {
        const part weight = p_all(weights[r * LD_SCORES + i / 2]);
        UNROLL for (int c = 0; c < C * PARTS; c++) acc[r][c] = p_dot(acc[r][c], weight, value[c]);
      }
      continue;
    }
    UNROLL for (int k = how != ONE; k >= 0; k--) {
#define VALUE(c)                                                                                                       \
  (is_bf16 && how != MADE ? p_of_bf16((const bf16 *)row + first + LANES * (c)) : p_load((const float *)row + first + LANES * (c)))
#define WEIGHT(r)                                                                                                      \
  p_all(PAIRED && is_bf16 ? from_bf16(((const bf16 *)(weights + (r) * LD_SCORES))[i]) : weights[(r) * LD_SCORES + i + k])
      const char *row = values + (i + k) * bytes;
      if (R <= C * PARTS) { /* the fewer of both wait in registers */
        part weight[TILED];
        UNROLL for (int r = 0; r < R; r++) weight[r] = WEIGHT(r);
        UNROLL for (int c = 0; c < C * PARTS; c++) {
          const part v = VALUE(c);
          UNROLL for (int r = 0; r < R; r++) acc[r][c] = p_fma_here(acc[r][c], weight[r], v);
        }
      } else {
        UNROLL for (int c = 0; c < C * PARTS; c++) value[c] = VALUE(c);
        UNROLL for (int r = 0; r < R; r++) {
          const part weight = WEIGHT(r);
          UNROLL for (int c = 0; c < C * PARTS; c++) acc[r][c] = p_fma_here(acc[r][c], weight, value[c]);
        }
      }
#undef VALUE
#undef WEIGHT
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < C * PARTS; c++) p_store(mixed + r * ld + first + LANES * c, acc[r][c]);
}

/* The same of all columns; weights begin at an even position. */
static void mix_whole(int R, int is_bf16, int how, const float *weights, const char *values, int64_t bytes, int64_t from,
                      int64_t to, int64_t dim, float *mixed, int64_t ld) {
#define MIX(N, C, HOW)                                                                                                 \
  (is_bf16 ? mix_tile(N, C, 1, HOW, weights, values, bytes, from, to, first, mixed, ld)                                \
           : mix_tile(N, C, 0, HOW, weights, values, bytes, from, to, first, mixed, ld))
#define MIX_CASE(N, HOW)                                                                                               \
  case N:                                                                                                              \
    if (N * 4 <= HELD && left >= 4) C = 4, MIX(N, 4, HOW);                                                             \
    else if (N * 2 <= HELD && left >= 2) C = 2, MIX(N, 2, HOW);                                                        \
    else C = 1, MIX(N, 1, HOW);                                                                                        \
    break;
#define MIX_CASES(HOW)                                                                                                 \
  switch (R) { MIX_CASE(1, HOW) MIX_CASE(2, HOW) MIX_CASE(3, HOW) MIX_CASE(4, HOW) MIX_CASE(5, HOW) default: MIX_CASE(6, HOW) }
  for (int64_t first = 0, left = dim / 16, C = 1; left && from < to; left -= C, first += 16 * C) {
    if (how == ONE) {
      for (int r = 0; r < R; r++, weights += LD_SCORES, mixed += ld) MIX(1, 1, ONE);
      weights -= R * LD_SCORES, mixed -= R * ld;
    } else if (PAIRED || how == TWO) {
      MIX_CASES(TWO)
    } else {
      MIX_CASES(MADE)
    }
  }
#undef MIX
#undef MIX_CASE
#undef MIX_CASES
}

/* The same of any positions, for one query: what has no partner within them is read for itself. */
static void mix_one(const Slots *s, const float *weights, const char *values, int64_t from, int64_t to, float *mixed) {
  if (from >= to) return;
  const int64_t even = MIN((from + 1) / 2 * 2, to), odd = MAX(even, to / 2 * 2);
  if (from < even) mix_whole(1, s->is_bf16, ONE, weights, values, s->bytes, from, even, s->value_dim, mixed, 0);
  if (even < odd) mix_whole(1, s->is_bf16, TWO, weights, values, s->bytes, even, odd, s->value_dim, mixed, 0);
  if (odd < to) mix_whole(1, s->is_bf16, ONE, weights, values, s->bytes, odd, to, s->value_dim, mixed, 0);
}

/* Weights from an even position `at` on. */
INLINE const float *weights_at(const Slots *s, const float *weights, int64_t at) { return weights + (in_pairs(s) ? at / 2 : at); }

/* Values of n slots as floats, for tiles of many queries; bytes of a slot's. */
static int64_t make_panel(const Slots *s, const char *values, int64_t n, float *to) {
  for (int64_t i = 0; i < n; i++) {
    fetch_ahead(values + i * s->bytes, s->bytes);
    for (int64_t d = 0; d < s->value_dim; d += LANES)
      p_store(to + i * s->value_dim + d, p_of_bf16((const bf16 *)(values + i * s->bytes) + d));
  }
  return s->value_dim * 4;
}

#endif
