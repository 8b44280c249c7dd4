/* Products of activations with a matrix: tiles of R weight rows by M activation rows. */
#ifndef FORETOKEN_LINEAR_H
#define FORETOKEN_LINEAR_H
#include "quant.h"

#define LOAD_F32(p) v_load(p)
#define TAIL_F32(mask, p) v_load_some((Lanes)(mask), p)
#define FMA_F32(acc, a, b) v_fma(a, b, acc)
/* One load, where gcc would fold one into each of the R products (which float takes a fifth longer by). */
#define KEEP_F32(a) __asm__("" : "+v"(a))
#define KEEP_BF16(a)
#define LOAD_BF16(p) (__m512bh) _mm512_loadu_si512(p)
#define TAIL_BF16(mask, p) (__m512bh) _mm512_maskz_loadu_epi16((__mmask32)(mask), p)
#define FMA_BF16(acc, a, b) _mm512_dpbf16_ps(acc, a, b)

/* Sum i of a tile belongs to row i / R, column i % R of the output; y holds those from `at` on: one masked store a row. */
#define STORE(M, R, at, sums)                                                                                          \
  do {                                                                                                                 \
    const vec y = sums;                                                                                             \
    UNROLL for (int m = 0; m < (M); m++) {                                                                             \
      const int from = MAX(m * (R) - (at), 0), to = MIN((m + 1) * (R) - (at), 16);                                     \
      if (from >= to) continue;                                                                                        \
      const Lanes lanes = (Lanes)((1u << to) - (1u << from));                                                  \
      float *row = out + m * ldo - (m * (R) - (at));                                                                   \
      vec z = bias ? v_add(y, v_load_some(lanes, bias - (m * (R) - (at)))) : y;                   \
      if (add) z = v_add(z, v_load_some(lanes, row));                                                \
      v_store_some(row, lanes, z);                                                                            \
    }                                                                                                                  \
  } while (0)

/* out[m, r] (+)= bias[r] + sum over k of x[m, k] * w[r, k], for one chunk of n values of k (a multiple of STEP, followed by
 * `tail` more in the last chunk); parked holds the accumulators between chunks. */
#define DEFINE_TILE(NAME, T, VECTOR, STEP, LOAD, TAIL, FMA, KEEP)                                                      \
  INLINE void NAME(const int M, const int R, const T *x, int64_t ldx, const T *w, int64_t ldw, int64_t n, int64_t tail,\
                   vec *parked, int first, int last, const float *bias, float *out, int64_t ldo, int add,           \
                   const char *ahead, int64_t ld_ahead) {                                                              \
    vec acc[8][GROUP];                                                                                              \
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++)                                              \
        acc[r][m] = first ? v_zero() : parked[r * M + m];                                                   \
    for (int64_t k = 0; k < n; k += STEP) {                                                                            \
      VECTOR b[8];                                                                                                     \
      UNROLL for (int r = 0; r < R; r++) {                                                                             \
        b[r] = LOAD(w + r * ldw + k);                                                                                  \
        prefetch(ahead + (r * ld_ahead + k) * sizeof(T));                                                              \
      }                                                                                                                \
      UNROLL for (int m = 0; m < M; m++) {                                                                             \
        VECTOR a = LOAD(x + m * ldx + k);                                                                              \
        KEEP(a);                                                                                                       \
        UNROLL for (int r = 0; r < R; r++) acc[r][m] = FMA(acc[r][m], a, b[r]);                                        \
      }                                                                                                                \
    }                                                                                                                  \
    if (!last) {                                                                                                       \
      UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) parked[r * M + m] = acc[r][m];             \
      return;                                                                                                          \
    }                                                                                                                  \
    if (tail) {                                                                                                        \
      const uint32_t mask = (1u << tail) - 1;                                                                          \
      UNROLL for (int r = 0; r < R; r++) {                                                                             \
        VECTOR b = TAIL(mask, w + r * ldw + n);                                                                        \
        UNROLL for (int m = 0; m < M; m++) acc[r][m] = FMA(acc[r][m], TAIL(mask, x + m * ldx + n), b);                 \
      }                                                                                                                \
    }                                                                                                                  \
    vec flat[32];                                                                                                   \
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int r = 0; r < R; r++) flat[m * R + r] = acc[r][m];                 \
    _Pragma("GCC unroll 32") for (int i = R * M; i < 32; i++) flat[i] = flat[0];                                       \
    STORE(M, R, 0, R * M > 8 ? sums16(flat) : sums8(flat));                                                            \
    if (R * M > 16) STORE(M, R, 16, R * M > 24 ? sums16(flat + 16) : sums8(flat + 16));                                \
  }
DEFINE_TILE(tile_f32, float, vec, 16, LOAD_F32, TAIL_F32, FMA_F32, KEEP_F32)

/* One function for each number of rows M, with the R that keeps R * M near 24; and one with R = 1 for what is left. Each
 * runs over `count` weight rows, a multiple of its R; stride_ahead bytes lie between what two tiles prefetch. */
#define TILE_ARGS(T)                                                                                                   \
  int64_t count, const T *x, int64_t ldx, const T *w, int64_t ldw, int64_t n, int64_t tail, vec *parked, int first, \
      int last, const float *bias, float *out, int64_t ldo, int add, const char *ahead, int64_t ld_ahead,              \
      int64_t stride_ahead
#define DEFINE_ONE(NAME, T, M, R)                                                                                      \
  static void NAME##_##M##_##R(TILE_ARGS(T)) {                                                                         \
    for (; count > 0; count -= R) {                                                                                    \
      NAME(M, R, x, ldx, w, ldw, n, tail, parked, first, last, bias, out, ldo, add, ahead, ld_ahead);                  \
      w += R * ldw, parked += R * M, out += R, ahead += stride_ahead;                                                  \
      if (bias) bias += R;                                                                                             \
    }                                                                                                                  \
  }
static const int TILE_ROWS[GROUP + 1] = {0, 8, 8, 6, 6, 4, 4, 3, 3};

#define DEFINE_LINEAR(NAME, TILE, T, STEP)                                                                             \
  DEFINE_ONE(TILE, T, 1, 8) DEFINE_ONE(TILE, T, 2, 8) DEFINE_ONE(TILE, T, 3, 6) DEFINE_ONE(TILE, T, 4, 6)              \
  DEFINE_ONE(TILE, T, 5, 4) DEFINE_ONE(TILE, T, 6, 4) DEFINE_ONE(TILE, T, 7, 3) DEFINE_ONE(TILE, T, 8, 3)              \
  DEFINE_ONE(TILE, T, 1, 1) DEFINE_ONE(TILE, T, 2, 1) DEFINE_ONE(TILE, T, 3, 1) DEFINE_ONE(TILE, T, 4, 1)              \
  DEFINE_ONE(TILE, T, 5, 1) DEFINE_ONE(TILE, T, 6, 1) DEFINE_ONE(TILE, T, 7, 1) DEFINE_ONE(TILE, T, 8, 1)              \
  typedef void TILE##_function(TILE_ARGS(T));                                                                          \
  static TILE##_function *const TILE##_wide[GROUP + 1] = {0, TILE##_1_8, TILE##_2_8, TILE##_3_6, TILE##_4_6,           \
                                                          TILE##_5_4, TILE##_6_4, TILE##_7_3, TILE##_8_3};             \
  static TILE##_function *const TILE##_single[GROUP + 1] = {0, TILE##_1_1, TILE##_2_1, TILE##_3_1, TILE##_4_1,         \
                                                            TILE##_5_1, TILE##_6_1, TILE##_7_1, TILE##_8_1};           \
  /* Rows [a, b) of w [.., K] times all `rows` of x; `next` is what this thread will read after row b. */              \
  static void NAME(const T *w, int64_t K, int64_t a, int64_t b, const T *x, int64_t ldx, int64_t rows,                 \
                   const float *bias, float *out, int64_t ldo, int add, const void *next) {                            \
    vec parked[BLOCK * GROUP];                                                                                      \
    const int64_t whole = K / STEP * STEP;                                                                             \
    const char *end = (const char *)(w + b * K);                                                                       \
    const int64_t distance = MIN(PREFETCH, (b - a) * K * (int64_t)sizeof(T) / 2);                                      \
    const int64_t block = rows > GROUP && BLOCK * K * (int64_t)sizeof(T) > BLOCK_BYTES ? BLOCK / 2 : BLOCK;            \
    for (int64_t r0 = a; r0 < b; r0 += block) {                                                                        \
      const int64_t r1 = MIN(r0 + block, b);                                                                           \
      for (int64_t m0 = 0, size; m0 < rows; m0 += size) {                                                              \
        const int64_t groups = (rows - m0 + GROUP - 1) / GROUP;                                                        \
        size = (rows - m0 + groups - 1) / groups;                                                                      \
        const int64_t limit = rows > GROUP ? REUSE_BYTES : CHUNK_BYTES;                                                \
        const int64_t chunks = MAX(1, (whole * size * (int64_t)sizeof(T) + limit - 1) / limit);                        \
        const int64_t chunk = MAX(STEP, (whole / STEP + chunks - 1) / chunks * STEP);                                  \
        for (int64_t k = 0;; k += chunk) {                                                                             \
          const int last = k + chunk >= whole;                                                                         \
          const T *coming = last ? x + MIN(m0 + size, rows - 1) * ldx : x + m0 * ldx + k + chunk;                      \
          for (int64_t r = r0, size_r, count; r < r1; r += count) { /* whole tiles, then single rows */                \
            size_r = r == r0 && r + TILE_ROWS[size] <= r1 ? TILE_ROWS[size] : 1;                                       \
            count = (r1 - r) / size_r * size_r;                                                                        \
            const T *from = w + r * K + k;                                                                             \
            const char *ahead = (const char *)from + distance;                                                         \
            int64_t ld_ahead = K, stride_ahead = size_r * K * (int64_t)sizeof(T);                                      \
            if (ahead >= end) ahead = (const char *)next + (ahead - end);                                              \
            /* Weights that were read for the rows before are near: fetch the next rows' activations, one a tile. */   \
            if (m0) ahead = (const char *)coming, ld_ahead = 0, stride_ahead = ldx * (int64_t)sizeof(T);               \
            (size_r == 1 ? TILE##_single : TILE##_wide)[size](                                                         \
                count, x + m0 * ldx + k, ldx, from, K, MIN(chunk, whole - k), K - whole, parked + (r - r0) * size,     \
                k == 0, last, bias ? bias + r : 0, out + m0 * ldo + r, ldo, add, ahead, ld_ahead, stride_ahead);       \
          }                                                                                                            \
          if (last) break;                                                                                             \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }
DEFINE_LINEAR(linear_f32, tile_f32, float, 16)

#ifdef __AVX512BF16__
DEFINE_TILE(tile_bf16, bf16, __m512bh, 32, LOAD_BF16, TAIL_BF16, FMA_BF16, KEEP_BF16)
DEFINE_LINEAR(linear_bf16, tile_bf16, bf16, 32)
#endif

/* Rows [a, b) of w times `rows` activation rows x [rows, ldx], plus bias (or NULL), to out [rows, ldo], or added to it.
 * x has the type that the format asks for (blocks of a quantised one: ldx is not read). `next` is what this thread will read after row b: it is prefetched. */
static void linear(const Matrix *w, int64_t a, int64_t b, const void *x, int64_t ldx, int64_t rows, const float *bias,
                   float *out, int64_t ldo, int add, const void *next) {
#ifdef __AVX512BF16__
  if (w->format == BF16) {
    linear_bf16(w->data, w->columns, a, b, x, ldx, rows, bias, out, ldo, add, next);
    return;
  }
#endif
  if (is_quantised(w)) linear_quant(w, a, b, x, rows, bias, out, ldo, add, next);
  else linear_f32(w->data, w->columns, a, b, x, ldx, rows, bias, out, ldo, add, next);
}

/* Row `row` of w as floats. */
static void read_row(const Matrix *w, int64_t row, float *out) {
  if (is_quantised(w)) {
    read_row_quant(w, row, out);
    return;
  }
  for (int64_t j = 0; j < w->columns; j += 16) {
    const Lanes lanes = first_lanes(w->columns - j);
    v_store_some(out + j, lanes, load_as(w->format == BF16, row_of(w, row), j, lanes));
  }
}

#endif
