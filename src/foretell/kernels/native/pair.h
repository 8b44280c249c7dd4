/* EAGLE's heads: a few decoder layers over pairs (feature of a position, token after it), alone or a whole chain of them.
 *
 * The weights of one guess are read once, as a pass of the model reads its own, so a guess costs what its weights cost.
 * A chain draws its guesses between the passes, in the same parallel region: nothing returns to Python in between.
 */
#ifndef FORETELL_PAIR_H
#define FORETELL_PAIR_H
#include "draw.h"
#include "linear.h"
#include "place.h"
#include "rows.h"

typedef struct {
  Model model; /* layers; embedding of the tokens; head [num_outputs, hidden]; final_norm NULL: the output is read as it is */
  Matrix fc;   /* EAGLE-1, MTP: [hidden, 2 hidden] of embedding and feature; data NULL: EAGLE-3's way in */
  const float *fc_bias;                   /* or NULL */
  const float *token_norm, *feature_norm; /* EAGLE-3, MTP: of the embedding and of the feature */
  int64_t normed_residual, normed_output; /* EAGLE-3: the residual, what the next pair feeds on, is the normed one */
  int64_t num_outputs;
  const int64_t *ids; /* [num_outputs] token of each output, or NULL */
} Pair;

typedef struct {
  Pass p;
  const Pair *head;
  const float **from;                 /* [rows] the feature of each pair */
  int64_t *chosen, num_chosen;        /* rows whose output is wanted ... */
  int64_t *chosen_at;                 /* ... and [batch + 1] where those of each row of the batch begin among them */
  float *fed, *logits;                /* [num_chosen, hidden] what children feed on; [num_chosen, num_outputs] or NULL */
  Rows both, entered, read;           /* embedding and feature; what fc made of them; what the output head reads */
  float *row, *spare;                 /* [threads, 2 hidden]; [threads, num_outputs] */
} PairPass;

/* Lay the scratch out; returns its bytes. */
static int64_t place_pair(PairPass *w, int64_t num_chosen, char *base) {
  Pass *p = &w->p;
  const int64_t H = p->model->hidden, rows = p->rows, T = p->threads;
  int64_t at = place(p, base);
  w->num_chosen = num_chosen;
  at += place_rows(&w->both, rows, 2 * H, p->threads, base + at);
  at += place_rows(&w->entered, rows, H, p->threads, base + at);
  at += place_rows(&w->read, num_chosen, H, p->threads, base + at);
#define PLACE_PAIR(FIELD, SIZE) w->FIELD = (void *)(base + at), at += aligned(SIZE)
  PLACE_PAIR(row, T * 2 * H * 4);
  PLACE_PAIR(spare, T * w->head->num_outputs * 4);
  PLACE_PAIR(from, rows * 8);
  PLACE_PAIR(chosen, num_chosen * 8);
  PLACE_PAIR(chosen_at, (p->batch + 1) * 8);
  PLACE_PAIR(p.residual, rows * H * 4);
  PLACE_PAIR(p.length, p->batch * 8);
  PLACE_PAIR(logits, num_chosen * w->head->num_outputs * 4);
  return at;
}

/* What layer 0 projects, and the residual before it. */
static Input enter_pairs(PairPass *w, int t, unsigned *phase, int64_t *ldx) {
  Pass *p = &w->p;
  const Model *m = p->model;
  const Pair *head = w->head;
  const Layer *l = &m->layers[0];
  const int64_t H = m->hidden;
  const int is_bf16 = (int)m->bf16, first = attention_reads(m, l);
  int64_t a, b, own_a, own_b;
  float *row = w->row + t * 2 * H;
  const Input both = rows_for(&w->both, t, p->threads, &a, &b);
  share(p->rows, t, p->threads, &own_a, &own_b);
  for (int64_t i = a; i < b; i++) {
    float *residual = p->residual + i * H;
    const int writes = i >= own_a && i < own_b && !head->fc.data;
    embed_row(m, p->tokens[i], row);
    if (!head->token_norm) {
      memcpy(row + H, w->from[i], H * sizeof(float));
    } else {
      norm_row(0, row, head->token_norm, H, (float)m->eps, row);
      norm_row(0, w->from[i], head->feature_norm, H, (float)m->eps, row + H);
    }
    if (writes) memcpy(residual, head->normed_residual ? row + H : w->from[i], H * sizeof(float));
    put_row(&w->both, &both, head->fc.data ? reads(&head->fc) : first, is_bf16, i, row);
  }
  if (p->rows > FEW_ROWS) barrier(p, phase);
  *ldx = w->both.ld;
  if (!head->fc.data) return both;
  share_rows(&head->fc, H, t, p->threads, &a, &b);
  linear(&head->fc, a, b, input_of(&both, &head->fc), w->both.ld, p->rows, head->fc_bias, p->residual, H, 0, l->q.data);
  barrier(p, phase);
  if (l->input_norm) {
    *ldx = p->ld_hidden;
    return norm(p, first, l->input_norm, t, phase);
  }
  *ldx = w->entered.ld;
  return put_rows(p, &w->entered, first, is_bf16, p->residual, H, t, phase);
}

/* Outputs of the chosen rows, and their logits; `next` is what this thread reads after them. */
static void leave_pairs(PairPass *w, int t, unsigned *phase, const void *next) {
  Pass *p = &w->p;
  const Model *m = p->model;
  const int64_t H = m->hidden, n = w->num_chosen;
  const int normed = !w->fed && w->head->normed_output; /* what comes is an output, and that is the normed one */
  int64_t a, b, own_a, own_b;
  float *row = w->row + t * 2 * H;
  const Input read = rows_for(&w->read, t, p->threads, &a, &b);
  share(n, t, p->threads, &own_a, &own_b);
  for (int64_t i = a; i < b; i++) {
    const float *residual = p->residual + w->chosen[i] * H, *x = residual;
    if (m->final_norm && !normed) norm_row(0, residual, m->final_norm, H, (float)m->eps, row), x = row;
    put_row(&w->read, &read, reads(&m->head), (int)m->bf16, i, x);
    if (w->fed && i >= own_a && i < own_b)
      memcpy(w->fed + i * H, w->head->normed_output ? x : residual, H * sizeof(float));
  }
  if (n > FEW_ROWS) barrier(p, phase);
  share_rows(&m->head, w->head->num_outputs, t, p->threads, &a, &b);
  if (w->logits)
    linear(&m->head, a, b, input_of(&read, &m->head), w->read.ld, n, 0, w->logits, w->head->num_outputs, 0, next);
  if (w->logits) finish_logits(m, w->logits, w->head->num_outputs, n, a, b);
}

static void run_pairs(PairPass *w, int t, unsigned *phase) {
  Pass *p = &w->p;
  const Model *m = p->model;
  int64_t ldx, v0, v1, q0, q1, i0, i1;
  share_rows(&m->head, w->head->num_outputs, t, p->threads, &v0, &v1);
  share_rows(&m->layers[0].q, (m->heads + 2 * m->kv_heads) * m->dim, t, p->threads, &q0, &q1);
  const int64_t start = MIN(q0, m->heads * m->dim); /* near enough where a thread starts inside k or v */
  Input x = enter_pairs(w, t, phase, &ldx);
  for (int64_t i = 0; i < m->num_layers; i++) {
    const Layer *l = &m->layers[i];
    if (i) x = norm(p, attention_reads(m, l), l->input_norm, t, phase), ldx = p->ld_hidden;
    if (!l->experts) share_inner(l, m->intermediate, t, p->threads, &i0, &i1);
    attention_part(p, (int)i, t, phase, x, ldx, l->experts ? l->experts->router.data : row_of(&l->gate, i0));
    feed_part(p, (int)i, t, phase, i + 1 < m->num_layers ? row_of(&l[1].q, start) : row_of(&m->head, v0));
    barrier(p, phase);
  }
  leave_pairs(w, t, phase, w->head->fc.data ? w->head->fc.data : row_of(&m->layers[0].q, start));
}

/* Rows of logits [rows, vocab] before any output is put into them. */
static void clear_logits(const Pair *head, int64_t rows, float *logits, int64_t vocab, int t, int threads) {
  for (int64_t i = t; logits && head->ids && i < rows; i += threads)
    for (int64_t j = 0; j < vocab; j++) logits[i * vocab + j] = -INFINITY;
}

/* This thread's outputs to their tokens' places. */
static void spread_logits(const PairPass *w, int64_t rows, float *logits, int64_t vocab, int t) {
  const int64_t n = w->head->num_outputs, *ids = w->head->ids;
  int64_t v0, v1;
  share_rows(&w->head->model.head, n, t, w->p.threads, &v0, &v1);
  for (int64_t i = 0; logits && i < rows; i++)
    for (int64_t j = v0; j < v1; j++) logits[i * vocab + (ids ? ids[j] : j)] = w->logits[i * n + j];
}

/* Bytes of scratch for passes over `rows` pairs, of which num_chosen outputs are wanted, and of chains after them. */
int64_t foretell_pair_scratch(const Pair *head, const Cache *cache, int64_t batch, int64_t rows, int64_t num_chosen,
                               int64_t threads) {
  PairPass first = {.p = {.model = &head->model, .cache = cache, .batch = batch, .rows = rows, .threads = (int)threads},
                    .head = head};
  PairPass later = first;
  later.p.rows = MIN(batch, num_chosen);
  const int64_t one = place_pair(&first, num_chosen, 0);
  return one + place_pair(&later, later.p.rows, 0);
}

/* The nodes of a plan. features [batch, nodes, hidden], or NULL: a node feeds on what `outputs` [batch, num_columns,
 * hidden] holds in its parent's column, and its own output goes there too. hidden [batch, nodes, hidden]: the outputs;
 * logits [batch, nodes, vocab] of them, or NULL. Errors as foretell_forward. */
int64_t foretell_pair(const Pair *head, const Cache *cache, int64_t threads, int64_t batch, int64_t nodes,
                       int64_t tree_nodes, const int64_t *tokens, const int64_t *length, const int64_t *slots,
                       const int64_t *positions, const uint8_t *ancestry, int64_t stride_b, int64_t stride_n,
                       int64_t stride_t, const float *features, float *outputs, int64_t num_columns, float *hidden,
                       float *logits, int64_t vocab, char *scratch) {
  const Model *m = &head->model;
  const int64_t H = m->hidden;
  PairPass pass = {.p = {.model = m, .cache = cache, .batch = batch, .nodes = nodes, .tree_nodes = tree_nodes,
                         .rows = batch * nodes, .threads = (int)threads},
                   .head = head};
  PairPass *w = &pass;
  Pass *p = &w->p;
  place_pair(w, p->rows, scratch), number_rows(p, 0);
  p->tokens = tokens, p->length = length, p->slots = slots, p->positions = positions;
  p->ancestry = ancestry, p->stride_b = stride_b, p->stride_n = stride_n, p->stride_t = stride_t;
  w->fed = hidden;
  if (!logits) w->logits = 0;
  for (int64_t i = 0; i < p->rows; i++) {
    const int64_t b = i / nodes, own = slots[i] - length[b];
    if (tokens[i] < 0 || tokens[i] >= m->vocab) return 1;
    if (length[b] < 0 || own < 0 || slots[i] >= cache->capacity) return 2;
    if (positions[i] < length[b] || positions[i] > slots[i]) return 3;
    look(p, i);
    w->chosen[i] = i;
    if (features) {
      w->from[i] = features + i * H;
      continue;
    }
    /* A parent has a smaller column than its child in every shape; a node off the path has only itself. */
    if (own >= num_columns) return 2;
    const uint8_t *sees = ancestry + b * stride_b + i % nodes * stride_n;
    int64_t parent = MIN(own, tree_nodes) - 1;
    while (parent > 0 && !sees[parent * stride_t]) parent--;
    w->from[i] = outputs + (b * num_columns + MAX(parent, 0)) * H;
  }
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
#pragma omp single
    p->threads = omp_get_num_threads();
    clear_logits(head, p->rows, logits, vocab, t, p->threads);
    run_pairs(w, t, &phase);
    spread_logits(w, p->rows, logits, vocab, t);
  }
  for (int64_t i = 0; !features && i < p->rows; i++)
    memcpy(outputs + (i / nodes * num_columns + slots[i] - length[i / nodes]) * H, hidden + i * H, H * sizeof(float));
  return 0;
}

/* logits [rows, vocab] of outputs hidden [rows, hidden]. */
int64_t foretell_pair_logits(const Pair *head, int64_t threads, int64_t rows, const float *hidden, float *logits,
                              int64_t vocab, char *scratch) {
  const int64_t H = head->model.hidden;
  PairPass pass = {.p = {.model = &head->model, .batch = rows, .nodes = 1, .rows = rows, .threads = (int)threads},
                   .head = head};
  PairPass *w = &pass;
  Pass *p = &w->p;
  place_pair(w, rows, scratch);
  for (int64_t i = 0; i < rows; i++) w->chosen[i] = i;
  memcpy(p->residual, hidden, rows * H * sizeof(float));
  w->fed = 0;
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
#pragma omp single
    p->threads = omp_get_num_threads();
    clear_logits(head, rows, logits, vocab, t, p->threads);
    leave_pairs(w, t, &phase, head->model.layers[0].q.data);
    barrier(p, &phase);
    spread_logits(w, rows, logits, vocab, t);
  }
  return 0;
}

/* Thread t's rows of the next guess: a pair after the last of each row that guesses, in the slot after it. */
static void next_pairs(PairPass *w, const float *fed, const int64_t *base, int64_t step, const int64_t *guesses,
                       int64_t depth, int t) {
  Pass *p = &w->p;
  int64_t from, to;
  share(p->rows, t, p->threads, &from, &to);
  for (int64_t i = from; i < to; i++) {
    const int64_t b = p->owner[i];
    const int64_t slot = MIN(base[b] + step, p->cache->capacity - 1); /* a row that has ended: behind its own pairs */
    ((int64_t *)p->length)[b] = ((int64_t *)p->slots)[i] = ((int64_t *)p->positions)[i] = slot;
    ((int64_t *)p->tokens)[i] = guesses[b * depth + step - 1];
    p->run[i] = p->reach[i] = 1, w->chosen[i] = i;
    w->from[i] = fed + i * p->model->hidden;
  }
}

/* Rows that guess, and with `count` the pairs that they read first: at least one each. */
static int64_t num_asked(int64_t batch, const int64_t *limits, const int64_t *count) {
  int64_t asked = 0;
  for (int64_t b = 0; b < batch; b++) asked += limits[b] > 0 ? count ? MAX(count[b], 1) : 1 : 0;
  return asked;
}

/* Rows of the first pass of a proposal: the pairs that rows which guess have not read yet, tokens [batch, nodes] and features
 * [batch, nodes, hidden], of which row b has count[b], in slots start[b] and on; the last one's output is wanted. base[b]: its
 * slot. Returns 0 or an error as foretell_forward does. */
static int64_t first_pairs(PairPass *w, const int64_t *tokens, const float *features, const int64_t *start,
                           const int64_t *count, const int64_t *limits, int64_t *base) {
  Pass *p = &w->p;
  const int64_t width = p->nodes, capacity = p->cache->capacity;
  int64_t problem = 0, i = 0, n = 0;
  for (int64_t b = 0; b < p->batch; b++) {
    p->start[b] = i, w->chosen_at[b] = n, base[b] = start[b] + MAX(count[b], 1) - 1;
    ((int64_t *)p->length)[b] = start[b];
    if (limits[b] <= 0) continue;
    if (start[b] < 0 || base[b] >= capacity || base[b] + limits[b] > capacity) problem = 2;
    for (int64_t j = 0; j < MAX(count[b], 1); i++, j++) {
      const int64_t at = b * width + j, slot = MIN(start[b] + j, capacity - 1);
      if (tokens[at] < 0 || tokens[at] >= p->model->vocab) problem = 1;
      p->owner[i] = b, p->node[i] = j;
      ((int64_t *)p->tokens)[i] = tokens[at], w->from[i] = features + at * p->model->hidden;
      ((int64_t *)p->slots)[i] = ((int64_t *)p->positions)[i] = slot;
      p->run[i] = p->reach[i] = slot - start[b] + 1;
    }
    w->chosen[n++] = i - 1;
  }
  p->start[p->batch] = i, w->chosen_at[p->batch] = n;
  return problem;
}

/* A chain of up to `depth` guesses a row, limits[b] of row b; rows that have 0 are left out. First the pairs not yet read:
 * tokens [batch, width] and features [batch, width, hidden], of which row b has count[b], in slots start[b] and on; the last
 * one's output makes the first guess. guesses [batch, depth] is filled (from limits[b] on with 0), hidden [batch, hidden] is room
 * for outputs. scratch: of ``num_asked`` rows, with and without ``count``.
 * The caller has checked that start[b] + count[b] < capacity, and start[b] + count[b] + limits[b] <= capacity. */
int64_t foretell_pair_chain(const Pair *head, const Cache *cache, int64_t threads, int64_t batch, int64_t width,
                             const int64_t *tokens, const float *features, const int64_t *start, const int64_t *count,
                             const int64_t *limits, int64_t depth, const Draw *draw, int64_t *guesses, float *hidden,
                             char *scratch) {
  const Model *m = &head->model;
  const int64_t n = head->num_outputs;
  int64_t *base = malloc(batch * sizeof(int64_t));
  if (!base) return 4;
  const int64_t asked = num_asked(batch, limits, 0);
  PairPass passes[2];
  for (int i = 0; i < 2; i++) {
    passes[i] = (PairPass){.p = {.model = m, .cache = cache, .batch = batch, .nodes = i ? 1 : width, .tree_nodes = 1,
                                 .rows = num_asked(batch, limits, i ? 0 : count), .threads = (int)threads},
                           .head = head};
    scratch += place_pair(&passes[i], asked, scratch);
    passes[i].fed = hidden;
  }
  PairPass *w = &passes[0];
  Pass *later = &passes[1].p;
  memset(guesses, 0, batch * depth * sizeof(int64_t));
  const int64_t problem = first_pairs(w, tokens, features, start, count, limits, base);
  memcpy(later->start, w->chosen_at, (batch + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < asked; i++) later->owner[i] = w->p.owner[w->chosen[i]], later->node[i] = 0;
#pragma omp parallel num_threads(w->p.threads) if (!problem)
  if (!problem) {
    const int t = omp_get_thread_num();
    unsigned phases[2] = {0, 0};
    int64_t from, to;
#pragma omp single
    passes[0].p.threads = passes[1].p.threads = omp_get_num_threads();
    share(asked, t, passes[0].p.threads, &from, &to);
    for (int64_t step = 0; step < depth; step++) {
      PairPass *one = &passes[step > 0];
      unsigned *phase = &phases[step > 0];
      run_pairs(one, t, phase);
      barrier(&one->p, phase);
      for (int64_t i = from; i < to; i++) {
        const int64_t b = later->owner[i];
        if (step < limits[b])
          guesses[b * depth + step] = draw_token(draw, b, step, one->logits + i * n, n, head->ids, one->spare + t * n);
      }
      if (step + 1 < depth) next_pairs(&passes[1], hidden, base, step + 1, guesses, depth, t);
      barrier(&one->p, phase);
    }
  }
  free(base);
  return problem;
}

#endif
