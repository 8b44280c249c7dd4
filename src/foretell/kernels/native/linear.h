/* Products of activations with a matrix, by what was compiled for its format: product.c. */
#ifndef FORETELL_LINEAR_H
#define FORETELL_LINEAR_H
#include "product.h"
#include "quant.h"

/* Rows [a, b) of w times `rows` activation rows x [rows, ldx], plus bias (or NULL), to out [rows, ldo], or added to it.
 * x has the type that the format asks for (of a quantised one blocks: ldx is not read). `next` is what this thread will
 * read after row b: it is prefetched. */
INLINE void linear(const Matrix *w, int64_t a, int64_t b, const void *x, int64_t ldx, int64_t rows, const float *bias,
                   float *out, int64_t ldo, int add, const void *next) {
  products[w->format]->linear(w, a, b, x, ldx, rows, bias, out, ldo, add, next);
}

/* Row `row` of w as floats. */
static void read_row(const Matrix *w, int64_t row, float *out) {
  if (is_quantised(w)) {
    read_row_quant(w, row, out);
    return;
  }
  for (int64_t j = 0; j < w->columns; j += 16) {
    const Lanes lanes = first_lanes(w->columns - j);
    v_store_some(out + j, lanes, load_as(w->format == BF16, row_of(w, row), j, lanes));
  }
}

/* An embedding's row as the first layer reads it. */
static void embed_row(const Model *m, int64_t token, float *to) {
  read_row(&m->embedding, token, to);
  for (int64_t i = 0; m->embedding_scale != 0.0 && i < m->hidden; i += 16) {
    const Lanes lanes = first_lanes(m->hidden - i);
    v_store_some(to + i, lanes, v_mul(v_load_some(lanes, to + i), v_all((float)m->embedding_scale)));
  }
}

#endif
