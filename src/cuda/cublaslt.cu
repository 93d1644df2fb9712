/* cublaslt.cu - opens cuBLASLt, finds its algorithms and runs them (cublaslt.cuh).

   What the library declares is written out here, as it is the same in its versions 11 to 13: a build needs no header
   of it. Its matrices are stored by columns: to it, out is w times x, w is transposed, and m is our n. */
#include "cublaslt.cuh"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

enum { DEVICES_MAX = 64, ALGORITHMS = 512 };

enum { LT_OK = 0, LT_COMPUTE_32F = 68 };
enum { LAYOUT_BATCH_COUNT = 5, LAYOUT_BATCH_OFFSET = 6 };
enum {
    DESC_TRANS_A = 3,
    DESC_EPILOGUE = 7,
    DESC_BIAS_POINTER = 8,
    DESC_A_SCALE_POINTER = 17,
    DESC_B_SCALE_POINTER = 18,
    DESC_BIAS_TYPE = 26,
    DESC_A_SCALE_MODE = 31, /* these two from version 12.8 on */
    DESC_B_SCALE_MODE = 32
};
enum { EPILOGUE_BIAS = 4, OP_TRANSPOSED = 1, SCALE_OUTER_VECTOR = 3, REDUCTION_COMPUTE_TYPE = 2 };
enum { PREFERENCE_WORKSPACE = 1, PREFERENCE_REDUCTIONS = 3, PREFERENCE_ALIGNMENT_A = 5 }; /* then of B, C and D */

struct lt_result {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

/* The functions, each by its name in the library. */
#define LT_FUNCTIONS(X)                                                                                              \
    X(Create, (void **handle))                                                                                       \
    X(Destroy, (void *handle))                                                                                       \
    X(MatmulDescCreate, (void **desc, int compute, int scale))                                                       \
    X(MatmulDescDestroy, (void *desc))                                                                               \
    X(MatmulDescSetAttribute, (void *desc, int attribute, const void *value, size_t size))                           \
    X(MatrixLayoutCreate, (void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride))                \
    X(MatrixLayoutDestroy, (void *layout))                                                                           \
    X(MatrixLayoutSetAttribute, (void *layout, int attribute, const void *value, size_t size))                       \
    X(MatmulPreferenceCreate, (void **preference))                                                                   \
    X(MatmulPreferenceDestroy, (void *preference))                                                                   \
    X(MatmulPreferenceSetAttribute, (void *preference, int attribute, const void *value, size_t size))               \
    X(MatmulAlgoGetHeuristic, (void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference,       \
                               int most, lt_result *results, int *count))                                            \
    X(Matmul, (void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b,            \
               void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,             \
               const uint64_t *algorithm, void *workspace, size_t workspace_size, cudaStream_t stream))

static struct {
#define X(name, parameters) int(*name) parameters;
    LT_FUNCTIONS(X)
#undef X
} lt;

/* What distinguishes products for which algorithms may differ, without padding: keys are compared as bytes. */
struct lt_key {
    int64_t m, n, k, batches;
    int64_t row[4], batch[4]; /* of out, x, w, residual */
    size_t workspace;
    int alignment[5]; /* of these and bias, in bytes; 0: absent */
    int device, dtype, out_dtype, scales, reserved;
};
static_assert(sizeof(lt_key) == 13 * 8 + 10 * 4, "no padding");
struct lt_entry {
    lt_key key;
    lt_algorithm algorithm;
    int state; /* 0: free, 1: found, -1: there is none */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of all below, and of opening */
static void *handles[DEVICES_MAX];
static int tried[DEVICES_MAX]; /* whether a handle was asked for */
static void *library;
static lt_entry entries[ALGORITHMS]; /* by the hash of the key: a later one takes the place of an earlier */

/* In a graph's capture a thread may otherwise do nothing that allocates or loads code, as cuBLASLt may the first time
   that a kernel of it runs. */
static cudaStreamCaptureMode set_capture_mode(cudaStreamCaptureMode mode)
{
    if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess)
        cudaGetLastError();
    return mode;
}

static bool find_functions(void *from)
{
    void *symbol = NULL;
#define X(name, parameters)                                                                                          \
    symbol = dlsym(from, "cublasLt" #name);                                                                          \
    memcpy(&lt.name, &symbol, sizeof symbol);                                                                        \
    if (!symbol)                                                                                                     \
        return false;
    LT_FUNCTIONS(X)
#undef X
    return true;
}

/* A version that the process has already, as PyTorch's, else one of the machine's. A library that is newer than the
   driver makes no handle. */
static void *open_library(void **handle)
{
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11",
                                        "libcublasLt.so"};
    for (const int already : {RTLD_NOLOAD, 0})
        for (const char *name : names) {
            void *const found = dlopen(name, RTLD_NOW | RTLD_LOCAL | already);
            if (found && find_functions(found) && lt.Create(handle) == LT_OK)
                return found;
            if (found)
                dlclose(found);
        }
    return NULL;
}

/* The device's handle, NULL if there is none. The mutex is held. */
static void *handle_of(int device)
{
    if (device < 0 || device >= DEVICES_MAX || tried[device])
        return device < 0 || device >= DEVICES_MAX ? NULL : handles[device];
    int before = device;
    cudaGetDevice(&before);
    if (before != device)
        cudaSetDevice(device);
    const cudaStreamCaptureMode mode = set_capture_mode(cudaStreamCaptureModeRelaxed);
    void *handle = NULL;
    if (!library)
        library = open_library(&handle);
    else if (lt.Create(&handle) != LT_OK)
        handle = NULL;
    set_capture_mode(mode);
    if (before != device)
        cudaSetDevice(before);
    tried[device] = 1;
    return handles[device] = library ? handle : NULL;
}

extern "C" int adze_lt_prepare(int device)
{
    pthread_mutex_lock(&mutex);
    const int there = handle_of(device) != NULL;
    pthread_mutex_unlock(&mutex);
    return there;
}

static int type_of(int dtype)
{
    return dtype == ADZE_F32    ? CUDA_R_32F
           : dtype == ADZE_F16  ? CUDA_R_16F
           : dtype == ADZE_BF16 ? CUDA_R_16BF
                                : CUDA_R_8F_E4M3;
}

/* The product as cuBLASLt has it: layouts of w, x, residual and out, in its order. */
struct lt_objects {
    void *desc, *a, *b, *c, *d;
    bool ok;
};

static void *layout_of(lt_objects *o, const lt_product *p, int dtype, int64_t rows, int64_t columns,
                       const lt_matrix *matrix)
{
    void *layout = NULL;
    const int32_t batches = (int32_t)p->batches;
    o->ok = o->ok &&
            lt.MatrixLayoutCreate(&layout, type_of(dtype), (uint64_t)columns, (uint64_t)rows, matrix->row) == LT_OK;
    if (p->batches > 1)
        o->ok =
            o->ok && lt.MatrixLayoutSetAttribute(layout, LAYOUT_BATCH_COUNT, &batches, sizeof batches) == LT_OK &&
            lt.MatrixLayoutSetAttribute(layout, LAYOUT_BATCH_OFFSET, &matrix->batch, sizeof matrix->batch) == LT_OK;
    return layout;
}

template <typename V>
static void set(lt_objects *o, int attribute, V value)
{
    o->ok = o->ok && lt.MatmulDescSetAttribute(o->desc, attribute, &value, sizeof value) == LT_OK;
}

static lt_objects make_objects(const lt_product *p)
{
    lt_objects o = {};
    o.ok = lt.MatmulDescCreate(&o.desc, LT_COMPUTE_32F, CUDA_R_32F) == LT_OK;
    set<int32_t>(&o, DESC_TRANS_A, OP_TRANSPOSED);
    if (p->bias) {
        set<uint32_t>(&o, DESC_EPILOGUE, EPILOGUE_BIAS);
        set<void *>(&o, DESC_BIAS_POINTER, p->bias);
        set<int32_t>(&o, DESC_BIAS_TYPE, type_of(p->out_dtype));
    }
    if (p->scales == LT_VECTORS) {
        set<int32_t>(&o, DESC_A_SCALE_MODE, SCALE_OUTER_VECTOR);
        set<int32_t>(&o, DESC_B_SCALE_MODE, SCALE_OUTER_VECTOR);
    }
    if (p->scales != LT_UNSCALED) {
        set<const void *>(&o, DESC_A_SCALE_POINTER, p->w_scale);
        set<const void *>(&o, DESC_B_SCALE_POINTER, p->x_scale);
    }
    o.a = layout_of(&o, p, p->dtype, p->n, p->k, &p->w);
    o.b = layout_of(&o, p, p->dtype, p->m, p->k, &p->x);
    o.c = layout_of(&o, p, p->out_dtype, p->m, p->n, p->residual.data ? &p->residual : &p->out);
    o.d = layout_of(&o, p, p->out_dtype, p->m, p->n, &p->out);
    return o;
}

static void free_objects(const lt_objects *o)
{
    for (void *layout : {o->a, o->b, o->c, o->d})
        if (layout)
            lt.MatrixLayoutDestroy(layout);
    if (o->desc)
        lt.MatmulDescDestroy(o->desc);
}

/* What divides the addresses of all batches, up to LT_ALIGNMENT. */
static int alignment_of(const void *data, int64_t batch_bytes)
{
    const uint64_t bits = (uint64_t)(uintptr_t)data | (uint64_t)batch_bytes | LT_ALIGNMENT;
    return (int)(bits & ~(bits - 1));
}

static lt_key key_of(int device, const lt_product *p, size_t workspace)
{
    lt_key key = {};
    const lt_matrix *const matrices[] = {&p->out, &p->x, &p->w, &p->residual};
    const int64_t size = (int64_t)adze_dtype_size(p->dtype), out_size = (int64_t)adze_dtype_size(p->out_dtype);
    key.m = p->m, key.n = p->n, key.k = p->k, key.batches = p->batches;
    for (int i = 0; i < 4; i++) {
        const lt_matrix *const matrix = matrices[i];
        if (matrix == &p->residual && !matrix->data)
            continue;
        key.row[i] = matrix->row, key.batch[i] = p->batches > 1 ? matrix->batch : 0;
        key.alignment[i] = alignment_of(matrix->data, key.batch[i] * (i == 1 || i == 2 ? size : out_size));
    }
    key.alignment[4] = p->bias ? alignment_of(p->bias, 0) : 0;
    key.workspace = workspace;
    key.device = device, key.dtype = p->dtype, key.out_dtype = p->out_dtype, key.scales = p->scales;
    return key;
}

static unsigned hash_of(const lt_key *key)
{
    uint64_t hash = 14695981039346656037u, word;
    for (size_t at = 0; at + sizeof word <= sizeof *key; at += sizeof word) {
        memcpy(&word, (const char *)key + at, sizeof word);
        hash = (hash ^ word) * 1099511628211u;
        hash ^= hash >> 29;
    }
    return (unsigned)(hash >> 20) % ALGORITHMS;
}

/* The library's first choice. Parts of k are added as floats: no other scheme has the result of one sum. */
static bool ask(void *handle, const lt_product *p, const lt_key *key, lt_algorithm *algorithm)
{
    const int32_t alignments[] = {key->alignment[2], key->alignment[1],
                                  p->residual.data ? key->alignment[3] : key->alignment[0], key->alignment[0]};
    const uint64_t workspace = key->workspace;
    const uint32_t reductions = REDUCTION_COMPUTE_TYPE;
    const lt_objects o = make_objects(p);
    void *preference = NULL;
    bool ok = o.ok && lt.MatmulPreferenceCreate(&preference) == LT_OK;
    ok = ok &&
         lt.MatmulPreferenceSetAttribute(preference, PREFERENCE_WORKSPACE, &workspace, sizeof workspace) == LT_OK;
    ok = ok &&
         lt.MatmulPreferenceSetAttribute(preference, PREFERENCE_REDUCTIONS, &reductions, sizeof reductions) == LT_OK;
    for (int i = 0; i < 4; i++)
        ok = ok && lt.MatmulPreferenceSetAttribute(preference, PREFERENCE_ALIGNMENT_A + i, &alignments[i],
                                                   sizeof alignments[i]) == LT_OK;
    lt_result result = {};
    int count = 0;
    ok = ok &&
         lt.MatmulAlgoGetHeuristic(handle, o.desc, o.a, o.b, o.c, o.d, preference, 1, &result, &count) == LT_OK &&
         count > 0 && result.state == LT_OK && result.workspace <= key->workspace;
    memcpy(algorithm->data, result.algorithm, sizeof algorithm->data);
    algorithm->workspace = result.workspace;
    if (preference)
        lt.MatmulPreferenceDestroy(preference);
    free_objects(&o);
    return ok;
}

extern "C" int adze_lt_find(int device, const lt_product *product, size_t workspace, lt_algorithm *algorithm)
{
    const lt_key key = key_of(device, product, workspace);
    lt_entry *const entry = &entries[hash_of(&key)];
    pthread_mutex_lock(&mutex);
    void *const handle = handle_of(device);
    if (handle && (!entry->state || memcmp(&entry->key, &key, sizeof key) != 0)) {
        int before = device;
        cudaGetDevice(&before);
        if (before != device)
            cudaSetDevice(device);
        entry->key = key;
        entry->state = ask(handle, product, &key, &entry->algorithm) ? 1 : -1;
        if (before != device)
            cudaSetDevice(before);
    }
    const int found = handle && entry->state > 0;
    if (found)
        *algorithm = entry->algorithm;
    pthread_mutex_unlock(&mutex);
    return found;
}

extern "C" int adze_lt_run(adze_stream stream, const lt_product *p, const lt_algorithm *algorithm, void *workspace)
{
    const float one = 1, beta = p->residual.data ? 1.0f : 0.0f;
    void *const c = p->residual.data ? p->residual.data : p->out.data;
    const lt_objects o = make_objects(p);
    const cudaStreamCaptureMode mode = set_capture_mode(cudaStreamCaptureModeRelaxed);
    const bool ok = o.ok && lt.Matmul(handles[stream.device], o.desc, &one, p->w.data, o.a, p->x.data, o.b, &beta, c,
                                      o.c, p->out.data, o.d, algorithm->data, workspace, algorithm->workspace,
                                      (cudaStream_t)stream.handle) == LT_OK;
    set_capture_mode(mode);
    free_objects(&o);
    return ok;
}
