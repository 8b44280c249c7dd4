/* Products with quantised matrices by AMX: the integers, and so the bits, of quant.h, which says how a matrix lies.
 *
 * A vector of codes has 4 codes of each of 16 rows, which is how AMX wants its right side; the activations' blocks are its
 * left side as they lie, with a stride of one Block. One instruction gives the sums of a block for 16 rows by 16
 * activations. They go through memory (L1) into vectors, where scales are applied as in quant.h: that takes most of the
 * time. Codes become int8 once for a chunk of k, then serve all activations.
 */
#ifndef FORETELL_AMX_QUANT_H
#define FORETELL_AMX_QUANT_H
#include "ahead.h"
#include "quant.h"

#if AMX

enum {
  CHUNK_K = 256,   /* values of k that are unpacked at a time, of ... */
  AMX_TILES = 2,   /* ... so many tiles, which share a pass over the activations ... */
  AMX_ROWS = 256,  /* ... of this many rows */
  AMX_AHEAD = 4096 /* bytes ahead that each of the tiles is read */
};

/* Codes of 2 and 4 bits are unpacked for all rows at once, which pays from ten rows on; those of 8 bits are only copied, and
 * where scales stand by 16 there are twice as many sums to be scaled. */
INLINE int amx_takes(int64_t format, int64_t rows) {
  if (amx_rows >= 0) return amx_rows && rows >= amx_rows;
  return rows >= (bits_of(format) <= 4 ? 10 : 32) && halves_of(format) == 1;
}

/* CHUNK_K values of k of one tile. */
typedef struct {
  int8_t codes[CHUNK_K * TILE]; /* less the format's offset */
  float scales[CHUNK_K / 16][TILE], minima[CHUNK_K / 16][TILE];
} Chunk;

INLINE void unpack_chunk(const int FORMAT, const char *w, int64_t units, Chunk *to, const char *ahead) {
  const int BITS = bits_of(FORMAT), HALVES = halves_of(FORMAT), OFFSET = offset_of(FORMAT);
  const ints shift = _mm512_set1_epi8((char)OFFSET), levels = i_levels(levels_of(FORMAT));
  int8_t *codes = to->codes;
  int64_t part = 0;
  for (int64_t u = 0; u < units; u++) {
    const char *from = w + side_of(FORMAT);
    vec d = v_zero(), dmin = v_zero();
    if (by_256(FORMAT)) d = unit_scale(FORMAT, w);
    if (by_256(FORMAT) && has_minimum(FORMAT)) dmin = v_sub(v_zero(), v_half(w + 32));
    UNROLL for (int i = 0; i < side_of(FORMAT); i += 64) prefetch(ahead + i);
    ahead += side_of(FORMAT);
    for (int64_t block = 0; block < unit_of(FORMAT) / 32; block++, codes += 512) {
      UNROLL for (int half = 0; half < HALVES; half++, part++) {
        v_store(to->scales[part], scale_at(FORMAT, w, block * HALVES + half, d));
        if (has_minimum(FORMAT)) v_store(to->minima[part], minimum_at(FORMAT, w, block * HALVES + half, dmin));
      }
      if (BITS < 4) {
        const ints third = BITS == 3 ? i_load(from + 128) : i_zero();
        UNROLL for (int i = 0; i < 8; i++) {
          const ints low = i_two(i_load(from + i / 4 * 64), i % 4), code = BITS == 3 ? i_or(low, i_one(third, i)) : low;
          const ints c = has_levels(FORMAT) ? i_look(levels, code) : code;
          if (i < BITS) prefetch(ahead + 64 * i);
          _mm512_store_si512(codes + 64 * i, OFFSET ? _mm512_sub_epi8(c, shift) : c);
        }
      } else if (BITS == 8) {
        UNROLL for (int i = 0; i < 8; i++) {
          const ints c = i_load(from + 64 * i);
          prefetch(ahead + 64 * i);
          _mm512_store_si512(codes + 64 * i, OFFSET ? _mm512_xor_si512(c, shift) : c);
        }
      } else {
        UNROLL for (int i = 0; i < 4; i++) {
          const ints c = i_load(from + 64 * i);
          const ints low = has_levels(FORMAT) ? i_look(levels, i_low4(c)) : i_low4(c);
          const ints high = has_levels(FORMAT) ? i_look(levels, i_high4(c)) : i_high4(c);
          prefetch(ahead + 64 * i);
          _mm512_store_si512(codes + 64 * i, OFFSET ? _mm512_sub_epi8(low, shift) : low);
          _mm512_store_si512(codes + 256 + 64 * i, OFFSET ? _mm512_sub_epi8(high, shift) : high);
        }
      }
      from += 32 * TILE * BITS / 8, ahead += 32 * TILE * BITS / 8;
    }
    w = from;
  }
}

/* Tiles: activations of whole groups of 16 rows and of what is left, codes, and two accumulators of either. */
enum { A_OF_16, A_OF_REST, CODES_0, CODES_1, SUMS_OF_16, SUMS_OF_REST = SUMS_OF_16 + 2 };

/* Sums of part p of the chunk: by halves of a block where PART is 16. */
#define SUMS(p, odd)                                                                                                   \
  do {                                                                                                                 \
    TILE_ZERO(C + (odd));                                                                                              \
    TILE_LOAD(A, (const int8_t *)(x + (p) * PART / 32 * stride) + (p) * PART % 32, sizeof(Block));                     \
    TILE_LOAD(CODES_0 + (odd), w->codes + (p) * PART * TILE, 64);                                                      \
    TILE_DOT_INT8(C + (odd), A, CODES_0 + (odd));                                                                      \
    TILE_STORE(C + (odd), sums[odd], 64);                                                                              \
  } while (0)
#define APPLY(p, odd)                                                                                                  \
  do {                                                                                                                 \
    const Block *const at = x + (p) * PART / 32 * stride;                                                              \
    const vec scale = v_load(w->scales[p]);                                                                            \
    UNROLL for (int m = 0; m < M; m++)                                                                                 \
        acc[m] = v_fma(i_float(i_load(sums[odd][m])), v_mul(scale, v_all(at[m].scale)), acc[m]);                       \
    if (MINIMUM) {                                                                                                     \
      const vec minimum = v_load(w->minima[p]);                                                                        \
      UNROLL for (int m = 0; m < M; m++)                                                                               \
          acc[m] = v_fma(minimum, v_all(PART == 16 ? at[m].half_sum[(p) & 1] : at[m].sum), acc[m]);                    \
    }                                                                                                                  \
  } while (0)

/* parked[m] += the product of x[m] with a tile, for `parts` parts (an even number) of a chunk. */
INLINE void amx_product(const int M, const int PART, const int MINIMUM, const Chunk *w, int64_t parts, const Block *x,
                        int64_t stride, vec *parked) {
  int32_t sums[2][TILE][TILE] __attribute__((aligned(64)));
  vec acc[16];
  UNROLL for (int m = 0; m < M; m++) acc[m] = parked[m];
#define A (M == 16 ? A_OF_16 : A_OF_REST)
#define C (M == 16 ? SUMS_OF_16 : SUMS_OF_REST)
  SUMS(0, 0);
  for (int64_t p = 0; p < parts; p += 2) {
    SUMS(p + 1, 1);
    APPLY(p, 0);
    if (p + 2 < parts) SUMS(p + 2, 0);
    APPLY(p + 1, 1);
  }
#undef A
#undef C
  UNROLL for (int m = 0; m < M; m++) parked[m] = acc[m];
}

typedef void amx_function(const Chunk *w, int64_t parts, const Block *x, int64_t stride, vec *parked);
#define DEFINE_AMX(_, M)                                                                                               \
  static void amx_##M(const Chunk *w, int64_t parts, const Block *x, int64_t stride, vec *parked) {                    \
    amx_product(M, 32 / halves_of(PRODUCT), has_minimum(PRODUCT), w, parts, x, stride, parked);                        \
  }
#define AMX_ENTRY(_, M) [M] = amx_##M,
#define FOR_16(DO)                                                                                                     \
  DO(, 1) DO(, 2) DO(, 3) DO(, 4) DO(, 5) DO(, 6) DO(, 7) DO(, 8) DO(, 9) DO(, 10) DO(, 11) DO(, 12) DO(, 13) DO(, 14) \
  DO(, 15) DO(, 16)
FOR_16(DEFINE_AMX)
static amx_function *const AMX_PRODUCTS[17] = {FOR_16(AMX_ENTRY)};

/* See linear_quant. */
static void linear_quant_amx(const Matrix *w, int64_t a, int64_t b, const Block *x, int64_t rows, const float *bias,
                             float *out, int64_t ldo, int add, const void *next) {
  Chunk chunks[AMX_TILES] __attribute__((aligned(64)));
  vec parked[AMX_TILES][AMX_ROWS];
  const int64_t format = PRODUCT, stride = block_stride(rows), tile_bytes = TILE * w->row_bytes;
  const int64_t unit = unit_of(format), units = (w->columns + unit - 1) / unit, many = CHUNK_K / unit;
  const int64_t part = 32 / halves_of(format), rest = rows % 16;
  const int64_t tiles = rows <= 16 ? 1 : AMX_TILES; /* few rows: weights in the order of memory */
  const char *data = w->data, *end = data + (b + TILE - 1) / TILE * tile_bytes;
  const int64_t distance = MIN(tiles == 1 ? PREFETCH : AMX_AHEAD, tile_bytes);
  TileConfig config = tile_config();
  tile_shape(&config, A_OF_16, 16, part), tile_shape(&config, A_OF_REST, rest, part);
  for (int i = 0; i < 2; i++) {
    tile_shape(&config, CODES_0 + i, part / 4, 64);
    tile_shape(&config, SUMS_OF_16 + i, 16, 64), tile_shape(&config, SUMS_OF_REST + i, rest, 64);
  }
  tiles_configure(&config);
  for (int64_t r0 = a; r0 < b; r0 += tiles * TILE) {
    const int64_t r1 = MIN(r0 + tiles * TILE, b), num = (r1 - r0 + TILE - 1) / TILE;
    for (int64_t m0 = 0; m0 < rows; m0 += AMX_ROWS) {
      const int64_t m1 = MIN(m0 + AMX_ROWS, rows);
      for (int64_t j = 0; j < num; j++)
        for (int64_t m = m0; m < m1; m++) parked[j][m - m0] = v_zero();
      for (int64_t u = 0; u < units; u += many) {
        const int64_t count = MIN(many, units - u);
        const Block *const here = x + u * (unit / 32) * stride;
        for (int64_t j = 0; j < num; j++) {
          const char *from = data + (r0 / TILE + j) * tile_bytes + u * unit_bytes(format), *ahead = from;
          if (m0 == 0) {
            ahead += distance;
            if (ahead >= data + (r0 / TILE + j + 1) * tile_bytes) ahead += (tiles - 1) * tile_bytes;
            if (ahead >= end) ahead = (const char *)next + (ahead - end) % tile_bytes;
          }
          unpack_chunk(PRODUCT, from, count, &chunks[j], ahead);
        }
        for (int64_t m = m0; m < m1; m += 16)
          for (int64_t j = 0; j < num; j++)
            AMX_PRODUCTS[MIN(16, m1 - m)](&chunks[j], count * unit / part, here + m, stride, &parked[j][m - m0]);
      }
      for (int64_t j = 0; j < num; j++) {
        const int64_t r = r0 + j * TILE;
        const Lanes lanes = first_lanes(r1 - r);
        const vec shift = bias ? v_load_some(lanes, bias + r) : v_zero();
        for (int64_t m = m0; m < m1; m++) {
          float *const to = out + m * ldo + r;
          vec y = bias ? v_add(parked[j][m - m0], shift) : parked[j][m - m0];
          if (add) y = v_add(y, v_load_some(lanes, to));
          v_store_some(to, lanes, y);
        }
      }
    }
  }
  tiles_release();
}

#endif
#endif
