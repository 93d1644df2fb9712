/* text.c - text that grows, and files written from it. */
#include "text.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int adze_text_add(adze_text *text, const char *data, size_t size)
{
    if (text->size + size + 1 > text->room) {
        const size_t room = 2 * (text->size + size) + 256;
        char *grown = realloc(text->data, room);
        if (!grown)
            return 0;
        text->data = grown, text->room = room;
    }
    memcpy(text->data + text->size, data, size);
    text->size += size;
    text->data[text->size] = '\0';
    return 1;
}

int adze_text_print(adze_text *text, const char *format, ...)
{
    char *line = NULL;
    va_list ap;
    va_start(ap, format);
    const int n = vasprintf(&line, format, ap);
    va_end(ap);
    if (n < 0)
        return 0;
    const int ok = adze_text_add(text, line, (size_t)n);
    free(line);
    return ok;
}

int adze_text_insert(adze_text *text, size_t at, const char *insert)
{
    const size_t n = strlen(insert), tail = text->size - at;
    if (!adze_text_add(text, insert, n))
        return 0;
    memmove(text->data + at + n, text->data + at, tail);
    memcpy(text->data + at, insert, n);
    return 1;
}

void adze_text_free(adze_text *text)
{
    free(text->data);
    *text = (adze_text){0};
}

static int in_word(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

/* Where the op's name begins in a word that is the op's own; -1 where the word belongs to something else. */
static int own_part(const char *word, size_t n, const char *op)
{
    static const char *const ends[] = {"",
                                       "_args",
                                       "_cuda",
                                       "_cpu",
                                       "_cpu_avx2",
                                       "_cpu_avx512",
                                       "_cpu_sve",
                                       "_cpu_bf16",
                                       "_cpu_bf16_accepts",
                                       "_cpu_amx",
                                       "_cpu_amx_accepts",
                                       "_cpu_amx_int8",
                                       "_cpu_amx_int8_accepts",
                                       "_cpu_vnni",
                                       "_cpu_vnni_accepts",
                                       "_scratch",
                                       "_cuda_scratch"};
    static const char *const starts[] = {"adze_", "adze_op_", "adze_suite_"};
    char own[200];
    if (strlen(op) == n && memcmp(word, op, n) == 0)
        return 0;
    for (size_t s = 0; s < sizeof starts / sizeof *starts; s++)
        for (size_t e = 0; e < sizeof ends / sizeof *ends; e++)
            if ((size_t)snprintf(own, sizeof own, "%s%s%s", starts[s], op, ends[e]) == n && memcmp(word, own, n) == 0)
                return (int)strlen(starts[s]);
    return -1;
}

int adze_text_renamed(adze_text *text, const char *data, size_t size, const char *from, const char *to)
{
    const size_t length = strlen(from);
    int ok = 1;
    for (size_t i = 0; i < size && ok;) {
        size_t n = 0;
        while (i + n < size && in_word(data[i + n]))
            n++;
        const int of_file =
            (i > 0 && data[i - 1] == '/') ||
            (i + n < size && data[i + n] == '.' && i + n + 1 < size && isalpha((unsigned char)data[i + n + 1]));
        const int at = n == 0 ? -1 : own_part(data + i, n, from);
        if (at < 0 || (at == 0 && of_file)) {
            ok = adze_text_add(text, data + i, n ? n : 1);
        } else {
            ok = adze_text_add(text, data + i, (size_t)at) && adze_text_add(text, to, strlen(to)) &&
                 adze_text_add(text, data + i + at + length, n - (size_t)at - length);
        }
        i += n ? n : 1;
    }
    return ok;
}

int adze_is_folder(const char *path)
{
    struct stat s;
    return stat(path, &s) == 0 && S_ISDIR(s.st_mode);
}

int adze_exists(const char *path)
{
    struct stat s;
    return lstat(path, &s) == 0;
}

static int make_folders(const char *path)
{
    char folder[4096];
    const size_t n = strlen(path);
    if (n >= sizeof folder) {
        errno = ENAMETOOLONG;
        return 0;
    }
    memcpy(folder, path, n + 1);
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        if (mkdir(folder, 0777) != 0 && (errno != EEXIST || !adze_is_folder(folder)))
            return 0;
        *slash = '/';
    }
    return 1;
}

int adze_write_file(const char *path, const char *data, size_t size, int executable)
{
    if (!make_folders(path))
        return 0;
    FILE *f = fopen(path, "w");
    if (!f)
        return 0;
    const int wrote = fwrite(data, 1, size, f) == size;
    return (fclose(f) == 0) & wrote && (!executable || chmod(path, 0755) == 0);
}
