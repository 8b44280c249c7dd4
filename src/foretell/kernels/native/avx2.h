/* Vectors of 16 floats in two registers of AVX2, with FMA: every sum has the order, hence the bits, of avx512.h. */
#ifndef FORETELL_AVX2_H
#define FORETELL_AVX2_H

typedef struct { __m256 lo, hi; } vec;      /* 16 floats */
typedef __m256i bf16x16;                    /* 16 bf16 */
typedef struct { __m256i lo, hi; } bf16x32; /* 32 bf16 */
typedef uint16_t Lanes;                     /* bit i: lane i takes part */

#define HALVES(expression_lo, expression_hi) ((vec){expression_lo, expression_hi})
/* All bits of a lane where its bit is set. */
INLINE __m256i lane_mask(unsigned bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), each), each);
}
INLINE vec v_zero(void) { return HALVES(_mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE vec v_all(float x) { return HALVES(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE vec v_load(const float *p) { return HALVES(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void v_store(float *p, vec x) { _mm256_storeu_ps(p, x.lo), _mm256_storeu_ps(p + 8, x.hi); }
INLINE __m256 half_load(unsigned bits, const float *p) {
  return bits == 0xff ? _mm256_loadu_ps(p) : bits ? _mm256_maskload_ps(p, lane_mask(bits)) : _mm256_setzero_ps();
}
INLINE void half_store(float *p, unsigned bits, __m256 x) {
  if (bits == 0xff) {
    _mm256_storeu_ps(p, x);
    return;
  }
  float held[8]; /* masked stores take dozens of cycles on some CPUs */
  _mm256_storeu_ps(held, x);
  for (int i = 0; i < 8; i++)
    if (bits >> i & 1) p[i] = held[i];
}
INLINE vec v_load_some(Lanes lanes, const float *p) {
  return HALVES(half_load(lanes & 0xff, p), half_load(lanes >> 8, p + 8));
}
INLINE void v_store_some(float *p, Lanes lanes, vec x) {
  half_store(p, lanes & 0xff, x.lo), half_store(p + 8, lanes >> 8, x.hi);
}
#define ONE(NAME, FUNCTION) INLINE vec NAME(vec a) { return HALVES(FUNCTION(a.lo), FUNCTION(a.hi)); }
#define TWO(NAME, FUNCTION) INLINE vec NAME(vec a, vec b) { return HALVES(FUNCTION(a.lo, b.lo), FUNCTION(a.hi, b.hi)); }
#define THREE(NAME, FUNCTION)                                                                                          \
  INLINE vec NAME(vec a, vec b, vec c) { return HALVES(FUNCTION(a.lo, b.lo, c.lo), FUNCTION(a.hi, b.hi, c.hi)); }
TWO(v_add, _mm256_add_ps) TWO(v_sub, _mm256_sub_ps) TWO(v_mul, _mm256_mul_ps) TWO(v_div, _mm256_div_ps)
TWO(v_max, _mm256_max_ps) TWO(v_min, _mm256_min_ps) THREE(v_fma, _mm256_fmadd_ps) THREE(v_fnma, _mm256_fnmadd_ps)
INLINE vec v_keep(Lanes lanes, vec x) {
  return HALVES(_mm256_and_ps(x.lo, _mm256_castsi256_ps(lane_mask(lanes & 0xff))),
                _mm256_and_ps(x.hi, _mm256_castsi256_ps(lane_mask(lanes >> 8))));
}
INLINE vec v_max_some(Lanes lanes, vec a, vec b) {
  const vec most = v_max(a, b);
  return HALVES(_mm256_blendv_ps(a.lo, most.lo, _mm256_castsi256_ps(lane_mask(lanes & 0xff))),
                _mm256_blendv_ps(a.hi, most.hi, _mm256_castsi256_ps(lane_mask(lanes >> 8))));
}
INLINE Lanes v_less(vec a, vec b) {
  return (Lanes)(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)) |
                 _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)) << 8);
}
INLINE float v_largest(vec x) {
  const __m256 m = _mm256_max_ps(x.lo, x.hi);
  __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  n = _mm_max_ps(n, _mm_movehl_ps(n, n));
  return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
}
#define ROUND(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
ONE(v_round, ROUND)
INLINE __m256 half_scale(__m256 x, __m256 n) { /* n in [-126, 127] */
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
TWO(v_scale, half_scale)

/* The tree of avx512.h: lanes i and i + 8, then 4, 2, 1. */
INLINE __m256 merge8(vec a) { return _mm256_add_ps(a.lo, a.hi); }
INLINE __m256 merge4(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
INLINE __m256 merge2(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}
INLINE __m256 merge1(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}
INLINE __m256 tree8(const __m256 *v) { /* of vectors whose lanes i and i + 8 have been added */
  __m256 a[4];
  UNROLL for (int i = 0; i < 4; i++) a[i] = merge4(v[i], v[i + 4]);
  return merge1(merge2(a[0], a[1]), merge2(a[2], a[3]));
}
INLINE __m256 half_sums(const vec *v) {
  __m256 a[8];
  UNROLL for (int i = 0; i < 8; i++) a[i] = merge8(v[i]);
  return tree8(a);
}
INLINE vec sums16(const vec *v) { return HALVES(half_sums(v), half_sums(v + 8)); }
INLINE vec sums8(const vec *v) { return HALVES(half_sums(v), _mm256_setzero_ps()); }
INLINE float sum1(vec v) {
  const __m256 a = merge8(v), b = merge4(a, a), c = merge2(b, b);
  return _mm256_cvtss_f32(merge1(c, c));
}

INLINE __m256 half_widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
INLINE vec widen(bf16x16 x) {
  return HALVES(half_widen(_mm256_castsi256_si128(x)), half_widen(_mm256_extracti128_si256(x, 1)));
}
INLINE __m256i half_narrow(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
INLINE bf16x16 narrow(vec x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(half_narrow(x.lo), half_narrow(x.hi)), 0xd8);
}
/* Some lanes here are always the first ones. */
INLINE bf16x16 h_load_some(Lanes lanes, const bf16 *p) {
  if (lanes == 0xffff) return _mm256_loadu_si256((const __m256i *)p);
  bf16 held[16] = {0};
  memcpy(held, p, (size_t)__builtin_popcount(lanes) * sizeof(bf16));
  return _mm256_loadu_si256((const __m256i *)held);
}
INLINE void h_store_some(bf16 *p, Lanes lanes, bf16x16 x) {
  if (lanes == 0xffff) {
    _mm256_storeu_si256((__m256i *)p, x);
    return;
  }
  bf16 held[16];
  _mm256_storeu_si256((__m256i *)held, x);
  memcpy(p, held, (size_t)__builtin_popcount(lanes) * sizeof(bf16));
}

INLINE bf16x32 v_load_bf16(const bf16 *p, int64_t n) {
  const int64_t lo = MIN(n, 16), hi = MIN(n - lo, 16);
  return (bf16x32){h_load_some((Lanes)((1u << lo) - 1), p), h_load_some((Lanes)((1u << hi) - 1), p + lo)};
}
INLINE __m256 half_odd(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(-65536))); }
INLINE __m256 half_even(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
INLINE vec odd_floats(bf16x32 x) { return HALVES(half_odd(x.lo), half_odd(x.hi)); }
INLINE vec even_floats(bf16x32 x) { return HALVES(half_even(x.lo), half_even(x.hi)); }
INLINE vec v_dot_bf16(vec acc, bf16x32 a, bf16x32 b) { /* odd elements first, as AVX512_BF16 does */
  return v_fma(even_floats(a), even_floats(b), v_fma(odd_floats(a), odd_floats(b), acc));
}

/* What tiles work in: one half of a vec after the other, so that more accumulators fit into 16 registers. */
typedef __m256 part;
enum { PARTS = 2, GROUP = 6, EACH = 6 /* activation rows of one tile at most */, SCORES = 4, MIXED = 4 };
INLINE vec join(const part *parts) { return HALVES(parts[0], parts[1]); }
INLINE part p_zero(void) { return _mm256_setzero_ps(); }
INLINE part p_fma(part a, part b, part c) { return _mm256_fmadd_ps(a, b, c); }
INLINE part p_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE part p_tail(const float *p, int64_t n) { return half_load((1u << n) - 1, p); }
enum { INPUT_BYTES = 24576 /* of activations and of a tile's weights, which both stay in L1 */ };
enum { BLOCK = 48 /* weight rows that share a pass over the activations */ };

/* Tiles of M activation rows by R weight rows: R * M accumulators, the fewer of both and one of the other fill 16
 * registers. */
#define FOR_TILES(DO, T) DO(T, 1, 8) DO(T, 2, 6) DO(T, 3, 4) DO(T, 4, 3) DO(T, 5, 2) DO(T, 6, 2)
#define FOR_SINGLES(DO, T) DO(T, 1, 1) DO(T, 2, 1) DO(T, 3, 1) DO(T, 4, 1) DO(T, 5, 1) DO(T, 6, 1)

#endif
