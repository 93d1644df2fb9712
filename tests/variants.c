/* variants.c - a kernel with two variants: which calls they take, how one is run by name, and which one a table of
   tuned calls gives. */
#include "kernel.h"

#define EXPECT_DETAIL adze_last_error()
#include "expect.h"
#include "variants/op.c"

static const adze_stream cpu = {ADZE_CPU, NULL};
static float x[64], out[64];

static adze_activation_args call_of(int64_t rows, int64_t dim)
{
    const adze_tensor view = {x, {rows, dim}, {dim, 1}, 2, ADZE_F32};
    adze_activation_args args = {.call = ADZE_CALL(activation), .out = view, .x = view, .act = ADZE_ACT_RELU};
    args.out.data = out;
    return args;
}

/* The variant that a call takes; -2: it fails. */
static int chosen(int64_t rows, int64_t dim, int untuned)
{
    const adze_activation_args args = call_of(rows, dim);
    adze_choice choice = {.want = -1, .dry = 1, .untuned = untuned};
    out[0] = -1;
    if (adze_run_choice(&kernels[0], cpu, &args, &choice) != ADZE_OK || out[0] != -1)
        return -2;
    return choice.ran;
}

static void check_names(void)
{
    adze_variant_row row;
    const adze_activation_args odd = call_of(2, 3), even = call_of(2, 4), none = call_of(0, 4);
    expect(adze_variant_count(&kernels[0]) == 2 && adze_variant_find(&kernels[0], "any") == ANY &&
               adze_variant_find(&kernels[0], "nosuch") == -1,
           "variants by name");
    const adze_kernel *k = adze_variant_kernel(&row, &kernels[0], EVEN);
    expect(strcmp(k->name, "plain/even") == 0 && k->only == EVEN + 1, "a variant as a kernel");
    expect(adze_accepts(k, cpu, &even) && !adze_accepts(k, cpu, &odd) && !adze_accepts(k, cpu, &none),
           "the calls that it takes");
    expect(adze_accepts(&kernels[0], cpu, &odd) && adze_accepts(&kernels[0], cpu, &none), "the kernel takes all");
    x[0] = 3, out[0] = 0;
    expect(adze_dispatch_to(&adze_op_activation, k, cpu, &even) == ADZE_OK && out[0] == 3, "it runs by name");
    out[0] = 0;
    expect(adze_dispatch_to(&adze_op_activation, k, cpu, &odd) == ADZE_NO_KERNEL && out[0] == 0,
           "a call that it does not take is refused");
    expect(chosen(2, 4, 0) == EVEN && chosen(2, 3, 0) == ANY && chosen(0, 4, 0) == -1, "the kernel's own choice");
}

static void check_table(void)
{
    const int f32 = ADZE_F32;
    const adze_tuned_row rows[] = {
        {.card = "Card A", .sm_count = 10},
        {.op = "activation", .form = f32, .least = 2, .most = 5, .size = {4}, .variant = "any", .before = "even"},
        {.op = "activation", .form = f32, .least = 6, .most = 9, .size = {4}, .variant = "even", .before = "even"},
        {.op = "activation", .form = f32, .least = 1, .most = 9, .size = {3}, .variant = "even", .before = "any"},
        {.op = "activation", .form = f32, .least = 1, .most = 9, .size = {8}, .variant = "nosuch", .before = "even"},
        {.card = "Card B", .sm_count = 10},
        {.op = "activation", .form = f32, .least = 1, .most = 9, .size = {6}, .variant = "any", .before = "even"},
        {.card = NULL},
    };
    const adze_choice problem = {.form = f32, .size = {3, 4, 0, 0}}, of_b = {.form = f32, .size = {3, 6, 0, 0}};
    const char *const cards[] = {"Card B", "Card A", "Card A", "Card C"};
    const int sm_counts[] = {10, 10, 9, 10};
    expect(adze_tuned(&adze_op_activation, 0, &problem) == -1, "without rows the kernel chooses");
    adze_tuned_load(rows, 4, cards, sm_counts);
    expect(adze_tuned(&adze_op_activation, 1, &problem) == ANY && adze_tuned(&adze_op_activation, 0, &of_b) == ANY,
           "each card has rows of its own");
    expect(adze_tuned(&adze_op_activation, 0, &problem) == -1 && adze_tuned(&adze_op_activation, 1, &of_b) == -1,
           "and not those of another");
    expect(adze_tuned(&adze_op_activation, 2, &problem) == -1, "a card of this name with other SMs has none");
    expect(adze_tuned(&adze_op_activation, 3, &problem) == -1 &&
               adze_tuned(&adze_op_activation, -1, &problem) == -1 &&
               adze_tuned(&adze_op_activation, 99, &problem) == -1,
           "nor a card without a table, nor the CPU");
    expect(adze_tuned(&adze_op_glu, 1, &problem) == -1, "another op");
    adze_tuned_load(rows, 1, cards + 1, sm_counts);
    expect(chosen(2, 4, 0) == ANY && chosen(5, 4, 0) == ANY, "a call in the range of a row takes its variant");
    expect(chosen(1, 4, 0) == EVEN && chosen(6, 4, 0) == EVEN, "not those beyond");
    expect(chosen(2, 4, 1) == EVEN, "a call that asks for the kernel's own choice");
    expect(chosen(2, 8, 0) == EVEN, "a name that this build does not have");
    adze_tuned_load(rows, 0, NULL, NULL);
    expect(chosen(2, 4, 0) == EVEN, "no card");
}

int main(void)
{
    check_names();
    check_table();
    return expect_report();
}
