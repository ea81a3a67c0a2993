/* libnvidia-ml.so.1 of the stand-in for a GPU. Linked with memory.c; no header of NVIDIA's. */
#include "device.h"

#include <stdio.h>

#define NOT_SUPPORTED 3
#define UNUSED __attribute__((unused))

struct memory {
  unsigned long long total, free, used;
};
struct memory_v2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

static int device(void **handle) {
  *handle = (void *)4096;
  return 0;
}

PUBLIC int nvmlInit_v2(void) { return 0; }
PUBLIC int nvmlInitWithFlags(unsigned flags UNUSED) { return 0; }
PUBLIC int nvmlShutdown(void) { return 0; }
PUBLIC const char *nvmlErrorString(int code) { return code ? "an error of the stand-in for NVML" : "success"; }

PUBLIC int nvmlSystemGetDriverVersion(char *text, unsigned room) {
  snprintf(text, room, "580.0");
  return 0;
}
PUBLIC int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13000;
  return 0;
}

PUBLIC int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = 1;
  return 0;
}
PUBLIC int nvmlDeviceGetHandleByIndex_v2(unsigned index UNUSED, void **handle) { return device(handle); }
PUBLIC int nvmlDeviceGetHandleByUUID(const char *uuid UNUSED, void **handle) { return device(handle); }
PUBLIC int nvmlDeviceGetHandleByPciBusId_v2(const char *id UNUSED, void **handle) { return device(handle); }
PUBLIC int nvmlDeviceGetIndex(void *handle UNUSED, unsigned *index) {
  *index = 0;
  return 0;
}
PUBLIC int nvmlDeviceGetName(void *handle UNUSED, char *text, unsigned room) {
  snprintf(text, room, DEVICE_NAME);
  return 0;
}
PUBLIC int nvmlDeviceGetUUID(void *handle UNUSED, char *text, unsigned room) {
  const unsigned char *u = (const unsigned char *)DEVICE_UUID;
  snprintf(text, room, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3],
           u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
  return 0;
}
PUBLIC int nvmlDeviceGetCudaComputeCapability(void *handle UNUSED, int *major, int *minor) {
  *major = ARCHITECTURE / 10;
  *minor = ARCHITECTURE % 10;
  return 0;
}

/* All of it is free: this process's own share is known to libcuda alone. */
PUBLIC int nvmlDeviceGetMemoryInfo(void *handle UNUSED, struct memory *memory) {
  *memory = (struct memory){gpu_memory_total(), gpu_memory_total(), 0};
  return 0;
}
PUBLIC int nvmlDeviceGetMemoryInfo_v2(void *handle UNUSED, struct memory_v2 *memory) {
  *memory = (struct memory_v2){memory->version, gpu_memory_total(), 0, gpu_memory_total(), 0};
  return 0;
}

/* Nobody else computes here, and there is no other GPU to speak with. */
PUBLIC int nvmlDeviceGetComputeRunningProcesses(void *handle UNUSED, unsigned *count) {
  *count = 0;
  return 0;
}
PUBLIC int nvmlDeviceGetComputeRunningProcesses_v3(void *handle UNUSED, unsigned *count) {
  *count = 0;
  return 0;
}
PUBLIC int nvmlDeviceGetP2PStatus(void *one UNUSED, void *other UNUSED, int capability UNUSED, int *status) {
  *status = 1;
  return 0;
}
PUBLIC int nvmlDeviceGetNvLinkState(void) { return NOT_SUPPORTED; }
PUBLIC int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
PUBLIC int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
PUBLIC int nvmlDeviceGetGpuFabricInfoV(void) { return NOT_SUPPORTED; }
PUBLIC int nvmlDeviceGetPciInfo_v3(void) { return NOT_SUPPORTED; }
