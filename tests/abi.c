/* abi.c - callers built against another version of adze.h, run with today's library. Their structs end where readable
   memory ends, so that a byte read past the size they give is a crash. */
#include <adze.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPECT_DETAIL adze_last_error()
#include "expect.h"

/* The args of rms_norm as they were first published, and those of a version still to come. */
typedef struct first_args {
    adze_call call;
    adze_tensor out, sum, x, residual, weight, bias, gate, gate_table, scale, scale_table, shift, shift_table;
    float eps, weight_offset;
    int32_t rounding, out_dtype;
} first_args;
typedef struct newer_args {
    adze_rms_norm_args known;
    adze_tensor another;
    double number;
} newer_args;

static const adze_stream cpu = {ADZE_CPU, NULL};
enum { ROWS = 3, DIM = 20 };
static float x[ROWS][DIM], weight[DIM], bias[DIM], today[ROWS][DIM], out[ROWS][DIM];

static const void *at_the_end(const void *args, size_t size)
{
    static char *pages;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!pages) {
        pages = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED || mprotect(pages + 2 * page, page, PROT_NONE) != 0)
            return NULL;
    }
    return memcpy(pages + 2 * page - size, args, size);
}

static adze_status call(const void *args, size_t size)
{
    memset(out, 0x55, sizeof out);
    return adze_rms_norm(cpu, at_the_end(args, size));
}

static void check_layout(void)
{
    expect(sizeof(adze_tensor) == 96 && offsetof(adze_tensor, shape) == 8 && offsetof(adze_tensor, stride) == 48 &&
               offsetof(adze_tensor, rank) == 88 && offsetof(adze_tensor, dtype) == 92,
           "the layout of adze_tensor");
    expect(sizeof(adze_call) == 24 && offsetof(adze_call, scratch) == 8, "the layout of adze_call");
    expect(sizeof(adze_stream) == 16 && offsetof(adze_stream, handle) == 8, "the layout of adze_stream");
    expect(offsetof(adze_norm_args, out) == 24 && offsetof(adze_norm_args, weight) == 24 + 4 * 96 &&
               offsetof(adze_norm_args, eps) == 24 + 12 * 96 &&
               offsetof(adze_norm_args, out_dtype) == 24 + 12 * 96 + 12,
           "the layout of adze_norm_args");
    expect(ADZE_F32 == 1 && ADZE_F16 == 2 && ADZE_BF16 == 3 && ADZE_F64 == 10 && ADZE_DEVICE == 5 &&
               ADZE_ACT_SIGMOID == 7,
           "the numbers of enums");
    expect(adze_version() == ADZE_VERSION, "the version of the library that runs");
}

/* What configurations of Hugging Face call an activation. */
static void check_names(void)
{
    static const struct {
        const char *name;
        int32_t act;
    } names[] = {{"silu", ADZE_ACT_SILU},
                 {"swish", ADZE_ACT_SILU},
                 {"gelu", ADZE_ACT_GELU},
                 {"gelu_tanh", ADZE_ACT_GELU_TANH},
                 {"gelu_new", ADZE_ACT_GELU_TANH},
                 {"gelu_fast", ADZE_ACT_GELU_TANH},
                 {"gelu_pytorch_tanh", ADZE_ACT_GELU_TANH},
                 {"quick_gelu", ADZE_ACT_GELU_QUICK},
                 {"gelu_quick", ADZE_ACT_GELU_QUICK},
                 {"relu", ADZE_ACT_RELU},
                 {"relu2", ADZE_ACT_RELU2},
                 {"sigmoid", ADZE_ACT_SIGMOID},
                 {"gelu_newer", -1},
                 {"", -1},
                 {NULL, -1}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        expect(adze_act_from_name(names[i].name) == names[i].act, names[i].name ? names[i].name : "no name");
}

static void check_scratch(void)
{
    size_t bytes = 1;
    adze_group_norm_args args = {.call = ADZE_CALL(group_norm),
                                 .out = {NULL, {2, 4, 6}, {24, 6, 1}, 3, ADZE_F32},
                                 .x = {NULL, {2, 4, 6}, {24, 6, 1}, 3, ADZE_F32},
                                 .eps = 1e-6f,
                                 .groups = 2};
    expect(adze_group_norm_scratch(cpu, &args, &bytes) == ADZE_OK && bytes == 0, "scratch before there is memory");
    expect(adze_group_norm(cpu, &args) == ADZE_BAD_ARG && strstr(adze_last_error(), "the data of out is NULL"),
           "the call itself is refused");
    args.x.shape[1] = 5;
    expect(adze_group_norm_scratch(cpu, &args, &bytes) != ADZE_OK, "scratch of a call that is wrong");
}

int main(void)
{
    for (int i = 0; i < ROWS * DIM; i++)
        x[i / DIM][i % DIM] = (float)((i * 37) % 23) - 11;
    for (int i = 0; i < DIM; i++)
        weight[i] = 1 + (float)i / 8, bias[i] = (float)i;
    adze_rms_norm_args args = {
        .call = ADZE_CALL(rms_norm),
        .out = {out, {ROWS, DIM}, {DIM, 1}, 2, ADZE_F32},
        .x = {x, {ROWS, DIM}, {DIM, 1}, 2, ADZE_F32},
        .weight = {weight, {DIM}, {1}, 1, ADZE_F32},
    };
    check_layout();
    check_names();
    check_scratch();
    expect(call(&args, sizeof args) == ADZE_OK, "today's struct");
    memcpy(today, out, sizeof out);

    first_args first = {.call = {sizeof first, 0, NULL, 0}, .out = args.out, .x = args.x, .weight = args.weight};
    expect(call(&first, sizeof first) == ADZE_OK && memcmp(out, today, sizeof out) == 0,
           "the first published struct means what it meant");
    first.call.size = (uint32_t)offsetof(first_args, out_dtype);
    expect(call(&first, offsetof(first_args, out_dtype)) == ADZE_BAD_ARG &&
               strstr(adze_last_error(), "rms_norm: args.call.size is 1188, it must be at least 1192"),
           "a smaller one is refused");
    expect(out[0][0] == out[1][0] && memcmp(out[0], out[1], sizeof out[0]) == 0, "and nothing is written");

    /* The call of another op, by mistake. */
    adze_softmax_args softmax = {.call = ADZE_CALL(activation), .out = args.out, .x = args.x, .mask = args.weight};
    softmax.scale = 0.5f;
    expect(adze_softmax(cpu, &softmax) == ADZE_BAD_ARG &&
               strstr(adze_last_error(), "write .call = ADZE_CALL(softmax)"),
           "the size of another op's args is refused");
    adze_activation_args activation = {
        .call = ADZE_CALL(activation), .out = args.out, .x = args.x, .act = ADZE_ACT_RELU, .reserved = 1};
    expect(adze_activation(cpu, &activation) == ADZE_BAD_ARG &&
               strcmp(adze_last_error(), "activation: reserved is 1, it must be 0") == 0,
           "a reserved field that is set");

    newer_args newer = {.known = args};
    newer.known.call.size = sizeof newer;
    expect(call(&newer, sizeof newer) == ADZE_OK && memcmp(out, today, sizeof out) == 0,
           "a newer struct whose new fields are zero");
    newer.number = 1;
    expect(call(&newer, sizeof newer) == ADZE_BAD_ARG &&
               strstr(adze_last_error(), "belongs to a field of a newer adze.h"),
           "a newer struct with a field that is not known is refused");
    expect(out[0][0] == out[1][0] && memcmp(out[0], out[1], sizeof out[0]) == 0, "and nothing is written");
    newer.number = 0, newer.another.dtype = ADZE_F32;
    expect(call(&newer, sizeof newer) == ADZE_BAD_ARG, "so is one with a tensor that is not known");

    args.bias = (adze_tensor){bias, {DIM}, {1}, 1, ADZE_F32};
    expect(call(&args, sizeof args) == ADZE_OK && memcmp(out, today, sizeof out) != 0, "a field of today counts");
    uint32_t none = 0, part = sizeof(adze_call) - 1;
    expect(call(&none, sizeof none) == ADZE_BAD_ARG, "a size of 0");
    expect(call(&part, sizeof part) == ADZE_BAD_ARG, "a size that is not one");
    return expect_report();
}
