/* refusals.c - calls that once were taken and gave wrong numbers, or crashed: each is refused with a sentence that
   names what is wrong. Settings of the environment are tried in processes of their own. */
#include <adze.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define EXPECT_DETAIL adze_last_error()
#include "expect.h"

static const adze_stream cpu = {ADZE_CPU, NULL};

static void refused(adze_status status, const char *says)
{
    expect(status == ADZE_BAD_ARG && strcmp(adze_last_error(), says) == 0, says);
}

enum { ROWS = 4, DIM = 16, COUNT = ROWS * DIM };
static float memory[8][COUNT];
static adze_tensor view(int which)
{
    return (adze_tensor){memory[which], {ROWS, DIM}, {DIM, 1}, 2, ADZE_F32};
}

/* ---- Aliases ---- */

static void check_aliases(void)
{
    const adze_tensor heads = {memory[0], {1, 4, 2, 8}, {64, 16, 8, 1}, 4, ADZE_F32};
    const adze_tensor table = {memory[4], {4, 8}, {8, 1}, 2, ADZE_F32};
    adze_rope_args rope = {
        .call = ADZE_CALL(rope), .q_out = heads, .k_out = heads, .q = heads, .k = heads, .cos = table, .sin = table};
    rope.k.data = memory[1], rope.q_out.data = memory[2], rope.k_out.data = memory[3], rope.sin.data = memory[5];
    expect(adze_rope(cpu, &rope) == ADZE_OK, "rope with memory of its own");
    rope.q_out.data = memory[1];
    refused(adze_rope(cpu, &rope), "rope: q_out overlaps k; it may only be the same view as q");
    rope.q_out.data = memory[0], rope.k_out.data = memory[1];
    expect(adze_rope(cpu, &rope) == ADZE_OK, "rope in place");
    rope.k_out.data = memory[0];
    refused(adze_rope(cpu, &rope), "rope: q_out overlaps k_out; it may only be the same view as q");

    adze_rms_norm_args norm = {.call = ADZE_CALL(rms_norm),
                               .out = view(0),
                               .sum = view(1),
                               .x = view(2),
                               .residual = view(3),
                               .scale = view(4),
                               .shift = view(5),
                               .eps = 1e-6f};
    expect(adze_rms_norm(cpu, &norm) == ADZE_OK, "rms_norm with memory of its own");
    norm.sum = view(5);
    refused(adze_rms_norm(cpu, &norm), "rms_norm: sum overlaps shift; it may only be the same view as x or residual");
    norm.sum = view(0);
    refused(adze_rms_norm(cpu, &norm),
            "rms_norm: out overlaps sum; it may only be the same view as x or residual or shift");
    norm.sum = view(3), norm.out = view(4);
    refused(adze_rms_norm(cpu, &norm),
            "rms_norm: out overlaps scale; it may only be the same view as x or residual or shift");
    norm.sum = view(1), norm.out = view(2), norm.out.data = &memory[2][4];
    refused(adze_rms_norm(cpu, &norm), "rms_norm: out overlaps x and is not the same view");

    /* What the numbers were about: sum = shift, by another way. */
    for (int i = 0; i < COUNT; i++)
        memory[2][i] = (float)(i % 7) - 3, memory[3][i] = (float)(i % 5) - 2, memory[4][i] = 0.5f, memory[5][i] = 1;
    norm.out = view(0), norm.sum = view(1);
    adze_rms_norm(cpu, &norm);
    memcpy(memory[6], memory[0], sizeof memory[6]);
    norm.out = view(5), norm.sum = view(3);
    expect(adze_rms_norm(cpu, &norm) == ADZE_OK && memcmp(memory[5], memory[6], sizeof memory[6]) == 0,
           "out in place of shift and sum in place of residual");
    float table_memory[2][ROWS * 4] = {{0}};
    adze_rope_table_args args = {.call = ADZE_CALL(rope_table),
                                 .cos = {table_memory[0], {ROWS, 4}, {4, 1}, 2, ADZE_F32},
                                 .sin = {table_memory[1], {ROWS, 4}, {4, 1}, 2, ADZE_F32},
                                 .pos = {table_memory[0], {ROWS, 4}, {4, 1}, 2, ADZE_F32},
                                 .freq = {memory[4], {4}, {1}, 1, ADZE_F32}};
    refused(adze_rope_table(cpu, &args), "rope_table: cos overlaps pos; it needs memory of its own");
}

/* ---- Numbers ---- */

static void check_numbers(void)
{
    adze_rms_norm_args norm = {.call = ADZE_CALL(rms_norm), .out = view(0), .x = view(1), .eps = INFINITY};
    refused(adze_rms_norm(cpu, &norm), "rms_norm: eps is inf, it must be finite");
    norm.eps = -1;
    refused(adze_rms_norm(cpu, &norm), "rms_norm: eps is -1, it must not be negative");
    norm.eps = 0, norm.weight_offset = NAN;
    expect(adze_rms_norm(cpu, &norm) == ADZE_BAD_ARG && strstr(adze_last_error(), "rms_norm: weight_offset is"),
           "weight_offset");
    adze_softmax_args softmax = {.call = ADZE_CALL(softmax), .out = view(0), .x = view(1), .scale = -INFINITY};
    refused(adze_softmax(cpu, &softmax), "softmax: scale is -inf, it must be finite");
}

/* ---- The axis of rope_table ---- */

static void check_axis(void)
{
    float pos[2 * 3] = {0, 1, 2, 3, 4, 5}, freq[8] = {1, 1, 1, 1, 1, 1, 1, 1}, out[2][2 * 8];
    int32_t axis[8] = {0, 1, 2, 0, 1, 2, 0, 1};
    adze_rope_table_args a = {.call = ADZE_CALL(rope_table),
                              .cos = {out[0], {2, 8}, {8, 1}, 2, ADZE_F32},
                              .sin = {out[1], {2, 8}, {8, 1}, 2, ADZE_F32},
                              .pos = {pos, {2, 3}, {3, 1}, 2, ADZE_F32},
                              .freq = {freq, {8}, {1}, 1, ADZE_F32},
                              .axis = {axis, {8}, {1}, 1, ADZE_I32}};
    expect(adze_rope_table(cpu, &a) == ADZE_OK, "axes that are there");
    axis[5] = 9000;
    refused(adze_rope_table(cpu, &a), "rope_table: axis[5] is 9000, pos has axes 0 to 2");
    axis[5] = 3;
    refused(adze_rope_table(cpu, &a), "rope_table: axis[5] is 3, pos has axes 0 to 2");
    axis[5] = 0, axis[7] = -1;
    refused(adze_rope_table(cpu, &a), "rope_table: axis[7] is -1, pos has axes 0 to 2");
}

/* ---- The environment ---- */

/* What a call says in a process with this setting: run by this program itself. */
static int say(void)
{
    const adze_rms_norm_args norm = {.call = ADZE_CALL(rms_norm), .out = view(0), .x = view(1)};
    const adze_status status = adze_rms_norm(cpu, &norm);
    printf("%d %s", (int)status, status ? adze_last_error() : "");
    return 0;
}
static void check_setting(const char *program, const char *name, const char *value, int status, const char *says)
{
    char command[600], got[400] = "";
    snprintf(command, sizeof command, "%s='%s' '%s' say", name, value, program);
    FILE *pipe = popen(command, "r");
    const size_t n = pipe ? fread(got, 1, sizeof got - 1, pipe) : 0;
    got[n] = '\0';
    const int ok = pipe && pclose(pipe) == 0 && atoi(got) == status && strstr(got, says);
    if (!ok)
        printf("     %s=%s: %s\n", name, value, got);
    expect(ok, says);
}
static void check_settings(const char *program)
{
    check_setting(program, "ADZE_KERNEL", "rms_norm:cpu", ADZE_OK, "");
    check_setting(program, "ADZE_KERNEL", "softmax:cpu", ADZE_OK, "");
    check_setting(program, "ADZE_KERNEL", "", ADZE_OK, "");
    check_setting(program, "ADZE_KERNEL", "rms_norm:nosuch", ADZE_BAD_ARG,
                  "rms_norm: ADZE_KERNEL is 'rms_norm:nosuch'; rms_norm has ");
    check_setting(program, "ADZE_KERNEL", "nosuch:cpu", ADZE_BAD_ARG,
                  "rms_norm: ADZE_KERNEL is 'nosuch:cpu'; it must be op:kernel, with an op of rms_norm layer_norm");
    check_setting(program, "ADZE_KERNEL", "a name of forty characters or even more:cpu", ADZE_BAD_ARG,
                  " rope_table embed kv_append sample");
    check_setting(program, "ADZE_KERNEL", "rms_norm", ADZE_BAD_ARG, "it must be op:kernel");
    check_setting(program, "ADZE_THREADS", "1", ADZE_OK, "");
    check_setting(program, "ADZE_THREADS", "0", ADZE_OK, "");
    check_setting(program, "ADZE_THREADS", "many", ADZE_BAD_ARG,
                  "rms_norm: ADZE_THREADS is 'many', it must be 1 to 256, or 0 for the default");
    check_setting(program, "ADZE_THREADS", "-2", ADZE_BAD_ARG, "ADZE_THREADS is '-2'");
    check_setting(program, "ADZE_THREADS", "100000", ADZE_BAD_ARG, "ADZE_THREADS is '100000'");
}

/* ---- Frequencies ---- */

static void check_frequencies(void)
{
    double freq[8];
    int32_t axis[8], dims[3] = {8, 4, 4};
    float scale, pos[8], sizes[3] = {1, 1, 1};
    struct {
        adze_rope_spec known;
        double later;
    } newer = {.known = {.size = sizeof newer, .rotary_dim = 16, .rope_theta = 1e4}};
    expect(adze_rope_frequencies(&newer.known, 0, freq, &scale) == ADZE_OK, "a newer spec whose new field is zero");
    newer.later = 1;
    expect(adze_rope_frequencies(&newer.known, 0, freq, &scale) == ADZE_BAD_ARG &&
               strstr(adze_last_error(), "belongs to a field of a newer adze.h"),
           "a newer spec with a field that is not known is refused");
    refused(adze_rope_axes(3, dims, 1e4, NULL, axis), "rope_axes: freq is NULL");
    refused(adze_rope_axes(3, NULL, 1e4, freq, axis), "rope_axes: axes_dim is NULL");
    refused(adze_rope_fractions(16, 0, freq, axis), "rope_fractions: theta is 0, it must be above 0");
    refused(adze_rope_fractions(16, 1e4, freq, NULL), "rope_fractions: axis is NULL");
    refused(adze_rope_fraction_positions(dims, NULL, NULL, NULL, NULL), "rope_fraction_positions: pos is NULL");
    refused(adze_rope_fraction_positions(dims, sizes, sizes, NULL, pos),
            "rope_fraction_positions: base is NULL, it must be given with scale");
    dims[1] = -1;
    refused(adze_rope_fraction_positions(dims, NULL, NULL, NULL, pos),
            "rope_fraction_positions: size[1] is -1, it must not be negative");
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return say();
    check_aliases();
    check_numbers();
    check_axis();
    check_frequencies();
    check_settings(argv[0]);
    return expect_report();
}
