/* gpu.h - where a call runs: memory of the host or of a GPU (gpu.c), and streams and graphs of a GPU (graph.c).
   Messages are NULL when all is well. */
#ifndef ADZE_CHECK_GPU_H
#define ADZE_CHECK_GPU_H

#include "adze.h"

void *adze_memory_take(adze_stream stream, size_t bytes);
void adze_memory_give(adze_stream stream, void *memory);
const char *adze_memory_write(adze_stream stream, void *to, const void *from, size_t bytes);
const char *adze_memory_read(adze_stream stream, void *to, const void *from, size_t bytes);
const char *adze_memory_sync(adze_stream stream);

const char *adze_gpu_open(adze_stream *stream); /* makes a stream on its device */
void adze_gpu_close(adze_stream stream);
const char *adze_gpu_repeat(void *memory, size_t bytes, size_t total); /* the first bytes, over and over */
void adze_gpu_pdl(int on);
const char *adze_graph_begin(adze_stream stream);
const char *adze_graph_end(adze_stream stream, void **graph);
const char *adze_graph_time(adze_stream stream, void *graph, double *us);
void adze_graph_free(void *graph);
void adze_gpu_describe(int device, char *name, size_t size, size_t *memory);

#endif
