/* Threads for processes that have no OpenMP runtime: the calls that compilers make for the regions of native.c and heads.c,
 * GCC's (GOMP_...) and Clang's (__kmpc_...), over pthreads. A region's work does not depend on how many threads it gets.
 *
 * One region has threads at a time: one that begins meanwhile, or within another, is run by its caller alone. */
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 256, MOST_SHARED = 32, SPINS = 2000 };
enum { STACK = 8 << 20 }; /* macOS gives threads half a MiB */

static _Thread_local int own, size = 1, wanted; /* number within the region, its threads, and those asked for */

typedef void Gcc(void *);
typedef void Clang(int32_t *, int32_t *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *,
                   void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *,
                   void *, void *, void *, void *, void *, void *, void *, void *);

static struct {
  pthread_mutex_t busy, lock, one; /* a region runs; the workers' sleep; reductions */
  pthread_cond_t wake;
  _Atomic uint64_t region; /* regions so far times 4096, and the threads of the newest */
  atomic_int left, arrived;
  atomic_uint phase;
  int workers;
  uint64_t seen[MOST]; /* the region before a worker's first one */
  Gcc *gcc;
  Clang *clang;
  void **shared;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .one = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static void run(Gcc *gcc, Clang *clang, void **s) {
  int32_t number = own;
  if (gcc) gcc(s[0]);
  else /* what it does not take is not read */
    clang(&number, &number, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13], s[14],
          s[15], s[16], s[17], s[18], s[19], s[20], s[21], s[22], s[23], s[24], s[25], s[26], s[27], s[28], s[29], s[30],
          s[31]);
}

static uint64_t next_region(uint64_t seen) {
  for (int i = 0; i < SPINS; i++)
    if (pool.region != seen) return pool.region;
  pthread_mutex_lock(&pool.lock);
  while (pool.region == seen) pthread_cond_wait(&pool.wake, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
  return pool.region;
}

static void *work(void *number) {
  const int t = (int)(intptr_t)number;
  for (uint64_t seen = pool.seen[t];;) {
    seen = next_region(seen);
    if (t >= (int)(seen % 4096)) continue;
    own = t, size = (int)(seen % 4096);
    run(pool.gcc, pool.clang, pool.shared);
    atomic_fetch_sub(&pool.left, 1);
  }
  return 0;
}

/* A child has the thread that forked, and no other. */
static void forget(void) {
  pthread_mutex_init(&pool.busy, 0), pthread_mutex_init(&pool.lock, 0), pthread_mutex_init(&pool.one, 0);
  pthread_cond_init(&pool.wake, 0);
  pool.left = pool.arrived = pool.workers = 0;
}

/* How many threads there are now, at most those that are wanted. */
static int hire(int threads) {
  static int watched;
  if (!watched) watched = 1, pthread_atfork(0, 0, forget);
  pthread_attr_t how;
  pthread_attr_init(&how);
  pthread_attr_setstacksize(&how, STACK);
  pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
  while (pool.workers + 1 < threads && pool.workers + 1 < MOST) {
    pthread_t made;
    pool.seen[pool.workers + 1] = pool.region;
    if (pthread_create(&made, &how, work, (void *)(intptr_t)(pool.workers + 1))) break;
    pool.workers++;
  }
  pthread_attr_destroy(&how);
  return pool.workers + 1 < threads ? pool.workers + 1 : threads;
}

static void begin(Gcc *gcc, Clang *clang, void **shared, int threads) {
  const int before = own, around = size, alone = threads < 2 || around > 1 || pthread_mutex_trylock(&pool.busy);
  own = 0, size = alone ? 1 : hire(threads);
  if (!alone) {
    pool.gcc = gcc, pool.clang = clang, pool.shared = shared, pool.left = size - 1;
    pthread_mutex_lock(&pool.lock);
    pool.region = (pool.region / 4096 + 1) * 4096 + (uint64_t)size;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
  }
  run(gcc, clang, shared);
  for (int i = 0; !alone && pool.left; i++)
    if (i > SPINS) sched_yield();
  if (!alone) pthread_mutex_unlock(&pool.busy);
  own = before, size = around;
}

static void wait_for_all(void) {
  const unsigned phase = pool.phase;
  if (size < 2) return;
  if (atomic_fetch_add(&pool.arrived, 1) + 1 == size) {
    pool.arrived = 0;
    atomic_fetch_add(&pool.phase, 1);
  } else
    for (int i = 0; pool.phase == phase; i++)
      if (i > SPINS) sched_yield();
}

int omp_get_thread_num(void) { return own; }
int omp_get_num_threads(void) { return size; }

void GOMP_parallel(Gcc *body, void *shared, unsigned threads, unsigned flags) { begin(body, 0, &shared, (int)threads); }
void GOMP_barrier(void) { wait_for_all(); }
_Bool GOMP_single_start(void) { return own == 0; }

void __kmpc_push_num_threads(void *place, int32_t caller, int32_t threads) { wanted = threads; }
void __kmpc_fork_call(void *place, int32_t count, Clang *body, ...) {
  void *shared[MOST_SHARED] = {0};
  const int threads = wanted;
  wanted = 0;
  if (count > MOST_SHARED) fprintf(stderr, "foretell: a region shares %d variables\n", count), abort();
  va_list given;
  va_start(given, body);
  for (int i = 0; i < count; i++) shared[i] = va_arg(given, void *);
  va_end(given);
  begin(0, body, shared, threads);
}
int32_t __kmpc_global_thread_num(void *place) { return own; }
void __kmpc_serialized_parallel(void *place, int32_t caller) {} /* by 'if', where nothing is around it */
void __kmpc_end_serialized_parallel(void *place, int32_t caller) {}
void __kmpc_barrier(void *place, int32_t caller) { wait_for_all(); }
int32_t __kmpc_single(void *place, int32_t caller) { return own == 0; }
void __kmpc_end_single(void *place, int32_t caller) {}
int32_t __kmpc_reduce_nowait(void *place, int32_t caller, int32_t count, size_t bytes, void *values,
                             void (*sum)(void *, void *), void *lock) {
  pthread_mutex_lock(&pool.one);
  return 1;
}
void __kmpc_end_reduce_nowait(void *place, int32_t caller, void *lock) { pthread_mutex_unlock(&pool.one); }
