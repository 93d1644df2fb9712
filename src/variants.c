/* variants.c - the variants of a kernel: by name, as kernels of their own, and run by choice. */
#include "kernel.h"

#include <stdio.h>
#include <string.h>

int adze_variant_count(const adze_kernel *k)
{
    int n = 0;
    while (k->variants && k->variants->list[n].name)
        n++;
    return n;
}

int adze_variant_find(const adze_kernel *k, const char *name)
{
    for (int i = 0; i < adze_variant_count(k); i++)
        if (strcmp(k->variants->list[i].name, name) == 0)
            return i;
    return -1;
}

const adze_kernel *adze_variant_kernel(adze_variant_row *row, const adze_kernel *k, int i)
{
    row->kernel = *k;
    row->kernel.only = i + 1;
    row->kernel.name = row->name;
    snprintf(row->name, sizeof row->name, "%s/%s", k->name, k->variants->list[i].name);
    return &row->kernel;
}

typedef struct chosen_call {
    const adze_kernel *kernel;
    const void *args;
    adze_choice *choice;
} chosen_call;

static adze_status run_chosen(adze_stream stream, const void *call)
{
    const chosen_call *c = call;
    return c->kernel->variants->run(stream, c->args, c->choice);
}

adze_status adze_run_choice(const adze_kernel *k, adze_stream stream, const void *args, adze_choice *choice)
{
    const chosen_call call = {k, args, choice};
    choice->ran = -1;
    return k->on_cuda ? adze_cuda_call(run_chosen, stream, &call) : run_chosen(stream, &call);
}

int adze_accepts(const adze_kernel *k, adze_stream stream, const void *args)
{
    adze_choice choice = {.want = k->only - 1, .dry = 1};
    if (k->accepts && !k->accepts(stream, args))
        return 0;
    return !k->only || (adze_run_choice(k, stream, args, &choice) == ADZE_OK && choice.ran == choice.want);
}
