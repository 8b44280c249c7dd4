/* Draws by the inverse of a cumulative sum: sampling.invert_cdf bit for bit, without writing the sums.
 *
 * The sums are added one after the other in double, as torch's cumsum adds them; some are kept, so that the second look
 * reads one stretch of the row. This file includes itself once for each type of distribution.
 */
#ifndef REAL
#include <stdint.h>

#define STRETCHES 512
#define JOIN(name, type) name##_##type
#define NAMED(name, type) JOIN(name, type)

#define REAL float
#include "cdf.c"
#undef REAL
#define REAL double
#include "cdf.c"
#undef REAL

#else

/* winners[row] = the first token at which the sum of distribution exceeds uniform[row] of the total; the last one where none does. */
void NAMED(foretell_invert_cdf, REAL)(int64_t num_rows, int64_t vocab_size, const REAL *probs, const double *uniform,
                                       int64_t *winners) {
    double reached[STRETCHES];
    const int64_t step = (vocab_size + STRETCHES - 1) / STRETCHES;
    for (int64_t row = 0; row < num_rows; ++row, probs += vocab_size) {
        double sum = 0;
        for (int64_t from = 0, k = 0; from < vocab_size; from += step, ++k) {
            const int64_t stop = vocab_size - from < step ? vocab_size : from + step;
            for (int64_t i = from; i < stop; ++i) sum += (double)probs[i];
            reached[k] = sum;
        }
        const double point = uniform[row] * sum;
        winners[row] = vocab_size - 1;
        sum = 0;
        for (int64_t from = 0, k = 0; from < vocab_size; from += step, ++k) {
            if (!(reached[k] > point)) { sum = reached[k]; continue; }
            for (int64_t i = from; i < vocab_size; ++i) {
                sum += (double)probs[i];
                if (sum > point) { winners[row] = i; break; }
            }
            break;
        }
    }
}
#endif
