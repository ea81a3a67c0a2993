/* What the driver and the runtime of the stand-in for a GPU share: its memory, and what a fat binary has code for.
 * No header of CUDA is needed for these two: their tests run where there is none. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define DEVICE_NAME "NVIDIA H100 (a stand-in)"
#define DEVICE_UUID "fake-gpu-0000001"
#define PUBLIC __attribute__((visibility("default")))

/* memory.c */
enum place { ON_DEVICE, ON_HOST };
PUBLIC size_t gpu_memory_total(void);
PUBLIC size_t gpu_memory_used(void);
PUBLIC void *gpu_memory_take(enum place place, size_t size);
PUBLIC void gpu_memory_give(void *start);
PUBLIC int gpu_memory_is(enum place place, const void *address);
PUBLIC int gpu_memory_block(const void *address, uintptr_t *start, size_t *size);
PUBLIC void gpu_memory_fill(void *to, int value, size_t size);
PUBLIC int gpu_memory_share(const void *address, char *name, size_t room);
PUBLIC void *gpu_memory_open(const char *name);
PUBLIC void *gpu_memory_reserve(size_t size);
PUBLIC int gpu_memory_map(void *start, size_t size, int present);

/* fat_binary.c */
enum code { NO_CODE, ONLY_PTX, MACHINE_CODE };
#define ARCHITECTURE 90
PUBLIC enum code gpu_code_in(const void *image);
PUBLIC void gpu_report(const char *what, const char *name);
