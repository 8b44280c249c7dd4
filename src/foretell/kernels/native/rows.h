/* Rows of floats as matrices read them: in the model's type, as blocks of int8, or both. */
#ifndef FORETELL_ROWS_H
#define FORETELL_ROWS_H
#include "pass.h"

/* Where rows are few every thread has its own copy, which spares a barrier. */
INLINE int64_t copies_of(int64_t rows, int threads) { return rows <= FEW_ROWS ? threads : 1; }

/* Lay them out behind base; returns the bytes. */
static int64_t place_rows(Rows *r, int64_t rows, int64_t columns, int threads, char *base) {
  *r = (Rows){rows, columns, padded(columns), base, base + copies_of(rows, threads) * aligned(rows * padded(columns) * 4)};
  return copies_of(rows, threads) * (aligned(rows * r->ld * 4) + aligned(blocks_bytes(columns, rows)));
}

/* Thread t's copy, and which rows [a, b) it fills. */
INLINE Input rows_for(const Rows *r, int t, int threads, int64_t *a, int64_t *b) {
  *a = 0, *b = r->rows;
  if (r->rows > FEW_ROWS) share(r->rows, t, threads, a, b), t = 0;
  return (Input){r->plain + t * aligned(r->rows * r->ld * 4),
                 (Block *)(r->blocks + t * aligned(blocks_bytes(r->columns, r->rows)))};
}

/* Row i becomes x [columns]. */
static void put_row(const Rows *r, const Input *to, int wanted, int is_bf16, int64_t i, const float *x) {
  const int64_t stride = block_stride(r->rows);
  for (int64_t j = 0; wanted & PLAIN && j < r->columns; j += 16) {
    const Lanes lanes = first_lanes(r->columns - j);
    store_as(is_bf16, (void *)to->plain, i * r->ld + j, lanes, v_load_some(lanes, x + j));
  }
  if (!(wanted & BLOCKS)) return;
  quantise_row(x, r->columns, (Block *)to->blocks + i, stride);
  quantise_padding(r->columns, (Block *)to->blocks + i, stride);
}

/* All rows of x [rows, ldx], by all threads. */
static Input put_rows(Pass *p, const Rows *r, int wanted, int is_bf16, const float *x, int64_t ldx, int t, unsigned *phase) {
  int64_t a, b;
  const Input to = rows_for(r, t, p->threads, &a, &b);
  for (int64_t i = a; i < b; i++) put_row(r, &to, wanted, is_bf16, i, x + i * ldx);
  if (r->rows > FEW_ROWS) barrier(p, phase);
  return to;
}

#endif
