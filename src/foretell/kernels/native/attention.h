/* Attention of a tree's nodes over the cache. */
#ifndef FORETELL_ATTENTION_H
#define FORETELL_ATTENTION_H
#include "core.h"

/* Dot products of one query with 16 keys: key i at keys[i], or at run + i * dim where keys is NULL. */
INLINE vec scores_dim(const int64_t dim, const int is_bf16, const void *query, const void *run, const void *const *keys) {
  vec acc[16];
#define KEY(T, i) ((const T *)(keys ? keys[i] : (const void *)((const T *)run + (i) * dim)) + d)
  for (int some = 0; some < 16; some += SCORES) { /* as many at once as the registers hold */
    vec *const sum = acc + some;
    UNROLL for (int i = 0; i < SCORES; i++) sum[i] = v_zero();
    if (is_bf16) {
      for (int64_t d = 0; d < dim; d += 32) {
        const bf16x32 q = v_load_bf16((const bf16 *)query + d, dim - d);
        UNROLL for (int i = 0; i < SCORES; i++)
            sum[i] = v_dot_bf16(sum[i], q, v_load_bf16(KEY(bf16, some + i), dim - d));
      }
    } else {
      for (int64_t d = 0; d < dim; d += 16) {
        const vec q = v_load((const float *)query + d);
        UNROLL for (int i = 0; i < SCORES; i++) sum[i] = v_fma(q, v_load(KEY(float, some + i)), sum[i]);
      }
    }
  }
#undef KEY
  return sums16(acc);
}

/* The same with compile-time constants: common head dimensions, and whether keys are contiguous. */
static vec scores16(int is_bf16, int64_t dim, const void *query, const void *run, const void *const *keys) {
  if (keys) return is_bf16 ? scores_dim(dim, 1, query, 0, keys) : scores_dim(dim, 0, query, 0, keys);
  if (dim == 64) return is_bf16 ? scores_dim(64, 1, query, run, 0) : scores_dim(64, 0, query, run, 0);
  if (dim == 128) return is_bf16 ? scores_dim(128, 1, query, run, 0) : scores_dim(128, 0, query, run, 0);
  return is_bf16 ? scores_dim(dim, 1, query, run, 0) : scores_dim(dim, 0, query, run, 0);
}

/* mixed[q] += sum over i in [from, to) of weights[q][i] * values[i], in order, for `many` queries that share the reads;
 * for the columns of V vectors from `first` on. */
INLINE void mix_some(const int V, const int many, const int is_bf16, float *const *weights, const void *values,
                     int64_t from, int64_t to, int64_t dim, int64_t first, float *const *mixed) {
  vec acc[4][8];
  UNROLL for (int q = 0; q < many; q++) UNROLL for (int c = 0; c < V; c++) acc[q][c] = v_load(mixed[q] + first + 16 * c);
  for (int64_t i = from; i < to; i++) {
    vec weight[4];
    UNROLL for (int q = 0; q < many; q++) weight[q] = v_all(weights[q][i]);
    UNROLL for (int c = 0; c < V; c++) {
      const vec value = load_as(is_bf16, values, i * dim + first + 16 * c, 0xffff);
      UNROLL for (int q = 0; q < many; q++) acc[q][c] = v_fma(weight[q], value, acc[q][c]);
    }
  }
  UNROLL for (int q = 0; q < many; q++) UNROLL for (int c = 0; c < V; c++) v_store(mixed[q] + first + 16 * c, acc[q][c]);
}

/* many is 1, 2 or 4. */
static void mix(int many, int is_bf16, float *const *weights, const void *values, int64_t from, int64_t to, int64_t dim,
                float *const *mixed) {
#define MIX(V, N)                                                                                                      \
  (is_bf16 ? mix_some(V, N, 1, weights, values, from, to, dim, first, mixed)                                           \
           : mix_some(V, N, 0, weights, values, from, to, dim, first, mixed))
#define MIX_CASE(V)                                                                                                    \
  case V:                                                                                                              \
    if (many == 1 && V <= MIXED) MIX(V, 1);                                                                            \
    else if (many == 2 && 2 * V <= MIXED) MIX(V, 2);                                                                   \
    else if (4 * V <= MIXED) MIX(V, 4);                                                                                \
    break;
  if (from >= to) return;
  for (int64_t first = 0, left = dim / 16, V; left; left -= V, first += 16 * V) {
    V = MIN(MIN(left, 8), MIXED / many); /* MIXED accumulators fit into the registers */
    switch (V) { MIX_CASE(1) MIX_CASE(2) MIX_CASE(3) MIX_CASE(4) MIX_CASE(5) MIX_CASE(6) MIX_CASE(7) MIX_CASE(8) }
  }
}

static void mix_one(int is_bf16, float weight, const void *value, int64_t dim, float *mixed) {
  float *const weights[1] = {&weight}, *const to[1] = {mixed};
  mix(1, is_bf16, weights, value, 0, 1, dim, to);
}

/* Gemma 2: cap * tanh(scale * score / cap). */
INLINE vec capped(vec score, float scale, float cap) {
  return v_mul(tanh16(v_mul(score, v_all(scale / cap))), v_all(cap));
}

/* Attention of up to QUERIES queries of one sequence over one key-value head. */
static void attend(Pass *p, int64_t b, int64_t kv_head, const Layer *layer, int index, Query *queries, int count) {
  const Model *m = p->model;
  const int is_bf16 = (int)m->bf16;
  const int64_t dim = m->dim, capacity = p->cache->capacity, bytes = is_bf16 ? 2 : 4;
  const char *keys = (const char *)p->cache->keys[index] + (b * m->kv_heads + kv_head) * capacity * dim * bytes;
  const char *values = (const char *)p->cache->values[index] + (b * m->kv_heads + kv_head) * capacity * dim * bytes;
  char vectors[QUERIES][MAX_DIM * 4];
  const float scale = m->score_scale != 0.0 ? (float)m->score_scale : 1.0f / sqrtf((float)dim), cap = (float)m->score_cap;
  int64_t low = INT64_MAX, high = 0;
  const void *where[16];
  for (int i = 0; i < count; i++) {
    Query *q = &queries[i];
    float turned[MAX_DIM];
    const float *query = p->qkv + q->row * p->qkv_width + q->head * dim;
    rotate(p, layer->query_rope, query, layer->q_norm, p->positions[q->row], turned);
    for (int64_t d = 0; d < dim; d += 16) store_as(is_bf16, vectors[i], d, 0xffff, v_load(turned + d));
    low = MIN(low, q->low), high = MAX(high, q->high);
  }
  /* Scores of the common run, block by block; what a block writes outside a query's own run is overwritten or unread. */
  for (int64_t j0 = low; j0 < high; j0 += KEYS) {
    for (int i = 0; i < count; i++) {
      Query *q = &queries[i];
      for (int64_t j = MAX(j0, low + (q->low - low) / 16 * 16); j < MIN(j0 + KEYS, q->high); j += 16) {
        const int tail = j + 16 > capacity;
        for (int64_t c = 0; tail && c < 16; c++) where[c] = keys + MIN(j + c, capacity - 1) * dim * bytes;
        v_store(q->scores + j, scores16(is_bf16, dim, vectors[i], keys + j * dim * bytes, tail ? where : 0));
      }
    }
  }
  for (int i = 0; i < count; i++) {
    Query *q = &queries[i];
    /* Ancestors behind the run, by depth: their scores follow those of the run. */
    const uint8_t *sees = p->ancestry + b * p->stride_b + q->row % p->nodes * p->stride_n;
    int64_t position = p->length[b] + p->run[q->row], pending = 0, at[16];
    for (int64_t j = p->run[q->row]; j < p->reach[q->row]; j++) {
      if (!sees[j * p->stride_t]) continue;
      if (position++ < q->low) continue;
      at[pending++] = p->length[b] + j;
      if (pending < 16 && position < q->total) continue;
      for (int64_t c = 0; c < 16; c++) where[c] = keys + at[MIN(c, pending - 1)] * dim * bytes;
      const vec found = scores16(is_bf16, dim, vectors[i], 0, where);
      v_store_some(q->scores + position - pending, first_lanes(pending), found);
      pending = 0;
    }
    for (int64_t j = q->low; cap != 0.0f && j < q->total; j += 16)
      v_store_some(q->scores + j, first_lanes(q->total - j), capped(v_load(q->scores + j), scale, cap));
    vec top = v_all(-INFINITY), sum = v_zero();
    for (int64_t j = q->low; j < q->total; j += 16)
      top = v_max_some(first_lanes(q->total - j), top, v_load(q->scores + j));
    const vec largest = v_all(v_largest(top));
    for (int64_t j = q->low; j < q->total; j += 16) {
      const Lanes lanes = first_lanes(q->total - j);
      const vec x = v_mul(v_sub(v_load(q->scores + j), largest), v_all(cap != 0.0f ? 1.0f : scale));
      const vec e = v_keep(lanes, exp16(x));
      sum = v_add(sum, e);
      v_store_some(q->scores + j, lanes, e);
    }
    q->sum = sum1(sum);
    memset(q->mixed, 0, dim * sizeof(float));
  }
  float *weights[QUERIES], *mixed[QUERIES];
  for (int i = 0; i < count; i++) weights[i] = queries[i].scores, mixed[i] = queries[i].mixed;
  for (int64_t j0 = low; j0 < high; j0 += KEYS) {
    for (int i = 0, many; i < count; i += many) {
      many = count - i >= 4 ? 4 : count - i >= 2 ? 2 : 1;
      int64_t from = j0, to = j0 + KEYS; /* the part of this block that all of them see */
      for (int q = i; q < i + many; q++) from = MAX(from, queries[q].low), to = MIN(to, queries[q].high);
      to = MAX(from, to);
      for (int q = i; q < i + many; q++)
        mix(1, is_bf16, weights + q, values, MAX(j0, queries[q].low), MIN(from, queries[q].high), dim, mixed + q);
      mix(many, is_bf16, weights + i, values, from, to, dim, mixed + i);
      for (int q = i; q < i + many; q++)
        mix(1, is_bf16, weights + q, values, MAX(to, queries[q].low), MIN(j0 + KEYS, queries[q].high), dim, mixed + q);
    }
  }
  for (int i = 0; i < count; i++) {
    Query *q = &queries[i];
    const uint8_t *sees = p->ancestry + b * p->stride_b + q->row % p->nodes * p->stride_n;
    int64_t position = p->length[b] + p->run[q->row];
    for (int64_t j = p->run[q->row]; j < p->reach[q->row]; j++)
      if (sees[j * p->stride_t] && position++ >= q->low)
        mix_one(is_bf16, q->scores[position - 1], values + (p->length[b] + j) * dim * bytes, dim, q->mixed);
    const vec inverse = v_all(1.0f / q->sum);
    const int to_bf16 = is_bf16 && !is_quantised(&layer->o); /* blocks are made of floats */
    void *to = p->mixed + (q->row * p->ld_mixed + q->head * dim) * (to_bf16 ? 2 : 4);
    const float *gates = p->qkv + q->row * p->qkv_width + (m->heads + 2 * m->kv_heads + q->head) * dim;
    for (int64_t d = 0; d < dim; d += 16) {
      vec x = v_mul(v_load(q->mixed + d), inverse);
      if (m->gated) x = v_div(x, v_add(exp16(v_sub(v_zero(), v_load(gates + d))), v_all(1.0f)));
      store_as(to_bf16, to, d, 0xffff, x);
    }
  }
}

/* One layer's attention: units of (sequence, key-value head), each split further by query heads where units are few. A
 * unit first writes its keys and values; split units all write the same bytes, which spares a barrier. */
static void attention(Pass *p, const Layer *layer, int index, int t) {
  const Model *m = p->model;
  const int64_t dim = m->dim, bytes = m->bf16 ? 2 : 4, group = m->heads / m->kv_heads, pairs = p->batch * m->kv_heads;
  int64_t splits = 1;
  for (int64_t s = 2; s <= group && splits * pairs % p->threads; s++)
    if (group % s == 0 && pairs * splits < 4 * p->threads) splits = s;
  Query queries[QUERIES];
  for (int64_t unit = t; unit < pairs * splits; unit += p->threads) {
    const int64_t b = unit / splits / m->kv_heads, kv_head = unit / splits % m->kv_heads;
    const int64_t heads = group / splits, first_head = kv_head * group + unit % splits * heads;
    const int64_t base = (b * m->kv_heads + kv_head) * p->cache->capacity;
    for (int64_t i = b * p->nodes; i < (b + 1) * p->nodes; i++) {
      const float *k = p->qkv + i * p->qkv_width + (m->heads + kv_head) * dim, *v = k + m->kv_heads * dim;
      const int64_t at = (base + p->slots[i]) * dim * bytes;
      float turned[MAX_DIM];
      rotate(p, layer->rope, k, layer->k_norm, p->positions[i], turned);
      for (int64_t d = 0; d < dim; d += 16) {
        store_as(m->bf16, (char *)p->cache->keys[index] + at, d, 0xffff, v_load(turned + d));
        store_as(m->bf16, (char *)p->cache->values[index] + at, d, 0xffff, v_load(v + d));
      }
    }
    int count = 0;
    for (int64_t i = 0; i < p->nodes * heads; i++) {
      Query *q = &queries[count];
      q->row = b * p->nodes + i / heads, q->head = first_head + i % heads;
      q->total = p->positions[q->row] + 1;
      q->low = layer->window ? MAX(0, q->total - layer->window) : 0;
      q->high = MAX(q->low, p->length[b] + p->run[q->row]);
      q->scores = p->scores + (t * QUERIES + count) * p->ld_scores;
      if (++count < QUERIES && i + 1 < p->nodes * heads) continue;
      attend(p, b, kv_head, layer, index, queries, count);
      count = 0;
    }
  }
}

#endif
