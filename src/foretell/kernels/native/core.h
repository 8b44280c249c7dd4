/* What native.c has compiled and heads.c calls: the parts of a layer, and the products. */
#ifndef FORETELL_CORE_H
#define FORETELL_CORE_H
#include "pass.h"
#include "product.h"

typedef struct {
  int64_t row, head, low, high, total; /* sees slots [low, high), then ancestors; positions [low, total) in all */
  float *scores;                       /* indexed by position */
  float mixed[MAX_DIM];
  float sum;
} Query;

typedef struct {
  const Product *const *products; /* by format */
  void (*attend)(Pass *p, int64_t b, int64_t kv_head, const Layer *layer, int index, Query *queries, int count);
  void (*project)(Pass *p, const Layer *l, int t, Input x, int64_t ldx);
  void (*settle)(Pass *p, const Layer *l, int t, unsigned *phase, const void *next);
  void (*attention_part)(Pass *p, int index, int t, unsigned *phase, Input x, int64_t ldx, const void *next);
  void (*feed_part)(Pass *p, int index, int t, unsigned *phase, const void *next);
} Core;

#endif
