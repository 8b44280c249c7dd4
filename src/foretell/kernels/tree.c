/* Which nodes see which, and how deep each node lies: what core.tree.ancestors and depths make by squaring a matrix. */
#include <stdint.h>
#include <string.h>

/* parent [num_rows, num_nodes], every one -1 or an earlier node. seen [num_rows, num_nodes, num_nodes]: whether the column's
 * node is the row's, or an ancestor of it; depth [num_rows, num_nodes]. A parent out of range counts as -1. */
void foretell_ancestors(int64_t num_rows, int64_t num_nodes, const int64_t *parent, uint8_t *seen, int64_t *depth) {
    memset(seen, 0, (size_t)(num_rows * num_nodes * num_nodes));
    for (int64_t row = 0; row < num_rows; ++row, parent += num_nodes, depth += num_nodes)
        for (int64_t node = 0; node < num_nodes; ++node) {
            uint8_t *own = seen + (row * num_nodes + node) * num_nodes;
            const int64_t above = parent[node] < node ? parent[node] : -1;
            depth[node] = above < 0 ? 0 : depth[above] + 1;
            if (above >= 0) memcpy(own, own + (above - node) * num_nodes, (size_t)node);
            own[node] = 1;
        }
}
