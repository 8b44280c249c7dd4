/* Vectors of 16 int32, or of 64 bytes, and what they have to do with floats. */
#ifndef FORETOKEN_INTS_H
#define FORETOKEN_INTS_H
#include "vectors.h"

typedef __m512i ints;

INLINE ints i_zero(void) { return _mm512_setzero_si512(); }
INLINE ints i_load(const void *p) { return _mm512_loadu_si512(p); }
/* The same 4 bytes in every lane. */
INLINE ints i_all(const void *p) {
  int32_t x;
  memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
INLINE ints i_low4(ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE ints i_high4(ints x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
INLINE vec i_float(ints x) { return _mm512_cvtepi32_ps(x); }
INLINE ints i_round(vec x) { return _mm512_cvtps_epi32(x); } /* ties to even */
INLINE int32_t i_sum(ints x) { return _mm512_reduce_add_epi32(x); }
INLINE void i_store_int8(int8_t *p, ints x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(x)); }

/* 16 values of two bytes, or of one, as floats. */
INLINE vec v_half(const char *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vec v_int8(const char *p) { return i_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE vec v_uint8(const char *p) { return i_float(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }

/* The largest absolute value of both, compared as integers: NaN is larger than all. */
INLINE float v_largest_bits(vec a, vec b) {
  const __m512i sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i x = _mm512_and_si512(_mm512_castps_si512(a), sign), y = _mm512_and_si512(_mm512_castps_si512(b), sign);
  const int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(x, y));
  float found;
  memcpy(&found, &bits, 4);
  return found;
}

/* Lane i of acc plus the products of bytes 4 i to 4 i + 3: c without sign, a with sign, not -128.
 * i_dot_small: c is below 64. i_dot_byte: of any c - 128, where the accumulator began with i_back128. */
#ifdef __AVX512VNNI__
INLINE ints i_dot_small(ints acc, ints c, ints a) { return _mm512_dpbusd_epi32(acc, c, a); }
INLINE ints i_dot_byte(ints acc, ints c, ints a) { return _mm512_dpbusd_epi32(acc, c, a); }
INLINE ints i_back128(const int32_t *p) { return i_all(p); }
#else
INLINE ints i_dot_small(ints acc, ints c, ints a) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(c, a), _mm512_set1_epi16(1)));
}
/* Pairs of products of 8 bits by 8 overflow 16: |c| * (a with the sign of c) fits. */
INLINE ints i_dot_byte(ints acc, ints c, ints a) {
  const ints code = _mm512_xor_si512(c, _mm512_set1_epi8(-128));
  const ints turned = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(code), i_zero(), a);
  return i_dot_small(acc, _mm512_abs_epi8(code), turned);
}
INLINE ints i_back128(const int32_t *p) { return i_zero(); }
#endif

#endif
