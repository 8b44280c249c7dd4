/* The Llama family's pass as one call: no torch headers, no packing, any number of rows, one order of sums.
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
 *  - Attention. What a node sees, ordered by position, is cut at multiples of SEGMENT; each segment makes a state and states
 *    are joined in order (attention.h): the same token after the same text gives the same bits in any tree, at any slot, in
 *    any batch, and threads can share a row's segments. Of rows with a common beginning one's slots are read for all.
 *
 *  - Libraries. Products are compiled for each format of weights apart (product.c), and drafters' heads too (heads.c): a
 *    model waits for what it needs. One indirect call a product and thread leads there.
 *
 *  - Quantised weights stay packed: see quant.h. Activations are rounded to int8 where such a matrix reads them.
 *
 *  - AMX. Built for it, bf16 matrices are multiplied by it at every number of rows (amx_bf16.h: an order of sums of its own),
 *    quantised ones where it is faster, with the same bits (amx_quant.h).
 *
 * Other weights and K, V are float or bf16; residual stream, scores and sums are float.
 */
#include "core.h"
#include "threads.h"

#include <stdio.h>

/* By format: what foretell_use has been given. Until then a product ends the process with a word, and not somewhere. */
static void missing(const Matrix *w, int64_t a, int64_t b, const void *x, int64_t ldx, int64_t rows, const float *bias,
                    float *out, int64_t ldo, int add, const void *next) {
  fprintf(stderr, "foretell: products of format %d are not loaded\n", (int)w->format);
  abort();
}
static int64_t no_setting;
static const Product MISSING = {missing, &no_setting, &no_setting};
static const Product *products[NUM_FORMATS] = {[0 ... NUM_FORMATS - 1] = &MISSING};

#include "ahead.h"
#include "layers.h"
#include "pack.h"
#include "place.h"

/* Bytes of scratch that a pass over `rows` nodes of `batch` rows needs. cache may be NULL for the head alone. */
int64_t foretell_scratch(const Model *model, const Cache *cache, int64_t batch, int64_t rows, int64_t threads) {
  Pass p = {.model = model, .cache = cache, .batch = batch, .rows = rows, .threads = (int)threads};
  return place(&p, 0);
}

/* The pass's rows leave the plan's padding out: they stand at the front of what is laid out as the plan, and move to their
 * places there at its end, last first. Columns [a, b) of x [batch * nodes, ld]. */
static void spread(const Pass *p, float *x, int64_t ld, int64_t a, int64_t b) {
  for (int64_t i = p->rows - 1; i >= 0 && place_of(p, i) != i; i--)
    memcpy(x + place_of(p, i) * ld + a, x + i * ld + a, (b - a) * sizeof(float));
}

/* Layers [first, stop) over a plan's nodes, in place on residual [batch * nodes, hidden] (read where first > 0, else embedded
 * from tokens). real [num_real]: which of these are no padding (Plan.real), or NULL; what is written of padding is not said.
 * known: [batch] nodes of each row that are a line of text (Plan.known), or NULL. taps[i] is a layer whose output goes to
 * columns i * hidden of tapped [batch * nodes, num_taps * hidden]. logits [batch * nodes, vocab] or NULL. Returns 0, or the
 * number of what was out of range: 1 token, 2 slot or node, 3 position; 6 a mixer's state that the pass goes on from; 7 the
 * room for its terms; 8 an adapter of a model without; 9 an expert that could not be read. loras: Pass.loras; shared: see find_groups, or NULL. */
int64_t foretell_forward(const Model *m, const Cache *cache, int64_t threads, int64_t batch, int64_t nodes,
                          int64_t tree_nodes, const int64_t *tokens, const int64_t *length, const int64_t *slots,
                          const int64_t *positions, const uint8_t *ancestry, int64_t stride_b, int64_t stride_n,
                          int64_t stride_t, const int64_t *real, int64_t num_real, const int64_t *known, int64_t first,
                          int64_t stop, float *residual, const int64_t *taps, int64_t num_taps, float *tapped, float *logits, char *scratch, const int64_t *loras,
                          const int64_t *shared) {
  Pass pass = {.model = m, .cache = cache, .batch = batch, .nodes = nodes, .tree_nodes = tree_nodes,
               .rows = real ? num_real : batch * nodes, .length = length,
               .ancestry = ancestry, .stride_b = stride_b, .stride_n = stride_n, .stride_t = stride_t,
               .residual = residual, .loras = loras, .threads = (int)threads};
  Pass *p = &pass;
  place(p, scratch);
  if (number_rows(p, real)) return 2;
  for (int64_t i = 0; i < p->rows && first < stop; i++) {
    const int64_t b = p->owner[i], at = place_of(p, i);
    if (first == 0 && (tokens[at] < 0 || tokens[at] >= m->vocab)) return 1;
    if (length[b] < 0 || slots[at] < length[b] || slots[at] >= cache->capacity) return 2;
    if (loras && loras[b] && !m->low_rank) return 8;
    if (positions[at] < length[b] || positions[at] > slots[at]) return 3;
    if (first == 0) ((int64_t *)p->tokens)[i] = tokens[at];
    else if (at != i) memcpy(residual + i * m->hidden, residual + at * m->hidden, m->hidden * sizeof(float));
    ((int64_t *)p->slots)[i] = slots[at], ((int64_t *)p->positions)[i] = positions[at];
  }
  if (first < stop && shared && find_groups(p, shared)) return 2;
  const int mixes = first < stop && cache->states;
  if (mixes) {
    const int64_t problem = find_all_parents(p, known, first, stop);
    if (problem) return problem;
  }
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
        if (first == 0) embed_row(m, p->tokens[i], p->residual + i * m->hidden);
        look(p, i);
      }
    barrier(p, &phase);
    share_rows(&m->head, m->vocab, t, p->threads, &v0, &v1);
    const void *head = logits ? row_of(&m->head, v0) : residual;
    for (int64_t l = first; l < stop; l++) {
      run_layer(p, (int)l, t, &phase, l + 1 < stop ? layer_start(m, &m->layers[l + 1], t, p->threads) : head);
      int64_t h0, h1;
      share_outputs(m, &m->layers[l], t, p->threads, &h0, &h1);
      for (int64_t i = 0; i < num_taps; i++)
        if (taps[i] == l)
          for (int64_t r = 0; r < p->rows; r++)
            memcpy(tapped + (place_of(p, r) * num_taps + i) * m->hidden + h0, residual + r * m->hidden + h0, (h1 - h0) * sizeof(float));
      barrier(p, &phase);
    }
    if (logits) {
      const Input x = norm(p, reads(&m->head), m->final_norm, t, &phase);
      linear(&m->head, v0, v1, input_of(&x, &m->head), p->ld_hidden, p->rows, 0, logits, m->vocab, 0, residual);
      finish_logits(m, logits, m->vocab, p->rows, v0, v1);
      spread(p, logits, m->vocab, v0, v1);
    }
  }
  if (m->disk && m->disk->failed) return 9;
  spread(p, residual, m->hidden, 0, m->hidden);
  if (mixes) settle_states(p, first, stop);
  return 0;
}

/* foretell_walk of race.c. */
typedef void Walk(int64_t num_rows, int64_t num_nodes, int64_t vocab_size, const float *logits, int64_t by_row,
                  int64_t by_node, const void *warps, const uint64_t *table, const int64_t *tokens, int64_t tokens_by_row,
                  const int64_t *parents, int64_t parents_by_row, const int64_t *seeds, const int64_t *positions,
                  int64_t stream, int64_t *out);

/* Up to `most` passes of plain decoding, each over one token a row, which `walk` draws from the logits of the pass before:
 * tokens and length [most, batch], of which the caller writes the first rows. The pass whose draws are not all decided, or
 * among whose draws is one of `ends`, is the last: drawn [batch, 3] is what was drawn after it, as walk writes it. tapped
 * [most, batch, num_taps, dim]: outputs of the layers `taps` in each pass. Returns how many were made, or what was out of
 * range, negative. columns: of the logits, that are drawn from. */
int64_t foretell_decode(const Model *m, const Cache *cache, int64_t threads, int64_t batch, int64_t most, int64_t *tokens,
                         int64_t *length, Walk *walk, const void *warps, const uint64_t *table, int64_t columns,
                         const int64_t *seeds, int64_t stream, const int64_t *ends, int64_t num_ends, int64_t *drawn,
                         const int64_t *taps, int64_t num_taps, float *tapped, float *residual, float *logits,
                         char *scratch, const int64_t *loras, const int64_t *shared) {
  static const uint8_t itself = 1;
  for (int64_t made = 1;; made++, tokens += batch, length += batch) {
    const int64_t problem = foretell_forward(m, cache, threads, batch, 1, 1, tokens, length, length, length, &itself, 0, 0,
                                              0, NULL, 0, NULL, 0, m->num_layers, residual, taps, num_taps, tapped, logits,
                                              scratch, loras, shared);
    if (problem) return -problem;
    walk(batch, 1, columns, logits, m->vocab, m->vocab, warps, table, tokens, 1, tokens, 1, seeds, length, stream, drawn);
    int is_last = made == most;
    for (int64_t b = 0; b < batch; b++) {
      is_last |= !drawn[3 * b];
      for (int64_t i = 0; i < num_ends; i++) is_last |= drawn[3 * b + 1] == ends[i];
    }
    if (is_last) return made;
    if (num_taps) tapped += batch * num_taps * m->hidden;
    for (int64_t b = 0; b < batch; b++) {
      tokens[batch + b] = drawn[3 * b + 1];
      length[batch + b] = length[b] + 1;
    }
  }
}

/* out [rows, ldo] = the first `size` rows of w times x [rows, columns], both float. 0, or 4 where there is no memory, or 5
 * where the products of its format are not loaded. */
int64_t foretell_product(const Matrix *w, int64_t size, const float *x, int64_t rows, float *out, int64_t ldo,
                          int64_t threads) {
  if (products[w->format] == &MISSING) return 5;
  const int64_t n = w->columns, ld = padded(n), stride = block_stride(rows);
  char *memory = malloc(aligned(is_quantised(w) ? blocks_bytes(n, rows) : rows * ld * 4) + 64);
  if (!memory) return 4;
  char *made = memory + (64 - (uintptr_t)memory % 64); /* Windows has no aligned_alloc */
  for (int64_t i = 0; i < rows; i++) {
    if (is_quantised(w)) {
      quantise_row(x + i * n, n, (Block *)made + i, stride);
      quantise_padding(n, (Block *)made + i, stride);
    } else {
      const int to_bf16 = w->format == BF16;
      for (int64_t k = 0; k < n; k += 16)
        store_as(to_bf16, made + i * ld * (to_bf16 ? 2 : 4), k, first_lanes(n - k),
                 v_load_some(first_lanes(n - k), x + i * n + k));
    }
  }
#pragma omp parallel num_threads(threads)
  {
    int64_t a, b;
    share_rows(w, size, omp_get_thread_num(), omp_get_num_threads(), &a, &b);
    if (a < b) linear(w, a, b, made, ld, rows, 0, out, ldo, 0, row_of(w, a));
  }
  free(memory);
  return 0;
}

/* The head's products [rows, vocab] become logits, in place. */
int64_t foretell_finish(const Model *m, float *products, int64_t rows) {
  finish_logits(m, products, m->vocab, rows, 0, m->vocab);
  return 0;
}

/* out [count, columns] = rows of w as floats. */
int64_t foretell_rows(const Matrix *w, const int64_t *rows, int64_t count, float *out) {
  for (int64_t i = 0; i < count; i++) read_row(w, rows[i], out + i * w->columns);
  return 0;
}

/* See pack_rows. One thread's work: callers divide the rows. */
int64_t foretell_pack(int64_t format, int64_t kind, const uint8_t *rows, int64_t count, int64_t columns,
                       int64_t row_bytes, const int8_t *grid, char *out) {
  pack_rows(format, kind, rows, count, columns, row_bytes, grid, out);
  return 0;
}

/* Copy slots src [rows, count] onto dst in every layer, of mixers their terms; all of a row's are read before any is
 * written. */
int64_t foretell_move(const Model *m, const Cache *cache, int64_t count, const int64_t *src, const int64_t *dst) {
  const int64_t bytes = slot_bytes(m, cache);
  int64_t held_bytes = bytes;
  for (int64_t l = 0; cache->states && l < m->num_layers; l++)
    if (m->layers[l].mixer) held_bytes = MAX(held_bytes, m->layers[l].mixer->held * (int64_t)sizeof(float));
  for (int64_t i = 0; i < cache->rows * count; i++)
    if (src[i] < 0 || src[i] >= cache->capacity || dst[i] < 0 || dst[i] >= cache->capacity) return 2;
  char *held = malloc(count * held_bytes + 1);
  if (!held) return 4;
  for (int64_t b = 0; b < cache->rows; b++) {
    const int64_t *from = src + b * count, *to = dst + b * count;
    if (!memcmp(from, to, count * sizeof(int64_t))) continue;
    for (int64_t l = 0; l < 2 * m->num_layers; l++) {
      char *memory = l % 2 ? cache->values[l / 2] : cache->keys[l / 2];
      if (!m->layers[l / 2].q.data || (m->rank && l % 2)) continue;
      for (int64_t h = 0; h < m->kv_heads; h++) {
        char *base = memory + (b * m->kv_heads + h) * cache->capacity * bytes;
        for (int64_t i = 0; i < count; i++) memcpy(held + i * bytes, base + from[i] * bytes, bytes);
        for (int64_t i = 0; i < count; i++) memcpy(base + to[i] * bytes, held + i * bytes, bytes);
      }
    }
    for (int64_t l = 0; cache->states && l < m->num_layers; l++)
      if (m->layers[l].mixer) move_terms(m->layers[l].mixer, &cache->states[l], b, count, from, to, (float *)held);
  }
  free(held);
  return 0;
}

/* Use these products for matrices of a format, with the settings of now; before any call that reads such a matrix. */
int64_t foretell_use(int64_t format, const Product *product) {
  *product->l2_rows = l2_rows, *product->amx_rows = amx_rows;
  products[format] = product;
  return 0;
}

const Core foretell_core = {products, attend, remember, project, settle, attention_part, feed_part};

/* Let passes over so many rows or more use AMX for quantised matrices (0: none; -1: where it is faster). Returns what it
 * was, -2 where this library was built without. */
int64_t foretell_amx_rows(int64_t rows) {
  const int64_t before = amx_rows;
  if (!AMX) return -2;
  amx_rows = rows;
  for (int i = 0; i < NUM_FORMATS; i++) *products[i]->amx_rows = rows;
  return before;
}

/* Fetch weights into L2 for tiles of that many rows or more (0: leave it). Returns what it was. */
int64_t foretell_l2_rows(int64_t rows) {
  const int64_t before = l2_rows;
  if (rows <= 0) return before;
  l2_rows = rows;
  for (int i = 0; i < NUM_FORMATS; i++) *products[i]->l2_rows = rows;
  return before;
}

/* Read `bytes` (a multiple of 256 per thread) once with all threads; the result only keeps the reads alive. */
int64_t foretell_read(const char *memory, int64_t bytes, int64_t threads) {
  int64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(^ : total)
  {
    const int64_t part = bytes / omp_get_num_threads() / 256 * 256;
    const char *from = memory + omp_get_thread_num() * part;
    uint64_t x[32] = {0};
    for (int64_t i = 0; i < part; i += 256) {
      const uint64_t *read = (const uint64_t *)(from + i);
      UNROLL for (int j = 0; j < 4; j++) prefetch(from + i + 64 * j + 16384);
      for (int j = 0; j < 32; j++) x[j] ^= read[j];
    }
    for (int j = 0; j < 32; j++) total ^= (int64_t)x[j];
  }
  return total;
}
