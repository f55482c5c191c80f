/* A CUDA driver for a machine without one: device memory is host memory, and work is done when it
 * is asked for.
 *
 * It exists so that KVBM's real leader and worker run, and really move bytes, on a CPU. It covers
 * the driver calls that KVBM 1.6.1 makes; any other is missing, and KVBM stops at it. Streams and
 * events are names without a meaning here, because every copy has ended when its call returns.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };
enum { DRIVER_VERSION = 13000, COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76 };

typedef int status_t;
typedef void *handle_t;

static const size_t MEMORY_BYTES = (size_t)16 << 30;
static char the_context[64];
static __thread handle_t current_context;

static status_t new_handle(handle_t *out) {
  *out = calloc(1, 64);
  return *out ? SUCCESS : OUT_OF_MEMORY;
}

static status_t new_memory(handle_t *out, size_t size) {
  *out = NULL;
  return posix_memalign(out, 4096, size ? size : 4096) ? OUT_OF_MEMORY : SUCCESS;
}

static status_t release(handle_t pointer) {
  free(pointer);
  return SUCCESS;
}

static status_t move_bytes(void *to, const void *from, size_t size) {
  memmove(to, from, size);
  return SUCCESS;
}

/* Devices and contexts. */
status_t cuInit(unsigned flags) { (void)flags; return SUCCESS; }
status_t cuDriverGetVersion(int *version) { *version = DRIVER_VERSION; return SUCCESS; }
status_t cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
status_t cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
status_t cuDeviceGetName(char *name, int size, int device) {
  (void)device;
  strncpy(name, "host memory", (size_t)size);
  return SUCCESS;
}
status_t cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  memset(uuid, device + 1, 16);
  return SUCCESS;
}
status_t cuDeviceTotalMem_v2(size_t *size, int device) {
  (void)device;
  *size = MEMORY_BYTES;
  return SUCCESS;
}
status_t cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == COMPUTE_MAJOR ? 9 : attribute == COMPUTE_MINOR ? 0 : 1;
  return SUCCESS;
}
status_t cuDeviceGetDefaultMemPool(handle_t *pool, int device) { (void)device; *pool = the_context; return SUCCESS; }
status_t cuDeviceGetMemPool(handle_t *pool, int device) { (void)device; *pool = the_context; return SUCCESS; }
status_t cuDevicePrimaryCtxRetain(handle_t *context, int device) { (void)device; *context = the_context; return SUCCESS; }
status_t cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
status_t cuCtxSetCurrent(handle_t context) { current_context = context; return SUCCESS; }
status_t cuCtxGetCurrent(handle_t *context) { *context = current_context; return SUCCESS; }
status_t cuCtxPushCurrent_v2(handle_t context) { current_context = context; return SUCCESS; }
status_t cuCtxPopCurrent_v2(handle_t *context) { *context = current_context; return SUCCESS; }
status_t cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
status_t cuCtxSynchronize(void) { return SUCCESS; }
status_t cuCtxGetApiVersion(handle_t context, unsigned *version) { (void)context; *version = 3020; return SUCCESS; }
status_t cuMemGetInfo_v2(size_t *unused, size_t *total) { *unused = *total = MEMORY_BYTES; return SUCCESS; }

/* Streams and events: everything is already done. */
status_t cuStreamCreate(handle_t *stream, unsigned flags) { (void)flags; return new_handle(stream); }
status_t cuStreamCreateWithPriority(handle_t *stream, unsigned flags, int priority) { (void)flags; (void)priority; return new_handle(stream); }
status_t cuStreamDestroy_v2(handle_t stream) { return release(stream); }
status_t cuStreamSynchronize(handle_t stream) { (void)stream; return SUCCESS; }
status_t cuStreamQuery(handle_t stream) { (void)stream; return SUCCESS; }
status_t cuStreamWaitEvent(handle_t stream, handle_t event, unsigned flags) { (void)stream; (void)event; (void)flags; return SUCCESS; }
status_t cuStreamIsCapturing(handle_t stream, int *capturing) { (void)stream; *capturing = 0; return SUCCESS; }
status_t cuEventCreate(handle_t *event, unsigned flags) { (void)flags; return new_handle(event); }
status_t cuEventDestroy_v2(handle_t event) { return release(event); }
status_t cuEventRecord(handle_t event, handle_t stream) { (void)event; (void)stream; return SUCCESS; }
status_t cuEventSynchronize(handle_t event) { (void)event; return SUCCESS; }
status_t cuEventQuery(handle_t event) { (void)event; return SUCCESS; }
status_t cuEventElapsedTime(float *milliseconds, handle_t from, handle_t to) { (void)from; (void)to; *milliseconds = 0; return SUCCESS; }

/* Memory. */
status_t cuMemAlloc_v2(handle_t *out, size_t size) { return new_memory(out, size); }
status_t cuMemAllocAsync(handle_t *out, size_t size, handle_t stream) { (void)stream; return new_memory(out, size); }
status_t cuMemAllocFromPoolAsync(handle_t *out, size_t size, handle_t pool, handle_t stream) { (void)pool; (void)stream; return new_memory(out, size); }
status_t cuMemAllocManaged(handle_t *out, size_t size, unsigned flags) { (void)flags; return new_memory(out, size); }
status_t cuMemFree_v2(handle_t pointer) { return release(pointer); }
status_t cuMemFreeAsync(handle_t pointer, handle_t stream) { (void)stream; return release(pointer); }
status_t cuMemHostAlloc(handle_t *out, size_t size, unsigned flags) { (void)flags; return new_memory(out, size); }
status_t cuMemAllocHost_v2(handle_t *out, size_t size) { return new_memory(out, size); }
status_t cuMemFreeHost(handle_t pointer) { return release(pointer); }
status_t cuMemHostRegister_v2(handle_t pointer, size_t size, unsigned flags) { (void)pointer; (void)size; (void)flags; return SUCCESS; }
status_t cuMemHostUnregister(handle_t pointer) { (void)pointer; return SUCCESS; }
status_t cuMemHostGetDevicePointer_v2(handle_t *device, handle_t host, unsigned flags) { (void)flags; *device = host; return SUCCESS; }
status_t cuPointerGetAttribute(void *value, int attribute, handle_t pointer) { (void)attribute; (void)pointer; *(int *)value = 0; return SUCCESS; }
status_t cuPointerGetAttributes(unsigned count, int *attributes, void **values, handle_t pointer) { (void)count; (void)attributes; (void)values; (void)pointer; return SUCCESS; }
status_t cuMemPoolCreate(handle_t *pool, const void *properties) { (void)properties; return new_handle(pool); }
status_t cuMemPoolDestroy(handle_t pool) { return release(pool); }
status_t cuMemPoolSetAttribute(handle_t pool, int attribute, void *value) { (void)pool; (void)attribute; (void)value; return SUCCESS; }
status_t cuMemPoolGetAttribute(handle_t pool, int attribute, void *value) { (void)pool; (void)attribute; *(uint64_t *)value = 0; return SUCCESS; }
status_t cuMemPoolTrimTo(handle_t pool, size_t keep) { (void)pool; (void)keep; return SUCCESS; }
status_t cuMemsetD8_v2(handle_t to, unsigned char value, size_t size) { memset(to, value, size); return SUCCESS; }
status_t cuMemsetD8Async(handle_t to, unsigned char value, size_t size, handle_t stream) { (void)stream; memset(to, value, size); return SUCCESS; }

/* Copies. */
status_t cuMemcpy(void *to, void *from, size_t size) { return move_bytes(to, from, size); }
status_t cuMemcpyAsync(void *to, void *from, size_t size, handle_t stream) { (void)stream; return move_bytes(to, from, size); }
status_t cuMemcpyHtoD_v2(void *to, void *from, size_t size) { return move_bytes(to, from, size); }
status_t cuMemcpyDtoH_v2(void *to, void *from, size_t size) { return move_bytes(to, from, size); }
status_t cuMemcpyHtoDAsync_v2(void *to, void *from, size_t size, handle_t stream) { (void)stream; return move_bytes(to, from, size); }
status_t cuMemcpyDtoHAsync_v2(void *to, void *from, size_t size, handle_t stream) { (void)stream; return move_bytes(to, from, size); }
status_t cuMemcpyDtoDAsync_v2(void *to, void *from, size_t size, handle_t stream) { (void)stream; return move_bytes(to, from, size); }

/* Modules: KVBM has one kernel, which copies `count` spans of `size` bytes. Its arguments are the
 * table of sources, the table of destinations, the size and the count. */
status_t cuModuleLoadData(handle_t *module, const void *image) { (void)image; return new_handle(module); }
status_t cuModuleLoadDataEx(handle_t *module, const void *image, unsigned count, int *options, void **values) { (void)image; (void)count; (void)options; (void)values; return new_handle(module); }
status_t cuModuleUnload(handle_t module) { return release(module); }
status_t cuModuleGetFunction(handle_t *function, handle_t module, const char *name) { (void)module; (void)name; return new_handle(function); }
status_t cuLaunchKernel(handle_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, handle_t stream,
                        void **arguments, void **extra) {
  (void)function; (void)gx; (void)gy; (void)gz; (void)bx; (void)by; (void)bz;
  (void)shared; (void)stream; (void)extra;
  void **from = *(void ***)arguments[0];
  void **to = *(void ***)arguments[1];
  size_t size = *(size_t *)arguments[2];
  int count = *(int *)arguments[3];
  for (int index = 0; index < count; index++) memmove(to[index], from[index], size);
  return SUCCESS;
}

/* UCX, with which KVBM registers the device's memory, takes it for host memory, as it is, and NIXL
 * then refuses it. Preloaded, this answers in UCX's place; registering is UCX's own. */
enum { UCP_MEM_ATTR_FIELD_MEM_TYPE = 4, UCS_MEMORY_TYPE_CUDA = 1 };
struct ucp_mem_attr {
  uint64_t fields;
  void *address;
  size_t size;
  int memory_type;
};
signed char ucp_mem_query(const void *memory, struct ucp_mem_attr *attributes) {
  (void)memory;
  if (attributes->fields != UCP_MEM_ATTR_FIELD_MEM_TYPE) abort();
  attributes->memory_type = UCS_MEMORY_TYPE_CUDA;
  return 0;
}

status_t cuGetErrorName(status_t status, const char **name) { (void)status; *name = "NO_DEVICE_HERE"; return SUCCESS; }
status_t cuGetErrorString(status_t status, const char **text) { (void)status; *text = "there is no device here"; return SUCCESS; }
status_t cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, void *found) {
  (void)symbol; (void)version; (void)flags; (void)found;
  *function = NULL;
  return NOT_FOUND;
}
