/* bundle.h - the files that the program carries inside: templates, sources that new ops are made from, skills. */
#ifndef ADZE_CLI_BUNDLE_H
#define ADZE_CLI_BUNDLE_H

#include <stddef.h>

typedef struct adze_file {
    char path[200];
    const char *text; /* not ended by a zero */
    size_t size;
    int executable;
} adze_file;

/* The next file: *at is NULL before the first one. 0 after the last. */
int adze_bundle_next(const char **at, adze_file *file);
int adze_bundle_find(const char *path, adze_file *file);

#endif
