/* new.c - `adze new`: the files of an op, in adze's own tree or as a project of its own. */
#include "new.h"
#include "cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "adze new op NAME [--like OP] [--dir DIR]\n"
    "adze new project NAME --model MODEL --op [OWN=]OP,...   (`adze new project --help`)\n\n"
    "The first makes the files of an op: contract, definition, CPU kernel, CUDA kernel, cases, Python\n"
    "function. It builds and passes its check at once; what to change is printed, in order.\n\n"
    "In adze's own tree the op becomes one of the library. In a project that `adze new` made it\n"
    "becomes another op of the project. Elsewhere a project is made, which builds against the\n"
    "installed adze and has a program of its own: NAME check, NAME bench, NAME run. It has no model\n"
    "and is not published: `adze new project` makes what is.\n\n"
    "  --like OP   what to begin with (default: scale_add)\n"
    "                scale_add   elementwise: out = a * x + y\n"
    "                l2_norm     a sum over each row, and a second output\n"
    "                rms_norm_i8 the same with int8 output and a scale for each row\n"
    "                any op of the library, with its arguments: see `adze info`\n"
    "  --dir DIR   the tree or the project (default: here, or a new folder NAME)\n\n"
    "Nothing that exists is overwritten.\n";

void new_fail(new_files *files, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    if (!files->failed++) {
        fprintf(stderr, "adze %s: ", files->command);
        vfprintf(stderr, format, ap);
        fputc('\n', stderr);
    }
    va_end(ap);
}

new_file *new_file_add(new_files *files, const char *what, const char *format, ...)
{
    static new_file spare;
    new_file *f = files->count < NEW_FILES ? &files->file[files->count++] : &spare;
    if (f == &spare)
        new_fail(files, "more than %d files", (int)NEW_FILES);
    va_list ap;
    va_start(ap, format);
    *f = (new_file){.what = what};
    if (vsnprintf(f->path, sizeof f->path, format, ap) >= (int)sizeof f->path)
        new_fail(files, "the path of a file is longer than %d", (int)sizeof f->path);
    va_end(ap);
    return f;
}

static int full_path(const new_files *files, const char *path, char *full, size_t size)
{
    return snprintf(full, size, "%s/%s", files->root, path) < (int)size;
}

int new_source(new_files *files, const char *path, adze_text *text)
{
    char full[2 * NEW_PATH];
    adze_file file;
    if (files->in_tree && full_path(files, path, full, sizeof full) && adze_exists(full)) {
        char *data = adze_cli_read(full);
        const int ok = data && adze_text_add(text, data, strlen(data));
        free(data);
        if (!ok)
            new_fail(files, "%s: %s", full, strerror(errno));
        return ok;
    }
    if (!adze_bundle_find(path, &file))
        return 0;
    if (!adze_text_add(text, file.text, file.size))
        new_fail(files, "there is no memory");
    return !files->failed;
}

int new_fill(new_files *files, const char *path, const char *const *pairs, adze_text *text)
{
    adze_text template = {0};
    int ok = new_source(files, path, &template);
    for (const char *at = template.data; ok && *at;) {
        const char *const open = strstr(at, "{{");
        ok = adze_text_add(text, at, open ? (size_t)(open - at) : strlen(at));
        if (!open)
            break;
        const char *const close = strstr(open, "}}");
        const char *const *pair = pairs;
        while (close && *pair &&
               (strlen(*pair) != (size_t)(close - open - 2) || memcmp(*pair, open + 2, strlen(*pair)) != 0))
            pair += 2;
        const int known = close && *pair;
        ok = ok && adze_text_add(text, known ? pair[1] : "{{", known ? strlen(pair[1]) : 2);
        at = known ? close + 2 : open + 2;
    }
    adze_text_free(&template);
    if (!ok)
        new_fail(files, "the template %s cannot be read", path);
    return ok;
}

int new_write(new_files *files)
{
    char full[2 * NEW_PATH];
    for (int i = 0; i < files->count && !files->failed; i++)
        if (!full_path(files, files->file[i].path, full, sizeof full))
            new_fail(files, "the path of %s is too long", files->file[i].path);
        else if (!files->file[i].exists && adze_exists(full))
            new_fail(files, "%s exists; nothing was written", full);
    for (int i = 0; i < files->count && !files->failed; i++) {
        const new_file *f = &files->file[i];
        full_path(files, f->path, full, sizeof full);
        if (!adze_write_file(full, f->text.data ? f->text.data : "", f->text.size, f->executable))
            new_fail(files, "%s cannot be written: %s", full, strerror(errno));
        else
            printf("  %-8s %-38s %s\n", f->exists ? "changed" : "made", f->path, f->what);
    }
    return !files->failed;
}

void new_free(new_files *files)
{
    for (int i = 0; i < files->count; i++)
        adze_text_free(&files->file[i].text);
    files->count = 0;
}

/* Words of C, C++ and Python, and names that the files of an op or its package use. */
static const char words[] =
    " adze alignas alignof and and_eq as asm assert async auto await bitand bitor bool break case catch char "
    "char16_t char32_t char8_t class co_await co_return co_yield compl concept const const_cast consteval "
    "constexpr constinit continue decltype def default del delete do double dynamic_cast elif else enum "
    "except explicit export extern false finally float for friend from global goto if import in inline int is "
    "lambda linux long main mutable namespace new noexcept nonlocal not not_eq nullptr operator ops or or_eq "
    "pass private protected public raise register reinterpret_cast requires restrict return short signed "
    "sizeof static static_assert static_cast struct switch template this thread_local throw torch true try "
    "typedef typeid typename typeof union unix unsigned using virtual void volatile wchar_t while with xor "
    "xor_eq yield ";

int new_is_taken(const char *name)
{
    char word[64];
    return snprintf(word, sizeof word, " %s ", name) < (int)sizeof word && strstr(words, word) != NULL;
}

int new_name_holds(new_files *files, const char *name)
{
    /* project.mk compiles src/cpu/<op>_amx.c for that ISA alone, and src/cuda/<op>_sm90.cu for sm_90a. */
    static const char *const ends[] = {"_amx", "_amx_int8", "_bf16", "_vnni", "_sm90"};
    const size_t n = strlen(name);
    const int bad = n < 2 || n > 40 || strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") != n ||
                    strchr("0123456789_", name[0]) || name[n - 1] == '_' || new_is_taken(name);
    for (size_t i = 0; i < sizeof ends / sizeof *ends && !bad; i++)
        if (n > strlen(ends[i]) && strcmp(name + n - strlen(ends[i]), ends[i]) == 0)
            new_fail(files, "'%s' is no name for an op: files that end in %s have kernels of an op for one processor",
                     name, ends[i]);
    if (bad)
        new_fail(
            files,
            "'%s' is no name for an op: it has 2 to 40 of a-z, 0-9 and _, begins with a letter, and is no word of "
            "C or Python, such as silu_mul",
            name);
    return !files->failed;
}

void new_prefix(char *prefix, size_t size)
{
    char exe[NEW_PATH], mk[2 * NEW_PATH];
    const ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    snprintf(prefix, size, "/usr/local");
    if (n <= 0)
        return;
    exe[n] = '\0';
    for (int up = 0; up < 2; up++)
        if (strrchr(exe, '/'))
            *strrchr(exe, '/') = '\0';
    snprintf(mk, sizeof mk, "%s/share/adze/project.mk", exe);
    if (adze_exists(mk))
        snprintf(prefix, size, "%s", exe);
}

static int has(const char *root, const char *path)
{
    char full[2 * NEW_PATH];
    snprintf(full, sizeof full, "%s/%s", root, path);
    return adze_exists(full);
}

/* Where the files go: a tree, a project that is there, or a new folder. */
static void find_root(new_files *files, const char *dir, const char *name)
{
    const char *const here = dir ? dir : ".";
    files->in_tree = has(here, "src/kernel.h") && has(here, "include/adze.h") && has(here, "check/suite.h");
    const char *const root = files->in_tree || dir || has(here, "ops.h") ? here : name;
    if (snprintf(files->root, sizeof files->root, "%s", root) >= (int)sizeof files->root)
        new_fail(files, "--dir is longer than %d", (int)sizeof files->root);
}

static void say_next(const new_files *files, const char *name, const char *like, int begun)
{
    char prefix[NEW_PATH];
    const int tree = files->in_tree;
    printf("\nIt computes what %s does. Change it in this order:\n", like);
    printf("  1. %s%s: the formula, and the fields of the args\n", tree ? "include/adze" : name, ".h");
    printf("  2. src/ops/%s.c: the table of fields, the contract, the definition in double\n", name);
    printf("  3. check/%s.c: cases, calls that must be refused, calls to time\n", name);
    printf("  4. src/cpu/%s.c, then src/cuda/%s.cu: the kernels\n", name, name);
    printf("  5. %s: its signature in Python\n", tree ? "python/adze/operators/functions.py" : "functions.py");
    if (tree) {
        printf("\nAfter each step:\n  make && build/adze check %s\n  build/adze bench %s\nAt the end:\n"
               "  make docs format           docs/ops.md and the Python constants; the format of C\n"
               "  python/tests/calls.py, test_ops.py: a sample of its call, for the tests of the bindings\n",
               name, name);
        return;
    }
    if (has(files->root, "model.py"))
        printf(
            "  6. where it runs, for those files do not know it yet: model.py (forwards: its class in the model),\n"
            "     benchmark.py (OPS and cases: its formula and shapes), tests/test_kernels.py (FORMULAS), layers.py\n"
            "     (a layer for kernelize). `adze new project --op %s=OP` names it in all of them\n",
            name);
    new_prefix(prefix, sizeof prefix);
    printf("\nAfter each step%s%s:\n  make check                 the program, and its check\n"
           "  make bench                 each call as a share of what this machine reaches\n",
           strcmp(files->root, ".") ? ", in " : "", strcmp(files->root, ".") ? files->root : "");
    if (begun && !has(prefix, "share/adze/project.mk"))
        printf(
            "\nadze is not installed there yet: `make install PREFIX=DIR` in its tree, then `make ADZE=DIR` here.\n");
}

/* What a project has besides its ops. */
static int begin_project(new_files *files, const char *name, const char *like)
{
    char prefix[NEW_PATH];
    new_prefix(prefix, sizeof prefix);
    const char *const pairs[] = {"name", name, "prefix", prefix, "like", like, NULL};
    return new_project_file(files, "templates/project/Makefile", "Makefile", "builds against the installed adze",
                            pairs) &&
           new_project_file(files, "templates/project/README.md", "README.md", "what this is, and how it is built",
                            pairs) &&
           new_project_file(files, "templates/project/gitignore", ".gitignore", "", pairs);
}

static int run_op(int argc, char **argv)
{
    const char *name = NULL, *like = NULL, *dir = NULL;
    const adze_option list[] = {
        {.name = "--like", .text = &like},
        {.name = "--dir", .text = &dir},
        {.name = NULL},
    };
    int status;
    if (!adze_cli_options("new op", help, list, &name, argc, argv, &status))
        return status;
    if (!name) {
        fprintf(stderr, "adze new op: a name is missing\n\n%s", help);
        return 2;
    }
    new_files *files = calloc(1, sizeof *files);
    if (!files)
        return 1;
    files->command = "new op";
    find_root(files, dir, name);
    const int begun = !files->in_tree && !has(files->root, "ops.h");
    status = 2;
    if (!like)
        like = "scale_add";
    if (!files->failed && new_name_holds(files, name) && new_op(files, name, like) &&
        (!begun || begin_project(files, name, like))) {
        printf("%s, made from %s, in %s:\n", name, like, files->root);
        status = !new_write(files);
        if (status == 0)
            say_next(files, name, like, begun);
    }
    new_free(files);
    free(files);
    return status;
}

int adze_cli_new(int argc, char **argv)
{
    if (argc > 0 && strcmp(argv[0], "op") == 0)
        return run_op(argc - 1, argv + 1);
    if (argc > 0 && strcmp(argv[0], "project") == 0)
        return new_project(argc - 1, argv + 1);
    int status;
    const adze_option list[] = {{.name = NULL}};
    const char *word = NULL;
    if (!adze_cli_options("new", help, list, &word, argc, argv, &status))
        return status;
    if (word)
        fprintf(stderr, "adze new: '%s' cannot be made: it is op or project\n\n%s", word, help);
    else
        fprintf(stderr, "adze new: what is to be made is missing\n\n%s", help);
    return 2;
}
