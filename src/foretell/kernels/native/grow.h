/* Trees of guesses grown by path probability: what ``draft/growing/dynamic.py`` does between passes, for one row.
 *
 * A node that is read has up to `width` children found after it, the candidates. Each has a place: the probability, under
 * the draft, that the walk reaches it. The `size` candidates of largest place are the tree; ties go to the earlier one, so
 * no node is taken before its parent. A depth is read where its candidates are among the best so far.
 */
#ifndef FORETELL_GROW_H
#define FORETELL_GROW_H
#include "draw.h"

enum { GROW_BEST, GROW_BEAM };
enum { MAX_CHILDREN = 64 }; /* of a node: draft.shapes.MAX_WIDTH */
#define GREEDY_SHARPNESS 1.5f /* as _GREEDY_SHARPNESS there, which says why */

typedef struct {
  int64_t kind;               /* GROW_BEST: dyspec, opt_tree; GROW_BEAM: eagle2, which reads the best `width` of each depth */
  int64_t size, width, depth; /* most guesses; most children of a node; deepest guess */
  float least, gain;          /* a place below `least` is not taken; a depth that adds less than `gain` is the last */
} Growth;

typedef struct {
  int64_t num, num_fed, num_best, frontier_size, first; /* candidates; slots fed; the best; alive nodes read last, and their first slot */
  int64_t last;                                         /* the first candidate found after the nodes read last */
  float total;                                          /* sum of the best places a depth ago */
  int64_t *tokens, *parent, *slot, *frontier;           /* of candidates; slot -1: not read; candidates read last */
  int64_t *best;                                        /* the best candidates, largest place first */
  float *place;
  int64_t *depths; /* of slots */
  uint8_t *sees;   /* [most_fed, most_fed] by slot */
} Tree;

/* Most nodes of one depth that are read in a row, and of all depths, the root included. */
static int64_t widest_level(const Growth *g) { return g->kind == GROW_BEAM ? g->width : g->size; }
static int64_t most_fed(const Growth *g) {
  int64_t total = 1;
  for (int64_t at = 1, level = 1; at < g->depth; at++) {
    level = MIN(level * g->width, widest_level(g));
    total += level;
  }
  return total;
}

/* Lay a row's arrays out behind `base`; returns their bytes. */
static int64_t place_tree(Tree *tree, const Growth *g, char *base) {
  const int64_t fed = most_fed(g), candidates = 1 + fed * g->width;
  int64_t at = 0;
#define PLACE_TREE(FIELD, SIZE) tree->FIELD = (void *)(base + at), at += ((SIZE) + 63) / 64 * 64
  PLACE_TREE(tokens, candidates * 8);
  PLACE_TREE(parent, candidates * 8);
  PLACE_TREE(slot, candidates * 8);
  PLACE_TREE(place, candidates * 4);
  PLACE_TREE(frontier, MAX(widest_level(g), 1) * 8);
  PLACE_TREE(best, (g->size + 1) * 8);
  PLACE_TREE(depths, fed * 8);
  PLACE_TREE(sees, fed * fed);
  return at;
}

/* The root, which is read as slot 0. */
static void plant(Tree *tree, const Growth *g, int64_t limit) {
  tree->num = tree->num_fed = tree->last = 1, tree->num_best = tree->first = 0, tree->total = 0;
  tree->frontier_size = limit > 0, tree->frontier[0] = 0;
  tree->parent[0] = -1, tree->slot[0] = 0, tree->place[0] = 1, tree->depths[0] = 0;
  memset(tree->sees, 0, most_fed(g) * most_fed(g));
  tree->sees[0] = 1;
}

/* Children after node `from` of the frontier: columns and their scores, of which those above 0 are tokens. `chance` [n] is
 * the distribution; greedy and raced children share what their parent is worth by score (``_worth_coupled``). */
static void add_children(Tree *tree, const Growth *g, int64_t from, const int64_t *columns, const float *scores,
                         const float *chance, const int64_t *ids, int raced, int greedy) {
  const int64_t parent = tree->frontier[from];
  const float value = tree->place[parent];
  float worth[MAX_CHILDREN], total = 0;
  for (int64_t c = 0; c < g->width; c++) {
    const float p = MIN(scores[c] > 0 ? chance[columns[c]] : 0.0f, 1.0f);
    worth[c] = greedy ? powf(p, GREEDY_SHARPNESS) : raced ? MAX(scores[c], 0.0f) : p;
    total += worth[c];
  }
  for (int64_t c = 0; c < g->width; c++) {
    if (!(scores[c] > 0)) continue;
    const int64_t at = tree->num++;
    tree->tokens[at] = ids ? ids[columns[c]] : columns[c], tree->parent[at] = parent, tree->slot[at] = -1;
    tree->place[at] = value * (greedy || raced ? (total > 0 ? worth[c] / total : 0.0f) : worth[c]);
    if (!(tree->place[at] > 0) || tree->place[at] < g->least) continue;
    int64_t rank = tree->num_best; /* behind all that are worth as much */
    if (rank == g->size && !(tree->place[at] > tree->place[tree->best[rank - 1]])) continue;
    if (rank < g->size) tree->num_best++;
    else rank--;
    for (; rank > 0 && tree->place[at] > tree->place[tree->best[rank - 1]]; rank--) tree->best[rank] = tree->best[rank - 1];
    tree->best[rank] = at;
  }
}

/* Whether candidate `at` is to be read: of the best, or of the beam. */
static int is_wanted(const Tree *tree, const Growth *g, int64_t at) {
  if (g->kind == GROW_BEST) {
    for (int64_t i = 0; i < tree->num_best; i++)
      if (tree->best[i] == at) return 1;
    return 0;
  }
  int64_t better = 0;
  for (int64_t i = tree->last; i < tree->num; i++)
    better += tree->place[i] > tree->place[at] || (tree->place[i] == tree->place[at] && i < at);
  return tree->place[at] > 0 && better < g->width;
}

/* Choose what of the candidates found last is read next, at `depth`; returns how many. */
static int64_t descend(Tree *tree, const Growth *g, int64_t depth, int64_t limit) {
  float total = 0;
  for (int64_t i = 0; i < tree->num_best; i++) total += tree->place[tree->best[i]];
  const int pays = g->kind == GROW_BEAM || total - tree->total >= g->gain;
  tree->total = total;
  int64_t count = 0;
  for (int64_t at = tree->last; pays && depth < limit && at < tree->num; at++)
    if (is_wanted(tree, g, at)) tree->frontier[count++] = at;
  return tree->frontier_size = count;
}

/* Give the chosen ones their slots, `width` in all: where a row has fewer, those behind see themselves alone. */
static void feed(Tree *tree, const Growth *g, int64_t width) {
  const int64_t stride = most_fed(g);
  tree->first = tree->num_fed;
  for (int64_t j = 0; j < width; j++) {
    const int64_t slot = tree->num_fed++;
    uint8_t *sees = tree->sees + slot * stride;
    tree->depths[slot] = 0;
    if (j < tree->frontier_size) {
      const int64_t at = tree->frontier[j], above = tree->slot[tree->parent[at]];
      memcpy(sees, tree->sees + above * stride, stride);
      tree->slot[at] = slot, tree->depths[slot] = tree->depths[above] + 1;
    }
    sees[slot] = 1;
  }
  tree->last = tree->num;
}

static void sort_ids(int64_t *ids, int64_t n) {
  for (int64_t i = 1; i < n; i++) {
    const int64_t id = ids[i];
    int64_t j = i;
    for (; j > 0 && ids[j - 1] > id; j--) ids[j] = ids[j - 1];
    ids[j] = id;
  }
}

/* The best candidates in depth-first order, siblings in theirs, behind the root: tokens and parents [size + 1]. Returns how
 * many nodes there are. tokens[0] is the caller's. */
static int64_t finish_tree(Tree *tree, int64_t *tokens, int64_t *parents) {
  int64_t *ids = tree->best, *node_of = tree->slot, above = 0, node = 0, count = tree->num_best;
  sort_ids(ids, count);
  parents[0] = -1, node_of[0] = 0;
  for (int64_t i = 0; i < count; i++) node_of[ids[i]] = -1; /* not numbered yet */
  /* Below `above` the first child without a number; where there is none, back to its own parent. Parents of chosen ones are
   * chosen, and are numbered before. */
  for (int64_t at = 0; node < count;) {
    int64_t next = -1;
    for (int64_t i = 0; i < count && next < 0; i++)
      if (tree->parent[ids[i]] == at && node_of[ids[i]] < 0) next = ids[i];
    if (next < 0) {
      at = tree->parent[at], above = node_of[at];
      continue;
    }
    node_of[next] = ++node;
    tokens[node] = tree->tokens[next], parents[node] = above;
    at = next, above = node;
  }
  return node + 1;
}

#endif
