/* One pass: what it works on, how threads share it, and norms. */
#ifndef FORETELL_PASS_H
#define FORETELL_PASS_H
#include <sched.h>

#include "quant.h"

/* Room for rows of activations as matrices read them (rows.h). */
typedef struct {
  int64_t rows, columns, ld; /* ld of the plain form */
  char *plain, *blocks;
} Rows;

/* Rows of the batch that hold the same keys and values in slots below `slots`, row b among them: their `nodes` nodes stand in
 * Pass.members from `first` on. */
typedef struct {
  int64_t b, first, nodes, slots;
} Group;

typedef struct {
  const Model *model;
  const Cache *cache;
  int64_t batch, nodes, tree_nodes; /* [batch, nodes] is the plan; of it `rows` are no padding, and only these are run */
  int64_t rows;
  int64_t *start, *owner, *node; /* [batch + 1] where each row of the batch begins; of each of `rows`: whose it is, which node */
  const int64_t *tokens, *slots, *positions; /* of `rows` */
  const int64_t *length;                     /* [batch] */
  const uint8_t *ancestry;
  int64_t stride_b, stride_n, stride_t; /* of ancestry [batch, nodes, tree_nodes] */
  /* scratch; ld* are padded so that rows do not share cache sets */
  int64_t ld_hidden, ld_mixed, ld_inner, qkv_width;
  float *residual, *qkv, *gate, *up;
  char *attending;        /* of each thread: see attention.h */
  float *states;          /* of tiles that threads share, [threads, segments, most queries, state] */
  float *branch; /* what attention or MLP returned, before it is normed or scaled and added */
  char *normed, *mixed, *inner;
  Block *blocks, *inner_blocks; /* what quantised matrices read: of norms and of attention; behind the activation */
  float *row;                   /* a row of floats for each thread */
  int64_t ld_row;
  /* Of mixtures (experts.h). An assignment is a row and one of the experts that it reads: `chosen` of each of the up to
   * GROUPED_ROWS rows that are grouped at a time. */
  float *route, *weight;        /* [rows, ld_route] logits of the router; weights of assignments */
  int32_t *expert, *from, *at;  /* of assignments: the expert; `at`: place in the groups; by place: the row */
  int32_t *begin;               /* [experts + 2] place at which each expert's group begins */
  char *gathered, *expert_inner; /* by place: normed rows [ld_hidden], activations [ld_expert], in the model's type, ... */
  Block *gathered_blocks, *expert_blocks; /* ... and as quantised matrices read them */
  float *expert_gate, *expert_up, *parts; /* by place: [ld_expert]; [hidden] what its expert returned */
  int64_t ld_route, ld_expert;
  /* Of experts that stay in files (store.h). Of those that the rows have chosen, the ones whose weights are there now; those
   * that are still to come; those that are read now; the next layer's logits, guessed; room for what a thread reads. */
  uint8_t *here, *due;
  int32_t *loads;
  int64_t num_loads, num_due;
  float *ahead;
  char *reading;
  /* Of mixers (mixer.h). */
  float *projected, *conved, *scanned; /* [rows, ld_...] */
  float *buffers, *factor;      /* of each thread: states of nodes; decay and beta of a head at every node */
  Rows mixer_rows;              /* what was scanned */
  int32_t *above, *kept, *last_child; /* [rows] of a node: its parent; buffer of its state or -1; last child or -1 */
  int64_t *counts, *ends;       /* [batch] nodes that are not padding; the slot after the last of them */
  int64_t ld_projected, ld_conved, ld_scanned, ld_buffers;
  int wide;                     /* lines of known text, which are committed at once */
  /* Of rows with a common beginning (attention.h): the groups, their nodes [rows], to which slot each row has one [batch], and
   * what attention has mixed there [rows, heads, state]. */
  Group *groups;
  int64_t num_groups, *members, *common;
  float *begun;
  /* Of latent attention (latent.h). */
  float *made, *queries; /* [rows, query_rank] what queries are made of; [rows, ld_queries] queries of all heads */
  Rows made_rows, raised_rows; /* what queries are made of, normed; values of all heads */
  char *by_head;         /* of each thread: what one head's part of a matrix reads */
  int64_t ld_queries, head_bytes;
  int64_t *run, *reach; /* [rows] tree slots that a node sees from the root on without a gap; end of all that it sees */
  const int64_t *loras;   /* [batch] each row's adapter, counted from 1, or 0; NULL: no row has one */
  float *reduced;         /* [rows, 3, low_rank]: see lora.h */
  int threads;
  atomic_uint arrived;
} Pass;

INLINE int64_t nodes_of(const Pass *p, int64_t b) { return p->start[b + 1] - p->start[b]; }
INLINE const uint8_t *seen_from(const Pass *p, int64_t i) {
  return p->ancestry + p->owner[i] * p->stride_b + p->node[i] * p->stride_n;
}
/* Where row i stands in [batch, nodes]. */
INLINE int64_t place_of(const Pass *p, int64_t i) { return p->owner[i] * p->nodes + p->node[i]; }

/* The pass's rows are those at `real` [rows] of [batch, nodes], in order; NULL: all. Returns 0 or 2: they are not. */
static int64_t number_rows(Pass *p, const int64_t *real) {
  int64_t b = 0;
  for (int64_t i = 0; i < p->rows; i++) {
    const int64_t at = real ? real[i] : i;
    if (at < (i ? place_of(p, i - 1) + 1 : 0) || at >= p->batch * p->nodes) return 2;
    p->owner[i] = at / p->nodes, p->node[i] = at % p->nodes;
    while (b <= p->owner[i]) p->start[b++] = i;
  }
  while (b <= p->batch) p->start[b++] = p->rows;
  return 0;
}

/* What attention makes of a segment of a row for a query, and for how many queries at most: see attention.h. */
enum { LD_SCORES = SEGMENT + 16 };
INLINE int64_t state_size(const Pass *p) { return value_dim(p->model) + 16; }
INLINE int64_t padded_dim(const Pass *p) { return (p->model->dim + 31) / 32 * 32; }
INLINE int64_t most_queries(const Pass *p) { return MIN(QUERIES, p->rows * (p->model->heads / MAX(1, p->model->kv_heads))); }
INLINE int64_t num_segments(const Pass *p) { return ((p->cache ? p->cache->capacity : 0) + SEGMENT - 1) / SEGMENT; }
INLINE int64_t attending_bytes(const Pass *p) {
  const int64_t each = 2 * padded_dim(p) + LD_SCORES + 2 * state_size(p);
  return aligned((most_queries(p) * each + 3 * PANEL * padded_dim(p) + 2 * LD_SCORES) * 4);
}

static void barrier(Pass *p, unsigned *phase) {
  const unsigned target = ++*phase * (unsigned)p->threads;
  atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel);
  for (int spins = 0; atomic_load_explicit(&p->arrived, memory_order_acquire) < target;) {
    if (++spins < 4000) pause_spin();
    else sched_yield(); /* another process has this core */
  }
}

/* The part of n rows that is thread t's, in multiples of unit. */
INLINE void share_by(int64_t unit, int64_t n, int t, int threads, int64_t *a, int64_t *b) {
  const int64_t units = (n + unit - 1) / unit;
  *a = MIN(units * t / threads * unit, n);
  *b = MIN(units * (t + 1) / threads * unit, n);
}

/* The same in multiples of 8 where that leaves none idle. */
INLINE void share(int64_t n, int t, int threads, int64_t *a, int64_t *b) {
  share_by(n >= 16 * threads ? 8 : 1, n, t, threads, a, b);
}

/* The same of the rows of a matrix: whole tiles of a quantised one. */
INLINE void share_rows(const Matrix *w, int64_t n, int t, int threads, int64_t *a, int64_t *b) {
  if (is_quantised(w)) share_by(TILE, n, t, threads, a, b);
  else share(n, t, threads, a, b);
}

/* Which rows of the MLP's inner matrices are thread t's: whole blocks where quantised ones read or write them. */
INLINE void share_inner(const Layer *l, int64_t n, int t, int threads, int64_t *a, int64_t *b) {
  if ((l->gate.data && is_quantised(&l->gate)) || is_quantised(&l->up) || is_quantised(&l->down)) share_by(32, n, t, threads, a, b);
  else share(n, t, threads, a, b);
}

/* What matrices read: activations in the model's type, blocks of int8, or both. */
typedef struct {
  const void *plain;
  const Block *blocks;
} Input;
enum { PLAIN = 1, BLOCKS = 2 };
INLINE int reads(const Matrix *w) { return is_quantised(w) ? BLOCKS : PLAIN; }
INLINE int attention_reads(const Model *m, const Layer *l) {
  return reads(&l->q) | reads(&l->k) | (m->rank ? 0 : reads(&l->v)) | (m->gated ? reads(&l->gates) : 0);
}
INLINE const void *input_of(const Input *x, const Matrix *w) { return is_quantised(w) ? (const void *)x->blocks : x->plain; }

/* 1 / rms(x) in every lane. */
static vec inverse_rms(const float *x, int64_t n, float eps) {
  vec squares = v_zero();
  for (int64_t i = 0; i < n; i += 16) {
    vec v = v_load_some(first_lanes(n - i), x + i);
    squares = v_fma(v, v, squares);
  }
  return v_all(1.0f / sqrtf(sum1(squares) / (float)n + eps));
}

/* y = x / rms(x) * weight, or x where there is no weight, in the model's type; x may be y. */
static void norm_row(int is_bf16, const float *x, const float *weight, int64_t n, float eps, void *y) {
  for (int64_t i = 0; !weight && i < n; i += 16)
    store_as(is_bf16, y, i, first_lanes(n - i), v_load_some(first_lanes(n - i), x + i));
  if (!weight) return;
  const vec scale = inverse_rms(x, n, eps);
  for (int64_t i = 0; i < n; i += 16) {
    const Lanes lanes = first_lanes(n - i);
    vec v = v_mul(v_load_some(lanes, x + i), scale);
    store_as(is_bf16, y, i, lanes, v_mul(v, v_load_some(lanes, weight + i)));
  }
}

/* A row of the stream, normed as the model has it; y may be the thread's p->row. */
static void norm_stream(Pass *p, int is_bf16, const float *x, const float *weight, int t, void *y) {
  const int64_t n = p->model->hidden;
  const float eps = (float)p->model->eps;
  float *row = p->row + t * p->ld_row;
  if (!p->model->centred) {
    norm_row(is_bf16, x, weight, n, eps, y);
    return;
  }
  vec sum = v_zero();
  for (int64_t i = 0; i < n; i += 16) sum = v_add(sum, v_load_some(first_lanes(n - i), x + i));
  const vec mean = v_all(sum1(sum) / (float)n);
  for (int64_t i = 0; i < n; i += 16) {
    const Lanes lanes = first_lanes(n - i);
    v_store_some(row + i, lanes, v_sub(v_load_some(lanes, x + i), mean));
  }
  norm_row(0, row, weight, n, eps, row);
  for (int64_t i = 0; i < n; i += 16) {
    const Lanes lanes = first_lanes(n - i);
    store_as(is_bf16, y, i, lanes, v_add(v_load_some(lanes, row + i), v_load_some(lanes, weight + n + i)));
  }
}

/* Where thread t keeps the blocks of rows of n values: its own where rows are few. */
INLINE Block *blocks_for(Pass *p, int64_t n, int t) {
  return (Block *)((char *)p->blocks + (p->rows <= FEW_ROWS ? t * blocks_bytes(n, p->rows) : 0));
}

/* All rows, normed: by every thread for itself where they are few (returns its own copy), else divided. */
static Input norm(Pass *p, int wanted, const float *weight, int t, unsigned *phase) {
  const Model *m = p->model;
  const int64_t row_bytes = p->ld_hidden * (m->bf16 ? 2 : 4), stride = block_stride(p->rows);
  const int own = p->rows <= FEW_ROWS;
  int64_t a = 0, b = p->rows;
  char *to = p->normed + (own ? t * p->rows * row_bytes : 0);
  Block *blocks = blocks_for(p, m->hidden, t);
  float *row = p->row + t * p->ld_row;
  if (!own) share(p->rows, t, p->threads, &a, &b);
  for (int64_t i = a; i < b; i++) {
    const float *x = p->residual + i * m->hidden;
    if (wanted & PLAIN) norm_stream(p, (int)m->bf16, x, weight, t, to + i * row_bytes);
    if (!(wanted & BLOCKS)) continue;
    norm_stream(p, 0, x, weight, t, row);
    quantise_row(row, m->hidden, blocks + i, stride);
    quantise_padding(m->hidden, blocks + i, stride);
  }
  if (!own) barrier(p, phase);
  return (Input){to, blocks};
}

/* What attention mixed: blocks are made of the floats that it leaves where a quantised matrix reads them. */
static Input mixture(Pass *p, const Matrix *reader, int t, unsigned *phase) {
  const int64_t n = p->model->heads * p->model->dim, stride = block_stride(p->rows);
  Block *blocks = blocks_for(p, n, t);
  if (is_quantised(reader)) {
    const int own = p->rows <= FEW_ROWS;
    int64_t a = 0, b = p->rows;
    if (!own) share(p->rows, t, p->threads, &a, &b);
    for (int64_t i = a; i < b; i++) {
      quantise_row((const float *)p->mixed + i * p->ld_mixed, n, blocks + i, stride);
      quantise_padding(n, blocks + i, stride);
    }
    if (!own) barrier(p, phase);
  }
  return (Input){p->mixed, blocks};
}

/* Columns [a, b) of rows of the head's products become logits. */
static void finish_logits(const Model *m, float *logits, int64_t ld, int64_t rows, int64_t a, int64_t b) {
  const float scale = m->logit_scale != 0.0 ? (float)m->logit_scale : 1.0f, cap = (float)m->logit_cap;
  if (scale == 1.0f && cap == 0.0f) return;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = a; j < b; j += 16) {
      const Lanes lanes = first_lanes(b - j);
      vec x = v_mul(v_load_some(lanes, logits + i * ld + j), v_all(scale));
      if (cap != 0.0f) x = v_mul(tanh16(v_div(x, v_all(cap))), v_all(cap));
      v_store_some(logits + i * ld + j, lanes, x);
    }
}

/* Norms of all queries together and of all keys, in place. */
static void norm_flat(Pass *p, const Layer *l, int t) {
  const Model *m = p->model;
  const int64_t Q = m->heads * m->dim, KV = m->kv_heads * m->dim;
  int64_t a, b;
  share(p->rows, t, p->threads, &a, &b);
  for (int64_t i = a; i < b; i++) {
    float *row = p->qkv + i * p->qkv_width;
    norm_row(0, row, l->q_norm, Q, (float)m->eps, row);
    norm_row(0, row + Q, l->k_norm, KV, (float)m->eps, row + Q);
  }
}

/* Optional norm, then rotation by position, of one head's vector; x may be y. Of latent attention the norm is of the first
 * `rank` numbers, and the rotation of those behind. */
static void rotate(const Pass *p, int64_t rope, const float *x, const float *weight, int64_t position, float *y) {
  const Model *m = p->model;
  const int64_t still = m->rank, half = (m->dim - still) / 2;
  float normed[MAX_DIM];
  const int last = (int)m->norms_last;
  if (weight && !m->flat && !last) {
    norm_row(0, x, weight, still ? still : m->dim, (float)(still ? m->latent_eps : m->eps), normed);
    memcpy(normed + still, x + still, still ? (m->dim - still) * sizeof(float) : 0);
    x = normed;
  }
  if (still && x != y) memcpy(y, x, still * sizeof(float));
  x += still, y += still;
  const int64_t at = (rope * p->cache->capacity + position) * half;
  const float *cos = p->cache->cos + at, *sin = p->cache->sin + at;
  for (int64_t i = 0; i < half; i += 16) {
    const Lanes lanes = first_lanes(half - i);
    const vec c = v_load_some(lanes, cos + i), s = v_load_some(lanes, sin + i);
    const vec u = v_load_some(lanes, x + i), v = v_load_some(lanes, x + half + i);
    v_store_some(y + i, lanes, v_fnma(v, s, v_mul(u, c)));
    v_store_some(y + half + i, lanes, v_fma(u, s, v_mul(v, c)));
  }
  if (weight && last) norm_row(0, y, weight, m->dim, (float)m->eps, y);
}

#endif
