/* Vectors of 16 floats in one register of AVX-512 (F, BW, DQ, VL; bf16 products by AVX512_BF16 where there is). */
#ifndef FORETELL_AVX512_H
#define FORETELL_AVX512_H

typedef __m512 vec;      /* 16 floats */
typedef __m256i bf16x16; /* 16 bf16 */
typedef __m512i bf16x32; /* 32 bf16 */
typedef __mmask16 Lanes; /* bit i: lane i takes part */

/* Makes a value here, and keeps it in a register: no load is folded away. */
#define HERE(x) __asm__("" : "+v"(x))

INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
INLINE vec v_all(float x) { return _mm512_set1_ps(x); }
INLINE vec v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE vec v_load_some(Lanes lanes, const float *p) { return _mm512_maskz_loadu_ps(lanes, p); }
INLINE void v_store_some(float *p, Lanes lanes, vec x) { _mm512_mask_storeu_ps(p, lanes, x); }
INLINE vec v_keep(Lanes lanes, vec x) { return _mm512_maskz_mov_ps(lanes, x); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec v_max_some(Lanes lanes, vec a, vec b) { return _mm512_mask_max_ps(a, lanes, a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec v_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE Lanes v_less(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE float v_largest(vec x) { return _mm512_reduce_max_ps(x); }
INLINE vec v_round(vec x) { return _mm512_roundscale_ps(x, 0); }
INLINE vec v_scale(vec x, vec n) { return _mm512_scalef_ps(x, n); }

/* Each merge adds, for two vectors at once, lanes i and i + 8 (then 4, 2, 1): four of them sum 16 vectors by one tree. */
INLINE vec merge8(vec a, vec b) {
  return v_add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
INLINE vec merge4(vec a, vec b) {
  return v_add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
INLINE vec merge2(vec a, vec b) {
  return v_add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}
INLINE vec merge1(vec a, vec b) {
  return v_add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
INLINE vec sums16(const vec *v) {
  vec a[8];
#define TRANSPOSED(s) (4 * ((s) % 4) + (s) / 4) /* where the merges will put vector s */
  UNROLL for (int i = 0; i < 8; i++) a[i] = merge8(v[TRANSPOSED(2 * i)], v[TRANSPOSED(2 * i + 1)]);
  UNROLL for (int i = 0; i < 4; i++) a[i] = merge4(a[2 * i], a[2 * i + 1]);
  return merge1(merge2(a[0], a[1]), merge2(a[2], a[3]));
}
INLINE vec sums8(const vec *v) {
  vec a[4];
  UNROLL for (int i = 0; i < 4; i++) a[i] = merge8(v[i], v[i + 4]);
  UNROLL for (int i = 0; i < 4; i++) a[i] = merge4(a[i], a[i]);
  return merge1(merge2(a[0], a[1]), merge2(a[2], a[3]));
}
INLINE float sum1(vec v) {
  v = merge8(v, v), v = merge4(v, v), v = merge2(v, v);
  return _mm512_cvtss_f32(merge1(v, v));
}

INLINE vec widen(bf16x16 x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE bf16x16 narrow(vec x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  Lanes nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}
/* To the nearest bf16, of finite numbers. */
INLINE vec round_bf16(vec x) {
#ifdef __AVX512BF16__
  return widen((bf16x16)_mm512_cvtneps_pbh(x));
#else
  return widen(narrow(x));
#endif
}
INLINE bf16x16 h_load_some(Lanes lanes, const bf16 *p) { return _mm256_maskz_loadu_epi16(lanes, p); }
INLINE void h_store_some(bf16 *p, Lanes lanes, bf16x16 x) { _mm256_mask_storeu_epi16(p, lanes, x); }

INLINE bf16x32 v_load_bf16(const bf16 *p, int64_t n) {
  return _mm512_maskz_loadu_epi16(n >= 32 ? 0xffffffffu : (uint32_t)((UINT64_C(1) << n) - 1), p);
}
INLINE vec odd_floats(bf16x32 x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536))); }
INLINE vec even_floats(bf16x32 x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
INLINE vec v_dot_bf16(vec acc, bf16x32 a, bf16x32 b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  return v_fma(even_floats(a), even_floats(b), v_fma(odd_floats(a), odd_floats(b), acc));
#endif
}

/* What tiles work in: parts of a vec (here the whole), so that accumulators fill the registers. */
typedef vec part;
enum { PARTS = 1, SCORES = 16, HELD = 24, CHAINED = 3, ABREAST = 2, AT_ONCE = 4, FEW_QUERIES = 4 /* of attention: see slots.h */ };
enum { GROUP = 10, EACH = 8 /* activation rows of one tile at most, and where one is not enough */ };
INLINE vec join(const part *parts) { return parts[0]; }
INLINE part p_zero(void) { return v_zero(); }
INLINE part p_fma(part a, part b, part c) { return v_fma(a, b, c); }
INLINE part p_fma_here(part acc, part a, part b) { return v_fma(a, b, acc); }
INLINE part p_load(const float *p) { return v_load(p); }
INLINE part p_tail(const float *p, int64_t n) { return v_load_some((Lanes)((1u << n) - 1), p); }
INLINE void p_store(float *p, part x) { v_store(p, x); }
INLINE part p_all(float x) { return v_all(x); }
INLINE part p_of_bf16(const bf16 *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }
INLINE part p_add(part a, part b) { return v_add(a, b); }
INLINE part p_odd(part x) { return odd_floats((bf16x32)x); }
INLINE part p_even(part x) { return even_floats((bf16x32)x); }
/* Words [d, d + 8) of 16 keys: word i of all to vector i. Halves are put together as they are read, which spares shuffles. */
INLINE void p_turn(const char *const *keys, int64_t d, part *v) {
  part a[8], b[8];
#define HALF(i) _mm256_loadu_ps((const float *)keys[i] + d)
  UNROLL for (int i = 0; i < 8; i++)
    a[i] = _mm512_insertf32x8(_mm512_castps256_ps512(HALF(i / 4 * 8 + i % 4)), HALF(i / 4 * 8 + i % 4 + 4), 1);
#undef HALF
  UNROLL for (int i = 0; i < 8; i += 2) b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  UNROLL for (int i = 0; i < 8; i += 4) { /* lanes of four keys: words j, j + 4 of the first, and of the next four */
    UNROLL for (int h = 0; h < 2; h++) {
      a[i + 2 * h] = (part)_mm512_unpacklo_pd((__m512d)b[i + h], (__m512d)b[i + h + 2]);
      a[i + 2 * h + 1] = (part)_mm512_unpackhi_pd((__m512d)b[i + h], (__m512d)b[i + h + 2]);
    }
  }
  UNROLL for (int j = 0; j < 4; j++)
    v[j] = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), v[4 + j] = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);
}
#ifdef __AVX512BF16__
enum { PAIRED = 1 }; /* products of bf16 take two numbers at a time, the second first */
INLINE part p_dot(part acc, part a, part b) { return v_dot_bf16(acc, (bf16x32)a, (bf16x32)b); }
INLINE bf16x16 half_of(vec x) { return (bf16x16)_mm512_cvtneps_pbh(x); } /* to the nearest bf16, of finite numbers */
/* 16 numbers of a, each with that of b behind it. */
INLINE part p_pairs(const bf16 *a, const bf16 *b) {
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)a));
  return (part)_mm512_permutex2var_epi16(x, order, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)b)));
}
enum { PHASES = 1 };
INLINE part p_load_bf16(const bf16 *p, int phase) { (void)phase; return (part)_mm512_loadu_si512(p); }
INLINE part p_tail_bf16(const bf16 *p, int64_t n, int phase) { (void)phase; return (part)v_load_bf16(p, n); }
INLINE part p_fma_bf16(part a, part b, part c) { return v_dot_bf16(c, (bf16x32)a, (bf16x32)b); }
#else
enum { PHASES = 2 }; /* products of odd elements, then of even ones: what AVX512_BF16 does */
INLINE part p_load_bf16(const bf16 *p, int phase) {
  const bf16x32 x = _mm512_loadu_si512(p);
  return phase ? even_floats(x) : odd_floats(x);
}
INLINE part p_tail_bf16(const bf16 *p, int64_t n, int phase) {
  const bf16x32 x = v_load_bf16(p, n);
  return phase ? even_floats(x) : odd_floats(x);
}
INLINE part p_fma_bf16(part a, part b, part c) { return v_fma(a, b, c); }
#endif

enum { BLOCK = 24 /* weight rows that share a pass over the activations; every R but 8 divides its half too */ };
enum { INPUT_BYTES = 0 };

/* Tiles of M activation rows by R weight rows: R * M accumulators, R weights and an activation fill 32 registers. */
#define FOR_TILES(DO, T) DO(T, 1, 8) DO(T, 2, 8) DO(T, 3, 6) DO(T, 4, 6) DO(T, 5, 4) DO(T, 6, 4) DO(T, 7, 3) DO(T, 8, 3) \
  DO(T, 9, 2) DO(T, 10, 2)
#define FOR_SINGLES(DO, T) DO(T, 1, 1) DO(T, 2, 1) DO(T, 3, 1) DO(T, 4, 1) DO(T, 5, 1) DO(T, 6, 1) DO(T, 7, 1) DO(T, 8, 1) \
  DO(T, 9, 1) DO(T, 10, 1)

#endif
