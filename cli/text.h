/* text.h - text that grows, and files written from it. */
#ifndef ADZE_CLI_TEXT_H
#define ADZE_CLI_TEXT_H

#include <stddef.h>

typedef struct adze_text { /* zeroed: empty; data is NULL or ended by a zero */
    char *data;
    size_t size, room;
} adze_text;

/* Each returns 0 when memory is short. */
int adze_text_add(adze_text *text, const char *data, size_t size);
int adze_text_print(adze_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Adds `data` with the names of an op changed: OP, adze_OP, adze_OP_args, adze_OP_cuda and the like. OP in the name
   of a file (ops/OP.h) or in a longer word stays as it is. */
int adze_text_renamed(adze_text *text, const char *data, size_t size, const char *from, const char *to);
/* Puts `insert` before `at`, an index. */
int adze_text_insert(adze_text *text, size_t at, const char *insert);
void adze_text_free(adze_text *text);

/* Writes a file, and the folders that it is in. 0 on failure: errno says why. */
int adze_write_file(const char *path, const char *data, size_t size, int executable);
int adze_is_folder(const char *path);
int adze_exists(const char *path);

#endif
