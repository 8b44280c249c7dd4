/* One layer of a pass. */
#ifndef FORETELL_LAYER_H
#define FORETELL_LAYER_H
#include "attention.h"
#include "latent.h"
#include "lora.h"

/* Where gate and up stand, and where their product goes: all of `rows` rows. */
typedef struct {
  const float *gate, *up; /* [rows, ld]; gate NULL: there is none */
  int64_t rows, ld, size; /* size: values of a row */
  char *plain;            /* [rows, ld_plain] in the model's type, or (both where a row has an adapter) ... */
  int64_t ld_plain;
  Block *blocks;          /* ... as a quantised matrix reads it */
  float *raw;             /* [rows, ld] floats, to be normed first, in place of both; may be `up`. NULL: they are not */
} Gated;

/* silu(gate) * up, gelu(gate) * up or relu(gate)^2 * up, without a gate gelu(up) or relu(up)^2, for columns [a, b) of every row, as what comes next reads it: a is a multiple
 * of 32 for blocks. gpt-oss's with alpha and limit: gate is at most limit, up within it, and gate * sigmoid(alpha * gate) *
 * (up + 1). NaN stays: v_min and v_max return their second operand where one is. */
static void activate_rows(Pass *p, const Gated *x, const Matrix *reader, int64_t a, int64_t b, int t) {
  const Model *m = p->model;
  const int as_blocks = is_quantised(reader) && !x->raw, is_bf16 = m->bf16 && !as_blocks && !x->raw;
  const int64_t stride = block_stride(x->rows);
  for (int64_t i = 0; i < x->rows && a < b; i++) {
    const float *up = x->up + i * x->ld, *gate = x->gate ? x->gate + i * x->ld : up;
    char *to = x->raw      ? (char *)(x->raw + i * x->ld)
               : as_blocks ? (char *)(p->row + t * p->ld_row)
                           : x->plain + i * x->ld_plain * (m->bf16 ? 2 : 4);
    for (int64_t j = a; j < b; j += 16) {
      const Lanes lanes = first_lanes(b - j);
      vec u = v_load_some(lanes, up + j);
      vec g = v_load_some(lanes, gate + j);
      if (!x->gate && m->gelu) u = v_all(1.0f);
      else if (!x->gate) {
        g = v_max(v_zero(), g); /* NaN stays */
        store_as(is_bf16, to, j, lanes, v_mul(g, g));
        if (as_blocks && p->loras) store_as((int)m->bf16, x->plain + i * x->ld_plain * (m->bf16 ? 2 : 4), j, lanes, v_mul(g, g));
        continue;
      }
      if (m->gate_scale != 0.0) g = v_mul(g, v_all((float)m->gate_scale));
      if (m->swiglu_alpha != 0.0) {
        const vec limit = v_all((float)m->swiglu_limit);
        g = v_min(limit, g), u = v_add(v_max(v_sub(v_zero(), limit), v_min(limit, u)), v_all(1.0f));
      }
      /* gelu's tanh form is x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) */
      const vec wide = v_fma(v_mul(v_mul(g, g), g), v_all(0.044715f), g);
      const vec e = exp16(m->gelu == 1             ? v_mul(wide, v_all(-1.5957691216f))
                          : m->swiglu_alpha != 0.0 ? v_mul(g, v_all(-(float)m->swiglu_alpha))
                                                   : v_sub(v_zero(), g));
      vec y = v_div(v_mul(g, u), v_add(e, v_all(1.0f)));
      if (m->gelu == 2) g = v_max(v_zero(), g), y = v_mul(v_mul(g, g), u);
      store_as(is_bf16, to, j, lanes, y);
      if (as_blocks && p->loras) store_as((int)m->bf16, x->plain + i * x->ld_plain * (m->bf16 ? 2 : 4), j, lanes, y);
    }
    if (as_blocks) quantise_row((const float *)to + a, b - a, x->blocks + a / 32 * stride + i, stride);
    if (as_blocks && b == x->size) quantise_padding(b, x->blocks + i, stride);
  }
}

/* The same of the MLP of all rows. */
static void activate(Pass *p, const Layer *l, int64_t a, int64_t b, int t) {
  const int64_t n = p->model->intermediate;
  const Gated x = {l->gate.data ? p->gate : 0, p->up, p->rows, n, n, p->inner, p->ld_inner, p->inner_blocks,
                   l->inner_norm ? p->up : 0};
  activate_rows(p, &x, &l->down, a, b, t);
}

/* What it left in `up`, normed, as `down` reads it: this thread's rows. */
static void norm_inner(Pass *p, const Layer *l, int t) {
  const Model *m = p->model;
  const int64_t n = m->intermediate, stride = block_stride(p->rows);
  const float eps = (float)m->eps;
  int64_t a, b;
  share(p->rows, t, p->threads, &a, &b);
  for (int64_t i = a; i < b; i++) {
    const float *x = p->up + i * n;
    if (!is_quantised(&l->down) || p->loras)
      norm_row((int)m->bf16, x, l->inner_norm, n, eps, p->inner + i * p->ld_inner * (m->bf16 ? 2 : 4));
    if (!is_quantised(&l->down)) continue;
    float *row = p->row + t * p->ld_row;
    norm_row(0, x, l->inner_norm, n, eps, row);
    quantise_row(row, n, p->inner_blocks + i, stride);
    quantise_padding(n, p->inner_blocks + i, stride);
  }
}

/* What attention mixed, normed in its place: this thread's rows, which stay ld_mixed floats apart. */
static void norm_mixed(Pass *p, const Layer *l, int t) {
  const Model *m = p->model;
  int64_t a, b;
  share(p->rows, t, p->threads, &a, &b);
  for (int64_t i = a; i < b; i++) {
    float *row = (float *)p->mixed + i * p->ld_mixed;
    norm_row(m->bf16 && !is_quantised(&l->o), row, l->mixed_norm, m->heads * m->dim, (float)m->eps, row);
  }
}

/* Queries, keys and values of x [rows, ldx]: this thread's columns of them. */
static void project(Pass *p, const Layer *l, int t, Input x, int64_t ldx) {
  const Model *m = p->model;
  const int64_t H = m->hidden, Q = query_width(m), KV = m->kv_heads * m->dim;
  int64_t a, b, h0, h1;
  share_rows(&l->o, H, t, p->threads, &h0, &h1);
  const int num_parts = m->rank ? 2 : m->gated ? 4 : 3;
  share_rows(is_quantised(&l->k) ? &l->k : is_quantised(&l->v) ? &l->v : &l->q, m->rank ? first_width(m) : p->qkv_width, t,
             p->threads, &a, &b);
  const void *last = m->rank ? (l->q_b.data ? l->q_b.data : l->k_b.data) : row_of(&l->o, h0);
  float *const queries = !m->rank ? p->qkv : l->q_b.data ? p->made : p->queries;
  const int64_t ld = p->qkv_width, ldq = !m->rank ? ld : l->q_b.data ? m->query_rank : p->ld_queries;
  const struct { const Matrix *w; const float *bias; int64_t from, size; float *to; int64_t ld; } parts[4] = {
      {&l->q, l->q_bias, 0, Q, queries, ldq}, {&l->k, l->k_bias, Q, KV, p->qkv + m->heads * m->dim, ld},
      {&l->v, l->v_bias, Q + KV, KV, p->qkv + Q + KV, ld}, {&l->gates, l->gates_bias, Q + 2 * KV, Q, p->qkv + Q + 2 * KV, ld}};
  for (int i = 0; i < num_parts; i++) {
    const int64_t from = MAX(a - parts[i].from, 0), to = MIN(b - parts[i].from, parts[i].size);
    const int ends = b <= parts[i].from + parts[i].size;
    if (from < to)
      linear(parts[i].w, from, to, input_of(&x, parts[i].w), ldx, p->rows, parts[i].bias,
             parts[i].to, parts[i].ld, 0, ends ? last : parts[i + 1].w->data);
    if (p->loras && i < 3) raise_onto(p, l, OF_Q + i, i, from, to, parts[i].to, parts[i].ld);
  }
}

/* What attention or MLP returned, normed and times `by`, onto columns [a, b) of the residual: those that thread t summed. */
static void add_branch(Pass *p, const float *weight, float by, int64_t a, int64_t b, unsigned *phase) {
  const Model *m = p->model;
  const int64_t H = m->hidden;
  const vec part = v_all(by);
  barrier(p, phase);
  for (int64_t i = 0; i < p->rows; i++) {
    const float *x = p->branch + i * H;
    float *to = p->residual + i * H;
    const vec scale = weight ? inverse_rms(x, H, (float)m->eps) : v_all(1.0f);
    for (int64_t j = a; j < b; j += 16) {
      const Lanes lanes = first_lanes(b - j);
      vec y = v_mul(v_load_some(lanes, x + j), scale);
      if (weight) y = v_mul(y, v_load_some(lanes, weight + j));
      v_store_some(to + j, lanes, v_fma(y, part, v_load_some(lanes, to + j)));
    }
  }
}

/* Rows [a, b) of w times x, with what comes behind it, onto the residual. kind: whose low-rank terms, reduced before, come on
 * top; NUM_KINDS: none. */
static void onto_residual(Pass *p, const Layer *l, int kind, const Matrix *w, int64_t a, int64_t b, const Input *x, int64_t ldx,
                          const float *bias, const float *after, double scale, unsigned *phase, const void *next) {
  const double of_all = p->model->residual_scale;
  const float by = (of_all != 0.0 ? (float)of_all : 1.0f) * (scale != 0.0 ? (float)scale : 1.0f);
  const int apart = after || by != 1.0f;
  float *out = apart ? p->branch : p->residual;
  linear(w, a, b, input_of(x, w), ldx, p->rows, bias, out, p->model->hidden, !apart, next);
  if (p->loras && kind < NUM_KINDS) raise_onto(p, l, kind, 0, a, b, out, p->model->hidden);
  if (apart) add_branch(p, after, by, a, b, phase);
}

/* What attention mixed, onto the residual. */
static void settle(Pass *p, const Layer *l, int t, unsigned *phase, const void *next) {
  const int64_t H = p->model->hidden;
  const int is_latent = p->model->rank != 0;
  int64_t h0, h1;
  share_rows(&l->o, H, t, p->threads, &h0, &h1);
  const int is_bf16 = p->model->bf16 && !is_latent && !is_quantised(&l->o);
  const int64_t ld = p->ld_mixed * (is_bf16 && l->mixed_norm ? 2 : 1);
  if (l->mixed_norm) norm_mixed(p, l, t), barrier(p, phase);
  const Input x = is_latent ? raise_values(p, l, t, phase) : mixture(p, &l->o, t, phase);
  if (p->loras) {
    reduce(p, l, OF_O, OF_O, is_bf16, is_latent ? p->qkv : p->mixed, is_latent ? p->qkv_width : ld, t);
    fetch_raise(p, l, OF_O, h0, h1);
    barrier(p, phase);
  }
  const int64_t ldx = is_latent ? p->raised_rows.ld : ld;
  onto_residual(p, l, OF_O, &l->o, h0, h1, &x, ldx, l->o_bias, l->attention_after, p->model->attention_scale, phase, next);
  barrier(p, phase);
}

/* Attention of x [rows, ldx] over the cache, onto the residual. */
static void attention_part(Pass *p, int index, int t, unsigned *phase, Input x, int64_t ldx, const void *next) {
  const Layer *l = &p->model->layers[index];
  if (p->loras) {
    reduce(p, l, OF_Q, OF_V, (int)p->model->bf16, x.plain, ldx, t);
    barrier(p, phase);
  }
  project(p, l, t, x, ldx);
  barrier(p, phase);
  if (p->model->rank) absorb(p, l, t, phase);
  if (p->model->flat) norm_flat(p, l, t), barrier(p, phase);
  attend(p, l, index, 0, put_nodes, p, t, phase);
  barrier(p, phase);
  settle(p, l, t, phase, next);
}

/* What the MLP's first matrices read. */
INLINE int mlp_reads(const Pass *p, const Layer *l) {
  return (l->gate.data ? reads(&l->gate) : 0) | reads(&l->up) | (p->loras ? PLAIN : 0);
}

/* The MLP of x, or (NULL) of the normed residual, onto the residual. */
static void mlp_part(Pass *p, int index, int t, unsigned *phase, const Input *given, const void *next) {
  const Model *m = p->model;
  const Layer *l = &m->layers[index];
  const int64_t H = m->hidden, I = m->intermediate, rows = p->rows;
  int64_t d0, d1, i0, i1;
  share_rows(&l->down, H, t, p->threads, &d0, &d1), share_inner(l, I, t, p->threads, &i0, &i1);
  const void *up = row_of(&l->up, i0), *down = row_of(&l->down, d0);
  const int gated = l->gate.data != 0;
  Input x = given ? *given : norm(p, mlp_reads(p, l), l->mlp_norm, t, phase);
  if (p->loras) {
    reduce(p, l, OF_GATE, OF_UP, (int)m->bf16, x.plain, p->ld_hidden, t);
    fetch_raise(p, l, OF_GATE, i0, i1), fetch_raise(p, l, OF_UP, i0, i1);
    barrier(p, phase);
  }
  if (gated) linear(&l->gate, i0, i1, input_of(&x, &l->gate), p->ld_hidden, rows, l->gate_bias, p->gate, I, 0, up);
  linear(&l->up, i0, i1, input_of(&x, &l->up), p->ld_hidden, rows, l->up_bias, p->up, I, 0, down);
  if (p->loras && gated) raise_onto(p, l, OF_GATE, 0, i0, i1, p->gate, I);
  if (p->loras) raise_onto(p, l, OF_UP, 1, i0, i1, p->up, I);
  activate(p, l, i0, i1, t);
  barrier(p, phase);
  if (l->inner_norm) norm_inner(p, l, t), barrier(p, phase);
  x = (Input){p->inner, p->inner_blocks};
  if (p->loras) {
    reduce(p, l, OF_DOWN, OF_DOWN, (int)m->bf16, x.plain, p->ld_inner, t);
    fetch_raise(p, l, OF_DOWN, d0, d1);
    barrier(p, phase);
  }
  onto_residual(p, l, OF_DOWN, &l->down, d0, d1, &x, p->ld_inner, l->down_bias, l->mlp_after, p->model->mlp_scale, phase, next);
}

#endif
