/* GGUF's blocks of 256 values in fewer than four bits each that are chosen from a list (a grid) or ternary, by ggml's
 * numbers of their kinds (ggml-common.h). Each becomes small integers, the levels: a value is the block's float16 times
 * FACTOR times (2 step + 1) of its 16 times its level. All of these products are exact in float32, in any order. */
#ifndef FORETELL_CODEBOOK_H
#define FORETELL_CODEBOOK_H
#include <stdint.h>
#include <string.h>

enum {
    IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ3_S = 21, IQ2_S = 22, IQ1_M = 29, TQ1_0 = 34, TQ2_0 = 35
};

typedef struct {
    int8_t levels[256];
    uint8_t steps[16];
    uint16_t d; /* float16 */
} Levels;

static inline float codebook_factor(int64_t kind) {
    return kind == IQ3_XXS ? 0.25f : kind == IQ3_S || kind == TQ1_0 || kind == TQ2_0 ? 1.0f : 0.125f;
}

static inline uint32_t little(const uint8_t *at, int bytes) {
    uint32_t number = 0;
    memcpy(&number, at, (size_t)bytes);
    return number;
}

/* Seven signs; with the eighth their number is even. */
static inline uint32_t eight_signs(uint32_t seven) { return seven | (uint32_t)__builtin_parity(seven) << 7; }

static void ternary_of(int64_t kind, const uint8_t *b, Levels *to) {
    if (kind == TQ2_0) {
        to->d = (uint16_t)little(b + 64, 2);
        for (int k = 0; k < 256; k++) to->levels[k] = (int8_t)((b[k / 128 * 32 + k % 32] >> k / 32 % 4 * 2 & 3) - 1);
        return;
    }
    static const uint8_t powers[5] = {1, 3, 9, 27, 81}; /* a byte is 256 / 243 of five digits in base 3, rounded up */
    int8_t *levels = to->levels;
    to->d = (uint16_t)little(b + 52, 2);
    for (int size = 32; size >= 4; b += size, size = size == 32 ? 16 : size == 16 ? 4 : 0)
        for (int n = 0; n < (size == 4 ? 4 : 5); n++, levels += size)
            for (int i = 0; i < size; i++) levels[i] = (int8_t)(((uint8_t)(b[i] * powers[n]) * 3 >> 8) - 1);
}

/* grid: the kind's list, 8 numbers an entry, of IQ3's four; NULL where it has none. */
static void levels_of_block(int64_t kind, const uint8_t *b, const int8_t *grid, Levels *to) {
    memset(to->steps, 0, sizeof to->steps);
    if (kind == TQ1_0 || kind == TQ2_0) {
        ternary_of(kind, b, to);
        return;
    }
    to->d = (uint16_t)little(b, 2);
    if (kind == IQ1_M) { /* in the highest four bits of four words of scales */
        to->d = 0;
        for (int i = 0; i < 4; i++) to->d |= (uint16_t)(b[49 + 2 * i] >> 4 << 4 * i);
    }
    for (int i = 0; i < 8; i++) {
        uint8_t *steps = to->steps + 2 * i;
        const uint32_t of_block = kind == IQ2_XXS   ? little(b + 6 + 8 * i, 4)
                                  : kind == IQ3_XXS ? little(b + 66 + 4 * i, 4)
                                  : kind == IQ1_S   ? little(b + 34 + 2 * i, 2)
                                                    : 0;
        if (kind == IQ2_XXS || kind == IQ3_XXS) steps[0] = steps[1] = (uint8_t)(of_block >> 28);
        else if (kind == IQ1_S) steps[0] = steps[1] = of_block >> 12 & 7;
        else if (kind == IQ3_S) steps[0] = steps[1] = b[106 + i / 2] >> i % 2 * 4 & 15;
        else if (kind == IQ1_M)
            for (int half = 0; half < 2; half++)
                steps[half] = little(b + 48 + i / 2 * 2, 2) >> (i % 2 * 6 + half * 3) & 7;
        else steps[0] = b[(kind == IQ2_XS ? 66 : 74) + i] & 15, steps[1] = b[(kind == IQ2_XS ? 66 : 74) + i] >> 4;
        for (int j = 0, g = 4 * i; j < 4; j++, g++) { /* eight values, of one entry or of two */
            uint32_t first, second = 0, signs = 0;
            int shift = 0;
            if (kind == IQ2_XXS) first = b[2 + 8 * i + j], signs = eight_signs(of_block >> 7 * j & 127);
            else if (kind == IQ2_XS) first = little(b + 2 + 2 * g, 2) & 511, signs = eight_signs(b[3 + 2 * g] >> 1);
            else if (kind == IQ2_S) first = b[2 + g] | (b[66 + i] >> 2 * j & 3) << 8, signs = b[34 + g];
            else if (kind == IQ3_XXS || kind == IQ3_S) {
                const uint32_t high = kind == IQ3_S ? (uint32_t)b[66 + i] >> 2 * j : 0;
                first = b[2 + 2 * g] | (high & 1) << 8, second = b[3 + 2 * g] | (high >> 1 & 1) << 8;
                signs = kind == IQ3_S ? b[74 + g] : eight_signs(of_block >> 7 * j & 127);
            } else if (kind == IQ1_S) {
                first = b[2 + g] | (of_block >> 3 * j & 7) << 8, shift = of_block >> 15 ? -1 : 1;
            } else {
                const uint32_t high = b[32 + g / 2] >> g % 2 * 4 & 15;
                first = b[g] | (high & 7) << 8, shift = high >> 3 ? -1 : 1;
            }
            int8_t entry[8], *levels = to->levels + 8 * g;
            const int two = kind == IQ3_XXS || kind == IQ3_S;
            memcpy(entry, grid + (two ? 4 : 8) * first, two ? 4 : 8);
            if (two) memcpy(entry + 4, grid + 4 * second, 4);
            for (int k = 0; k < 8; k++)
                levels[k] = (int8_t)(shift ? 8 * entry[k] + shift : signs >> k & 1 ? -entry[k] : entry[k]);
        }
    }
}

#endif
