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

#define BLANKS " \t\r\n"

/* The words of a line up to an arrow, with one space between them; 0 when they are too many. */
static int tidy(char *to, const char *from)
{
    size_t n = 0;
    for (from += strspn(from, BLANKS); *from && strncmp(from, "->", 2) != 0; from += strspn(from, BLANKS)) {
        const size_t word = strcspn(from, BLANKS);
        if (n + word + 2 > ADZE_LINE_TEXT)
            return 0;
        if (n)
            to[n++] = ' ';
        memcpy(to + n, from, word);
        n += word, from += word;
    }
    to[n] = '\0';
    return 1;
}

char **adze_cli_lines(const char *option, char *error, size_t size)
{
    const int from_file = option[0] == '@';
    FILE *f = from_file ? fopen(option + 1, "r") : NULL;
    if (from_file && !f) {
        snprintf(error, size, "'%s' cannot be read", option + 1);
        return NULL;
    }
    char raw[4 * ADZE_LINE_TEXT], text[ADZE_LINE_TEXT], **lines = NULL;
    int count = 0, ok = 1;
    for (int at = 1; ok && (f ? fgets(raw, sizeof raw, f) != NULL : at == 1); at++) {
        const int whole = !f || strchr(raw, '\n') || feof(f);
        if (f && whole && (raw[0] == '#' || !raw[strspn(raw, BLANKS)]))
            continue;
        char why[400];
        adze_line line;
        ok = whole && tidy(text, f ? raw : option);
        if (!ok)
            snprintf(why, sizeof why, "a line has at most %d characters, and none that is zero", ADZE_LINE_TEXT - 1);
        else
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
