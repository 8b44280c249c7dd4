/* Halves of a vec (floats8) and of ints (ints8) in two registers of NEON each: what avx2.h has in one, bit for bit. */
#ifndef FORETELL_NEON_H
#define FORETELL_NEON_H
#include <arm_neon.h>

typedef struct { float32x4_t a, b; } floats8; /* 8 floats */
typedef struct { uint32x4_t a, b; } ints8;    /* 8 int32, or 32 bytes, or 16 bf16 */
typedef uint32x4_t odd_mask;

/* Makes a value here, and keeps it in registers: no load or sum is moved or folded away. */
#define HERE(x) __asm__("" : "+w"((x).a), "+w"((x).b))
#define HERE_MASK(x) __asm__("" : "+w"(x))

INLINE void prefetch(const char *p) { __builtin_prefetch(p, 0, 3); }
INLINE void prefetch_l2(const char *p) { __builtin_prefetch(p, 0, 2); }
INLINE void pause_spin(void) { __asm__ volatile("yield"); }
INLINE float from_float16(uint16_t x) {
  __fp16 y;
  memcpy(&y, &x, 2);
  return y;
}
INLINE uint16_t to_float16(float x) {
  const __fp16 y = (__fp16)x;
  uint16_t bits;
  memcpy(&bits, &y, 2);
  return bits;
}

#define FLOATS(x) vreinterpretq_f32_u32(x)
#define WORDS(x) vreinterpretq_u32_f32(x)

/* All bits of a lane where its bit is set. */
INLINE ints8 lane_mask(unsigned bits) {
  static const uint32_t each[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  const uint32x4_t all = vdupq_n_u32(bits);
  return (ints8){vtstq_u32(all, vld1q_u32(each)), vtstq_u32(all, vld1q_u32(each + 4))};
}
INLINE floats8 half_all(float x) { return (floats8){vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE floats8 half_zero(void) { return half_all(0.0f); }
INLINE floats8 half_read(const float *p) { return (floats8){vld1q_f32(p), vld1q_f32(p + 4)}; }
INLINE void half_write(float *p, floats8 x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b); }
INLINE floats8 half_read_aligned(const float *p) { return half_read(p); }
INLINE void half_write_aligned(float *p, floats8 x) { half_write(p, x); }
INLINE floats8 half_load_bits(unsigned bits, const float *p) { /* NEON has no masked loads */
  float held[8] = {0};
  for (int i = 0; i < 8; i++)
    if (bits >> i & 1) held[i] = p[i];
  return half_read(held);
}
/* Of a NaN and a number the second, as x86 has it: FMAX and FMIN would return NaN. */
INLINE float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
INLINE float32x4_t min4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
#define BY_FOUR(NAME, FUNCTION)                                                                                        \
  INLINE floats8 half_##NAME(floats8 x, floats8 y) { return (floats8){FUNCTION(x.a, y.a), FUNCTION(x.b, y.b)}; }
BY_FOUR(add, vaddq_f32) BY_FOUR(sub, vsubq_f32) BY_FOUR(mul, vmulq_f32) BY_FOUR(div, vdivq_f32)
BY_FOUR(max, max4) BY_FOUR(min, min4)
INLINE floats8 half_fma(floats8 x, floats8 y, floats8 z) {
  return (floats8){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)};
}
INLINE floats8 half_fnma(floats8 x, floats8 y, floats8 z) {
  return (floats8){vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b)};
}
INLINE floats8 half_choose(unsigned bits, floats8 x, floats8 y) {
  const ints8 mask = lane_mask(bits);
  return (floats8){vbslq_f32(mask.a, y.a, x.a), vbslq_f32(mask.b, y.b, x.b)};
}
INLINE floats8 half_keep(unsigned bits, floats8 x) { return half_choose(bits, half_zero(), x); }
INLINE unsigned half_less(floats8 x, floats8 y) {
  static const uint32_t each[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  const uint32x4_t low = vandq_u32(vcltq_f32(x.a, y.a), vld1q_u32(each));
  return vaddvq_u32(vorrq_u32(low, vandq_u32(vcltq_f32(x.b, y.b), vld1q_u32(each + 4))));
}
INLINE float half_largest(floats8 x) { /* by the tree of avx2.h, which settles what NaN gives */
  float32x4_t n = max4(x.a, x.b);
  n = max4(n, vextq_f32(n, n, 2));
  return vgetq_lane_f32(max4(n, vdupq_laneq_f32(n, 1)), 0);
}
INLINE floats8 half_round(floats8 x) { return (floats8){vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
INLINE float32x4_t scale4(float32x4_t x, float32x4_t n) {
  const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
  return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}
BY_FOUR(scale, scale4) /* n in [-126, 127] */
INLINE float half_first(floats8 x) { return vgetq_lane_f32(x.a, 0); }

INLINE floats8 merge4(floats8 x, floats8 y) { return (floats8){vaddq_f32(x.a, x.b), vaddq_f32(y.a, y.b)}; }
INLINE float32x4_t merged2(float32x4_t x, float32x4_t y) {
  const float64x2_t p = vreinterpretq_f64_f32(x), q = vreinterpretq_f64_f32(y);
  return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(p, q)), vreinterpretq_f32_f64(vzip2q_f64(p, q)));
}
INLINE floats8 merge2(floats8 x, floats8 y) { return (floats8){merged2(x.a, y.a), merged2(x.b, y.b)}; }
INLINE floats8 merge1(floats8 x, floats8 y) { return (floats8){vpaddq_f32(x.a, y.a), vpaddq_f32(x.b, y.b)}; }

INLINE floats8 half_widen(ints8 x, int high) {
  const uint16x8_t h = vreinterpretq_u16_u32(high ? x.b : x.a);
  return (floats8){FLOATS(vshll_n_u16(vget_low_u16(h), 16)), FLOATS(vshll_n_u16(vget_high_u16(h), 16))};
}
INLINE uint32x4_t rounding(float32x4_t x) { /* the upper half: to nearest even */
  const uint32x4_t u = WORDS(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  return vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
}
INLINE uint16x4_t narrowed(float32x4_t x) {
  const uint32x4_t rounded = vshrq_n_u32(rounding(x), 16);
  return vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc0)));
}
INLINE ints8 half_narrow(floats8 lo, floats8 hi) {
  return (ints8){vreinterpretq_u32_u16(vcombine_u16(narrowed(lo.a), narrowed(lo.b))),
                 vreinterpretq_u32_u16(vcombine_u16(narrowed(hi.a), narrowed(hi.b)))};
}
/* What attention reads: see avx2.h. */
INLINE floats8 p_of_bf16(const uint16_t *p) { return half_widen((ints8){vreinterpretq_u32_u16(vld1q_u16(p)), vdupq_n_u32(0)}, 0); }
INLINE floats8 p_odd(floats8 x) {
  const uint32x4_t odd = vdupq_n_u32(0xffff0000u);
  return (floats8){FLOATS(vandq_u32(WORDS(x.a), odd)), FLOATS(vandq_u32(WORDS(x.b), odd))};
}
INLINE floats8 p_even(floats8 x) { return (floats8){FLOATS(vshlq_n_u32(WORDS(x.a), 16)), FLOATS(vshlq_n_u32(WORDS(x.b), 16))}; }
INLINE void turn4(float32x4_t *v) {
  const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(v[0], v[1])), b = vreinterpretq_f64_f32(vtrn2q_f32(v[0], v[1]));
  const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(v[2], v[3])), d = vreinterpretq_f64_f32(vtrn2q_f32(v[2], v[3]));
  v[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c)), v[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
  v[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d)), v[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}
INLINE void half_turn(floats8 *v) {
  float32x4_t q[4][4]; /* quarters: the first and the last four numbers, of the first and the last four vectors */
  UNROLL for (int i = 0; i < 4; i++) q[0][i] = v[i].a, q[1][i] = v[i].b, q[2][i] = v[i + 4].a, q[3][i] = v[i + 4].b;
  UNROLL for (int i = 0; i < 4; i++) turn4(q[i]);
  UNROLL for (int i = 0; i < 4; i++) v[i] = (floats8){q[0][i], q[2][i]}, v[i + 4] = (floats8){q[1][i], q[3][i]};
}
INLINE float32x4_t rounded4(float32x4_t x) { return FLOATS(vandq_u32(rounding(x), vdupq_n_u32(0xffff0000u))); }
INLINE floats8 half_rounded(floats8 x) { return (floats8){rounded4(x.a), rounded4(x.b)}; }
INLINE odd_mask mask_of_odd(void) { return vdupq_n_u32(0xffff0000u); }
INLINE floats8 half_masked(ints8 x, odd_mask mask) {
  return (floats8){FLOATS(vandq_u32(x.a, mask)), FLOATS(vandq_u32(x.b, mask))};
}
INLINE floats8 half_even(ints8 x) { return (floats8){FLOATS(vshlq_n_u32(x.a, 16)), FLOATS(vshlq_n_u32(x.b, 16))}; }

INLINE floats8 fma_here(floats8 acc, floats8 x, floats8 y) { return half_fma(x, y, acc); }
INLINE floats8 fma_from(floats8 acc, floats8 x, const float *y) { return half_fma(x, half_read(y), acc); }

/* For ints.h. */
#define BYTES(x) vreinterpretq_u8_u32(x)
#define SIGNED(x) vreinterpretq_s32_u32(x)
#define OF_BYTES(x) vreinterpretq_u32_u8(x)
#define OF_SIGNED(x) vreinterpretq_u32_s32(x)
INLINE ints8 int_all(int32_t x) { return (ints8){vdupq_n_u32((uint32_t)x), vdupq_n_u32((uint32_t)x)}; }
INLINE ints8 int_zero(void) { return int_all(0); }
INLINE ints8 int_load(const void *p) {
  return (ints8){OF_BYTES(vld1q_u8((const uint8_t *)p)), OF_BYTES(vld1q_u8((const uint8_t *)p + 16))};
}
INLINE void int_store(void *p, ints8 x) { vst1q_u8((uint8_t *)p, BYTES(x.a)), vst1q_u8((uint8_t *)p + 16, BYTES(x.b)); }
INLINE ints8 int_and(ints8 x, ints8 y) { return (ints8){vandq_u32(x.a, y.a), vandq_u32(x.b, y.b)}; }
INLINE ints8 int_or(ints8 x, ints8 y) { return (ints8){vorrq_u32(x.a, y.a), vorrq_u32(x.b, y.b)}; }
/* Each byte shifted right by n (to the left below 0), of which the bits of `mask` are kept. */
INLINE uint32x4_t shifted(uint32x4_t x, int n, uint8_t mask) {
  return OF_BYTES(vandq_u8(vshlq_u8(BYTES(x), vdupq_n_s8((int8_t)-n)), vdupq_n_u8(mask)));
}
INLINE ints8 int_low4(ints8 x) { return int_and(x, int_all(0x0f0f0f0f)); }
INLINE ints8 int_high4(ints8 x) {
  return (ints8){OF_BYTES(vshrq_n_u8(BYTES(x.a), 4)), OF_BYTES(vshrq_n_u8(BYTES(x.b), 4))};
}
INLINE ints8 int_two(ints8 x, int n) { return (ints8){shifted(x.a, 2 * n, 3), shifted(x.b, 2 * n, 3)}; }
INLINE ints8 int_one(ints8 x, int n) { return (ints8){shifted(x.a, n - 2, 4), shifted(x.b, n - 2, 4)}; }
INLINE ints8 int_table(const uint8_t *p) { return (ints8){OF_BYTES(vld1q_u8(p)), OF_BYTES(vld1q_u8(p))}; }
INLINE ints8 int_look(ints8 table, ints8 x) {
  return (ints8){OF_BYTES(vqtbl1q_u8(BYTES(table.a), BYTES(x.a))), OF_BYTES(vqtbl1q_u8(BYTES(table.b), BYTES(x.b)))};
}
INLINE ints8 int_right(ints8 x, int n) {
  const int32x4_t by = vdupq_n_s32(-n);
  return (ints8){OF_SIGNED(vshlq_s32(SIGNED(x.a), by)), OF_SIGNED(vshlq_s32(SIGNED(x.b), by))};
}
INLINE floats8 int_float(ints8 x) { return (floats8){vcvtq_f32_s32(SIGNED(x.a)), vcvtq_f32_s32(SIGNED(x.b))}; }
INLINE ints8 int_round(floats8 x) {
  return (ints8){OF_SIGNED(vcvtnq_s32_f32(x.a)), OF_SIGNED(vcvtnq_s32_f32(x.b))};
}
INLINE ints8 int_add(ints8 x, ints8 y) { return (ints8){vaddq_u32(x.a, y.a), vaddq_u32(x.b, y.b)}; }
INLINE int32_t int_sum(ints8 x) { return (int32_t)vaddvq_u32(vaddq_u32(x.a, x.b)); }
INLINE int16x8_t words(ints8 x) { return vcombine_s16(vqmovn_s32(SIGNED(x.a)), vqmovn_s32(SIGNED(x.b))); }
INLINE void int_store_bytes(int8_t *p, ints8 lo, ints8 hi) {
  vst1q_s8(p, vcombine_s8(vqmovn_s16(words(lo)), vqmovn_s16(words(hi))));
}
INLINE floats8 half_float16(const char *p) {
  const float16x8_t x = vreinterpretq_f16_u8(vld1q_u8((const uint8_t *)p));
  return (floats8){vcvt_f32_f16(vget_low_f16(x)), vcvt_f32_f16(vget_high_f16(x))};
}
INLINE ints8 int_int8(const char *p) {
  const int16x8_t x = vmovl_s8(vld1_s8((const int8_t *)p));
  return (ints8){OF_SIGNED(vmovl_s16(vget_low_s16(x))), OF_SIGNED(vmovl_s16(vget_high_s16(x)))};
}
INLINE ints8 int_uint8(const char *p) {
  const uint16x8_t x = vmovl_u8(vld1_u8((const uint8_t *)p));
  return (ints8){vmovl_u16(vget_low_u16(x)), vmovl_u16(vget_high_u16(x))};
}
INLINE float32x4_t power4(uint32x4_t x) {
  const uint32x4_t bits = vshlq_n_u32(vsubq_u32(x, vdupq_n_u32(1)), 23);
  const uint32x4_t tiny = vshlq_u32(vdupq_n_u32(0x200000), SIGNED(x)); /* used of 0 and 1 alone */
  return FLOATS(vbslq_u32(vcgtq_u32(x, vdupq_n_u32(1)), bits, tiny));
}
INLINE floats8 half_power(ints8 x) { return (floats8){power4(x.a), power4(x.b)}; }
INLINE ints8 int_size(floats8 x) { return (ints8){WORDS(vabsq_f32(x.a)), WORDS(vabsq_f32(x.b))}; }
INLINE ints8 int_max(ints8 x, ints8 y) { return (ints8){vmaxq_u32(x.a, y.a), vmaxq_u32(x.b, y.b)}; }
INLINE int32_t int_largest(ints8 x) { return (int32_t)vmaxvq_u32(vmaxq_u32(x.a, x.b)); }

#define CODES(x) vreinterpretq_s8_u32(x)
#define BY_CODES(NAME)                                                                                                 \
  INLINE ints8 int_##NAME(ints8 acc, ints8 c, ints8 a) { return (ints8){NAME(acc.a, c.a, a.a), NAME(acc.b, c.b, a.b)}; }
/* Codes below 128 have the same bits with a sign; c ^ 128 is what others stand for. */
INLINE uint32x4_t signed_code(uint32x4_t c) { return OF_BYTES(veorq_u8(BYTES(c), vdupq_n_u8(128))); }
#ifdef __ARM_FEATURE_DOTPROD
#define DOTS_OF_32
#ifdef __ARM_FEATURE_MATMUL_INT8
#define BACK128
INLINE uint32x4_t dot_small(uint32x4_t acc, uint32x4_t c, uint32x4_t a) {
  return OF_SIGNED(vusdotq_s32(SIGNED(acc), BYTES(c), CODES(a)));
}
INLINE uint32x4_t dot_byte(uint32x4_t acc, uint32x4_t c, uint32x4_t a) { return dot_small(acc, c, a); }
#else
INLINE uint32x4_t dot_small(uint32x4_t acc, uint32x4_t c, uint32x4_t a) {
  return OF_SIGNED(vdotq_s32(SIGNED(acc), CODES(c), CODES(a)));
}
INLINE uint32x4_t dot_byte(uint32x4_t acc, uint32x4_t c, uint32x4_t a) { return dot_small(acc, signed_code(c), a); }
#endif
#else
#define WORDS16(x) vreinterpretq_s16_u32(x)
#define OF_WORDS16(x) vreinterpretq_u32_s16(x)
/* Two products, of -128 too, fit in 16 bits. */
INLINE uint32x4_t pairs(uint32x4_t c, uint32x4_t a) {
  const int8x16_t x = CODES(c), y = CODES(a);
  return OF_WORDS16(vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y)));
}
INLINE uint32x4_t joined(uint32x4_t start, uint32x4_t x) { return OF_SIGNED(vpadalq_s16(SIGNED(start), WORDS16(x))); }
INLINE uint32x4_t dot_small(uint32x4_t acc, uint32x4_t c, uint32x4_t a) { return joined(acc, pairs(c, a)); }
INLINE uint32x4_t dot_byte(uint32x4_t acc, uint32x4_t c, uint32x4_t a) { return dot_small(acc, signed_code(c), a); }
INLINE ints8 int_pairs(ints8 c, ints8 a) { return (ints8){pairs(c.a, a.a), pairs(c.b, a.b)}; }
INLINE ints8 int_join(ints8 start, ints8 x) { return (ints8){joined(start.a, x.a), joined(start.b, x.b)}; }
INLINE ints8 int_add16(ints8 x, ints8 y) {
  return (ints8){OF_WORDS16(vaddq_s16(WORDS16(x.a), WORDS16(y.a))), OF_WORDS16(vaddq_s16(WORDS16(x.b), WORDS16(y.b)))};
}
#endif
BY_CODES(dot_small) BY_CODES(dot_byte)

#endif
