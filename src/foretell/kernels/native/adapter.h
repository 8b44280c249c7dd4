/* Kangaroo's adapter: a layer of the model's kind, without its MLP. */
#ifndef FORETELL_ADAPTER_H
#define FORETELL_ADAPTER_H
#include "linear.h"
#include "place.h"

typedef struct {
  Pass p;
  float *row; /* [threads, hidden] */
} Adapter;

static int64_t place_adapter(Adapter *w, char *base) {
  Pass *p = &w->p;
  const Model *m = p->model;
  int64_t at = place(p, base);
  w->row = (float *)(base + at), at += aligned((int64_t)p->threads * m->hidden * 4);
  p->residual = (float *)(base + at), at += aligned(p->rows * m->hidden * 4);
  return at;
}

int64_t foretell_adapter_scratch(const Model *m, const Cache *cache, int64_t batch, int64_t nodes, int64_t threads) {
  Adapter w = {.p = {.model = m, .cache = cache, .batch = batch, .nodes = nodes, .rows = batch * nodes,
                     .threads = (int)threads}};
  return place_adapter(&w, 0);
}

/* x + attention(norm(x)), then the final norm, for the nodes of a plan: hidden [batch, nodes, hidden] -> normed. Errors as
 * foretell_forward. */
int64_t foretell_adapter(const Model *m, const Cache *cache, int64_t threads, int64_t batch, int64_t nodes,
                          int64_t tree_nodes, const int64_t *length, const int64_t *slots, const int64_t *positions,
                          const uint8_t *ancestry, int64_t stride_b, int64_t stride_n, int64_t stride_t,
                          const float *hidden, float *normed, char *scratch) {
  Adapter adapter = {.p = {.model = m, .cache = cache, .batch = batch, .nodes = nodes, .tree_nodes = tree_nodes,
                           .rows = batch * nodes, .threads = (int)threads}};
  Adapter *w = &adapter;
  Pass *p = &w->p;
  place_adapter(w, scratch), number_rows(p, 0);
  memcpy(p->residual, hidden, p->rows * m->hidden * sizeof(float));
  p->length = length, p->slots = slots, p->positions = positions;
  p->ancestry = ancestry, p->stride_b = stride_b, p->stride_n = stride_n, p->stride_t = stride_t;
  for (int64_t i = 0; i < p->rows; i++) {
    const int64_t start = length[i / nodes];
    if (start < 0 || slots[i] < start || slots[i] >= cache->capacity) return 2;
    if (positions[i] < start || positions[i] > slots[i]) return 3;
    look(p, i);
  }
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
    int64_t a, b;
    const Layer *l = &m->layers[0];
#pragma omp single
    p->threads = omp_get_num_threads();
    const Input x = norm(p, reads(&l->q) | reads(&l->k) | reads(&l->v), l->input_norm, t, &phase);
    attention_part(p, 0, t, &phase, x, p->ld_hidden, m->head.data);
    float *row = w->row + t * m->hidden;
    share(p->rows, t, p->threads, &a, &b);
    for (int64_t i = a; i < b; i++) {
      norm_row(0, p->residual + i * m->hidden, m->final_norm, m->hidden, (float)m->eps, row);
      memcpy(normed + i * m->hidden, row, m->hidden * sizeof(float));
    }
  }
  return 0;
}

#endif
