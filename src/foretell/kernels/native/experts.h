/* A mixture of experts in place of an MLP.
 *
 *  - Reading. Rows are grouped by expert, so that a pass reads the weights of every expert that some row has chosen once,
 *    for all of them: more nodes read more experts, and cost more. Each expert's outputs are divided between all threads.
 *  - Bits. What an expert returns for a row depends on that row alone (tiles.h, quant.h). A row adds up what its experts
 *    return in the order in which the router chose them: largest rank first, of equal ones the lower number, shared last.
 *    So neither the grouping nor other rows change a bit. The router is never quantised.
 *  - Memory. Rows of long prompts come GROUPED_ROWS at a time: their weights are then worth reading again.
 */
#ifndef FORETELL_EXPERTS_H
#define FORETELL_EXPERTS_H
#include "layer.h"
#include "place.h"
#include "store.h"

INLINE int is_any_quantised(const Expert *w) {
  return is_quantised(&w->gate) || is_quantised(&w->up) || is_quantised(&w->down);
}
INLINE int64_t num_experts(const Experts *x) { return x->count + x->shared; }
INLINE int64_t num_chosen(const Experts *x) { return x->top + x->shared; }

/* Which rows of an expert's gate and up are thread t's: whole blocks where quantised matrices read or write them. */
INLINE void share_expert(const Expert *w, int t, int threads, int64_t *a, int64_t *b) {
  if (is_any_quantised(w)) share_by(32, w->inner, t, threads, a, b);
  else share(w->inner, t, threads, a, b);
}

/* Which columns of what experts return are thread t's: the same of all, so that it adds up what it has made itself. */
INLINE void share_down(const Model *m, const Experts *x, int t, int threads, int64_t *a, int64_t *b) {
  if (is_any_quantised(&x->each[0]) || is_any_quantised(&x->each[num_experts(x) - 1]))
    share_by(TILE, m->hidden, t, threads, a, b);
  else share(m->hidden, t, threads, a, b);
}

/* What is read first of an expert: of one without a gate, up. */
INLINE const Matrix *first_matrix(const Expert *w) { return w->gate.data ? &w->gate : &w->up; }
INLINE int expert_reads(const Expert *w) { return reads(first_matrix(w)) | reads(&w->up); }

/* What thread t reads first of a mixture. */
INLINE const void *experts_start(const Experts *x, int t, int threads) {
  int64_t a, b;
  share(x->count, t, threads, &a, &b);
  return row_of(&x->router, a);
}

/* Of numbers [n], those of which no bit is set in `taken`: the largest, of equal ones the first; its bit is set. */
INLINE int64_t take(const float *x, int64_t n, uint64_t *taken) {
  int64_t best = -1;
  for (int64_t e = 0; e < n; e++)
    if (!(taken[e / 64] >> e % 64 & 1) && (best < 0 || x[e] > x[best])) best = e;
  taken[best / 64] |= (uint64_t)1 << best % 64;
  return best;
}

/* Set the bits of all experts but those of the groups whose best experts have the largest sums. */
static void leave_groups(const Experts *x, const float *ranks, uint64_t *taken) {
  const int64_t size = x->count / x->groups;
  float sums[MAX_EXPERTS];
  uint64_t in[MAX_EXPERTS / 64] = {0};
  for (int64_t g = 0; g < x->groups; g++) {
    uint64_t seen[MAX_EXPERTS / 64] = {0};
    const float *of = ranks + g * size;
    sums[g] = of[take(of, size, seen)];
    for (int64_t k = 1; k < x->groups_best; k++) sums[g] += of[take(of, size, seen)];
  }
  for (int64_t g = 0; g < x->groups_chosen; g++) take(sums, x->groups, in);
  for (int64_t e = 0; e < x->count; e++)
    if (!(in[e / size / 64] >> e / size % 64 & 1)) taken[e / 64] |= (uint64_t)1 << e % 64;
}

/* Logits as scores: their sigmoid, or exp(logit - largest), whose softmax is by the sum over all. Returns that sum. */
static float score(float *logits, int64_t n, int sigmoid, float largest) {
  vec sums = v_zero();
  for (int64_t e = 0; e < n; e += 16) {
    const Lanes lanes = first_lanes(n - e);
    const vec x = v_load_some(lanes, logits + e);
    vec y = exp16(sigmoid ? v_sub(v_zero(), x) : v_sub(x, v_all(largest)));
    if (sigmoid) y = v_div(v_all(1.0f), v_add(v_all(1.0f), y));
    y = v_keep(lanes, y);
    sums = v_add(sums, y);
    v_store_some(logits + e, lanes, y);
  }
  return sum1(sums);
}

/* The experts of a row and their weights, from its logits [count + shared], which are overwritten. */
static void choose(const Experts *x, float *logits, int32_t *expert, float *weight) {
  uint64_t taken[MAX_EXPERTS / 64] = {0};
  float ranks[MAX_EXPERTS], all = 0.0f, gate[16];
  if (x->shared_gate.data) v_store(gate, exp16(v_all(-logits[x->count])));
  const int scored = x->sigmoid || x->bias; /* else of logits: softmax has their order, and would round */
  float largest = logits[0];
  for (int64_t e = 1; e < x->count; e++) largest = MAX(largest, logits[e]);
  if (scored) all = score(logits, x->count, (int)x->sigmoid, largest);
  const float by = x->sigmoid || !scored ? 1.0f : all;
  for (int64_t e = 0; e < x->count; e++) ranks[e] = x->bias ? logits[e] / by + x->bias[e] : logits[e];
  if (x->groups > 1) leave_groups(x, ranks, taken);
  for (int64_t k = 0; k < x->top; k++) expert[k] = (int32_t)take(ranks, x->count, taken);
  if (!scored) all = score(logits, x->count, 0, logits[expert[0]]);
  float total = x->sigmoid || x->over_chosen ? 0.0f * all : all; /* NaN where any logit is, though none such is chosen */
  if (x->sigmoid && !x->over_chosen) total += 1.0f;
  for (int64_t k = 0; k < x->top && x->over_chosen; k++) total += logits[expert[k]];
  total += (float)x->epsilon;
  for (int64_t k = 0; k < x->top; k++) weight[k] = logits[expert[k]] / total * (float)x->scale;
  if (x->shared) expert[x->top] = (int32_t)x->count, weight[x->top] = x->shared_gate.data ? 1.0f / (1.0f + gate[0]) : 1.0f;
}

/* Places in groups of `count` rows from `first` on: experts in order, the rows of each in order. */
static void group(Pass *p, const Experts *x, int64_t first, int64_t count) {
  const int64_t n = num_experts(x), each = num_chosen(x), all = count * each;
  int32_t *begin = p->begin;
  memset(begin, 0, (n + 1) * sizeof *begin);
  for (int64_t i = 0; i < all; i++) begin[p->expert[i] + 1]++;
  for (int64_t e = 0; e < n; e++) begin[e + 1] += begin[e];
  for (int64_t i = 0; i < all; i++) {
    const int32_t place = begin[p->expert[i]]++; /* moves on to where the next group begins */
    p->at[i] = place, p->from[place] = (int32_t)(first + i / each);
  }
  for (int64_t e = n; e > 0; e--) begin[e] = begin[e - 1];
  begin[0] = 0;
  memset(p->here, 1, n);
  if (x->store) begin_waves(p, x);
}

/* The next expert from e on that some row has chosen and whose weights are there, or the number of experts. */
INLINE int64_t used_from(const Pass *p, const Experts *x, int64_t e) {
  while (e < num_experts(x) && (p->begin[e] == p->begin[e + 1] || !p->here[e])) e++;
  return e;
}

/* Rows as the matrices of expert e read them; where all rows of the pass have chosen it, those themselves. */
INLINE Input group_input(const Pass *p, const Input *rows, int64_t e) {
  const int64_t place = p->begin[e], H = p->model->hidden;
  if (p->begin[e + 1] - place == p->rows) return *rows;
  return (Input){p->gathered + place * p->ld_hidden * (p->model->bf16 ? 2 : 4),
                 group_blocks(p->gathered_blocks, H, place)};
}

/* Copy rows into groups: this thread's part of the places of `count` rows. */
static void gather(Pass *p, const Experts *x, const Input *rows, int64_t count, int t) {
  const int64_t H = p->model->hidden, bytes = p->model->bf16 ? 2 : 4, row_bytes = p->ld_hidden * bytes;
  int64_t a, b;
  share(count * num_chosen(x), t, p->threads, &a, &b);
  for (int64_t e = used_from(p, x, 0); e < num_experts(x); e = used_from(p, x, e + 1)) {
    const int64_t place = p->begin[e], n = p->begin[e + 1] - place, to = MIN(b, place + n);
    const int wanted = expert_reads(&x->each[e]);
    Block *blocks = group_blocks(p->gathered_blocks, H, place);
    for (int64_t j = MAX(a, place); j < to && n < p->rows; j++) {
      const int64_t row = p->from[j];
      if (wanted & PLAIN) memcpy(p->gathered + j * row_bytes, (const char *)rows->plain + row * row_bytes, H * bytes);
      for (int64_t i = 0; wanted & BLOCKS && i < num_blocks(H); i++)
        blocks[i * block_stride(n) + j - place] = rows->blocks[i * block_stride(p->rows) + row];
    }
  }
}

/* Of `count` rows, what their experts returned in the order of their choice, onto columns [a, b) of the residual, or where
 * it is normed or scaled first, to those of the branch. */
static void add_parts(Pass *p, const Layer *l, int apart, int64_t first, int64_t count, int64_t a, int64_t b) {
  const int64_t H = p->model->hidden, each = num_chosen(l->experts);
  for (int64_t i = 0; i < count; i++) {
    const float *weight = p->weight + i * each;
    const int32_t *at = p->at + i * each;
    float *to = (apart ? p->branch : p->residual) + (first + i) * H;
    for (int64_t j = a; j < b; j += 16) {
      const Lanes lanes = first_lanes(b - j);
      vec y = v_zero();
      for (int64_t k = 0; k < each; k++)
        y = v_fma(v_all(weight[k]), v_load_some(lanes, p->parts + at[k] * H + j), y);
      v_store_some(to + j, lanes, apart ? y : v_add(v_load_some(lanes, to + j), y));
    }
  }
}

/* Gate (if there is one) and up of the experts in all groups, and what comes behind them. */
static void expert_inner(Pass *p, const Experts *x, const Input *rows, int t) {
  const Model *m = p->model;
  const int64_t n = num_experts(x), first = used_from(p, x, 0);
  int64_t a, b, a1, b1;
  share_down(m, x, t, p->threads, &a1, &b1);
  const void *down = row_of(&x->each[first].down, a1);
  for (int64_t e = first, after; e < n; e = after) {
    const Expert *w = &x->each[e];
    const int64_t place = p->begin[e], count = p->begin[e + 1] - place;
    const Input in = group_input(p, rows, e);
    float *gate = w->gate.data ? p->expert_gate + place * p->ld_expert : 0;
    float *up = p->expert_up + place * p->ld_expert;
    const Gated y = {gate, up, count, p->ld_expert, w->inner, p->expert_inner + place * p->ld_expert * (m->bf16 ? 2 : 4),
                     p->ld_expert, group_blocks(p->expert_blocks, m->expert_inner, place)};
    share_expert(w, t, p->threads, &a, &b);
    after = used_from(p, x, e + 1);
    if (after < n) share_expert(&x->each[after], t, p->threads, &a1, &b1);
    if (gate) linear(&w->gate, a, b, input_of(&in, &w->gate), p->ld_hidden, count, w->gate_bias, gate, y.ld, 0, row_of(&w->up, a));
    linear(&w->up, a, b, input_of(&in, &w->up), p->ld_hidden, count, w->up_bias, up, y.ld, 0,
           after < n ? row_of(first_matrix(&x->each[after]), a1) : down);
    activate_rows(p, &y, &w->down, a, b, t);
  }
}

/* Rows [a, b) of down of the experts in all groups; `next` is what this thread reads behind them. */
static void expert_down(Pass *p, const Experts *x, int64_t a, int64_t b, const void *next) {
  const int64_t H = p->model->hidden, n = num_experts(x);
  for (int64_t e = used_from(p, x, 0), after; e < n; e = after) {
    const Expert *w = &x->each[e];
    const int64_t place = p->begin[e];
    const Input in = {p->expert_inner + place * p->ld_expert * (p->model->bf16 ? 2 : 4),
                      group_blocks(p->expert_blocks, p->model->expert_inner, place)};
    after = used_from(p, x, e + 1);
    linear(&w->down, a, b, input_of(&in, &w->down), p->ld_expert, p->begin[e + 1] - place, w->down_bias, p->parts + place * H,
           H, 0, after < n ? row_of(&x->each[after].down, a) : next);
  }
}

/* The next layer's mixture where its experts are guessed from what this one's router reads, or NULL. */
INLINE const Experts *guessed_next(const Pass *p, const Layer *l) {
  const Model *m = p->model;
  const Experts *next = l + 1 < m->layers + m->num_layers ? l[1].experts : 0;
  return next && next->store && p->rows <= AHEAD_ROWS ? next : 0;
}

/* The mixture of the normed residual, onto the residual. */
static void experts_part(Pass *p, const Layer *l, int t, unsigned *phase, const void *next) {
  const Experts *x = l->experts, *guessed = guessed_next(p, l);
  const int64_t each = num_chosen(x);
  const Expert *ends[2] = {&x->each[0], &x->each[num_experts(x) - 1]}; /* all but a shared one are stored alike */
  const float by = p->model->residual_scale != 0.0 ? (float)p->model->residual_scale : 1.0f;
  const int apart = l->mlp_after || by != 1.0f;
  int64_t a, b, d0, d1;
  int wanted = PLAIN;
  for (int i = 0; i < 2; i++) wanted |= expert_reads(ends[i]);
  const Input rows = norm(p, wanted, l->mlp_norm, t, phase);
  share(x->count, t, p->threads, &a, &b);
  linear(&x->router, a, b, rows.plain, p->ld_hidden, p->rows, x->router_bias, p->route, p->ld_route, 0, x->router.data);
  if (x->shared_gate.data && t == 0)
    linear(&x->shared_gate, 0, 1, rows.plain, p->ld_hidden, p->rows, 0, p->route + x->count, p->ld_route, 0,
           x->router.data);
  if (guessed) {
    share(guessed->count, t, p->threads, &a, &b);
    linear(&guessed->router, a, b, rows.plain, p->ld_hidden, p->rows, guessed->router_bias, p->ahead, p->ld_route, 0,
           x->router.data);
  }
  share_down(p->model, x, t, p->threads, &d0, &d1);
  for (int64_t first = 0; first < p->rows; first += GROUPED_ROWS) {
    const int64_t count = MIN(GROUPED_ROWS, p->rows - first);
    barrier(p, phase); /* the router's logits are there, and what is read of the rows before has been read */
    share(count, t, p->threads, &a, &b);
    for (int64_t i = a; i < b; i++)
      choose(x, p->route + (first + i) * p->ld_route, p->expert + i * each, p->weight + i * each);
    barrier(p, phase);
    if (t == 0) group(p, x, first, count);
    barrier(p, phase);
    if (p->rows > 1) gather(p, x, &rows, count, t), barrier(p, phase);
    for (int64_t due = 1; due;) {
      due = x->store ? next_wave(p, x, t, phase) : 0;
      if (guessed && t == 0) look_ahead(p, guessed, choose), guessed = 0;
      expert_inner(p, x, &rows, t);
      barrier(p, phase);
      expert_down(p, x, d0, d1, next);
    }
    add_parts(p, l, apart, first, count, d0, d1);
  }
  if (apart) add_branch(p, l->mlp_after, by, d0, d1, phase);
}

#endif
