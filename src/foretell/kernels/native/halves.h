/* Vectors of 16 floats in two halves, those of avx2.h or neon.h: every sum has the order, hence the bits, of avx512.h. */
#ifndef FORETELL_HALVES_H
#define FORETELL_HALVES_H

typedef struct { floats8 lo, hi; } vec;   /* 16 floats */
typedef ints8 bf16x16;                    /* 16 bf16 */
typedef struct { ints8 lo, hi; } bf16x32; /* 32 bf16 */
typedef uint16_t Lanes;                   /* bit i: lane i takes part */

#define HALVES(expression_lo, expression_hi) ((vec){expression_lo, expression_hi})
INLINE vec v_zero(void) { return HALVES(half_zero(), half_zero()); }
INLINE vec v_all(float x) { return HALVES(half_all(x), half_all(x)); }
INLINE vec v_load(const float *p) { return HALVES(half_read(p), half_read(p + 8)); }
INLINE void v_store(float *p, vec x) { half_write(p, x.lo), half_write(p + 8, x.hi); }
INLINE floats8 half_load(unsigned bits, const float *p) {
  return bits == 0xff ? half_read(p) : bits ? half_load_bits(bits, p) : half_zero();
}
INLINE void half_store(float *p, unsigned bits, floats8 x) {
  if (bits == 0xff) {
    half_write(p, x);
    return;
  }
  float held[8]; /* masked stores take dozens of cycles on some CPUs */
  half_write(held, x);
  for (int i = 0; i < 8; i++)
    if (bits >> i & 1) p[i] = held[i];
}
INLINE vec v_load_some(Lanes lanes, const float *p) {
  return HALVES(half_load(lanes & 0xff, p), half_load(lanes >> 8, p + 8));
}
INLINE void v_store_some(float *p, Lanes lanes, vec x) {
  half_store(p, lanes & 0xff, x.lo), half_store(p + 8, lanes >> 8, x.hi);
}
#define TWO(NAME) INLINE vec v_##NAME(vec a, vec b) { return HALVES(half_##NAME(a.lo, b.lo), half_##NAME(a.hi, b.hi)); }
#define THREE(NAME)                                                                                                    \
  INLINE vec v_##NAME(vec a, vec b, vec c) { return HALVES(half_##NAME(a.lo, b.lo, c.lo), half_##NAME(a.hi, b.hi, c.hi)); }
TWO(add) TWO(sub) TWO(mul) TWO(div) TWO(max) TWO(min) TWO(scale) THREE(fma) THREE(fnma)
INLINE vec v_round(vec x) { return HALVES(half_round(x.lo), half_round(x.hi)); }
INLINE vec v_keep(Lanes lanes, vec x) { return HALVES(half_keep(lanes & 0xff, x.lo), half_keep(lanes >> 8, x.hi)); }
INLINE vec v_max_some(Lanes lanes, vec a, vec b) {
  const vec most = v_max(a, b);
  return HALVES(half_choose(lanes & 0xff, a.lo, most.lo), half_choose(lanes >> 8, a.hi, most.hi));
}
INLINE Lanes v_less(vec a, vec b) { return (Lanes)(half_less(a.lo, b.lo) | half_less(a.hi, b.hi) << 8); }
INLINE float v_largest(vec x) { return half_largest(half_max(x.lo, x.hi)); }

/* The tree of avx512.h: lanes i and i + 8, then 4, 2, 1. */
INLINE floats8 merge8(vec a) { return half_add(a.lo, a.hi); }
INLINE floats8 tree8(const floats8 *v) { /* of vectors whose lanes i and i + 8 have been added */
  floats8 a[4];
  UNROLL for (int i = 0; i < 4; i++) a[i] = merge4(v[i], v[i + 4]);
  return merge1(merge2(a[0], a[1]), merge2(a[2], a[3]));
}
INLINE floats8 half_sums(const vec *v) {
  floats8 a[8];
  UNROLL for (int i = 0; i < 8; i++) a[i] = merge8(v[i]);
  return tree8(a);
}
INLINE vec sums16(const vec *v) { return HALVES(half_sums(v), half_sums(v + 8)); }
INLINE vec sums8(const vec *v) { return HALVES(half_sums(v), half_zero()); }
INLINE float sum1(vec v) {
  const floats8 a = merge8(v), b = merge4(a, a), c = merge2(b, b);
  return half_first(merge1(c, c));
}

INLINE vec widen(bf16x16 x) { return HALVES(half_widen(x, 0), half_widen(x, 1)); }
INLINE vec round_bf16(vec x) { return HALVES(half_rounded(x.lo), half_rounded(x.hi)); }
INLINE bf16x16 narrow(vec x) { return half_narrow(x.lo, x.hi); }
/* Some lanes here are always the first ones. */
INLINE bf16x16 h_load_some(Lanes lanes, const bf16 *p) {
  if (lanes == 0xffff) return int_load(p);
  bf16 held[16] = {0};
  memcpy(held, p, (size_t)__builtin_popcount(lanes) * sizeof(bf16));
  return int_load(held);
}
INLINE void h_store_some(bf16 *p, Lanes lanes, bf16x16 x) {
  if (lanes == 0xffff) {
    int_store(p, x);
    return;
  }
  bf16 held[16];
  int_store(held, x);
  memcpy(p, held, (size_t)__builtin_popcount(lanes) * sizeof(bf16));
}

INLINE bf16x32 v_load_bf16(const bf16 *p, int64_t n) {
  const int64_t lo = MIN(n, 16), hi = MIN(n - lo, 16);
  return (bf16x32){h_load_some((Lanes)((1u << lo) - 1), p), h_load_some((Lanes)((1u << hi) - 1), p + lo)};
}
INLINE floats8 half_odd(ints8 x) { return half_masked(x, mask_of_odd()); }
INLINE vec odd_floats(bf16x32 x) { return HALVES(half_odd(x.lo), half_odd(x.hi)); }
INLINE vec even_floats(bf16x32 x) { return HALVES(half_even(x.lo), half_even(x.hi)); }
INLINE vec v_dot_bf16(vec acc, bf16x32 a, bf16x32 b) { /* odd elements first, as AVX512_BF16 does */
  return v_fma(even_floats(a), even_floats(b), v_fma(odd_floats(a), odd_floats(b), acc));
}

/* What tiles work in: one half of a vec after the other, so that more accumulators fit: 16 halves are all registers, of NEON
 * too. */
typedef floats8 part;
enum { PARTS = 2, GROUP = 6, EACH = 6 /* activation rows of one tile at most */ };
enum { SCORES = 4, HELD = 6, CHAINED = 3, ABREAST = 1, AT_ONCE = 2, FEW_QUERIES = 7 /* of attention: see slots.h */ };
INLINE vec join(const part *parts) { return HALVES(parts[0], parts[1]); }
INLINE part p_zero(void) { return half_zero(); }
INLINE part p_fma(part a, part b, part c) { return half_fma(a, b, c); }
INLINE part p_fma_here(part acc, part a, part b) { return fma_here(acc, a, b); }
INLINE part p_load(const float *p) { return half_read(p); }
INLINE part p_tail(const float *p, int64_t n) { return half_load((1u << n) - 1, p); }
INLINE void p_store(float *p, part x) { half_write(p, x); }
INLINE part p_all(float x) { return half_all(x); }
INLINE part p_add(part a, part b) { return half_add(a, b); }
/* Words [d, d + 8) of 8 keys: word i of all to vector i. */
INLINE void p_turn(const char *const *keys, int64_t d, part *v) {
  UNROLL for (int i = 0; i < 8; i++) v[i] = half_read((const float *)keys[i] + d);
  half_turn(v);
}
enum { INPUT_BYTES = 24576 /* of activations and of a tile's weights, which both stay in L1 */ };
enum { BLOCK = 48 /* weight rows that share a pass over the activations */ };

/* Tiles of M activation rows by R weight rows: R * M accumulators, the fewer of both and one of the other fill 16
 * registers. */
#define FOR_TILES(DO, T) DO(T, 1, 8) DO(T, 2, 6) DO(T, 3, 4) DO(T, 4, 3) DO(T, 5, 2) DO(T, 6, 2)
#define FOR_SINGLES(DO, T) DO(T, 1, 1) DO(T, 2, 1) DO(T, 3, 1) DO(T, 4, 1) DO(T, 5, 1) DO(T, 6, 1)

#endif
