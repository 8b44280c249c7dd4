/* Products by themselves, and residual blocks x + silu(W x + b): Medusa's heads and acceptance heads. */
#ifndef FORETOKEN_DENSE_H
#define FORETOKEN_DENSE_H
#include "layer.h"

/* Activations for a matrix: all rows of x [rows, columns], converted by the threads together; two barriers less where
 * every thread needs few. */
static const void *converted(Pass *p, int is_bf16, const float *x, int64_t rows, int64_t columns, char *to, int64_t ld,
                             int t, unsigned *phase) {
  const int64_t bytes = is_bf16 ? 2 : 4;
  int64_t a, b;
  char *own = rows_of(rows, ld * bytes, to, t, p->threads, &a, &b);
  for (int64_t i = a; i < b; i++) convert_row(is_bf16, x + i * columns, columns, own + i * ld * bytes, 0);
  if (rows > FEW_ROWS) barrier(p, phase);
  return own;
}

INLINE int64_t converted_bytes(int is_bf16, int64_t rows, int64_t columns, int64_t threads) {
  return aligned(rows * padded(columns) * (is_bf16 ? 2 : 4) * (rows <= FEW_ROWS ? threads : 1));
}

/* Bytes of scratch of foretoken_product. */
int64_t foretoken_product_scratch(const Matrix *w, int64_t rows, int64_t threads) {
  return converted_bytes(w->format != F32, rows, w->columns, threads);
}

/* out [rows, n] = x [rows, columns] times the n rows of w, plus bias [n] (or NULL). */
int64_t foretoken_product(const Matrix *w, int64_t n, const float *bias, int64_t threads, int64_t rows, const float *x,
                          float *out, char *scratch) {
  Pass pass = {.threads = (int)threads}, *p = &pass;
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
    int64_t a, b;
#pragma omp single
    p->threads = omp_get_num_threads();
    share(n, t, p->threads, &a, &b);
    const int64_t ld = padded(w->columns);
    const void *y = converted(p, w->format != F32, x, rows, w->columns, scratch, ld, t, &phase);
    linear(w, a, b, y, ld, rows, bias, out, n, 0, row_of(w, a));
  }
  return 0;
}

typedef struct {
  int64_t num_heads, num_blocks, hidden, num_outputs; /* num_outputs 0: the blocks' own output, [rows, heads, hidden] */
  const Matrix *blocks;        /* [num_heads * num_blocks], head by head: [hidden, hidden] */
  const float *const *biases;  /* of the blocks */
  const Matrix *outs;          /* [num_heads]: [num_outputs, hidden], or NULL */
  const float *const *out_biases; /* of outs, or NULL */
  const int64_t *ids;          /* [num_outputs] token of each output, or NULL */
} Blocks;

int64_t foretoken_blocks_scratch(const Blocks *s, int64_t rows, int64_t num_heads, int64_t threads) {
  const int64_t all = rows * num_heads;
  return converted_bytes(s->blocks[0].format != F32, all, s->hidden, threads) + 2 * aligned(all * s->hidden * 4) +
         aligned(all * s->num_outputs * 4);
}

/* The first num_heads heads for x [rows, hidden]: out [rows, num_heads, width], -inf at tokens that no output has. */
int64_t foretoken_blocks(const Blocks *s, int64_t threads, int64_t rows, int64_t num_heads, const float *x, float *out,
                         int64_t width, char *scratch) {
  Pass pass = {.threads = (int)threads}, *p = &pass;
  const int64_t H = s->hidden, n = s->num_outputs, all = rows * num_heads, ld = padded(H);
  const Matrix *any = s->num_blocks ? s->blocks : s->outs;
  const int is_bf16 = any->format != F32;
  const int64_t bytes = is_bf16 ? 2 : 4;
  char *places = scratch;
  scratch += converted_bytes(is_bf16, all, H, threads);
  float *now = (float *)scratch, *y = (float *)(scratch + aligned(all * H * 4));
  float *logits = (float *)(scratch + 2 * aligned(all * H * 4));
  for (int64_t k = 0; k < num_heads; k++) memcpy(now + k * rows * H, x, rows * H * sizeof(float));
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
    int64_t h0, h1, v0, v1;
#pragma omp single
    p->threads = omp_get_num_threads();
    share(H, t, p->threads, &h0, &h1), share(n, t, p->threads, &v0, &v1);
    for (int64_t i = t; n && s->ids && i < all; i += p->threads)
      for (int64_t j = 0; j < width; j++) out[i * width + j] = -INFINITY;
    for (int64_t j = 0; j < s->num_blocks; j++) {
      const char *act = converted(p, is_bf16, now, all, H, places, ld, t, &phase);
      barrier(p, &phase); /* every thread has read `now` */
      for (int64_t k = 0; k < num_heads; k++) {
        const int64_t block = k * s->num_blocks + j;
        const Matrix *w = &s->blocks[block], *next = k + 1 < num_heads ? w + s->num_blocks : s->outs ? s->outs : w;
        linear(w, h0, h1, act + k * rows * ld * bytes, ld, rows, s->biases[block], y + k * rows * H, H, 0, next->data);
      }
      for (int64_t i = 0; i < all; i++)
        for (int64_t c = h0; c < h1; c += 16) {
          const Lanes lanes = first_lanes(h1 - c);
          const vec g = v_load_some(lanes, y + i * H + c), e = exp16(v_sub(v_zero(), g));
          v_store_some(now + i * H + c, lanes,
                       v_add(v_load_some(lanes, now + i * H + c), v_div(g, v_add(e, v_all(1.0f)))));
        }
      barrier(p, &phase);
    }
    if (n) {
      const char *act = converted(p, is_bf16, now, all, H, places, ld, t, &phase);
      for (int64_t k = 0; k < num_heads; k++)
        linear(&s->outs[k], v0, v1, act + k * rows * ld * bytes, ld, rows, s->out_biases ? s->out_biases[k] : 0,
               logits + k * rows * n, n, 0, row_of(&s->outs[k + 1 < num_heads ? k + 1 : k], v0));
    }
    barrier(p, &phase);
    for (int64_t k = 0; k < num_heads; k++)
      for (int64_t r = 0; r < rows; r++) {
        float *to = out + (r * num_heads + k) * width;
        const float *from = n ? logits + (k * rows + r) * n : now + (k * rows + r) * H;
        for (int64_t j = n ? v0 : h0; j < (n ? v1 : h1); j++) to[s->ids && n ? s->ids[j] : j] = from[j];
      }
  }
  return 0;
}

#endif
