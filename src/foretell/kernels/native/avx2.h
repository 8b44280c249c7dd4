/* Halves of a vec (floats8) and of ints (ints8) in one register of AVX2, with FMA: what halves.h and ints.h are made of. */
#ifndef FORETELL_AVX2_H
#define FORETELL_AVX2_H

typedef __m256 floats8; /* 8 floats */
typedef __m256i ints8;  /* 8 int32, or 32 bytes, or 16 bf16 */
typedef __m256i odd_mask;

/* Makes a value here, and keeps it in a register: no load or sum is moved or folded away. */
#define HERE(x) __asm__("" : "+x"(x))
#define HERE_MASK HERE

/* All bits of a lane where its bit is set. */
INLINE __m256i lane_mask(unsigned bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), each), each);
}
INLINE floats8 half_zero(void) { return _mm256_setzero_ps(); }
INLINE floats8 half_all(float x) { return _mm256_set1_ps(x); }
INLINE floats8 half_read(const float *p) { return _mm256_loadu_ps(p); }
INLINE void half_write(float *p, floats8 x) { _mm256_storeu_ps(p, x); }
INLINE floats8 half_read_aligned(const float *p) { return _mm256_load_ps(p); }
INLINE void half_write_aligned(float *p, floats8 x) { _mm256_store_ps(p, x); }
INLINE floats8 half_load_bits(unsigned bits, const float *p) { return _mm256_maskload_ps(p, lane_mask(bits)); }
INLINE floats8 half_add(floats8 a, floats8 b) { return _mm256_add_ps(a, b); }
INLINE floats8 half_sub(floats8 a, floats8 b) { return _mm256_sub_ps(a, b); }
INLINE floats8 half_mul(floats8 a, floats8 b) { return _mm256_mul_ps(a, b); }
INLINE floats8 half_div(floats8 a, floats8 b) { return _mm256_div_ps(a, b); }
INLINE floats8 half_max(floats8 a, floats8 b) { return _mm256_max_ps(a, b); }
INLINE floats8 half_min(floats8 a, floats8 b) { return _mm256_min_ps(a, b); }
INLINE floats8 half_fma(floats8 a, floats8 b, floats8 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE floats8 half_fnma(floats8 a, floats8 b, floats8 c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE floats8 half_keep(unsigned bits, floats8 x) { return _mm256_and_ps(x, _mm256_castsi256_ps(lane_mask(bits))); }
INLINE floats8 half_choose(unsigned bits, floats8 a, floats8 b) {
  return _mm256_blendv_ps(a, b, _mm256_castsi256_ps(lane_mask(bits)));
}
INLINE unsigned half_less(floats8 a, floats8 b) { return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE float half_largest(floats8 m) {
  __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  n = _mm_max_ps(n, _mm_movehl_ps(n, n));
  return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
}
INLINE floats8 half_round(floats8 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE floats8 half_scale(floats8 x, floats8 n) { /* n in [-126, 127] */
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
INLINE float half_first(floats8 x) { return _mm256_cvtss_f32(x); }

INLINE floats8 merge4(floats8 a, floats8 b) {
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
INLINE floats8 merge2(floats8 a, floats8 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}
INLINE floats8 merge1(floats8 a, floats8 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}

INLINE floats8 widened8(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
INLINE floats8 half_widen(ints8 x, int high) {
  return high ? widened8(_mm256_extracti128_si256(x, 1)) : widened8(_mm256_castsi256_si128(x));
}
INLINE __m256i narrowed(floats8 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
INLINE ints8 half_narrow(floats8 lo, floats8 hi) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(narrowed(lo), narrowed(hi)), 0xd8);
}
/* To the nearest bf16, of finite numbers. */
INLINE floats8 half_rounded(floats8 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(-65536)));
}
INLINE odd_mask mask_of_odd(void) { return _mm256_set1_epi32(-65536); }
INLINE floats8 half_masked(ints8 x, odd_mask mask) { return _mm256_castsi256_ps(_mm256_and_si256(x, mask)); }
INLINE floats8 half_even(ints8 x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }

/* What attention reads: 8 bf16; the odd or even ones of 16; and 8 vectors of 8 numbers of 32 bits, lane j of vector i to
 * lane i of vector j. */
INLINE floats8 p_of_bf16(const uint16_t *p) { return widened8(_mm_loadu_si128((const __m128i *)p)); }
INLINE floats8 p_odd(floats8 x) { return _mm256_and_ps(x, _mm256_castsi256_ps(mask_of_odd())); }
INLINE floats8 p_even(floats8 x) { return half_even(_mm256_castps_si256(x)); }
INLINE void half_turn(floats8 *v) {
  floats8 a[8], b[8];
  UNROLL for (int i = 0; i < 4; i++) { /* two numbers of two vectors each, then four of four */
    a[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20), a[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
  }
  UNROLL for (int h = 0; h < 8; h += 4) {
    UNROLL for (int i = 0; i < 4; i += 2) {
      b[h + i] = _mm256_unpacklo_ps(a[h + i], a[h + i + 1]), b[h + i + 1] = _mm256_unpackhi_ps(a[h + i], a[h + i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
      v[h + 2 * i] = _mm256_shuffle_ps(b[h + i], b[h + i + 2], 0x44);
      v[h + 2 * i + 1] = _mm256_shuffle_ps(b[h + i], b[h + i + 2], 0xee);
    }
  }
}

/* acc + a * b. In assembly: gcc would move accumulators about, and some out of registers. */
INLINE floats8 fma_here(floats8 acc, floats8 a, floats8 b) {
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
  return acc;
}
INLINE floats8 fma_from(floats8 acc, floats8 a, const float *b) {
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "m"(*(const __m256 *)b));
  return acc;
}

/* For ints.h. */
INLINE ints8 int_zero(void) { return _mm256_setzero_si256(); }
INLINE ints8 int_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void int_store(void *p, ints8 x) { _mm256_storeu_si256((__m256i *)p, x); }
INLINE ints8 int_all(int32_t x) { return _mm256_set1_epi32(x); }
INLINE ints8 int_and(ints8 a, ints8 b) { return _mm256_and_si256(a, b); }
INLINE ints8 int_or(ints8 a, ints8 b) { return _mm256_or_si256(a, b); }
INLINE ints8 int_low4(ints8 x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE ints8 int_high4(ints8 x) { return int_low4(_mm256_srli_epi16(x, 4)); }
INLINE ints8 int_two(ints8 x, int n) { return _mm256_and_si256(_mm256_srli_epi16(x, 2 * n), _mm256_set1_epi8(3)); }
INLINE ints8 int_one(ints8 x, int n) {
  return _mm256_and_si256(n < 2 ? _mm256_slli_epi16(x, 2 - n) : _mm256_srli_epi16(x, n - 2), _mm256_set1_epi8(4));
}
INLINE ints8 int_table(const uint8_t *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
INLINE ints8 int_look(ints8 table, ints8 x) { return _mm256_shuffle_epi8(table, x); }
INLINE ints8 int_right(ints8 x, int n) { return _mm256_srai_epi32(x, n); }
INLINE floats8 int_float(ints8 x) { return _mm256_cvtepi32_ps(x); }
INLINE ints8 int_round(floats8 x) { return _mm256_cvtps_epi32(x); }
INLINE ints8 int_add(ints8 a, ints8 b) { return _mm256_add_epi32(a, b); }
INLINE int32_t int_sum(ints8 y) {
  __m128i z = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
  z = _mm_add_epi32(z, _mm_shuffle_epi32(z, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(z, _mm_shuffle_epi32(z, 0xb1)));
}
INLINE void int_store_bytes(int8_t *p, ints8 lo, ints8 hi) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i *)p, bytes);
}
INLINE floats8 half_float16(const char *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE ints8 int_int8(const char *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE ints8 int_uint8(const char *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE floats8 half_power(ints8 x) {
  const __m256i one = _mm256_set1_epi32(1), bits = _mm256_slli_epi32(_mm256_sub_epi32(x, one), 23);
  const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), x);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(tiny, bits, _mm256_cmpgt_epi32(x, one)));
}
INLINE ints8 int_size(floats8 x) { return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)); }
INLINE ints8 int_max(ints8 a, ints8 b) { return _mm256_max_epi32(a, b); }
INLINE int32_t int_largest(ints8 m) {
  __m128i n = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  n = _mm_max_epi32(n, _mm_shuffle_epi32(n, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(n, _mm_shuffle_epi32(n, 0xb1)));
}
#ifdef __AVXVNNI__
#define DOTS_OF_32
#define BACK128
INLINE ints8 int_dot_small(ints8 acc, ints8 c, ints8 a) { return _mm256_dpbusd_avx_epi32(acc, c, a); }
INLINE ints8 int_dot_byte(ints8 acc, ints8 c, ints8 a) { return int_dot_small(acc, c, a); }
#else
INLINE ints8 int_pairs(ints8 c, ints8 a) { return _mm256_maddubs_epi16(c, a); }
INLINE ints8 int_join(ints8 start, ints8 x) {
  return _mm256_add_epi32(start, _mm256_madd_epi16(x, _mm256_set1_epi16(1)));
}
/* A sum that is made here: gcc would make all products first, put them into memory and add them up by a tree. */
INLINE ints8 int_add16(ints8 a, ints8 b) {
  ints8 sum = _mm256_add_epi16(a, b);
  HERE(sum);
  return sum;
}
INLINE ints8 int_dot_small(ints8 acc, ints8 c, ints8 a) {
  acc = int_join(acc, int_pairs(c, a));
  HERE(acc);
  return acc;
}
/* Two products of 8 bits by 8 do not fit in 16, but |c| times a with the sign of c does. */
INLINE ints8 int_dot_byte(ints8 acc, ints8 c, ints8 a) {
  const __m256i code = _mm256_xor_si256(c, _mm256_set1_epi8(-128));
  return int_dot_small(acc, _mm256_abs_epi8(code), _mm256_sign_epi8(a, code));
}
#endif

#endif
