/* Which code a fat binary has for this GPU, sm_90: a library that was pruned for another one is told here, as it would be
 * by the driver. Its form is that of `prune_fatbin.py`: a head, then one entry for each architecture. */
#include "device.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAGIC 0xBA55ED50u
#define KIND_PTX 1
#define KIND_MACHINE_CODE 2

struct head {
  uint32_t magic;
  uint16_t version, size;
  uint64_t payload;
};

struct entry {
  uint16_t kind, version;
  uint32_t head;
  uint64_t payload;
  uint32_t compressed, other;
  uint16_t minor, major;
  uint32_t architecture;
};

/* A payload of zeros is code that somebody wiped out. */
static int is_empty(const unsigned char *payload, uint64_t size) {
  for (uint64_t i = 0; i < size && i < 64; i++)
    if (payload[i]) return 0;
  return 1;
}

/* An image of another form than a fat binary's (a cubin, PTX as text) is taken for code. */
enum code gpu_code_in(const void *image) {
  const struct head *head = image;
  if (head->magic != MAGIC) return MACHINE_CODE;
  const unsigned char *at = (const unsigned char *)image + head->size, *end = at + head->payload;
  enum code best = NO_CODE;
  while (at < end) {
    struct entry entry;
    memcpy(&entry, at, sizeof entry);
    if (!is_empty(at + entry.head, entry.payload)) {
      if (entry.kind == KIND_MACHINE_CODE && entry.architecture == ARCHITECTURE) best = MACHINE_CODE;
      if (entry.kind == KIND_PTX && entry.architecture <= ARCHITECTURE && best == NO_CODE) best = ONLY_PTX;
    }
    at += entry.head + entry.payload;
  }
  return best;
}

/* One line to stderr, and to the file FAKE_GPU_REPORT, where those of all processes of a rehearsal come together. */
void gpu_report(const char *what, const char *name) {
  char line[1024];
  int length = snprintf(line, sizeof line, "stand-in GPU: %s: %s\n", what, name);
  if (length >= (int)sizeof line) {
    length = sizeof line - 1;
    line[length - 1] = '\n';
  }
  if (write(STDERR_FILENO, line, length) < 0) return;
  const char *path = getenv("FAKE_GPU_REPORT");
  int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
  if (file < 0) return;
  if (write(file, line, length) < 0) perror(path);
  close(file);
}
