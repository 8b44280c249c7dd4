/* Residuals of the target's distribution after rejected drafts, and the resulting walks: one row of p and q per child.
 *
 * After any number of rejected children the rest of p at a node is (keep p - take q)+ with two scalars, since
 * (a (k p - t q)+ - b q)+ = (a k p - (a t + b) q)+; only at the tokens of the children themselves may it differ (struck,
 * or q without them). So no residual is ever stored: a node is two scalars, a child one, and a rejection is one pass
 * over p and q that sums. The slow references are in rejection.py, block.py and traversal.py: rows of V, in torch.
 *
 * This file includes itself once for each type of distribution: REAL is float or double. Scalars are double in both.
 */
#ifndef REAL
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FIXED, IID, WITHOUT_REPLACEMENT, COUPLED };
enum { UNREAD, SOUND, BROKEN };
#define SUM_TOLERANCE 1e-3 /* as in residual.py */
#define BLOCK 1024 /* partial sums of REAL; blocks are added in double */
#define JOIN(name, type) name##_##type
#define NAMED(name, type) JOIN(name, type)
#define NAME(name) NAMED(name, REAL)

/* An invalid share (NaN, inf, below 0) counts as 0. */
static inline double share(double x) { return x > 0 && isfinite(x) ? x : 0; }

/* Stops of a rule that decides on a node before its children: start[i] = P(walk goes on to i | it is at the parent, and
 * the siblings before were rejected). */
static void stops_from_above(int64_t num_nodes, const int64_t *parent, const double *start, double *reach, double *left,
                             double *stops) {
    for (int64_t i = 0; i < num_nodes; ++i) {
        left[i] = 1;
        reach[i] = i == 0;
        if (i == 0 || parent[i] < 0) continue;
        reach[i] = reach[parent[i]] * left[parent[i]] * start[i];
        left[parent[i]] *= 1 - start[i];
    }
    for (int64_t i = 0; i < num_nodes; ++i) stops[i] = reach[i] * left[i];
}

/* Stops of a rule that decides on a node after its subtree, in post-order: end[i] = P(i is taken | none before was). */
static void stops_in_postorder(int64_t num_nodes, const int64_t *parent, const double *end, double *below, double *enter,
                               double *passed, double *stops) {
    for (int64_t i = 0; i < num_nodes; ++i) below[i] = passed[i] = 1; /* below: nothing under i is taken */
    for (int64_t i = num_nodes - 1; i > 0; --i)
        if (parent[i] >= 0) below[parent[i]] *= below[i] * (1 - end[i]);
    for (int64_t i = 0; i < num_nodes; ++i) {
        enter[i] = i == 0;
        stops[i] = i == 0 ? below[0] * end[0] : 0;
        if (i == 0 || parent[i] < 0) continue;
        enter[i] = enter[parent[i]] * passed[parent[i]];
        passed[parent[i]] *= below[i] * (1 - end[i]);
        stops[i] = enter[i] * below[i] * end[i];
    }
}

/* The place of a token in the order of residual.rank: p / q rounded down to 6 bits of precision. */
static inline uint32_t rank_of(float ratio) {
    union { float value; uint32_t bits; } as = {ratio};
    return ratio > 0 ? as.bits >> 18 : 0;
}
#define NUM_RANKS 0x2000

/* weight[i] = the product over the levels of (high^k - low^k) / (high - low), k = power, as sums of positive terms; low
 * and high pass through the levels. power, under and likely have one entry a level; count <= BLOCK. */
static void weights(int64_t count, int64_t num_levels, const int64_t *power, const double *under, const double *likely,
                    double *weight, double *low, double *high) {
    double total[BLOCK], lows[BLOCK], highs[BLOCK];
    for (int64_t i = 0; i < count; ++i) weight[i] = 1;
    for (int64_t level = 0; level < num_levels; ++level) {
        if (level > 0) {
            const double mass = under[level], share = likely[level];
            for (int64_t i = 0; i < count; ++i) low[i] = mass + share * low[i];
            for (int64_t i = 0; i < count; ++i) high[i] = mass + share * high[i];
        }
        if (power[level] < 2) continue;
        for (int64_t i = 0; i < count; ++i) {
            total[i] = 1;
            lows[i] = low[i];
            highs[i] = high[i];
        }
        for (int64_t k = 2; k <= power[level]; ++k)
            for (int64_t i = 0; i < count; ++i) {
                total[i] = total[i] * low[i] + highs[i];
                lows[i] *= low[i];
                highs[i] *= high[i];
            }
        for (int64_t i = 0; i < count; ++i) {
            weight[i] *= total[i];
            low[i] = lows[i];
            high[i] = highs[i];
        }
    }
}

#define REAL float
#include "residual.c"
#undef REAL
#define REAL double
#include "residual.c"
#undef REAL

#else

/* excess += sum (a p - b q)+, mass += sum q; a NaN stays one. Without q (NULL): sum a p. */
static void NAME(span)(const REAL *p, const REAL *q, int64_t count, REAL a, REAL b, double *excess, double *mass) {
    for (int64_t from = 0; from < count; from += BLOCK) {
        const int64_t stop = count - from < BLOCK ? count : from + BLOCK;
        REAL e = 0, m = 0;
        if (q == NULL) {
#pragma omp simd reduction(+ : e)
            for (int64_t i = from; i < stop; ++i) e += p[i];
            e *= a;
        } else {
#pragma omp simd reduction(+ : e, m)
            for (int64_t i = from; i < stop; ++i) {
                const REAL d = a * p[i] - b * q[i];
                e += d <= 0 ? 0 : d;
                m += q[i];
            }
        }
        *excess += e;
        *mass += m;
    }
}

/* The same over a row without the tokens skip[0 .. num_skip), ascending. */
static void NAME(pass)(const REAL *p, const REAL *q, int64_t vocab_size, double a, double b, const int64_t *skip,
                       int64_t num_skip, double *excess, double *mass) {
    int64_t from = 0;
    *excess = *mass = 0;
    for (int64_t k = 0; k <= num_skip; ++k) {
        const int64_t to = k < num_skip ? skip[k] : vocab_size;
        if (to > from) NAME(span)(p + from, q == NULL ? NULL : q + from, to - from, (REAL)a, (REAL)b, excess, mass);
        from = to + 1;
    }
}

/* out = (a p - b q)+ of one row; a NaN stays one. q may be NULL. */
static void NAME(subtract)(int64_t vocab_size, const REAL *p, const REAL *q, double a, double b, REAL *out) {
    const REAL scale = (REAL)a, less = (REAL)b;
    if (q == NULL || less == 0) {
        for (int64_t i = 0; i < vocab_size; ++i) out[i] = scale * p[i];
    } else {
        for (int64_t i = 0; i < vocab_size; ++i) {
            const REAL d = scale * p[i] - less * q[i];
            out[i] = d <= 0 ? 0 : d;
        }
    }
}

/* One row of a batch: every child is tried in the order of indices, so parents come before their children.
 *
 * ahead = 0 (rejection): start[i] = P(child i accepted | siblings before rejected), every node starts anew at 1.
 * ahead = 1 (traversal): start[i] = min(1, end[parent] rest(x) / source(x)), with end[parent] after the siblings before;
 * end[i] is what is left of start[i] after all children of i were rejected.
 * keep, take: the rest of p at node i is (keep p - take q)+, but kept[j] at the token of each child j.
 * scratch: 5 N doubles; marks: 2 N int64 and skip N int64.
 */
static void NAME(try_row)(int64_t num_nodes, int64_t vocab_size, int ahead, const int64_t *tokens, const int64_t *parent,
                          const int64_t *drawn_by, const REAL *p, const REAL *q, double *start, double *end, double *keep,
                          double *take, double *kept, double *scratch, int64_t *marks, double *stops) {
    double *total = scratch, *unseen = scratch + num_nodes; /* mass of the rest, and of q without the drawn siblings */
    int64_t *state = marks, *struck = marks + num_nodes, *skip = marks + 2 * num_nodes;
    for (int64_t i = 0; i < num_nodes; ++i) {
        start[i] = end[i] = i == 0;
        keep[i] = total[i] = unseen[i] = 1;
        take[i] = kept[i] = 0;
        state[i] = UNREAD;
        struck[i] = 0;
    }
    for (int64_t i = 1; i < num_nodes; ++i) {
        const int64_t u = parent[i], x = tokens[i];
        if (u < 0) continue;
        const REAL *pu = p + u * vocab_size, *qu = q == NULL ? NULL : q + u * vocab_size;
        const double ratio = ahead ? end[u] : 1;

        /* The tokens of the children so far, ascending and each once; what this one's token has to itself. */
        int64_t num_skip = 0, later = 0, seen = 0, again = -1;
        for (int64_t j = 1; j <= i; ++j) {
            if (parent[j] != u) continue;
            if (j < i && tokens[j] == x) { again = j; seen |= struck[j]; }
            int64_t at = num_skip;
            while (at > 0 && skip[at - 1] > tokens[j]) --at;
            if (at > 0 && skip[at - 1] == tokens[j]) continue;
            memmove(skip + at + 1, skip + at, (size_t)(num_skip - at) * sizeof *skip);
            skip[at] = tokens[j];
            ++num_skip;
        }
        for (int64_t j = i + 1; j < num_nodes && !later; ++j) later = parent[j] == u;
        if (again >= 0) kept[i] = kept[again];
        else kept[i] = share(take[u] > 0 ? keep[u] * pu[x] - take[u] * qu[x] : keep[u] * pu[x]);
        struck[i] = seen;
        if (ratio == 0) continue; /* nothing below can be taken any more */
        double chance = total[u] > 0 ? share(kept[i] / total[u]) : 0;
        if (chance > 1) chance = 1;

        const int without = drawn_by[i] == WITHOUT_REPLACEMENT;
        const double source = qu == NULL || (without && seen) ? 0 : share(qu[x]);
        const double a = total[u] > 0 ? ratio / total[u] : 0;
        const double b = without ? (unseen[u] > 0 ? 1 / unseen[u] : 0) : 1;
        int drawn = (without || drawn_by[i] == IID) && source * b > 0 && state[u] != BROKEN;
        double excess = 0, mass = 0, whole = 0; /* whole: the sum of q, where it is not known yet */
        if (drawn && (ahead || later)) {
            NAME(pass)(pu, qu, vocab_size, a * keep[u], a * take[u] + b, skip, num_skip, &excess, &mass);
            whole = mass;
            for (int64_t k = 0; k < num_skip; ++k) whole += qu[skip[k]];
        } else if (drawn && state[u] == UNREAD) {
            NAME(pass)(qu, NULL, vocab_size, 1, 0, NULL, 0, &whole, &mass);
        }
        if (drawn && state[u] == UNREAD) {
            state[u] = fabs(whole - 1) <= SUM_TOLERANCE ? SOUND : BROKEN;
            drawn = state[u] == SOUND; /* a child from a broken distribution counts as FIXED, which is always sound */
        }
        double sum;
        if (drawn) {
            const double likely = ratio * chance / (source * b);
            start[i] = likely < 1 ? likely : 1;
            sum = excess;
            /* Children with equal tokens share what is kept and struck. */
            double left_of_q = mass;
            for (int64_t j = 1; j <= i; ++j) {
                if (parent[j] != u) continue;
                const double less = without && struck[j] ? 0 : (double)qu[tokens[j]];
                kept[j] = share(a * kept[j] - b * less);
            }
            for (int64_t j = 1; j <= i; ++j)
                if (parent[j] == u && tokens[j] == x) struck[j] = 1;
            for (int64_t k = 0; k < num_skip; ++k) {
                int64_t j = 1;
                while (parent[j] != u || tokens[j] != skip[k]) ++j;
                sum += kept[j];
                if (!struck[j]) left_of_q += qu[skip[k]];
            }
            keep[u] *= a;
            take[u] = a * take[u] + b;
            unseen[u] = left_of_q;
            total[u] = sum;
        } else {
            start[i] = ratio * chance;
            const double before = total[u];
            double left = before - kept[i];
            for (int64_t j = 1; j <= i; ++j)
                if (parent[j] == u && tokens[j] == x) kept[j] = 0;
            if ((ahead || later) && left < before * 0x1p-10) { /* cancelled: sum again, without the children's tokens */
                NAME(pass)(pu, take[u] > 0 ? qu : NULL, vocab_size, keep[u], take[u], skip, num_skip, &left, &mass);
                for (int64_t k = 0; k < num_skip; ++k) {
                    int64_t j = 1;
                    while (parent[j] != u || tokens[j] != skip[k]) ++j;
                    left += kept[j];
                }
            }
            total[u] = left;
            sum = before > 0 ? ratio * left / before : 0;
        }
        if (ahead && sum + (1 - ratio) > 0) end[u] = sum / (sum + (1 - ratio)); /* 0/0, or no distribution: as it was */
        if (ahead) end[i] = start[i];
    }
    if (ahead) stops_in_postorder(num_nodes, parent, end, scratch + 2 * num_nodes, scratch + 3 * num_nodes,
                                  scratch + 4 * num_nodes, stops);
    else stops_from_above(num_nodes, parent, start, scratch + 2 * num_nodes, scratch + 3 * num_nodes, stops);
}

/* Returns 0, or 1 where memory could not be allocated. */
int NAME(foretell_try_tree)(int64_t num_rows, int64_t num_nodes, int64_t vocab_size, int ahead, const int64_t *tokens,
                             const int64_t *parent, const int64_t *drawn_by, const REAL *p, const REAL *q, double *start,
                             double *end, double *keep, double *take, double *kept, double *stops) {
    double *scratch = malloc((size_t)(5 * num_nodes) * sizeof(double));
    int64_t *marks = malloc((size_t)(3 * num_nodes + 1) * sizeof(int64_t));
    if (scratch != NULL && marks != NULL)
        for (int64_t row = 0; row < num_rows; ++row) {
            const int64_t at = row * num_nodes;
            NAME(try_row)(num_nodes, vocab_size, ahead, tokens + at, parent + at, drawn_by + at, p + at * vocab_size,
                          q == NULL ? NULL : q + at * vocab_size, start + at, end + at, keep + at, take + at, kept + at,
                          scratch, marks, stops + at);
        }
    const int failed = scratch == NULL || marks == NULL;
    free(scratch);
    free(marks);
    return failed;
}

/* out[row] = the rest of p at node at[row]; p itself where nothing is left. */
void NAME(foretell_rest)(int64_t num_rows, int64_t num_nodes, int64_t vocab_size, const int64_t *tokens,
                          const int64_t *parent, const REAL *p, const REAL *q, const double *keep, const double *take,
                          const double *kept, const int64_t *at, REAL *out) {
    for (int64_t row = 0; row < num_rows; ++row, out += vocab_size) {
        const int64_t first = row * num_nodes, u = first + at[row];
        const REAL *pu = p + u * vocab_size;
        NAME(subtract)(vocab_size, pu, q == NULL ? NULL : q + u * vocab_size, keep[u], take[u], out);
        for (int64_t j = 1; j < num_nodes; ++j)
            if (parent[first + j] == at[row]) out[tokens[first + j]] = (REAL)kept[first + j];
        double sum = 0, none = 0;
        NAME(span)(out, NULL, vocab_size, 1, 0, &sum, &none);
        if (sum <= 0) memcpy(out, pu, (size_t)vocab_size * sizeof(REAL));
    }
}

/* The rank of each token of a row, and in mass[k] the sum of q over all lower ranks: a counting sort, no comparison. */
static void NAME(ranked)(int64_t vocab_size, const REAL *p, const REAL *q, uint16_t *rank, double *mass) {
    memset(mass, 0, NUM_RANKS * sizeof(double));
    for (int64_t i = 0; i < vocab_size; ++i) rank[i] = (uint16_t)(q[i] > 0 ? rank_of((float)(p[i] / q[i])) : 0);
    for (int64_t i = 0; i < vocab_size; ++i) mass[rank[i]] += q[i];
    double sum = 0;
    for (int64_t k = 0; k < NUM_RANKS; ++k) {
        const double own = mass[k];
        mass[k] = sum;
        sum += own;
    }
}

/* The distribution q~ of the best of some draws from q, in a context with distributions p and q: q weighted by what greedy_block.best_law
 * says, with power[0] draws at this depth and u -> (under[l] + likely[l] u) ** power[l] outwards, 0 < l < num_levels.
 * Returns sum (ratio p - q~)+; before, chosen: the mass of q before token, and q~ of it. rest, where not NULL: the
 * residual (ratio p - q~)+ itself. mass and rank are scratch. */
static double NAME(best_row)(int64_t vocab_size, const REAL *p, const REAL *q, int64_t token, int64_t num_levels,
                             const int64_t *power, const double *under, const double *likely, double ratio,
                             double *before, double *chosen, REAL *rest, double *mass, uint16_t *rank) {
    double weight[BLOCK], low[BLOCK], high[BLOCK], excess = 0, whole = 1;
    while (num_levels > 0 && power[num_levels - 1] == 1) --num_levels; /* outside the last power all is linear: no effect */
    *before = 0;
    *chosen = q[token];
    if (num_levels == 0) { /* one draw: q~ is q */
        if (rest == NULL) NAME(span)(p, q, vocab_size, (REAL)ratio, 1, &excess, &whole);
        else NAME(subtract)(vocab_size, p, q, ratio, 1, rest);
        return excess;
    }
    double lowest = 0, highest = 1;
    NAME(ranked)(vocab_size, p, q, rank, mass);
    weights(1, num_levels, power, under, likely, &whole, &lowest, &highest);
    const double share = 1 / whole;
    const REAL scale = (REAL)ratio;
    for (int64_t from = 0; from < vocab_size; from += BLOCK) {
        const int64_t count = vocab_size - from < BLOCK ? vocab_size - from : BLOCK;
        const REAL *pf = p + from, *qf = q + from;
        const int here = token >= from && token < from + count;
        REAL sum = 0;
        for (int64_t i = 0; i < count; ++i) {
            low[i] = mass[rank[from + i]];
            high[i] = mass[rank[from + i]] += qf[i];
        }
        if (here) *before = low[token - from];
        weights(count, num_levels, power, under, likely, weight, low, high);
        if (here) *chosen *= weight[token - from] * share;
        if (rest == NULL) {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < count; ++i) {
                const REAL d = scale * pf[i] - (REAL)(qf[i] * (weight[i] * share));
                sum += d <= 0 ? 0 : d;
            }
        } else {
            for (int64_t i = 0; i < count; ++i) {
                const REAL d = scale * pf[i] - (REAL)(qf[i] * (weight[i] * share));
                rest[from + i] = d <= 0 ? 0 : d;
            }
        }
        excess += sum;
    }
    return excess;
}

/* Which children are draws from q before any other of their siblings (run); returns whether the number of children
 * depends on the depth alone and all are such draws. ended, depth, count: scratch of N. */
static int NAME(draws_of)(int64_t num_nodes, int64_t vocab_size, const int64_t *tokens, const int64_t *parent,
                          const int64_t *drawn_by, const REAL *q, int64_t *run, int64_t *ended, int64_t *depth,
                          int64_t *count) {
    int uniform = q != NULL;
    for (int64_t i = 0; i < num_nodes; ++i) {
        const int64_t u = parent[i];
        ended[i] = run[i] = depth[i] = count[i] = 0;
        if (i == 0 || u < 0) continue;
        depth[i] = depth[u] + 1;
        const int kind = drawn_by[i] == IID || (drawn_by[i] == WITHOUT_REPLACEMENT && count[u] == 0);
        run[i] = kind && q != NULL && !ended[u] && share(q[u * vocab_size + tokens[i]]) > 0;
        if (!run[i]) ended[u] = 1, uniform = 0;
        ++count[u];
    }
    for (int64_t i = 0; i < num_nodes && uniform; ++i)
        for (int64_t j = 0; j < i; ++j)
            if ((i == 0 || parent[i] >= 0) && (j == 0 || parent[j] >= 0) && depth[i] == depth[j] && count[i] != count[j])
                uniform = 0;
    return uniform;
}

/* greedy_block.select for one row; levels of the selected path, one entry a depth. kind: 0 the path ends here, 1 FIXED,
 * 2 drawn. under, likely, outer: the composition of the marginal distribution (0, 1, 1 where it does not apply). marks: 5 N int64;
 * scratch: 4 N doubles. */
static void NAME(select_row)(int64_t num_nodes, int64_t vocab_size, const int64_t *tokens,
                             const int64_t *parent, const int64_t *drawn_by, const REAL *p, const REAL *q, int64_t *node,
                             int64_t *kind, int64_t *token, int64_t *power, int64_t *outer, double *ratio, double *under,
                             double *likely, int64_t *marks, double *scratch, double *mass, uint16_t *rank,
                             double *stops) {
    int64_t *run = marks, *alive = marks + num_nodes, *powers = marks + 2 * num_nodes;
    double *succeed = scratch, *unders = scratch + num_nodes, *shares = scratch + 2 * num_nodes;
    int uniform = NAME(draws_of)(num_nodes, vocab_size, tokens, parent, drawn_by, q, run, alive, powers, powers + num_nodes);
    int64_t num_levels = 0;
    double now = 1;
    for (int64_t i = 0; i < num_nodes; ++i) {
        alive[i] = i == 0;
        node[i] = -1;
        kind[i] = token[i] = 0;
        power[i] = outer[i] = 1;
        ratio[i] = stops[i] = under[i] = 0;
        likely[i] = 1;
    }
    for (int64_t level = 0, on_path = 1; on_path; level = num_levels) {
        int64_t best = -1, worth = 0, num_drawn = 0, num_own = 0;
        for (int64_t i = 0; i < num_nodes; ++i) { /* the first alive node with draws, else with children */
            if (!alive[i]) continue;
            int64_t value = 1;
            for (int64_t j = i + 1; j < num_nodes; ++j)
                if (parent[j] == i) {
                    if (value < 2 + run[j]) value = 2 + run[j];
                    num_drawn += run[j];
                }
            if (value > worth) worth = value, best = i;
        }
        const REAL *pu = p + best * vocab_size, *qu = q == NULL ? NULL : q + best * vocab_size;
        kind[level] = worth - 1;
        if (worth == 3) {
            double sum = 0, none = 0;
            NAME(span)(qu, NULL, vocab_size, 1, 0, &sum, &none);
            if (!(fabs(sum - 1) <= SUM_TOLERANCE)) kind[level] = 1; /* no distribution: its children count as FIXED */
        }
        if (kind[level] == 1 && level > 0 && uniform) { /* the composition ends */
            uniform = 0;
            for (int64_t l = 0; l < level; ++l) under[l] = 0, likely[l] = outer[l] = 1;
        }
        node[level] = best;
        ratio[level] = now;
        ++num_levels;
        if (kind[level] == 0) {
            succeed[level] = now;
            break;
        }
        /* The best draw by (rank, id), or the FIXED child with the largest p. */
        double top = -1;
        for (int64_t j = 1; j < num_nodes; ++j) {
            if (parent[j] < 0 || !alive[parent[j]] || (kind[level] == 2 && !run[j])) continue;
            num_own += parent[j] == best;
            const REAL chance = pu[tokens[j]], base = qu == NULL ? 0 : qu[tokens[j]];
            double value = isfinite(chance) ? chance : 0;
            if (kind[level] == 2)
                value = (double)(base > 0 ? rank_of((float)(chance / base)) : 0) * (double)vocab_size + (double)tokens[j];
            if (value > top) top = value, token[level] = tokens[j];
        }
        if (kind[level] == 2) power[level] = uniform ? num_own : num_drawn;
        const double chance = share(pu[token[level]]);
        double residual = now * (1 - chance), base = 1;
        if (kind[level] == 2) {
            powers[0] = power[level];
            for (int64_t l = level - 1, k = 1; l >= 0; --l, ++k)
                powers[k] = outer[l], unders[k] = under[l], shares[k] = likely[l];
            double before;
            residual = NAME(best_row)(vocab_size, pu, qu, token[level], level + 1, powers, unders, shares, now, &before,
                                      &base, NULL, mass, rank);
            if (uniform) under[level] = before, likely[level] = qu[token[level]], outer[level] = power[level];
        }
        const double slack = residual + (1 - now);
        succeed[level] = slack > 0 ? residual / slack : now; /* 0/0, or no distribution: P */
        now = base > 0 && chance > 0 ? now * chance / base : 0;
        if (now > 1) now = 1;
        for (int64_t j = num_nodes - 1; j > 0; --j) /* children come after their parents: alive is still the old one */
            alive[j] = parent[j] >= 0 && alive[parent[j]] && (kind[level] == 1 || run[j]) && tokens[j] == token[level];
        alive[0] = 0;
    }
    double none_behind = 1;
    for (int64_t level = num_levels - 1; level >= 0; --level) {
        stops[node[level]] = succeed[level] * none_behind;
        none_behind *= 1 - succeed[level];
    }
}

/* greedy_block.select; integers and reals are [5, B, N] and [3, B, N]: node, kind, token, power, outer; ratio, under,
 * likely. Returns 0, or 1 where memory could not be allocated. */
int NAME(foretell_select)(int64_t num_rows, int64_t num_nodes, int64_t vocab_size, const int64_t *tokens,
                           const int64_t *parent, const int64_t *drawn_by, const REAL *p, const REAL *q, int64_t *integers,
                           double *reals, double *stops) {
    int64_t *marks = malloc((size_t)(5 * num_nodes) * sizeof(int64_t));
    double *scratch = malloc((size_t)(4 * num_nodes + NUM_RANKS) * sizeof(double));
    uint16_t *rank = malloc((size_t)vocab_size * sizeof(uint16_t));
    const int failed = marks == NULL || scratch == NULL || rank == NULL;
    const int64_t all = num_rows * num_nodes;
    for (int64_t row = 0; row < num_rows && !failed; ++row) {
        const int64_t at = row * num_nodes;
        int64_t *whole = integers + at;
        double *real = reals + at;
        NAME(select_row)(num_nodes, vocab_size, tokens + at, parent + at, drawn_by + at, p + at * vocab_size,
                         q == NULL ? NULL : q + at * vocab_size, whole, whole + all, whole + 2 * all, whole + 3 * all,
                         whole + 4 * all, real, real + all, real + 2 * all, marks, scratch, scratch + 4 * num_nodes, rank,
                         stops + at);
    }
    free(marks);
    free(scratch);
    free(rank);
    return failed;
}

/* out[row] = (P p - q~)+ at node at[row] of the selected path; p at its end, elsewhere, and where nothing is left.
 * Returns 0, 1 where memory could not be allocated, 2 where a selected token is out of range. */
int NAME(foretell_selected_rest)(int64_t num_rows, int64_t num_nodes, int64_t vocab_size, const REAL *p, const REAL *q,
                                  const int64_t *integers, const double *reals, const int64_t *at, REAL *out) {
    int64_t *powers = malloc((size_t)num_nodes * sizeof(int64_t));
    double *scratch = malloc((size_t)(2 * num_nodes + NUM_RANKS) * sizeof(double));
    uint16_t *rank = malloc((size_t)vocab_size * sizeof(uint16_t));
    int failed = powers == NULL || scratch == NULL || rank == NULL;
    const int64_t all = num_rows * num_nodes;
    for (int64_t row = 0; row < num_rows && !failed; ++row, out += vocab_size) {
        const int64_t *node = integers + row * num_nodes, *kind = node + all, *token = node + 2 * all;
        const int64_t *power = node + 3 * all, *outer = node + 4 * all;
        const double *ratio = reals + row * num_nodes, *under = ratio + all, *likely = ratio + 2 * all;
        const int64_t from = (row * num_nodes + at[row]) * vocab_size;
        int64_t level = 0;
        while (level < num_nodes && node[level] != at[row]) ++level;
        const int what = level < num_nodes ? (int)kind[level] : 0;
        double sum = 0, none, base;
        if (what != 0 && (token[level] < 0 || token[level] >= vocab_size)) {
            failed = 2;
            break;
        }
        if (what == 2) {
            double *unders = scratch, *shares = scratch + num_nodes;
            powers[0] = power[level];
            for (int64_t l = level - 1, k = 1; l >= 0; --l, ++k)
                powers[k] = outer[l], unders[k] = under[l], shares[k] = likely[l];
            NAME(best_row)(vocab_size, p + from, q + from, token[level], level + 1, powers, unders, shares, ratio[level],
                           &none, &base, out, scratch + 2 * num_nodes, rank);
        } else {
            memcpy(out, p + from, (size_t)vocab_size * sizeof(REAL));
            if (what == 1) out[token[level]] = 0;
        }
        if (what == 0) continue;
        NAME(span)(out, NULL, vocab_size, 1, 0, &sum, &none);
        if (sum <= 0) memcpy(out, p + from, (size_t)vocab_size * sizeof(REAL));
    }
    free(powers);
    free(scratch);
    free(rank);
    return failed;
}
#endif
