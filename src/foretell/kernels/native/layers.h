/* A layer of a model: mixer, attention or both, then MLP or mixture. */
#ifndef FORETELL_LAYERS_H
#define FORETELL_LAYERS_H
#include "experts.h"
#include "mixer.h"

/* What thread t reads first of a layer's attention, and of its MLP or mixture. */
INLINE const void *attention_start(const Model *m, const Layer *l, int t, int threads) {
  int64_t a, b;
  share_rows(&l->q, first_width(m), t, threads, &a, &b);
  return row_of(&l->q, MIN(a, query_width(m))); /* near enough where a thread starts inside k or v */
}
INLINE const void *mlp_start(const Model *m, const Layer *l, int t, int threads) {
  int64_t a, b;
  if (l->experts) return experts_start(l->experts, t, threads);
  share_inner(l, m->intermediate, t, threads, &a, &b);
  return row_of(l->gate.data ? &l->gate : &l->up, a);
}
INLINE const void *layer_start(const Model *m, const Layer *l, int t, int threads) {
  int64_t a, b;
  if (!l->mixer) return l->q.data ? attention_start(m, l, t, threads) : mlp_start(m, l, t, threads);
  share_rows(&l->mixer->in[0], l->mixer->sizes[0], t, threads, &a, &b);
  return row_of(&l->mixer->in[0], a);
}

/* Which columns of what the layer returns last are thread t's. */
INLINE void share_outputs(const Model *m, const Layer *l, int t, int threads, int64_t *a, int64_t *b) {
  if (l->experts) share_down(m, l->experts, t, threads, a, b);
  else share_rows(l->down.data && !m->parallel ? &l->down : l->q.data ? &l->o : &l->mixer->out, m->hidden, t, threads, a, b);
}

/* A layer's MLP or mixture. */
static void feed_part(Pass *p, int index, int t, unsigned *phase, const void *next) {
  const Layer *l = &p->model->layers[index];
  if (l->experts) experts_part(p, l, t, phase, next);
  else mlp_part(p, index, t, phase, 0, next);
}

static void run_layer(Pass *p, int index, int t, unsigned *phase, const void *next) {
  const Model *m = p->model;
  const Layer *l = &m->layers[index];
  const int has_mlp = l->experts || l->down.data;
  const void *mlp = has_mlp ? mlp_start(m, l, t, p->threads) : next;
  int wanted = 0;
  for (int i = 0; l->mixer && i < l->mixer->parts; i++) wanted |= reads(&l->mixer->in[i]);
  if (l->q.data) wanted |= attention_reads(m, l) | (p->loras ? PLAIN : 0);
  if (m->parallel) wanted |= mlp_reads(p, l);
  if (wanted) {
    const Input x = norm(p, wanted, l->input_norm, t, phase);
    if (l->mixer)
      mixer_part(p, index, t, phase, x, p->ld_hidden, l->q.data ? attention_start(m, l, t, p->threads) : mlp);
    if (m->parallel) /* first, for attention writes its blocks where those of the norm are */
      mlp_part(p, index, t, phase, &x, attention_start(m, l, t, p->threads)), barrier(p, phase);
    if (l->q.data) attention_part(p, index, t, phase, x, p->ld_hidden, mlp);
  }
  if (has_mlp && !m->parallel) feed_part(p, index, t, phase, next);
}

#endif
