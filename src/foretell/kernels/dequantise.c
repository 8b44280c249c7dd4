/* GGUF's quantised blocks to float32 or bfloat16, the operations and their order those of the gguf library, so that the
 * values are equal bit for bit. Compiled with -ffp-contract=off: a fused multiply-add would round once less. */

#include "codebook.h"

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, Q2_K, Q3_K, MXFP4, OF_CODEBOOKS, KINDS = 22 };

static const int VALUES[OF_CODEBOOKS] = {32, 32, 32, 32, 32, 256, 256, 256, 32, 256, 256, 256, 32};
static const int BYTES[KINDS] = {18, 20, 22, 24, 34, 144, 176, 210, 18,  136, 84,
                                 110, 17, 66, 74, 98, 50, 110, 82, 56, 54, 66};
static const int CODEBOOKS[KINDS - OF_CODEBOOKS] = {IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ3_S, IQ2_S, IQ1_M, TQ1_0, TQ2_0};

static const int8_t NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* doubled */

static float half(const uint8_t *at) {
    uint32_t h = at[0] | (uint32_t)at[1] << 8, sign = (h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | fraction << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    } else {
        float tiny = (float)fraction * 0x1p-24f;
        memcpy(&bits, &tiny, 4);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* 32 values of 4 bits, the low halves of 16 bytes first; high: a fifth bit each, or zero. */
static void nibbles(const uint8_t *at, uint32_t high, int *q) {
    for (int i = 0; i < 16; i++) {
        q[i] = (at[i] & 15) | (int)(high >> i & 1) << 4;
        q[i + 16] = at[i] >> 4 | (int)(high >> (i + 16) & 1) << 4;
    }
}

static uint32_t word(const uint8_t *at) { return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24; }

/* The 6-bit scale and minimum of group j of 8, packed into 12 bytes. */
static void scale_min(const uint8_t *at, int j, float *scale, float *min) {
    if (j < 4) {
        *scale = at[j] & 63;
        *min = at[j + 4] & 63;
    } else {
        *scale = (at[j + 4] & 15) | (at[j - 4] >> 2 & 48);
        *min = at[j + 4] >> 4 | (at[j] >> 2 & 48);
    }
}

static void k_block(const uint8_t *at, int five, float *out) {
    float d = half(at), dmin = half(at + 2);
    const uint8_t *scales = at + 4, *high = at + 16, *low = at + (five ? 48 : 16);
    for (int j = 0; j < 8; j++) {
        float scale, min;
        scale_min(scales, j, &scale, &min);
        scale = d * scale;
        min = dmin * min;
        for (int i = 0; i < 32; i++) {
            int q = low[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
            if (five) q |= (high[i] >> j & 1) << 4;
            out[j * 32 + i] = scale * (float)q - min;
        }
    }
}

static void q6_block(const uint8_t *at, float *out) {
    const uint8_t *low = at, *high = at + 128;
    const int8_t *scales = (const int8_t *)at + 192;
    float d = half(at + 208);
    for (int g = 0; g < 16; g++) { /* groups of 16 values with one scale */
        float scale = d * (float)scales[g];
        int whole = g / 8, part = g % 8 / 2;
        for (int i = 0; i < 16; i++) {
            int at_32 = g % 2 * 16 + i;
            int q = low[whole * 64 + part % 2 * 32 + at_32] >> (part / 2 * 4) & 15;
            q |= (high[whole * 32 + at_32] >> (part * 2) & 3) << 4;
            out[g * 16 + i] = scale * (float)(q - 32);
        }
    }
}

/* 32 numbers of levels, the low halves of 16 bytes first. */
static void levels(const int8_t *table, const uint8_t *at, float scale, float *out) {
    for (int i = 0; i < 16; i++) {
        out[i] = scale * (float)table[at[i] & 15];
        out[i + 16] = scale * (float)table[at[i] >> 4];
    }
}

static void iq4_block(const uint8_t *at, float *out) {
    float d = half(at);
    for (int j = 0; j < 8; j++) {
        int scale = (at[4 + j / 2] >> (j % 2 * 4) & 15) + (at[2 + j / 4] >> (j % 4 * 2) & 3) * 16 - 32;
        levels(NL, at + 8 + 16 * j, d * (float)scale, out + 32 * j);
    }
}

/* 2 bits of each value stand alike in both kinds: group g of 16 values, which has one scale. */
static int two_bits(const uint8_t *low, int g, int i) {
    return low[g / 8 * 32 + g % 2 * 16 + i] >> (g % 8 / 2 * 2) & 3;
}

static void q2_block(const uint8_t *at, float *out) {
    float d = half(at + 80), dmin = half(at + 82);
    for (int g = 0; g < 16; g++) {
        float scale = d * (float)(at[g] & 15), min = dmin * (float)(at[g] >> 4);
        for (int i = 0; i < 16; i++) out[g * 16 + i] = scale * (float)two_bits(at + 16, g, i) - min;
    }
}

static void q3_block(const uint8_t *at, float *out) {
    const uint8_t *scales = at + 96;
    float d = half(at + 108);
    for (int g = 0; g < 16; g++) {
        int step = (scales[g % 8] >> (g / 8 * 4) & 15) + (scales[8 + g % 4] >> (g / 4 * 2) & 3) * 16 - 32;
        float scale = d * (float)step;
        for (int i = 0; i < 16; i++) {
            int high = at[g % 2 * 16 + i] >> (g / 2) & 1;
            out[g * 16 + i] = scale * (float)(two_bits(at + 32, g, i) + high * 4 - 4);
        }
    }
}

/* 2^(x - 128): half of E8M0's value, since E2M1's are doubled. */
static float power(uint8_t x) {
    uint32_t bits = x < 2 ? 0x200000u << x : (uint32_t)(x - 1) << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void codebook_block(int kind, const uint8_t *at, const int8_t *grid, float *out) {
    Levels of;
    levels_of_block(kind, at, grid, &of);
    const float d = half((const uint8_t *)&of.d) * codebook_factor(kind);
    for (int k = 0; k < 256; k++) out[k] = d * (float)(2 * of.steps[k / 16] + 1) * (float)of.levels[k];
}

static void block(int kind, const uint8_t *at, float *out) {
    int q[32];
    float d = half(at), m;
    switch (kind) {
    case Q4_0:
        nibbles(at + 2, 0, q);
        for (int i = 0; i < 32; i++) out[i] = d * (float)(q[i] - 8);
        break;
    case Q4_1:
        m = half(at + 2);
        nibbles(at + 4, 0, q);
        for (int i = 0; i < 32; i++) out[i] = d * (float)q[i] + m;
        break;
    case Q5_0:
        nibbles(at + 6, word(at + 2), q);
        for (int i = 0; i < 32; i++) out[i] = d * (float)(q[i] - 16);
        break;
    case Q5_1:
        m = half(at + 2);
        nibbles(at + 8, word(at + 4), q);
        for (int i = 0; i < 32; i++) out[i] = d * (float)q[i] + m;
        break;
    case Q8_0:
        for (int i = 0; i < 32; i++) out[i] = (float)(int8_t)at[2 + i] * d;
        break;
    case Q4_K:
    case Q5_K:
        k_block(at, kind == Q5_K, out);
        break;
    case Q6_K:
        q6_block(at, out);
        break;
    case IQ4_NL:
        levels(NL, at + 2, d, out);
        break;
    case IQ4_XS:
        iq4_block(at, out);
        break;
    case Q2_K:
        q2_block(at, out);
        break;
    case Q3_K:
        q3_block(at, out);
        break;
    default:
        levels(E2M1, at + 1, power(at[0]), out);
    }
}

static uint16_t rounded(float value) { /* to bfloat16, to nearest, ties to even, as torch does */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* count blocks at `in` to values at `out`: float32, or bfloat16 where bf16; grid: see codebook.h. Nonzero for an unknown
 * kind. */
int foretell_dequantise(int kind, int64_t count, const uint8_t *in, const int8_t *grid, void *out, int bf16) {
    if (kind < 0 || kind >= KINDS) return 1;
    int values = kind < OF_CODEBOOKS ? VALUES[kind] : 256;
    for (int64_t b = 0; b < count; b++, in += BYTES[kind]) {
        float whole[256], *to = bf16 ? whole : (float *)out + b * values;
        if (kind < OF_CODEBOOKS) block(kind, in, to);
        else codebook_block(CODEBOOKS[kind - OF_CODEBOOKS], in, grid, to);
        for (int i = 0; bf16 && i < values; i++) ((uint16_t *)out)[b * values + i] = rounded(whole[i]);
    }
    return 0;
}
