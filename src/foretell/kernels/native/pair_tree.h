/* A tree of guesses of an EAGLE head in one call: a pass a depth, and between passes ``grow.h``, in one parallel region. */
#ifndef FORETELL_PAIR_TREE_H
#define FORETELL_PAIR_TREE_H
#include "grow.h"
#include "pair.h"

typedef struct {
  Tree *trees;               /* [batch] */
  int64_t *columns, *base;   /* [batch * widest, width] children found; [batch] slot of the pending token's pair */
  int64_t *before;           /* [batch + 1] where each row's outputs of the depth before begin */
  float *scores, *hidden[2]; /* of those children; outputs of a depth's nodes, [batch * widest, hidden], in turn */
  char *first, *later;       /* scratch of the passes */
} Grove;

/* Scratch of passes over up to `rows` rows: of few every thread has copies. */
static int64_t widest_scratch(const Pair *head, const Cache *cache, int64_t batch, int64_t rows, int64_t threads) {
  int64_t most = 0;
  for (int few = 0; few < 2; few++) {
    const int64_t each = few ? MIN(rows, FEW_ROWS) : rows;
    PairPass pass = {.p = {.model = &head->model, .cache = cache, .batch = batch, .rows = each, .threads = (int)threads},
                     .head = head};
    most = MAX(most, place_pair(&pass, each, 0));
  }
  return most;
}

/* Lay everything out behind `base`; returns its bytes. asked, rows: rows that guess, and the pairs that they read first. */
static int64_t place_grove(Grove *grove, const Pair *head, const Cache *cache, const Growth *g, int64_t batch, int64_t asked,
                           int64_t rows, int64_t threads, char *base) {
  const int64_t most = asked * widest_level(g);
  Tree tree;
  PairPass first = {.p = {.model = &head->model, .cache = cache, .batch = batch, .rows = rows, .threads = (int)threads},
                    .head = head};
  int64_t at = 0;
#define PLACE_GROVE(FIELD, SIZE) grove->FIELD = (void *)(base + at), at += aligned(SIZE)
  PLACE_GROVE(trees, batch * (int64_t)sizeof(Tree));
  for (int64_t b = 0; b < batch; b++) at += place_tree(base ? &grove->trees[b] : &tree, g, base + at);
  PLACE_GROVE(columns, most * g->width * 8);
  PLACE_GROVE(scores, most * g->width * 4);
  PLACE_GROVE(base, batch * 8);
  PLACE_GROVE(before, (batch + 1) * 8);
  for (int i = 0; i < 2; i++) PLACE_GROVE(hidden[i], most * head->model.hidden * 4);
  PLACE_GROVE(first, place_pair(&first, asked, 0));
  PLACE_GROVE(later, widest_scratch(head, cache, batch, most, threads));
  return at;
}

int64_t foretell_pair_tree_scratch(const Pair *head, const Cache *cache, int64_t batch, int64_t asked, int64_t rows,
                                   const Growth *g, int64_t threads) {
  Grove grove;
  return place_grove(&grove, head, cache, g, batch, asked, rows, threads, 0);
}

/* The candidates after every alive node of a depth, by all threads: into columns and scores. Logits are overwritten. */
static void find_children(Grove *grove, PairPass *one, const Draw *draw, const Growth *g, int64_t depth, int t) {
  const int64_t n = one->head->num_outputs;
  for (int64_t i = t; i < one->num_chosen; i += one->p.threads) {
    const int64_t b = one->p.owner[one->chosen[i]];
    const int greedy = draw->inverse_temperature[b] == 0;
    float *z = one->logits + i * n;
    if (greedy) soften(z, n, 1.0f); /* ``Processors.softened``: filters are not its own */
    else temper(draw, b, z, n, one->spare + t * n);
    const uint64_t *key = !greedy && draw->how == DRAW_COUPLED ? draw->keys + b * draw->depth + depth : 0;
    race_top_row(z, n, key, draw->table, g->width, grove->columns + i * g->width, grove->scores + i * g->width);
  }
}

/* By one thread: candidates join their trees, and the rows of the next pass are chosen. Returns 0 where there is none, or
 * where they do not fit into the cache (*problem). */
static int next_depth(Grove *grove, PairPass *one, PairPass *next, const Draw *draw, const Growth *g, int64_t depth,
                      const int64_t *limits, int64_t *problem) {
  const Pair *head = one->head;
  const int64_t batch = one->p.batch, H = head->model.hidden;
  int64_t width = 0, rows = 0;
  for (int64_t b = 0; b < batch; b++) {
    Tree *tree = &grove->trees[b];
    const int greedy = draw->inverse_temperature[b] == 0;
    for (int64_t j = 0; j < tree->frontier_size && depth < limits[b]; j++) {
      const int64_t i = one->chosen_at[b] + j;
      add_children(tree, g, j, grove->columns + i * g->width, grove->scores + i * g->width,
                   one->logits + i * head->num_outputs, head->ids, draw->how == DRAW_COUPLED, greedy);
    }
    const int64_t wanted = depth + 1 < g->depth ? descend(tree, g, depth + 1, limits[b]) : 0;
    width = MAX(width, wanted), rows += wanted;
  }
  if (!width) return 0;
  const float *fed = one->fed;
  Pass *p = &next->p;
  memcpy(grove->before, one->chosen_at, (batch + 1) * sizeof(int64_t));
  p->nodes = width, p->rows = rows;
  place_pair(next, rows, grove->later);
  next->fed = grove->hidden[(depth + 1) % 2];
  p->stride_n = most_fed(g), p->stride_t = 1;
  p->stride_b = batch > 1 ? grove->trees[1].sees - grove->trees[0].sees : 0;
  p->ancestry = grove->trees[0].sees + grove->trees[0].num_fed * p->stride_n;
  p->tree_nodes = grove->trees[0].num_fed + width;
  for (int64_t b = 0, i = 0; b < batch; b++) {
    Tree *tree = &grove->trees[b];
    const int64_t before = tree->first;
    feed(tree, g, width);
    ((int64_t *)p->length)[b] = grove->base[b];
    p->start[b] = next->chosen_at[b] = i, p->start[b + 1] = next->chosen_at[b + 1] = i + tree->frontier_size;
    if (tree->frontier_size && grove->base[b] + tree->num_fed > p->cache->capacity) {
      *problem = 2;
      return 0;
    }
    for (int64_t j = 0; j < tree->frontier_size; j++, i++) {
      const int64_t at = tree->frontier[j], slot = tree->first + j;
      p->owner[i] = b, p->node[i] = j;
      ((int64_t *)p->tokens)[i] = tree->tokens[at];
      ((int64_t *)p->slots)[i] = grove->base[b] + slot;
      ((int64_t *)p->positions)[i] = grove->base[b] + tree->depths[slot];
      next->from[i] = fed + (grove->before[b] + tree->slot[tree->parent[at]] - before) * H;
      next->chosen[i] = i;
      look(p, i);
    }
  }
  return 1;
}

/* Trees of up to g->size guesses after pending [batch], none of row b deeper than limits[b], once the pairs not yet read are
 * (see ``first_pairs``). found, parents, labels [batch, size + 1]: tokens, -1 behind num_nodes[b], and `label` at the guesses
 * of rows that are not greedy. */
int64_t foretell_pair_tree(const Pair *head, const Cache *cache, int64_t threads, int64_t batch, int64_t width,
                           const int64_t *tokens, const float *features, const int64_t *start, const int64_t *count,
                           const int64_t *limits, const Draw *draw, const Growth *g, int64_t label,
                           const int64_t *pending, int64_t *found, int64_t *parents, int64_t *labels,
                           int64_t *num_nodes, char *scratch) {
  const int64_t each = g->size + 1, asked = num_asked(batch, limits, 0), pairs = num_asked(batch, limits, count);
  Grove grove;
  place_grove(&grove, head, cache, g, batch, asked, pairs, threads, scratch);
  PairPass passes[2];
  for (int i = 0; i < 2; i++)
    passes[i] = (PairPass){.p = {.model = &head->model, .cache = cache, .batch = batch, .nodes = i ? 1 : width,
                                 .tree_nodes = 1, .rows = i ? asked : pairs, .threads = (int)threads},
                           .head = head};
  place_pair(&passes[0], asked, grove.first);
  passes[0].fed = grove.hidden[0];
  for (int64_t b = 0; b < batch; b++) plant(&grove.trees[b], g, limits[b]);
  int64_t problem = g->width > MAX_CHILDREN ? 4 : first_pairs(&passes[0], tokens, features, start, count, limits, grove.base);
  int going = 1;
#pragma omp parallel num_threads(threads) if (!problem)
  if (!problem) {
    const int t = omp_get_thread_num();
    unsigned phases[2] = {0, 0};
#pragma omp single
    passes[0].p.threads = passes[1].p.threads = omp_get_num_threads();
    for (int64_t depth = 0; going; depth++) {
      PairPass *one = &passes[depth > 0];
      unsigned *phase = &phases[depth > 0];
      run_pairs(one, t, phase);
      barrier(&one->p, phase);
      find_children(&grove, one, draw, g, depth, t);
      barrier(&one->p, phase);
      if (t == 0) going = next_depth(&grove, one, &passes[1], draw, g, depth, limits, &problem);
      barrier(&one->p, phase);
    }
  }
  for (int64_t i = 0; i < batch * each; i++) parents[i] = -1;
  for (int64_t b = 0; b < batch && !problem; b++) {
    num_nodes[b] = finish_tree(&grove.trees[b], found + b * each, parents + b * each);
    found[b * each] = pending[b];
    for (int64_t i = 1; i < num_nodes[b] && draw->inverse_temperature[b] != 0; i++) labels[b * each + i] = label;
  }
  return problem;
}

#endif
