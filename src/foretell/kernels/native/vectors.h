/* Vectors of 16 floats (vec) and of 32 bf16 (bf16x32), as avx512.h implements them, and halves.h over avx2.h or neon.h;
 * only those three name instructions.
 *
 *  v_load, v_store, v_zero, v_all        whole vectors; v_all has one value in all lanes
 *  v_min, v_max                          b where a or b is NaN
 *  v_load_some, v_store_some, v_keep     lanes that take no part are zero, and their memory is neither read nor written
 *  v_add .. v_min, v_fma, v_fnma         a * b + c and c - a * b, rounded once
 *  v_max_some                            the larger of a and b; a in lanes that take no part
 *  v_less                                the lanes in which a < b; no lane where one is NaN
 *  v_round, v_scale                      to the nearest integer, ties to even; x * 2^n for whole n in [-126, 127]
 *  sums16, sums8                         lane i is the sum of the lanes of v[i], by one tree: i + 8, then 4, 2, 1
 *  sum1, v_largest                       of the lanes of one vector; sum1 by the same tree
 *  widen, narrow                         16 bf16 to float; float to bf16, to nearest even as torch rounds
 *  h_load_some, h_store_some             the first lanes of 16 bf16
 *  v_load_bf16                            the first n of 32 bf16, else zero
 *  odd_floats, even_floats, v_dot_bf16   lane i of acc plus the products of elements 2 i + 1, then 2 i, each rounded once
 *
 * Both give the same bits, but for numbers below 2^-126, which AVX512_BF16 takes for zero.
 */
#ifndef FORETELL_VECTORS_H
#define FORETELL_VECTORS_H
#include "common.h"

#ifdef __x86_64__
#include <immintrin.h>

INLINE void prefetch(const char *p) { _mm_prefetch(p, _MM_HINT_T0); }
INLINE void prefetch_l2(const char *p) { _mm_prefetch(p, _MM_HINT_T1); }
INLINE void pause_spin(void) { _mm_pause(); }
INLINE float from_float16(uint16_t x) { return _cvtsh_ss(x); }
INLINE uint16_t to_float16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#endif

#ifdef __AVX512F__
#include "avx512.h"
#else
#ifdef __AVX2__
#include "avx2.h"
#else
#include "neon.h"
#endif
#include "halves.h"
#endif

#ifdef __AVX512F__
INLINE bf16x16 high_half(vec rounded) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded, 16)); }
#else
INLINE bf16x16 high_half(vec rounded) { return narrow(rounded); }
#endif
#ifndef __AVX512BF16__
enum { PAIRED = 0 };
INLINE part p_dot(part acc, part a, part b) { return p_fma(a, b, acc); } /* never called, as is what follows */
INLINE part p_pairs(const bf16 *a, const bf16 *b) {(void)b; return p_of_bf16(a); }
INLINE bf16x16 half_of(vec x) { return narrow(x); }
#endif

INLINE Lanes first_lanes(int64_t n) { return n >= 16 ? 0xffff : (Lanes)((1u << n) - 1); }

/* exp for x <= 88; relative error about 2e-7. NaN of NaN: of a NaN and a number, min and max take the second. */
INLINE vec exp_below(vec x) {
  x = v_max(v_all(-87.0f), x);
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

/* The same for any x: of more than 88 what it is of 88. */
INLINE vec exp16(vec x) { return exp_below(v_min(v_all(88.0f), x)); }

INLINE vec v_select(Lanes lanes, vec a, vec b) { return v_add(v_keep(lanes, a), v_keep((Lanes)~lanes, b)); }

/* tanh, as Cephes has it; relative error about 2e-7. */
INLINE vec tanh16(vec x) {
  const vec size = v_max(x, v_sub(v_zero(), x)), z = v_mul(x, x);
  vec p = v_all(-5.70498872745e-3f);
  p = v_fma(p, z, v_all(2.06390887954e-2f));
  p = v_fma(p, z, v_all(-5.37397155531e-2f));
  p = v_fma(p, z, v_all(1.33314422036e-1f));
  p = v_fma(p, z, v_all(-3.33332819422e-1f));
  const vec near = v_fma(v_mul(p, z), x, x), one = v_all(1.0f);
  vec far = v_sub(one, v_div(v_all(2.0f), v_add(exp16(v_add(size, size)), one)));
  far = v_select(v_less(x, v_zero()), v_sub(v_zero(), far), far);
  return v_select(v_less(size, v_all(0.625f)), near, far);
}

/* Load or store up to 16 values (the first lanes) of the model's type. */
INLINE vec load_as(int is_bf16, const void *p, int64_t i, Lanes lanes) {
  if (is_bf16) return widen(h_load_some(lanes, (const bf16 *)p + i));
  return v_load_some(lanes, (const float *)p + i);
}
INLINE void store_as(int is_bf16, void *p, int64_t i, Lanes lanes, vec x) {
  if (is_bf16) h_store_some((bf16 *)p + i, lanes, narrow(x));
  else v_store_some((float *)p + i, lanes, x);
}

#endif
