/* Products with matrices of one quantised format, -DPRODUCT: see quant.h. */
#ifndef FORETELL_TILES_QUANT_H
#define FORETELL_TILES_QUANT_H
#include "ahead.h"
#include "quant.h"

enum {
#ifdef __AVX512F__
  MANY = 8, /* activation rows of a tile at most: what registers hold */
#else
  MANY = 4,
#endif
  TILES = 4,         /* tiles that share a pass over the activations, ... */
  X_BYTES = 32768,   /* ... of which so many bytes stay in L1 */
};

/* What sums of codes of less than 8 bits begin with: the offset's part of the products, taken away. */
INLINE ints start_of(const int FORMAT, const Block *x, int half) {
  const int OFFSET = offset_of(FORMAT);
  if (has_minimum(FORMAT)) return i_zero();
  if (OFFSET == 8) return i_all(&x->back8);
  return i_right(i_all(halves_of(FORMAT) == 2 ? &x->half128[half] : &x->back128), OFFSET == 64 ? 1 : OFFSET == 16 ? 3 : OFFSET == 4 ? 5 : 7);
}

/* out[m, r] (+)= bias[r] + the product of x[m] with row r of a tile, for `units` units of k from w and x on. parked holds
 * the accumulators between chunks of k. */
INLINE void tile_quant(const int M, const int FORMAT, const char *w, int64_t units, const Block *x, int64_t stride,
                       vec *parked, int first, int last, Lanes lanes, const float *bias, float *out, int64_t ldo, int add,
                       const char *ahead) {
  const int BITS = bits_of(FORMAT), OFFSET = offset_of(FORMAT), HALVES = halves_of(FORMAT), BYTES = 32 * TILE * BITS / 8;
  const ints levels = i_levels(levels_of(FORMAT));
  vec acc[8];
  UNROLL for (int m = 0; m < M; m++) acc[m] = first ? v_zero() : parked[m];
  for (int64_t u = 0; u < units; u++) {
    const char *codes = w + side_of(FORMAT);
    vec d = v_zero(), dmin = v_zero();
    if (by_256(FORMAT)) d = unit_scale(FORMAT, w);
    if (by_256(FORMAT) && has_minimum(FORMAT)) dmin = v_sub(v_zero(), v_half(w + 32));
    UNROLL for (int i = 0; i < side_of(FORMAT); i += 64) prefetch_weights(M, ahead + i);
    ahead += side_of(FORMAT);
    for (int64_t block = 0; block < unit_of(FORMAT) / 32; block++, x += stride) {
      UNROLL for (int half = 0; half < HALVES; half++) {
        ints sum[8], whole[8];
        UNROLL for (int m = 0; m < M; m++)
            sum[m] = OFFSET == 64              ? start_of(FORMAT, x + m, half)
                     : BITS < 8 && OFFSET < 128 ? i_begin4(start_of(FORMAT, x + m, half))
                     : has_minimum(FORMAT)    ? i_zero()
                     : HALVES == 2            ? i_back128(&x[m].half128[half])
                                              : i_back128(&x[m].back128);
        if (BITS < 4) {
          UNROLL for (int part = half; part < (HALVES == 1 ? 2 : half + 1); part++) {
            const ints c = i_load(codes + 64 * part), third = BITS == 3 ? i_load(codes + 128) : i_zero();
            prefetch_weights(M, ahead + 64 * part);
            if (BITS == 3 && part) prefetch_weights(M, ahead + 128);
            UNROLL for (int i = 0; i < 4; i++) {
              const ints low = i_two(c, i), code = BITS == 3 ? i_or(low, i_one(third, 4 * half + i)) : low;
              const ints value = has_levels(FORMAT) ? i_look(levels, code) : code;
              UNROLL for (int m = 0; m < M; m++) {
                const ints a = i_all(x[m].codes + 16 * part + 4 * i);
                sum[m] = OFFSET == 64 ? i_dot_small(sum[m], value, a) : i_dot4(sum[m], value, a);
              }
            }
          }
          if (OFFSET < 64)
            UNROLL for (int m = 0; m < M; m++) sum[m] = i_end4(sum[m], start_of(FORMAT, x + m, half));
        } else if (has_levels(FORMAT)) {
          UNROLL for (int part = 0; part < 2; part++) {
            UNROLL for (int i = 0; i < 4; i++) {
              const ints c = i_load(codes + 64 * i), code = i_look(levels, part ? i_high4(c) : i_low4(c));
              if (!part) prefetch_weights(M, ahead + 64 * i);
              UNROLL for (int m = 0; m < M; m++) {
                const ints a = i_all(x[m].codes + 16 * part + 4 * i);
                sum[m] = OFFSET == 128  ? i_dot_byte(sum[m], code, a)
                         : OFFSET == 64 ? i_dot_small(sum[m], code, a)
                                        : i_dot4(sum[m], code, a);
              }
            }
            if (OFFSET >= 64) continue;
            UNROLL for (int m = 0; m < M; m++) { /* 16 bits hold four vectors of levels, not eight */
              if (part) sum[m] = i_end4(sum[m], whole[m]);
              else whole[m] = i_end4(sum[m], start_of(FORMAT, x + m, half)), sum[m] = i_begin4(whole[m]);
            }
          }
        } else if (BITS == 8) {
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
              sum[m] = i_end4(sum[m], start_of(FORMAT, x + m, half));
        }
        const vec scale = scale_at(FORMAT, w, block * HALVES + half, d);
        UNROLL for (int m = 0; m < M; m++)
            acc[m] = v_fma(i_float(sum[m]), v_mul(scale, v_all(x[m].scale)), acc[m]);
        if (has_minimum(FORMAT)) {
          const vec minimum = minimum_at(FORMAT, w, block * HALVES + half, dmin);
          UNROLL for (int m = 0; m < M; m++)
              acc[m] = v_fma(minimum, v_all(HALVES == 2 ? x[m].half_sum[half] : x[m].sum), acc[m]);
        }
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
#define DEFINE_QUANT(_, M)                                                                                            \
  static void quant_##M(QUANT_ARGS) {                                                                                  \
    tile_quant(M, PRODUCT, w, units, x, stride, parked, first, last, lanes, bias, out, ldo, add, ahead);               \
  }
#define QUANT_ENTRY(_, M) [M] = quant_##M,
#ifdef __AVX512F__
#define FOR_MANY(DO) DO(, 1) DO(, 2) DO(, 3) DO(, 4) DO(, 5) DO(, 6) DO(, 7) DO(, 8)
#else
#define FOR_MANY(DO) DO(, 1) DO(, 2) DO(, 3) DO(, 4)
#endif
FOR_MANY(DEFINE_QUANT)
static quant_function *const QUANT_TILES[MANY + 1] = {FOR_MANY(QUANT_ENTRY)};

/* Rows [a, b) of w times `rows` rows of x, plus bias (or NULL), to out [rows, ldo], or added to it. a is a multiple of
 * TILE. `next` is what this thread will read after row b: it is prefetched. */
static void linear_quant(const Matrix *w, int64_t a, int64_t b, const Block *x, int64_t rows, const float *bias,
                         float *out, int64_t ldo, int add, const void *next) {
  vec parked[TILES * MANY];
  const int64_t format = PRODUCT, stride = block_stride(rows), tile_bytes = TILE * w->row_bytes;
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
          QUANT_TILES[size](from, count, x + u * (unit / 32) * stride + m0, stride,
                            parked + (r - r0) / TILE * MANY, u == 0, u + count == units,
                            first_lanes(r1 - r), bias ? bias + r : 0, out + m0 * ldo + r, ldo, add, ahead);
        }
      }
    }
  }
}

#endif
