/* file.c - a text file as a whole, and calls as the lines of one. */
#include "cli.h"
#include "line.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

void adze_cli_lines_free(char **lines)
{
    for (char **line = lines; line && *line; line++)
        free(*line);
    free(lines);
}

char **adze_cli_lines(const char *option, char *error, size_t size)
{
    const int from_file = option[0] == '@';
    FILE *f = from_file ? fopen(option + 1, "r") : NULL;
    if (from_file && !f) {
        snprintf(error, size, "'%s' cannot be read", option + 1);
        return NULL;
    }
    char text[1024], **lines = NULL;
    int count = 0, ok = 1;
    for (int at = 1; ok && (f ? fgets(text, sizeof text, f) != NULL : at == 1); at++) {
        if (!f)
            snprintf(text, sizeof text, "%s", option);
        text[strcspn(text, "\r\n")] = '\0';
        if (f && (!text[0] || text[0] == '#'))
            continue;
        char why[400];
        adze_line line;
        ok = adze_line_parse(&line, NULL, text, why, sizeof why);
        if (!ok && f)
            snprintf(error, size, "line %d of '%.60s': %s", at, option + 1, why);
        else if (!ok)
            snprintf(error, size, "%s", why);
        char **more = realloc(lines, (size_t)(count + 2) * sizeof *lines);
        if (!more) {
            snprintf(error, size, "there is no memory");
            ok = 0;
            break;
        }
        lines = more;
        lines[count++] = strdup(text);
        lines[count] = NULL;
    }
    if (f)
        fclose(f);
    if (ok && !count)
        snprintf(error, size, "'%s' has no line", option + 1);
    if (!ok) {
        adze_cli_lines_free(lines);
        lines = NULL;
    }
    return lines;
}
