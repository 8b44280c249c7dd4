/* DFlash's block drafter and Kangaroo's adapter: layers of the model's kind with a way in and out of their own. */
#ifndef FORETELL_FLASH_H
#define FORETELL_FLASH_H
#include "linear.h"
#include "place.h"
#include "rows.h"

typedef struct {
  Pass p;
  Rows context, read;              /* features before the blocks; what the output head reads */
  float *kv, *row;                 /* [batch * known, 2 * kv width] of one layer; [threads, hidden] */
  int64_t known, num_read;
  const int64_t *slots, *seen;     /* [batch, known + nodes]; [layers, batch, nodes] the last slot that a row of a block sees */
} Flash;

static int64_t place_flash(Flash *w, char *base) {
  Pass *p = &w->p;
  const Model *m = p->model;
  int64_t at = place(p, base);
  at += place_rows(&w->context, MAX(p->batch * w->known, 1), m->hidden, p->threads, base + at);
  at += place_rows(&w->read, MAX(w->num_read, 1), m->hidden, p->threads, base + at);
  w->kv = (float *)(base + at), at += aligned(p->batch * w->known * 2 * m->kv_heads * m->dim * 4);
  w->row = (float *)(base + at), at += aligned((int64_t)p->threads * m->hidden * 4);
  p->residual = (float *)(base + at), at += aligned(p->rows * m->hidden * 4);
  p->length = (int64_t *)(base + at), at += aligned(p->batch * 8);
  return at;
}

int64_t foretell_flash_scratch(const Model *m, const Cache *cache, int64_t batch, int64_t known, int64_t nodes,
                                int64_t num_read, int64_t threads) {
  Flash w = {.p = {.model = m, .cache = cache, .batch = batch, .nodes = nodes, .rows = batch * nodes,
                   .threads = (int)threads},
             .known = known, .num_read = num_read};
  return place_flash(&w, 0);
}

/* Keys and values of a row's context before its block, and of the block. */
static void put_block(void *context, const Layer *layer, int index, int64_t b, int64_t kv_head) {
  Flash *w = context;
  Pass *p = &w->p;
  const Model *m = p->model;
  const int64_t dim = m->dim, width = m->kv_heads * dim, each = w->known + p->nodes;
  for (int64_t i = 0; i < each; i++) {
    const int64_t slot = w->slots[b * each + i];
    const float *k = i < w->known ? w->kv + (b * w->known + i) * 2 * width + kv_head * dim
                                  : p->qkv + (b * p->nodes + i - w->known) * p->qkv_width + (m->heads + kv_head) * dim;
    remember(p, layer, index, b, kv_head, slot, slot, k, k + width);
  }
}

/* Rows [from, to) of every block through the final norm, and through the output head where logits are wanted. */
static void read_out(Flash *w, int64_t from, float *normed, float *logits, int t, unsigned *phase) {
  Pass *p = &w->p;
  const Model *m = p->model;
  const int64_t H = m->hidden, each = w->num_read / p->batch;
  int64_t a, b, own_a, own_b;
  float *row = w->row + t * H;
  const Input read = rows_for(&w->read, t, p->threads, &a, &b);
  share(w->num_read, t, p->threads, &own_a, &own_b);
  for (int64_t i = a; i < b; i++) {
    norm_row(0, p->residual + (i / each * p->nodes + from + i % each) * H, m->final_norm, H, (float)m->eps, row);
    put_row(&w->read, &read, reads(&m->head), (int)m->bf16, i, row);
    if (i >= own_a && i < own_b) memcpy(normed + i * H, row, H * sizeof(float));
  }
  if (w->num_read > FEW_ROWS) barrier(p, phase);
  share_rows(&m->head, m->vocab, t, p->threads, &a, &b);
  if (logits)
    linear(&m->head, a, b, input_of(&read, &m->head), w->read.ld, w->num_read, 0, logits, m->vocab, 0, row_of(&m->head, a));
  if (logits) finish_logits(m, logits, m->vocab, w->num_read, a, b);
}

/* Blocks of `nodes` rows, embedded [batch, nodes, hidden], after `known` features each, context [batch, known, hidden].
 * slots [batch, known + nodes] are positions too; seen [layers, batch, nodes]: the last slot that each row of a block sees. normed
 * [batch, count, hidden] and logits [batch, count, vocab] are of rows [from, from + count) of each block.
 * Returns 0 or 2: a slot is outside the cache. */
int64_t foretell_flash(const Model *m, const Cache *cache, int64_t threads, int64_t batch, int64_t known, int64_t nodes,
                        const float *context, const float *embedded, const int64_t *slots, const int64_t *seen,
                        int64_t from, int64_t count, float *normed, float *logits, char *scratch) {
  Flash flash = {.p = {.model = m, .cache = cache, .batch = batch, .nodes = nodes, .rows = batch * nodes,
                       .threads = (int)threads},
                 .known = known, .num_read = batch * count, .slots = slots, .seen = seen};
  Flash *w = &flash;
  Pass *p = &w->p;
  const int64_t H = m->hidden, KV = m->kv_heads * m->dim, each = known + nodes;
  place_flash(w, scratch), number_rows(p, 0);
  memcpy(p->residual, embedded, p->rows * H * sizeof(float));
  for (int64_t i = 0; i < batch * each; i++)
    if (slots[i] < 0 || slots[i] >= cache->capacity) return 2;
  for (int64_t i = 0; i < p->rows; i++) {
    for (int64_t j = 0; j < m->num_layers; j++)
      if (seen[j * p->rows + i] < 0 || seen[j * p->rows + i] >= cache->capacity) return 2;
    ((int64_t *)p->positions)[i] = slots[i / nodes * each + known + i % nodes];
    ((int64_t *)p->length)[i / nodes] = 0, p->run[i] = p->reach[i] = 0;
  }
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
    int64_t a, b;
#pragma omp single
    p->threads = omp_get_num_threads();
    int wanted = 0;
    for (int64_t i = 0; i < m->num_layers; i++) wanted |= reads(&m->layers[i].k) | reads(&m->layers[i].v);
    Input features = {0};
    if (known) features = put_rows(p, &w->context, wanted, (int)m->bf16, context, H, t, &phase);
    for (int64_t i = 0; i < m->num_layers; i++) {
      const Layer *l = &m->layers[i];
      const Input x = norm(p, reads(&l->q) | reads(&l->k) | reads(&l->v), l->input_norm, t, &phase);
      for (int v = 0; v < 2 && known; v++) {
        const Matrix *one = v ? &l->v : &l->k;
        share_rows(one, KV, t, p->threads, &a, &b);
        linear(one, a, b, input_of(&features, one), w->context.ld, batch * known, v ? l->v_bias : l->k_bias, w->kv + v * KV,
               2 * KV, 0, v ? l->q.data : row_of(&l->v, a));
      }
      project(p, l, t, x, p->ld_hidden);
      barrier(p, &phase);
      attend(p, l, (int)i, w->seen + i * p->rows, put_block, w, t, &phase);
      barrier(p, &phase);
      share_inner(l, m->intermediate, t, p->threads, &a, &b);
      settle(p, l, t, &phase, row_of(&l->gate, a));
      feed_part(p, (int)i, t, &phase, i + 1 < m->num_layers ? l[1].q.data : m->head.data);
      barrier(p, &phase);
    }
    read_out(w, from, normed, logits, t, &phase);
  }
  return 0;
}

/* x + attention(norm(x)), then the final norm, for the nodes of a plan: hidden [batch, nodes, hidden] -> normed. Errors as
 * foretell_forward. */
int64_t foretell_adapter(const Model *m, const Cache *cache, int64_t threads, int64_t batch, int64_t nodes,
                          int64_t tree_nodes, const int64_t *length, const int64_t *slots, const int64_t *positions,
                          const uint8_t *ancestry, int64_t stride_b, int64_t stride_n, int64_t stride_t,
                          const float *hidden, float *normed, char *scratch) {
  Flash flash = {.p = {.model = m, .cache = cache, .batch = batch, .nodes = nodes, .tree_nodes = tree_nodes,
                       .rows = batch * nodes, .threads = (int)threads},
                 .num_read = batch * nodes};
  Flash *w = &flash;
  Pass *p = &w->p;
  place_flash(w, scratch), number_rows(p, 0);
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
    const Layer *l = &m->layers[0];
#pragma omp single
    p->threads = omp_get_num_threads();
    const Input x = norm(p, reads(&l->q) | reads(&l->k) | reads(&l->v), l->input_norm, t, &phase);
    attention_part(p, 0, t, &phase, x, p->ld_hidden, m->head.data);
    read_out(w, 0, normed, 0, t, &phase);
  }
  return 0;
}

#endif
