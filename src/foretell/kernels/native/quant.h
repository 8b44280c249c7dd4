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
 *  - A code is stored without sign: plus 128 (8 bits), 8 (4 bits) or 4 (3 bits), but for formats with a minimum. The product
 *    of bytes (VNNI's vpdpbusd) wants one side without sign; what the shift adds is known from the sum of the activations.
 *  - 4 bits. In each block of 32 the low half of a byte belongs to k, the high half to k + 16. Of formats with levels the
 *    code is a number in a table of 16, whose entries are the levels plus 128 or 16.
 *  - 2 bits. In each half of a block byte t of 4 holds k = t, t + 4, t + 8 and t + 12, lowest bits first. 3 bits: so, and
 *    behind both halves bit k / 4 of byte k % 4 is the third bit of k.
 */
#ifndef FORETELL_QUANT_H
#define FORETELL_QUANT_H
#include "ints.h"

/* 32 activations: value k is about scale * codes[k]. Block i of row m stands at [i * stride + m]. */
typedef struct {
  int8_t codes[32];
  float scale, sum;   /* sum: scale times the sum of the codes */
  int32_t back128;    /* -128 times the sum of the codes, -8 times it, and -128 times the sum of either half */
  int32_t back8, half128[2];
  float half_sum[2];  /* sum, of either half */
} Block;

enum { SIDE_K = 320 }; /* bytes of scales in front of the codes of 256 k: d, dmin, then 16 by 16 small integers */

/* What formats have in common; i is a format, a constant wherever speed counts. */
INLINE int has_odd_steps(int64_t i) { return i == Q3I || i == Q3J || i == Q4I || i == Q4J; }
INLINE int has_levels(int64_t i) { return i == Q4N || i == Q4X || i == Q4E || has_odd_steps(i); }
INLINE int bits_of(int64_t i) {
  if (i == Q3S || i == Q3I || i == Q3J) return 3;
  return i == Q2K || i == Q2T ? 2 : i == Q4 || i == Q4M || i == Q4K || has_levels(i) ? 4 : 8;
}
INLINE int has_minimum(int64_t i) { return i == Q8M || i == Q4M || i == Q4K || i == Q8K || i == Q2K; }
INLINE int halves_of(int64_t i) { return i == Q8S || i == Q2K || bits_of(i) == 3 ? 2 : 1; } /* of a block, with a scale each */
INLINE int by_256(int64_t i) { /* scales in steps, or one for all */
  return i == Q4K || i == Q8K || i == Q4X || i == Q2T || halves_of(i) == 2 || has_odd_steps(i);
}
INLINE int64_t side_of(int64_t i) {
  if (has_odd_steps(i)) return 160;
  return i == Q4E || i == Q2T ? 32 : i == Q4X ? 192 : by_256(i) ? SIDE_K : has_minimum(i) ? 128 : 64;
}
INLINE int64_t unit_of(int64_t i) { return by_256(i) ? 256 : 64; } /* k of a unit: scales, then codes */
INLINE int64_t unit_bytes(int64_t i) { return side_of(i) + unit_of(i) * TILE * bits_of(i) / 8; }
INLINE int offset_of(int64_t i) {
  if (has_odd_steps(i)) return i == Q3I || i == Q4J ? 16 : 64;
  return has_minimum(i) ? 0 : bits_of(i) == 8 || i == Q4N || i == Q4X ? 128 : i == Q4E ? 16 : i == Q3S ? 4 : i == Q2T ? 1 : 8;
}

/* What codes of formats with levels stand for, plus the format's offset: IQ4_NL's, and E2M1's doubled (-0 is 0); the others'
 * highest bit is the sign of 1, 7, 9 (IQ1), 8, 25, 43 (IQ2), 4 to 62 (IQ3_XXS), or 1, 3 to 15 (IQ3_S). */
static const uint8_t LEVELS_NL[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t LEVELS_E2M1[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
static const uint8_t LEVELS_IQ1[16] = {17, 23, 25, 16, 15, 9, 7, 16};
static const uint8_t LEVELS_IQ2[16] = {72, 89, 107, 64, 56, 39, 21, 64};
static const uint8_t LEVELS_IQ3_XXS[16] = {68, 76, 84, 92, 100, 108, 116, 126, 60, 52, 44, 36, 28, 20, 12, 2};
static const uint8_t LEVELS_IQ3_S[16] = {17, 19, 21, 23, 25, 27, 29, 31, 15, 13, 11, 9, 7, 5, 3, 1};
INLINE const uint8_t *levels_of(int64_t i) {
  return i == Q4E ? LEVELS_E2M1 : i == Q3I ? LEVELS_IQ1 : i == Q3J ? LEVELS_IQ2 : i == Q4I ? LEVELS_IQ3_XXS
         : i == Q4J ? LEVELS_IQ3_S : LEVELS_NL;
}
/* What a unit's float16 is multiplied by. */
INLINE float factor_of(int64_t i) { return i == Q3I || i == Q3J ? 0.125f : i == Q4I ? 0.25f : 1.0f; }
INLINE vec unit_scale(const int FORMAT, const char *side) {
  return has_odd_steps(FORMAT) ? v_mul(v_half(side), v_all(factor_of(FORMAT))) : v_half(side);
}

/* Scale (and minimum) of block or half block number i of a unit, for 16 rows. */
INLINE vec scale_at(const int FORMAT, const char *side, int64_t i, vec d) {
  if (FORMAT == Q4E) return v_power(side + 16 * i);
  if (FORMAT == Q2T) return d;
  if (has_odd_steps(FORMAT)) { /* a byte has those of both halves of a block */
    const int halves = halves_of(FORMAT);
    const char *at = side + 32 + 16 * (i / halves);
    const vec step = i % halves ? v_high4(at) : v_low4(at);
    return v_mul(d, v_add(v_add(step, step), v_all(1.0f)));
  }
  if (FORMAT == Q2K) return v_mul(d, v_low4(side + 64 + 16 * i));
  if (FORMAT == Q8S || FORMAT == Q3S || FORMAT == Q4X) return v_mul(d, v_int8(side + 64 + 16 * i));
  if (by_256(FORMAT)) return v_mul(d, v_uint8(side + 64 + 32 * i));
  return v_half(side + 32 * i);
}
INLINE vec minimum_at(const int FORMAT, const char *side, int64_t i, vec dmin) {
  if (FORMAT == Q2K) return v_mul(dmin, v_high4(side + 64 + 16 * i));
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
    to->half_sum[0] = to->scale * (float)s0, to->half_sum[1] = to->scale * (float)s1;
  }
}
/* Blocks behind the last value, up to a whole unit, are zero: rows of codes are padded too. */
static void quantise_padding(int64_t n, Block *row, int64_t stride) {
  for (int64_t i = (n + 31) / 32; i < num_blocks(n); i++) memset(row + i * stride, 0, sizeof(Block));
}

INLINE float half_at(const char *p) {
  uint16_t bits;
  memcpy(&bits, p, 2);
  return from_float16(bits);
}

INLINE float power_at(uint8_t x) {
  const uint32_t bits = x < 2 ? 0x200000u << x : (uint32_t)(x - 1) << 23;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

/* The code of value number k of 32 in row r of a tile: its number where the format has levels. */
INLINE int code_at(int64_t format, const char *block, int64_t r, int k) {
  const uint8_t *at = (const uint8_t *)block + r * 4 + k % 4;
  const int half = k / 16, j = k % 16;
  if (bits_of(format) == 8) return at[k / 4 * 64];
  if (bits_of(format) == 4) return at[j / 4 * 64] >> (4 * half) & 15;
  const int low = at[64 * half] >> (j / 4 * 2) & 3;
  return bits_of(format) == 3 ? low | (at[128] >> k / 4 & 1) << 2 : low;
}

/* Row `row` of w as floats, the values that the codes stand for. */
static void read_row_quant(const Matrix *w, int64_t row, float *out) {
  const int64_t format = w->format, unit = unit_of(format), r = row % TILE, halves = halves_of(format);
  const char *at = (const char *)w->data + row / TILE * TILE * w->row_bytes;
  for (int64_t k0 = 0; k0 < w->columns; k0 += unit, at += unit_bytes(format)) {
    const char *codes = at + side_of(format);
    for (int64_t k = 0; k < MIN(unit, w->columns - k0); k++) {
      const int64_t i = k / (32 / halves);
      const int odd = has_odd_steps(format);
      const uint8_t step = odd || halves == 2 || format == Q4X ? (uint8_t)at[odd ? 32 + k / 32 * 16 + r : 64 + 16 * i + r] : 0;
      float scale, minimum = 0.0f;
      if (format == Q2T) scale = half_at(at + 2 * r);
      else if (odd) scale = half_at(at + 2 * r) * factor_of(format) * (float)(2 * (step >> i % halves * 4 & 15) + 1);
      else if (format == Q4E) scale = power_at((uint8_t)at[16 * i + r]);
      else if (format == Q2K) scale = half_at(at + 2 * r) * (float)(step & 15);
      else if (halves == 2 || format == Q4X) scale = half_at(at + 2 * r) * (float)(int8_t)step;
      else if (by_256(format)) scale = half_at(at + 2 * r) * (float)*(const uint8_t *)(at + 64 + 32 * i + r);
      else scale = half_at(at + 32 * i + 2 * r);
      if (format == Q2K) minimum = -half_at(at + 32 + 2 * r) * (float)(step >> 4);
      else if (by_256(format) && has_minimum(format))
        minimum = -half_at(at + 32 + 2 * r) * (float)*(const uint8_t *)(at + 80 + 32 * i + r);
      else if (has_minimum(format)) minimum = half_at(at + 64 + 32 * i + 2 * r);
      int code = code_at(format, codes + k / 32 * 64 * bits_of(format), r, (int)k % 32);
      if (has_levels(format)) code = levels_of(format)[code];
      const float value = scale * (float)(code - offset_of(format));
      out[k0 + k] = has_minimum(format) ? value + minimum : value;
    }
  }
}

#endif
