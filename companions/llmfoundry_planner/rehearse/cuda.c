/* A CUDA without devices: every call succeeds and computes nothing.
 *
 * Device memory is address space that no page stands behind until somebody writes to it. It is counted against the
 * device's size, so that an allocator runs out of it where it would on the device. Copies of up to SMALL bytes are
 * really made, for the numbers that programs read back. `build.py` adds stubs.inc: all other functions, which return 0.
 * The device is described by the environment variables REHEARSED_*.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "driver_types.h"

#define SMALL (64 << 10)
#define PAGE ((size_t)2 << 20)
#define OUT_OF_MEMORY 2 /* of the runtime and of the driver alike */
#define NO_DEVICE 100

typedef struct range { struct range *next; char *start; size_t size; } range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range *device_ranges, *pinned_ranges;
static size_t used_bytes;
static __thread int current_device;

static long number(const char *name, long otherwise) { const char *text = getenv(name); return text ? atol(text) : otherwise; }
static size_t memory_bytes(void) { return number("REHEARSED_MEMORY_BYTES", 1L << 30); } /* a fork may play another device */

/* ------------------------------------------------------------------------------------------------------- memory */

static int take(size_t size) {
  pthread_mutex_lock(&lock);
  int fits = used_bytes + size <= memory_bytes();
  if (fits) used_bytes += size;
  pthread_mutex_unlock(&lock);
  return fits;
}

static void give_back(size_t size) { pthread_mutex_lock(&lock); used_bytes -= size; pthread_mutex_unlock(&lock); }

static void remember(range **list, void *start, size_t size) {
  range *r = malloc(sizeof *r);
  pthread_mutex_lock(&lock);
  *r = (range){*list, start, size};
  *list = r;
  pthread_mutex_unlock(&lock);
}

static size_t forget(range **list, void *start) {
  size_t size = 0;
  pthread_mutex_lock(&lock);
  for (range **r = list; *r; r = &(*r)->next)
    if ((*r)->start == start) { range *gone = *r; size = gone->size; *r = gone->next; free(gone); break; }
  pthread_mutex_unlock(&lock);
  return size;
}

static int is_in(range *list, const void *p) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (range *r = list; r && !found; r = r->next) found = (char *)p >= r->start && (char *)p < r->start + r->size;
  pthread_mutex_unlock(&lock);
  return found;
}

static void *map(size_t size, int protection) {
  void *p = mmap(0, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? 0 : p;
}

int cudaMalloc(void **p, size_t size) {
  size = (size + PAGE - 1) / PAGE * PAGE;
  *p = 0;
  if (!take(size)) return OUT_OF_MEMORY;
  *p = map(size, PROT_READ | PROT_WRITE);
  if (!*p) { give_back(size); return OUT_OF_MEMORY; }
  remember(&device_ranges, *p, size);
  return 0;
}

int cudaFree(void *p) {
  size_t size = p ? forget(&device_ranges, p) : 0;
  if (size) { munmap(p, size); give_back(size); }
  return 0;
}

int cudaMallocAsync(void **p, size_t size, void *stream) { return cudaMalloc(p, size); }
int cudaFreeAsync(void *p, void *stream) { return cudaFree(p); }
int cudaMemGetInfo(size_t *free_bytes, size_t *all) { *all = memory_bytes(); *free_bytes = *all - used_bytes; return 0; }
int cuDeviceTotalMem_v2(size_t *all, int device) { *all = memory_bytes(); return 0; }

/* Segments that grow: addresses are reserved first, memory is created apart from them and mapped to them. */
int cuMemGetAllocationGranularity(size_t *n, const void *properties, int option) { *n = PAGE; return 0; }
int cuMemAddressReserve(char **p, size_t size, size_t alignment, char *wish, unsigned long long flags) {
  *p = map(size, PROT_NONE);
  if (*p) remember(&device_ranges, *p, size);
  return *p ? 0 : OUT_OF_MEMORY;
}
int cuMemAddressFree(char *p, size_t size) { forget(&device_ranges, p); munmap(p, size); return 0; }
int cuMemCreate(uintptr_t *handle, size_t size, const void *properties, unsigned long long flags) {
  if (!take(size)) return OUT_OF_MEMORY;
  size_t *made = malloc(sizeof *made);
  *made = size;
  *handle = (uintptr_t)made;
  return 0;
}
int cuMemRelease(uintptr_t handle) { give_back(*(size_t *)handle); free((void *)handle); return 0; }
int cuMemMap(char *p, size_t size, size_t offset, uintptr_t handle, unsigned long long flags) { return 0; }
int cuMemSetAccess(char *p, size_t size, const void *access, size_t count) {
  return mprotect(p, size, PROT_READ | PROT_WRITE) ? OUT_OF_MEMORY : 0;
}
int cuMemUnmap(char *p, size_t size) {
  madvise(p, size, MADV_DONTNEED);
  mprotect(p, size, PROT_NONE);
  return 0;
}

int cudaHostAlloc(void **p, size_t size, unsigned flags) {
  *p = malloc(size);
  if (!*p) return OUT_OF_MEMORY;
  remember(&pinned_ranges, *p, size);
  return 0;
}
int cudaFreeHost(void *p) { forget(&pinned_ranges, p); free(p); return 0; }
int cudaHostRegister(void *p, size_t size, unsigned flags) { remember(&pinned_ranges, p, size); return 0; }
int cudaHostUnregister(void *p) { forget(&pinned_ranges, p); return 0; }

int cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *p) {
  memset(found, 0, sizeof *found);
  found->type = is_in(pinned_ranges, p) ? cudaMemoryTypeHost : is_in(device_ranges, p) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  found->device = found->type == cudaMemoryTypeUnregistered ? -2 : current_device;
  return 0;
}
int cuPointerGetAttribute(void *found, int attribute, unsigned long long p) { *(unsigned long long *)found = p; return 0; }

static int copy(void *to, const void *from, size_t size) {
  if (size <= SMALL) memmove(to, from, size);
  else if (!is_in(device_ranges, to) && !is_in(pinned_ranges, to)) memset(to, 0, size); /* nothing has been computed */
  return 0;
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return copy(to, from, size); }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return copy(to, from, size); }

/* ------------------------------------------------------------------------------------------------------ devices */

int cudaGetDeviceCount(int *n) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  int is_hidden = visible && !*visible;
  *n = is_hidden ? 0 : number("REHEARSED_DEVICES", 1);
  return is_hidden ? NO_DEVICE : 0;
}
int cudaGetDevice(int *device) { *device = current_device; return 0; }
int cudaSetDevice(int device) { current_device = device; return 0; }
int cuDeviceGetCount(int *n) { return cudaGetDeviceCount(n); }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = number("REHEARSED_SHARED_PER_BLOCK", 0); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = number("REHEARSED_SHARED_PER_UNIT", 0); break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = number("REHEARSED_THREADS_PER_UNIT", 0); break;
    case cudaDevAttrMultiProcessorCount: *value = number("REHEARSED_UNITS", 0); break;
    case cudaDevAttrComputeCapabilityMajor: *value = number("REHEARSED_MAJOR", 0); break;
    case cudaDevAttrComputeCapabilityMinor: *value = number("REHEARSED_MINOR", 0); break;
    case cudaDevAttrTextureAlignment: *value = 512; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: *value = 1; break;
    case 102: *value = 1; break; /* CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    default: *value = 0;
  }
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }

int cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  const char *name = getenv("REHEARSED_NAME");
  memset(found, 0, sizeof *found);
  strncpy(found->name, name ? name : "", sizeof found->name - 1);
  found->totalGlobalMem = memory_bytes();
  found->major = number("REHEARSED_MAJOR", 0);
  found->minor = number("REHEARSED_MINOR", 0);
  found->multiProcessorCount = number("REHEARSED_UNITS", 0);
  found->warpSize = found->maxBlocksPerMultiProcessor = 32;
  found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxThreadsPerMultiProcessor = number("REHEARSED_THREADS_PER_UNIT", 0);
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerBlockOptin = number("REHEARSED_SHARED_PER_BLOCK", 0);
  found->sharedMemPerMultiprocessor = number("REHEARSED_SHARED_PER_UNIT", 0);
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = 50 << 20;
  found->textureAlignment = 512;
  found->concurrentKernels = found->unifiedAddressing = 1;
  return 0;
}

int cudaDriverGetVersion(int *version) { *version = number("REHEARSED_CUDA", 0); return 0; }
int cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cuDriverGetVersion(int *version) { return cudaDriverGetVersion(version); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

/* --------------------------------------------------------------------------------- streams, kernels and libraries */

static int something(void **made) { *made = malloc(64); return 0; } /* a handle that nothing looks into */

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaStreamCreate(void **stream) { return something(stream); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return something(stream); }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return something(stream); }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo_v2(void *stream, int *status) { *status = 0; return 0; }
int cudaEventCreate(void **event) { return something(event); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return something(event); }
int cudaEventElapsedTime(float *milliseconds, void *from, void *to) { *milliseconds = 1; return 0; }

const char *cudaGetErrorString(int error) { return error == OUT_OF_MEMORY ? "out of memory" : "no error"; }
const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "cudaSuccess"; }
int cuGetErrorString(int error, const char **text) { *text = cudaGetErrorString(error); return 0; }

void **__cudaRegisterFatBinary(void *binary) { static void *module; return &module; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
  memset(found, 0, sizeof *found);
  found->numRegs = 32;
  found->maxThreadsPerBlock = 1024;
  /* CUB has plans for the versions that torch was built for, and for no others. */
  found->binaryVersion = found->ptxVersion = number("REHEARSED_KERNELS", 10 * number("REHEARSED_MAJOR", 0) + number("REHEARSED_MINOR", 0));
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *function, int block, size_t shared, unsigned flags) { *n = 2; return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *function, int block, size_t shared) { *n = 2; return 0; }
int cudaGetSymbolAddress(void **p, const void *symbol) { static char room[SMALL]; *p = room; return 0; }
int cuCtxGetCurrent(void **context) { static char room[64]; *context = room; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return cuCtxGetCurrent(context); }
int cuModuleLoad(void **module, const char *name) { return something(module); }
int cuModuleLoadData(void **module, const void *image) { return something(module); }
int cuModuleLoadDataEx(void **module, const void *image) { return something(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return something(function); }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 0; return 0; }

static int nothing(void) { return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
  void *found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : (void *)nothing;
  if (status) *status = 0;
  return 0;
}
int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, status);
}

int cublasCreate_v2(void **handle) { return something(handle); }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasLtCreate(void **handle) { return something(handle); }
int cublasLtMatmulDescCreate(void **made) { return something(made); }
int cublasLtMatrixLayoutCreate(void **made) { return something(made); }
int cublasLtMatmulPreferenceCreate(void **made) { return something(made); }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results, int *num_found) {
  *num_found = 1; /* any algorithm will do */
  return 0;
}

#include "stubs.inc"
