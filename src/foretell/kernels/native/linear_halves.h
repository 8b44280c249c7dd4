/* Products of bf16 rows in halves of vectors (AVX2, NEON), with the sums of tiles.h: 16 lanes of pairs, odd elements first, then one tree.
 *
 * Bound by arithmetic from about four rows on, so what counts is what a fused product costs beside itself: activations are
 * widened once and lie in the order in which they are read, accumulators hold whole lines of weights, and no masked store is
 * made (dozens of cycles on some CPUs). */
#ifndef FORETELL_LINEAR_HALVES_H
#define FORETELL_LINEAR_HALVES_H
#include "ahead.h"

enum {
  LINE = 32,                        /* weights that are read at a time: a cache line */
  GROUP_ROWS = 6,                   /* activation rows of a group at most */
  SHARING = 48,                     /* weight rows that share a pass over the activations */
  TOGETHER = 8,                     /* weight rows whose sums are written together */
  CHUNK_INPUTS = 24576 / sizeof(float), /* activations that stay in L1 meanwhile, beside the weights ... */
  WHOLE_INPUTS = 32768 / sizeof(float), /* ... and those of one group that are not cut into chunks for it */
};

/* Activations as tiles read them, [n / LINE, quarter, rows, 8] floats: of each line the odd elements of its first half,
 * the even ones, and the same of its second half; zeros behind the last. */
static void widen_rows(const bf16 *x, int64_t ldx, int64_t rows, int64_t n, float *to) {
  for (int64_t k = 0; k < n; k += LINE)
    for (int64_t i = 0; i < rows; i++)
      for (int64_t h = 0; h < 2; h++) {
        const int64_t left = MIN(MAX(n - k - 16 * h, 0), 16);
        const bf16x16 v = h_load_some((Lanes)((1u << left) - 1), x + i * ldx + k + 16 * h);
        float *at = to + ((k / LINE * 4 + 2 * h) * rows + i) * 8;
        half_write_aligned(at, half_odd(v)), half_write_aligned(at + rows * 8, half_even(v));
      }
}

/* What a tile prefetches: `row` bytes lie between the lines of its rows, `step` between those of two steps. */
typedef struct {
  const char *at;
  int64_t row, step;
} Ahead;

/* R weight rows by M activation rows, over `lines` whole lines and `tail` values behind them: to sums [M, TOGETHER], lanes
 * i and i + 8 added; or to parked [R, M, 2], from which it goes on where it is not the first chunk. 2 * R * M
 * accumulators, a mask, weights and an activation fill 16 registers. */
INLINE void tile_halves(const int M, const int R, const float *x, const bf16 *w, int64_t ldw, int64_t lines, int64_t tail,
                      floats8 *parked, int first, int last, Ahead ahead, floats8 *sums) {
  floats8 acc[3][GROUP_ROWS][2];
  odd_mask mask = mask_of_odd();
  HERE_MASK(mask); /* stays in a register: loads are as scarce as products */
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) UNROLL for (int h = 0; h < 2; h++)
      acc[r][m][h] = first ? half_zero() : parked[(r * M + m) * 2 + h];
  for (int64_t i = 0; i < lines; i++, x += LINE * M, w += LINE, ahead.at += ahead.step)
    UNROLL for (int h = 0; h < 2; h++) {
      ints8 raw[3];
      UNROLL for (int r = 0; r < R; r++) {
        if (h == 0) prefetch_weights(M, ahead.at + r * ahead.row);
        raw[r] = int_load(w + r * ldw + 16 * h);
        HERE(raw[r]); /* one load for both phases */
      }
      UNROLL for (int even = 0; even < 2; even++) {
        floats8 weight[3];
        UNROLL for (int r = 0; r < R; r++)
            weight[r] = even ? half_even(raw[r]) : half_masked(raw[r], mask);
        UNROLL for (int m = 0; m < M; m++) {
          const float *at = x + ((2 * h + even) * M + m) * 8;
          if (R == 1) {
            acc[0][m][h] = fma_from(acc[0][m][h], weight[0], at);
            continue;
          }
          floats8 value = half_read_aligned(at);
          HERE(value); /* one load for all weight rows */
          UNROLL for (int r = 0; r < R; r++) acc[r][m][h] = fma_here(acc[r][m][h], weight[r], value);
        }
      }
    }
  if (tail) UNROLL for (int h = 0; h < 2; h++) UNROLL for (int r = 0; r < R; r++) {
      const int64_t left = MIN(MAX(tail - 16 * h, 0), 16);
      const ints8 raw = h_load_some((Lanes)((1u << left) - 1), w + r * ldw + 16 * h);
      UNROLL for (int m = 0; m < M; m++) {
        acc[r][m][h] = fma_from(acc[r][m][h], half_odd(raw), x + (2 * h * M + m) * 8);
        acc[r][m][h] = fma_from(acc[r][m][h], half_even(raw), x + ((2 * h + 1) * M + m) * 8);
      }
    }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) {
    if (last) sums[m * TOGETHER + r] = half_add(acc[r][m][0], acc[r][m][1]);
    else UNROLL for (int h = 0; h < 2; h++) parked[(r * M + m) * 2 + h] = acc[r][m][h];
  }
}

/* `count` sums, at most TOGETHER, plus bias (or NULL), to a row of the output, or added to it. */
INLINE void put_sums(const floats8 *sums, int64_t count, const float *bias, float *out, int add) {
  floats8 y = tree8(sums);
  if (count == TOGETHER) {
    if (bias) y = half_add(y, half_read(bias));
    if (add) y = half_add(y, half_read(out));
    half_write(out, y);
    return;
  }
  float held[TOGETHER];
  half_write(held, y);
  for (int64_t i = 0; i < count; i++) {
    const float z = bias ? held[i] + bias[i] : held[i];
    out[i] = add ? z + out[i] : z;
  }
}

/* One function for each number of rows M: `count` weight rows, R at a time, then one at a time. `ahead` is what its first
 * tile prefetches; where tiles are whole rows, which are one piece of memory, they do it in the order of memory. */
#define ROWS_ARGS                                                                                                      \
  int64_t count, const float *x, const bf16 *w, int64_t ldw, int64_t lines, int64_t tail, floats8 *parked, int first,   \
      int last, const float *bias, float *out, int64_t ldo, int add, Ahead ahead
#define DEFINE_ROWS(M, R)                                                                                              \
  static void rows_halves_##M(ROWS_ARGS) {                                                                               \
    floats8 sums[M * TOGETHER];                                                                                         \
    const int whole = first && last;                                                                                   \
    for (int i = 0; i < M * TOGETHER; i++) sums[i] = half_zero();                                              \
    for (int64_t r = 0, size; r < count; r += size, out += size, bias = bias ? bias + size : 0) {                      \
      size = MIN(TOGETHER, count - r);                                                                                 \
      for (int64_t i = 0, now; i < size; i += now, w += now * ldw, parked += now * M * 2) {                            \
        now = size - i < R ? 1 : R;                                                                                    \
        if (whole) ahead.row = 2 * LINE, ahead.step = now * 2 * LINE;                                                  \
        if (now == R) tile_halves(M, R, x, w, ldw, lines, tail, parked, first, last, ahead, sums + i);                   \
        else tile_halves(M, 1, x, w, ldw, lines, tail, parked, first, last, ahead, sums + i);                            \
        ahead.at += now * ldw * 2;                                                                                     \
      }                                                                                                                \
      for (int64_t m = 0; last && m < M; m++) put_sums(sums + m * TOGETHER, size, bias, out + m * ldo, add);           \
    }                                                                                                                  \
  }
DEFINE_ROWS(1, 2) DEFINE_ROWS(2, 3) DEFINE_ROWS(3, 2) DEFINE_ROWS(4, 1) DEFINE_ROWS(5, 1) DEFINE_ROWS(6, 1)
typedef void RowsFunction(ROWS_ARGS);
static RowsFunction *const rows_halves[GROUP_ROWS + 1] = {0,           rows_halves_1, rows_halves_2, rows_halves_3,
                                                        rows_halves_4, rows_halves_5, rows_halves_6};

/* See linear_bf16 (DEFINE_LINEAR). */
static void linear_bf16(const bf16 *w, int64_t K, int64_t a, int64_t b, const bf16 *x, int64_t ldx, int64_t rows,
                        const float *bias, float *out, int64_t ldo, int add, const void *next) {
  float inputs[WHOLE_INPUTS + GROUP_ROWS * LINE] __attribute__((aligned(32)));
  floats8 parked[SHARING * GROUP_ROWS * 2];
  const char *end = (const char *)(w + b * K);
  const int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS, half = (b - a) * K;
  const int64_t block = groups > 1 && SHARING * K * 2 > BLOCK_BYTES ? SHARING / 2 : SHARING;
  for (int64_t r0 = a; r0 < b; r0 += block) {
    for (int64_t g = 0, m0 = 0, size; g < groups; g++, m0 += size) {
      size = (rows - m0 + groups - g - 1) / (groups - g);
      const int64_t limit = groups == 1 && K * size <= WHOLE_INPUTS ? WHOLE_INPUTS : CHUNK_INPUTS;
      const int64_t chunks = (K * size + limit - 1) / limit, chunk = MAX(LINE, (K / LINE + chunks - 1) / chunks * LINE);
      for (int64_t k = 0, n; k < K; k += n) {
        n = K - k < chunk + LINE ? K - k : chunk;
        if (r0 == a || groups > 1 || n < K) widen_rows(x + m0 * ldx + k, ldx, size, n, inputs);
        const bf16 *from = w + r0 * K + k;
        Ahead ahead = {(const char *)from + MIN(n == K ? PREFETCH : PREFETCH_FAR, half), K * 2, 2 * LINE};
        if (ahead.at >= end) ahead.at = (const char *)next + (ahead.at - end);
        rows_halves[size](MIN(block, b - r0), inputs, from, K, n / LINE, n % LINE, parked, k == 0, k + n == K,
                        bias ? bias + r0 : 0, out + m0 * ldo + r0, ldo, add, ahead);
      }
    }
  }
}

#endif
