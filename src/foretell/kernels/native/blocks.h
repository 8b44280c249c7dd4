/* Residual blocks x + silu(W x + b): Medusa's heads and acceptance heads. */
#ifndef FORETELL_BLOCKS_H
#define FORETELL_BLOCKS_H
#include "linear.h"
#include "rows.h"

typedef struct {
  int64_t num_heads, num_blocks, hidden, num_outputs; /* num_outputs 0: the blocks' own output, [rows, heads, hidden] */
  const Matrix *blocks;        /* [num_heads * num_blocks], head by head: [hidden, hidden] */
  const float *const *biases;  /* of the blocks */
  const Matrix *outs;          /* [num_heads]: [num_outputs, hidden], or NULL */
  const float *const *out_biases; /* of outs, or NULL */
  const int64_t *ids;          /* [num_outputs] token of each output, or NULL */
} Blocks;

/* Scratch: inputs of each head, what the blocks have made so far, what a block adds, and outputs. */
static int64_t place_blocks(const Blocks *s, int64_t rows, int64_t num_heads, int threads, Rows *inputs, float **now,
                            float **added, float **outputs, char *base) {
  const int64_t all = rows * num_heads;
  int64_t at = 0;
  for (int64_t k = 0; k < num_heads; k++) at += place_rows(&inputs[k], rows, s->hidden, threads, base + at);
  *now = (float *)(base + at), at += aligned(all * s->hidden * 4);
  *added = (float *)(base + at), at += aligned(all * s->hidden * 4);
  *outputs = (float *)(base + at), at += aligned(all * s->num_outputs * 4);
  return at;
}

enum { MAX_HEADS = 64 };

int64_t foretell_blocks_scratch(const Blocks *s, int64_t rows, int64_t num_heads, int64_t threads) {
  Rows inputs[MAX_HEADS];
  float *now, *added, *outputs;
  return place_blocks(s, rows, num_heads, (int)threads, inputs, &now, &added, &outputs, 0);
}

/* The first num_heads heads (at most MAX_HEADS) for x [rows, hidden]: out [rows, num_heads, width], -inf at tokens that no
 * output has. */
int64_t foretell_blocks(const Blocks *s, int64_t threads, int64_t rows, int64_t num_heads, const float *x, float *out,
                         int64_t width, char *scratch) {
  Pass pass = {.threads = (int)threads}, *p = &pass;
  const int64_t H = s->hidden, n = s->num_outputs, all = rows * num_heads;
  Rows inputs[MAX_HEADS];
  float *now, *added, *outputs;
  place_blocks(s, rows, num_heads, p->threads, inputs, &now, &added, &outputs, scratch);
  for (int64_t k = 0; k < num_heads; k++) memcpy(now + k * rows * H, x, rows * H * sizeof(float));
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
#pragma omp single
    p->threads = omp_get_num_threads();
    for (int64_t i = t; n && s->ids && i < all; i += p->threads)
      for (int64_t j = 0; j < width; j++) out[i * width + j] = -INFINITY;
    for (int64_t j = 0; j <= s->num_blocks; j++)
      for (int64_t k = 0; k < num_heads; k++) {
        const int ends = j == s->num_blocks;
        if (ends && !n) break;
        const Matrix *w = ends ? &s->outs[k] : &s->blocks[k * s->num_blocks + j];
        const float *bias = ends ? (s->out_biases ? s->out_biases[k] : 0) : s->biases[k * s->num_blocks + j];
        const int64_t size = ends ? n : H;
        float *to = (ends ? outputs : added) + k * rows * size;
        int64_t a, b;
        share_rows(w, size, t, p->threads, &a, &b);
        const Input y = put_rows(p, &inputs[k], reads(w), w->format == BF16, now + k * rows * H, H, t, &phase);
        linear(w, a, b, input_of(&y, w), inputs[k].ld, rows, bias, to, size, 0, row_of(w, a));
        barrier(p, &phase);
        for (int64_t i = t; i < rows; i += p->threads) {
          float *x1 = now + (k * rows + i) * H, *y1 = to + i * size;
          float *row = out + (i * num_heads + k) * width;
          for (int64_t c = 0; !ends && c < H; c += 16) {
            const Lanes lanes = first_lanes(H - c);
            const vec g = v_load_some(lanes, y1 + c), e = exp16(v_sub(v_zero(), g));
            v_store_some(x1 + c, lanes, v_add(v_load_some(lanes, x1 + c), v_div(g, v_add(e, v_all(1.0f)))));
          }
          for (int64_t c = 0; ends && c < n; c++) row[s->ids ? s->ids[c] : c] = y1[c];
          if (!n && j + 1 == s->num_blocks) memcpy(row, x1, H * sizeof(float));
        }
        /* Only the next block of this head reads what was added, behind other heads' barriers, but for a single head. */
        if (num_heads == 1) barrier(p, &phase);
      }
  }
  return 0;
}

#endif
