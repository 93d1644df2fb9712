/* file.c - a text file as a whole. */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>

char *adze_cli_read(const char *path)
{
    enum { MOST = 1 << 24 };
    FILE *f = fopen(path, "r");
    char *text = f ? calloc(1, MOST + 1) : NULL;
    if (text && fread(text, 1, MOST, f) == 0)
        text[0] = '\0';
    if (f)
        fclose(f);
    return text;
}
