/* Attention of a pass's nodes over the cache.
 *
 * What a node sees, by position: a run of slots [low, high), each at its own position, then ancestors behind that run. Positions
 * are cut at multiples of SEGMENT. Of each segment a query makes a state: the largest score, the sum of exp(score - largest),
 * and the values mixed by these. States are joined from the first on. So bits depend on what is seen and at which
 * positions, and on no slot, width, batch or thread; threads may share out the segments of a row. */
#ifndef FORETELL_ATTENTION_H
#define FORETELL_ATTENTION_H
#include "slots.h"

/* Nodes [first, first + nodes) of row b, and query heads [head, head + heads) of one key-value head. */
typedef struct {
  int64_t b, kv_head, first, nodes, head, heads;
  int64_t low, high; /* slots of all runs; high is the end of what is seen */
} Tile;

/* Sees slots [low, high) and then ancestors, of positions [high, total). */
typedef struct {
  int64_t row, low, high, total;
} Seen;

/* A thread's memory for one tile; `ld`: of states, [mixed, dim | largest | sum]. */
typedef struct {
  float *queries, *scores, *states, *joined, *keys, *values;
  int64_t ld;
} Work;

static Work work_of(Pass *p, int t) {
  const int64_t dim = p->model->dim, n = most_queries(p);
  Work w = {.ld = state_size(p)};
  w.queries = (float *)(p->attending + t * attending_bytes(p));
  w.scores = w.queries + n * dim, w.states = w.scores + n * LD_SCORES, w.joined = w.states + n * w.ld;
  w.keys = w.joined + n * w.ld, w.values = w.keys + PANEL * dim;
  return w;
}

/* What a node sees. seen [rows]: of each the last slot, and all before it; or NULL: as the plan says. */
INLINE Seen seen_by(const Pass *p, const Layer *layer, const int64_t *seen, int64_t row) {
  if (seen) return (Seen){row, 0, seen[row] + 1, seen[row] + 1};
  const int64_t total = p->positions[row] + 1, high = MIN(total, p->length[row / p->nodes] + p->run[row]);
  return (Seen){row, layer->window ? MAX(0, total - layer->window) : 0, high, total};
}

static void look_at(const Pass *p, const Layer *layer, const int64_t *seen, Tile *tile) {
  tile->low = INT64_MAX, tile->high = 0;
  for (int64_t i = 0; i < tile->nodes; i++) {
    const Seen s = seen_by(p, layer, seen, tile->b * p->nodes + tile->first + i);
    tile->low = MIN(tile->low, s.low), tile->high = MAX(tile->high, s.total);
  }
}

static Slots slots_of(const Pass *p, int64_t b, int64_t kv_head, int index) {
  const Model *m = p->model;
  Slots s = {.capacity = p->cache->capacity, .dim = m->dim, .is_bf16 = (int)m->bf16, .bytes = m->dim * (m->bf16 ? 2 : 4)};
  const int64_t at = (b * m->kv_heads + kv_head) * s.capacity * s.bytes;
  s.keys = (const char *)p->cache->keys[index] + at, s.values = (const char *)p->cache->values[index] + at;
  return s;
}

/* Put a key, rotated for its position, and a value into a slot. */
static void remember(Pass *p, const Layer *layer, int index, int64_t b, int64_t kv_head, int64_t slot, int64_t position,
                     const float *k, const float *v) {
  const Slots s = slots_of(p, b, kv_head, index);
  float turned[MAX_DIM];
  rotate(p, layer->rope, k, layer->k_norm, position, turned);
  for (int64_t d = 0; d < s.dim; d += 16) {
    store_as(s.is_bf16, (char *)s.keys + slot * s.bytes, d, 0xffff, v_load(turned + d));
    store_as(s.is_bf16, (char *)s.values + slot * s.bytes, d, 0xffff, v_load(v + d));
  }
}

/* Gemma 2: cap * tanh(scale * score / cap). */
INLINE vec capped(vec score, float scale, float cap) {
  return v_mul(tanh16(v_mul(score, v_all(scale / cap))), v_all(cap));
}

INLINE float score_scale(const Model *m) {
  return m->score_scale != 0.0 ? (float)m->score_scale : 1.0f / sqrtf((float)m->dim);
}

/* Scores at positions [from, to) of a segment become weights, exp(score - largest); returns their sum. */
static float weigh(const Model *m, float *scores, int64_t from, int64_t to, float *largest) {
  const float scale = score_scale(m), cap = (float)m->score_cap;
  const vec by = v_all(cap != 0.0f ? 1.0f : scale);
  vec top = v_all(-INFINITY), sum = v_zero();
  for (int64_t j = from / 16 * 16; j < to; j += 16) {
    const Lanes lanes = first_lanes(to - j) & (Lanes)~first_lanes(MAX(0, from - j));
    if (cap != 0.0f) v_store(scores + j, capped(v_load(scores + j), scale, cap));
    top = v_max_some(lanes, top, v_load(scores + j));
  }
  *largest = v_largest(top);
  for (int64_t j = from / 16 * 16; j < to; j += 16) {
    const Lanes lanes = first_lanes(to - j) & (Lanes)~first_lanes(MAX(0, from - j));
    const vec e = v_keep(lanes, exp16(v_mul(v_sub(v_load(scores + j), v_all(*largest)), by)));
    sum = v_add(sum, e);
    v_store(scores + j, e);
  }
  return sum1(sum);
}

/* Slots of a node's ancestors at positions [from, to), which are behind its run. */
static void find_ancestors(const Pass *p, const Tile *tile, const Seen *s, int64_t from, int64_t to, int64_t *slots) {
  const uint8_t *sees = p->ancestry + tile->b * p->stride_b + s->row % p->nodes * p->stride_n;
  const int64_t length = p->length[tile->b];
  int64_t position = s->high;
  for (int64_t i = from; i < to; i++) slots[i - from] = p->slots[s->row]; /* never read where a plan is sound */
  for (int64_t j = p->run[s->row]; j < p->reach[s->row] && position < to; j++)
    if (sees[j * p->stride_t] && position++ >= from) slots[position - 1 - from] = length + j;
}

/* Values of slots [a, e) of a segment that begins at slot `start`, mixed for all queries of the tile. */
static void mix_runs(const Slots *s, const Work *w, const Tile *tile, const Seen *seen, int64_t start, int64_t a, int64_t e) {
  const int64_t count = tile->nodes * tile->heads, tiles = (count + TILED - 1) / TILED;
  for (int64_t j0 = a; j0 < e; j0 += PANEL) {
    const int64_t j1 = MIN(e, j0 + PANEL);
    const int is_bf16 = s->is_bf16 && tiles == 1;
    const int64_t bytes = is_bf16 ? s->bytes : s->dim * 4;
    const char *values = s->values + j0 * s->bytes;
    for (int64_t j = j0; s->is_bf16 && tiles > 1 && j < j1; j++)
      for (int64_t d = 0; d < s->dim; d += 16)
        v_store(w->values + (j - j0) * s->dim + d, load_as(1, s->values + j * s->bytes, d, 0xffff));
    if (s->is_bf16 && tiles > 1) values = (const char *)w->values;
    if (tiles == 1) /* of one tile there is time for the keys to come */
      for (int64_t b = 0; b < (j1 - j0) * s->bytes && j0 + SEGMENT + PANEL <= s->capacity; b += 64)
        prefetch_l2(s->keys + (j0 + SEGMENT) * s->bytes + b);
    for (int64_t i = 0, left = count, R; left; i += R, left -= R) {
      const int64_t parts = (left + TILED - 1) / TILED;
      R = (left + parts - 1) / parts;
      const float *weights[TILED];
      float *mixed[TILED];
      int64_t from = j0, to = j1; /* what all of them see */
      for (int64_t r = 0; r < R; r++) {
        const Seen *one = &seen[(i + r) / tile->heads];
        weights[r] = w->scores + (i + r) * LD_SCORES + j0 - start, mixed[r] = w->states + (i + r) * w->ld;
        from = MAX(from, one->low), to = MIN(to, one->high);
      }
      to = MAX(from, to);
      for (int64_t r = 0; r < R; r++) {
        const Seen *one = &seen[(i + r) / tile->heads];
        mix(1, is_bf16, weights + r, values, bytes, MAX(j0, one->low) - j0, MIN(from, MIN(j1, one->high)) - j0, s->dim, mixed + r);
      }
      mix((int)R, is_bf16, weights, values, bytes, from - j0, to - j0, s->dim, mixed);
      for (int64_t r = 0; r < R; r++) {
        const Seen *one = &seen[(i + r) / tile->heads];
        mix(1, is_bf16, weights + r, values, bytes, MAX(to, MAX(j0, one->low)) - j0, MIN(j1, one->high) - j0, s->dim, mixed + r);
      }
    }
  }
}

/* States of a tile's queries over one segment, to [nodes * heads, ld]; the sum is 0 of a query that sees nothing there. */
static void attend_segment(Pass *p, const Slots *s, const Work *w, const Tile *tile, const Seen *seen, int64_t segment) {
  const int64_t start = segment * SEGMENT, end = start + SEGMENT, count = tile->nodes * tile->heads, dim = s->dim;
  int64_t a = end, e = start, slots[SEGMENT];
  for (int64_t i = 0; i < tile->nodes; i++) a = MIN(a, MAX(start, seen[i].low)), e = MAX(e, MIN(end, seen[i].high));
  for (int64_t j = a / 16 * 16; j < e; j += PANEL) {
    const int64_t groups = MIN(PANEL / 16, (e - j + 15) / 16);
    for (int64_t g = 0; g < groups; g++) turn_keys(s, j + 16 * g, 0, w->keys + g * key_steps(s) * 16);
    score_all(s, count, w->queries, dim, groups, w->keys, w->scores + j - start, LD_SCORES);
  }
  for (int64_t i = 0; i < tile->nodes; i++) {
    const Seen *one = &seen[i];
    const int64_t low = MAX(start, one->low), behind = MAX(low, one->high), total = MIN(end, one->total);
    if (behind < total) find_ancestors(p, tile, one, behind, total, slots);
    for (int64_t j = behind / 16 * 16; behind < total && j < total; j += 16) {
      int64_t at[16];
      for (int64_t c = 0; c < 16; c++)
        at[c] = j + c < behind ? MIN(j + c, p->slots[one->row]) : slots[MIN(j + c, total - 1) - behind];
      turn_keys(s, 0, at, w->keys);
      score_all(s, tile->heads, w->queries + i * tile->heads * dim, dim, 1, w->keys,
            w->scores + i * tile->heads * LD_SCORES + j - start, LD_SCORES);
    }
    for (int64_t h = 0; h < tile->heads; h++) {
      float *state = w->states + (i * tile->heads + h) * w->ld, *scores = w->scores + (i * tile->heads + h) * LD_SCORES;
      memset(state, 0, w->ld * sizeof(float));
      if (low < total) state[dim + 1] = weigh(p->model, scores, low - start, total - start, state + dim);
    }
  }
  mix_runs(s, w, tile, seen, start, a, e);
  for (int64_t i = 0; i < tile->nodes; i++) {
    const int64_t behind = MAX(MAX(start, seen[i].low), seen[i].high), total = MIN(end, seen[i].total);
    if (behind < total) find_ancestors(p, tile, &seen[i], behind, total, slots);
    for (int64_t h = 0, R; h < tile->heads; h += R) {
      const float *weights[TILED];
      float *mixed[TILED];
      R = MIN(TILED, tile->heads - h);
      for (int64_t j = behind; j < total; j++) {
        for (int64_t r = 0; r < R; r++) {
          const int64_t q = i * tile->heads + h + r;
          weights[r] = w->scores + q * LD_SCORES + j - start, mixed[r] = w->states + q * w->ld;
        }
        mix((int)R, s->is_bf16, weights, s->values + slots[j - behind] * s->bytes, s->bytes, 0, 1, dim, mixed);
      }
    }
  }
}

/* The state of a segment after those before it; joined[dim + 1], the sum, is 0 where there is none. */
static void join_states(const Model *m, const float *state, float *joined) {
  const int64_t dim = m->dim;
  if (state[dim + 1] == 0.0f) return;
  if (joined[dim + 1] == 0.0f) {
    memcpy(joined, state, (dim + 2) * sizeof(float));
    return;
  }
  const float largest = MAX(joined[dim], state[dim]), by = m->score_cap != 0.0 ? 1.0f : score_scale(m);
  float factors[16] = {(joined[dim] - largest) * by, (state[dim] - largest) * by};
  v_store(factors, exp16(v_load(factors)));
  const vec before = v_all(factors[0]), now = v_all(factors[1]);
  for (int64_t d = 0; d < dim; d += 16)
    v_store(joined + d, v_fma(v_load(state + d), now, v_mul(v_load(joined + d), before)));
  joined[dim] = largest, joined[dim + 1] = fmaf(state[dim + 1], factors[1], joined[dim + 1] * factors[0]);
}

/* What a tile's queries mixed, to where the output matrix reads it. */
static void finish_tile(Pass *p, const Layer *layer, const Tile *tile, const float *joined, int64_t ld) {
  const Model *m = p->model;
  const int64_t dim = m->dim;
  const int to_bf16 = m->bf16 && !is_quantised(&layer->o); /* blocks are made of floats */
  for (int64_t i = 0; i < tile->nodes * tile->heads; i++) {
    const int64_t row = tile->b * p->nodes + tile->first + i / tile->heads, head = tile->head + i % tile->heads;
    const float *state = joined + i * ld;
    const vec inverse = v_all(1.0f / state[dim + 1]);
    void *to = p->mixed + (row * p->ld_mixed + head * dim) * (to_bf16 ? 2 : 4);
    const float *gates = p->qkv + row * p->qkv_width + (m->heads + 2 * m->kv_heads + head) * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      vec x = v_mul(v_load(state + d), inverse);
      if (m->gated) x = v_div(x, v_add(exp16(v_sub(v_zero(), v_load(gates + d))), v_all(1.0f)));
      store_as(to_bf16, to, d, 0xffff, x);
    }
  }
}

/* How a pass's tiles are shared out: pieces are segments, or whole tiles where there are many. */
typedef struct {
  int64_t parts, heads, nodes; /* of a group of query heads, and heads in a part; nodes of a tile */
  int64_t tiles, whole;        /* tiles of all; whether they are pieces */
  double total;                /* what all pieces take */
} Sharing;

INLINE Tile tile_at(const Pass *p, const Sharing *s, int64_t i) {
  const int64_t group = p->model->heads / p->model->kv_heads, each = (p->nodes + s->nodes - 1) / s->nodes;
  Tile tile = {.b = i / each / s->parts / p->model->kv_heads, .kv_head = i / each / s->parts % p->model->kv_heads};
  const int64_t head = i / each % s->parts * s->heads;
  tile.head = tile.kv_head * group + head, tile.heads = MIN(s->heads, group - head);
  tile.first = i % each * s->nodes, tile.nodes = MIN(s->nodes, p->nodes - tile.first);
  return tile;
}

/* What a piece takes, in slots by queries: its own work, and something once. */
INLINE double cost_of(const Tile *tile, int64_t from, int64_t to) {
  return (double)(MIN(to, tile->high) - MAX(from, tile->low) + 16) * (double)(tile->heads * tile->nodes + 4);
}

static Sharing share_out(const Pass *p, const Layer *layer, const int64_t *seen) {
  const int64_t group = p->model->heads / p->model->kv_heads, pairs = p->batch * p->model->kv_heads;
  int64_t longest = 0;
  for (int64_t i = 0; i < p->rows; i++) {
    const Seen s = seen_by(p, layer, seen, i);
    longest = MAX(longest, s.total - s.low);
  }
  Sharing s = {.parts = 1};
  while ((group + s.parts - 1) / s.parts > QUERIES || (longest <= SEGMENT && pairs * s.parts < p->threads && s.parts < group)) s.parts++;
  s.heads = (group + s.parts - 1) / s.parts;
  s.parts = (group + s.heads - 1) / s.heads;
  s.nodes = MIN(p->nodes, MAX(1, QUERIES / s.heads));
  s.tiles = pairs * s.parts * ((p->nodes + s.nodes - 1) / s.nodes);
  s.whole = s.tiles >= 8 * p->threads;
  for (int64_t i = 0; i < s.tiles; i++) {
    Tile tile = tile_at(p, &s, i);
    look_at(p, layer, seen, &tile);
    if (s.whole) s.total += cost_of(&tile, tile.low, tile.high);
    for (int64_t j = tile.low / SEGMENT; !s.whole && j * SEGMENT < tile.high; j++)
      s.total += cost_of(&tile, j * SEGMENT, (j + 1) * SEGMENT);
  }
  return s;
}

/* Attention of all nodes of a pass over one layer's keys and values, after put() has put those of a row and key-value head;
 * threads that share a row all put the same bytes, which spares a barrier. seen: see seen_by. */
static void attend(Pass *p, const Layer *layer, int index, const int64_t *seen, Put *put, void *context, int t, unsigned *phase) {
  const Sharing sharing = share_out(p, layer, seen);
  const Work w = work_of(p, t);
  const double threads = p->threads;
  Seen sees[QUERIES];
  double before = 0.0;
  int64_t shared = 0, own = -1, own_place = 0, here = -1; /* own: a tile that begins here and that others have pieces of */
  for (int64_t i = 0; i < sharing.tiles; i++) {
    Tile tile = tile_at(p, &sharing, i);
    look_at(p, layer, seen, &tile);
    const int64_t n0 = tile.low / SEGMENT, n1 = (tile.high + SEGMENT - 1) / SEGMENT, count = tile.nodes * tile.heads;
    int first = -1, last = -1, mine = 0;
    int64_t from = n1, to = n0; /* segments of this thread */
    for (int64_t j = n0; j < n1; j++) {
      const double cost = sharing.whole ? cost_of(&tile, tile.low, tile.high) : cost_of(&tile, j * SEGMENT, (j + 1) * SEGMENT);
      last = (int)MIN(threads - 1, (before + cost / 2) * threads / sharing.total);
      if (first < 0) first = last;
      if (last == t) from = MIN(from, j), to = sharing.whole ? n1 : j + 1, mine = 1;
      before += cost;
      if (sharing.whole) break;
    }
    const int64_t place = shared;
    shared += first != last;
    if (!mine) continue;
    const int64_t pair = tile.b * p->model->kv_heads + tile.kv_head;
    if (pair != here) put(context, layer, index, tile.b, tile.kv_head), here = pair;
    const Slots s = slots_of(p, tile.b, tile.kv_head, index);
    for (int64_t n = 0; n < tile.nodes; n++) sees[n] = seen_by(p, layer, seen, tile.b * p->nodes + tile.first + n);
    for (int64_t q = 0; q < count; q++) {
      const int64_t row = tile.b * p->nodes + tile.first + q / tile.heads, head = tile.head + q % tile.heads;
      float turned[MAX_DIM];
      rotate(p, layer->query_rope, p->qkv + row * p->qkv_width + head * s.dim, layer->q_norm, p->positions[row], turned);
      put_query(&s, turned, w.queries + q * s.dim);
      w.joined[q * w.ld + s.dim + 1] = 0.0f;
    }
    for (int64_t j = from; j < to; j++) {
      Work one = w;
      if (first != last) one.states = p->states + (place * num_segments(p) + j) * most_queries(p) * w.ld;
      attend_segment(p, &s, &one, &tile, sees, j);
      for (int64_t q = 0; first == last && q < count; q++) join_states(p->model, w.states + q * w.ld, w.joined + q * w.ld);
    }
    if (first == last) finish_tile(p, layer, &tile, w.joined, w.ld);
    else if (first == t) own = i, own_place = place;
  }
  if (!shared) return;
  barrier(p, phase);
  if (own < 0) return;
  Tile tile = tile_at(p, &sharing, own);
  look_at(p, layer, seen, &tile);
  const int64_t count = tile.nodes * tile.heads;
  for (int64_t q = 0; q < count; q++) w.joined[q * w.ld + p->model->dim + 1] = 0.0f;
  for (int64_t j = tile.low / SEGMENT; j * SEGMENT < tile.high; j++) {
    const float *states = p->states + (own_place * num_segments(p) + j) * most_queries(p) * w.ld;
    for (int64_t q = 0; q < count; q++) join_states(p->model, states + q * w.ld, w.joined + q * w.ld);
  }
  finish_tile(p, layer, &tile, w.joined, w.ld);
}

/* Keys and values of the nodes of a pass. */
static void put_nodes(void *context, const Layer *layer, int index, int64_t b, int64_t kv_head) {
  Pass *p = context;
  const Model *m = p->model;
  for (int64_t i = b * p->nodes; i < (b + 1) * p->nodes; i++) {
    const float *k = p->qkv + i * p->qkv_width + (m->heads + kv_head) * m->dim;
    remember(p, layer, index, b, kv_head, p->slots[i], p->positions[i], k, k + m->kv_heads * m->dim);
  }
}

#endif
