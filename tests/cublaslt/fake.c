/* fake.c - a library with the functions of cuBLASLt that adze calls, on memory of the host: it multiplies as NVIDIA's
   documentation says, by columns, and prints each product that it is asked for or runs. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID = 7, UNSUPPORTED = 15 };
enum { R_32F = 0, R_16BF = 14 };

typedef struct layout {
    int type;
    int64_t rows, columns, stride, batches, offset;
} layout;
typedef struct desc {
    int transposed, epilogue, bias_type, a_mode, b_mode;
    const void *bias;
    const float *a_scale, *b_scale;
} desc;
typedef struct preference {
    uint64_t workspace;
    uint32_t reductions, alignment[4];
} preference;
typedef struct result {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} result;

static int taken(void *to, size_t due, const void *value, size_t size)
{
    if (size == due)
        memcpy(to, value, size);
    return size == due ? OK : INVALID;
}

API int cublasLtCreate(void **handle)
{
    *handle = malloc(1);
    return getenv("FAKE_CUBLASLT_OLD_DRIVER") ? UNSUPPORTED : OK;
}
API int cublasLtDestroy(void *handle)
{
    free(handle);
    return OK;
}

API int cublasLtMatmulDescCreate(void **d, int compute, int scale)
{
    *d = calloc(1, sizeof(desc));
    return compute == 68 && scale == R_32F ? OK : UNSUPPORTED; /* floats, and no TF32 */
}
API int cublasLtMatmulDescDestroy(void *d)
{
    free(d);
    return OK;
}
API int cublasLtMatmulDescSetAttribute(desc *d, int attribute, const void *value, size_t size)
{
    switch (attribute) {
    case 3: return taken(&d->transposed, 4, value, size);
    case 7: return taken(&d->epilogue, 4, value, size);
    case 8: return taken(&d->bias, 8, value, size);
    case 17: return taken(&d->a_scale, 8, value, size);
    case 18: return taken(&d->b_scale, 8, value, size);
    case 26: return taken(&d->bias_type, 4, value, size);
    case 31: return taken(&d->a_mode, 4, value, size);
    case 32: return taken(&d->b_mode, 4, value, size);
    default: return INVALID;
    }
}

API int cublasLtMatrixLayoutCreate(void **to, int type, uint64_t rows, uint64_t columns, int64_t stride)
{
    layout *l = *to = calloc(1, sizeof *l);
    *l = (layout){type, (int64_t)rows, (int64_t)columns, stride, 1, 0};
    return stride >= (int64_t)rows ? OK : INVALID;
}
API int cublasLtMatrixLayoutDestroy(void *l)
{
    free(l);
    return OK;
}
API int cublasLtMatrixLayoutSetAttribute(layout *l, int attribute, const void *value, size_t size)
{
    int32_t batches = 1;
    const int status = attribute == 5   ? taken(&batches, 4, value, size)
                       : attribute == 6 ? taken(&l->offset, 8, value, size)
                                        : INVALID;
    l->batches = attribute == 5 ? batches : l->batches;
    return status;
}

API int cublasLtMatmulPreferenceCreate(void **p)
{
    *p = calloc(1, sizeof(preference));
    return OK;
}
API int cublasLtMatmulPreferenceDestroy(void *p)
{
    free(p);
    return OK;
}
API int cublasLtMatmulPreferenceSetAttribute(preference *p, int attribute, const void *value, size_t size)
{
    return attribute == 1                     ? taken(&p->workspace, 8, value, size)
           : attribute == 3                   ? taken(&p->reductions, 4, value, size)
           : attribute >= 5 && attribute <= 8 ? taken(&p->alignment[attribute - 5], 4, value, size)
                                              : INVALID;
}

/* Products of 3 rows have no algorithm; the others take 1000 bytes of workspace if they may. */
API int cublasLtMatmulAlgoGetHeuristic(void *handle, const desc *d, const layout *a, const layout *b, const layout *c,
                                       const layout *e, const preference *p, int most, result *results, int *count)
{
    (void)handle, (void)d, (void)c, (void)e;
    printf("ask %lld %lld %lld alignment %u %u %u %u reductions %u\n", (long long)b->columns, (long long)a->columns,
           (long long)a->rows, p->alignment[0], p->alignment[1], p->alignment[2], p->alignment[3], p->reductions);
    *count = most > 0 && b->columns != 3;
    results[0].workspace = p->workspace >= 1000 ? 1000 : 0;
    results[0].algorithm[7] = 77;
    return *count ? OK : UNSUPPORTED;
}

static float get(int type, const void *data, int64_t at)
{
    if (type == R_32F)
        return ((const float *)data)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)data)[at] << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
static void put(int type, void *data, int64_t at, float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (type == R_32F)
        ((float *)data)[at] = f;
    else
        ((uint16_t *)data)[at] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

API int cublasLtMatmul(void *handle, const desc *d, const float *alpha, const void *a, const layout *la,
                       const void *b, const layout *lb, const float *beta, const void *c, const layout *lc, void *e,
                       const layout *le, const uint64_t *algorithm, void *workspace, size_t workspace_size,
                       void *stream)
{
    (void)stream;
    if (!handle || algorithm[7] != 77 || (workspace_size && (uintptr_t)workspace % 256) || d->transposed != 1 ||
        la->rows != lb->rows || le->rows != la->columns || le->columns != lb->columns || lc->rows != le->rows ||
        lc->columns != le->columns || lc->type != le->type || (d->epilogue && d->bias_type != le->type))
        return INVALID;
    for (int64_t batch = 0; batch < le->batches; batch++)
        for (int64_t column = 0; column < le->columns; column++)
            for (int64_t row = 0; row < le->rows; row++) {
                double sum = 0;
                for (int64_t i = 0; i < la->rows; i++)
                    sum += (double)get(la->type, a, batch * la->offset + row * la->stride + i) *
                           (double)get(lb->type, b, batch * lb->offset + column * lb->stride + i);
                if (d->a_scale)
                    sum *= (double)d->a_scale[d->a_mode == 3 ? row : 0];
                if (d->b_scale)
                    sum *= (double)d->b_scale[d->b_mode == 3 ? column : 0];
                sum *= (double)*alpha;
                if (*beta != 0)
                    sum += (double)*beta * (double)get(lc->type, c, batch * lc->offset + column * lc->stride + row);
                if (d->epilogue == 4)
                    sum += (double)get(d->bias_type, d->bias, row);
                put(le->type, e, batch * le->offset + column * le->stride + row, (float)sum);
            }
    printf("run %lld %lld %lld workspace %zu\n", (long long)le->columns, (long long)le->rows, (long long)la->rows,
           workspace_size);
    return OK;
}
