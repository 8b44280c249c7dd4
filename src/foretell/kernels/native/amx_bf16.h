/* Products with bf16 matrices by AMX, at every number of rows.
 *
 * The weights are the left side as they lie, 16 rows and 32 of k at a time, so nothing is packed and one row of activations
 * costs one read of the weights. The activations are the right side: of 16 rows, pairs of k stand together; each thread
 * packs them for itself.
 *
 * Bits. An output is one element of one accumulator: for each 32 of k (zeros behind the last) the instruction adds the
 * products of even k in order, and those of odd k, then both sums, then that onto the accumulator, each rounded once. So
 * it depends neither on the number of rows nor on thread, batch or place. It is not the order of tiles.h: other variants
 * of the kernels give other bits of a bf16 pass, of the same precision.
 */
#ifndef FORETELL_AMX_BF16_H
#define FORETELL_AMX_BF16_H
#include "ahead.h"

#if AMX

enum {
  STEP_K = 32,
  STEP_BYTES = 1024,           /* of 16 rows' activations */
  X_AHEAD = 3 * STEP_BYTES,    /* bytes of activations asked for ahead where they are many */
  PACKED_BYTES = 2097152,      /* room for them, of which ... */
  PACKED_NEAR = 1048576,       /* ... so much is used where that is enough for 16 rows: it should stay in L2 */
};
static _Thread_local char packed[PACKED_BYTES] __attribute__((aligned(64)));

/* Lane i of vector j becomes lane j of vector i. */
INLINE void transpose16(__m512i *v) {
  __m512i a[16];
  UNROLL for (int i = 0; i < 16; i += 2)
      a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++)
      v[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]),
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
  UNROLL for (int i = 0; i < 4; i++) {
    a[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88), a[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88), a[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
  }
  UNROLL for (int i = 0; i < 8; i++) {
    v[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88), v[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
  }
}

/* Lane i of part j becomes part i of vector j, in parts of 128 bits. */
INLINE void transpose4(__m512i *v) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
  const __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x88), d = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
  v[0] = _mm512_shuffle_i32x4(a, c, 0x88), v[1] = _mm512_shuffle_i32x4(b, d, 0x88);
  v[2] = _mm512_shuffle_i32x4(a, c, 0xdd), v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

/* Four pairs of k behind each other, of each four rows. */
INLINE void four_rows(const bf16 *x, int64_t ldx, int64_t rows, int64_t left, __m512i *v) {
  __m512i a[4];
  UNROLL for (int m = 0; m < 4; m++) v[m] = m < rows ? v_load_bf16(x + m * ldx, left) : _mm512_setzero_si512();
  UNROLL for (int m = 0; m < 4; m += 2)
      a[m] = _mm512_unpacklo_epi32(v[m], v[m + 1]), a[m + 1] = _mm512_unpackhi_epi32(v[m], v[m + 1]);
  v[0] = _mm512_unpacklo_epi64(a[0], a[2]), v[1] = _mm512_unpackhi_epi64(a[0], a[2]);
  v[2] = _mm512_unpacklo_epi64(a[1], a[3]), v[3] = _mm512_unpackhi_epi64(a[1], a[3]);
  transpose4(v);
}

/* Rows of x, K of k: for each step 16 pairs of k, of each `columns` rows: 1, 4, 8 or 16, as few as hold them. A narrow tile
 * is less to pack and to read, and what stands for a long row stays in L1. */
static void pack_activations(const bf16 *x, int64_t ldx, int64_t rows, int64_t columns, int64_t K, char *to) {
  for (int64_t k = 0; k < K; k += STEP_K) {
    if (columns == 1) {
      _mm512_store_si512(to + 2 * k, v_load_bf16(x + k, K - k));
      continue;
    }
    __m512i v[16];
    if (columns == 4) {
      four_rows(x + k, ldx, rows, K - k, v);
      UNROLL for (int i = 0; i < 4; i++) _mm512_store_si512(to + 8 * k + 64 * i, v[i]);
      continue;
    }
    if (columns == 8) {
      four_rows(x + k, ldx, rows, K - k, v), four_rows(x + 4 * ldx + k, ldx, rows - 4, K - k, v + 4);
      UNROLL for (int i = 0; i < 16; i++) {
        _mm_store_si128((__m128i *)(to + 16 * k + 32 * i), ((const __m128i *)v)[i]);
        _mm_store_si128((__m128i *)(to + 16 * k + 32 * i + 16), ((const __m128i *)(v + 4))[i]);
      }
      continue;
    }
    UNROLL for (int m = 0; m < 16; m++) v[m] = m < rows ? v_load_bf16(x + m * ldx + k, K - k) : _mm512_setzero_si512();
    transpose16(v);
    UNROLL for (int i = 0; i < 16; i++) _mm512_store_si512(to + k / STEP_K * STEP_BYTES + 64 * i, v[i]);
  }
}

/* Tiles: sums [weight tile][group], weights, activations. */
enum { SUMS_BF16 = 0, WEIGHTS_BF16 = 4, X_BF16 = 6 };

typedef struct {
  const bf16 *w, *tail; /* 16 rows or 32 of K; and of what no step divides, [32, STEP_K], or NULL */
  int64_t K;
  const char *x; /* packed; the second group stands behind the first */
  int64_t x_step, x_row, x_group; /* bytes */
  const char *ahead;              /* weights to ask for, or NULL */
  int far;                        /* activations do not stay in L1 */
} Bf16Work;

#define DOTS_BF16(W, G, from, ld, at)                                                                                  \
  do {                                                                                                                 \
    TILE_LOAD(X_BF16, at, t->x_row);                                                                                   \
    TILE_LOAD(WEIGHTS_BF16, from, ld);                                                                                 \
    TILE_DOT_BF16(SUMS_BF16, WEIGHTS_BF16, X_BF16);                                                                    \
    if (W > 1) {                                                                                                       \
      TILE_LOAD(WEIGHTS_BF16 + 1, (const char *)(from) + 16 * (ld), ld);                                               \
      TILE_DOT_BF16(SUMS_BF16 + 2, WEIGHTS_BF16 + 1, X_BF16);                                                          \
    }                                                                                                                  \
    if (G > 1) {                                                                                                       \
      TILE_LOAD(X_BF16 + 1, (at) + t->x_group, t->x_row);                                                              \
      TILE_DOT_BF16(SUMS_BF16 + 1, WEIGHTS_BF16, X_BF16 + 1);                                                          \
      if (W > 1) TILE_DOT_BF16(SUMS_BF16 + 3, WEIGHTS_BF16 + 1, X_BF16 + 1);                                           \
    }                                                                                                                  \
  } while (0)

/* Sums of W tiles of weights with G groups, to sums [4][16 weights][16 rows], rows sum_row bytes apart. */
INLINE void product_bf16(const int W, const int G, const Bf16Work *t, float (*sums)[256], int64_t sum_row) {
  const int64_t ld = t->K * (int64_t)sizeof(bf16);
  const char *at = t->x, *ahead = t->ahead;
  const bf16 *w = t->w;
  TILE_ZERO(SUMS_BF16);
  if (G > 1) TILE_ZERO(SUMS_BF16 + 1);
  if (W > 1) TILE_ZERO(SUMS_BF16 + 2);
  if (W > 1 && G > 1) TILE_ZERO(SUMS_BF16 + 3);
  for (int64_t k = STEP_K; k <= t->K; k += STEP_K, w += STEP_K, at += t->x_step) {
    if (ahead) {
      UNROLL for (int i = 0; i < 16; i++) prefetch(ahead + 64 * i);
      if (W > 1) UNROLL for (int i = 16; i < 32; i++) prefetch(ahead + 64 * i);
      ahead += 1024 * W;
    }
    if (G > 1 && t->far) {
      UNROLL for (int i = 0; i < 16; i++) prefetch(at + X_AHEAD + 64 * i), prefetch(at + t->x_group + X_AHEAD + 64 * i);
    }
    DOTS_BF16(W, G, w, ld, at);
  }
  if (t->tail) DOTS_BF16(W, G, t->tail, 2 * STEP_K, at);
  TILE_STORE(SUMS_BF16, sums[0], sum_row);
  if (G > 1) TILE_STORE(SUMS_BF16 + 1, sums[1], sum_row);
  if (W > 1) TILE_STORE(SUMS_BF16 + 2, sums[2], sum_row);
  if (W > 1 && G > 1) TILE_STORE(SUMS_BF16 + 3, sums[3], sum_row);
}
static void product_bf16_1_1(const Bf16Work *t, float (*sums)[256], int64_t row) { product_bf16(1, 1, t, sums, row); }
static void product_bf16_1_2(const Bf16Work *t, float (*sums)[256], int64_t row) { product_bf16(1, 2, t, sums, row); }
static void product_bf16_2_1(const Bf16Work *t, float (*sums)[256], int64_t row) { product_bf16(2, 1, t, sums, row); }
static void product_bf16_2_2(const Bf16Work *t, float (*sums)[256], int64_t row) { product_bf16(2, 2, t, sums, row); }

/* Of 16 times four values behind each other the first ones, the second ones, ... */
INLINE void apart4(__m512i *v) {
  transpose4(v);
  __m512i a[4];
  UNROLL for (int i = 0; i < 2; i++)
      a[i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), a[2 + i] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  UNROLL for (int i = 0; i < 2; i++)
      v[2 * i] = _mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), v[2 * i + 1] = _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]);
}

/* Rows [r, r + count) of the output, of `rows` rows of activations; sums [16][columns]. */
static void store_bf16(const float *sums, int64_t columns, int64_t count, int64_t rows, const float *bias, float *out,
                       int64_t ldo, int add) {
  const Lanes lanes = first_lanes(count);
  __m512i v[16];
  const vec shift = bias ? v_load_some(lanes, bias) : v_zero();
  if (columns == 1) v[0] = _mm512_loadu_si512(sums);
  else if (columns == 4) {
    UNROLL for (int i = 0; i < 4; i++) v[i] = _mm512_loadu_si512(sums + 16 * i);
    apart4(v);
  } else if (columns == 8) {
    UNROLL for (int i = 0; i < 4; i++) {
      const __m512i a = _mm512_loadu_si512(sums + 32 * i), b = _mm512_loadu_si512(sums + 32 * i + 16);
      v[i] = _mm512_shuffle_i32x4(a, b, 0x88), v[4 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
    }
    apart4(v), apart4(v + 4);
  } else {
    UNROLL for (int i = 0; i < 16; i++) v[i] = _mm512_loadu_si512(sums + 16 * i);
    transpose16(v);
  }
  for (int64_t m = 0; m < rows; m++) {
    vec y = _mm512_castsi512_ps(v[m]);
    if (bias) y = v_add(y, shift);
    if (add) y = v_add(y, v_load_some(lanes, out + m * ldo));
    v_store_some(out + m * ldo, lanes, y);
  }
}

/* See linear_bf16 (DEFINE_LINEAR). */
static void linear_bf16_amx(const bf16 *w, int64_t K, int64_t a, int64_t b, const bf16 *x, int64_t ldx, int64_t rows,
                            const float *bias, float *out, int64_t ldo, int add, const void *next) {
  float sums[4][256] __attribute__((aligned(64)));
  bf16 tail[32 * STEP_K] __attribute__((aligned(64)));
  const int64_t steps = (K + STEP_K - 1) / STEP_K, rest = K % STEP_K;
  /* What is too long for 16 rows goes one by one, up to 2^20. */
  const int alone = rows == 1 || steps * STEP_BYTES > PACKED_BYTES;
  const int64_t columns = alone ? 1 : rows <= 4 ? 4 : rows <= 8 ? 8 : 16, size = steps * 64 * columns;
  const int64_t block = alone ? 1 : MAX(1, PACKED_NEAR / size) * 16;
  const char *end = (const char *)(w + b * K);
  const int64_t half = (b - a) * K * (int64_t)sizeof(bf16) / 2;
  for (int64_t m0 = 0; m0 < rows; m0 += block) {
    const int64_t m1 = MIN(m0 + block, rows);
    for (int64_t m = m0; m < m1; m += 16)
      pack_activations(x + m * ldx, ldx, m1 - m, columns, K, packed + (m - m0) / 16 * size);
    int64_t configured = 0;
    for (int64_t r = a, count; r < b; r += count) {
      count = MIN(32, b - r);
      if (count != configured) {
        TileConfig config = tile_config();
        for (int i = 0; i < 2; i++) {
          const int64_t high = MAX(0, MIN(16, count - 16 * i));
          tile_shape(&config, WEIGHTS_BF16 + i, high, 64);
          tile_shape(&config, X_BF16 + i, 16, 4 * columns);
          for (int g = 0; g < 2; g++) tile_shape(&config, SUMS_BF16 + 2 * i + g, high, 4 * columns);
        }
        tiles_configure(&config);
        configured = count;
      }
      Bf16Work work = {w + r * K, rest ? tail : 0, K, packed, 64 * columns, 4 * columns, size, 0, 0};
      work.far = m1 - m0 > 64;
      for (int64_t i = 0; rest && i < count; i++)
        _mm512_store_si512(tail + i * STEP_K, v_load_bf16(w + (r + i + 1) * K - rest, rest));
      if (m0 == 0) {
        work.ahead = (const char *)work.w + MIN(PREFETCH, half);
        if (work.ahead >= end) work.ahead = (const char *)next + (work.ahead - end);
      }
      for (int64_t m = m0; m < m1; m += 32) {
        const int two = m1 - m > 16;
        if (count > 16) (two ? product_bf16_2_2 : product_bf16_2_1)(&work, sums, 4 * columns);
        else (two ? product_bf16_1_2 : product_bf16_1_1)(&work, sums, 4 * columns);
        for (int64_t i = 0; i < 4; i++) {
          const int64_t from = m + i % 2 * 16, row = r + i / 2 * 16;
          if (from < m1 && row < b)
            store_bf16(sums[i], columns, MIN(16, b - row), MIN(16, m1 - from), bias ? bias + row : 0,
                       out + from * ldo + row, ldo, add);
        }
        work.x += 2 * size, work.ahead = 0;
      }
    }
  }
  tiles_release();
}

#endif
#endif
