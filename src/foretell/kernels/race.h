/* The race of keyed exponentials over one row: what ``noise.exponentials`` and an argmax compute.
 *
 * Most tokens never need their logarithm: E = -log1p(-w) >= w, so p / w bounds the score from above, and only tokens
 * whose bound beats the best score so far can win. What remains is one hash a token, which vectorises, and which a block
 * without any mass is spared: that is all but one at temperature 0, and most behind top-k or top-p.
 */
#ifndef FORETELL_RACE_H
#define FORETELL_RACE_H
#include <math.h>
#include <stdint.h>

#define GOLDEN 0x9E3779B97F4A7C15ULL
#define RACE_BLOCK 512

static inline uint64_t mix_bits(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

/* The index that maximises p / E, E keyed by (key, table): the first of equal ones, 0 where nothing has mass. */
static inline int64_t race_row(const float *p, int64_t count, uint64_t key, const uint64_t *table) {
    float w[RACE_BLOCK], best = -1.0f;
    int64_t winner = 0;
    for (int64_t from = 0; from < count; from += RACE_BLOCK) {
        const int64_t size = count - from < RACE_BLOCK ? count - from : RACE_BLOCK;
        int any = 0;
        if (best >= 0.0f && !(p[from] > 0.0f)) {
            for (int64_t i = 0; i < size; ++i) any |= p[from + i] > 0.0f;
            if (!any) continue; /* nothing without mass beats a score of 0 */
            any = 0;
        }
        for (int64_t i = 0; i < size; ++i) {
            const uint32_t bits = (uint32_t)(mix_bits(key + table[from + i]) >> 32);
            w[i] = ((float)bits + 0.5f) * 0x1p-32f;
            any |= p[from + i] > best * w[i];
        }
        if (!any) continue;
        for (int64_t i = 0; i < size; ++i) {
            const float chance = p[from + i];
            if (!(chance > best * w[i])) continue;
            const float u = w[i] < 1.0f - 0x1p-24f ? w[i] : 1.0f - 0x1p-24f;
            const float score = chance / (float)(-log1p(-(double)u));
            if (score > best) { best = score; winner = from + i; }
        }
    }
    return winner;
}

/* Put token x with this score behind all that score at least as much; the last of count falls out. */
static inline void insert(float *scores, int64_t *tokens, int64_t count, float score, int64_t x) {
    int64_t at = count - 1;
    for (; at > 0 && score > scores[at - 1]; --at) { scores[at] = scores[at - 1]; tokens[at] = tokens[at - 1]; }
    scores[at] = score;
    tokens[at] = x;
}

/* The first ``count`` of the race over one row, best first, with their scores: those above 0 have mass. The first is
 * race_row's: same scores, same order. key NULL: the largest of p itself, ties to the lower index. */
static inline void race_top_row(const float *p, int64_t size_of_row, const uint64_t *key, const uint64_t *table,
                                int64_t count, int64_t *winners, float *scores) {
    float w[RACE_BLOCK];
    for (int64_t c = 0; c < count; ++c) { scores[c] = -1.0f; winners[c] = 0; }
    for (int64_t from = 0; from < size_of_row; from += RACE_BLOCK) {
        const int64_t size = size_of_row - from < RACE_BLOCK ? size_of_row - from : RACE_BLOCK;
        const float edge = scores[count - 1];
        int any = 0;
        if (!key) {
            for (int64_t i = 0; i < size; ++i) any |= p[from + i] > edge;
            if (!any) continue;
            for (int64_t i = 0; i < size; ++i)
                if (p[from + i] > scores[count - 1]) insert(scores, winners, count, p[from + i], from + i);
            continue;
        }
        for (int64_t i = 0; i < size; ++i) {
            const uint32_t bits = (uint32_t)(mix_bits(*key + table[from + i]) >> 32);
            w[i] = ((float)bits + 0.5f) * 0x1p-32f;
            any |= p[from + i] > edge * w[i];
        }
        if (!any) continue;
        for (int64_t i = 0; i < size; ++i) {
            const float chance = p[from + i];
            if (!(chance > scores[count - 1] * w[i])) continue;
            const float u = w[i] < 1.0f - 0x1p-24f ? w[i] : 1.0f - 0x1p-24f;
            const float score = chance / (float)(-log1p(-(double)u));
            if (score > scores[count - 1]) insert(scores, winners, count, score, from + i);
        }
    }
}
#endif
