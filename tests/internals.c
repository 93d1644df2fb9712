/* internals.c - what no caller can show, seen from inside: how the args of an op grow, quotas and features of
   machines that are not this one, and a definition where CPU and CUDA part. Linked with the static library. */
#include "kernel.h"
#include "ops/act.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPECT_DETAIL adze_last_error()
#include "expect.h"

/* ---- An op that has grown ---- */

typedef struct adze_grown_args {
    adze_activation_args first;
    adze_tensor extra; /* [dim] */
    float factor;
    int32_t mode;
} adze_grown_args;

static adze_field grown_fields[8];
static adze_grown_args seen;

static adze_status grown_run(adze_stream stream, const void *args)
{
    (void)stream;
    memcpy(&seen, args, sizeof seen);
    return ADZE_OK;
}

static void check_growth(void)
{
    const adze_stream cpu = {ADZE_CPU, NULL};
    static const adze_field added[] = {
        {"extra", ADZE_OPTIONAL, offsetof(adze_grown_args, extra), NULL, {0, 0, 0}, NULL},
        {"factor", ADZE_FLOAT, offsetof(adze_grown_args, factor), NULL, {0, 0, 0}, NULL},
        {"mode", ADZE_INT, offsetof(adze_grown_args, mode), NULL, {0, 0, 0}, NULL},
        ADZE_FIELDS_END};
    static const adze_kernel kernels[] = {{"cpu", 0, 0, 0, NULL, grown_run, NULL, 0}, ADZE_KERNELS_END};
    int n = 0;
    for (; adze_op_activation.fields[n].name; n++)
        grown_fields[n] = adze_op_activation.fields[n];
    memcpy(grown_fields + n, added, sizeof added);
    adze_op op = adze_op_activation;
    op.args_size = sizeof(adze_grown_args);
    op.fields = grown_fields;
    op.kernels = kernels;

    /* A caller of the first version: what lies after its struct is not the library's to read. */
    static float x[6], out[6];
    const adze_tensor view = {x, {2, 3}, {3, 1}, 2, ADZE_F32};
    adze_grown_args args = {.first = {.call = ADZE_CALL(activation), .out = view, .x = view, .act = ADZE_ACT_RELU}};
    args.first.out.data = out;
    memset(&args.extra, 0x55, sizeof args - offsetof(adze_grown_args, extra));
    memset(&seen, 0x55, sizeof seen);
    expect(adze_dispatch(&op, cpu, &args) == ADZE_OK, "a caller of the first version is served");
    expect(seen.first.out.data == out && seen.first.act == ADZE_ACT_RELU, "with what it gave");
    expect(seen.extra.dtype == ADZE_NONE && seen.extra.data == NULL && seen.factor == 0 && seen.mode == 0,
           "and zeros for what came later");
    /* One from between: its struct ended with `extra`. */
    args.first.call.size = offsetof(adze_grown_args, factor);
    args.extra = (adze_tensor){x, {3}, {1}, 1, ADZE_F32};
    expect(adze_dispatch(&op, cpu, &args) == ADZE_OK && seen.extra.data == x && seen.factor == 0 && seen.mode == 0,
           "a caller of a version in between");
    args.first.call.size = sizeof args;
    args.factor = 2, args.mode = 7;
    expect(adze_dispatch(&op, cpu, &args) == ADZE_OK && seen.factor == 2 && seen.mode == 7, "a caller of today");
    args.first.call.size = sizeof(adze_activation_args) - 1;
    expect(adze_dispatch(&op, cpu, &args) == ADZE_BAD_ARG, "a size below the first");
}

/* ---- Quotas ---- */

static char root[] = "/tmp/adze-cgroup.XXXXXX";

static void write_file(const char *path, const char *text)
{
    char full[600];
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *slash = strchr(full + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    if (file) {
        fputs(text, file);
        fclose(file);
    }
}

static void check_quota(void)
{
    if (!mkdtemp(root)) {
        expect(0, "a folder for cgroups");
        return;
    }
    write_file("cpu.max", "max 100000\n");
    write_file("a/cpu.max", "350000 100000\n");
    write_file("a/b/cpu.max", "max 100000\n");
    write_file("a/c/cpu.max", "50000 100000\n");
    write_file("cpu/x/cpu.cfs_quota_us", "200000\n");
    write_file("cpu/x/cpu.cfs_period_us", "100000\n");
    write_file("cpu/y/cpu.cfs_quota_us", "-1\n");
    write_file("cpu/y/cpu.cfs_period_us", "100000\n");
    write_file("cpu,cpuacct/cpu.cfs_quota_us", "300000\n");
    write_file("cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    static const struct {
        const char *groups;
        int cpus;
    } cases[] = {
        {"0::/\n", 0},
        {"0::/a\n", 4}, /* three and a half */
        {"0::/a/b\n", 4},
        {"0::/a/c\n", 1}, /* half of one */
        {"0::/a/c/deeper\n", 1},
        {"0::/not/here\n", 0},
        {"3:cpuset:/a/c\n0::/a\n", 4},
        {"4:memory:/\n2:cpu:/x\n", 2},
        {"2:cpuacct,cpu:/x", 2},
        {"2:cpuset:/x\n", 0},
        {"2:cpu:/y\n", 3},                   /* no limit of its own; the other mount has one */
        {"2:cpu,cpuacct:/docker/0123\n", 3}, /* a path of the host, where the mount is the container's own */
        {"", 0},
        {"nonsense\n:\n::\n", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect(adze_cpu_quota(cases[i].groups, root) == cases[i].cpus, cases[i].groups);
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", root);
    if (system(command) != 0)
        printf("%s is still there\n", root);
    expect(adze_cpu_count() >= 1 && adze_cpu_count() <= sysconf(_SC_NPROCESSORS_CONF), "CPUs of this process");
}

/* ---- Features ---- */

static void check_features(void)
{
    /* A Haswell and a Skylake server, with all that their CPUID says of x86-64-v3 and v4. */
    const uint32_t ecx1 = 0x7ffafbff, ebx7 = 0x000027ab, v4 = ebx7 | 0xd0030000, extended = 0x00000021;
    expect(adze_x86_features(ecx1, ebx7, extended, 0x07) == ADZE_CPU_AVX2, "x86-64-v3");
    expect(adze_x86_features(ecx1, v4, extended, 0xe7) == (ADZE_CPU_AVX2 | ADZE_CPU_AVX512), "x86-64-v4");
    expect(adze_x86_features(ecx1, v4, extended, 0x07) == ADZE_CPU_AVX2,
           "a system that does not save 64-byte registers");
    expect(adze_x86_features(ecx1, v4, extended, 0x03) == 0, "a system that does not save 32-byte registers");
    static const int ecx1_bits[] = {0, 9, 12, 13, 19, 20, 22, 23, 27, 28, 29}, ebx7_bits[] = {3, 5, 8};
    static const int extended_bits[] = {0, 5}, v4_bits[] = {16, 17, 28, 30, 31};
    int missed = 0;
    for (size_t i = 0; i < sizeof ecx1_bits / sizeof *ecx1_bits; i++)
        missed += adze_x86_features(ecx1 & ~(1u << ecx1_bits[i]), v4, extended, 0xe7) != 0;
    for (size_t i = 0; i < sizeof ebx7_bits / sizeof *ebx7_bits; i++)
        missed += adze_x86_features(ecx1, v4 & ~(1u << ebx7_bits[i]), extended, 0xe7) != 0;
    for (size_t i = 0; i < sizeof extended_bits / sizeof *extended_bits; i++)
        missed += adze_x86_features(ecx1, v4, extended & ~(1u << extended_bits[i]), 0xe7) != 0;
    for (size_t i = 0; i < sizeof v4_bits / sizeof *v4_bits; i++)
        missed += adze_x86_features(ecx1, v4 & ~(1u << v4_bits[i]), extended, 0xe7) != ADZE_CPU_AVX2;
    expect(missed == 0, "each feature that -march may use is asked for");
    const uint64_t sve = 1u << 22 | 1u << 14 | 1u << 12 | 1u << 10 | 1u << 9 | 1u << 8 | 1u << 7;
    expect(adze_arm_features(sve, 0) == ADZE_CPU_SVE && adze_arm_features(sve & ~(1u << 8), 0) == 0 &&
               adze_arm_features(sve & ~(1u << 22), 0) == 0,
           "SVE and what armv8.2-a has with it");
    const uint64_t base = 1u << 12 | 1u << 8 | 1u << 7, bf16 = 1u << 14;
    expect(adze_arm_features(base, bf16) == ADZE_CPU_BF16 && adze_arm_features(base & ~(1u << 12), bf16) == 0 &&
               adze_arm_features(base, 0) == 0 && adze_arm_features(sve, bf16) == (ADZE_CPU_SVE | ADZE_CPU_BF16),
           "BF16, with SVE and without");
#if defined(__x86_64__)
    expect(!(adze_cpu_features() & ADZE_CPU_AVX2) ||
               (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")),
           "this machine has what it is said to have");
#endif
}

/* ---- The definition of rope_table ---- */

static void check_axis(void)
{
    float pos[2] = {1, 2}, freq[3] = {1, 1, 1};
    int32_t axis[3] = {1, 9000, -1};
    const adze_rope_table_args args = {.call = ADZE_CALL(rope_table),
                                       .pos = {pos, {1, 2}, {2, 1}, 2, ADZE_F32},
                                       .freq = {freq, {3}, {1}, 1, ADZE_F32},
                                       .axis = {axis, {3}, {1}, 1, ADZE_I32}};
    adze_value cos_value[3], sin_value[3], *const want[] = {cos_value, sin_value};
    adze_op_rope_table.reference(&args, want);
    expect(fabs(cos_value[0].v - cos(2)) < 1e-12 && isnan(cos_value[1].v) && isnan(cos_value[2].v) &&
               isnan(sin_value[1].v) && isnan(sin_value[2].v),
           "an axis that is not there gives NaN by definition");
}

/* ---- The bounds of activations ---- */

static void check_bounds(void)
{
    for (int act = ADZE_ACT_SILU; act <= ADZE_ACT_SIGMOID; act++)
        for (double v = -40; v <= 40; v += 10)
            expect(isfinite(act_value(act, (adze_value){v, 30}).e), "an argument far off has a finite bound");
}

int main(void)
{
    check_bounds();
    check_growth();
    check_quota();
    check_features();
    check_axis();
    return expect_report();
}
