/* Memory of the stand-in for a GPU: memory of this process at addresses that say whose it is. It is zero at first and
 * costs nothing until it is written.
 *
 * FAKE_GPU_GIB (79) is how much there is, for each process: what another one has taken is not missing here.
 * FAKE_GPU_SHARE=1 keeps each block in a file without a name, which another process can open; each holds a descriptor.
 */
#define _GNU_SOURCE
#include "device.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((uintptr_t)1 << 20)
#define GIB ((uintptr_t)1 << 30)
#define RANGE (2048 * GIB)
#define DEVICE_START (16 * 1024 * GIB)
#define SEGMENT_START (DEVICE_START + RANGE) /* of the device, too: what the driver reserves first and maps later */
#define HOST_START (SEGMENT_START + RANGE)
#define GRAIN (2 * MIB)
#define MOST_BLOCKS 65536

struct block {
  uintptr_t start;
  size_t size;
  size_t counted; /* bytes of the device's memory that it takes: none on the host, none of another process's */
  int file;       /* -1: only this process has it */
};

static struct block blocks[MOST_BLOCKS];
static int block_count;
static size_t used;
static uintptr_t next_device = DEVICE_START, next_segment = SEGMENT_START, next_host = HOST_START;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

size_t gpu_memory_total(void) {
  const char *given = getenv("FAKE_GPU_GIB");
  return (size_t)((given ? atof(given) : 79.0) * (double)GIB);
}

size_t gpu_memory_used(void) { return used; }

static size_t whole(size_t size) {
  return size ? (size + GRAIN - 1) & ~(GRAIN - 1) : GRAIN;
}

/* Map at the next free place of a range; a gap after each block makes one that is written past its end a fault. */
static void *map_next(uintptr_t *next, size_t size, int protection, int flags, int file) {
  void *start = MAP_FAILED;
  for (int tries = 0; tries < 64 && start == MAP_FAILED; tries++) {
    start = mmap((void *)*next, size, protection, flags | MAP_FIXED_NOREPLACE | MAP_NORESERVE, file, 0);
    *next += size + GRAIN;
  }
  return start == MAP_FAILED ? NULL : start;
}

/* A block of `size` bytes in `place`; NULL if there is not so much. The file becomes the block's. */
static void *take(enum place place, size_t size, size_t counted, int file) {
  void *start = NULL;
  pthread_mutex_lock(&lock);
  if (block_count < MOST_BLOCKS && used + counted <= gpu_memory_total()) {
    int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    start = map_next(place == ON_DEVICE ? &next_device : &next_host, size, PROT_READ | PROT_WRITE, flags, file);
  }
  if (start) {
    blocks[block_count++] = (struct block){(uintptr_t)start, size, counted, file};
    used += counted;
  } else if (file >= 0)
    close(file);
  pthread_mutex_unlock(&lock);
  return start;
}

void *gpu_memory_take(enum place place, size_t size) {
  int file = -1;
  size = whole(size);
  if (place == ON_HOST) return take(place, size, 0, file);
  if (getenv("FAKE_GPU_SHARE")) {
    file = memfd_create("stand-in-gpu", MFD_CLOEXEC);
    if (file < 0) return NULL;
    if (ftruncate(file, (off_t)size)) {
      close(file);
      return NULL;
    }
  }
  return take(place, size, size, file);
}

void gpu_memory_give(void *start) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < block_count; i++) {
    if (blocks[i].start != (uintptr_t)start) continue;
    munmap(start, blocks[i].size);
    if (blocks[i].file >= 0) close(blocks[i].file);
    used -= blocks[i].counted;
    blocks[i] = blocks[--block_count];
    break;
  }
  pthread_mutex_unlock(&lock);
}

int gpu_memory_is(enum place place, const void *address) {
  uintptr_t at = (uintptr_t)address;
  return place == ON_DEVICE ? at >= DEVICE_START && at < HOST_START : at >= HOST_START && at < HOST_START + RANGE;
}

/* The block that an address is in: 0, or -1 if it is in none. */
static int find(const void *address, struct block *found) {
  int missing = -1;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < block_count && missing; i++) {
    if (blocks[i].start > (uintptr_t)address || (uintptr_t)address >= blocks[i].start + blocks[i].size) continue;
    *found = blocks[i];
    missing = 0;
  }
  pthread_mutex_unlock(&lock);
  return missing;
}

int gpu_memory_block(const void *address, uintptr_t *start, size_t *size) {
  struct block found;
  if (find(address, &found)) return -1;
  *start = found.start;
  *size = found.size;
  return 0;
}

/* Zeros are made by giving pages back: an engine's cache of 70 GiB must not become memory of this machine. Anything else
 * over 1 GiB is left as it is. */
void gpu_memory_fill(void *to, int value, size_t size) {
  uintptr_t first = ((uintptr_t)to + 4095) & ~(uintptr_t)4095, last = ((uintptr_t)to + size) & ~(uintptr_t)4095;
  if (value == 0 && gpu_memory_is(ON_DEVICE, to) && last > first && last - first >= MIB) {
    struct block found = {.file = -1};
    find(to, &found);
    memset(to, 0, first - (uintptr_t)to);
    madvise((void *)first, last - first, found.file < 0 ? MADV_DONTNEED : MADV_REMOVE);
    memset((void *)last, 0, (uintptr_t)to + size - last);
  } else if (size <= GIB)
    memset(to, value, size);
}

/* The name under which another process may open a block, for CUDA's IPC handle: 0, or -1 without FAKE_GPU_SHARE. */
int gpu_memory_share(const void *address, char *name, size_t room) {
  struct block found;
  if (find(address, &found) || found.file < 0) return -1;
  return snprintf(name, room, "/proc/%d/fd/%d", (int)getpid(), found.file) < (int)room ? 0 : -1;
}

void *gpu_memory_open(const char *name) {
  int file = strncmp(name, "/proc/", 6) ? -1 : open(name, O_RDWR | O_CLOEXEC);
  off_t size = file < 0 ? 0 : lseek(file, 0, SEEK_END);
  if (file >= 0 && size > 0) return take(ON_DEVICE, (size_t)size, 0, file);
  if (file >= 0) close(file);
  return NULL;
}

/* Addresses without memory, as torch's expandable segments want them, and memory put there or taken away again. */
void *gpu_memory_reserve(size_t size) {
  pthread_mutex_lock(&lock);
  void *start = map_next(&next_segment, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  pthread_mutex_unlock(&lock);
  return start;
}

int gpu_memory_map(void *start, size_t size, int present) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(start, size, present ? PROT_READ | PROT_WRITE : PROT_NONE, flags, -1, 0) == MAP_FAILED ? -1 : 0;
}
