/* The race of race.h, run over logits: the token that ``race_row`` draws from what temperature, top-k, top-p and min-p make
 * of them, mostly without making it.
 *
 * What is compared. ``race_row`` compares p / E, E exponential by key and token. Its logarithm is, but for a constant of
 * the row, y - log E with y = z * inverse, the very float that a softmax would be given: no exponential of a logit and no
 * sum is needed. The two orders can differ where rounding of p decides, which is far below 1e-5 of a token's score. So a
 * draw whose best two scores are nearer than NEAR_SCORE is not decided here (UNDECIDED, about one in 10,000), nor one
 * where the mass that top-p cuts at is nearer than NEAR_MASS: the caller makes the probabilities and runs ``race_row``. The
 * token is therefore always the one that ``race_row`` draws.
 *
 * Only tokens within 26 of the largest y can win, since E lies between 1.1e-10 and 17: none whose p is rounded coarsely.
 * NaN, infinity and rows without a possible token are left to the caller, too.
 */
#ifndef FORETELL_RACE_LOGITS_H
#define FORETELL_RACE_LOGITS_H
#include <float.h>
#include <string.h>
#include "race.h"

#define UNDECIDED (-1)
#define NEAR_SCORE 1e-4   /* of the logarithm of a score, or of a probability */
#define NEAR_MASS 1e-3    /* of a sum of probabilities, which torch adds up in floats */
#define MOST_TOP_K 256    /* above this the caller does it */
#define LOG_LEAST_E -23.0f /* below the logarithm of the least E */

/* How one row's distribution is made of its logits; laid out as Warp in kernels/small.py. */
typedef struct {
    float inverse, top_p, min_p; /* inverse temperature, 0: greedy; top_p 1 or more: none; min_p 0: none */
    int32_t top_k;               /* 0: none */
} Warp;

/* Whether w, above 0, may be at most exp(x): always where it is, and where it is less than 1.07 times that. A float's
 * bits are its logarithm drawn with straight lines, which are nowhere above the curve. */
static inline int may_reach(float w, float x) {
    const union { float value; int32_t bits; } u = {w};
    return (float)u.bits <= x * 12102203.0f + 1065353216.0f;
}

/* exp(x) for x in [-60, 0] and so clamped (far above where floats get coarse), to 1e-6 of it. Compared as integers: a
 * comparison of floats in its place is not vectorised. */
static inline float exp_near(float x) {
    union { float value; uint32_t bits; } u = {x}, floor = {-60.0f};
    u.bits = u.bits < floor.bits ? u.bits : floor.bits;
    const float t = u.value * 1.44269504f;
    const int32_t n = (int32_t)(t - 0.5f);
    const float f = (t - (float)n) * 0.693147181f; /* in [-0.35, 0.35] */
    u.bits = (uint32_t)(n + 127) << 23;
    return u.value * (1.0f + f * (1.0f + f * (0.5f + f * (0.166666667f + f * (0.0416666667f + f * 0.00833333333f)))));
}

/* x, or 0 where `keep` is 0. */
static inline float kept_if(float x, int keep) {
    union { float value; uint32_t bits; } u = {x};
    u.bits &= -(uint32_t)keep;
    return u.value;
}

/* The index of the largest of z, the first of equal ones; NaN is passed over, and UNDECIDED where nothing is above -inf. */
static inline int64_t largest_logit(const float *z, int64_t count) {
    float best = -INFINITY;
    int64_t winner = UNDECIDED;
    for (int64_t from = 0; from < count; from += RACE_BLOCK) {
        const int64_t stop = count - from < RACE_BLOCK ? count : from + RACE_BLOCK;
        int any = 0;
        for (int64_t i = from; i < stop; ++i) any |= z[i] > best;
        for (int64_t i = from; any && i < stop; ++i)
            if (z[i] > best) { best = z[i]; winner = i; }
    }
    return winner;
}

/* The k-th largest of z, k <= MOST_TOP_K; -inf where fewer are above it. */
static inline float kth_logit(const float *z, int64_t count, int64_t k) {
    float most[MOST_TOP_K];
    for (int64_t i = 0; i < k; ++i) most[i] = -INFINITY;
    for (int64_t from = 0; from < count; from += RACE_BLOCK) {
        const int64_t stop = count - from < RACE_BLOCK ? count : from + RACE_BLOCK;
        int any = 0;
        for (int64_t i = from; i < stop; ++i) any |= z[i] > most[k - 1];
        for (int64_t i = from; any && i < stop; ++i) {
            if (!(z[i] > most[k - 1])) continue;
            int64_t at = k - 1;
            for (; at > 0 && z[i] > most[at - 1]; --at) most[at] = most[at - 1];
            most[at] = z[i];
        }
    }
    return most[k - 1];
}

/* The index of the largest y - log E among those with y = z * inverse >= edge; UNDECIDED where the second is near. */
static inline int64_t race_above(const float *z, int64_t count, float inverse, float edge, uint64_t key,
                                 const uint64_t *table) {
    float w[RACE_BLOCK], y[RACE_BLOCK];
    float cut = -FLT_MAX; /* a score below it changes nothing: somewhat less than the best one */
    double best = -INFINITY, second = -INFINITY;
    int64_t winner = UNDECIDED;
    for (int64_t from = 0; from < count; from += RACE_BLOCK) {
        const int64_t size = count - from < RACE_BLOCK ? count - from : RACE_BLOCK;
        const float least = cut + LOG_LEAST_E > edge ? cut + LOG_LEAST_E : edge;
        int any = 0, odd = 0;
        for (int64_t i = 0; i < size; ++i) {
            y[i] = z[from + i] * inverse;
            any |= y[i] >= least;
            odd |= !(y[i] <= FLT_MAX);
        }
        if (odd) return UNDECIDED;
        if (!any) continue;
        for (int64_t i = 0; i < size; ++i) {
            const uint32_t bits = (uint32_t)(mix_bits(key + table[from + i]) >> 32);
            w[i] = ((float)bits + 0.5f) * 0x1p-32f;
        }
        any = 0;
        for (int64_t i = 0; i < size; ++i) any |= may_reach(w[i], y[i] - cut);
        if (!any) continue;
        for (int64_t i = 0; i < size; ++i) {
            if (!(y[i] >= edge) || !may_reach(w[i], y[i] - cut)) continue;
            const float u = w[i] < 1.0f - 0x1p-24f ? w[i] : 1.0f - 0x1p-24f;
            const double score = (double)y[i] - log(-log1p(-(double)u));
            if (score > best) {
                second = best;
                best = score;
                winner = from + i;
                cut = (float)(best - 2 * NEAR_SCORE - 1e-6 * fabs(best));
            } else if (score > second) {
                second = score;
            }
        }
    }
    return best - second > NEAR_SCORE ? winner : UNDECIDED;
}

/* Sums of exp(y - top) over y = z * inverse >= edge: of all, of those above `here`, of those clearly above it. */
static inline void masses(const float *z, int64_t count, float inverse, float edge, float top, float here, double sums[3]) {
    const float clear = nextafterf((float)((double)here + NEAR_SCORE), INFINITY);
    memset(sums, 0, 3 * sizeof(double));
    for (int64_t from = 0; from < count; from += RACE_BLOCK) {
        const int64_t size = count - from < RACE_BLOCK ? count - from : RACE_BLOCK;
        float y[RACE_BLOCK], e[RACE_BLOCK], all = 0, more = 0, sure = 0;
        int any = 0;
        for (int64_t i = 0; i < size; ++i) {
            y[i] = z[from + i] * inverse;
            any |= y[i] - top > -32.0f;
        }
        if (!any) continue;
        for (int64_t i = 0; i < size; ++i) e[i] = exp_near(y[i] - top);
#pragma omp simd reduction(+ : all, more, sure)
        for (int64_t i = 0; i < size; ++i) {
            all += kept_if(e[i], y[i] >= edge);
            more += kept_if(e[i], y[i] > here);
            sure += kept_if(e[i], y[i] > clear);
        }
        sums[0] += all, sums[1] += more, sums[2] += sure;
    }
}

/* The token drawn from logits z [count], or UNDECIDED. top-p needs no sorting: the winner of the race over all is asked
 * whether the tokens above it hold less than top_p; if not, neither it nor any less probable one is kept, and the race
 * is run again among those above it. */
static inline int64_t draw_logits(const float *z, int64_t count, const Warp *warp, uint64_t key, const uint64_t *table) {
    const float inverse = warp->inverse;
    if (inverse == 0.0f) return largest_logit(z, count);
    const int nucleus = warp->top_p < 1.0f, floor = warp->min_p > 0.0f;
    float kept = -INFINITY, top = 0.0f;
    if (warp->top_k > 0 && warp->top_k < count) {
        if (warp->top_k > MOST_TOP_K) return UNDECIDED;
        kept = kth_logit(z, count, warp->top_k) * inverse;
    }
    if (nucleus || floor) {
        const int64_t at = largest_logit(z, count);
        if (at < 0) return UNDECIDED;
        top = z[at] * inverse;
    }
    float edge = kept;
    const double least = floor ? (double)top + log((double)warp->min_p) : -INFINITY;
    if (floor) {
        const float below = nextafterf((float)(least - NEAR_SCORE), -INFINITY);
        edge = below > edge ? below : edge;
    }
    for (;;) {
        const int64_t winner = race_above(z, count, inverse, edge, key, table);
        if (winner < 0) return UNDECIDED;
        const float here = z[winner] * inverse;
        if (floor && !(here >= least + NEAR_SCORE) && here < top) return UNDECIDED;
        if (!nucleus) return winner;
        double sums[3];
        masses(z, count, inverse, kept, top, here, sums);
        if (here >= top || sums[1] < (warp->top_p - NEAR_MASS) * sums[0]) return winner;
        if (!(sums[2] > (warp->top_p + NEAR_MASS) * sums[0])) return UNDECIDED;
        edge = nextafterf(here, INFINITY);
    }
}
#endif
