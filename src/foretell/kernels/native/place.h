/* The scratch of a pass, and what its nodes see. */
#ifndef FORETELL_PLACE_H
#define FORETELL_PLACE_H
#include "rows.h"

/* Blocks of `all` rows in groups: a group of n rows that begins at place j stands behind 2 * j rows, as n | 1 <= 2 * n. */
INLINE int64_t group_blocks_bytes(int64_t columns, int64_t all) {
  return 2 * all * num_blocks(columns) * (int64_t)sizeof(Block);
}
INLINE Block *group_blocks(Block *blocks, int64_t columns, int64_t place) {
  return blocks + 2 * place * num_blocks(columns);
}

/* Lay the scratch out behind `base`; returns its bytes. */
static int64_t place(Pass *p, char *base) {
  const Model *m = p->model;
  const int64_t bytes = m->bf16 ? 2 : 4, rows = p->rows;
  int64_t at = 0;
  p->ld_hidden = padded(m->hidden), p->ld_mixed = padded(m->heads * value_dim(m)), p->ld_inner = padded(m->intermediate);
  p->qkv_width = MAX(((m->gated ? 2 : 1) * m->heads + 2 * m->kv_heads) * m->dim, m->heads * m->value);
#define PLACE(FIELD, SIZE) p->FIELD = (void *)(base + at), at += aligned(SIZE)
  PLACE(branch, rows * m->hidden * 4);
  PLACE(normed, rows * p->ld_hidden * bytes * (rows <= FEW_ROWS ? p->threads : 1));
  PLACE(qkv, rows * p->qkv_width * 4);
  PLACE(mixed, rows * p->ld_mixed * 4);
  PLACE(gate, rows * m->intermediate * 4);
  PLACE(up, rows * m->intermediate * 4);
  PLACE(inner, rows * p->ld_inner * bytes);
  PLACE(attending, p->threads * attending_bytes(p));
  PLACE(states, p->threads * num_segments(p) * most_queries(p) * state_size(p) * 4);
  const int64_t widest = MAX(m->hidden, m->heads * m->dim);
  p->ld_row = padded(MAX(MAX(widest, m->query_rank), MAX(m->intermediate, m->expert_inner)));
  PLACE(blocks, blocks_bytes(widest, rows) * (rows <= FEW_ROWS ? p->threads : 1));
  PLACE(inner_blocks, blocks_bytes(m->intermediate, rows));
  PLACE(row, p->ld_row * 4 * p->threads);
  if (m->experts) {
    const int64_t all = MIN(rows, GROUPED_ROWS) * m->chosen;
    p->ld_route = padded(m->experts + 1), p->ld_expert = padded(m->expert_inner);
    PLACE(route, rows * p->ld_route * 4);
    PLACE(weight, all * 4);
    PLACE(expert, all * 4);
    PLACE(from, all * 4);
    PLACE(at, all * 4);
    PLACE(begin, (m->experts + 2) * 4);
    PLACE(here, m->experts);
    if (m->disk) {
      PLACE(due, m->experts);
      PLACE(loads, m->experts * 4);
      PLACE(ahead, MIN(rows, AHEAD_ROWS) * p->ld_route * 4);
      PLACE(reading, p->threads * aligned(m->disk->reading));
    }
    PLACE(gathered, all * p->ld_hidden * bytes);
    PLACE(gathered_blocks, group_blocks_bytes(m->hidden, all));
    PLACE(expert_gate, all * p->ld_expert * 4);
    PLACE(expert_up, all * p->ld_expert * 4);
    PLACE(expert_inner, all * p->ld_expert * bytes);
    PLACE(expert_blocks, group_blocks_bytes(m->expert_inner, all));
    PLACE(parts, all * m->hidden * 4);
  }
  if (m->projected) {
    p->ld_projected = padded(m->projected), p->ld_conved = padded(m->conved), p->ld_scanned = padded(m->scanned);
    p->ld_buffers = (rows / 2 + 3) * m->state_rows * WIDE; /* of a leaf none is kept, nor of a last child one more */
    PLACE(projected, rows * p->ld_projected * 4);
    PLACE(conved, rows * p->ld_conved * 4);
    PLACE(scanned, rows * p->ld_scanned * 4);
    PLACE(buffers, p->ld_buffers * 4 * p->threads);
    PLACE(factor, 2 * rows * 4 * p->threads);
    PLACE(above, rows * 4);
    PLACE(kept, rows * 4);
    PLACE(last_child, rows * 4);
    PLACE(counts, p->batch * 8);
    PLACE(ends, p->batch * 8);
    at += place_rows(&p->mixer_rows, rows, m->scanned, p->threads, base + at);
  }
  if (m->rank) {
    Rows one;
    p->ld_queries = padded(m->heads * (m->nope + m->rope)), p->head_bytes = place_rows(&one, rows, MAX(m->nope, m->rank), 1, 0);
    PLACE(made, rows * m->query_rank * 4);
    PLACE(queries, rows * p->ld_queries * 4);
    PLACE(by_head, p->threads * p->head_bytes);
    at += place_rows(&p->made_rows, rows, m->query_rank, p->threads, base + at);
    at += place_rows(&p->raised_rows, rows, m->heads * m->value, p->threads, base + at);
  }
  PLACE(reduced, rows * 3 * m->low_rank * 4);
  PLACE(groups, p->batch * (int64_t)sizeof(Group));
  PLACE(members, rows * 8);
  PLACE(common, p->batch * 8);
  PLACE(begun, rows * m->heads * state_size(p) * 4);
  PLACE(run, rows * 8);
  PLACE(reach, rows * 8);
  PLACE(start, (p->batch + 1) * 8);
  PLACE(owner, rows * 8);
  PLACE(node, rows * 8);
  PLACE(tokens, rows * 8);
  PLACE(slots, rows * 8);
  PLACE(positions, rows * 8);
  return at;
}

/* Groups of rows with a common beginning, from [number | of each: rows, slots | their rows]: whole segments that all rows of a
 * group have committed. Returns 0 or 2: a row is none of the pass, or in two groups. */
static int64_t find_groups(Pass *p, const int64_t *shared) {
  const int64_t *row = shared + 1 + 2 * shared[0];
  for (int64_t b = 0; b < p->batch; b++) p->common[b] = 0;
  for (int64_t g = 0, at = 0; g < shared[0]; g++) {
    const int64_t rows = shared[1 + 2 * g];
    Group group = {rows ? row[0] : 0, at, 0, shared[2 + 2 * g]};
    for (int64_t i = 0; i < rows; i++) {
      if (row[i] < 0 || row[i] >= p->batch || p->common[row[i]]) return 2;
      p->common[row[i]] = -1;
      group.slots = MIN(group.slots, p->length[row[i]]);
    }
    group.slots = group.slots / SEGMENT * SEGMENT;
    for (int64_t i = 0; i < rows; i++) {
      p->common[row[i]] = group.slots;
      for (int64_t node = p->start[row[i]]; node < p->start[row[i] + 1]; node++) p->members[at + group.nodes++] = node;
    }
    if (group.nodes && group.slots) p->groups[p->num_groups++] = group, at += group.nodes;
    row += rows;
  }
  return 0;
}

static void look(Pass *p, int64_t i) {
  const uint8_t *sees = seen_from(p, i);
  int64_t run = 0, end = MIN(p->tree_nodes, p->slots[i] - p->length[p->owner[i]] + 1);
  while (run < end && sees[run * p->stride_t]) run++;
  p->run[i] = run, p->reach[i] = end; /* a node sees itself, and nothing behind itself */
}

#endif
