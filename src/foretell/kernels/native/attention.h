/* Attention of a pass's nodes over the cache.
 *
 * What a node sees, by position: a run of slots [low, high), each at its own position, then ancestors behind that run. Positions
 * are cut at multiples of SEGMENT. Of each segment a query makes a state: the largest score, the sum of exp(score - largest),
 * and the values mixed by these. States are joined from the first on. So bits depend on what is seen and at which
 * positions, and on no slot, width, batch or thread; threads may share out the segments of a row.
 *
 * Rows with a common beginning (Pass.groups) hold copies of it. The slots of one are read for the queries of all, before what
 * each row has of its own: a tile of such a group leaves joined states, from which the tiles of its rows go on. */
#ifndef FORETELL_ATTENTION_H
#define FORETELL_ATTENTION_H
#include "slots.h"

/* Nodes [first, first + nodes) of row b, and query heads [head, head + heads) of one key-value head. Of a group: of its
 * `members`, and b is one of its rows. */
typedef struct {
  int64_t b, kv_head, first, nodes, head, heads;
  const int64_t *members; /* or NULL */
  int64_t low, high, last; /* slots of all runs; high is the end of what is seen, last the greatest low */
} Tile;

/* Sees slots [low, high) and then ancestors, of positions [high, total). */
typedef struct {
  int64_t row, low, high, total;
} Seen;

/* A thread's memory for one tile: queries as turned keys meet them, and as they are; `ld`: of states, [mixed, dim | largest |
 * sum]. */
typedef struct {
  float *turned, *queries, *scores, *states, *joined, *keys, *values;
  float *key_scales, *value_scales; /* of a segment's slots, where they are coded ... */
  char *opened;                     /* ... and some of these, opened */
  int64_t ld, ld_queries;
} Work;

static Work work_of(Pass *p, int t) {
  const int64_t n = most_queries(p);
  Work w = {.ld = state_size(p), .ld_queries = padded_dim(p)};
  w.turned = (float *)(p->attending + t * attending_bytes(p)), w.queries = w.turned + n * w.ld_queries;
  w.scores = w.queries + n * w.ld_queries, w.states = w.scores + n * LD_SCORES, w.joined = w.states + n * w.ld;
  w.keys = w.joined + n * w.ld, w.values = w.keys + PANEL * w.ld_queries;
  w.key_scales = w.values + 2 * PANEL * w.ld_queries, w.value_scales = w.key_scales + LD_SCORES;
  w.opened = (char *)(w.values + PANEL * w.ld_queries);
  return w;
}

/* What a node sees: of the slots that its row has in common with others (grouped), or of the rest. seen [rows]: of each the
 * last slot, and all before it; or NULL: as the plan says. A window ends at the node's own position. */
INLINE Seen seen_by(const Pass *p, const Layer *layer, const int64_t *seen, int64_t row, int grouped) {
  const int64_t own = p->positions[row] + 1, high = MIN(own, p->length[p->owner[row]] + p->run[row]);
  const int64_t common = p->num_groups && !layer->sinks ? p->common[p->owner[row]] : 0;
  int64_t low = layer->window ? MAX(0, own - layer->window) : 0;
  if (low <= layer->sinks) low = 0;
  if (seen) return (Seen){row, low, seen[row] + 1, seen[row] + 1};
  if (grouped) return (Seen){row, MIN(low, common), common, common};
  return (Seen){row, MAX(low, common), high, own};
}

/* Node i of a tile among all of the pass. */
INLINE int64_t node_of(const Pass *p, const Tile *tile, int64_t i) {
  return tile->members ? tile->members[tile->first + i] : p->start[tile->b] + tile->first + i;
}

static void look_at(const Pass *p, const Layer *layer, const int64_t *seen, Tile *tile) {
  tile->low = INT64_MAX, tile->high = tile->last = 0;
  for (int64_t i = 0; i < tile->nodes; i++) {
    const Seen s = seen_by(p, layer, seen, node_of(p, tile, i), tile->members != 0);
    tile->low = MIN(tile->low, s.low), tile->high = MAX(tile->high, s.total), tile->last = MAX(tile->last, s.low);
  }
}

static Slots slots_of(const Pass *p, int64_t b, int64_t kv_head, int index) {
  const Model *m = p->model;
  Slots s = {.capacity = p->cache->capacity, .dim = m->dim, .value_dim = value_dim(m), .is_bf16 = (int)m->bf16, .bytes = slot_bytes(m, p->cache)};
  s.coded = (int)p->cache->coded;
  const int64_t at = (b * m->kv_heads + kv_head) * s.capacity * s.bytes;
  s.keys = (const char *)p->cache->keys[index] + at;
  s.values = m->rank ? s.keys : (const char *)p->cache->values[index] + at;
  return s;
}

/* x [dim] times factors. */
static void scale_row(float *x, const float *by, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 16) v_store(x + d, v_mul(v_load(x + d), v_load(by + d)));
}

/* Put a key, rotated for its position, and a value into a slot; of latent attention the key alone. */
static void remember(Pass *p, const Layer *layer, int index, int64_t b, int64_t kv_head, int64_t slot, int64_t position,
                     const float *k, const float *v) {
  const Slots s = slots_of(p, b, kv_head, index);
  float turned[MAX_DIM];
  rotate(p, layer->rope, k, layer->k_norm, position, turned);
  if (s.coded) {
    if (layer->unspread) scale_row(turned, layer->unspread + kv_head * s.dim, s.dim);
    code_slot(turned, s.dim, (char *)s.keys + slot * s.bytes);
    if (s.values != s.keys) code_slot(v, s.dim, (char *)s.values + slot * s.bytes);
    return;
  }
  for (int64_t d = 0; d < s.dim; d += 16) {
    store_as(s.is_bf16, (char *)s.keys + slot * s.bytes, d, 0xffff, v_load(turned + d));
    if (s.values != s.keys) store_as(s.is_bf16, (char *)s.values + slot * s.bytes, d, 0xffff, v_load(v + d));
  }
}

/* Gemma 2: cap * tanh(scale * score / cap). */
INLINE vec capped(vec score, float scale, float cap) {
  return v_mul(tanh16(v_mul(score, v_all(scale / cap))), v_all(cap));
}

INLINE float score_scale(const Model *m) {
  return m->score_scale != 0.0 ? (float)m->score_scale : 1.0f / sqrtf((float)m->dim);
}

/* A query, rotated, as keys meet it: x [dim] is rounded as they are. */
static void put_query(const Slots *s, const float *x, float *turned, float *query) {
  for (int64_t d = 0; d < s->dim; d += 16) store_as(s->is_bf16, query, d, 0xffff, v_load(x + d));
  memset(turned, 0, turned_size(s) * sizeof(float));
  if (PAIRED || !s->is_bf16) memcpy(turned, query, s->dim * (s->is_bf16 ? 2 : 4));
  for (int64_t d = 0; !PAIRED && s->is_bf16 && d < s->dim; d++)
    turned[d ^ 1] = from_bf16(((const bf16 *)query)[d]);
}

/* Which of 16 positions from j on lie in [from, to). */
INLINE Lanes lanes_in(int64_t j, int64_t from, int64_t to) {
  return j >= from && j + 16 <= to ? 0xffff : first_lanes(to - j) & (Lanes)~first_lanes(MAX(0, from - j));
}

/* The largest score at positions [from, to) of a segment; they are capped first where a model does so. */
static float largest_of(const Model *m, float *scores, int64_t from, int64_t to) {
  const float scale = score_scale(m), cap = (float)m->score_cap;
  for (int64_t j = from / 16 * 16; cap != 0.0f && j < to; j += 16) v_store(scores + j, capped(v_load(scores + j), scale, cap));
  vec top = v_all(-INFINITY);
  for (int64_t j = from / 16 * 16; j < to; j += 16) {
    const Lanes lanes = lanes_in(j, from, to);
    top = v_max_some(lanes, top, v_load(scores + j));
  }
  return v_largest(top);
}

/* 16 scores become weights; returns what sum becomes: see weigh. */
INLINE vec weigh16(const int is_bf16, const Lanes lanes, float *scores, const float *scales, int64_t j, vec largest, vec by, vec sum) {
  vec e = exp_below(v_mul(v_sub(v_load(scores + j), largest), by));
  if (lanes != 0xffff) e = v_keep(lanes, e);
  if (scales) sum = v_add(sum, e), e = v_mul(e, v_load_some(lanes, scales + j));
  if (PAIRED && is_bf16) {
    const bf16x16 rounded = half_of(e);
    memcpy((bf16 *)scores + j, &rounded, 32); /* what is overwritten has been read */
    return scales ? sum : v_add(sum, widen(rounded));
  }
  if (is_bf16) e = round_bf16(e);
  v_store(scores + j, e);
  return scales ? sum : v_add(sum, e);
}

/* Scores at positions [from, to) of a segment become weights, exp(score - largest), times the scales of values where there
 * are some; returns the sum without these. */
static float weigh(const Model *m, int is_bf16, float *scores, const float *scales, int64_t from, int64_t to, float largest) {
  const vec by = v_all(m->score_cap != 0.0 ? 1.0f : score_scale(m)), top = v_all(largest);
  vec sum = v_zero();
  for (int64_t j = from / 16 * 16; j < to; j += 16) {
    const Lanes lanes = lanes_in(j, from, to);
    if (lanes != 0xffff) sum = weigh16(is_bf16, lanes, scores, scales, j, top, by, sum);
    else if (is_bf16 && !scales) sum = weigh16(1, 0xffff, scores, 0, j, top, by, sum);
    else sum = weigh16(is_bf16, 0xffff, scores, scales, j, top, by, sum);
  }
  return sum1(sum);
}

/* Where a node's run ends for its values, which go by pairs of positions: before one whose partner is an ancestor. */
INLINE int64_t end_of_run(const Seen *s) { return s->total > s->high ? s->high / 2 * 2 : s->high; }

/* Slots at positions [from, to) of a node that end behind its run. */
static void find_slots(const Pass *p, const Tile *tile, const Seen *s, int64_t from, int64_t to, int64_t *slots) {
  const uint8_t *sees = seen_from(p, s->row);
  int64_t position = s->high;
  for (int64_t i = from; i < to; i++) slots[i - from] = MIN(i, p->slots[s->row]);
  for (int64_t j = p->run[s->row]; j < p->reach[s->row] && position < to; j++)
    if (sees[j * p->stride_t] && position++ >= from) slots[position - 1 - from] = p->length[tile->b] + j;
}

/* Scores of all queries of a tile with keys in slots [a, e) of a segment that begins at `start`. */
static void score_runs(const Slots *s, const Work *w, int64_t count, int64_t start, int64_t a, int64_t e) {
  const int64_t size = 16 * turned_size(s);
  for (int64_t j0 = a / 16 * 16; j0 < e; j0 += PANEL) {
    const int64_t groups = MIN(PANEL / 16, (e - j0 + 15) / 16);
    const Slots run = open_run(s, j0, 16 * groups, w->opened, 0);
    if (count <= FEW_QUERIES) {
      for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < 16 * groups; j += 16) {
          const char *at[16];
          const int tail = j + 16 > run.capacity;
          for (int64_t c = 0; tail && c < 16; c++) at[c] = run.keys + MIN(j + c, run.capacity - 1) * run.bytes;
          if (i == 0 && !s->coded) fetch_ahead(run.keys + j * run.bytes, 16 * run.bytes);
          vec x = scores16(&run, w->queries + i * w->ld_queries, run.keys + j * run.bytes, tail ? at : 0);
          if (s->coded) x = v_mul(x, v_load(w->key_scales + j0 - start + j));
          v_store(w->scores + i * LD_SCORES + j0 - start + j, x);
        }
      continue;
    }
    for (int64_t g = 0; g < groups; g++) {
      if (!s->coded) fetch_ahead(run.keys + 16 * g * run.bytes, 16 * run.bytes);
      turn_keys(&run, 16 * g, w->keys + g * size);
    }
    for (int64_t i = 0, left = count, R; left; i += R, left -= R) {
      const int64_t parts = (left + CHAINED - 1) / CHAINED;
      R = (left + parts - 1) / parts;
      score_turned(s, (int)R, groups, w->keys, w->turned + i * w->ld_queries, w->ld_queries, w->scores + i * LD_SCORES + j0 - start);
      for (int64_t r = 0; s->coded && r < R; r++)
        for (int64_t j = j0 - start; j < j0 - start + 16 * groups; j += 16) {
          float *scores = w->scores + (i + r) * LD_SCORES + j;
          v_store(scores, v_mul(v_load(scores), v_load(w->key_scales + j)));
        }
    }
  }
}

/* Weights of a node's queries in a segment that begins at `start`, after scores of its ancestors there. */
static void weigh_node(Pass *p, const Slots *s, const Work *w, const Tile *tile, const Seen *seen, int64_t node, int64_t start) {
  const Seen *one = &seen[node];
  const int64_t low = MAX(start, one->low), behind = MAX(low, one->high), total = MIN(start + SEGMENT, one->total);
  const int64_t dim = s->value_dim;
  int64_t slots[SEGMENT];
  float scales[LD_SCORES]; /* of values, by position */
  Slots opened = *s;
  if (behind < total) find_slots(p, tile, one, behind / 16 * 16, total, slots);
  if (s->coded) {
    opened.coded = 0;
    memcpy(scales, w->value_scales, MAX(0, MIN(behind, total) - start) * sizeof(float));
    for (int64_t j = behind; j < total; j++) scales[j - start] = scale_of(s, s->values + s->bytes * slots[j - behind / 16 * 16]);
  }
  for (int64_t j = behind / 16 * 16; behind < total && j < total; j += 16) {
    const char *keys[16];
    float of_keys[16];
    for (int64_t c = 0; c < 16; c++) {
      keys[c] = s->keys + s->bytes * slots[MIN(j + c, total - 1) - behind / 16 * 16];
      if (!s->coded) continue;
      of_keys[c] = scale_of(s, keys[c]);
      keys[c] = w->opened + c * open_slot(s, keys[c], w->opened + c * s->dim * (s->is_bf16 ? 2 : 4));
    }
    for (int64_t q = node * tile->heads; q < (node + 1) * tile->heads; q++) {
      const vec x = scores16(&opened, w->queries + q * w->ld_queries, 0, keys);
      v_store(w->scores + q * LD_SCORES + j - start, s->coded ? v_mul(x, v_load(of_keys)) : x);
    }
  }
  for (int64_t q = node * tile->heads; q < (node + 1) * tile->heads; q++) { /* before weights, which would wait for each */
    float *state = w->states + q * w->ld;
    for (int64_t d = 0; d < dim; d += 16) v_store(state + d, v_zero());
    state[dim] = state[dim + 1] = 0.0f;
    if (low < total) state[dim] = largest_of(p->model, w->scores + q * LD_SCORES, low - start, total - start);
  }
  for (int64_t q = node * tile->heads; low < total && q < (node + 1) * tile->heads; q++) {
    float *state = w->states + q * w->ld, *scores = w->scores + q * LD_SCORES;
    state[dim + 1] = weigh(p->model, s->is_bf16, scores, s->coded ? scales : 0, low - start, total - start, state[dim]);
  }
}

/* Values of slots [a, e) of a segment that begins at `start`, mixed for all queries of the tile. */
static void mix_runs(const Slots *s, const Work *w, const Tile *tile, const Seen *seen, int64_t start, int64_t a, int64_t e) {
  const int64_t count = tile->nodes * tile->heads, made = s->is_bf16 && !PAIRED && count > 2 * TILED;
  const int64_t panel = made || s->coded ? PANEL : SEGMENT; /* of few queries converting values again is as fast */
  for (int64_t j0 = a / 2 * 2; j0 < e; j0 += panel) {
    const int64_t j1 = MIN(e, j0 + panel);
    const Slots run = open_run(s, j0, j1 - j0, w->opened, 1);
    const int64_t made_bytes = made ? make_panel(&run, run.values, j1 - j0, w->values) : 0;
    for (int64_t i = 0, left = count, R; left; i += R, left -= R) {
      const int64_t parts = (left + TILED - 1) / TILED;
      R = (left + parts - 1) / parts;
      const float *weights = weights_at(s, w->scores + i * LD_SCORES, j0 - start);
      float *mixed = w->states + i * w->ld;
      int64_t from = j0, to = j1; /* what all of them see */
      for (int64_t r = 0; r < R; r++) {
        const Seen *one = &seen[(i + r) / tile->heads];
        from = MAX(from, one->low), to = MIN(to, end_of_run(one));
      }
      from = (from + 1) / 2 * 2, to = MAX(from, to / 2 * 2);
      for (int64_t r = 0; r < R; r++) {
        const Seen *one = &seen[(i + r) / tile->heads];
        mix_one(&run, weights + r * LD_SCORES, run.values, MAX(j0, one->low) - j0, MIN(from, MIN(j1, end_of_run(one))) - j0, mixed + r * w->ld);
      }
      if (made) mix_whole((int)R, 1, MADE, weights, (const char *)w->values, made_bytes, from - j0, to - j0, s->value_dim, mixed, w->ld);
      else mix_whole((int)R, s->is_bf16, TWO, weights, run.values, run.bytes, from - j0, to - j0, s->value_dim, mixed, w->ld);
      for (int64_t r = 0; r < R; r++) {
        const Seen *one = &seen[(i + r) / tile->heads];
        mix_one(&run, weights + r * LD_SCORES, run.values, MAX(to, MAX(j0, one->low)) - j0, MIN(j1, end_of_run(one)) - j0, mixed + r * w->ld);
      }
    }
  }
}

/* The same of a node's ancestors behind its run. */
static void mix_ancestors(Pass *p, const Slots *s, const Work *w, const Tile *tile, const Seen *seen, int64_t node, int64_t start) {
  const Seen *one = &seen[node];
  const int64_t from = MAX(MAX(start, one->low), end_of_run(one)), to = MIN(start + SEGMENT, one->total);
  int64_t slots[SEGMENT];
  if (from >= to) return;
  find_slots(p, tile, one, from, to, slots);
  for (int64_t h = 0, R; h < tile->heads; h += R) {
    const int64_t q = node * tile->heads + h;
    float *mixed = w->states + q * w->ld;
    R = MIN(TILED, tile->heads - h);
    for (int64_t j = from; j < to; j += 2 - j % 2) {
      const float *weights = weights_at(s, w->scores + q * LD_SCORES, j / 2 * 2 - start);
      const int alone = j % 2 || j + 1 == to;
      const char *row = s->values + slots[j - from] * s->bytes;
      int64_t apart = alone ? 0 : (slots[j + 1 - from] - slots[j - from]) * s->bytes;
      if (s->coded) {
        const int64_t bytes = open_slot(s, row, w->opened);
        if (!alone) open_slot(s, row + apart, w->opened + bytes), apart = bytes;
        row = w->opened;
      }
      if (alone) {
        mix_whole((int)R, s->is_bf16, ONE, weights, row, 0, j % 2, j % 2 + 1, s->value_dim, mixed, w->ld);
      } else {
        mix_whole((int)R, s->is_bf16, TWO, weights, row, apart, 0, 2, s->value_dim, mixed, w->ld);
      }
    }
  }
}

/* States of a tile's queries over one segment, to [nodes * heads, ld]; the sum is 0 of a query that sees nothing there. */
static void attend_segment(Pass *p, const Slots *s, const Work *w, const Tile *tile, const Seen *seen, int64_t segment) {
  const int64_t start = segment * SEGMENT, end = start + SEGMENT;
  int64_t a = end, e = start; /* the runs of all */
  for (int64_t i = 0; i < tile->nodes; i++) a = MIN(a, MAX(start, seen[i].low)), e = MAX(e, MIN(end, seen[i].high));
  for (int64_t j = a / 16 * 16; s->coded && j < MIN((e + 15) / 16 * 16, s->capacity); j++) {
    w->key_scales[j - start] = scale_of(s, s->keys + j * s->bytes);
    w->value_scales[j - start] = scale_of(s, s->values + j * s->bytes);
  }
  score_runs(s, w, tile->nodes * tile->heads, start, a, e);
  for (int64_t i = 0; i < tile->nodes; i++) weigh_node(p, s, w, tile, seen, i, start);
  mix_runs(s, w, tile, seen, start, a, e);
  for (int64_t i = 0; i < tile->nodes; i++) mix_ancestors(p, s, w, tile, seen, i, start);
}

/* States over the first slots, of nodes whose window begins behind them; the sum is 0 of the others' queries. */
static void attend_sinks(Pass *p, const Layer *layer, const Slots *s, const Work *w, const Tile *tile, const Seen *seen) {
  Seen sees[QUERIES];
  for (int64_t n = 0; n < tile->nodes; n++) {
    const int64_t end = seen[n].low ? layer->sinks : 0;
    sees[n] = (Seen){seen[n].row, 0, end, end};
  }
  attend_segment(p, s, w, tile, sees, 0);
}

/* The state of a segment after those before it; joined[dim + 1], the sum, is 0 where there is none. */
static void join_states(const Model *m, const float *state, float *joined) {
  const int64_t dim = value_dim(m);
  if (state[dim + 1] == 0.0f) return;
  if (joined[dim + 1] == 0.0f) {
    memcpy(joined, state, (dim + 2) * sizeof(float));
    return;
  }
  const float largest = MAX(joined[dim], state[dim]), by = m->score_cap != 0.0 ? 1.0f : score_scale(m);
  const vec before = exp_below(v_all((joined[dim] - largest) * by)), now = exp_below(v_all((state[dim] - largest) * by));
  for (int64_t d = 0; d < dim; d += 16)
    v_store(joined + d, v_fma(v_load(state + d), now, v_mul(v_load(joined + d), before)));
  float sum[16];
  v_store(sum, v_fma(v_all(state[dim + 1]), now, v_mul(v_all(joined[dim + 1]), before)));
  joined[dim] = largest, joined[dim + 1] = sum[0];
}

INLINE float *begun_of(const Pass *p, int64_t row, int64_t head) {
  return p->begun + (row * p->model->heads + head) * state_size(p);
}

/* States from which those of a tile's queries go on. */
static void begin_tile(const Pass *p, const Layer *layer, const Tile *tile, float *joined, int64_t ld) {
  const int64_t dim = value_dim(p->model);
  for (int64_t i = 0; i < tile->nodes * tile->heads; i++) {
    joined[i * ld + dim + 1] = 0.0f;
    if (tile->members || !p->num_groups) continue;
    const Seen common = seen_by(p, layer, 0, node_of(p, tile, i / tile->heads), 1);
    if (common.low < common.high)
      memcpy(joined + i * ld, begun_of(p, common.row, tile->head + i % tile->heads), (dim + 2) * sizeof(float));
  }
}

/* 1 / the sum of a query's weights, in every lane, with the weight of its head's sink: by the larger of both, so that neither
 * overflows. */
static vec inverse_sum(const Model *m, const Layer *layer, const float *state, int64_t head) {
  const float sum = state[value_dim(m) + 1];
  if (!layer->sink_logits) return v_all(1.0f / sum);
  const float by = m->score_cap != 0.0 ? 1.0f : score_scale(m), above = layer->sink_logits[head] - state[value_dim(m)] * by;
  const vec e = exp_below(v_all(above > 0.0f ? -above : above));
  return above > 0.0f ? v_div(e, v_fma(v_all(sum), e, v_all(1.0f))) : v_div(v_all(1.0f), v_add(v_all(sum), e));
}

/* What a tile's queries mixed, to where the output matrix reads it, or tiles of its rows. */
static void finish_tile(Pass *p, const Layer *layer, const Tile *tile, const float *joined, int64_t ld) {
  const Model *m = p->model;
  const int64_t dim = value_dim(m);
  /* blocks and norms are made of floats */
  const int to_bf16 = m->bf16 && !m->rank && !is_quantised(&layer->o) && !layer->mixed_norm;
  for (int64_t i = 0; i < tile->nodes * tile->heads; i++) {
    const int64_t row = node_of(p, tile, i / tile->heads), head = tile->head + i % tile->heads;
    const float *state = joined + i * ld;
    if (tile->members) {
      memcpy(begun_of(p, row, head), state, (dim + 2) * sizeof(float));
      continue;
    }
    const vec inverse = inverse_sum(m, layer, state, head);
    void *to = p->mixed + (row * p->ld_mixed + head * dim) * (to_bf16 ? 2 : 4);
    const float *gates = p->qkv + row * p->qkv_width + (m->heads + 2 * m->kv_heads + head) * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      vec x = v_mul(v_load(state + d), inverse);
      if (m->gated) x = v_div(x, v_add(exp16(v_sub(v_zero(), v_load(gates + d))), v_all(1.0f)));
      store_as(to_bf16, to, d, 0xffff, x);
    }
  }
}

/* Queries of a tile, rotated for their nodes' positions, or for no later one than `most`. */
static void put_queries(Pass *p, const Layer *layer, const Slots *s, const Work *w, const Tile *tile, int64_t most) {
  for (int64_t q = 0; q < tile->nodes * tile->heads; q++) {
    const int64_t row = node_of(p, tile, q / tile->heads), head = tile->head + q % tile->heads;
    const int64_t position = MIN(most, p->positions[row]);
    float turned[MAX_DIM];
    const float *norm = p->model->rank ? 0 : layer->q_norm; /* of latent attention that is of what queries are made of */
    rotate(p, layer->query_rope, p->qkv + row * p->qkv_width + head * s->dim, norm, position, turned);
    if (s->coded && layer->spread) scale_row(turned, layer->spread + tile->kv_head * s->dim, s->dim);
    put_query(s, turned, w->turned + q * w->ld_queries, w->queries + q * w->ld_queries);
  }
}

/* How a pass's tiles are shared out: pieces are segments, or whole tiles where there are many. */
typedef struct {
  int grouped;                 /* tiles are of groups of rows */
  int64_t parts, heads, nodes; /* of a group of query heads, and heads in a part; nodes of a tile */
  int64_t tiles, whole;        /* tiles of all; whether they are pieces */
  double total;                /* what all pieces take */
} Sharing;

INLINE int64_t tiles_of(const Sharing *s, int64_t nodes) { return (nodes + s->nodes - 1) / s->nodes; }

INLINE Tile tile_at(const Pass *p, const Sharing *s, int64_t i) {
  const int64_t group = p->model->heads / p->model->kv_heads, same = s->parts * p->model->kv_heads;
  const Group *one = p->groups;
  int64_t each = tiles_of(s, p->nodes);
  for (; s->grouped && i >= same * (each = tiles_of(s, one->nodes)); one++) i -= same * each;
  Tile tile = {.b = i / each / same, .kv_head = i / each / s->parts % p->model->kv_heads};
  if (s->grouped) tile.members = p->members + one->first, tile.b = one->b;
  const int64_t head = i / each % s->parts * s->heads;
  tile.head = tile.kv_head * group + head, tile.heads = MIN(s->heads, group - head);
  tile.first = i % each * s->nodes, tile.nodes = MIN(s->nodes, (s->grouped ? one->nodes : nodes_of(p, tile.b)) - tile.first);
  return tile;
}

/* What a piece takes, in slots by queries: its own work, and something once. */
INLINE double cost_of(const Tile *tile, int64_t from, int64_t to) {
  return (double)(MIN(to, tile->high) - MAX(from, tile->low) + 16) * (double)(tile->heads * tile->nodes + 4);
}

static Sharing share_out(const Pass *p, const Layer *layer, const int64_t *seen, int grouped) {
  const int64_t group = p->model->heads / p->model->kv_heads, pairs = (grouped ? p->num_groups : p->batch) * p->model->kv_heads;
  int64_t longest = 0, most = p->nodes;
  for (int64_t i = 0; i < p->rows; i++) {
    const Seen s = seen_by(p, layer, seen, i, grouped);
    longest = MAX(longest, s.total - s.low);
  }
  for (int64_t g = 0; grouped && g < p->num_groups; g++) most = MAX(most, p->groups[g].nodes);
  Sharing s = {.grouped = grouped, .parts = 1};
  while ((group + s.parts - 1) / s.parts > QUERIES || (longest <= SEGMENT && pairs * s.parts < p->threads && s.parts < group)) s.parts++;
  s.heads = (group + s.parts - 1) / s.parts;
  s.parts = (group + s.heads - 1) / s.heads;
  s.nodes = MIN(most, MAX(1, QUERIES / s.heads));
  if (!grouped) s.tiles = pairs * s.parts * tiles_of(&s, p->nodes);
  for (int64_t g = 0; grouped && g < p->num_groups; g++)
    s.tiles += p->model->kv_heads * s.parts * tiles_of(&s, p->groups[g].nodes);
  s.whole = s.tiles >= 8 * p->threads;
  for (int64_t i = 0; i < s.tiles; i++) {
    Tile tile = tile_at(p, &s, i);
    if (tile.nodes <= 0) continue; /* a row with fewer nodes than others */
    look_at(p, layer, seen, &tile);
    if (s.whole) s.total += cost_of(&tile, tile.low, tile.high);
    for (int64_t j = tile.low / SEGMENT; !s.whole && j * SEGMENT < tile.high; j++)
      s.total += cost_of(&tile, j * SEGMENT, (j + 1) * SEGMENT);
  }
  return s;
}

/* Tiles of groups (grouped), or of rows: see attend. */
static void attend_tiles(Pass *p, const Layer *layer, int index, const int64_t *seen, Put *put, void *context, int t,
                         unsigned *phase, int grouped) {
  const Sharing sharing = share_out(p, layer, seen, grouped);
  const Work w = work_of(p, t);
  const double threads = p->threads;
  Seen sees[QUERIES];
  double before = 0.0;
  int64_t shared = 0, own = -1, own_place = 0, here = -1; /* own: a tile that begins here and that others have pieces of */
  for (int64_t i = 0; i < sharing.tiles; i++) {
    Tile tile = tile_at(p, &sharing, i);
    if (tile.nodes <= 0) continue;
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
    if (pair != here && !grouped) put(context, layer, index, tile.b, tile.kv_head), here = pair;
    const Slots s = slots_of(p, tile.b, tile.kv_head, index);
    for (int64_t n = 0; n < tile.nodes; n++) sees[n] = seen_by(p, layer, seen, node_of(p, &tile, n), grouped);
    begin_tile(p, layer, &tile, w.joined, w.ld);
    const int sinks = from == n0 && layer->sinks && tile.last > 0; /* they stand before the first segment */
    if (sinks) {
      put_queries(p, layer, &s, &w, &tile, layer->sinks + layer->window - 1);
      attend_sinks(p, layer, &s, &w, &tile, sees);
      for (int64_t q = 0; q < count; q++) join_states(p->model, w.states + q * w.ld, w.joined + q * w.ld);
    }
    put_queries(p, layer, &s, &w, &tile, INT64_MAX);
    for (int64_t j = from; j < to; j++) {
      Work one = w;
      if (first != last) one.states = p->states + (place * num_segments(p) + j) * most_queries(p) * w.ld;
      attend_segment(p, &s, &one, &tile, sees, j);
      if (first == last || (sinks && j == n0))
        for (int64_t q = 0; q < count; q++) join_states(p->model, one.states + q * w.ld, w.joined + q * w.ld);
      if (first != last && sinks && j == n0) memcpy(one.states, w.joined, count * w.ld * sizeof(float));
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
  begin_tile(p, layer, &tile, w.joined, w.ld);
  for (int64_t j = tile.low / SEGMENT; j * SEGMENT < tile.high; j++) {
    const float *states = p->states + (own_place * num_segments(p) + j) * most_queries(p) * w.ld;
    for (int64_t q = 0; q < count; q++) join_states(p->model, states + q * w.ld, w.joined + q * w.ld);
  }
  finish_tile(p, layer, &tile, w.joined, w.ld);
}

/* Attention of all nodes of a pass over one layer's keys and values, after put() has put those of a row and key-value head;
 * threads that share a row all put the same bytes, which spares a barrier. seen: see seen_by. */
static void attend(Pass *p, const Layer *layer, int index, const int64_t *seen, Put *put, void *context, int t, unsigned *phase) {
  if (p->num_groups) attend_tiles(p, layer, index, seen, put, context, t, phase, 1), barrier(p, phase);
  attend_tiles(p, layer, index, seen, put, context, t, phase, 0);
}

/* Keys and values of the nodes of a pass. */
static void put_nodes(void *context, const Layer *layer, int index, int64_t b, int64_t kv_head) {
  Pass *p = context;
  const Model *m = p->model;
  for (int64_t i = p->start[b]; i < p->start[b + 1]; i++) {
    const float *k = p->qkv + i * p->qkv_width + (m->heads + kv_head) * m->dim;
    remember(p, layer, index, b, kv_head, p->slots[i], p->positions[i], k, k + m->kv_heads * m->dim);
  }
}

#endif
