/* Experts that stay in files: some of each layer are held in memory, in frames, and the others are read when a router names
 * them.
 *
 *  - What is held. Every layer has the same number of frames, for the layers of a pass come one after the other: with frames for
 *    all of them together, what was used longest ago would be what is needed next. A frame's expert gives way whose score is
 *    least: each use counts 1, and half as much HALF_LIFE passes later (LRFU, Lee et al. 2001). So one that is used often
 *    stays while others pass.
 *  - Waves. A pass may need more experts than there are frames. Then those that are held come first, with as many of the
 *    others as find a frame, and the rest follow. What an expert returns depends on its row alone, and a row adds up its
 *    experts in the order of their choice behind the last wave (experts.h): no bit depends on what was held.
 *  - Reading. The system is asked at once for all that a layer needs (so the disk may order its reads), and the pass's
 *    threads copy and pack them piece by piece, as pack.h does when a model is loaded. Files are read and not mapped: a read
 *    that fails is an error of this pass, where a page that is missing would end the process.
 *  - Looking ahead. The next layer's router, on what this layer's router reads, names likely experts, for which the system
 *    is asked while this layer computes; not where fewer than half of those that were named came to be used. */
#ifndef FORETELL_STORE_H
#define FORETELL_STORE_H
#include <errno.h>
#include <time.h>
#ifndef _WIN32
#include <fcntl.h>
#include <unistd.h>
#endif

#include "pack.h"
#include "pass.h"

enum { HALF_LIFE = 64, ENOUGH_NAMED = 64 };

/* 0, the number of the error, or -1: the file ends before. */
static int64_t read_at(int64_t file, char *to, int64_t bytes, int64_t at) {
#ifdef _WIN32
  return ENOSYS;
#else
  while (bytes > 0) {
    const ssize_t count = pread((int)file, to, (size_t)bytes, (off_t)at);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : -1;
    to += count, at += count, bytes -= count;
  }
  return 0;
#endif
}

/* Let the system read so far into its own memory what will be wanted soon; returns at once. */
static void ask_for(int64_t file, int64_t at, int64_t bytes) {
#if defined(POSIX_FADV_WILLNEED)
  posix_fadvise((int)file, (off_t)at, (off_t)bytes, POSIX_FADV_WILLNEED);
#elif defined(F_RDADVISE)
  struct radvisory range = {(off_t)at, (int)bytes};
  fcntl((int)file, F_RDADVISE, &range);
#endif
}

static int64_t now_ns(void) {
  struct timespec now;
  timespec_get(&now, TIME_UTC);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

INLINE Matrix *part_of(const Experts *x, int64_t e, int k) {
  Expert *w = (Expert *)&x->each[e];
  return k == 0 ? &w->gate : k == 1 ? &w->up : &w->down;
}
INLINE int64_t pieces_of(const Stored *part) { return part->rows ? (part->rows + part->step - 1) / part->step : 0; }

/* Ask for all bytes of an expert; returns their number. */
static int64_t ask_for_expert(const Store *s, int64_t e) {
  int64_t bytes = 0;
  for (int k = 0; k < 3; k++) {
    const int64_t *place = s->places + (3 * e + k) * 2, size = s->parts[k].rows * s->parts[k].row_bytes;
    if (size) ask_for(place[0], place[1], size), bytes += size;
  }
  return bytes;
}

INLINE float score_now(const Store *s, int64_t e) { /* halved by HALF_LIFE passes, in a line between */
  const int64_t age = s->pass - s->last[e];
  return s->score[e] / (float)(1 << MIN(30, age / HALF_LIFE)) * (1.0f - 0.5f * (float)(age % HALF_LIFE) / (float)HALF_LIFE);
}

/* The frame that can be had most cheaply: an empty one, or whose expert has the least score of those that are not `here`; of
 * equal ones that with the oldest use. -1: there is none. */
static int64_t free_frame(const Store *s, const uint8_t *here) {
  int64_t best = -1;
  for (int64_t i = 0; i < s->frames; i++) {
    const int32_t e = s->held[i];
    if (e < 0) return i;
    if (here[e]) continue;
    const float own = score_now(s, e), least = best < 0 ? 0.0f : score_now(s, s->held[best]);
    if (best < 0 || own < least || (own == least && s->last[e] < s->last[s->held[best]])) best = i;
  }
  return best;
}

/* All experts that rows have chosen are due: the beginning of waves. */
static void begin_waves(Pass *p, const Experts *x) {
  Store *s = x->store;
  Disk *d = p->model->disk;
  s->pass++;
  for (int64_t e = 0; e < x->count + x->shared; e++) {
    p->due[e] = p->begin[e] < p->begin[e + 1];
    if (e >= x->count) continue;
    if (p->due[e]) {
      s->score[e] = score_now(s, e) + 1.0f, s->last[e] = s->pass;
      if (s->frame[e] >= 0) d->hits++;
      else d->misses++, d->bytes += ask_for_expert(s, e);
      d->used += s->foreseen[e];
    }
    s->foreseen[e] = 0;
  }
}

/* The experts of the next wave, those of them that are to be read, and the frame of each. One that was used less than what it
 * would displace waits for the next wave, where this one reads a few: it then displaces one of these. */
static void plan_wave(Pass *p, const Experts *x) {
  Store *s = x->store;
  const int64_t n = x->count + x->shared, few = MAX(1, s->frames / 4);
  for (int64_t e = 0; e < n; e++) p->here[e] = p->due[e] && (e >= x->count || s->frame[e] >= 0);
  p->num_loads = p->num_due = 0;
  for (int64_t e = 0; e < x->count; e++) {
    if (!p->due[e] || p->here[e]) continue;
    const int64_t to = free_frame(s, p->here), was = to < 0 ? -1 : s->held[to];
    p->num_due++;
    if (to < 0 || (was >= 0 && p->num_loads >= few && score_now(s, was) > score_now(s, e))) continue;
    p->num_due--;
    if (was >= 0) s->frame[was] = -1;
    s->held[to] = (int32_t)e, s->frame[e] = (int32_t)to, p->here[e] = 1;
    for (int k = 0; k < 3; k++) part_of(x, e, k)->data = s->memory + to * s->frame_bytes + s->parts[k].at;
    p->loads[p->num_loads++] = (int32_t)e;
  }
  for (int64_t e = 0; e < n; e++) p->due[e] = p->due[e] && !p->here[e];
  atomic_store(&p->model->disk->next, 0);
}

/* Read some rows of a matrix of expert e to where they belong. */
static int64_t load_piece(const Experts *x, int64_t e, int k, int64_t piece, char *room) {
  const Stored *part = &x->store->parts[k];
  const Matrix *w = part_of(x, e, k);
  const int64_t *place = x->store->places + (3 * e + k) * 2, row = piece * part->step, count = MIN(part->step, part->rows - row);
  char *to = (char *)w->data + row * w->row_bytes;
  const int is_same = !is_quantised(w) && part->row_bytes == w->row_bytes;
  const int64_t failed = read_at(place[0], is_same ? to : room, count * part->row_bytes, place[1] + row * part->row_bytes);
  if (failed || is_same) return failed;
  if (is_quantised(w))
    pack_rows(w->format, part->kind, (const uint8_t *)room, count, w->columns, part->row_bytes, part->grid, to);
  for (int64_t i = 0; i < count && !is_quantised(w); i++)
    for (int64_t j = 0; j < w->columns; j++)
      ((float *)(to + i * w->row_bytes))[j] = float_at(part->kind, (const uint8_t *)room + i * part->row_bytes, j);
  return 0;
}

/* Let the system read the experts that the next layer's router names for what this one's has read. */
static void look_ahead(Pass *p, const Experts *next, void choose(const Experts *, float *, int32_t *, float *)) {
  Disk *d = p->model->disk;
  Store *s = next->store;
  int32_t expert[MAX_EXPERTS + 1];
  float weight[MAX_EXPERTS + 1];
  const int asks = d->named < ENOUGH_NAMED || 2 * d->used >= d->named;
  for (int64_t i = 0; i < p->rows; i++) {
    choose(next, p->ahead + i * p->ld_route, expert, weight);
    for (int64_t k = 0; k < next->top; k++) {
      const int32_t e = expert[k];
      if (s->frame[e] >= 0 || s->foreseen[e]) continue;
      s->foreseen[e] = 1, d->named++;
      if (asks) d->bytes_ahead += ask_for_expert(s, e);
    }
  }
}

/* The next wave: all threads return when its weights are there, with how many experts are due after it. */
static int64_t next_wave(Pass *p, const Experts *x, int t, unsigned *phase) {
  Disk *d = p->model->disk;
  const Stored *parts = x->store->parts;
  const int64_t each = pieces_of(&parts[0]) + pieces_of(&parts[1]) + pieces_of(&parts[2]);
  barrier(p, phase); /* weights that give way have been read */
  const int64_t begun = t == 0 ? now_ns() : 0;
  if (t == 0) plan_wave(p, x);
  barrier(p, phase);
  if (!p->num_loads) return p->num_due;
  for (int64_t at; (at = atomic_fetch_add(&d->next, 1)) < p->num_loads * each;) {
    int64_t piece = at % each, failed = 0;
    int k = 0;
    while (piece >= pieces_of(&parts[k])) piece -= pieces_of(&parts[k++]);
    if (!d->failed) failed = load_piece(x, p->loads[at / each], k, piece, p->reading + t * aligned(d->reading));
    if (failed) d->failed = failed; /* whichever comes last: what was computed counts for nothing */
  }
  barrier(p, phase);
  if (t == 0) d->waited_ns += now_ns() - begun;
  return p->num_due;
}

#endif
