/* info.c - `adze info`: this machine, and every op with its kernels; or docs/ops.md. */
#include "cli.h"
#include "kernel.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "adze info [OP] [--markdown HEADER]\n\n"
    "Prints what this machine has, and every op with its kernels; this machine cannot run those in\n"
    "brackets.\n\n"
    "  OP                 the kernels of one op instead, with their variants and the calls these\n"
    "                     take: ADZE_KERNEL=OP:KERNEL/VARIANT makes every call take that one\n"
    "  --markdown HEADER  print docs/ops.md instead; HEADER is include/adze.h, whose comments\n"
    "                     say what each op computes\n";

static int runs_here(const adze_kernel *k)
{
    int here = 0;
    for (int device = ADZE_CPU; device < adze_cuda_count(); device++)
        here |= adze_can_run(k, (adze_stream){device, NULL});
    return here;
}

static void print_machine(void)
{
    adze_machine m;
    adze_machine_ask(&m, ADZE_CPU);
    printf("adze %d.%d.%d, built %s\n", ADZE_VERSION / 10000, ADZE_VERSION / 100 % 100, ADZE_VERSION % 100,
           ADZE_CUDA ? "for " ADZE_CUDA_CODE : "without CUDA");
    printf("cpu: %s, %s, %d threads on %d cores, last cache %zu KB\n", m.cpu, m.isa, m.threads, m.cores,
           adze_cpu_cache() / 1024);
    for (int device = 0; device < adze_cuda_count(); device++) {
        adze_machine_ask(&m, device);
        printf("cuda %d: %s, sm_%d, %d SMs, %.0f GB, driver %s\n", device, m.gpu, m.sm, m.sm_count,
               (double)m.gpu_memory / 1e9, m.driver);
    }
    if (adze_cuda_count() == 0)
        printf("cuda: no device\n");
    printf("\n");
    for (const adze_op *const *op = adze_ops; *op; op++) {
        printf("%-14s", (*op)->name);
        for (const adze_kernel *k = (*op)->kernels; k->run; k++)
            printf(runs_here(k) ? " %s" : " (%s)", k->name);
        printf("\n");
    }
}

static int print_op(const char *name)
{
    const adze_op *op = adze_find_op(name, strlen(name));
    if (!op) {
        fprintf(stderr, "adze info: no op is called '%s', it must be one of", name);
        for (const adze_op *const *o = adze_ops; *o; o++)
            fprintf(stderr, " %s", (*o)->name);
        fprintf(stderr, "\n");
        return 2;
    }
    for (const adze_kernel *k = op->kernels; k->run; k++) {
        printf(runs_here(k) ? "%s\n" : "(%s)\n", k->name);
        for (int i = 0; i < adze_variant_count(k); i++)
            printf("  %s/%-24s %s\n", k->name, k->variants->list[i].name, k->variants->list[i].takes);
    }
    return 0;
}

/* ---- docs/ops.md, from the field tables and the comments of the header ---- */

/* The args struct of an op: from its brace on. `typedef adze_norm_args adze_rms_norm_args;` leads to another's. */
static const char *find_struct(const char *header, const char *op)
{
    char key[128], other[64];
    snprintf(key, sizeof key, " adze_%s_args;", op);
    const char *alias = strstr(header, key), *begin = alias;
    while (begin && begin > header && begin[-1] != ' ' && begin[-1] != '}')
        begin--;
    if (alias && begin[-1] == ' ')
        snprintf(other, sizeof other, "%.*s", (int)(alias - begin), begin);
    else
        snprintf(other, sizeof other, "adze_%s_args", op);
    snprintf(key, sizeof key, "typedef struct %s {", other);
    return strstr(header, key);
}

/* The comment that ends right before `at`, without its marks and with its indentation. */
static void print_comment(const char *header, const char *at)
{
    const char *end = at;
    while (end > header && strchr(" \n", end[-1]))
        end--;
    if (end - header < 4 || strncmp(end - 2, "*/", 2) != 0)
        return;
    const char *begin = end - 2;
    while (begin > header && strncmp(begin, "/*", 2) != 0)
        begin--;
    printf("```\n");
    for (const char *line = begin + 2; line < end - 2;) {
        const size_t n =
            strcspn(line, "\n") < (size_t)(end - 2 - line) ? strcspn(line, "\n") : (size_t)(end - 2 - line);
        size_t indent = 0, length = n;
        while (indent < 3 && indent < n && line[indent] == ' ')
            indent++;
        while (length > indent && line[length - 1] == ' ')
            length--;
        if (length > indent)
            printf("%.*s\n", (int)(length - indent), line + indent);
        line += n + 1;
    }
    printf("```\n\n");
}

/* Whether the note of the declaration [at, stop) is about `name`. A note that begins with one of several fields and a
   colon, as `float eps, weight_offset; (comment) weight_offset: Gemma's 1`, is about that field only. */
static int note_is_about(const char *note, const char *at, const char *stop, const char *name)
{
    const size_t n = strcspn(note, ": ");
    if (note[n] != ':' || (strlen(name) == n && strncmp(note, name, n) == 0))
        return 1;
    for (const char *word = at; word + n <= stop; word++)
        if (strncmp(word, note, n) == 0 && strchr(" ,;", word[n]) && strchr(" ,", word[-1]))
            return 0;
    return 1;
}

/* The note behind a field's declaration, with | escaped for the table. */
static void print_note(const char *body, const char *name)
{
    const char *end = strstr(body, "\n}"), *at = body;
    const size_t n = strlen(name);
    for (; at && at < end; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL) {
        const char *stop = at + strcspn(at, ";\n"), *word = at;
        while (word < stop && !(strncmp(word, name, n) == 0 && strchr(" ,;", word[n]) && strchr(" ,", word[-1])))
            word++;
        if (word >= stop || *stop != ';')
            continue;
        const char *open = strstr(stop, "/*"), *close = open ? strstr(open, "*/") : NULL;
        if (!close || memchr(stop, '\n', (size_t)(open - stop)) || !note_is_about(open + 3, at, stop, name))
            return;
        for (const char *c = open + 3; c < close - 1; c++) {
            if (*c == '\n' || (*c == ' ' && (c[1] == ' ' || c[1] == '\n')))
                continue;
            printf(*c == '|' ? "\\|" : "%c", *c);
            if (c[1] == '\n')
                putchar(' ');
        }
        return;
    }
}

static const char *kind_name(const adze_field *f)
{
    switch (f->kind) {
    case ADZE_IN: return "input";
    case ADZE_OPTIONAL: return "input, may be absent";
    case ADZE_INOUT: return "changed in place";
    case ADZE_INOUT_OPTIONAL: return "changed in place, may be absent";
    case ADZE_OUT: return "output";
    case ADZE_OUT_IF: return "output, with its input";
    case ADZE_OUT_OPTIONAL: return "output, may be absent";
    case ADZE_FLOAT: return "float";
    default: return f->words ? "word" : "int";
    }
}

/* Where the op is: names in the tree, which do not depend on what this build has. */
static void print_sources(const char *header, const char *op)
{
    static const char *const places[] = {"src/ops/%s.c",          "src/cpu/%s.c",        "src/cpu/%s_amx.c",
                                         "src/cpu/%s_amx_int8.c", "src/cpu/%s_bf16.c",   "src/cpu/%s_vnni.c",
                                         "src/cuda/%s.cu",        "src/cuda/%s_sm90.cu", "check/%s.c"};
    const size_t root = strlen(header) - strlen(strstr(header, "include/adze.h"));
    printf("\nSources:");
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char name[128], path[4096];
        snprintf(name, sizeof name, places[i], op);
        snprintf(path, sizeof path, "%.*s%s", (int)root, header, name);
        if (access(path, R_OK) == 0)
            printf(" [%s](../%s)", name, name);
    }
    printf("\n\n");
}

static int print_markdown(const char *path)
{
    char *header = strstr(path, "include/adze.h") ? adze_cli_read(path) : NULL;
    if (!header) {
        fprintf(stderr, "adze info: '%s' cannot be read, or is not .../include/adze.h\n", path);
        return 2;
    }
    printf("# Ops\n\nWritten by `adze info --markdown include/adze.h`. Each op is a function "
           "`adze_NAME(stream, &args)`; the fields of its args follow,\nin their order, with what "
           "[include/adze.h](../include/adze.h) says of them. `adze info` lists the kernels of a machine.\n\n");
    for (const adze_op *const *op = adze_ops; *op; op++) {
        const char *body = find_struct(header, (*op)->name);
        printf("## %s\n\n", (*op)->name);
        if (!body) {
            fprintf(stderr, "adze info: '%s' has no struct adze_%s_args\n", path, (*op)->name);
            free(header);
            return 1;
        }
        print_comment(header, body);
        printf("| field | kind | |\n|---|---|---|\n");
        for (const adze_field *f = (*op)->fields; f->name; f++) {
            printf("| `%s` | %s", f->name, kind_name(f));
            for (int i = 0; i < ADZE_MAY_BE && f->may_be[i]; i++)
                for (const adze_field *g = (*op)->fields; g->name; g++)
                    if (g->offset == f->may_be[i])
                        printf("%s `%s`", i ? " or" : "; may be", g->name);
            for (const adze_word *w = f->words; w && w->name; w++)
                printf("%s `%s`", w == f->words ? ":" : "", w->name);
            printf(" | ");
            print_note(body, f->name);
            printf(" |\n");
        }
        print_sources(path, (*op)->name);
    }
    free(header);
    return 0;
}

int adze_cli_info(int argc, char **argv)
{
    const char *header = NULL, *op = NULL;
    const adze_option list[] = {{.name = "--markdown", .text = &header}, {.name = NULL}};
    int status;
    if (!adze_cli_options("info", help, list, &op, argc, argv, &status))
        return status;
    if (header)
        return print_markdown(header);
    if (op)
        return print_op(op);
    print_machine();
    return 0;
}
