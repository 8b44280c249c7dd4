/* The Llama family's forward pass as one call: no torch headers, no packing, any number of rows, one order of sums.
 *
 * A decode step is bound by reading weights. So every weight is read once per pass at the speed of memory, straight from
 * the [out, in] row-major matrices of the checkpoint, and the design follows from that:
 *
 *  - Dot products. A tile is R weight rows by M activation rows (R * M <= 24 vector accumulators, which with R weight and
 *    one activation register fill the 32 registers of AVX-512). K runs innermost, 16 floats or 32 bf16 at a time; each
 *    output has ONE accumulator whose 16 lanes are added by one fixed tree. Hence an output's bits do not depend on M, on
 *    its row, on R, on the thread or on the batch: decoding, verifying and prefilling round alike. Long K is cut into
 *    chunks so that M activation rows stay in L1 while BLOCK weight rows pass by; the accumulators are set aside between
 *    chunks, exactly, so this changes no bit either. More than 8 rows go in groups of up to 8 over weights in L2.
 *  - Prefetch. Each tile asks for the weights PREFETCH bytes ahead into L2; behind the end of a thread's rows that is the
 *    beginning of its rows in the next matrix, so barriers do not stall the stream.
 *  - Threads. One OpenMP region for the whole pass (torch's own pool), a spinning barrier between phases, five phases a
 *    layer. Output rows are split between threads; norms of few rows are computed by every thread for itself, which is
 *    cheaper than a barrier.
 *  - Attention. What a node sees, ordered by position, is one run of slots [low, high) and then its ancestors behind that
 *    run. Scores, sums and mixes go through that order, in lanes counted from its first: the same token after the same
 *    text gives the same bits in any tree, at any slot, in any batch.
 *
 * Weights and K, V are float or bf16; residual stream, scores and sums are float. Needs AVX-512 F, BW, DQ, VL, and
 * AVX512_BF16 for bf16 models.
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum {
  GROUP = 8,            /* activation rows of one tile at most */
  BLOCK = 24,           /* weight rows that share a pass over the activations; every R but 8 divides its half too */
  BLOCK_BYTES = 524288, /* of them kept in L2 for the next group of rows, else half a block is taken */
  CHUNK_BYTES = 32768,  /* of activations that pass by while weights stream in ... */
  REUSE_BYTES = 65536,  /* ... and where weights are read again for more rows */
  PREFETCH = 262144,    /* bytes ahead at most */
  FEW_ROWS = 32,        /* up to here every thread computes norms for itself */
  QUERIES = 16,         /* attention queries that share a pass over K and V */
  KEYS = 128,           /* slots of K or V that stay in L1 meanwhile */
  MAX_DIM = 256,        /* largest head dimension */
};

typedef uint16_t bf16;

typedef struct {
  const void *q, *k, *v, *o, *gate, *up, *down;                          /* [out, in] */
  const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias; /* or NULL */
  const float *input_norm, *mlp_norm, *q_norm, *k_norm;                  /* the last two or NULL */
  int64_t window;                                                        /* 0: sees everything */
} Layer;

typedef struct {
  int64_t bf16, num_layers, vocab, hidden, intermediate, heads, kv_heads, dim;
  double eps;
  const void *embedding, *head;
  const float *final_norm;
  const Layer *layers;
} Model;

typedef struct {
  void **keys, **values; /* per layer, [rows, kv heads, capacity, dim] */
  int64_t rows, capacity;
  const float *cos, *sin; /* [capacity, dim / 2] */
} Cache;

/* ------------------------------------------------------------------------------------------------ vectors ---------- */

/* Each merge adds, for two vectors at once, lanes i and i + 8 (then 4, 2, 1): four of them sum 16 vectors by one tree. */
INLINE __m512 merge8(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
INLINE __m512 merge4(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
INLINE __m512 merge2(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}
INLINE __m512 merge1(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

/* Lane i of the result is the sum of the lanes of v[i]. */
INLINE __m512 sums16(const __m512 *v) {
  __m512 a[8];
#define TRANSPOSED(s) (4 * ((s) % 4) + (s) / 4) /* where the merges will put vector s */
  UNROLL for (int i = 0; i < 8; i++) a[i] = merge8(v[TRANSPOSED(2 * i)], v[TRANSPOSED(2 * i + 1)]);
  UNROLL for (int i = 0; i < 4; i++) a[i] = merge4(a[2 * i], a[2 * i + 1]);
  return merge1(merge2(a[0], a[1]), merge2(a[2], a[3]));
}
/* The same for 8 vectors, in lanes 0 to 7. */
INLINE __m512 sums8(const __m512 *v) {
  __m512 a[4];
  UNROLL for (int i = 0; i < 4; i++) a[i] = merge8(v[i], v[i + 4]);
  UNROLL for (int i = 0; i < 4; i++) a[i] = merge4(a[i], a[i]);
  return merge1(merge2(a[0], a[1]), merge2(a[2], a[3]));
}
INLINE float sum1(__m512 v) {
  v = merge8(v, v), v = merge4(v, v), v = merge2(v, v);
  return _mm512_cvtss_f32(merge1(v, v));
}

INLINE __mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }

/* exp for x <= 0 or moderate; relative error about 2e-7. */
INLINE __m512 exp16(__m512 x) {
  x = _mm512_max_ps(_mm512_min_ps(x, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

/* Round to nearest even, as torch does; written out so that float models need no AVX512_BF16. */
INLINE __m256i narrow(__m512 x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}

/* Load or store up to 16 values of the model's type. */
INLINE __m512 load_as(int is_bf16, const void *p, int64_t i, __mmask16 lanes) {
  if (is_bf16) return widen(_mm256_maskz_loadu_epi16(lanes, (const bf16 *)p + i));
  return _mm512_maskz_loadu_ps(lanes, (const float *)p + i);
}
INLINE void store_as(int is_bf16, void *p, int64_t i, __mmask16 lanes, __m512 x) {
  if (is_bf16) _mm256_mask_storeu_epi16((bf16 *)p + i, lanes, narrow(x));
  else _mm512_mask_storeu_ps((float *)p + i, lanes, x);
}

/* ------------------------------------------------------------------------------------------------ linears ---------- */

#define LOAD_F32(p) _mm512_loadu_ps(p)
#define TAIL_F32(mask, p) _mm512_maskz_loadu_ps((__mmask16)(mask), p)
#define FMA_F32(acc, a, b) _mm512_fmadd_ps(a, b, acc)
/* One load, where gcc would fold one into each of the R products (which float takes a fifth longer by). */
#define KEEP_F32(a) __asm__("" : "+v"(a))
#define KEEP_BF16(a)
#define LOAD_BF16(p) (__m512bh) _mm512_loadu_si512(p)
#define TAIL_BF16(mask, p) (__m512bh) _mm512_maskz_loadu_epi16((__mmask32)(mask), p)
#define FMA_BF16(acc, a, b) _mm512_dpbf16_ps(acc, a, b)

/* Sum i of a tile belongs to row i / R, column i % R of the output; y holds those from `at` on: one masked store a row. */
#define STORE(M, R, at, sums)                                                                                          \
  do {                                                                                                                 \
    const __m512 y = sums;                                                                                             \
    UNROLL for (int m = 0; m < (M); m++) {                                                                             \
      const int from = MAX(m * (R) - (at), 0), to = MIN((m + 1) * (R) - (at), 16);                                     \
      if (from >= to) continue;                                                                                        \
      const __mmask16 lanes = (__mmask16)((1u << to) - (1u << from));                                                  \
      float *row = out + m * ldo - (m * (R) - (at));                                                                   \
      __m512 z = bias ? _mm512_add_ps(y, _mm512_maskz_loadu_ps(lanes, bias - (m * (R) - (at)))) : y;                   \
      if (add) z = _mm512_add_ps(z, _mm512_maskz_loadu_ps(lanes, row));                                                \
      _mm512_mask_storeu_ps(row, lanes, z);                                                                            \
    }                                                                                                                  \
  } while (0)

/* out[m, r] (+)= bias[r] + sum over k of x[m, k] * w[r, k], for one chunk of n values of k (a multiple of STEP, followed by
 * `tail` more in the last chunk); parked holds the accumulators between chunks. */
#define DEFINE_TILE(NAME, T, VECTOR, STEP, LOAD, TAIL, FMA, KEEP)                                                      \
  INLINE void NAME(const int M, const int R, const T *x, int64_t ldx, const T *w, int64_t ldw, int64_t n, int64_t tail,\
                   __m512 *parked, int first, int last, const float *bias, float *out, int64_t ldo, int add,           \
                   const char *ahead, int64_t ld_ahead) {                                                              \
    __m512 acc[8][GROUP];                                                                                              \
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++)                                              \
        acc[r][m] = first ? _mm512_setzero_ps() : parked[r * M + m];                                                   \
    for (int64_t k = 0; k < n; k += STEP) {                                                                            \
      VECTOR b[8];                                                                                                     \
      UNROLL for (int r = 0; r < R; r++) {                                                                             \
        b[r] = LOAD(w + r * ldw + k);                                                                                  \
        _mm_prefetch(ahead + (r * ld_ahead + k) * sizeof(T), _MM_HINT_T1);                                             \
      }                                                                                                                \
      UNROLL for (int m = 0; m < M; m++) {                                                                             \
        VECTOR a = LOAD(x + m * ldx + k);                                                                              \
        KEEP(a);                                                                                                       \
        UNROLL for (int r = 0; r < R; r++) acc[r][m] = FMA(acc[r][m], a, b[r]);                                        \
      }                                                                                                                \
    }                                                                                                                  \
    if (!last) {                                                                                                       \
      UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) parked[r * M + m] = acc[r][m];             \
      return;                                                                                                          \
    }                                                                                                                  \
    if (tail) {                                                                                                        \
      const uint32_t mask = (1u << tail) - 1;                                                                          \
      UNROLL for (int r = 0; r < R; r++) {                                                                             \
        VECTOR b = TAIL(mask, w + r * ldw + n);                                                                        \
        UNROLL for (int m = 0; m < M; m++) acc[r][m] = FMA(acc[r][m], TAIL(mask, x + m * ldx + n), b);                 \
      }                                                                                                                \
    }                                                                                                                  \
    __m512 flat[32];                                                                                                   \
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int r = 0; r < R; r++) flat[m * R + r] = acc[r][m];                 \
    _Pragma("GCC unroll 32") for (int i = R * M; i < 32; i++) flat[i] = flat[0];                                       \
    STORE(M, R, 0, R * M > 8 ? sums16(flat) : sums8(flat));                                                            \
    if (R * M > 16) STORE(M, R, 16, R * M > 24 ? sums16(flat + 16) : sums8(flat + 16));                                \
  }
DEFINE_TILE(tile_f32, float, __m512, 16, LOAD_F32, TAIL_F32, FMA_F32, KEEP_F32)

/* One function for each number of rows M, with the R that keeps R * M near 24; and one with R = 1 for what is left. Each
 * runs over `count` weight rows, a multiple of its R; stride_ahead bytes lie between what two tiles prefetch. */
#define TILE_ARGS(T)                                                                                                   \
  int64_t count, const T *x, int64_t ldx, const T *w, int64_t ldw, int64_t n, int64_t tail, __m512 *parked, int first, \
      int last, const float *bias, float *out, int64_t ldo, int add, const char *ahead, int64_t ld_ahead,              \
      int64_t stride_ahead
#define DEFINE_ONE(NAME, T, M, R)                                                                                      \
  static void NAME##_##M##_##R(TILE_ARGS(T)) {                                                                         \
    for (; count > 0; count -= R) {                                                                                    \
      NAME(M, R, x, ldx, w, ldw, n, tail, parked, first, last, bias, out, ldo, add, ahead, ld_ahead);                  \
      w += R * ldw, parked += R * M, out += R, ahead += stride_ahead;                                                  \
      if (bias) bias += R;                                                                                             \
    }                                                                                                                  \
  }
static const int TILE_ROWS[GROUP + 1] = {0, 8, 8, 6, 6, 4, 4, 3, 3};

#define DEFINE_LINEAR(NAME, TILE, T, STEP)                                                                             \
  DEFINE_ONE(TILE, T, 1, 8) DEFINE_ONE(TILE, T, 2, 8) DEFINE_ONE(TILE, T, 3, 6) DEFINE_ONE(TILE, T, 4, 6)              \
  DEFINE_ONE(TILE, T, 5, 4) DEFINE_ONE(TILE, T, 6, 4) DEFINE_ONE(TILE, T, 7, 3) DEFINE_ONE(TILE, T, 8, 3)              \
  DEFINE_ONE(TILE, T, 1, 1) DEFINE_ONE(TILE, T, 2, 1) DEFINE_ONE(TILE, T, 3, 1) DEFINE_ONE(TILE, T, 4, 1)              \
  DEFINE_ONE(TILE, T, 5, 1) DEFINE_ONE(TILE, T, 6, 1) DEFINE_ONE(TILE, T, 7, 1) DEFINE_ONE(TILE, T, 8, 1)              \
  typedef void TILE##_function(TILE_ARGS(T));                                                                          \
  static TILE##_function *const TILE##_wide[GROUP + 1] = {0, TILE##_1_8, TILE##_2_8, TILE##_3_6, TILE##_4_6,           \
                                                          TILE##_5_4, TILE##_6_4, TILE##_7_3, TILE##_8_3};             \
  static TILE##_function *const TILE##_single[GROUP + 1] = {0, TILE##_1_1, TILE##_2_1, TILE##_3_1, TILE##_4_1,         \
                                                            TILE##_5_1, TILE##_6_1, TILE##_7_1, TILE##_8_1};           \
  /* Rows [a, b) of w [.., K] times all `rows` of x; `next` is what this thread will read after row b. */              \
  static void NAME(const T *w, int64_t K, int64_t a, int64_t b, const T *x, int64_t ldx, int64_t rows,                 \
                   const float *bias, float *out, int64_t ldo, int add, const void *next) {                            \
    __m512 parked[BLOCK * GROUP];                                                                                      \
    const int64_t whole = K / STEP * STEP;                                                                             \
    const char *end = (const char *)(w + b * K);                                                                       \
    const int64_t distance = MIN(PREFETCH, (b - a) * K * (int64_t)sizeof(T) / 2);                                      \
    const int64_t block = rows > GROUP && BLOCK * K * (int64_t)sizeof(T) > BLOCK_BYTES ? BLOCK / 2 : BLOCK;            \
    for (int64_t r0 = a; r0 < b; r0 += block) {                                                                        \
      const int64_t r1 = MIN(r0 + block, b);                                                                           \
      for (int64_t m0 = 0, size; m0 < rows; m0 += size) {                                                              \
        const int64_t groups = (rows - m0 + GROUP - 1) / GROUP;                                                        \
        size = (rows - m0 + groups - 1) / groups;                                                                      \
        const int64_t limit = rows > GROUP ? REUSE_BYTES : CHUNK_BYTES;                                                \
        const int64_t chunks = MAX(1, (whole * size * (int64_t)sizeof(T) + limit - 1) / limit);                        \
        const int64_t chunk = MAX(STEP, (whole / STEP + chunks - 1) / chunks * STEP);                                  \
        for (int64_t k = 0;; k += chunk) {                                                                             \
          const int last = k + chunk >= whole;                                                                         \
          const T *coming = last ? x + MIN(m0 + size, rows - 1) * ldx : x + m0 * ldx + k + chunk;                      \
          for (int64_t r = r0, size_r, count; r < r1; r += count) { /* whole tiles, then single rows */                \
            size_r = r == r0 && r + TILE_ROWS[size] <= r1 ? TILE_ROWS[size] : 1;                                       \
            count = (r1 - r) / size_r * size_r;                                                                        \
            const T *from = w + r * K + k;                                                                             \
            const char *ahead = (const char *)from + distance;                                                         \
            int64_t ld_ahead = K, stride_ahead = size_r * K * (int64_t)sizeof(T);                                      \
            if (ahead >= end) ahead = (const char *)next + (ahead - end);                                              \
            /* Weights that were read for the rows before are near: fetch the next rows' activations, one a tile. */   \
            if (m0) ahead = (const char *)coming, ld_ahead = 0, stride_ahead = ldx * (int64_t)sizeof(T);               \
            (size_r == 1 ? TILE##_single : TILE##_wide)[size](                                                         \
                count, x + m0 * ldx + k, ldx, from, K, MIN(chunk, whole - k), K - whole, parked + (r - r0) * size,     \
                k == 0, last, bias ? bias + r : 0, out + m0 * ldo + r, ldo, add, ahead, ld_ahead, stride_ahead);       \
          }                                                                                                            \
          if (last) break;                                                                                             \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }
DEFINE_LINEAR(linear_f32, tile_f32, float, 16)

#ifdef __AVX512BF16__
DEFINE_TILE(tile_bf16, bf16, __m512bh, 32, LOAD_BF16, TAIL_BF16, FMA_BF16, KEEP_BF16)
DEFINE_LINEAR(linear_bf16, tile_bf16, bf16, 32)
#endif

static void linear(int is_bf16, const void *w, int64_t K, int64_t a, int64_t b, const void *x, int64_t ldx, int64_t rows,
                   const float *bias, float *out, int64_t ldo, int add, const void *next) {
#ifdef __AVX512BF16__
  if (is_bf16) {
    linear_bf16(w, K, a, b, x, ldx, rows, bias, out, ldo, add, next);
    return;
  }
#endif
  (void)is_bf16;
  linear_f32(w, K, a, b, x, ldx, rows, bias, out, ldo, add, next);
}

/* ------------------------------------------------------------------------------------------------ the pass --------- */

typedef struct {
  const Model *model;
  const Cache *cache;
  int64_t batch, nodes, tree_nodes, rows; /* rows = batch * nodes */
  const int64_t *tokens, *length, *slots, *positions;
  const uint8_t *ancestry;
  int64_t stride_b, stride_n, stride_t; /* of ancestry [batch, nodes, tree_nodes] */
  /* scratch; ld* are padded so that rows do not share cache sets */
  int64_t ld_hidden, ld_mixed, ld_inner, ld_scores, qkv_width;
  float *residual, *qkv, *gate, *up, *scores;
  char *normed, *mixed, *inner;
  int64_t *run, *reach; /* [rows] tree slots that a node sees from the root on without a gap; end of all that it sees */
  int threads;
  atomic_uint arrived;
} Pass;

static void barrier(Pass *p, unsigned *phase) {
  const unsigned target = ++*phase * (unsigned)p->threads;
  atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel);
  for (int spins = 0; atomic_load_explicit(&p->arrived, memory_order_acquire) < target;) {
    if (++spins < 4000) _mm_pause();
    else sched_yield(); /* another process has this core */
  }
}

/* The part of n rows that is thread t's, in multiples of 8 where that leaves none idle. */
INLINE void share(int64_t n, int t, int threads, int64_t *a, int64_t *b) {
  const int64_t unit = n >= 16 * threads ? 8 : 1, units = (n + unit - 1) / unit;
  *a = MIN(units * t / threads * unit, n);
  *b = MIN(units * (t + 1) / threads * unit, n);
}

INLINE const void *row_of(const Model *m, const void *w, int64_t row, int64_t K) {
  return (const char *)w + row * K * (m->bf16 ? 2 : 4);
}

/* y = x / rms(x) * weight, in the model's type. */
static void norm_row(int is_bf16, const float *x, const float *weight, int64_t n, float eps, void *y) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    __m512 v = _mm512_maskz_loadu_ps(first_lanes(n - i), x + i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(sum1(squares) / (float)n + eps));
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), scale);
    store_as(is_bf16, y, i, lanes, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(lanes, weight + i)));
  }
}

/* All rows, normed: by every thread for itself where they are few (returns its own copy), else divided. */
static const void *norm(Pass *p, const float *weight, int t, unsigned *phase) {
  const Model *m = p->model;
  const int64_t row_bytes = p->ld_hidden * (m->bf16 ? 2 : 4);
  const int own = p->rows <= FEW_ROWS;
  int64_t a = 0, b = p->rows;
  char *to = p->normed + (own ? t * p->rows * row_bytes : 0);
  if (!own) share(p->rows, t, p->threads, &a, &b);
  for (int64_t i = a; i < b; i++)
    norm_row(m->bf16, p->residual + i * m->hidden, weight, m->hidden, (float)m->eps, to + i * row_bytes);
  if (!own) barrier(p, phase);
  return to;
}

/* Optional norm, then rotation by position, of one head's vector; x may be y. */
static void rotate(const Pass *p, const float *x, const float *weight, int64_t position, float *y) {
  const int64_t dim = p->model->dim, half = dim / 2;
  float normed[MAX_DIM];
  if (weight) {
    norm_row(0, x, weight, dim, (float)p->model->eps, normed);
    x = normed;
  }
  const float *cos = p->cache->cos + position * half, *sin = p->cache->sin + position * half;
  for (int64_t i = 0; i < half; i += 16) {
    const __mmask16 lanes = first_lanes(half - i);
    const __m512 c = _mm512_maskz_loadu_ps(lanes, cos + i), s = _mm512_maskz_loadu_ps(lanes, sin + i);
    const __m512 u = _mm512_maskz_loadu_ps(lanes, x + i), v = _mm512_maskz_loadu_ps(lanes, x + half + i);
    _mm512_mask_storeu_ps(y + i, lanes, _mm512_fnmadd_ps(v, s, _mm512_mul_ps(u, c)));
    _mm512_mask_storeu_ps(y + half + i, lanes, _mm512_fmadd_ps(u, s, _mm512_mul_ps(v, c)));
  }
}

/* Dot products of one query with 16 keys: key i at keys[i], or at run + i * dim where keys is NULL. */
INLINE __m512 scores_dim(const int64_t dim, const int is_bf16, const void *query, const void *run, const void *const *keys) {
  __m512 acc[16];
  UNROLL for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
#define KEY(T, i) ((const T *)(keys ? keys[i] : (const void *)((const T *)run + (i) * dim)) + d)
#ifdef __AVX512BF16__
  if (is_bf16) {
    for (int64_t d = 0; d < dim; d += 32) {
      const __mmask32 lanes = dim - d >= 32 ? 0xffffffffu : 0xffffu;
      const __m512bh q = (__m512bh)_mm512_maskz_loadu_epi16(lanes, (const bf16 *)query + d);
      UNROLL for (int i = 0; i < 16; i++)
          acc[i] = _mm512_dpbf16_ps(acc[i], q, (__m512bh)_mm512_maskz_loadu_epi16(lanes, KEY(bf16, i)));
    }
    return sums16(acc);
  }
#endif
  (void)is_bf16;
  for (int64_t d = 0; d < dim; d += 16) {
    const __m512 q = _mm512_loadu_ps((const float *)query + d);
    UNROLL for (int i = 0; i < 16; i++) acc[i] = _mm512_fmadd_ps(q, _mm512_loadu_ps(KEY(float, i)), acc[i]);
  }
#undef KEY
  return sums16(acc);
}

/* The same with compile-time constants: common head dimensions, and whether keys are contiguous. */
static __m512 scores16(int is_bf16, int64_t dim, const void *query, const void *run, const void *const *keys) {
  if (keys) return is_bf16 ? scores_dim(dim, 1, query, 0, keys) : scores_dim(dim, 0, query, 0, keys);
  if (dim == 64) return is_bf16 ? scores_dim(64, 1, query, run, 0) : scores_dim(64, 0, query, run, 0);
  if (dim == 128) return is_bf16 ? scores_dim(128, 1, query, run, 0) : scores_dim(128, 0, query, run, 0);
  return is_bf16 ? scores_dim(dim, 1, query, run, 0) : scores_dim(dim, 0, query, run, 0);
}

/* mixed[q] += sum over i in [from, to) of weights[q][i] * values[i], in order, for `many` queries that share the reads. */
INLINE void mix_dim(const int VECTORS, const int many, const int is_bf16, float *const *weights, const void *values,
                    int64_t from, int64_t to, float *const *mixed) {
  const int64_t dim = VECTORS * 16;
  __m512 acc[4][16];
  UNROLL for (int q = 0; q < many; q++)
      UNROLL for (int c = 0; c < VECTORS; c++) acc[q][c] = _mm512_loadu_ps(mixed[q] + 16 * c);
  for (int64_t i = from; i < to; i++) {
    __m512 weight[4];
    UNROLL for (int q = 0; q < many; q++) weight[q] = _mm512_set1_ps(weights[q][i]);
    UNROLL for (int c = 0; c < VECTORS; c++) {
      const __m512 value = load_as(is_bf16, values, i * dim + 16 * c, 0xffff);
      UNROLL for (int q = 0; q < many; q++) acc[q][c] = _mm512_fmadd_ps(weight[q], value, acc[q][c]);
    }
  }
  UNROLL for (int q = 0; q < many; q++)
      UNROLL for (int c = 0; c < VECTORS; c++) _mm512_storeu_ps(mixed[q] + 16 * c, acc[q][c]);
}

/* many is 1, 2 or 4, and 4 only up to MIX_FOUR dimensions, beyond which the registers run out. */
enum { MIX_FOUR = 64 };
static void mix(int many, int is_bf16, float *const *weights, const void *values, int64_t from, int64_t to, int64_t dim,
                float *const *mixed) {
#define MIX(V, N) (is_bf16 ? mix_dim(V, N, 1, weights, values, from, to, mixed)                                        \
                           : mix_dim(V, N, 0, weights, values, from, to, mixed))
#define MIX_CASE(V)                                                                                                    \
  case 16 * V:                                                                                                         \
    if (many == 1) MIX(V, 1);                                                                                          \
    else if (many == 2) MIX(V, 2);                                                                                     \
    else if (16 * V <= MIX_FOUR) MIX(V, 4);                                                                            \
    return;
  switch (dim) {
    MIX_CASE(1) MIX_CASE(2) MIX_CASE(3) MIX_CASE(4) MIX_CASE(5) MIX_CASE(6) MIX_CASE(7) MIX_CASE(8)
    MIX_CASE(10) MIX_CASE(12) MIX_CASE(16)
  }
}

static void mix_one(int is_bf16, float weight, const void *value, int64_t dim, float *mixed) {
  float *const weights[1] = {&weight}, *const to[1] = {mixed};
  mix(1, is_bf16, weights, value, 0, 1, dim, to);
}

typedef struct {
  int64_t row, head, low, high, total; /* sees slots [low, high), then ancestors; positions [low, total) in all */
  float *scores;                       /* indexed by position */
  float mixed[MAX_DIM];
  float sum;
} Query;

/* Attention of up to QUERIES queries of one sequence over one key-value head. */
static void attend(Pass *p, int64_t b, int64_t kv_head, const Layer *layer, int index, Query *queries, int count) {
  const Model *m = p->model;
  const int is_bf16 = (int)m->bf16;
  const int64_t dim = m->dim, capacity = p->cache->capacity, bytes = is_bf16 ? 2 : 4;
  const char *keys = (const char *)p->cache->keys[index] + (b * m->kv_heads + kv_head) * capacity * dim * bytes;
  const char *values = (const char *)p->cache->values[index] + (b * m->kv_heads + kv_head) * capacity * dim * bytes;
  char vectors[QUERIES][MAX_DIM * 4];
  const float scale = 1.0f / sqrtf((float)dim);
  int64_t low = INT64_MAX, high = 0;
  const void *where[16];
  for (int i = 0; i < count; i++) {
    Query *q = &queries[i];
    float turned[MAX_DIM];
    rotate(p, p->qkv + q->row * p->qkv_width + q->head * dim, layer->q_norm, p->positions[q->row], turned);
    for (int64_t d = 0; d < dim; d += 16) store_as(is_bf16, vectors[i], d, 0xffff, _mm512_loadu_ps(turned + d));
    low = MIN(low, q->low), high = MAX(high, q->high);
  }
  /* Scores of the common run, block by block; what a block writes outside a query's own run is overwritten or unread. */
  for (int64_t j0 = low; j0 < high; j0 += KEYS) {
    for (int i = 0; i < count; i++) {
      Query *q = &queries[i];
      for (int64_t j = MAX(j0, low + (q->low - low) / 16 * 16); j < MIN(j0 + KEYS, q->high); j += 16) {
        const int tail = j + 16 > capacity;
        for (int64_t c = 0; tail && c < 16; c++) where[c] = keys + MIN(j + c, capacity - 1) * dim * bytes;
        _mm512_storeu_ps(q->scores + j, scores16(is_bf16, dim, vectors[i], keys + j * dim * bytes, tail ? where : 0));
      }
    }
  }
  for (int i = 0; i < count; i++) {
    Query *q = &queries[i];
    /* Ancestors behind the run, by depth: their scores follow those of the run. */
    const uint8_t *sees = p->ancestry + b * p->stride_b + q->row % p->nodes * p->stride_n;
    int64_t position = p->length[b] + p->run[q->row], pending = 0, at[16];
    for (int64_t j = p->run[q->row]; j < p->reach[q->row]; j++) {
      if (!sees[j * p->stride_t]) continue;
      if (position++ < q->low) continue;
      at[pending++] = p->length[b] + j;
      if (pending < 16 && position < q->total) continue;
      for (int64_t c = 0; c < 16; c++) where[c] = keys + at[MIN(c, pending - 1)] * dim * bytes;
      const __m512 found = scores16(is_bf16, dim, vectors[i], 0, where);
      _mm512_mask_storeu_ps(q->scores + position - pending, first_lanes(pending), found);
      pending = 0;
    }
    __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t j = q->low; j < q->total; j += 16)
      top = _mm512_mask_max_ps(top, first_lanes(q->total - j), top, _mm512_loadu_ps(q->scores + j));
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t j = q->low; j < q->total; j += 16) {
      const __mmask16 lanes = first_lanes(q->total - j);
      const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(q->scores + j), largest), _mm512_set1_ps(scale));
      const __m512 e = _mm512_maskz_mov_ps(lanes, exp16(x));
      sum = _mm512_add_ps(sum, e);
      _mm512_mask_storeu_ps(q->scores + j, lanes, e);
    }
    q->sum = sum1(sum);
    memset(q->mixed, 0, dim * sizeof(float));
  }
  float *weights[QUERIES], *mixed[QUERIES];
  for (int i = 0; i < count; i++) weights[i] = queries[i].scores, mixed[i] = queries[i].mixed;
  for (int64_t j0 = low; j0 < high; j0 += KEYS) {
    for (int i = 0, many; i < count; i += many) {
      many = count - i >= 4 && dim <= MIX_FOUR ? 4 : count - i >= 2 ? 2 : 1;
      int64_t from = j0, to = j0 + KEYS; /* the part of this block that all of them see */
      for (int q = i; q < i + many; q++) from = MAX(from, queries[q].low), to = MIN(to, queries[q].high);
      to = MAX(from, to);
      for (int q = i; q < i + many; q++)
        mix(1, is_bf16, weights + q, values, MAX(j0, queries[q].low), MIN(from, queries[q].high), dim, mixed + q);
      mix(many, is_bf16, weights + i, values, from, to, dim, mixed + i);
      for (int q = i; q < i + many; q++)
        mix(1, is_bf16, weights + q, values, MAX(to, queries[q].low), MIN(j0 + KEYS, queries[q].high), dim, mixed + q);
    }
  }
  for (int i = 0; i < count; i++) {
    Query *q = &queries[i];
    const uint8_t *sees = p->ancestry + b * p->stride_b + q->row % p->nodes * p->stride_n;
    int64_t position = p->length[b] + p->run[q->row];
    for (int64_t j = p->run[q->row]; j < p->reach[q->row]; j++)
      if (sees[j * p->stride_t] && position++ >= q->low)
        mix_one(is_bf16, q->scores[position - 1], values + (p->length[b] + j) * dim * bytes, dim, q->mixed);
    const __m512 inverse = _mm512_set1_ps(1.0f / q->sum);
    void *to = p->mixed + (q->row * p->ld_mixed + q->head * dim) * bytes;
    for (int64_t d = 0; d < dim; d += 16)
      store_as(is_bf16, to, d, 0xffff, _mm512_mul_ps(_mm512_loadu_ps(q->mixed + d), inverse));
  }
}

/* One layer's attention: units of (sequence, key-value head), each split further by query heads where units are few. A
 * unit first writes its keys and values; split units all write the same bytes, which spares a barrier. */
static void attention(Pass *p, const Layer *layer, int index, int t) {
  const Model *m = p->model;
  const int64_t dim = m->dim, bytes = m->bf16 ? 2 : 4, group = m->heads / m->kv_heads, pairs = p->batch * m->kv_heads;
  int64_t splits = 1;
  for (int64_t s = 2; s <= group && splits * pairs % p->threads; s++)
    if (group % s == 0 && pairs * splits < 4 * p->threads) splits = s;
  Query queries[QUERIES];
  for (int64_t unit = t; unit < pairs * splits; unit += p->threads) {
    const int64_t b = unit / splits / m->kv_heads, kv_head = unit / splits % m->kv_heads;
    const int64_t heads = group / splits, first_head = kv_head * group + unit % splits * heads;
    const int64_t base = (b * m->kv_heads + kv_head) * p->cache->capacity;
    for (int64_t i = b * p->nodes; i < (b + 1) * p->nodes; i++) {
      const float *k = p->qkv + i * p->qkv_width + (m->heads + kv_head) * dim, *v = k + m->kv_heads * dim;
      const int64_t at = (base + p->slots[i]) * dim * bytes;
      float turned[MAX_DIM];
      rotate(p, k, layer->k_norm, p->positions[i], turned);
      for (int64_t d = 0; d < dim; d += 16) {
        store_as(m->bf16, (char *)p->cache->keys[index] + at, d, 0xffff, _mm512_loadu_ps(turned + d));
        store_as(m->bf16, (char *)p->cache->values[index] + at, d, 0xffff, _mm512_loadu_ps(v + d));
      }
    }
    int count = 0;
    for (int64_t i = 0; i < p->nodes * heads; i++) {
      Query *q = &queries[count];
      q->row = b * p->nodes + i / heads, q->head = first_head + i % heads;
      q->total = p->positions[q->row] + 1;
      q->low = layer->window ? MAX(0, q->total - layer->window) : 0;
      q->high = MAX(q->low, p->length[b] + p->run[q->row]);
      q->scores = p->scores + (t * QUERIES + count) * p->ld_scores;
      if (++count < QUERIES && i + 1 < p->nodes * heads) continue;
      attend(p, b, kv_head, layer, index, queries, count);
      count = 0;
    }
  }
}

/* silu(gate) * up for columns [a, b) of every row. */
static void activate(Pass *p, int64_t a, int64_t b) {
  const Model *m = p->model;
  for (int64_t i = 0; i < p->rows; i++) {
    const float *gate = p->gate + i * m->intermediate, *up = p->up + i * m->intermediate;
    char *to = p->inner + i * p->ld_inner * (m->bf16 ? 2 : 4);
    for (int64_t j = a; j < b; j += 16) {
      const __mmask16 lanes = first_lanes(b - j);
      const __m512 g = _mm512_maskz_loadu_ps(lanes, gate + j), u = _mm512_maskz_loadu_ps(lanes, up + j);
      const __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), g));
      const __m512 y = _mm512_div_ps(_mm512_mul_ps(g, u), _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
      store_as(m->bf16, to, j, lanes, y);
    }
  }
}

static void run_layer(Pass *p, int index, int t, unsigned *phase, const void *next) {
  const Model *m = p->model;
  const Layer *l = &m->layers[index];
  const int is_bf16 = (int)m->bf16, T = p->threads;
  const int64_t H = m->hidden, I = m->intermediate, Q = m->heads * m->dim, KV = m->kv_heads * m->dim, rows = p->rows;
  int64_t a, b, h0, h1, i0, i1;
  share(H, t, T, &h0, &h1), share(I, t, T, &i0, &i1), share(Q + 2 * KV, t, T, &a, &b);
  const void *o = row_of(m, l->o, h0, Q), *gate = row_of(m, l->gate, i0, H), *up = row_of(m, l->up, i0, H);
  const void *down = row_of(m, l->down, h0, I);

  const void *x = norm(p, l->input_norm, t, phase);
  const struct { const void *w; const float *bias; int64_t from, size; } parts[3] = {
      {l->q, l->q_bias, 0, Q}, {l->k, l->k_bias, Q, KV}, {l->v, l->v_bias, Q + KV, KV}};
  for (int i = 0; i < 3; i++) {
    const int64_t from = MAX(a - parts[i].from, 0), to = MIN(b - parts[i].from, parts[i].size);
    const int ends = b <= parts[i].from + parts[i].size;
    if (from < to)
      linear(is_bf16, parts[i].w, H, from, to, x, p->ld_hidden, rows, parts[i].bias, p->qkv + parts[i].from,
             p->qkv_width, 0, ends ? o : parts[i + 1].w);
  }
  barrier(p, phase);
  attention(p, l, index, t);
  barrier(p, phase);
  linear(is_bf16, l->o, Q, h0, h1, p->mixed, p->ld_mixed, rows, l->o_bias, p->residual, H, 1, gate);
  barrier(p, phase);
  x = norm(p, l->mlp_norm, t, phase);
  linear(is_bf16, l->gate, H, i0, i1, x, p->ld_hidden, rows, l->gate_bias, p->gate, I, 0, up);
  linear(is_bf16, l->up, H, i0, i1, x, p->ld_hidden, rows, l->up_bias, p->up, I, 0, down);
  activate(p, i0, i1);
  barrier(p, phase);
  linear(is_bf16, l->down, I, h0, h1, p->inner, p->ld_inner, rows, l->down_bias, p->residual, H, 1, next);
}

/* ------------------------------------------------------------------------------------------------ exports ---------- */

INLINE int64_t padded(int64_t n) { return (n + 31) / 32 * 32 + 32; }
INLINE int64_t aligned(int64_t n) { return (n + 63) / 64 * 64; }

/* Lay the scratch out behind `base`; returns its bytes. */
static int64_t place(Pass *p, char *base) {
  const Model *m = p->model;
  const int64_t bytes = m->bf16 ? 2 : 4, rows = p->rows;
  int64_t at = 0;
  p->ld_hidden = padded(m->hidden), p->ld_mixed = padded(m->heads * m->dim), p->ld_inner = padded(m->intermediate);
  p->ld_scores = padded(p->cache ? p->cache->capacity : 0);
  p->qkv_width = (m->heads + 2 * m->kv_heads) * m->dim;
#define PLACE(FIELD, SIZE) p->FIELD = (void *)(base + at), at += aligned(SIZE)
  PLACE(normed, rows * p->ld_hidden * bytes * (rows <= FEW_ROWS ? p->threads : 1));
  PLACE(qkv, rows * p->qkv_width * 4);
  PLACE(mixed, rows * p->ld_mixed * bytes);
  PLACE(gate, rows * m->intermediate * 4);
  PLACE(up, rows * m->intermediate * 4);
  PLACE(inner, rows * p->ld_inner * bytes);
  PLACE(scores, (int64_t)p->threads * QUERIES * p->ld_scores * 4);
  PLACE(run, rows * 8);
  PLACE(reach, rows * 8);
  return at;
}

/* Bytes of scratch that a pass over `rows` rows needs. cache may be NULL for the head alone. */
int64_t foretoken_scratch(const Model *model, const Cache *cache, int64_t rows, int64_t threads) {
  Pass p = {.model = model, .cache = cache, .rows = rows, .threads = (int)threads};
  return place(&p, 0);
}

static void embed(Pass *p, int64_t i) {
  const Model *m = p->model;
  for (int64_t j = 0; j < m->hidden; j += 16) {
    const __mmask16 lanes = first_lanes(m->hidden - j);
    _mm512_mask_storeu_ps(p->residual + i * m->hidden + j, lanes,
                          load_as((int)m->bf16, m->embedding, p->tokens[i] * m->hidden + j, lanes));
  }
}

static void look(Pass *p, int64_t i) {
  const uint8_t *sees = p->ancestry + i / p->nodes * p->stride_b + i % p->nodes * p->stride_n;
  int64_t run = 0, end = MIN(p->tree_nodes, p->slots[i] - p->length[i / p->nodes] + 1);
  while (run < end && sees[run * p->stride_t]) run++;
  p->run[i] = run, p->reach[i] = end; /* a node sees itself, and nothing behind itself */
}

/* Layers [first, stop) over batch * nodes rows, in place on residual [rows, hidden] (read where first > 0, else embedded
 * from tokens). taps[i] is a layer whose output goes to columns i * hidden of tapped [rows, num_taps * hidden]. logits
 * [rows, vocab] or NULL. Returns 0, or the number of what was out of range: 1 token, 2 slot, 3 position. */
int64_t foretoken_forward(const Model *m, const Cache *cache, int64_t threads, int64_t batch, int64_t nodes,
                          int64_t tree_nodes, const int64_t *tokens, const int64_t *length, const int64_t *slots,
                          const int64_t *positions, const uint8_t *ancestry, int64_t stride_b, int64_t stride_n,
                          int64_t stride_t, int64_t first, int64_t stop, float *residual, const int64_t *taps,
                          int64_t num_taps, float *tapped, float *logits, char *scratch) {
  Pass pass = {.model = m, .cache = cache, .batch = batch, .nodes = nodes, .tree_nodes = tree_nodes,
               .rows = batch * nodes, .tokens = tokens, .length = length, .slots = slots, .positions = positions,
               .ancestry = ancestry, .stride_b = stride_b, .stride_n = stride_n, .stride_t = stride_t,
               .residual = residual, .threads = (int)threads};
  Pass *p = &pass;
  for (int64_t i = 0; i < p->rows && first < stop; i++) {
    if (first == 0 && (tokens[i] < 0 || tokens[i] >= m->vocab)) return 1;
    if (length[i / nodes] < 0 || slots[i] < length[i / nodes] || slots[i] >= cache->capacity) return 2;
    if (positions[i] < length[i / nodes] || positions[i] > slots[i]) return 3;
  }
  place(p, scratch);
#pragma omp parallel num_threads(p->threads)
  {
    const int t = omp_get_thread_num();
    unsigned phase = 0;
    int64_t a, b, v0, v1;
#pragma omp single
    p->threads = omp_get_num_threads(); /* fewer than asked for inside another region */
    share(p->rows, t, p->threads, &a, &b);
    if (first < stop)
      for (int64_t i = a; i < b; i++) {
        if (first == 0) embed(p, i);
        look(p, i);
      }
    barrier(p, &phase);
    share(m->vocab, t, p->threads, &v0, &v1);
    const void *head = logits ? row_of(m, m->head, v0, m->hidden) : residual;
    for (int64_t l = first; l < stop; l++) {
      int64_t q0, q1;
      share((m->heads + 2 * m->kv_heads) * m->dim, t, p->threads, &q0, &q1);
      const int64_t start = MIN(q0, m->heads * m->dim); /* near enough where a thread starts inside k or v */
      run_layer(p, (int)l, t, &phase, l + 1 < stop ? row_of(m, m->layers[l + 1].q, start, m->hidden) : head);
      int64_t h0, h1;
      share(m->hidden, t, p->threads, &h0, &h1);
      for (int64_t i = 0; i < num_taps; i++)
        if (taps[i] == l)
          for (int64_t r = 0; r < p->rows; r++)
            memcpy(tapped + (r * num_taps + i) * m->hidden + h0, residual + r * m->hidden + h0, (h1 - h0) * sizeof(float));
      barrier(p, &phase);
    }
    if (logits) {
      const void *x = norm(p, m->final_norm, t, &phase);
      linear((int)m->bf16, m->head, m->hidden, v0, v1, x, p->ld_hidden, p->rows, 0, logits, m->vocab, 0, residual);
    }
  }
  return 0;
}

/* Copy slots src [rows, count] onto dst in every layer; all of a row's are read before any is written. */
int64_t foretoken_move(const Model *m, const Cache *cache, int64_t count, const int64_t *src, const int64_t *dst) {
  const int64_t bytes = m->dim * (m->bf16 ? 2 : 4);
  for (int64_t i = 0; i < cache->rows * count; i++)
    if (src[i] < 0 || src[i] >= cache->capacity || dst[i] < 0 || dst[i] >= cache->capacity) return 2;
  char *held = malloc(count * bytes + 1);
  if (!held) return 4;
  for (int64_t b = 0; b < cache->rows; b++) {
    const int64_t *from = src + b * count, *to = dst + b * count;
    if (!memcmp(from, to, count * sizeof(int64_t))) continue;
    for (int64_t l = 0; l < 2 * m->num_layers; l++) {
      char *memory = l % 2 ? cache->values[l / 2] : cache->keys[l / 2];
      for (int64_t h = 0; h < m->kv_heads; h++) {
        char *base = memory + (b * m->kv_heads + h) * cache->capacity * bytes;
        for (int64_t i = 0; i < count; i++) memcpy(held + i * bytes, base + from[i] * bytes, bytes);
        for (int64_t i = 0; i < count; i++) memcpy(base + to[i] * bytes, held + i * bytes, bytes);
      }
    }
  }
  free(held);
  return 0;
}

/* Read `bytes` (a multiple of 256 per thread) once with all threads; the result only keeps the reads alive. */
int64_t foretoken_read(const char *memory, int64_t bytes, int64_t threads) {
  int64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(^ : total)
  {
    const int64_t part = bytes / omp_get_num_threads() / 256 * 256;
    const char *from = memory + omp_get_thread_num() * part;
    __m512i x[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t i = 0; i < part; i += 256)
      UNROLL for (int j = 0; j < 4; j++) {
        x[j] = _mm512_xor_si512(x[j], _mm512_loadu_si512(from + i + 64 * j));
        _mm_prefetch(from + i + 64 * j + 16384, _MM_HINT_T1);
      }
    x[0] = _mm512_xor_si512(_mm512_xor_si512(x[0], x[1]), _mm512_xor_si512(x[2], x[3]));
    total ^= _mm512_reduce_or_epi64(x[0]);
  }
  return total;
}
