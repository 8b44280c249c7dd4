/* The calls of OpenMP that regions make, declared here: Apple's compilers bring no omp.h. The process has loaded a runtime. */
#ifndef FORETELL_THREADS_H
#define FORETELL_THREADS_H

int omp_get_thread_num(void);
int omp_get_num_threads(void);

#endif
