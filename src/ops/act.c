/* act.c - names of activations, and the halves of a glu: what an op made from activation or glu shares with it. */
#include "ops/act.h"

#include <string.h>

int32_t adze_act_from_name(const char *name)
{
    for (const adze_word *w = act_words; w->name && name; w++)
        if (strcmp(w->name, name) == 0)
            return w->value;
    return -1;
}

void adze_glu_halves(const adze_glu_args *a, adze_tensor *gate, adze_tensor *value)
{
    *gate = a->x;
    *value = a->value;
    if (a->value.dtype)
        return;
    const int64_t dim = gate->shape[gate->rank - 1] /= 2;
    *value = *gate;
    adze_tensor *second = a->value_first ? gate : value;
    if (second->data)
        second->data = (char *)second->data + (size_t)dim * adze_dtype_size(second->dtype);
}
