/* Vectors of 16 int32, or of 64 bytes (ints), and what they have to do with floats: two implementations, the same bits.
 *
 *  i_load, i_zero, i_all        whole vectors; i_all has the same 4 bytes in all lanes
 *  i_low4, i_high4              of each byte
 *  i_two, i_one, i_or           bits 2 n and 2 n + 1 of each byte; bit n, as 4; either
 *  i_levels, i_look             a table of 16 bytes; its bytes by numbers below 16
 *  i_right                      int32 shifted by n bits, with their sign
 *  i_float, i_round             to float; from float, to the nearest integer, ties to even
 *  i_sum, i_store_int8          of 16 int32; as bytes, cut to [-128, 127]
 *  v_half, v_int8, v_uint8      16 numbers of that type in memory as floats
 *  v_low4, v_high4              halves of 16 bytes; v_power: 2^(byte - 128), subnormal ones too
 *  v_largest_bits               the largest absolute value of both, compared as integers: NaN is larger than all
 *  i_dot_small, i_dot_byte      lane i of acc plus the products of bytes 4 i to 4 i + 3: c without sign, a with sign and not
 *                               -128. small: c is below 128. byte: of any c - 128, where acc began with i_back128
 *  i_begin4, i_dot4, i_end4     start plus eight such products, one after the other, of c below 16
 */
#ifndef FORETELL_INTS_H
#define FORETELL_INTS_H
#include "vectors.h"

#ifdef __AVX512F__

typedef __m512i ints;

INLINE ints i_zero(void) { return _mm512_setzero_si512(); }
INLINE ints i_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE ints i_all(const void *p) {
  int32_t x;
  memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
INLINE ints i_low4(ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE ints i_high4(ints x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
INLINE ints i_two(ints x, int n) { return _mm512_and_si512(_mm512_srli_epi16(x, 2 * n), _mm512_set1_epi8(3)); }
INLINE ints i_one(ints x, int n) {
  return _mm512_and_si512(n < 2 ? _mm512_slli_epi16(x, 2 - n) : _mm512_srli_epi16(x, n - 2), _mm512_set1_epi8(4));
}
INLINE ints i_or(ints a, ints b) { return _mm512_or_si512(a, b); }
INLINE ints i_levels(const uint8_t *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
INLINE ints i_look(ints table, ints x) { return _mm512_shuffle_epi8(table, x); }
INLINE ints i_right(ints x, int n) { return _mm512_srai_epi32(x, n); }
INLINE vec i_float(ints x) { return _mm512_cvtepi32_ps(x); }
INLINE ints i_round(vec x) { return _mm512_cvtps_epi32(x); }
INLINE int32_t i_sum(ints x) { return _mm512_reduce_add_epi32(x); }
INLINE void i_store_int8(int8_t *p, ints x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(x)); }
INLINE vec v_half(const char *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vec v_int8(const char *p) { return i_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE ints i_uint8(const char *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vec v_uint8(const char *p) { return i_float(i_uint8(p)); }
INLINE vec v_low4(const char *p) { return i_float(_mm512_and_si512(i_uint8(p), _mm512_set1_epi32(15))); }
INLINE vec v_high4(const char *p) { return i_float(_mm512_srli_epi32(i_uint8(p), 4)); }
INLINE vec v_power(const char *p) {
  const ints x = i_uint8(p), one = _mm512_set1_epi32(1), bits = _mm512_slli_epi32(_mm512_sub_epi32(x, one), 23);
  const ints tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x200000), x);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(tiny, _mm512_cmpgt_epi32_mask(x, one), bits));
}
INLINE float v_largest_bits(vec a, vec b) {
  const __m512i sign = _mm512_set1_epi32(0x7fffffff);
  const __m512i x = _mm512_and_si512(_mm512_castps_si512(a), sign), y = _mm512_and_si512(_mm512_castps_si512(b), sign);
  const int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(x, y));
  float found;
  memcpy(&found, &bits, 4);
  return found;
}
#ifdef __AVX512VNNI__
INLINE ints i_dot_small(ints acc, ints c, ints a) { return _mm512_dpbusd_epi32(acc, c, a); }
INLINE ints i_dot_byte(ints acc, ints c, ints a) { return _mm512_dpbusd_epi32(acc, c, a); }
INLINE ints i_back128(const int32_t *p) { return i_all(p); }
#else
INLINE ints i_dot_small(ints acc, ints c, ints a) {
  return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(c, a), _mm512_set1_epi16(1)));
}
/* Two products of 8 bits by 8 do not fit in 16, but |c| times a with the sign of c does. */
INLINE ints i_dot_byte(ints acc, ints c, ints a) {
  const ints code = _mm512_xor_si512(c, _mm512_set1_epi8(-128));
  const ints turned = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(code), i_zero(), a);
  return i_dot_small(acc, _mm512_abs_epi8(code), turned);
}
INLINE ints i_back128(const int32_t *p) { return i_zero(); }
#endif
#ifdef __AVX512VNNI__
#define DOTS_OF_32
#else
INLINE ints i_add16(ints a, ints b) { return _mm512_add_epi16(a, b); }
INLINE ints i_pairs(ints c, ints a) { return _mm512_maddubs_epi16(c, a); }
INLINE ints i_join(ints start, ints x) {
  return _mm512_add_epi32(start, _mm512_madd_epi16(x, _mm512_set1_epi16(1)));
}
#endif

#else

typedef struct { ints8 lo, hi; } ints; /* halves of avx2.h or neon.h */

INLINE ints i_zero(void) { return (ints){int_zero(), int_zero()}; }
INLINE ints i_load(const void *p) { return (ints){int_load(p), int_load((const char *)p + 32)}; }
INLINE ints i_all(const void *p) {
  int32_t x;
  memcpy(&x, p, 4);
  return (ints){int_all(x), int_all(x)};
}
INLINE ints i_low4(ints x) { return (ints){int_low4(x.lo), int_low4(x.hi)}; }
INLINE ints i_high4(ints x) { return (ints){int_high4(x.lo), int_high4(x.hi)}; }
INLINE ints i_two(ints x, int n) { return (ints){int_two(x.lo, n), int_two(x.hi, n)}; }
INLINE ints i_one(ints x, int n) { return (ints){int_one(x.lo, n), int_one(x.hi, n)}; }
INLINE ints i_or(ints a, ints b) { return (ints){int_or(a.lo, b.lo), int_or(a.hi, b.hi)}; }
INLINE ints i_levels(const uint8_t *p) {
  const ints8 table = int_table(p);
  return (ints){table, table};
}
INLINE ints i_look(ints table, ints x) { return (ints){int_look(table.lo, x.lo), int_look(table.hi, x.hi)}; }
INLINE ints i_right(ints x, int n) { return (ints){int_right(x.lo, n), int_right(x.hi, n)}; }
INLINE vec i_float(ints x) { return (vec){int_float(x.lo), int_float(x.hi)}; }
INLINE ints i_round(vec x) { return (ints){int_round(x.lo), int_round(x.hi)}; }
INLINE int32_t i_sum(ints x) { return int_sum(int_add(x.lo, x.hi)); }
INLINE void i_store_int8(int8_t *p, ints x) { int_store_bytes(p, x.lo, x.hi); }
INLINE vec v_half(const char *p) { return (vec){half_float16(p), half_float16(p + 16)}; }
INLINE vec v_int8(const char *p) { return i_float((ints){int_int8(p), int_int8(p + 8)}); }
INLINE ints i_uint8(const char *p) { return (ints){int_uint8(p), int_uint8(p + 8)}; }
INLINE vec v_uint8(const char *p) { return i_float(i_uint8(p)); }
INLINE vec v_low4(const char *p) {
  const ints x = i_uint8(p);
  return i_float((ints){int_and(x.lo, int_all(15)), int_and(x.hi, int_all(15))});
}
INLINE vec v_high4(const char *p) { return i_float(i_right(i_uint8(p), 4)); }
INLINE vec v_power(const char *p) {
  const ints x = i_uint8(p);
  return (vec){half_power(x.lo), half_power(x.hi)};
}
INLINE float v_largest_bits(vec a, vec b) {
  const ints8 x = int_max(int_size(a.lo), int_size(a.hi)), y = int_max(int_size(b.lo), int_size(b.hi));
  const int32_t bits = int_largest(int_max(x, y));
  float found;
  memcpy(&found, &bits, 4);
  return found;
}
INLINE ints i_dot_small(ints acc, ints c, ints a) {
  return (ints){int_dot_small(acc.lo, c.lo, a.lo), int_dot_small(acc.hi, c.hi, a.hi)};
}
INLINE ints i_dot_byte(ints acc, ints c, ints a) {
  return (ints){int_dot_byte(acc.lo, c.lo, a.lo), int_dot_byte(acc.hi, c.hi, a.hi)};
}
#ifdef BACK128
INLINE ints i_back128(const int32_t *p) { return i_all(p); }
#else
INLINE ints i_back128(const int32_t *p) { return i_zero(); }
#endif
#ifndef DOTS_OF_32
INLINE ints i_add16(ints a, ints b) { return (ints){int_add16(a.lo, b.lo), int_add16(a.hi, b.hi)}; }
INLINE ints i_pairs(ints c, ints a) { return (ints){int_pairs(c.lo, a.lo), int_pairs(c.hi, a.hi)}; }
INLINE ints i_join(ints start, ints x) { return (ints){int_join(start.lo, x.lo), int_join(start.hi, x.hi)}; }
#endif

#endif

#ifdef DOTS_OF_32
INLINE ints i_begin4(ints start) { return start; }
INLINE ints i_dot4(ints acc, ints c, ints a) { return i_dot_small(acc, c, a); }
INLINE ints i_end4(ints acc, ints start) { return acc; }
#else /* pairs of products are summed in 16 bits: 8 * 2 * 15 * 127 fits */
INLINE ints i_begin4(ints start) { return i_zero(); }
INLINE ints i_dot4(ints acc, ints c, ints a) { return i_add16(acc, i_pairs(c, a)); }
INLINE ints i_end4(ints acc, ints start) { return i_join(start, acc); }
#endif

#endif
