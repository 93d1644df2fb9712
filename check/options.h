/* options.h - what `adze check` and `adze check --self` are asked for. */
#ifndef ADZE_CHECK_OPTIONS_H
#define ADZE_CHECK_OPTIONS_H

typedef struct adze_check_options {
    const char *op;      /* NULL: all */
    const char *kernel;  /* the same, such as "cpu_avx2" */
    const char *require; /* NULL, or "cuda" */
    int device;          /* ADZE_CPU, a CUDA device, or ADZE_ALL_DEVICES */
    int verbose, self;
    int brief; /* one dtype of each line, in turn */
    int small; /* no calls of much arithmetic */
    int huge;  /* also the lines above 2^31 elements, on GPUs */
} adze_check_options;
#define ADZE_ALL_DEVICES (-2)
/* 0 when there is no such op or kernel, or options exclude each other: then a sentence has been printed. */
int adze_check_options_hold(const adze_check_options *options);

#endif
