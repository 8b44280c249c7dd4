/* What native.c has compiled and heads.c calls: the parts of a layer, and the products. */
#ifndef FORETELL_CORE_H
#define FORETELL_CORE_H
#include "pass.h"
#include "product.h"

/* Puts keys and values of row b and a key-value head into the cache's slots. */
typedef void Put(void *context, const Layer *layer, int index, int64_t b, int64_t kv_head);

typedef struct {
  const Product *const *products; /* by format */
  void (*attend)(Pass *p, const Layer *layer, int index, const int64_t *seen, Put *put, void *context, int t, unsigned *phase);
  void (*remember)(Pass *p, const Layer *layer, int index, int64_t b, int64_t kv_head, int64_t slot, int64_t position,
                   const float *k, const float *v);
  void (*project)(Pass *p, const Layer *l, int t, Input x, int64_t ldx);
  void (*settle)(Pass *p, const Layer *l, int t, unsigned *phase, const void *next);
  void (*attention_part)(Pass *p, int index, int t, unsigned *phase, Input x, int64_t ldx, const void *next);
  void (*feed_part)(Pass *p, int index, int t, unsigned *phase, const void *next);
} Core;

#endif
