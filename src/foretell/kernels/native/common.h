/* What all parts share: macros, sizes and the structures that Python fills (see kernels/structures.py). */
#ifndef FORETELL_COMMON_H
#define FORETELL_COMMON_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum {
  BLOCK_BYTES = 524288, /* of weights (BLOCK rows) kept in L2 for the next group of rows, else half a block is taken */
  CHUNK_BYTES = 32768,  /* of activations that pass by while weights stream in ... */
  REUSE_BYTES = 65536,  /* ... and where weights are read again for more rows */
  PREFETCH = 16384,     /* bytes ahead at most where tiles are read in the order of memory ... */
  PREFETCH_FAR = 262144, /* ... and where they are read in chunks */
  SHARED_ROWS = 64,     /* up to here groups of rows share the fetching of the next block of weights */
  FEW_ROWS = 32,        /* up to here every thread computes norms for itself */
  QUERIES = 16,         /* attention queries that share a pass over K and V */
  KEYS = 128,           /* slots of K or V that stay in L1 meanwhile */
  MAX_DIM = 256,        /* largest head dimension */
  MAX_EXPERTS = 1024,   /* of a layer */
  GROUPED_ROWS = 512,   /* rows that are grouped by expert at a time */
};

typedef uint16_t bf16;

/* How a matrix's weights are stored; activations of F32 are float, of BF16 bf16, of the others blocks of int8 (quant.h):
 * Q8 and Q4 have a scale for 32 codes, M a minimum too, K both in steps of two that 256 share, S a scale for 16 so. */
enum { F32, BF16, Q8, Q8M, Q4, Q4M, Q4K, Q8K, Q8S, NUM_FORMATS };
enum { TILE = 16 }; /* rows of a quantised matrix that stand together */

/* A matrix [rows, columns] whose rows lie row_bytes apart; of a quantised one, whose tiles lie TILE * row_bytes apart. */
typedef struct {
  const void *data;
  const void *scales; /* of formats that keep them apart, else NULL */
  int64_t format, columns, row_bytes;
} Matrix;

typedef struct {
  Matrix gate, up, down;
  int64_t inner; /* rows of gate and of up */
} Expert;

/* A mixture in place of an MLP: see experts.h. */
typedef struct {
  int64_t count, top;  /* experts, and how many of them a token reads */
  int64_t shared;      /* 1: one more, behind the others, that every token reads, by a gate of its own */
  int64_t over_chosen; /* weights of the chosen sum to 1, else those of all */
  Matrix router, shared_gate; /* [count, hidden] and [1, hidden], in the model's type */
  const Expert *each;
} Experts;

typedef struct {
  Matrix q, k, v, o, gate, up, down;                                     /* [out, in] */
  const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias; /* or NULL */
  const float *input_norm, *mlp_norm, *q_norm, *k_norm;                  /* or NULL: not normed */
  const float *attention_after, *mlp_after; /* norms of what attention and MLP return, or NULL */
  int64_t window;                           /* 0: sees everything */
  int64_t rope, query_rope;                 /* which of the cache's rotations: of keys, of queries */
  const Experts *experts;                   /* in place of gate, up and down, or NULL */
} Layer;

typedef struct {
  int64_t bf16; /* the type of activations, keys and values: bf16, else float */
  int64_t num_layers, vocab, hidden, intermediate, heads, kv_heads, dim;
  double eps;
  Matrix embedding, head;
  const float *final_norm;
  const Layer *layers;
  /* What other families have; 0: as Llama has it. */
  int64_t gelu;  /* the activation is gelu's tanh form, not silu */
  int64_t flat;  /* q_norm [heads * dim] and k_norm are of all queries and all keys together, not of each head */
  double embedding_scale, score_scale, score_cap, residual_scale, logit_scale, logit_cap;
  int64_t experts, chosen, expert_inner; /* the most of a layer, that a token reads there (shared ones too), their rows; or 0 */
} Model;

typedef struct {
  void **keys, **values; /* per layer, [rows, kv heads, capacity, dim] */
  int64_t rows, capacity;
  const float *cos, *sin; /* [rotations, capacity, dim / 2] */
} Cache;

INLINE int64_t padded(int64_t n) { return (n + 31) / 32 * 32 + 32; }
INLINE int64_t aligned(int64_t n) { return (n + 63) / 64 * 64; }

INLINE int is_quantised(const Matrix *w) { return w->format >= Q8; }

/* Where a row of a matrix begins, or its tile. */
INLINE const void *row_of(const Matrix *w, int64_t row) {
  if (is_quantised(w)) row = row / TILE * TILE;
  return (const char *)w->data + row * w->row_bytes;
}

#endif
