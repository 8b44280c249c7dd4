/* Vectors of 16 floats, and of 32 bf16: the only place that names instructions. */
#ifndef FORETOKEN_VECTORS_H
#define FORETOKEN_VECTORS_H
#include "common.h"

typedef __m512 vec;      /* 16 floats */
typedef __m512i bf16x32; /* 32 bf16 */
typedef __mmask16 Lanes; /* bit i: lane i takes part */

INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
INLINE vec v_all(float x) { return _mm512_set1_ps(x); }
INLINE vec v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vec x) { _mm512_storeu_ps(p, x); }
/* Lanes that take no part are zero in what is loaded, and their memory is neither read nor written. */
INLINE vec v_load_some(Lanes lanes, const float *p) { return _mm512_maskz_loadu_ps(lanes, p); }
INLINE void v_store_some(float *p, Lanes lanes, vec x) { _mm512_mask_storeu_ps(p, lanes, x); }
INLINE vec v_keep(Lanes lanes, vec x) { return _mm512_maskz_mov_ps(lanes, x); } /* else zero */
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec v_max_some(Lanes lanes, vec a, vec b) { return _mm512_mask_max_ps(a, lanes, a, b); } /* else a */
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }   /* a * b + c, rounded once */
INLINE vec v_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); } /* c - a * b */
INLINE float v_largest(vec x) { return _mm512_reduce_max_ps(x); }
INLINE vec v_round(vec x) { return _mm512_roundscale_ps(x, 0); }       /* to the nearest integer, ties to even */
INLINE vec v_scale(vec x, vec n) { return _mm512_scalef_ps(x, n); }    /* x * 2^n, n whole */

INLINE void prefetch(const char *p) { _mm_prefetch(p, _MM_HINT_T1); } /* into L2 */
INLINE void pause_spin(void) { _mm_pause(); }

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

/* Lane i of the result is the sum of the lanes of v[i]. */
INLINE vec sums16(const vec *v) {
  vec a[8];
#define TRANSPOSED(s) (4 * ((s) % 4) + (s) / 4) /* where the merges will put vector s */
  UNROLL for (int i = 0; i < 8; i++) a[i] = merge8(v[TRANSPOSED(2 * i)], v[TRANSPOSED(2 * i + 1)]);
  UNROLL for (int i = 0; i < 4; i++) a[i] = merge4(a[2 * i], a[2 * i + 1]);
  return merge1(merge2(a[0], a[1]), merge2(a[2], a[3]));
}
/* The same for 8 vectors, in lanes 0 to 7. */
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

INLINE Lanes first_lanes(int64_t n) { return n >= 16 ? 0xffff : (Lanes)((1u << n) - 1); }

/* exp for x <= 0 or moderate; relative error about 2e-7. */
INLINE vec exp16(vec x) {
  x = v_max(v_min(x, v_all(88.0f)), v_all(-87.0f));
  vec n = v_round(v_mul(x, v_all(1.44269504f)));
  vec r = v_fnma(n, v_all(0.693359375f), x);
  r = v_fnma(n, v_all(-2.12194440e-4f), r);
  vec p = v_all(1.9875691500e-4f);
  p = v_fma(p, r, v_all(1.3981999507e-3f));
  p = v_fma(p, r, v_all(8.3334519073e-3f));
  p = v_fma(p, r, v_all(4.1665795894e-2f));
  p = v_fma(p, r, v_all(1.6666665459e-1f));
  p = v_fma(p, r, v_all(5.0000001201e-1f));
  p = v_fma(v_mul(r, r), p, v_add(r, v_all(1.0f)));
  return v_scale(p, n);
}

INLINE vec widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

/* Round to nearest even, as torch does; written out so that float models need no AVX512_BF16. */
INLINE __m256i narrow(vec x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  Lanes nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}

/* Load or store up to 16 values of the model's type. */
INLINE vec load_as(int is_bf16, const void *p, int64_t i, Lanes lanes) {
  if (is_bf16) return widen(_mm256_maskz_loadu_epi16(lanes, (const bf16 *)p + i));
  return v_load_some(lanes, (const float *)p + i);
}
INLINE void store_as(int is_bf16, void *p, int64_t i, Lanes lanes, vec x) {
  if (is_bf16) _mm256_mask_storeu_epi16((bf16 *)p + i, lanes, narrow(x));
  else v_store_some((float *)p + i, lanes, x);
}

/* 32 bf16, the first n (16 or 32) of them; and lane i of acc plus the products of elements 2 i and 2 i + 1. */
INLINE bf16x32 v_load_bf16(const bf16 *p, int64_t n) {
  return _mm512_maskz_loadu_epi16(n >= 32 ? 0xffffffffu : 0xffffu, p);
}
#ifdef __AVX512BF16__
INLINE vec v_dot_bf16(vec acc, bf16x32 a, bf16x32 b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#else
INLINE vec v_dot_bf16(vec acc, bf16x32 a, bf16x32 b) { return acc; }
#endif

#endif
