/* The calls of OpenMP that regions make, declared here: Apple's compilers bring no omp.h. The process has loaded a runtime. */
#ifndef FORETELL_THREADS_H
#define FORETELL_THREADS_H

#ifdef _WIN32 /* where a library is linked with all that it calls, and torch's runtime has none of GCC's calls */
#include "pool.c"
#else
int omp_get_thread_num(void);
int omp_get_num_threads(void);
#endif

#endif
