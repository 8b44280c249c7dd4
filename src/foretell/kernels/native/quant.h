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
#include "ints.h"

/* 32 activations: value k is about scale * codes[k]. Block i of row m stands at [i * stride + m]. */
typedef struct {
  int8_t codes[32];
  float scale, sum;   /* sum: scale times the sum of the codes */
  int32_t back128;    /* -128 times the sum of the codes, -8 times it, and -128 times the sum of either half */
  int32_t back8, half128[2], unused[2];
} Block;

enum { SIDE_K = 320 }; /* bytes of scales in front of the codes of 256 k: d, dmin, then 16 by 16 small integers */

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

/* Blocks of a row of `columns` activations: whole units of k, so that every format finds what it reads. */
INLINE int64_t num_blocks(int64_t columns) { return (columns + 63) / 64 * 2; }
/* Blocks between block i and block i + 1 of a row: odd, so that the rows of a group spread over all sets of L1. */
INLINE int64_t block_stride(int64_t rows) { return rows | 1; }
INLINE int64_t blocks_bytes(int64_t columns, int64_t rows) {
  return num_blocks(columns) * block_stride(rows) * (int64_t)sizeof(Block);
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
