/* Products with the matrices of one format, the number -DPRODUCT of common.h: a library of its own for each, since a model
 * needs one to three of them, and each takes a third of the time of all that native.c compiles. */
#include "product.h"

#if PRODUCT == 0 /* F32 */
#include "tiles.h"
DEFINE_LINEAR(float)
#elif PRODUCT == 1 /* BF16 */
#include "amx_bf16.h"
#include "tiles.h"
#if !AMX && defined(__AVX512BF16__)
DEFINE_LINEAR(bf16)
#elif !AMX && defined(__AVX512F__)
#include "linear_wide.h"
#elif !AMX
#include "linear_halves.h"
#endif
#else
#include "amx_quant.h"
#include "tiles_quant.h"
#endif

static void product(const Matrix *w, int64_t a, int64_t b, const void *x, int64_t ldx, int64_t rows, const float *bias,
                    float *out, int64_t ldo, int add, const void *next) {
#if PRODUCT == 0
  linear_float(w->data, w->columns, a, b, x, ldx, rows, bias, out, ldo, add, next);
#elif PRODUCT == 1 && AMX
  linear_bf16_amx(w->data, w->columns, a, b, x, ldx, rows, bias, out, ldo, add, next);
#elif PRODUCT == 1
  linear_bf16(w->data, w->columns, a, b, x, ldx, rows, bias, out, ldo, add, next);
#else
#if AMX
  if (amx_takes(PRODUCT, rows)) {
    linear_quant_amx(w, a, b, x, rows, bias, out, ldo, add, next);
    return;
  }
#endif
  linear_quant(w, a, b, x, rows, bias, out, ldo, add, next);
#endif
}

const Product foretell_products = {product, &l2_rows, &amx_rows};
