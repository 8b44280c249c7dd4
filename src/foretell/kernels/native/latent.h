/* Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with its products absorbed.
 *
 * A slot keeps [vector, rank | rotated key, rope], one for all heads, and its value is the vector. `q` makes queries [heads, nope
 * + rope], or what `q_b` makes them of; `k` makes the slot. The still part of a head's query times `k_b` [heads * rank, nope] meets
 * the vector as a key, so attention is that of one key-value head; what a head mixed, a vector of `rank`, becomes its value by
 * `v_b` [heads * value, rank]. A head's rows of both are products of its own numbers alone. */
#ifndef FORETELL_LATENT_H
#define FORETELL_LATENT_H
#include "linear.h"
#include "rows.h"

/* Columns of the first products of a layer: of queries or what they are made of, and of keys and values. */
INLINE int64_t query_width(const Model *m) {
  return !m->rank ? m->heads * m->dim : m->query_rank ? m->query_rank : m->heads * (m->nope + m->rope);
}
INLINE int64_t first_width(const Model *m) { return query_width(m) + (m->rank ? m->dim : 2 * m->kv_heads * m->dim); }

/* Thread t's share of all heads' products: of each head its `each` rows of w times its `size` numbers, those from head * apart
 * on in rows of x [rows, ldx], to head * to_apart of out [rows, ldo]. */
static void by_heads(Pass *p, const Matrix *w, int64_t each, int64_t size, const float *x, int64_t ldx, int64_t apart,
                     float *out, int64_t ldo, int64_t to_apart, int t, const void *next) {
  int64_t a, b;
  Rows room;
  place_rows(&room, p->rows, size, 1, p->by_head + t * p->head_bytes);
  const Input own = {room.plain, (Block *)room.blocks};
  share_rows(w, p->model->heads * each, t, p->threads, &a, &b);
  for (int64_t head = a / each; head * each < b; head++) {
    const int64_t from = MAX(a, head * each), to = MIN(b, (head + 1) * each);
    for (int64_t i = 0; i < p->rows; i++)
      put_row(&room, &own, reads(w), (int)p->model->bf16, i, x + i * ldx + head * apart);
    linear(w, from, to, input_of(&own, w), room.ld, p->rows, 0, out + head * (to_apart - each), ldo, 0,
           to < b ? row_of(w, to) : next);
  }
}

/* Queries as keys meet them, of what the first product made. */
static void absorb(Pass *p, const Layer *l, int t, unsigned *phase) {
  const Model *m = p->model;
  const int64_t size = m->nope + m->rope;
  int64_t a, b;
  if (l->q_b.data) {
    const Input x = rows_for(&p->made_rows, t, p->threads, &a, &b);
    float *row = p->row + t * p->ld_row;
    for (int64_t i = a; i < b; i++) {
      norm_row(0, p->made + i * m->query_rank, l->q_norm, m->query_rank, (float)m->latent_eps, row);
      put_row(&p->made_rows, &x, reads(&l->q_b), (int)m->bf16, i, row);
    }
    if (p->rows > FEW_ROWS) barrier(p, phase);
    share_rows(&l->q_b, m->heads * size, t, p->threads, &a, &b);
    linear(&l->q_b, a, b, input_of(&x, &l->q_b), p->made_rows.ld, p->rows, 0, p->queries, p->ld_queries, 0, l->k_b.data);
    barrier(p, phase);
  }
  share(p->rows, t, p->threads, &a, &b);
  for (int64_t i = a; i < b; i++)
    for (int64_t head = 0; head < m->heads; head++)
      memcpy(p->qkv + i * p->qkv_width + head * m->dim + m->rank, p->queries + i * p->ld_queries + head * size + m->nope,
             m->rope * sizeof(float));
  by_heads(p, &l->k_b, m->rank, m->nope, p->queries, p->ld_queries, size, p->qkv, p->qkv_width, m->dim, t, l->v_b.data);
  barrier(p, phase);
}

/* What each head mixed becomes its value, in place of queries and keys, and then what the output matrix reads. */
static Input raise_values(Pass *p, const Layer *l, int t, unsigned *phase) {
  const Model *m = p->model;
  int64_t a, b;
  share_rows(&l->o, m->hidden, t, p->threads, &a, &b);
  by_heads(p, &l->v_b, m->value, m->rank, (const float *)p->mixed, p->ld_mixed, m->rank, p->qkv, p->qkv_width, m->value, t,
           row_of(&l->o, a));
  barrier(p, phase);
  return put_rows(p, &p->raised_rows, reads(&l->o), (int)m->bf16, p->qkv, p->qkv_width, t, phase);
}

#endif
