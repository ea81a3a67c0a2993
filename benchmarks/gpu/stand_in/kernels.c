/* Kernels of libcudart.so.13 of the stand-in for a GPU: registered by each library that is loaded, launched without
 * an effect.
 *
 * A kernel whose fat binary has no code for sm_90 fails, as on the GPU, and its name is reported. With PTX alone it runs, and is
 * reported too: there the driver would compile it. FAKE_GPU_LAUNCHES=1 reports each kernel at its first launch.
 */
#define _GNU_SOURCE
#include "device.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SUCCEEDS(declaration) \
  PUBLIC cudaError_t declaration { return cudaSuccess; }

/* Errors: of this thread, the last one until somebody asks */

static __thread cudaError_t last_error;

static cudaError_t failed(cudaError_t code) { return last_error = code; }
PUBLIC cudaError_t cudaPeekAtLastError(void) { return last_error; }
PUBLIC cudaError_t cudaGetLastError(void) {
  cudaError_t found = last_error;
  last_error = cudaSuccess;
  return found;
}
PUBLIC const char *cudaGetErrorName(cudaError_t code) {
  return code == cudaSuccess                        ? "cudaSuccess"
         : code == cudaErrorNoKernelImageForDevice ? "cudaErrorNoKernelImageForDevice"
         : code == cudaErrorMemoryAllocation       ? "cudaErrorMemoryAllocation"
                                                   : "cudaErrorOfTheStandIn";
}
PUBLIC const char *cudaGetErrorString(cudaError_t code) {
  return code == cudaSuccess                        ? "no error"
         : code == cudaErrorNoKernelImageForDevice ? "no kernel image is available for execution on the device"
         : code == cudaErrorMemoryAllocation       ? "out of memory"
                                                   : "an error of the stand-in";
}

/* What is registered: a table by the address of the host's function, which a launch names */

struct kernel {
  const void *function;
  const char *name;
  enum code code;
  int reported;
};

static struct kernel *table;
static size_t table_size, kernel_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Where a function is, or would be, in the table, which always has free places. */
static struct kernel *place_of(const void *function) {
  size_t at = ((uintptr_t)function >> 4) * 2654435761u % table_size;
  while (table[at].function && table[at].function != function) at = (at + 1) % table_size;
  return &table[at];
}

static void make_room(void) {
  struct kernel *old = table;
  size_t old_size = table_size;
  if (kernel_count * 2 < table_size) return;
  table_size = old_size ? old_size * 4 : 1 << 16;
  table = calloc(table_size, sizeof *table);
  if (!table) abort();
  for (size_t i = 0; i < old_size; i++)
    if (old[i].function) *place_of(old[i].function) = old[i];
  free(old);
}

/* The handle of a fat binary is one of these. It stays when its library goes: so does its kernels' place in the table. */
static enum code codes[] = {NO_CODE, ONLY_PTX, MACHINE_CODE};

PUBLIC void **__cudaRegisterFatBinary(void *wrapper) {
  const void *image = *(void **)((char *)wrapper + 8);
  return (void **)&codes[gpu_code_in(image)];
}
PUBLIC void __cudaRegisterFatBinaryEnd(void **binary) {}
PUBLIC void __cudaUnregisterFatBinary(void **binary) {}
PUBLIC void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int external, size_t size,
                              int constant, int global) {}
PUBLIC char __cudaInitModule(void **binary) { return 0; }
PUBLIC void __cudaRegisterFunction(void **binary, const char *function, char *device, const char *name, int limit,
                                   void *thread, void *block, void *block_size, void *grid_size, int *warp) {
  pthread_mutex_lock(&lock);
  make_room();
  struct kernel *kernel = place_of(function);
  if (!kernel->function) kernel_count++;
  *kernel = (struct kernel){function, name, *(enum code *)binary, 0};
  pthread_mutex_unlock(&lock);
}

/* Launches */

static cudaError_t launch(const void *function) {
  pthread_mutex_lock(&lock);
  struct kernel *kernel = table_size ? place_of(function) : NULL, found = {0};
  if (kernel && kernel->function) {
    found = *kernel;
    kernel->reported = 1;
  }
  pthread_mutex_unlock(&lock);
  if (!found.function) return cudaSuccess;
  if (found.code == NO_CODE) {
    gpu_report("NO CODE for sm_90", found.name);
    return failed(cudaErrorNoKernelImageForDevice);
  }
  if (!found.reported && found.code == ONLY_PTX) gpu_report("only PTX for sm_90", found.name);
  if (!found.reported && getenv("FAKE_GPU_LAUNCHES")) gpu_report("launched", found.name);
  return cudaSuccess;
}

PUBLIC cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
  return launch(function);
}
PUBLIC cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return launch(function);
}
PUBLIC cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                               cudaStream_t stream) {
  return launch(function);
}
PUBLIC cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
PUBLIC cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
  return launch(kernel);
}

/* `kernel<<<grid, block, shared, stream>>>(…)` puts its configuration here and takes it back at once. */
static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configuration;

PUBLIC unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared = shared;
  configuration.stream = stream;
  return 0;
}
PUBLIC cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}

/* Properties of kernels: the same for all */

PUBLIC cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = found->ptxVersion = ARCHITECTURE;
  found->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
SUCCEEDS(cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute which, int value))
PUBLIC cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int size,
                                                                 size_t shared) {
  *count = 2;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int size,
                                                                          size_t shared, unsigned flags) {
  *count = 2;
  return cudaSuccess;
}
