/* Regions as the kernels have them, on threads of whatever runtime is linked: "fine" if their parts add up. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

int omp_get_thread_num(void);
int omp_get_num_threads(void);

enum { MOST = 64 };
static int most;

static int64_t together(int threads, int64_t size, int alone) {
  int64_t parts[MOST] = {0}, twice[MOST] = {0}, total = 0;
  int found = 0, inner = 0;
#pragma omp parallel num_threads(threads) reduction(^ : total) if (!alone)
  {
    const int t = omp_get_thread_num();
#pragma omp single
    found = omp_get_num_threads();
    for (int64_t i = t; i < size; i += found) parts[t] += i, total ^= i * 2654435761;
#pragma omp barrier
    for (int u = 0; u < found; u++) twice[t] += parts[u];
    if (t == found - 1) {
#pragma omp parallel num_threads(4)
      inner = omp_get_num_threads();
    }
  }
  int64_t sum = total;
  for (int i = 0; i < size; i++) sum ^= (int64_t)i * 2654435761;
  for (int t = 0; t < found; t++) sum |= twice[t] ^ size * (size - 1) / 2;
  most = found > most ? found : most;
  return sum || (found > 1 && inner != 1) || (alone && found != 1);
}

static void *many(void *rounds) {
  for (int i = 0; i < *(int *)rounds; i++)
    if (together(1 + i % 5, i % 97, i % 7 == 0)) printf("round %d\n", i), exit(1);
  return 0;
}

int main(int count, char **arguments) {
  int rounds = atoi(arguments[1]), ended = 0;
  many(&rounds);
  if (most != 5) return printf("%d threads at most\n", most), 1;
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) pthread_create(threads + i, 0, many, &rounds);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
  most = 0;
  const pid_t child = fork();
  if (!child) many(&rounds), _exit(most != 5);
  waitpid(child, &ended, 0);
  many(&rounds);
  printf(ended ? "the child has not ended well\n" : "fine\n");
  return ended;
}
