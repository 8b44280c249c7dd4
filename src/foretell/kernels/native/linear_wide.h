/* Products of bf16 rows by AVX-512's products of floats, with the sums of tiles.h: 16 lanes of pairs, odd elements first.
 *
 * A core of Intel makes two of these in a cycle, and the instruction for pairs of bf16, where it has one, every second
 * cycle: twice the arithmetic, if nothing else takes the two ports. So activations are widened once, and lie in the order
 * in which they are read; only weights are widened in the tile. */
#ifndef FORETELL_LINEAR_WIDE_H
#define FORETELL_LINEAR_WIDE_H
#include "ahead.h"

enum {
  LINE = 32,             /* weights that are read at a time: a cache line */
  GROUP_ROWS = 12,       /* activation rows of a tile at most */
  SHARING = 48,          /* weight rows that share a pass over the activations; every R divides it and its half */
  WIDENED = 262144,      /* floats of activations that are kept widened: they should stay in L2 ... */
  NEAR = 8192,           /* ... and so many of them in L1, while weights pass by */
};
static _Thread_local float widened[WIDENED] __attribute__((aligned(64)));

/* Activations as tiles read them, [n / LINE, odd and even elements, rows, 16]; zeros behind the last. */
static void widen_rows(const bf16 *x, int64_t ldx, int64_t rows, int64_t n, float *to) {
  for (int64_t k = 0; k < n; k += LINE, to += LINE * rows)
    for (int64_t i = 0; i < rows; i++) {
      const bf16x32 v = v_load_bf16(x + i * ldx + k, n - k);
      _mm512_store_ps(to + 16 * i, odd_floats(v)), _mm512_store_ps(to + 16 * (rows + i), even_floats(v));
    }
}

/* acc + a * b, and 16 weights of a line. In assembly: gcc would move accumulators about, and some out of registers. */
INLINE vec fma_here(vec acc, vec a, vec b) {
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
INLINE vec half_line(const bf16 *p, int even, bf16x32 mask) {
  vec b;
  if (even) __asm__("vpslld $16, %1, %0" : "=v"(b) : "m"(*(const bf16x32 *)p));
  else __asm__("vpandd %1, %2, %0" : "=v"(b) : "m"(*(const bf16x32 *)p), "v"(mask));
  return b;
}

/* What a tile prefetches: `row` bytes lie between the lines of its rows, `step` between those of two steps, `tile` between
 * those of two tiles. */
typedef struct {
  const char *at;
  int64_t row, step, tile;
} Ahead;

/* R weight rows by M activation rows, over `lines` whole lines and `tail` values behind them: sums [M, R] to `sums`, or to
 * parked [R, M], from which it goes on where it is not the first chunk. R * M accumulators, R weights, an activation and a
 * mask fill 32 registers. */
INLINE void tile_wide(const int M, const int R, const float *x, const bf16 *w, int64_t ldw, int64_t lines, int64_t tail,
                      vec *parked, int first, int last, Ahead ahead, vec *sums) {
  vec acc[8][GROUP_ROWS];
  bf16x32 mask = _mm512_set1_epi32(-65536);
  __asm__("" : "+v"(mask)); /* stays in a register */
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++)
      acc[r][m] = first ? v_zero() : parked[r * M + m];
  for (int64_t i = 0; i < lines; i++, x += LINE * M, w += LINE, ahead.at += ahead.step)
    UNROLL for (int even = 0; even < 2; even++) {
      vec b[8];
      UNROLL for (int r = 0; r < R; r++) {
        if (!even) prefetch_weights(M, ahead.at + r * ahead.row);
        b[r] = half_line(w + r * ldw, even, mask);
      }
      UNROLL for (int m = 0; m < M; m++) {
        vec a = _mm512_load_ps(x + (even * M + m) * 16);
        __asm__("" : "+v"(a)); /* one load for all weight rows */
        UNROLL for (int r = 0; r < R; r++) acc[r][m] = fma_here(acc[r][m], a, b[r]);
      }
    }
  if (tail) UNROLL for (int even = 0; even < 2; even++) UNROLL for (int r = 0; r < R; r++) {
      const bf16x32 raw = v_load_bf16(w + r * ldw, tail);
      const vec b = even ? even_floats(raw) : odd_floats(raw);
      UNROLL for (int m = 0; m < M; m++) acc[r][m] = v_fma(_mm512_load_ps(x + (even * M + m) * 16), b, acc[r][m]);
    }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++)
      if (last) sums[m * R + r] = acc[r][m];
      else parked[r * M + m] = acc[r][m];
}

/* One function for each number of rows M: `count` weight rows, a multiple of R, or one at a time. */
#define WIDE_ARGS                                                                                                      \
  int64_t count, const float *x, const bf16 *w, int64_t ldw, int64_t lines, int64_t tail, vec *parked, int first,      \
      int last, const float *bias, float *out, int64_t ldo, int add, Ahead ahead
#define DEFINE_WIDE(T, M, R)                                                                                           \
  static void wide_##M##_##R(WIDE_ARGS) {                                                                              \
    for (; count > 0; count -= R) {                                                                                    \
      vec sums[32];                                                                                                    \
      tile_wide(M, R, x, w, ldw, lines, tail, parked, first, last, ahead, sums);                                       \
      if (last) {                                                                                                      \
        _Pragma("GCC unroll 32") for (int i = (M) * (R); i < 32; i++) sums[i] = sums[0];                               \
        STORE(M, R, 0, R * M > 8 ? sums16(sums) : sums8(sums));                                                        \
        if (R * M > 16) STORE(M, R, 16, R * M > 24 ? sums16(sums + 16) : sums8(sums + 16));                            \
      }                                                                                                                \
      w += R * ldw, parked += R * M, out += R, ahead.at += ahead.tile;                                                 \
      if (bias) bias += R;                                                                                             \
    }                                                                                                                  \
  }
#define FOR_WIDE(DO, T) DO(T, 1, 8) DO(T, 2, 8) DO(T, 3, 6) DO(T, 4, 6) DO(T, 5, 4) DO(T, 6, 4) DO(T, 7, 3) DO(T, 8, 3) \
  DO(T, 9, 2) DO(T, 10, 2) DO(T, 11, 2) DO(T, 12, 2)
#define FOR_SINGLE(DO, T) DO(T, 1, 1) DO(T, 2, 1) DO(T, 3, 1) DO(T, 4, 1) DO(T, 5, 1) DO(T, 6, 1) DO(T, 7, 1) DO(T, 8, 1) \
  DO(T, 9, 1) DO(T, 10, 1) DO(T, 11, 1) DO(T, 12, 1)
FOR_WIDE(DEFINE_WIDE, ) FOR_SINGLE(DEFINE_WIDE, )
typedef void WideFunction(WIDE_ARGS);
#define WIDE_ENTRY(T, M, R) [M] = wide_##M##_##R,
#define WIDE_ROWS(T, M, R) [M] = R,
static WideFunction *const wide_tiles[GROUP_ROWS + 1] = {FOR_WIDE(WIDE_ENTRY, )};
static WideFunction *const wide_singles[GROUP_ROWS + 1] = {FOR_SINGLE(WIDE_ENTRY, )};
static const int WIDE_TILE_ROWS[GROUP_ROWS + 1] = {FOR_WIDE(WIDE_ROWS, )};

/* Rows [a, b) of w times `rows` of x, at most as many as can be kept widened, or one group. */
static void linear_some(const bf16 *w, int64_t K, int64_t a, int64_t b, const bf16 *x, int64_t ldx, int64_t rows,
                        const float *bias, float *out, int64_t ldo, int add, const void *next) {
  vec parked[SHARING * GROUP_ROWS];
  const char *end = (const char *)(w + b * K);
  const int64_t padded_K = (K + LINE - 1) / LINE * LINE, half = (b - a) * K;
  const int64_t groups = (rows + GROUP_ROWS - 1) / GROUP_ROWS, kept = rows * padded_K <= WIDENED;
  const int64_t block = groups > 1 && SHARING * K * 2 > BLOCK_BYTES ? SHARING / 2 : SHARING;
  for (int64_t r0 = a; r0 < b; r0 += block) {
    const int64_t r1 = MIN(r0 + block, b);
    for (int64_t g = 0, m0 = 0, size; g < groups; g++, m0 += size) {
      size = (rows - m0 + groups - g - 1) / (groups - g);
      const int64_t chunks = (K * size + NEAR - 1) / NEAR, chunk = MAX(LINE, (K / LINE + chunks - 1) / chunks * LINE);
      for (int64_t k = 0, n; k < K; k += n) {
        n = K - k < chunk + LINE ? K - k : chunk;
        float *in = kept ? widened + m0 * padded_K + k * size : widened;
        if (!kept || r0 == a) widen_rows(x + m0 * ldx + k, ldx, size, n, in);
        for (int64_t r = r0, R, count; r < r1; r += count) { /* whole tiles, then single rows */
          R = r == r0 && r + WIDE_TILE_ROWS[size] <= r1 ? WIDE_TILE_ROWS[size] : 1;
          count = (r1 - r) / R * R;
          const bf16 *from = w + r * K + k;
          Ahead ahead = {(const char *)from + MIN(n == K ? PREFETCH : PREFETCH_FAR, half), K * 2, 2 * LINE, R * K * 2};
          if (ahead.at >= end) ahead.at = (const char *)next + (ahead.at - end);
          if (n == K) ahead.row = 2 * LINE, ahead.step *= R; /* a tile is one piece of memory: in its order */
          if (groups > 1) { /* each group fetches its share of the next block, so that memory does not rest meanwhile */
            const char *coming = r1 < b ? (const char *)(w + r1 * K) : (const char *)next;
            ahead.at = coming + (g * (r1 - r0) + r - r0) * K * 2 / groups + k * 2 * R / groups;
            ahead.row = 2 * LINE, ahead.step = 2 * LINE * R / groups, ahead.tile = R * K * 2 / groups;
          }
          (R == 1 ? wide_singles : wide_tiles)[size](count, in, from, K, n / LINE, n % LINE, parked + (r - r0) * size, k == 0,
                                                     k + n == K, bias ? bias + r : 0, out + m0 * ldo + r, ldo, add, ahead);
        }
      }
    }
  }
}

/* See linear_bf16 (DEFINE_LINEAR). Where rows are more than can be kept widened, weights are read again for the others. */
static void linear_bf16(const bf16 *w, int64_t K, int64_t a, int64_t b, const bf16 *x, int64_t ldx, int64_t rows,
                        const float *bias, float *out, int64_t ldo, int add, const void *next) {
  const int64_t most = MAX(GROUP_ROWS, WIDENED / (K + LINE) / GROUP_ROWS * GROUP_ROWS);
  for (int64_t m = 0, size; m < rows; m += size) {
    size = MIN(most, rows - m);
    linear_some(w, K, a, b, x + m * ldx, ldx, size, bias, out + m * ldo, ldo, add, m + size < rows ? w + a * K : next);
  }
}

#endif
