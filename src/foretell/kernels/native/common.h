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
  QUERIES = 128,        /* attention queries that share a pass over K and V at most */
  SEGMENT = 256,        /* positions that make one state of a query: bits depend on it */
  PANEL = 64,           /* slots whose keys, or values, stay near as floats */
  SCALE = 4,            /* bytes behind a slot's codes: their scale, a float */
  MAX_DIM = 640,        /* largest head dimension, and what a slot of latent attention keeps */
  MAX_EXPERTS = 1024,   /* of a layer */
  GROUPED_ROWS = 512,   /* rows that are grouped by expert at a time */
  AHEAD_ROWS = 32,      /* up to here the experts of the next layer are guessed: see store.h */
  MAX_TAPS = 8,         /* inputs of a convolution */
  WIDE = 32,            /* columns of a state that a thread walks at a time */
};

typedef uint16_t bf16;

/* How a matrix's weights are stored; activations of F32 are float, of BF16 bf16, of the others blocks of int8 (quant.h):
 * Q8 and Q4 have a scale for 32 codes, M a minimum too, K both in steps of two that 256 share, S a scale for 16 so. Q4N and
 * Q4X: codes of IQ4_NL's 16 levels, X with scales in such steps; Q4E: of E2M1's, with a power of two; Q2K: both for 16.
 * Q2T: ternary codes and one scale for 256; Q3I, Q3J, Q4I and Q4J: of the levels of IQ1, IQ2, IQ3_XXS and IQ3_S, with odd
 * steps of the scale that 256 share, for 16 (Q3) or 32 (Q4). */
enum { F32, BF16, Q8, Q8M, Q4, Q4M, Q4K, Q8K, Q8S, Q4N, Q4X, Q4E, Q2K, Q3S, Q2T, Q3I, Q3J, Q4I, Q4J, NUM_FORMATS };
enum { TILE = 16 }; /* rows of a quantised matrix that stand together */

/* A matrix [rows, columns] whose rows lie row_bytes apart; of a quantised one, whose tiles lie TILE * row_bytes apart. */
typedef struct {
  const void *data;
  const void *scales; /* of formats that keep them apart, else NULL */
  int64_t format, columns, row_bytes;
} Matrix;

typedef struct {
  Matrix gate, up, down; /* gate's data NULL: the activation is relu(up)^2 */
  int64_t inner;         /* rows of gate and of up */
  const float *gate_bias, *up_bias, *down_bias; /* or NULL */
} Expert;

/* Experts of one layer that stay in files, of which some are held: see store.h. */
typedef struct {
  int64_t kind, rows, row_bytes; /* as the file has them, the kind by GGUF's number; rows 0: there is no such matrix */
  int64_t step, at;              /* rows that are read at a time, whole tiles; where the matrix begins in a frame */
  const int8_t *grid;            /* see pack_rows */
} Stored;
typedef struct {
  Stored parts[3];      /* gate, up and down, of every expert alike */
  const int64_t *places; /* [experts, 3, 2] file and byte at which each matrix begins */
  int64_t frames, frame_bytes, pass;
  char *memory;          /* [frames, frame_bytes] */
  int32_t *frame, *held; /* [experts] the frame that it is in, or -1; [frames] the expert that is there, or -1 */
  float *score;         /* [experts] uses, of which older ones count less, as of pass `last` */
  int64_t *last;        /* [experts] */
  uint8_t *foreseen;    /* [experts] 1: named for the layer's next pass, and not held */
} Store;

/* What a model's layers have in common that have such experts. Figures only grow. */
typedef struct {
  int64_t reading; /* bytes that a thread reads at a time, at most */
  int64_t failed;  /* 0; the number of a read's error; -1: a file ends too early */
  int64_t bytes, bytes_ahead; /* read because a layer needed them; of what the system was asked to read ahead */
  int64_t hits, misses;       /* experts that a layer needed: those that were held, and those that were read */
  int64_t named, used;        /* experts that were not held and that the look ahead named; of those, that came to be needed */
  int64_t waited_ns;          /* while layers waited */
  _Atomic int64_t next;       /* the next piece that is to be read */
} Disk;

/* A mixture in place of an MLP: see experts.h. */
typedef struct {
  int64_t count, top;  /* experts, and how many of them a token reads */
  int64_t shared;      /* 1: one more, behind the others, that every token reads */
  int64_t over_chosen; /* weights of the chosen sum to 1, else those of all */
  int64_t sigmoid;     /* scores are the sigmoid of each logit, else the softmax of all */
  /* Experts stand in `groups` of one size; those of the `groups_chosen` best, by the `groups_best` best of each, can be chosen. */
  int64_t groups, groups_chosen, groups_best;
  double epsilon, scale; /* added to the sum of the chosen scores; on the weights */
  const float *bias;     /* [count] or NULL: added to a sigmoid's scores for the choice alone */
  const float *router_bias; /* [count] or NULL: of the router's product */
  Matrix router, shared_gate; /* [count, hidden] and [1, hidden], in the model's type; the latter absent: weight 1 */
  const Expert *each;
  Store *store;          /* or NULL: all are in memory */
} Experts;

/* A recurrent mixer in place of attention, or beside it: see mixer.h. A pass projects its input to `width` columns, those of
 * `in` one after the other; a convolution reads some of them, and a scan the q, k and v that it leaves. */
enum { DELTA_NET = 1, STATE_SPACE, SHORT_CONV };
typedef struct {
  int64_t kind, parts, width;
  Matrix in[4];         /* [sizes[i], hidden] */
  int64_t sizes[4];
  const float *in_bias, *in_scale; /* [width] or NULL; the scale is of products and bias */
  Matrix out;           /* [hidden, heads * columns], of SHORT_CONV [hidden, channels] */
  const float *out_bias;
  double out_scale;     /* 0: 1 */
  int64_t taps, channels, conv_at; /* of the convolution, and the first column that it reads */
  const float *conv, *conv_bias;   /* [taps, channels], oldest first; [channels] or NULL */
  int64_t heads, groups, rows, columns; /* states [heads, rows, columns]; groups of heads share q and k [groups, rows] */
  int64_t q_at, k_at, v_at;        /* among the channels */
  int64_t gate_at, step_at, beta_at; /* among the columns: z, what makes decay (a or dt), beta (b) */
  const float *rate, *shift, *skip;  /* [heads]: -exp(A_log); what is added to the step; D or NULL */
  const float *norm;    /* [heads * columns] or NULL: of what was scanned, in groups of norm_size */
  int64_t norm_size, gate_first;
  double eps, low, high; /* of the norm; limits of Mamba-2's step */
  int64_t held;         /* floats of a token's terms */
} Mixer;

/* A mixer's memory of the cache's rows. meta: columns of model/recurrent.py. */
enum { BASE, LIVE, READ, SIDE, META };
typedef struct {
  float *conv;   /* [rows, taps - 1, channels] inputs before the committed position, oldest first */
  float *state;  /* [rows, heads, columns / WIDE, rows of a state, WIDE] */
  float *terms;  /* [rows, room, held]: a slot's terms at slot % room */
  int64_t room;
  int64_t *meta; /* [rows, META] */
} MixerState;

/* An adapter's part of a product: see lora.h. */
typedef struct {
  const void *a, *b; /* [rank, columns], [groups of 16 rows, rank, 16], in the model's type; NULL: it has none here */
  int64_t rank, columns;
  double scale;
} LowRank;

typedef struct {
  Matrix q, k, v, o, gate, up, down;                                     /* [out, in]; absent where data is NULL */
  const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias; /* or NULL */
  const float *input_norm, *mlp_norm, *q_norm, *k_norm;                  /* or NULL: not normed */
  const float *attention_after, *mlp_after; /* norms of what attention and MLP return, or NULL */
  int64_t window;                           /* 0: sees everything */
  int64_t sinks; /* before a window that does not reach back to them, the first slots are seen, as from position sinks + window - 1 */
  int64_t rope, query_rope;                 /* which of the cache's rotations: of keys, of queries */
  const Experts *experts;                   /* in place of gate, up and down, or NULL */
  const Mixer *mixer;                       /* before attention, on the same input, or NULL */
  Matrix gates;                             /* [heads * dim, hidden]: their sigmoid is a factor on what attention mixed */
  const float *gates_bias;
  const LowRank *loras;                     /* of each adapter, NUM_KINDS of lora.h, or NULL */
  const float *spread, *unspread;           /* [kv_heads * dim] or NULL: factors on queries, and on keys that are coded */
  const float *sink_logits;                 /* [heads] or NULL: a score beside those of keys, with no value */
  const float *mixed_norm, *inner_norm;     /* norms of what attention mixed and of what `down` reads, or NULL */
  Matrix q_b, k_b, v_b;                     /* of latent attention: see latent.h */
} Layer;

typedef struct {
  int64_t bf16; /* the type of activations, keys and values: bf16, else float */
  int64_t num_layers, vocab, hidden, intermediate, heads, kv_heads, dim;
  double eps;
  Matrix embedding, head;
  const float *final_norm;
  const Layer *layers;
  /* What other families have; 0: as Llama has it. */
  int64_t gelu;  /* 1: the activation of the gate is gelu's tanh form, 2: relu(gate)^2, not silu */
  int64_t flat;  /* q_norm [heads * dim] and k_norm are of all queries and all keys together, not of each head */
  double embedding_scale, score_scale, score_cap, residual_scale, logit_scale, logit_cap;
  int64_t experts, chosen, expert_inner; /* the most of a layer, that a token reads there (shared ones too), their rows; or 0 */
  int64_t gated; /* attention has gates */
  int64_t projected, conved, scanned, state_rows; /* of all mixers the greatest width, channels, output, rows of a state; or 0 */
  double attention_scale, gate_scale, mlp_scale;  /* on what attention returns, on the MLP's gate, on what the MLP returns */
  int64_t low_rank; /* the greatest rank of an adapter, or 0 */
  double swiglu_alpha, swiglu_limit; /* the activation is of gpt-oss: see activate_rows; 0: it is not */
  Disk *disk; /* of experts that stay in files, or NULL: none does */
  int64_t rank, rope, nope, value, query_rank; /* of latent attention (latent.h), or 0 */
  double latent_eps;
  int64_t centred;    /* norms of the stream are layer norms, whose biases [hidden] stand behind their weights */
  int64_t parallel;   /* the MLP reads what attention reads */
  int64_t norms_last; /* heads are normed behind their rotation */
} Model;

typedef struct {
  void **keys, **values; /* per layer, [rows, kv heads, capacity, dim]; where they are coded dim + SCALE bytes: see slots.h. Of
                            latent attention there are keys alone. */
  int64_t rows, capacity;
  const float *cos, *sin; /* [rotations, capacity, dim / 2] */
  const MixerState *states; /* per layer, or NULL: no layer has a mixer */
  int64_t coded;            /* keys and values are int8, else in the model's type */
} Cache;

/* Numbers of a head's value: of latent attention the first of its key. */
INLINE int64_t value_dim(const Model *m) { return m->rank ? m->rank : m->dim; }

/* Bytes of a key, or of a value, in its slot. */
INLINE int64_t slot_bytes(const Model *m, const Cache *c) { return c->coded ? m->dim + SCALE : m->dim * (m->bf16 ? 2 : 4); }

INLINE int64_t padded(int64_t n) { return (n + 31) / 32 * 32 + 32; }
INLINE int64_t aligned(int64_t n) { return (n + 63) / 64 * 64; }

INLINE int is_quantised(const Matrix *w) { return w->format >= Q8; }

/* Where a row of a matrix begins, or its tile. */
INLINE const void *row_of(const Matrix *w, int64_t row) {
  if (is_quantised(w)) row = row / TILE * TILE;
  return (const char *)w->data + row * w->row_bytes;
}

#endif
