/* From a file's rows to tiles of 16 rows (quant.h): blocks of GGUF keep their values, floats are rounded. */
#ifndef FORETELL_PACK_H
#define FORETELL_PACK_H
#include "../codebook.h"
#include "quant.h"

/* What rows may hold, by GGUF's numbers (ggml.h). */
enum {
  FROM_F32 = 0, FROM_F16 = 1, FROM_Q4_0 = 2, FROM_Q4_1 = 3, FROM_Q5_0 = 6, FROM_Q5_1 = 7, FROM_Q8_0 = 8, FROM_Q2_K = 10,
  FROM_Q3_K = 11, FROM_Q4_K = 12, FROM_Q5_K = 13, FROM_Q6_K = 14, FROM_IQ4_NL = 20, FROM_IQ4_XS = 23, FROM_BF16 = 30,
  FROM_MXFP4 = 39
};

/* One row of a unit of 64 or 256 values. */
typedef struct {
  uint8_t codes[256];
  uint16_t scale[2], minimum[2];         /* float16: of each block of 32, or the first one of all 256 */
  uint8_t scale_step[16], minimum_step[8]; /* or powers of two; of Q2K both in one byte, as files have them */
} Unit;

/* n bytes: their low halves, then their high halves. */
INLINE void halves(const uint8_t *from, int n, uint8_t *to) {
  for (int i = 0; i < n; i++) to[i] = from[i] & 15, to[n + i] = from[i] >> 4;
}

static void steps_of(const uint8_t *s, Unit *u) {
  for (int i = 0; i < 4; i++) {
    u->scale_step[i] = s[i] & 63, u->minimum_step[i] = s[i + 4] & 63;
    u->scale_step[i + 4] = (uint8_t)((s[i + 8] & 15) | s[i] >> 6 << 4);
    u->minimum_step[i + 4] = (uint8_t)(s[i + 8] >> 4 | s[i + 4] >> 6 << 4);
  }
}

/* A block of 32 of a file: its codes, and its scale (and minimum) as number i of the unit. */
static void block_of(int64_t kind, const uint8_t *b, int i, Unit *u) {
  uint8_t *codes = u->codes + 32 * i;
  uint32_t high;
  memcpy(&u->scale[i], b, 2);
  if (kind == FROM_Q4_1 || kind == FROM_Q5_1) memcpy(&u->minimum[i], b + 2, 2), b += 2;
  b += 2;
  if (kind == FROM_Q8_0) {
    for (int k = 0; k < 32; k++) codes[k] = b[k] ^ 128;
    return;
  }
  if (kind == FROM_Q4_0 || kind == FROM_Q4_1 || kind == FROM_IQ4_NL) {
    halves(b, 16, codes);
    return;
  }
  memcpy(&high, b, 4);
  halves(b + 4, 16, codes);
  for (int k = 0; k < 32; k++) codes[k] = (uint8_t)((codes[k] | (high >> k & 1) << 4) + (kind == FROM_Q5_0 ? 112 : 0));
}

/* The scales of 6 bits of Q3_K: four bits of all 16, then two. */
static void steps_of_16(const uint8_t *s, Unit *u) {
  for (int i = 0; i < 16; i++)
    u->scale_step[i] = (uint8_t)((s[i % 8] >> i / 8 * 4 & 15) + (s[8 + i % 4] >> i / 4 * 2 & 3) * 16 - 32);
}

/* A block of levels in their codes: ternary ones from 0 on, of others the highest bit is the sign. */
static void levels_to_codes(int64_t format, int64_t kind, const uint8_t *b, const int8_t *grid, Unit *u) {
  Levels of;
  levels_of_block(kind, b, grid, &of);
  const int apart = format == Q3I ? 4 : format == Q3J ? 17 : format == Q4I ? 8 : 2, sign = bits_of(format) - 1;
  u->scale[0] = of.d;
  for (int k = 0; k < 256; k++) {
    const int level = of.levels[k];
    u->codes[k] = (uint8_t)(format == Q2T ? level + 1 : abs(level) / apart | (level < 0) << sign);
  }
  for (int i = 0; i < 8; i++)
    u->scale_step[i] = (uint8_t)(of.steps[2 * i] | (halves_of(format) == 2 ? of.steps[2 * i + 1] << 4 : 0));
}

static void super_block_of(int64_t kind, const uint8_t *b, Unit *u) {
  if (kind == FROM_Q2_K || kind == FROM_Q3_K) {
    const uint8_t *low = b + (kind == FROM_Q2_K ? 16 : 32);
    for (int k = 0; k < 256; k++) u->codes[k] = low[k / 128 * 32 + k % 32] >> k / 32 % 4 * 2 & 3;
    if (kind == FROM_Q2_K) {
      memcpy(u->scale_step, b, 16), memcpy(&u->scale[0], b + 80, 2), memcpy(&u->minimum[0], b + 82, 2);
      return;
    }
    for (int k = 0; k < 256; k++) u->codes[k] |= (uint8_t)((b[k % 32] >> k / 32 & 1) << 2);
    steps_of_16(b + 96, u), memcpy(&u->scale[0], b + 108, 2);
    return;
  }
  if (kind == FROM_IQ4_XS) {
    memcpy(&u->scale[0], b, 2);
    for (int i = 0; i < 8; i++) {
      const int high = b[2 + i / 4] >> i % 4 * 2 & 3;
      u->scale_step[i] = (uint8_t)((b[4 + i / 2] >> i % 2 * 4 & 15) + high * 16 - 32);
      halves(b + 8 + 16 * i, 16, u->codes + 32 * i);
    }
    return;
  }
  if (kind == FROM_Q6_K) {
    for (int n = 0; n < 2; n++) {
      uint8_t *codes = u->codes + 128 * n;
      const uint8_t *high = b + 128 + 32 * n;
      halves(b + 64 * n, 64, codes);
      for (int k = 0; k < 128; k++) codes[k] = (uint8_t)((codes[k] | (high[k % 32] >> k / 32 * 2 & 3) << 4) + 96);
    }
    memcpy(u->scale_step, b + 192, 16), memcpy(&u->scale[0], b + 208, 2);
    return;
  }
  memcpy(&u->scale[0], b, 2), memcpy(&u->minimum[0], b + 2, 2);
  steps_of(b + 4, u);
  const uint8_t *low = b + (kind == FROM_Q5_K ? 48 : 16);
  for (int c = 0; c < 4; c++) halves(low + 32 * c, 32, u->codes + 64 * c);
  if (kind == FROM_Q5_K)
    for (int k = 0; k < 256; k++) u->codes[k] |= (uint8_t)((b[16 + k % 32] >> k / 32 & 1) << 4);
}

INLINE float float_at(int64_t kind, const uint8_t *row, int64_t k) {
  uint32_t bits;
  uint16_t half;
  float x;
  if (kind == FROM_F32) {
    memcpy(&x, row + 4 * k, 4);
    return x;
  }
  memcpy(&half, row + 2 * k, 2);
  if (kind == FROM_F16) return from_float16(half);
  bits = (uint32_t)half << 16;
  memcpy(&x, &bits, 4);
  return x;
}

/* n floats (up to 32; what is missing is zero) in the nearest codes: as Q8_0 and Q4_0 have them, but that the scale of 4 bits
 * is that of least squares for the codes which the largest value at -8 would give. */
static void round_block(int64_t format, const float *x, int i, Unit *u) {
  uint8_t *codes = u->codes + 32 * i;
  const float lowest = format == Q8 ? -127.0f : -8.0f, highest = format == Q8 ? 127.0f : 7.0f;
  float largest = 0.0f, c[32];
  for (int k = 0; k < 32; k++) largest = fabsf(x[k]) > fabsf(largest) ? x[k] : largest;
  u->scale[i] = to_float16(format == Q8 ? fabsf(largest) / 127.0f : largest / -8.0f);
  for (int pass = 0; pass < 2; pass++) {
    const float scale = from_float16(u->scale[i]), divisor = scale == 0.0f ? 1.0f : scale;
    for (int k = 0; k < 32; k++) c[k] = fminf(fmaxf(rintf(x[k] / divisor), lowest), highest);
    if (format == Q8 || pass) break;
    double with = 0.0, size = 0.0;
    for (int k = 0; k < 32; k++) with += (double)x[k] * c[k], size += (double)c[k] * c[k];
    const uint16_t better = to_float16((float)(with / fmax(size, 1.0)));
    if (!(better & 0x7fff)) break;
    u->scale[i] = better;
  }
  for (int k = 0; k < 32; k++) codes[k] = (uint8_t)(int)(c[k] + (format == Q8 ? 128.0f : 8.0f));
}

/* Unit number `index` of a row. grid: see codebook.h. */
static void unit_from(int64_t format, int64_t kind, const uint8_t *row, int64_t columns, int64_t index,
                      const int8_t *grid, Unit *u) {
  static const int SIZE[] = {[FROM_Q4_0] = 18, [FROM_Q4_1] = 20, [FROM_Q5_0] = 22, [FROM_Q5_1] = 24, [FROM_Q8_0] = 34,
                             [FROM_Q2_K] = 84, [FROM_Q3_K] = 110, [FROM_Q4_K] = 144, [FROM_Q5_K] = 176, [FROM_Q6_K] = 210,
                             [FROM_IQ4_NL] = 18, [FROM_IQ4_XS] = 136, [IQ2_XXS] = 66, [IQ2_XS] = 74, [IQ3_XXS] = 98,
                             [IQ1_S] = 50, [IQ3_S] = 110, [IQ2_S] = 82, [IQ1_M] = 56, [TQ1_0] = 54, [TQ2_0] = 66};
  memset(u, 0, sizeof *u);
  if (by_256(format)) {
    const uint8_t *block = row + index * SIZE[kind];
    if (format == Q2T || has_odd_steps(format)) levels_to_codes(format, kind, block, grid, u);
    else super_block_of(kind, block, u);
    return;
  }
  for (int i = 0; i < 2; i++) {
    const int64_t block = 2 * index + i;
    if (block * 32 >= columns) break;
    if (kind != FROM_F32 && kind != FROM_F16 && kind != FROM_BF16) {
      block_of(kind, row + block * SIZE[kind], i, u);
      continue;
    }
    float x[32] = {0};
    for (int k = 0; k < MIN(32, columns - block * 32); k++) x[k] = float_at(kind, row, block * 32 + k);
    round_block(format, x, i, u);
  }
}

/* A block of 32 codes of one row, four codes a word: see quant.h. */
static void place_block(const int BITS, const uint8_t *codes, char *at) {
  uint32_t four[8], high = 0;
  memcpy(four, codes, 32);
  for (int i = 0; i < 4; i++) {
    const uint32_t both = four[i] | four[i + 4] << 4;
    if (BITS == 8) memcpy(at + 64 * i, &four[i], 4), memcpy(at + 64 * (i + 4), &four[i + 4], 4);
    if (BITS == 4) memcpy(at + 64 * i, &both, 4);
  }
  if (BITS > 3) return;
  for (int half = 0; half < 2; half++) {
    uint32_t low = 0;
    for (int i = 0; i < 4; i++) {
      low |= (four[4 * half + i] & 0x03030303) << 2 * i;
      high |= (four[4 * half + i] >> 2 & 0x01010101) << (4 * half + i);
    }
    memcpy(at + 64 * half, &low, 4);
  }
  if (BITS == 3) memcpy(at + 128, &high, 4);
}

/* Row r of a tile's unit. */
static void place_unit(int64_t format, const Unit *u, int r, char *at) {
  if (format == Q2T || has_odd_steps(format)) {
    memcpy(at + 2 * r, &u->scale[0], 2);
    for (int i = 0; i < (side_of(format) - 32) / 16; i++) at[32 + 16 * i + r] = (char)u->scale_step[i];
  } else if (by_256(format)) {
    const int steps = 8 * halves_of(format), minima = has_minimum(format) && steps == 8;
    memcpy(at + 2 * r, &u->scale[0], 2), memcpy(at + 32 + 2 * r, &u->minimum[0], 2);
    for (int i = 0; i < steps; i++) {
      at[64 + (minima ? 32 : 16) * i + r] = (char)u->scale_step[i];
      if (minima) at[80 + 32 * i + r] = (char)u->minimum_step[i];
    }
  } else {
    for (int i = 0; i < 2; i++) {
      memcpy(at + 32 * i + 2 * r, &u->scale[i], 2);
      if (has_minimum(format)) memcpy(at + 64 + 32 * i + 2 * r, &u->minimum[i], 2);
    }
  }
  char *codes = at + side_of(format) + 4 * r;
  const int bits = bits_of(format);
  for (int64_t k = 0; k < unit_of(format); k += 32) place_block(bits, u->codes + k, codes + k * TILE * bits / 8);
}

/* A row of MXFP4 as row r of a tile: its bytes hold low and high halves as words of tiles do. */
static void place_mxfp4(const uint8_t *row, int64_t columns, int r, char *tile) {
  for (int64_t b = 0; 32 * b < columns; b++, row += 17) {
    char *unit = tile + b / 2 * unit_bytes(Q4E), *codes = unit + side_of(Q4E) + b % 2 * 32 * TILE / 2 + 4 * r;
    unit[b % 2 * TILE + r] = (char)row[0];
    for (int i = 0; i < 4; i++) memcpy(codes + 64 * i, row + 1 + 4 * i, 4);
  }
}

/* `count` rows of `columns` values, row_bytes apart, as tiles from out on; rows behind the last stay as they are (zero). */
static void pack_rows(int64_t format, int64_t kind, const uint8_t *rows, int64_t count, int64_t columns,
                      int64_t row_bytes, const int8_t *grid, char *out) {
  const int64_t units = (columns + unit_of(format) - 1) / unit_of(format);
  Unit unit;
  for (int64_t i = 0; i < count; i++) {
    char *tile = out + i / TILE * units * unit_bytes(format);
    if (kind == FROM_MXFP4) {
      place_mxfp4(rows + i * row_bytes, columns, (int)(i % TILE), tile);
      continue;
    }
    for (int64_t u = 0; u < units; u++) {
      unit_from(format, kind, rows + i * row_bytes, columns, u, grid, &unit);
      place_unit(format, &unit, (int)(i % TILE), tile + u * unit_bytes(format));
    }
  }
}

#endif
