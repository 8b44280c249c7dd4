/* What native.c has compiled and heads.c calls: the parts of a layer, and the products. */
#ifndef FORETELL_CORE_H
#define FORETELL_CORE_H
#include "pass.h"
#include "product.h"

typedef struct {
  const Product *const *products; /* by format */
  void (*attention_part)(Pass *p, int index, int t, unsigned *phase, Input x, int64_t ldx, const void *next);
  void (*feed_part)(Pass *p, int index, int t, unsigned *phase, const void *next);
} Core;

#endif
