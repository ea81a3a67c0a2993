/* libcudart.so.13 of the stand-in for a GPU: the part of CUDA's runtime that torch and extensions call, but for
 * kernels (kernels.c). Linked with libcuda.so.1 of this folder, whose memory and properties it has.
 *
 * Copies copy, and all work is done when it is asked for; so streams and events have nothing to wait for.
 */
#define _GNU_SOURCE
#include "device.h"

#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUCCEEDS(declaration) \
  PUBLIC cudaError_t declaration { return cudaSuccess; }
#define GIVES(declaration, statement) \
  PUBLIC cudaError_t declaration {    \
    statement;                        \
    return cudaSuccess;               \
  }

/* Streams, events and graphs have no state but that they differ. */
static void *handle(void) {
  static atomic_uintptr_t next = 4096;
  return (void *)atomic_fetch_add(&next, 16);
}
/* The address of every symbol and pool. */
static char something[1 << 20];

/* The device */

extern int cuDeviceGetAttribute(int *value, int which, int device);

PUBLIC cudaError_t cudaGetDeviceCount(int *count) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  *count = !visible || *visible;
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
GIVES(cudaGetDevice(int *device), *device = 0)
SUCCEEDS(cudaSetDevice(int device))
SUCCEEDS(cudaSetDeviceFlags(unsigned flags))
SUCCEEDS(cudaDeviceSynchronize(void))
SUCCEEDS(cudaDeviceEnablePeerAccess(int peer, unsigned flags))
GIVES(cudaDeviceCanAccessPeer(int *can, int device, int peer), *can = 0)
GIVES(cudaDriverGetVersion(int *version), *version = CUDART_VERSION)
GIVES(cudaRuntimeGetVersion(int *version), *version = CUDART_VERSION)
GIVES(cudaDeviceGetPCIBusId(char *id, int room, int device), snprintf(id, room, "0000:00:0F.0"))
PUBLIC cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
  *least = 0;
  *most = -5;
  return cudaSuccess;
}

static int attribute(enum cudaDeviceAttr which) {
  int value;
  cuDeviceGetAttribute(&value, which, 0); /* both have the same numbers */
  return value;
}
GIVES(cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device), *value = attribute(which))

PUBLIC cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, DEVICE_NAME);
  memcpy(p->uuid.bytes, DEVICE_UUID, sizeof p->uuid.bytes);
  p->totalGlobalMem = gpu_memory_total();
  p->major = attribute(cudaDevAttrComputeCapabilityMajor);
  p->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->warpSize = attribute(cudaDevAttrWarpSize);
  p->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  for (int i = 0; i < 3; i++) {
    p->maxThreadsDim[i] = attribute(cudaDevAttrMaxBlockDimX + i);
    p->maxGridSize[i] = attribute(cudaDevAttrMaxGridDimX + i);
  }
  p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->reservedSharedMemPerBlock = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  p->regsPerBlock = p->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  p->totalConstMem = attribute(cudaDevAttrTotalConstantMemory);
  p->textureAlignment = attribute(cudaDevAttrTextureAlignment);
  p->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount);
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = p->canMapHostMemory = 1;
  p->managedMemory = p->memoryPoolsSupported = 1;
  return cudaSuccess;
}

/* Memory */

static cudaError_t given(void **start, void *found) {
  *start = found;
  return found ? cudaSuccess : cudaErrorMemoryAllocation;
}
PUBLIC cudaError_t cudaMalloc(void **start, size_t size) { return given(start, gpu_memory_take(ON_DEVICE, size)); }
PUBLIC cudaError_t cudaMallocAsync(void **start, size_t size, cudaStream_t stream) { return cudaMalloc(start, size); }
GIVES(cudaFree(void *start), gpu_memory_give(start))
GIVES(cudaFreeAsync(void *start, cudaStream_t stream), gpu_memory_give(start))
PUBLIC cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
  return given(start, gpu_memory_take(ON_HOST, size));
}
PUBLIC cudaError_t cudaMallocHost(void **start, size_t size) { return given(start, gpu_memory_take(ON_HOST, size)); }
GIVES(cudaFreeHost(void *start), gpu_memory_give(start))
SUCCEEDS(cudaHostRegister(void *start, size_t size, unsigned flags))
SUCCEEDS(cudaHostUnregister(void *start))
GIVES(cudaHostGetDevicePointer(void **device, void *host, unsigned flags), *device = host)
PUBLIC cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  *total = gpu_memory_total();
  *unused = *total - gpu_memory_used();
  return cudaSuccess;
}
PUBLIC cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
  int device = gpu_memory_is(ON_DEVICE, address), host = gpu_memory_is(ON_HOST, address);
  memset(found, 0, sizeof *found);
  found->type = device ? cudaMemoryTypeDevice : host ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->devicePointer = device || host ? (void *)address : NULL;
  found->hostPointer = device ? NULL : (void *)address;
  return cudaSuccess;
}

#define COPY if (size) memmove(to, from, size)
GIVES(cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind), COPY)
GIVES(cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream), COPY)
GIVES(cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream), COPY)
SUCCEEDS(cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind))
PUBLIC cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                size_t height, enum cudaMemcpyKind kind) {
  for (size_t row = 0; row < height; row++)
    memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return cudaSuccess;
}
PUBLIC cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}
GIVES(cudaMemset(void *to, int value, size_t size), gpu_memory_fill(to, value, size))
GIVES(cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream), gpu_memory_fill(to, value, size))
GIVES(cudaGetSymbolAddress(void **address, const void *symbol), *address = something)

GIVES(cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device), *pool = (cudaMemPool_t)something)
GIVES(cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value), memset(value, 0, 8))
SUCCEEDS(cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value))
SUCCEEDS(cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t count))
SUCCEEDS(cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep))

/* CUDA IPC, with FAKE_GPU_SHARE: the handle is the name of the block's file */

PUBLIC cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address) {
  memset(handle, 0, sizeof *handle);
  return gpu_memory_share(address, handle->reserved, sizeof handle->reserved) ? cudaErrorNotSupported : cudaSuccess;
}
PUBLIC cudaError_t cudaIpcOpenMemHandle(void **start, cudaIpcMemHandle_t handle, unsigned flags) {
  *start = gpu_memory_open(handle.reserved);
  return *start ? cudaSuccess : cudaErrorInvalidValue;
}
GIVES(cudaIpcCloseMemHandle(void *start), gpu_memory_give(start))
SUCCEEDS(cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event))
GIVES(cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t shared), *event = handle())

/* Streams and events */

GIVES(cudaStreamCreate(cudaStream_t *stream), *stream = handle())
GIVES(cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags), *stream = handle())
GIVES(cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority), *stream = handle())
SUCCEEDS(cudaStreamDestroy(cudaStream_t stream))
SUCCEEDS(cudaStreamSynchronize(cudaStream_t stream))
SUCCEEDS(cudaStreamQuery(cudaStream_t stream))
SUCCEEDS(cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags))
GIVES(cudaStreamGetPriority(cudaStream_t stream, int *priority), *priority = 0)
GIVES(cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags),
      call(stream, cudaSuccess, data))
GIVES(cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data), call(data))
GIVES(cudaEventCreate(cudaEvent_t *event), *event = handle())
GIVES(cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags), *event = handle())
SUCCEEDS(cudaEventDestroy(cudaEvent_t event))
SUCCEEDS(cudaEventQuery(cudaEvent_t event))
SUCCEEDS(cudaEventRecord(cudaEvent_t event, cudaStream_t stream))
SUCCEEDS(cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags))
SUCCEEDS(cudaEventSynchronize(cudaEvent_t event))
GIVES(cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to), *milliseconds = 1.0f)

/* Graphs: captured by a thread, with one node each, and replayed without an effect */

static __thread int capturing;

static enum cudaStreamCaptureStatus capture(void) {
  return capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
GIVES(cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode), capturing = 1)
PUBLIC cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  capturing = 0;
  *graph = handle();
  return cudaSuccess;
}
GIVES(cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status), *status = capture())
PUBLIC cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
  *status = capture();
  if (id) *id = 1;
  if (graph) *graph = (cudaGraph_t)something;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaSuccess;
}
SUCCEEDS(cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode))
GIVES(cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags), *exec = handle())
GIVES(cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags), *exec = handle())
SUCCEEDS(cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream))
SUCCEEDS(cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream))
SUCCEEDS(cudaGraphDestroy(cudaGraph_t graph))
SUCCEEDS(cudaGraphExecDestroy(cudaGraphExec_t exec))
SUCCEEDS(cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags))
GIVES(cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count), *count = 1)
GIVES(cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *others, cudaGraphEdgeData *edges, size_t *count),
      *count = 0)

/* Functions of the driver by name, and the profiler */

extern int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, void *status);

PUBLIC cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status) {
  int missing = cuGetProcAddress_v2(name, function, (int)version, flags, NULL);
  if (status) *status = missing ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
PUBLIC cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                           enum cudaDriverEntryPointQueryResult *status) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, status);
}
SUCCEEDS(cudaProfilerStart(void))
SUCCEEDS(cudaProfilerStop(void))
