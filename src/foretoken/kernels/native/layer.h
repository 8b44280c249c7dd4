/* One layer of a pass. */
#ifndef FORETOKEN_LAYER_H
#define FORETOKEN_LAYER_H
#include "attention.h"
#include "linear.h"
#include "pass.h"

/* silu(gate) * up for columns [a, b) of every row, as what comes next reads it: a is a multiple of 32 for blocks. */
static void activate(Pass *p, const Matrix *reader, int64_t a, int64_t b, int t) {
  const Model *m = p->model;
  const int as_blocks = is_quantised(reader), is_bf16 = m->bf16 && !as_blocks;
  const int64_t stride = block_stride(p->rows);
  for (int64_t i = 0; i < p->rows && a < b; i++) {
    const float *gate = p->gate + i * m->intermediate, *up = p->up + i * m->intermediate;
    char *to = as_blocks ? (char *)(p->row + t * p->ld_row) : p->inner + i * p->ld_inner * (m->bf16 ? 2 : 4);
    for (int64_t j = a; j < b; j += 16) {
      const Lanes lanes = first_lanes(b - j);
      const vec g = v_load_some(lanes, gate + j), u = v_load_some(lanes, up + j);
      const vec e = exp16(v_sub(v_zero(), g));
      const vec y = v_div(v_mul(g, u), v_add(e, v_all(1.0f)));
      store_as(is_bf16, to, j, lanes, y);
    }
    if (as_blocks) quantise_row((const float *)to + a, b - a, p->inner_blocks + a / 32 * stride + i, stride);
    if (as_blocks && b == m->intermediate) quantise_padding(b, p->inner_blocks + i, stride);
  }
}

static void run_layer(Pass *p, int index, int t, unsigned *phase, const void *next) {
  const Model *m = p->model;
  const Layer *l = &m->layers[index];
  const int T = p->threads;
  const int64_t H = m->hidden, I = m->intermediate, Q = m->heads * m->dim, KV = m->kv_heads * m->dim, rows = p->rows;
  int64_t a, b, h0, h1, d0, d1, i0, i1;
  share_rows(&l->o, H, t, T, &h0, &h1), share_rows(&l->down, H, t, T, &d0, &d1);
  share_rows(is_quantised(&l->k) ? &l->k : is_quantised(&l->v) ? &l->v : &l->q, Q + 2 * KV, t, T, &a, &b);
  if (is_quantised(&l->gate) || is_quantised(&l->up) || is_quantised(&l->down)) share_by(32, I, t, T, &i0, &i1);
  else share(I, t, T, &i0, &i1);
  const void *o = row_of(&l->o, h0), *gate = row_of(&l->gate, i0), *up = row_of(&l->up, i0);
  const void *down = row_of(&l->down, d0);

  Input x = norm(p, reads(&l->q) | reads(&l->k) | reads(&l->v), l->input_norm, t, phase);
  const struct { const Matrix *w; const float *bias; int64_t from, size; } parts[3] = {
      {&l->q, l->q_bias, 0, Q}, {&l->k, l->k_bias, Q, KV}, {&l->v, l->v_bias, Q + KV, KV}};
  for (int i = 0; i < 3; i++) {
    const int64_t from = MAX(a - parts[i].from, 0), to = MIN(b - parts[i].from, parts[i].size);
    const int ends = b <= parts[i].from + parts[i].size;
    if (from < to)
      linear(parts[i].w, from, to, input_of(&x, parts[i].w), p->ld_hidden, rows, parts[i].bias,
             p->qkv + parts[i].from, p->qkv_width, 0, ends ? o : parts[i + 1].w->data);
  }
  barrier(p, phase);
  attention(p, l, index, t);
  barrier(p, phase);
  x = mixture(p, &l->o, t, phase);
  linear(&l->o, h0, h1, input_of(&x, &l->o), p->ld_mixed, rows, l->o_bias, p->residual, H, 1, gate);
  barrier(p, phase);
  x = norm(p, reads(&l->gate) | reads(&l->up), l->mlp_norm, t, phase);
  linear(&l->gate, i0, i1, input_of(&x, &l->gate), p->ld_hidden, rows, l->gate_bias, p->gate, I, 0, up);
  linear(&l->up, i0, i1, input_of(&x, &l->up), p->ld_hidden, rows, l->up_bias, p->up, I, 0, down);
  activate(p, &l->down, i0, i1, t);
  barrier(p, phase);
  x = (Input){p->inner, p->inner_blocks};
  linear(&l->down, d0, d1, input_of(&x, &l->down), p->ld_inner, rows, l->down_bias, p->residual, H, 1, next);
}

#endif
