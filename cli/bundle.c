/* bundle.c - the files that the program carries inside. bundle.sh wrote them one after the other, each after a line
   with its size, its mode and its path. */
#include "bundle.h"

#include <stdlib.h>
#include <string.h>

#ifdef ADZE_BUNDLE
__asm__(".section .rodata\n"
        ".globl adze_bundle_data\n.hidden adze_bundle_data\n"
        "adze_bundle_data:\n.incbin \"" ADZE_BUNDLE "\"\n.byte 0\n"
        ".text\n");
#else /* for tools that read this file without building it */
const char adze_bundle_data[] = "";
#endif
extern const char adze_bundle_data[] __attribute__((visibility("hidden")));

int adze_bundle_next(const char **at, adze_file *file)
{
    const char *head = *at ? *at : adze_bundle_data;
    if (!*head)
        return 0;
    char *end;
    file->size = strtoul(head, &end, 10);
    file->executable = end[1] == 'x';
    const char *const path = end + 3, *const line = strchr(path, '\n');
    const size_t n = (size_t)(line - path) < sizeof file->path ? (size_t)(line - path) : sizeof file->path - 1;
    memcpy(file->path, path, n);
    file->path[n] = '\0';
    file->text = line + 1;
    *at = file->text + file->size;
    return 1;
}

int adze_bundle_find(const char *path, adze_file *file)
{
    const char *at = NULL;
    while (adze_bundle_next(&at, file))
        if (strcmp(file->path, path) == 0)
            return 1;
    return 0;
}
