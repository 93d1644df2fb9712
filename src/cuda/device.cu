/* device.cu - CUDA devices: their properties (queried once), the current device, and whether launches may overlap.
 */
#include "cublaslt.cuh"
#include "launch.cuh"

#include <atomic>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES_MAX = 64, CLUSTER_SIZES = 16, CLUSTER_PORTABLE = 8 };

static struct {
    int count;
    struct {
        cuda_limits limits;
        std::atomic<int> code; /* the architecture that its code was compiled for; 0: not queried yet, -1: none */
        std::atomic<int> clustered[CLUSTER_SIZES + 1]; /* by size of a cluster; 0: not queried yet, -1: none */
    } device[DEVICES_MAX];
} machine;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static std::atomic<int> pdl_allowed{1};

extern "C" {
const cuda_module *adze_cuda_modules;
}

/* PDL needs sm_90 and code that was compiled for it: PTX of an older architecture has no dependency wait. */
static void query_devices()
{
    int count = 0, current = 0;
    const char *pdl = getenv("ADZE_PDL");
    pdl_allowed = !(pdl && strcmp(pdl, "0") == 0);
    if (cudaGetDeviceCount(&count) != cudaSuccess || cudaGetDevice(&current) != cudaSuccess)
        count = 0;
    cudaGetLastError();
    count = count < DEVICES_MAX ? count : DEVICES_MAX;
    for (int d = 0; d < count; d++) {
        int major = 0, minor = 0, shared = 0;
        cuda_limits &limits = machine.device[d].limits;
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, d);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, d);
        cudaDeviceGetAttribute(&limits.sm_count, cudaDevAttrMultiProcessorCount, d);
        cudaDeviceGetAttribute(&limits.sm_threads, cudaDevAttrMaxThreadsPerMultiProcessor, d);
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, d);
        limits.block_shared = shared;
        limits.sm = major * 10 + minor;
    }
    machine.count = count;
}

/* The architecture that this build's code for a device was compiled for, as in 90; 0 without code. The query loads
   the module. */
static int code_of(int device)
{
    if (machine.device[device].code == 0) {
        cudaFuncAttributes attributes;
        const bool ok = cudaFuncGetAttributes(&attributes, module_probe) == cudaSuccess;
        cudaGetLastError();
        machine.device[device].code = ok ? attributes.ptxVersion : -1;
    }
    const int code = machine.device[device].code;
    return code > 0 ? code : 0;
}
/* Whether that code has the dependency wait and clusters. */
static int has_wait(int device)
{
    return machine.device[device].limits.sm >= 90 && code_of(device) >= 90;
}

/* The library does not link against the driver. Threads that look the function up at the same time find the same one.
 */
extern "C" void *adze_cuda_map_encoder(void)
{
    static std::atomic<void *> known;
    void *entry = known;
    cudaDriverEntryPointQueryResult found;
    if (entry)
        return entry;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
        cudaGetLastError();
        return NULL;
    }
    known = entry;
    return entry;
}
extern "C" int adze_cuda_count(void)
{
    pthread_once(&once, query_devices);
    return machine.count;
}
extern "C" const cuda_limits *adze_cuda_limits(int device)
{
    return device >= 0 && device < adze_cuda_count() ? &machine.device[device].limits : NULL;
}
extern "C" int adze_cuda_sm(int device)
{
    const cuda_limits *limits = adze_cuda_limits(device);
    return limits ? limits->sm : 0;
}
extern "C" int adze_cuda_sm_count(int device)
{
    const cuda_limits *limits = adze_cuda_limits(device);
    return limits ? limits->sm_count : 0;
}
extern "C" void adze_cuda_name(int device, char *to, size_t size)
{
    cudaDeviceProp properties;
    const bool known = adze_cuda_limits(device) && cudaGetDeviceProperties(&properties, device) == cudaSuccess;
    cudaGetLastError();
    snprintf(to, size, "%s", known ? properties.name : "");
}
extern "C" int adze_cuda_pdl(int device)
{
    return pdl_allowed && has_wait(device);
}
extern "C" int adze_cuda_clusters(int device)
{
    return device >= 0 && device < adze_cuda_count() && has_wait(device);
}
/* Clusters lie within a GPC, and GPCs have different numbers of multiprocessors. A kernel asks for more than 8 blocks
   by an attribute, and not every GPU has them. */
extern "C" int adze_cuda_clustered(int device, int size)
{
    std::atomic<int> &known = machine.device[device].clustered[size];
    if (known == 0) {
        cudaLaunchConfig_t config = {};
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {(unsigned)size, 1, 1};
        config.gridDim = dim3((unsigned)size);
        config.blockDim = dim3(128);
        config.dynamicSmemBytes = (size_t)machine.device[device].limits.block_shared;
        config.attrs = &attribute;
        config.numAttrs = 1;
        int count = 0;
        cudaFuncSetAttribute(module_probe, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)config.dynamicSmemBytes);
        if (size > CLUSTER_PORTABLE)
            cudaFuncSetAttribute(module_probe, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        const bool ok = cudaOccupancyMaxActiveClusters(&count, module_probe, &config) == cudaSuccess && count > 0;
        cudaGetLastError();
        known = ok ? count : size <= CLUSTER_PORTABLE ? machine.device[device].limits.sm_count / size : -1;
    }
    return known > 0 ? (int)known : 0;
}
extern "C" int adze_cuda_tensor_cores(int device)
{
    return device >= 0 && device < adze_cuda_count() && code_of(device) >= 80;
}
extern "C" void adze_cuda_set_pdl(int on)
{
    adze_cuda_count();
    pdl_allowed = on;
}

/* Makes the stream's device current for the call, and the caller's again after it. */
extern "C" adze_status adze_cuda_call(adze_run_fn run, adze_stream stream, const void *args)
{
    int before = 0;
    cudaError_t e = cudaGetDevice(&before);
    if (e == cudaSuccess && before != stream.device)
        e = cudaSetDevice(stream.device);
    if (e != cudaSuccess)
        return adze_fail(ADZE_DEVICE, "device %d: %s", stream.device, cudaGetErrorString(e));
    const adze_status status = run(stream, args);
    if (before != stream.device)
        cudaSetDevice(before);
    return status;
}

/* Creates the context and loads every module. Drivers of CUDA 12.3 and newer can load a kernel of a loaded module
   even during stream capture. A module without code for the device is a variant for other devices, which no row of a
   kernel table selects here; but if this module has none, no module has. */
static adze_status prepare(adze_stream stream, const void *)
{
    for (const cuda_module *m = adze_cuda_modules; m; m = m->next) {
        cudaFuncAttributes attributes;
        const cudaError_t e = cudaFuncGetAttributes(&attributes, m->kernel);
        cudaGetLastError();
        const bool no_code = e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction ||
                             e == cudaErrorUnsupportedPtxVersion;
        if (no_code && m->kernel == (const void *)module_probe)
            return adze_fail(ADZE_DEVICE,
                             "prepare: device %d is sm_%d, this build of adze has code for " ADZE_CUDA_CODE,
                             stream.device, machine.device[stream.device].limits.sm);
        if (e != cudaSuccess && !no_code)
            return cuda_status("prepare", e);
    }
    has_wait(stream.device);
    adze_lt_prepare(stream.device); /* which need not be there */
    return ADZE_OK;
}
extern "C" adze_status adze_cuda_prepare(int device)
{
    const adze_stream stream = {device, NULL};
    return adze_cuda_call(prepare, stream, NULL);
}
