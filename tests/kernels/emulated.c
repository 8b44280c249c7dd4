/* Calls functions of a kernel under an emulator: emulated IN OUT kernel.so, and behind native.so FORMAT=product.so ...
 *
 * IN holds calls, int64 apart from bytes: see emulator.py, which writes them. OUT gets of each call what it returned and what
 * its buffer 0 holds then. THREADS names the library that runs OpenMP's regions, where that is not GCC's. */
#ifdef _WIN32
#include <malloc.h>
#include <windows.h>
#define dlopen(name, how) ((void *)LoadLibraryA(name))
#define dlsym(library, name) ((void *)GetProcAddress((HMODULE)(library), name))
#define dlerror() "a library cannot be loaded"
#define aligned_alloc(to, size) _aligned_malloc(size, to)
#define free _aligned_free
#else
#include <dlfcn.h>
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 256, ARGUMENTS = 32 };
typedef int64_t Call(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);

static void end(const char *why) {
  fprintf(stderr, "%s\n", why);
  exit(1);
}
static int64_t number(FILE *in) {
  int64_t n;
  if (fread(&n, 8, 1, in) != 1) end("the calls are cut short");
  return n;
}

int main(int count, char **arguments) {
  if (count < 4) end("no arguments");
#ifndef _WIN32 /* where a kernel has what runs its regions */
  const char *threads = getenv("THREADS");
  if (!dlopen(threads ? threads : "libgomp.so.1", RTLD_NOW | RTLD_GLOBAL)) end("no OpenMP");
#endif
  void *native = dlopen(arguments[3], RTLD_NOW);
  if (!native) end(dlerror());
  int64_t (*use)(int64_t, void *) = (int64_t (*)(int64_t, void *))dlsym(native, "foretell_use");
  for (int i = 4; i < count; i++) {
    void *product = dlopen(strchr(arguments[i], '=') + 1, RTLD_NOW);
    if (!product) end(dlerror());
    use(atoi(arguments[i]), dlsym(product, "foretell_products"));
  }
  FILE *in = fopen(arguments[1], "rb"), *out = fopen(arguments[2], "wb");
  if (!in || !out) end("no such files");
  for (int64_t calls = number(in); calls > 0; calls--) {
    char name[32], *buffers[MOST];
    int64_t sizes[MOST], values[ARGUMENTS] = {0};
    if (fread(name, 32, 1, in) != 1) end("the calls are cut short");
    const int64_t held = number(in);
    for (int64_t i = 0; i < held; i++) {
      sizes[i] = number(in);
      buffers[i] = aligned_alloc(64, (size_t)(sizes[i] / 64 * 64 + 64));
      if (fread(buffers[i], 1, (size_t)sizes[i], in) != (size_t)sizes[i]) end("the calls are cut short");
    }
    for (int64_t pointers = number(in); pointers > 0; pointers--) {
      const int64_t from = number(in), at = number(in), to = number(in);
      const char *target = buffers[to] + number(in);
      memcpy(buffers[from] + at, &target, 8);
    }
    const int64_t given = number(in);
    if (given > ARGUMENTS) end("a call has more arguments than this program gives");
    for (int64_t i = 0; i < given; i++) {
      const int64_t is_buffer = number(in), value = number(in), offset = number(in);
      values[i] = is_buffer ? (int64_t)(intptr_t)(buffers[value] + offset) : value;
    }
    Call *call = (Call *)dlsym(native, name);
    if (!call) end(name);
    const int64_t *v = values;
    const int64_t back = call(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14],
                              v[15], v[16], v[17], v[18], v[19], v[20], v[21], v[22], v[23], v[24], v[25], v[26], v[27],
                              v[28], v[29], v[30], v[31]);
    fwrite(&back, 8, 1, out), fwrite(buffers[0], 1, (size_t)sizes[0], out);
    for (int64_t i = 0; i < held; i++) free(buffers[i]);
  }
  fclose(in);
  return fclose(out);
}
