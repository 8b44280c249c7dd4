/* Products of plain rows: tiles of R weight rows by M activation rows. */
#ifndef FORETELL_TILES_H
#define FORETELL_TILES_H
#include "ahead.h"

/* How a type is read: a part of weights or activations, the last n values of them, and in how many phases (see
 * p_load_bf16). In halves of vectors, bf16 has tiles of its own: linear_halves.h. */
#define PHASES_float 1
#define LOAD_float(p, phase) p_load(p)
#define TAIL_float(p, n, phase) p_tail(p, n)
/* One load, where gcc would fold one into each of the R products (which float takes a fifth longer by). */
#define KEEP_float HERE
#define FMA_float p_fma
#define PHASES_bf16 PHASES
#define LOAD_bf16 p_load_bf16
#define TAIL_bf16 p_tail_bf16
#define KEEP_bf16(a)
#define FMA_bf16 p_fma_bf16
#define STEP_OF(T) (64 / (int64_t)sizeof(T)) /* values of a tile's step: those of a vec, or pairs of bf16 */

/* Sum i of a tile belongs to row i / R, column i % R of the output; y holds those from `at` on: one masked store a row. */
#define STORE(M, R, at, sums)                                                                                          \
  do {                                                                                                                 \
    const vec y = sums;                                                                                                \
    UNROLL for (int m = 0; m < (M); m++) {                                                                             \
      const int from = MAX(m * (R) - (at), 0), to = MIN((m + 1) * (R) - (at), 16);                                     \
      if (from >= to) continue;                                                                                        \
      const Lanes lanes = (Lanes)((1u << to) - (1u << from));                                                          \
      float *row = out + m * ldo - (m * (R) - (at));                                                                   \
      vec z = bias ? v_add(y, v_load_some(lanes, bias - (m * (R) - (at)))) : y;                                        \
      if (add) z = v_add(z, v_load_some(lanes, row));                                                                  \
      v_store_some(row, lanes, z);                                                                                     \
    }                                                                                                                  \
  } while (0)

/* out[m, r] (+)= bias[r] + sum over k of x[m, k] * w[r, k], for one chunk of n values of k (a multiple of a step, followed
 * by `tail` more in the last chunk); parked holds the accumulators between chunks. */
#define DEFINE_TILE(T)                                                                                                 \
  INLINE void tile_##T(const int M, const int R, const T *x, int64_t ldx, const T *w, int64_t ldw, int64_t n,          \
                       int64_t tail, part *parked, int first, int last, const float *bias, float *out, int64_t ldo,    \
                       int add, const char *ahead_first, int64_t ahead_row, int64_t ahead_step) {                      \
    const int64_t step = STEP_OF(T), wide = step / PARTS;                                                              \
    part flat[32][PARTS];                                                                                              \
    UNROLL for (int h = 0; h < PARTS; h++) {                                                                           \
      const T *const xh = x + h * wide;                                                                                \
      const T *const wh = w + h * wide;                                                                                \
      part acc[8][GROUP];                                                                                              \
      UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++)                                            \
          acc[r][m] = first ? p_zero() : parked[(h * R + r) * M + m];                                                  \
      const char *ahead = ahead_first;                                                                                 \
      for (int64_t k = 0; k < n; k += step, ahead += ahead_step)                                                       \
        UNROLL for (int phase = 0; phase < PHASES_##T; phase++) {                                                      \
          part a[GROUP], b[8]; /* the fewer of them stay in registers */                                               \
          UNROLL for (int r = 0; r < R; r++) {                                                                         \
            if (h == 0 && phase == 0) prefetch_weights(M, ahead + r * ahead_row);                                      \
            if (R <= M || PARTS == 1) b[r] = LOAD_##T(wh + r * ldw + k, phase);                                        \
          }                                                                                                            \
          UNROLL for (int m = 0; m < M; m++) {                                                                         \
            a[m] = LOAD_##T(xh + m * ldx + k, phase);                                                                  \
            KEEP_##T(a[m]);                                                                                            \
            if (R <= M || PARTS == 1) UNROLL for (int r = 0; r < R; r++) acc[r][m] = FMA_##T(a[m], b[r], acc[r][m]);   \
          }                                                                                                            \
          if (R > M && PARTS > 1) UNROLL for (int r = 0; r < R; r++) {                                                 \
            b[r] = LOAD_##T(wh + r * ldw + k, phase);                                                                  \
            KEEP_##T(b[r]);                                                                                            \
            UNROLL for (int m = 0; m < M; m++) acc[r][m] = FMA_##T(a[m], b[r], acc[r][m]);                             \
          }                                                                                                            \
        }                                                                                                              \
      if (last && tail > h * wide) {                                                                                   \
        const int64_t some = MIN(tail - h * wide, wide);                                                               \
        UNROLL for (int phase = 0; phase < PHASES_##T; phase++) UNROLL for (int r = 0; r < R; r++) {                   \
          const part b = TAIL_##T(wh + r * ldw + n, some, phase);                                                      \
          UNROLL for (int m = 0; m < M; m++)                                                                           \
              acc[r][m] = FMA_##T(TAIL_##T(xh + m * ldx + n, some, phase), b, acc[r][m]);                              \
        }                                                                                                              \
      }                                                                                                                \
      UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++)                                            \
          if (last) flat[m * R + r][h] = acc[r][m];                                                                    \
          else parked[(h * R + r) * M + m] = acc[r][m];                                                                \
    }                                                                                                                  \
    if (!last) return;                                                                                                 \
    vec sums[32];                                                                                                      \
    _Pragma("GCC unroll 32") for (int i = 0; i < 32; i++) sums[i] = join(flat[i < R * M ? i : 0]);                     \
    STORE(M, R, 0, R * M > 8 ? sums16(sums) : sums8(sums));                                                            \
    if (R * M > 16) STORE(M, R, 16, R * M > 24 ? sums16(sums + 16) : sums8(sums + 16));                                \
  }

/* One function for each number of rows M with the R of FOR_TILES, and one with R = 1 for what is left. Each runs over
 * `count` weight rows, a multiple of its R. In each step of k a tile prefetches R lines, ahead_row bytes apart; ahead_step
 * bytes lie between those of two steps, and ahead_tile between those of two tiles. */
#define TILE_ARGS(T)                                                                                                   \
  int64_t count, const T *x, int64_t ldx, const T *w, int64_t ldw, int64_t n, int64_t tail, part *parked, int first,   \
      int last, const float *bias, float *out, int64_t ldo, int add, const char *ahead, int64_t ahead_row,             \
      int64_t ahead_step, int64_t ahead_tile
#define DEFINE_ONE(T, M, R)                                                                                            \
  static void tile_##T##_##M##_##R(TILE_ARGS(T)) {                                                                     \
    for (; count > 0; count -= R) {                                                                                    \
      tile_##T(M, R, x, ldx, w, ldw, n, tail, parked, first, last, bias, out, ldo, add, ahead, ahead_row, ahead_step); \
      w += R * ldw, parked += R * M * PARTS, out += R, ahead += ahead_tile;                                            \
      if (bias) bias += R;                                                                                             \
    }                                                                                                                  \
  }
#define ENTRY(T, M, R) [M] = tile_##T##_##M##_##R,
#define ROWS(T, M, R) [M] = R,
static const int TILE_ROWS[GROUP + 1] = {FOR_TILES(ROWS, )};

#define DEFINE_LINEAR(T)                                                                                               \
  DEFINE_TILE(T)                                                                                                       \
  FOR_TILES(DEFINE_ONE, T) FOR_SINGLES(DEFINE_ONE, T)                                                                  \
  typedef void tile_function_##T(TILE_ARGS(T));                                                                        \
  static tile_function_##T *const wide_##T[GROUP + 1] = {FOR_TILES(ENTRY, T)};                                         \
  static tile_function_##T *const single_##T[GROUP + 1] = {FOR_SINGLES(ENTRY, T)};                                     \
  /* Rows [a, b) of w [.., K] times all `rows` of x; `next` is what this thread will read after row b. */              \
  static void linear_##T(const T *w, int64_t K, int64_t a, int64_t b, const T *x, int64_t ldx, int64_t rows,           \
                         const float *bias, float *out, int64_t ldo, int add, const void *next) {                      \
    part parked[BLOCK * GROUP * PARTS];                                                                                \
    const int64_t bytes = sizeof(T), step = STEP_OF(T), whole = K / step * step;                                       \
    const char *end = (const char *)(w + b * K);                                                                       \
    const int64_t half = (b - a) * K * bytes / 2;                                                                      \
    const int64_t block = rows > GROUP && BLOCK * K * bytes > BLOCK_BYTES ? BLOCK / 2 : BLOCK;                         \
    for (int64_t r0 = a; r0 < b; r0 += block) {                                                                        \
      const int64_t r1 = MIN(r0 + block, b);                                                                           \
      for (int64_t m0 = 0, size; m0 < rows; m0 += size) {                                                              \
        const int64_t groups = rows > GROUP ? (rows - m0 + EACH - 1) / EACH : 1;                                       \
        size = (rows - m0 + groups - 1) / groups;                                                                      \
        const int64_t limit = PARTS > 1 ? INPUT_BYTES : rows > GROUP ? REUSE_BYTES : CHUNK_BYTES;                      \
        const int64_t each = size * bytes + (PARTS > 1 ? TILE_ROWS[size] * bytes : 0);                                 \
        const int64_t chunks = MAX(1, (whole * each + limit - 1) / limit);                                             \
        const int64_t chunk = MAX(step, (whole / step + chunks - 1) / chunks * step);                                  \
        for (int64_t k = 0;; k += chunk) {                                                                             \
          const int last = k + chunk >= whole;                                                                         \
          const int64_t n = MIN(chunk, whole - k);                                                                     \
          const T *coming = last ? x + MIN(m0 + size, rows - 1) * ldx : x + m0 * ldx + k + chunk;                      \
          for (int64_t r = r0, size_r, count; r < r1; r += count) { /* whole tiles, then single rows */                \
            size_r = r == r0 && r + TILE_ROWS[size] <= r1 ? TILE_ROWS[size] : 1;                                       \
            count = (r1 - r) / size_r * size_r;                                                                        \
            const T *from = w + r * K + k;                                                                             \
            const char *ahead = (const char *)from + MIN(n == whole ? PREFETCH : PREFETCH_FAR, half);                  \
            int64_t ahead_row = K * bytes, ahead_step = step * bytes;                                                  \
            int64_t ahead_tile = m0 ? ldx * bytes : size_r * K * bytes;                                                \
            if (ahead >= end) ahead = (const char *)next + (ahead - end);                                              \
            /* Weights that were read for the rows before are near: fetch the next rows' activations, one a tile. */   \
            if (m0) ahead = (const char *)coming, ahead_row = 0;                                                       \
            else if (n == whole) ahead_row = 64, ahead_step *= size_r; /* a tile is one piece of memory: in its order */\
            /* Few groups of rows: each fetches its share of the next block, so that memory does not rest meanwhile. */  \
            if (rows > GROUP && rows <= SHARED_ROWS && n == whole) {                                                   \
              const int64_t total = (rows + EACH - 1) / EACH;                                                          \
              const char *block_next = r1 < b ? (const char *)(w + r1 * K) : (const char *)next;                       \
              ahead = block_next + (m0 * (r1 - r0) / rows + (r - r0) / total) * K * bytes;                             \
              ahead_row = 64, ahead_step = step * bytes * size_r / total, ahead_tile = size_r * K * bytes / total;     \
            }                                                                                                          \
            (size_r == 1 ? single_##T : wide_##T)[size](count, x + m0 * ldx + k, ldx, from, K, n, K - whole,           \
                                                        parked + (r - r0) * size * PARTS, k == 0, last,                \
                                                        bias ? bias + r : 0, out + m0 * ldo + r, ldo, add, ahead,      \
                                                        ahead_row, ahead_step, ahead_tile);                            \
          }                                                                                                            \
          if (last) break;                                                                                             \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }

#endif
