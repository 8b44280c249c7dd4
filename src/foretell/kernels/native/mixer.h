/* Recurrent mixers in place of attention: gated delta nets (2412.06464), Mamba-2 (2405.21060) and short convolutions (LFM2).
 *
 *  - State. After a token S = decay * S + k (x) u, a matrix [rows, columns] for each head, and the output is q S. A delta
 *    net's u is beta * (v - k (decay * S)), Mamba-2's is dt * v: u alone depends on the state.
 *  - Trees. A node goes on from its parent's state. The columns of S do not depend on each other: a thread takes a head and
 *    WIDE columns at a time, reads the committed state once, and walks all nodes while the states of inner nodes stay in its
 *    own cache. Every state is made by the same operations in the same order as token by token: a node has the same bits in
 *    any tree, batch and pass, which the sums over ancestors of the WY form would not have (they cost more here, too).
 *  - Commits. A pass adds no guess to what is committed. It keeps the terms of its nodes (inputs of the convolution, k, u, decay)
 *    at their slots, which `foretell_move` moves as it moves keys and values; the next pass adds those in [base, length) to
 *    the state that it reads anyway. A later pass over the same tree rebuilds a parent's state from the terms on its path.
 *  - Prompts. Lines of known text (Plan.known) are committed at once, and none of their terms are kept.
 */
#ifndef FORETELL_MIXER_H
#define FORETELL_MIXER_H
#include "layer.h"
#include "rows.h"

enum {
  FROM_BASE = -1,    /* parents that are no node of the pass: the committed state, ... */
  FROM_EARLIER = -2, /* ... a node that an earlier pass has read, ... */
  IS_PADDING = -3,   /* ... and none, as the node is padding */
};

/* Where a slot's terms lie. */
INLINE float *terms_of(const MixerState *s, const Mixer *x, int64_t b, int64_t slot) {
  return s->terms + (b * s->room + slot % s->room) * x->held;
}
/* A head's state: WIDE columns after each other, each [rows, WIDE]. */
INLINE float *state_of(const MixerState *s, const Mixer *x, int64_t b, int64_t h) {
  return s->state + (b * x->heads + h) * x->rows * ((x->columns + WIDE - 1) / WIDE * WIDE);
}
/* The parts of terms: inputs first. */
INLINE int64_t keys_at(const Mixer *x) { return x->channels; }
INLINE int64_t news_at(const Mixer *x) { return keys_at(x) + x->groups * x->rows; }
INLINE int64_t decay_at(const Mixer *x) { return news_at(x) + x->heads * x->columns; }

/* The node of row b's first i that stands at tree slot `at`; -1: none, an earlier pass has read it. */
static int64_t node_at(const Pass *p, int64_t b, int64_t i, int64_t at) {
  const int64_t *slots = p->slots + p->start[b], slot = p->length[b] + at, guess = i + slot - slots[i];
  if (guess >= 0 && guess < i && slots[guess] == slot) return guess; /* slots one after the other */
  while (--i >= 0 && slots[i] != slot) {}
  return i;
}

/* The parents of row b's nodes, and in which buffer the state of each is kept: a node that is its parent's last child takes
 * the parent's buffer, a leaf keeps none. Parents stand first. Returns 0, or what foretell_forward returns. */
static int64_t find_parents(Pass *p, int64_t b) {
  const int64_t first = p->start[b], count = nodes_of(p, b), length = p->length[b];
  int32_t *above = p->above + first, *kept = p->kept + first, *last = p->last_child + first;
  p->counts[b] = 0, p->ends[b] = length;
  for (int64_t i = 0; i < count; i++) {
    const uint8_t *sees = seen_from(p, first + i);
    const int64_t at = p->slots[first + i] - length;
    if (at >= p->tree_nodes) return 2;
    int64_t j = at - 1;
    while (j >= 0 && !sees[j * p->stride_t]) j--;
    const int64_t node = j < 0 ? -1 : node_at(p, b, i, j);
    above[i] = (int32_t)(node >= 0 ? node : j >= 0 ? FROM_EARLIER : at == 0 ? FROM_BASE : IS_PADDING);
    last[i] = -1;
    if (above[i] >= 0 && above[above[i]] == IS_PADDING) above[i] = IS_PADDING;
    if (above[i] == IS_PADDING) continue;
    if (above[i] >= 0) last[above[i]] = (int32_t)i;
    p->counts[b]++, p->ends[b] = MAX(p->ends[b], length + at + 1);
  }
  int32_t free = 1; /* buffer 0 has what is rebuilt */
  for (int64_t i = 0; i < count; i++) {
    const int takes = above[i] >= 0 && last[above[i]] == i;
    kept[i] = last[i] < 0 ? -1 : takes ? kept[above[i]] : free++;
  }
  return 0;
}

/* The same of a row whose first `count` nodes are a line of text, the others padding. */
static void line_up(Pass *p, int64_t b, int64_t count) {
  for (int64_t i = 0; i < nodes_of(p, b); i++)
    p->above[p->start[b] + i] = (int32_t)(i >= count ? IS_PADDING : i ? i - 1 : FROM_BASE);
  p->counts[b] = count, p->ends[b] = p->length[b] + count;
}

/* Whether all of row b's nodes go on from a state after `base` tokens. A drafter feeds its root as text, and then nodes after
 * it as those of a tree whose root it is. */
static int follow(const Pass *p, int64_t b, int64_t base) {
  const int64_t more = base - p->length[b];
  for (int64_t row = p->start[b]; more > 0 && row < p->start[b + 1]; row++) {
    if (p->above[row] == IS_PADDING) continue;
    if (p->slots[row] < base || p->wide) return 0;
    for (int64_t j = 0; j < more; j++)
      if (!seen_from(p, row)[j * p->stride_t]) return 0;
  }
  return 1;
}

/* Before a pass with mixers: parents, whether it is a prompt's, and whether every state that it goes on from is there. */
static int64_t find_all_parents(Pass *p, const int64_t *known, int64_t first, int64_t stop) {
  p->wide = known != 0;
  for (int64_t b = 0; b < p->batch; b++) {
    if (known) {
      if (known[b] < 0 || known[b] > nodes_of(p, b) || (known[b] && p->slots[p->start[b]] != p->length[b])) return 2;
      line_up(p, b, known[b]);
      continue;
    }
    const int64_t problem = find_parents(p, b);
    if (problem) return problem;
  }
  for (int64_t l = first; l < stop; l++) {
    const MixerState *s = &p->cache->states[l];
    for (int64_t b = 0; p->model->layers[l].mixer && b < p->batch; b++) {
      const int64_t *meta = s->meta + b * META, begin = p->length[b];
      const int64_t end = p->wide ? begin : p->ends[b];
      if (p->counts[b] && (meta[READ] < begin || !follow(p, b, meta[BASE]))) return 6;
      if (p->counts[b] && end - meta[BASE] > s->room) return 7;
    }
  }
  return 0;
}

/* After it: where each state now stands. */
static void settle_states(Pass *p, int64_t first, int64_t stop) {
  for (int64_t l = first; l < stop; l++)
    for (int64_t b = 0; p->model->layers[l].mixer && b < p->batch; b++) {
      int64_t *meta = p->cache->states[l].meta + b * META;
      if (!p->counts[b]) continue;
      const int64_t read = meta[BASE] >= p->length[b] ? MAX(meta[READ], p->ends[b]) : p->ends[b];
      meta[BASE] = MAX(meta[BASE], p->wide ? p->ends[b] : p->length[b]);
      meta[READ] = p->wide ? meta[BASE] : read;
    }
}

/* The inputs that the convolution of node i reads before its own, nearest first: of the nodes on its path, then of committed
 * tokens, some of which lie in the convolution's state. */
static void recent_inputs(const Pass *p, const Mixer *x, const MixerState *s, int64_t b, int64_t i, const float **found) {
  const int64_t first = p->start[b], length = p->length[b], base = s->meta[b * META + BASE];
  const uint8_t *sees = seen_from(p, first + i);
  int64_t at = p->slots[first + i] - length;
  for (int64_t d = 0; d < x->taps - 1; d++) {
    do at--;
    while (at >= 0 && !sees[at * p->stride_t]);
    const int64_t slot = length + at, node = at < 0 ? -1 : node_at(p, b, i, at);
    if (node >= 0) found[d] = p->projected + (first + node) * p->ld_projected + x->conv_at;
    else if (slot >= base) found[d] = terms_of(s, x, b, slot);
    else found[d] = s->conv + (b * (x->taps - 1) + slot - base + x->taps - 1) * x->channels;
  }
}

INLINE vec silu16(vec x) { return v_div(x, v_add(exp16(v_sub(v_zero(), x)), v_all(1.0f))); }

/* Channels [a, b1) of the convolution of all nodes, and the part of its state that is theirs. */
static void convolve(Pass *p, const Mixer *x, const MixerState *s, int64_t a, int64_t b1) {
  const int short_conv = x->kind == SHORT_CONV;
  const int64_t before = x->taps - 1, C = x->channels;
  for (int64_t b = 0; b < p->batch; b++) {
    const int64_t length = p->length[b], base = s->meta[b * META + BASE], moved = MAX(length - base, 0);
    for (int64_t i = 0; i < nodes_of(p, b); i++) {
      const int64_t row = p->start[b] + i;
      float *in = p->projected + row * p->ld_projected, *own = in + x->conv_at;
      if (p->above[row] == IS_PADDING) {
        if (short_conv) memset(p->scanned + row * p->ld_scanned + a, 0, (b1 - a) * sizeof(float));
        continue;
      }
      for (int64_t c = a; short_conv && c < b1; c += 16) { /* columns are B, C, x */
        const Lanes lanes = first_lanes(b1 - c);
        v_store_some(own + c, lanes, v_mul(v_load_some(lanes, own + c), v_load_some(lanes, in + 2 * C + c)));
      }
      if (!p->wide) memcpy(terms_of(s, x, b, p->slots[row]) + a, own + a, (b1 - a) * sizeof(float));
      const float *recent[MAX_TAPS];
      recent_inputs(p, x, s, b, i, recent);
      for (int64_t c = a; c < b1; c += 16) {
        const Lanes lanes = first_lanes(b1 - c);
        vec y = x->conv_bias ? v_load_some(lanes, x->conv_bias + c) : v_zero();
        for (int64_t d = before; d > 0; d--)
          y = v_fma(v_load_some(lanes, x->conv + (before - d) * C + c), v_load_some(lanes, recent[d - 1] + c), y);
        y = v_fma(v_load_some(lanes, x->conv + before * C + c), v_load_some(lanes, own + c), y);
        if (short_conv)
          v_store_some(p->scanned + row * p->ld_scanned + c, lanes, v_mul(y, v_load_some(lanes, in + C + c)));
        else v_store_some(p->conved + row * p->ld_conved + c, lanes, silu16(y));
      }
    }
    /* The state moves on: its last inputs are those before the length, or before the end of a prompt's line. */
    const int64_t end = p->counts[b] ? moved + (p->wide ? p->counts[b] : 0) : 0;
    for (int64_t k = 0; end && k < before; k++) { /* position base + end - before + k, from an equal or a later place */
      const int64_t at = end - before + k;
      float *to = s->conv + (b * before + k) * C;
      const float *from = at < 0 ? s->conv + (b * before + at + before) * C
                          : at < moved ? terms_of(s, x, b, base + at)
                                       : p->projected + (p->start[b] + at - moved) * p->ld_projected + x->conv_at;
      memcpy(to + a, from + a, (b1 - a) * sizeof(float));
    }
  }
}

/* A delta net's q or k of one head in place: of length 1, then times `scale`. */
static void normalise(float *x, int64_t n, float scale) {
  vec squares = v_zero();
  for (int64_t i = 0; i < n; i += 16) {
    const vec v = v_load_some(first_lanes(n - i), x + i);
    squares = v_fma(v, v, squares);
  }
  const vec by = v_all(scale / sqrtf(sum1(squares) + 1e-6f));
  for (int64_t i = 0; i < n; i += 16) {
    const Lanes lanes = first_lanes(n - i);
    v_store_some(x + i, lanes, v_mul(v_load_some(lanes, x + i), by));
  }
}

/* This thread's part of the convolution, whose q and k a delta net normalises: then in whole heads. */
static void convolve_part(Pass *p, const Mixer *x, const MixerState *s, int t) {
  const int64_t R = x->rows, qk = 2 * x->groups;
  int64_t a, b;
  if (x->kind != DELTA_NET) {
    share_by(16, x->channels, t, p->threads, &a, &b);
    if (a < b) convolve(p, x, s, a, b);
  } else {
    share_by(1, qk + x->heads, t, p->threads, &a, &b);
    for (int64_t h = a; h < b; h++) { /* q, k and v stand in this order */
      const int64_t from = h < qk ? h * R : x->v_at + (h - qk) * x->columns;
      convolve(p, x, s, from, from + (h < qk ? R : x->columns));
      for (int64_t i = 0; h < qk && i < p->rows; i++)
        if (p->above[i] != IS_PADDING)
          normalise(p->conved + i * p->ld_conved + from, R, h < x->groups ? 1.0f / sqrtf((float)R) : 1.0f);
    }
  }
}

/* to [R, WIDE] = decay * from + k (x) u; of u two vectors. */
static void add_term(const float *from, float *to, int64_t R, float decay, const float *k, vec u0, vec u1) {
  const vec d = v_all(decay);
  for (int64_t r = 0; r < R; r++) {
    const vec key = v_all(k[r]);
    v_store(to + r * WIDE, v_fma(key, u0, v_mul(d, v_load(from + r * WIDE))));
    v_store(to + r * WIDE + 16, v_fma(key, u1, v_mul(d, v_load(from + r * WIDE + 16))));
  }
}

/* What a node adds to its parent's state, and what it reads of the sum: two vectors each. */
typedef struct {
  vec u[2], out[2];
} Walked;

/* One node after the state `from` [R, WIDE]; `to` NULL: its state is kept nowhere. */
INLINE Walked walk(const int is_delta, const float *from, float *to, int64_t R, float decay, float beta, const float *k,
                   const float *q, vec v0, vec v1) {
  const vec d = v_all(decay), b = v_all(beta), zero = v_zero();
  Walked w;
  if (is_delta) {
    vec even0 = zero, even1 = zero, odd0 = zero, odd1 = zero; /* two sums each, or the loop waits for them */
    for (int64_t r = 0; r < R; r += 2) {
      const vec key = v_all(k[r]), next = v_all(k[r + 1]);
      even0 = v_fma(key, v_load(from + r * WIDE), even0), even1 = v_fma(key, v_load(from + r * WIDE + 16), even1);
      odd0 = v_fma(next, v_load(from + r * WIDE + WIDE), odd0), odd1 = v_fma(next, v_load(from + r * WIDE + WIDE + 16), odd1);
    }
    w.u[0] = v_mul(b, v_fnma(d, v_add(even0, odd0), v0)), w.u[1] = v_mul(b, v_fnma(d, v_add(even1, odd1), v1));
  } else {
    w.u[0] = v_mul(b, v0), w.u[1] = v_mul(b, v1);
  }
  vec even0 = zero, even1 = zero, odd0 = zero, odd1 = zero;
  for (int64_t r = 0; r < R; r += 2) {
    const vec key = v_all(k[r]), next = v_all(k[r + 1]), asked = v_all(q[r]), then = v_all(q[r + 1]);
    const vec s0 = v_fma(key, w.u[0], v_mul(d, v_load(from + r * WIDE)));
    const vec s1 = v_fma(key, w.u[1], v_mul(d, v_load(from + r * WIDE + 16)));
    const vec s2 = v_fma(next, w.u[0], v_mul(d, v_load(from + r * WIDE + WIDE)));
    const vec s3 = v_fma(next, w.u[1], v_mul(d, v_load(from + r * WIDE + WIDE + 16)));
    if (to) {
      v_store(to + r * WIDE, s0), v_store(to + r * WIDE + 16, s1);
      v_store(to + r * WIDE + WIDE, s2), v_store(to + r * WIDE + WIDE + 16, s3);
    }
    even0 = v_fma(asked, s0, even0), even1 = v_fma(asked, s1, even1);
    odd0 = v_fma(then, s2, odd0), odd1 = v_fma(then, s3, odd1);
  }
  w.out[0] = v_add(even0, odd0), w.out[1] = v_add(even1, odd1);
  return w;
}

/* log(1 + e^x), as torch has it. */
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* Decay of a head at a node, and beta or dt. */
static void factors(const Mixer *x, const float *projected, int64_t h, float *decay, float *beta) {
  const float step = softplus(projected[x->step_at + h] + x->shift[h]);
  if (x->kind == DELTA_NET) {
    *decay = expf(x->rate[h] * step), *beta = 1.0f / (1.0f + expf(-projected[x->beta_at + h]));
  } else {
    *beta = fminf(fmaxf(step, (float)x->low), (float)x->high);
    *decay = expf(x->rate[h] * *beta);
  }
}

/* to [R, WIDE] = what the term at `slot` makes of `from`; columns [c, c + WIDE) of head h. */
static void apply_slot(const Mixer *x, const MixerState *s, int64_t b, int64_t slot, int64_t h, int64_t c, const float *from,
                       float *to) {
  const float *term = terms_of(s, x, b, slot), *u = term + news_at(x) + h * x->columns + c;
  const Lanes l0 = first_lanes(x->columns - c), l1 = x->columns - c > 16 ? first_lanes(x->columns - c - 16) : 0;
  add_term(from, to, x->rows, term[decay_at(x) + h], term + keys_at(x) + h / (x->heads / x->groups) * x->rows,
           v_load_some(l0, u), v_load_some(l1, u + 16));
}

/* The state of node i's parent: what is committed, in a buffer, or made anew of the terms on its path. */
static const float *parent_state(const Pass *p, const Mixer *x, const MixerState *s, int64_t b, int64_t i, int64_t h,
                                 int64_t c, const float *committed, float *buffers) {
  const int64_t first = p->start[b], length = p->length[b], size = x->rows * WIDE;
  const int64_t above = p->above[first + i];
  const uint8_t *sees = seen_from(p, first + i);
  const float *from = committed;
  if (above >= 0) return buffers + p->kept[first + above] * size;
  if (above == FROM_BASE) return from;
  for (int64_t j = MAX(s->meta[b * META + BASE] - length, 0); j < p->slots[first + i] - length; j++) {
    if (!sees[j * p->stride_t]) continue;
    apply_slot(x, s, b, length + j, h, c, from, buffers);
    from = buffers;
  }
  return from;
}

/* Head h of row b: decay and beta of all nodes, and the terms that do not depend on the state. */
static void prepare(Pass *p, const Mixer *x, const MixerState *s, int64_t b, int64_t h, float *factor) {
  const int64_t each = x->heads / x->groups, group = h / each * x->rows;
  for (int64_t i = 0; i < nodes_of(p, b); i++) {
    const int64_t row = p->start[b] + i;
    if (p->above[row] == IS_PADDING) {
      memset(p->scanned + row * p->ld_scanned + h * x->columns, 0, x->columns * sizeof(float));
      continue;
    }
    factors(x, p->projected + row * p->ld_projected, h, &factor[2 * i], &factor[2 * i + 1]);
    if (p->wide) continue;
    float *term = terms_of(s, x, b, p->slots[row]);
    term[decay_at(x) + h] = factor[2 * i];
    if (h % each == 0)
      memcpy(term + keys_at(x) + group, p->conved + row * p->ld_conved + x->k_at + group, x->rows * sizeof(float));
  }
}

/* Head h of row b: all nodes of the pass, WIDE columns at a time. */
static void scan(Pass *p, const Mixer *x, const MixerState *s, int64_t b, int64_t h, int t) {
  const int64_t R = x->rows, E = x->columns, group = h / (x->heads / x->groups) * R, first = p->start[b];
  const int64_t base = s->meta[b * META + BASE], length = p->length[b];
  float *buffers = p->buffers + t * p->ld_buffers, *factor = p->factor + t * 2 * p->rows;
  float *state = state_of(s, x, b, h);
  const vec skip = v_all(x->skip ? x->skip[h] : 0.0f);
  prepare(p, x, s, b, h, factor);
  if (!p->counts[b]) return;
  for (int64_t c = 0; c < E; c += WIDE, state += R * WIDE) {
    const Lanes l0 = first_lanes(E - c), l1 = E - c > 16 ? first_lanes(E - c - 16) : 0;
    for (int64_t slot = base; slot < length; slot++) apply_slot(x, s, b, slot, h, c, state, state);
    for (int64_t i = 0; i < nodes_of(p, b); i++) {
      const int64_t row = first + i, kept = p->kept[row];
      if (p->above[row] == IS_PADDING) continue;
      const float *from = p->wide ? state : parent_state(p, x, s, b, i, h, c, state, buffers);
      const float *in = p->conved + row * p->ld_conved;
      const float *k = in + x->k_at + group, *q = in + x->q_at + group, *v = in + x->v_at + h * E + c;
      float *to = p->wide ? state : kept < 0 ? 0 : buffers + kept * R * WIDE, *out = p->scanned + row * p->ld_scanned + h * E + c;
      const vec v0 = v_load_some(l0, v), v1 = v_load_some(l1, v + 16);
      const Walked w = x->kind == DELTA_NET ? walk(1, from, to, R, factor[2 * i], factor[2 * i + 1], k, q, v0, v1)
                                            : walk(0, from, to, R, factor[2 * i], factor[2 * i + 1], k, q, v0, v1);
      v_store_some(out, l0, v_fma(skip, v0, w.out[0]));
      v_store_some(out + 16, l1, v_fma(skip, v1, w.out[1]));
      if (p->wide) continue;
      float *u = terms_of(s, x, b, p->slots[row]) + news_at(x) + h * E + c;
      v_store_some(u, l0, w.u[0]), v_store_some(u + 16, l1, w.u[1]);
    }
  }
}

/* What was scanned, normed in groups and gated by silu of z, in place: this thread's groups. */
static void gate_scanned(Pass *p, const Mixer *x, int t) {
  const int64_t size = x->norm ? x->norm_size : x->columns, groups = x->heads * x->columns / size;
  int64_t a, b;
  share_by(1, p->rows * groups, t, p->threads, &a, &b);
  for (int64_t item = a; item < b; item++) {
    const int64_t row = item / groups, from = item % groups * size;
    float *y = p->scanned + row * p->ld_scanned + from;
    const float *z = p->projected + row * p->ld_projected + x->gate_at + from, *weight = x->norm + from;
    if (p->above[row] == IS_PADDING) continue;
    for (int step = 0; step < 2; step++) {
      if (x->norm && step == x->gate_first) norm_row(0, y, weight, size, (float)x->eps, y);
      for (int64_t c = 0; step != x->gate_first && c < size; c += 16) {
        const Lanes lanes = first_lanes(size - c);
        v_store_some(y + c, lanes, v_mul(v_load_some(lanes, y + c), silu16(v_load_some(lanes, z + c))));
      }
    }
  }
}

/* A mixer of x [rows, ldx], onto the residual. */
static void mixer_part(Pass *p, int index, int t, unsigned *phase, Input in, int64_t ldx, const void *next) {
  const Mixer *x = p->model->layers[index].mixer;
  const MixerState *s = &p->cache->states[index];
  int64_t h0, h1, at = 0;
  share_rows(&x->out, p->model->hidden, t, p->threads, &h0, &h1);
  for (int i = 0; i < x->parts; i++) {
    const Matrix *w = &x->in[i];
    int64_t a, b, a1, b1;
    share_rows(w, x->sizes[i], t, p->threads, &a, &b);
    if (i + 1 < x->parts) share_rows(w + 1, x->sizes[i + 1], t, p->threads, &a1, &b1);
    linear(w, a, b, input_of(&in, w), ldx, p->rows, x->in_bias ? x->in_bias + at : 0, p->projected + at, p->ld_projected, 0,
           i + 1 < x->parts ? row_of(w + 1, a1) : row_of(&x->out, h0));
    for (int64_t r = 0; x->in_scale && r < p->rows; r++)
      for (int64_t c = a; c < b; c++) p->projected[r * p->ld_projected + at + c] *= x->in_scale[at + c];
    at += x->sizes[i];
  }
  barrier(p, phase);
  convolve_part(p, x, s, t);
  barrier(p, phase);
  if (x->kind != SHORT_CONV) {
    int64_t a, b;
    share_by(1, p->batch * x->heads, t, p->threads, &a, &b);
    for (int64_t unit = a; unit < b; unit++) scan(p, x, s, unit / x->heads, unit % x->heads, t);
    barrier(p, phase);
    gate_scanned(p, x, t);
    barrier(p, phase);
  }
  const Input y = put_rows(p, &p->mixer_rows, reads(&x->out), x->out.format == BF16, p->scanned, p->ld_scanned, t, phase);
  onto_residual(p, 0, NUM_KINDS, &x->out, h0, h1, &y, p->mixer_rows.ld, x->out_bias, 0, x->out_scale, phase, next);
  barrier(p, phase);
}

/* Copy terms from slots to others; `held` has room for all of them. Slots that stay are left alone: of those before the
 * committed position the place belongs to another slot now. */
static void move_terms(const Mixer *x, const MixerState *s, int64_t b, int64_t count, const int64_t *from, const int64_t *to,
                       float *held) {
  const int64_t bytes = x->held * (int64_t)sizeof(float);
  for (int64_t i = 0; i < count; i++)
    if (from[i] != to[i]) memcpy(held + i * x->held, terms_of(s, x, b, from[i]), bytes);
  for (int64_t i = 0; i < count; i++)
    if (from[i] != to[i]) memcpy(terms_of(s, x, b, to[i]), held + i * x->held, bytes);
}

/* Of row 0 and one layer, the states after `count` of the tokens whose terms are held, to conv and state. */
int64_t foretell_states(const Model *m, const Cache *cache, int64_t layer, int64_t count, float *conv, float *state) {
  const int64_t b = 0;
  const Mixer *x = m->layers[layer].mixer;
  const MixerState *s = &cache->states[layer];
  const int64_t base = s->meta[b * META + BASE], before = x->taps - 1, C = x->channels;
  if (count < 0 || base + count > s->meta[b * META + READ] || count > s->room) return 6;
  for (int64_t k = 0; k < before; k++) {
    const int64_t at = count - before + k;
    const float *from = at < 0 ? s->conv + (b * before + at + before) * C : terms_of(s, x, b, base + at);
    memcpy(conv + k * C, from, C * sizeof(float));
  }
  if (x->kind == SHORT_CONV) return 0;
  const int64_t size = state_of(s, x, b, 1) - state_of(s, x, b, 0);
  memcpy(state, state_of(s, x, b, 0), x->heads * size * sizeof(float));
  for (int64_t h = 0; h < x->heads; h++)
    for (int64_t c = 0; c < x->columns; c += WIDE)
      for (int64_t i = 0; i < count; i++) {
        float *part = state + h * size + c * x->rows;
        apply_slot(x, s, b, base + i, h, c, part, part);
      }
  return 0;
}

#endif
