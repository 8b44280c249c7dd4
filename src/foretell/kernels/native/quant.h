/* Products with quantised matrices: small integer codes stay packed in memory and are multiplied as they are.
 *
 * A matrix is cut into tiles of 16 rows. Lane r of a vector is row r of a tile, so no sum goes across lanes. Along k, codes
 * stand in blocks of 32; 4 codes of each of the 16 rows fill one vector of bytes, and a tile's bytes lie in the order in
 * which they are read: one stream a thread. Activations are rounded to int8 with one scale for each block of 32.
 *
 *  - Bits. The integers of a block (or of half a block, where scales stand by 16) are summed exactly. Then each output has
 *    ONE float accumulator: acc = fma(float(sum), scale of w * scale of x, acc), block after block, and with a minimum
 *    acc = fma(minimum of w, scale of x * sum of x, acc). So an output's bits depend neither on M nor on its row, its
 *    thread, the batch, or the vector width.
 *  - A code is stored without sign: plus 128 (8 bits) or plus 8 (4 bits), but for formats with a minimum. The product of
 *    bytes (VNNI's vpdpbusd) wants one side without sign; what the shift adds is known from the sum of the activations.
 *  - 4 bits. In each block of 32 the low half of a byte belongs to k, the high half to k + 16.
 */
#ifndef FORETELL_QUANT_H
#define FORETELL_QUANT_H
#include "ahead.h"
#include "ints.h"

/* 32 activations: value k is about scale * codes[k]. Block i of row m stands at [i * stride + m]. */
typedef struct {
  int8_t codes[32];
  float scale, sum;   /* sum: scale times the sum of the codes */
  int32_t back128;    /* -128 times the sum of the codes, -8 times it, and -128 times the sum of either half */
  int32_t back8, half128[2], unused[2];
} Block;

enum {
#ifdef __AVX512F__
  MANY = 8, /* activation rows of a tile at most: what registers hold */
#else
  MANY = 4,
#endif
  TILES = 4,         /* tiles that share a pass over the activations, ... */
  X_BYTES = 32768,   /* ... of which so many bytes stay in L1 */
  SIDE_K = 320,      /* bytes of scales in front of the codes of 256 k: d, dmin, then 16 by 16 small integers */
};

/* What formats have in common; i is a format, a constant wherever speed counts. */
INLINE int bits_of(int64_t i) { return i == Q4 || i == Q4M || i == Q4K ? 4 : 8; }
INLINE int has_minimum(int64_t i) { return i == Q8M || i == Q4M || i == Q4K || i == Q8K; }
INLINE int by_256(int64_t i) { return i == Q4K || i == Q8K || i == Q8S; } /* scales in two levels */
INLINE int64_t side_of(int64_t i) { return by_256(i) ? SIDE_K : has_minimum(i) ? 128 : 64; }
INLINE int64_t unit_of(int64_t i) { return by_256(i) ? 256 : 64; } /* k of a unit: scales, then codes */
INLINE int64_t unit_bytes(int64_t i) { return side_of(i) + unit_of(i) * TILE * bits_of(i) / 8; }
INLINE int offset_of(int64_t i) { return has_minimum(i) ? 0 : bits_of(i) == 8 ? 128 : 8; }

/* Scale (and minimum) of block or half block number i of a unit, for 16 rows. */
INLINE vec scale_at(const int FORMAT, const char *side, int64_t i, vec d) {
  if (FORMAT == Q8S) return v_mul(d, v_int8(side + 64 + 16 * i));
  if (by_256(FORMAT)) return v_mul(d, v_uint8(side + 64 + 32 * i));
  return v_half(side + 32 * i);
}
INLINE vec minimum_at(const int FORMAT, const char *side, int64_t i, vec dmin) {
  if (by_256(FORMAT)) return v_mul(dmin, v_uint8(side + 80 + 32 * i));
  return v_half(side + 64 + 32 * i);
}

/* out[m, r] (+)= bias[r] + the product of x[m] with row r of a tile, for `units` units of k from w and x on. parked holds
 * the accumulators between chunks of k. */
INLINE void tile_quant(const int M, const int FORMAT, const char *w, int64_t units, const Block *x, int64_t stride,
                       vec *parked, int first, int last, Lanes lanes, const float *bias, float *out, int64_t ldo, int add,
                       const char *ahead) {
  const int BITS = bits_of(FORMAT), HALVES = FORMAT == Q8S ? 2 : 1, BYTES = 32 * TILE * BITS / 8;
  vec acc[8];
  UNROLL for (int m = 0; m < M; m++) acc[m] = first ? v_zero() : parked[m];
  for (int64_t u = 0; u < units; u++) {
    const char *codes = w + side_of(FORMAT);
    vec d = v_zero(), dmin = v_zero();
    if (by_256(FORMAT)) d = v_half(w);
    if (by_256(FORMAT) && has_minimum(FORMAT)) dmin = v_sub(v_zero(), v_half(w + 32));
    UNROLL for (int i = 0; i < side_of(FORMAT); i += 64) prefetch_weights(M, ahead + i);
    ahead += side_of(FORMAT);
    for (int64_t block = 0; block < unit_of(FORMAT) / 32; block++, x += stride) {
      UNROLL for (int half = 0; half < HALVES; half++) {
        ints sum[8];
        UNROLL for (int m = 0; m < M; m++)
            sum[m] = BITS == 4           ? i_begin4(has_minimum(FORMAT) ? i_zero() : i_all(&x[m].back8))
                     : has_minimum(FORMAT) ? i_zero()
                     : HALVES == 2       ? i_back128(&x[m].half128[half])
                                         : i_back128(&x[m].back128);
        if (BITS == 8) {
          UNROLL for (int i = 0; i < 8 / HALVES; i++) {
            const int at = half * 4 + i;
            const ints c = i_load(codes + 64 * at);
            prefetch_weights(M, ahead + 64 * at);
            UNROLL for (int m = 0; m < M; m++) {
              const ints a = i_all(x[m].codes + 4 * at);
              sum[m] = has_minimum(FORMAT) ? i_dot_small(sum[m], c, a) : i_dot_byte(sum[m], c, a);
            }
          }
        } else {
          UNROLL for (int i = 0; i < 4; i++) {
            const ints c = i_load(codes + 64 * i), low = i_low4(c), high = i_high4(c);
            prefetch_weights(M, ahead + 64 * i);
            UNROLL for (int m = 0; m < M; m++) {
              sum[m] = i_dot4(sum[m], low, i_all(x[m].codes + 4 * i));
              sum[m] = i_dot4(sum[m], high, i_all(x[m].codes + 16 + 4 * i));
            }
          }
          UNROLL for (int m = 0; m < M; m++)
              sum[m] = i_end4(sum[m], has_minimum(FORMAT) ? i_zero() : i_all(&x[m].back8));
        }
        const vec scale = scale_at(FORMAT, w, block * HALVES + half, d);
        UNROLL for (int m = 0; m < M; m++)
            acc[m] = v_fma(i_float(sum[m]), v_mul(scale, v_all(x[m].scale)), acc[m]);
      }
      if (has_minimum(FORMAT)) {
        const vec minimum = minimum_at(FORMAT, w, block, dmin);
        UNROLL for (int m = 0; m < M; m++) acc[m] = v_fma(minimum, v_all(x[m].sum), acc[m]);
      }
      codes += BYTES, ahead += BYTES;
    }
    w = codes;
  }
  if (!last) {
    UNROLL for (int m = 0; m < M; m++) parked[m] = acc[m];
    return;
  }
  UNROLL for (int m = 0; m < M; m++) {
    vec y = bias ? v_add(acc[m], v_load_some(lanes, bias)) : acc[m];
    if (add) y = v_add(y, v_load_some(lanes, out + m * ldo));
    v_store_some(out + m * ldo, lanes, y);
  }
}

#define QUANT_ARGS                                                                                                     \
  const char *w, int64_t units, const Block *x, int64_t stride, vec *parked, int first, int last, Lanes lanes,         \
      const float *bias, float *out, int64_t ldo, int add, const char *ahead
typedef void quant_function(QUANT_ARGS);
#define DEFINE_QUANT(FORMAT, M)                                                                                        \
  static void quant_##FORMAT##_##M(QUANT_ARGS) {                                                                       \
    tile_quant(M, FORMAT, w, units, x, stride, parked, first, last, lanes, bias, out, ldo, add, ahead);                \
  }
#define DEFINE_FORMAT(F)                                                                                               \
  DEFINE_QUANT(F, 1) DEFINE_QUANT(F, 2) DEFINE_QUANT(F, 3) DEFINE_QUANT(F, 4)                                          \
  DEFINE_QUANT(F, 5) DEFINE_QUANT(F, 6) DEFINE_QUANT(F, 7) DEFINE_QUANT(F, 8)
#define QUANT_TABLE(F)                                                                                                 \
  [F] = {0, quant_##F##_1, quant_##F##_2, quant_##F##_3, quant_##F##_4, quant_##F##_5, quant_##F##_6, quant_##F##_7,   \
         quant_##F##_8}
DEFINE_FORMAT(Q8) DEFINE_FORMAT(Q8M) DEFINE_FORMAT(Q4) DEFINE_FORMAT(Q4M)
DEFINE_FORMAT(Q4K) DEFINE_FORMAT(Q8K) DEFINE_FORMAT(Q8S)
static quant_function *const QUANT_TILES[NUM_FORMATS][9] = {
    QUANT_TABLE(Q8), QUANT_TABLE(Q8M), QUANT_TABLE(Q4), QUANT_TABLE(Q4M), QUANT_TABLE(Q4K), QUANT_TABLE(Q8K), QUANT_TABLE(Q8S)};

/* Blocks of a row of `columns` activations: whole units of k, so that every format finds what it reads. */
INLINE int64_t num_blocks(int64_t columns) { return (columns + 63) / 64 * 2; }
/* Blocks between block i and block i + 1 of a row: odd, so that the rows of a group spread over all sets of L1. */
INLINE int64_t block_stride(int64_t rows) { return rows | 1; }
INLINE int64_t blocks_bytes(int64_t columns, int64_t rows) {
  return num_blocks(columns) * block_stride(rows) * (int64_t)sizeof(Block);
}

/* Rows [a, b) of w times `rows` rows of x, plus bias (or NULL), to out [rows, ldo], or added to it. a is a multiple of
 * TILE. `next` is what this thread will read after row b: it is prefetched. */
static void linear_quant(const Matrix *w, int64_t a, int64_t b, const Block *x, int64_t rows, const float *bias,
                         float *out, int64_t ldo, int add, const void *next) {
  vec parked[TILES * MANY];
  const int64_t format = w->format, stride = block_stride(rows), tile_bytes = TILE * w->row_bytes;
  const int64_t unit = unit_of(format), units = (w->columns + unit - 1) / unit;
  const char *data = w->data, *end = data + (b + TILE - 1) / TILE * tile_bytes;
  const int64_t part = (end - (data + a / TILE * tile_bytes)) / 2;
  const int64_t tiles = rows > MANY ? MAX(1, MIN(TILES, BLOCK_BYTES / tile_bytes)) : TILES;
  for (int64_t r0 = a; r0 < b; r0 += tiles * TILE) {
    const int64_t r1 = MIN(r0 + tiles * TILE, b);
    for (int64_t m0 = 0, size; m0 < rows; m0 += size) {
      const int64_t groups = (rows - m0 + MANY - 1) / MANY;
      size = (rows - m0 + groups - 1) / groups;
      const int64_t wanted = units * (unit / 32) * size * (int64_t)sizeof(Block);
      const int64_t chunks = (wanted + X_BYTES - 1) / X_BYTES, chunk = (units + chunks - 1) / chunks;
      for (int64_t u = 0; u < units; u += chunk) {
        const int64_t count = MIN(chunk, units - u);
        for (int64_t r = r0; r < r1; r += TILE) {
          const char *from = data + r / TILE * tile_bytes + u * unit_bytes(format), *ahead = from;
          if (m0 == 0) ahead += MIN(chunk == units ? PREFETCH : PREFETCH_FAR, part); /* later the weights are near */
          if (m0 == 0 && ahead >= end) ahead = (const char *)next + (ahead - end);
          QUANT_TILES[format][size](from, count, x + u * (unit / 32) * stride + m0, stride,
                                    parked + (r - r0) / TILE * MANY, u == 0, u + count == units,
                                    first_lanes(r1 - r), bias ? bias + r : 0, out + m0 * ldo + r, ldo, add, ahead);
        }
      }
    }
  }
}

/* Round n floats to blocks of int8: scale = largest / 127, ties to even. What is not finite gives a scale that is not. */
static void quantise_row(const float *x, int64_t n, Block *to, int64_t stride) {
  for (int64_t k = 0; k < n; k += 32, to += stride) {
    const vec v0 = v_load_some(first_lanes(n - k), x + k);
    const vec v1 = v_load_some(first_lanes(MAX(n - k - 16, 0)), x + k + 16);
    const float largest = v_largest_bits(v0, v1);
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f; /* no overflow, and 0 for NaN */
    const vec times = v_all(inverse);
    const ints c0 = i_round(v_mul(v0, times)), c1 = i_round(v_mul(v1, times));
    i_store_int8(to->codes, c0), i_store_int8(to->codes + 16, c1);
    const int32_t s0 = i_sum(c0), s1 = i_sum(c1);
    to->scale = largest <= 1e-30f ? 0.0f : largest / 127.0f;
    to->sum = to->scale * (float)(s0 + s1);
    to->back128 = -128 * (s0 + s1), to->back8 = -8 * (s0 + s1);
    to->half128[0] = -128 * s0, to->half128[1] = -128 * s1;
  }
}
/* Blocks behind the last value, up to a whole unit, are zero: rows of codes are padded too. */
static void quantise_padding(int64_t n, Block *row, int64_t stride) {
  for (int64_t i = (n + 31) / 32; i < num_blocks(n); i++) memset(row + i * stride, 0, sizeof(Block));
}

INLINE float half_at(const char *p) {
  uint16_t bits;
  memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

/* Row `row` of w as floats, the values that the codes stand for. */
static void read_row_quant(const Matrix *w, int64_t row, float *out) {
  const int64_t format = w->format, unit = unit_of(format), r = row % TILE, halves = format == Q8S ? 2 : 1;
  const char *at = (const char *)w->data + row / TILE * TILE * w->row_bytes;
  for (int64_t k0 = 0; k0 < w->columns; k0 += unit, at += unit_bytes(format)) {
    const char *codes = at + side_of(format);
    for (int64_t k = 0; k < MIN(unit, w->columns - k0); k++) {
      const int64_t block = k / 32, in = k % 32, i = k / (32 / halves);
      float scale, minimum = 0.0f;
      if (format == Q8S) scale = half_at(at + 2 * r) * (float)*(const int8_t *)(at + 64 + 16 * i + r);
      else if (by_256(format)) scale = half_at(at + 2 * r) * (float)*(const uint8_t *)(at + 64 + 32 * i + r);
      else scale = half_at(at + 32 * i + 2 * r);
      if (by_256(format) && has_minimum(format))
        minimum = -half_at(at + 32 + 2 * r) * (float)*(const uint8_t *)(at + 80 + 32 * i + r);
      else if (has_minimum(format)) minimum = half_at(at + 64 + 32 * i + 2 * r);
      const int half = (int)in / 16, j = (int)in % 16;
      const int code = bits_of(format) == 8
                           ? *(const uint8_t *)(codes + block * 512 + in / 4 * 64 + r * 4 + in % 4)
                           : *(const uint8_t *)(codes + block * 256 + j / 4 * 64 + r * 4 + j % 4) >> (4 * half) & 15;
      const float value = scale * (float)(code - offset_of(format));
      out[k0 + k] = has_minimum(format) ? value + minimum : value;
    }
  }
}

#endif
