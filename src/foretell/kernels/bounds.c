/* Range checks of the indices of the other kernels: one pass, before any of them is used. */
#include <stdint.h>

/* Trees of num_rows rows. Returns -1 where every token is in [0, vocab_size), every first parent is -1 and every other
 * parent is -1 (padding) or an earlier node; else the flat index of the first node of which that is not true. */
int64_t foretell_check_tree(int64_t num_rows, int64_t num_nodes, int64_t vocab_size, const int64_t *tokens,
                             const int64_t *parent) {
    for (int64_t row = 0, at = 0; row < num_rows; ++row)
        for (int64_t node = 0; node < num_nodes; ++node, ++at)
            if (tokens[at] < 0 || tokens[at] >= vocab_size || parent[at] < -1 || parent[at] >= node) return at;
    return -1;
}

/* Returns -1 where all indices are in [0, limit), else the place of the first that is not. */
int64_t foretell_check_indices(int64_t count, int64_t limit, const int64_t *indices) {
    for (int64_t i = 0; i < count; ++i)
        if (indices[i] < 0 || indices[i] >= limit) return i;
    return -1;
}
