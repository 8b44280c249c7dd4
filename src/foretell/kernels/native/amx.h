/* AMX: eight registers of up to 16 rows of 64 bytes, and what multiplies them.
 *
 * Written as instructions: the intrinsics of some compilers do not say that they read memory. A tile's number must be a
 * constant, so functions that use one are instantiated for each set of numbers. What a configuration holds is one thread's;
 * it is released behind each product, since a thread that holds tiles costs the system more when it is switched.
 */
#ifndef FORETELL_AMX_H
#define FORETELL_AMX_H
#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define AMX 1

typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileConfig;

INLINE TileConfig tile_config(void) { return (TileConfig){.palette = 1}; }
INLINE void tile_shape(TileConfig *c, int tile, int64_t rows, int64_t row_bytes) {
  c->rows[tile] = (uint8_t)rows, c->row_bytes[tile] = (uint16_t)(rows ? row_bytes : 0);
}
INLINE void tiles_configure(const TileConfig *c) { __asm__ volatile("ldtilecfg %0" : : "m"(*c)); }
INLINE void tiles_release(void) { __asm__ volatile("tilerelease"); }

#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm%c0" : : "i"(t))
#define TILE_LOAD(t, p, stride)                                                                                        \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"((const void *)(p)), "r"((int64_t)(stride)), "i"(t) : "memory")
#define TILE_STORE(t, p, stride)                                                                                       \
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"((void *)(p)), "r"((int64_t)(stride)), "i"(t) : "memory")
/* acc += a [rows, k] times b [k, columns]: four int8 of k, or two bf16, stand together in b. */
#define TILE_DOT_INT8(acc, a, b) __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(acc), "i"(a), "i"(b))
#define TILE_DOT_BF16(acc, a, b) __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(acc), "i"(a), "i"(b))

#else
#define AMX 0
#endif

#endif
