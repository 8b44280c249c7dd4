/* The race of keyed exponentials: for each row, the token x that maximises p[x] / E[x], E keyed by (row key, x).
 *
 * The slow reference is noise.exponentials followed by an argmax in torch: same hash, same E up to the last bits of
 * log1p. How one row is run: race.h.
 */
#include "race_logits.h"

#include <string.h>

/* The keys of noise.stream_keys: parts hashed one into the next. */
static inline uint64_t stream_seed(uint64_t seed, int64_t stream) {
    return mix_bits(mix_bits(seed + GOLDEN) ^ (0x94D049BB133111EBULL * (uint64_t)stream));
}

static inline uint64_t stream_key(uint64_t seed, uint64_t position, uint64_t index) {
    return mix_bits(mix_bits(seed ^ mix_bits(position + GOLDEN)) ^ (index * 0xBF58476D1CE4E5B9ULL));
}

void foretell_stream_keys(int64_t count, const uint64_t *seeds, const uint64_t *positions, const uint64_t *indices,
                           int64_t stream, uint64_t *keys) {
    for (int64_t i = 0; i < count; ++i) keys[i] = stream_key(stream_seed(seeds[i], stream), positions[i], indices[i]);
}

/* table[x] = mix((x + 1) * GOLDEN), from noise.token_table. */
void foretell_race(int64_t num_rows, int64_t vocab_size, const float *probs, const uint64_t *keys, const uint64_t *table,
                    int64_t *winners) {
    for (int64_t row = 0; row < num_rows; ++row)
        winners[row] = race_row(probs + row * vocab_size, vocab_size, keys[row], table);
}

/* A token from each of num rows of logits: places [num, 3] hold the index of the row's warp, where its logits begin (in
 * floats) and its key; the first becomes the token, or UNDECIDED. */
void foretell_draw_logits(int64_t num, int64_t vocab_size, const float *logits, const Warp *warps, const uint64_t *table,
                           int64_t *places) {
    for (int64_t *place = places; place < places + 3 * num; place += 3)
        place[0] = draw_logits(logits + place[1], vocab_size, warps + place[0], (uint64_t)place[2], table);
}

/* The walk of exact match down the tree of each row: at a node the token that the target draws from its logits, then the
 * first child that carries it, until there is none. logits: of node n of row r at r * by_row + n * by_node floats; tokens
 * and parents: of row r at r * tokens_by_row, r * parents_by_row; seeds and positions (of the
 * roots): core.noise.Noise. out [num_rows, 2 + num_nodes]: how many nodes are kept (0: UNDECIDED), the token after them,
 * and the nodes, the root first. */
void foretell_walk(int64_t num_rows, int64_t num_nodes, int64_t vocab_size, const float *logits, int64_t by_row,
                   int64_t by_node, const Warp *warps, const uint64_t *table, const int64_t *tokens,
                   int64_t tokens_by_row, const int64_t *parents, int64_t parents_by_row, const uint64_t *seeds,
                   const uint64_t *positions, int64_t stream, int64_t *out) {
    for (int64_t row = 0; row < num_rows; ++row, out += 2 + num_nodes) {
        const int64_t *token = tokens + row * tokens_by_row, *parent = parents + row * parents_by_row;
        const uint64_t seed = stream_seed(seeds[row], stream);
        int64_t at = 0, count = 0, drawn = 0;
        while (at >= 0) {
            const uint64_t key = stream_key(seed, positions[row] + 1 + (uint64_t)count, 0);
            drawn = draw_logits(logits + row * by_row + at * by_node, vocab_size, warps + row, key, table);
            if (drawn < 0) break;
            out[2 + count++] = at;
            int64_t child = at + 1;
            while (child < num_nodes && !(parent[child] == at && token[child] == drawn)) ++child;
            at = child < num_nodes ? child : -1;
        }
        out[0] = drawn < 0 ? 0 : count;
        out[1] = drawn;
    }
}

/* out [num_rows, vocab_size]: 1 at the largest of each row's logits, the first of equal ones, and 0 elsewhere; a NaN is
 * passed over, and where nothing is above -inf all is 0. A block without anything larger is compared and no more. */
void foretell_one_hot(int64_t num_rows, int64_t vocab_size, const float *logits, float *out) {
    for (int64_t row = 0; row < num_rows; ++row) {
        float *to = out + row * vocab_size;
        const int64_t winner = largest_logit(logits + row * vocab_size, vocab_size);
        memset(to, 0, (size_t)vocab_size * sizeof(float));
        if (winner >= 0) to[winner] = 1.0f;
    }
}

/* The first ``count`` of the race of each row, best first: ``race_top_row``. keys NULL: the largest of p itself. */
void foretell_race_top(int64_t num_rows, int64_t vocab_size, const float *probs, const uint64_t *keys,
                        const uint64_t *table, int64_t count, int64_t *winners, float *winning) {
    for (int64_t row = 0; row < num_rows; ++row)
        race_top_row(probs + row * vocab_size, vocab_size, keys ? keys + row : 0, table, count, winners + row * count,
                     winning + row * count);
}
