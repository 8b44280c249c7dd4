/* What a library of products gives to those of the layers: see product.c. */
#ifndef FORETELL_PRODUCT_H
#define FORETELL_PRODUCT_H
#include "common.h"

typedef void linear_function(const Matrix *w, int64_t a, int64_t b, const void *x, int64_t ldx, int64_t rows,
                             const float *bias, float *out, int64_t ldo, int add, const void *next);
typedef struct {
  linear_function *linear;      /* see linear.h */
  int64_t *l2_rows, *amx_rows;  /* its settings: see ahead.h */
} Product;

#endif
