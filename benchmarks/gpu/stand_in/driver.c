/* libcuda.so.1 of the stand-in for a GPU: what torch, Triton and extensions ask the driver for. Linked with memory.c
 * and fat_binary.c; the runtime asks this library for the GPU's properties. */
#define _GNU_SOURCE
#include "device.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* Handles of everything that has no state: never NULL. */
static char something[64];

#define SUCCEEDS(declaration) \
  PUBLIC CUresult declaration { return CUDA_SUCCESS; }
#define GIVES(declaration, statement) \
  PUBLIC CUresult declaration {       \
    statement;                        \
    return CUDA_SUCCESS;              \
  }

/* The device */

static int attribute(CUdevice_attribute which) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return ARCHITECTURE / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return ARCHITECTURE % 10;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: return 1;
    default: return 0;
  }
}

SUCCEEDS(cuInit(unsigned flags))
GIVES(cuDriverGetVersion(int *version), *version = CUDA_VERSION)
GIVES(cuGetErrorName(CUresult code, const char **text), *text = code ? "CUDA_ERROR_OF_THE_STAND_IN" : "CUDA_SUCCESS")
GIVES(cuGetErrorString(CUresult code, const char **text), *text = code ? "an error of the stand-in for the driver" : "no error")
GIVES(cuDeviceGet(CUdevice *device, int number), *device = 0)
GIVES(cuDeviceGetCount(int *count), *count = 1)
GIVES(cuDeviceGetName(char *text, int room, CUdevice device), snprintf(text, room, DEVICE_NAME))
GIVES(cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device), memcpy(uuid->bytes, DEVICE_UUID, sizeof uuid->bytes))
GIVES(cuDeviceTotalMem_v2(size_t *bytes, CUdevice device), *bytes = gpu_memory_total())
GIVES(cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device), *value = attribute(which))

/* One context, which is always there */

GIVES(cuCtxGetCurrent(CUcontext *context), *context = (CUcontext)something)
SUCCEEDS(cuCtxSetCurrent(CUcontext context))
GIVES(cuCtxGetDevice(CUdevice *device), *device = 0)
GIVES(cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device), *context = (CUcontext)something)
SUCCEEDS(cuDevicePrimaryCtxRelease_v2(CUdevice device))
PUBLIC CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
GIVES(cuCtxGetLimit(size_t *value, CUlimit which), *value = 1 << 20)
SUCCEEDS(cuCtxSetLimit(CUlimit which, size_t value))
SUCCEEDS(cuCtxSynchronize(void))

/* Kernels that were compiled at run time, by Triton or NVRTC: loaded and launched, without an effect */

PUBLIC CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)something;
  if (gpu_code_in(image) != NO_CODE) return CUDA_SUCCESS;
  gpu_report("NO CODE for sm_90", "a module that is loaded by cuModuleLoadData");
  return CUDA_ERROR_NO_BINARY_FOR_GPU;
}
PUBLIC CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *names, void **values) {
  return cuModuleLoadData(module, image);
}
GIVES(cuModuleLoad(CUmodule *module, const char *path), *module = (CUmodule)something)
SUCCEEDS(cuModuleUnload(CUmodule module))
GIVES(cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name), *function = (CUfunction)something)
GIVES(cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function),
      *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0)
SUCCEEDS(cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value))
SUCCEEDS(cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config))
SUCCEEDS(cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **arguments, void **extra))
SUCCEEDS(cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra))
GIVES(cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config), *count = 66)
GIVES(cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int block, size_t shared), *count = 2)
GIVES(cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                             const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                             const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill),
      memset(map, 0, sizeof *map))

/* Memory */

PUBLIC CUresult cuMemGetInfo_v2(size_t *unused, size_t *total) {
  *total = gpu_memory_total();
  *unused = *total - gpu_memory_used();
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr address) {
  uintptr_t first;
  size_t bytes;
  if (gpu_memory_block((void *)address, &first, &bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (start) *start = first;
  if (size) *size = bytes;
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr address) {
  if (which == CU_POINTER_ATTRIBUTE_CONTEXT)
    *(void **)value = something;
  else
    *(int *)value = 0;
  return CUDA_SUCCESS;
}
PUBLIC CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  if (value == 0) gpu_memory_fill((void *)address, 0, 4 * count);
  for (size_t i = 0; value && i < count && i < (size_t)1 << 28; i++) ((unsigned *)address)[i] = value;
  return CUDA_SUCCESS;
}
SUCCEEDS(cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags))

/* Expandable segments: a handle stands for nothing, memory comes when it is mapped */

GIVES(cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *kind, CUmemAllocationGranularity_flags which),
      *bytes = 2 << 20)
PUBLIC CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
  *start = (CUdeviceptr)gpu_memory_reserve(size);
  return *start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
PUBLIC CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
  return gpu_memory_map((void *)start, size, 0) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
GIVES(cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *kind,
                  unsigned long long flags),
      *handle = 4096)
SUCCEEDS(cuMemRelease(CUmemGenericAllocationHandle handle))
PUBLIC CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
  return gpu_memory_map((void *)start, size, 1) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
PUBLIC CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
  return gpu_memory_map((void *)start, size, 0) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
SUCCEEDS(cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *access, size_t count))

/* By name, without the version that a name of the library may have */

PUBLIC CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
  char newer[128];
  void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  snprintf(newer, sizeof newer, "%s_v2", name);
  *function = self ? dlsym(self, name) : NULL;
  if (self && !*function) *function = dlsym(self, newer);
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (!*function) gpu_report("no function of the driver", name);
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
