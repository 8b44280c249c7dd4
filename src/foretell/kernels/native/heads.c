/* Drafters' heads: a library of its own, which only they need. Layers and products are those of native.c. */
#include "core.h"
#include "threads.h"

static const Core *core;
static const Product *const *products;
#define attend core->attend
#define remember core->remember
#define project core->project
#define settle core->settle
#define attention_part core->attention_part
#define feed_part core->feed_part

#include "block.h"
#include "blocks.h"
#include "flash.h"
#include "pair_tree.h"

/* Before any other call: the ``foretell_core`` of native.c. */
int64_t foretell_open_heads(const Core *from) {
  core = from, products = from->products;
  return 0;
}
