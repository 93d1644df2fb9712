/* new_op.c - the files of a new op, made from a template or from an op of the library. */
#include "new.h"

#include <stdio.h>
#include <string.h>

typedef struct part {
    const char *template, *op; /* formats of its path: in a template's folder, in the tree of the library */
    const char *to, *what;
} part;

static const part parts[] = {
    {"templates/%s/ops.c", "src/ops/%s.c", "src/ops/%s.c", "contract, definition, table of kernels"},
    {"templates/%s/cpu.c", "src/cpu/%s.c", "src/cpu/%s.c", "the kernel for CPUs, compiled for each ISA"},
    {NULL, "src/cpu/%s_amx.c", "src/cpu/%s_amx.c", "the kernel for x86-64 CPUs that multiply matrices of bf16"},
    {NULL, "src/cpu/%s_amx_int8.c", "src/cpu/%s_amx_int8.c",
     "the kernel for x86-64 CPUs that multiply matrices of bytes"},
    {NULL, "src/cpu/%s_bf16.c", "src/cpu/%s_bf16.c", "the kernel for aarch64 CPUs that multiply matrices of bf16"},
    {NULL, "src/cpu/%s_vnni.c", "src/cpu/%s_vnni.c", "the kernel for x86-64 CPUs that add products of bytes"},
    {"templates/%s/cuda.cu", "src/cuda/%s.cu", "src/cuda/%s.cu", "the kernel for GPUs"},
    {"templates/%s/check.c", "check/%s.c", "check/%s.c", "what is checked and what is timed"},
};

/* A format with one %s, filled in. */
static const char *filled(char *path, size_t size, const char *format, const char *name)
{
    const char *const at = strstr(format, "%s");
    snprintf(path, size, "%.*s%s%s", (int)(at - format), format, name, at + 2);
    return path;
}

static int in_text(const char *text, const char *format, const char *name)
{
    char word[NEW_PATH];
    return text && strstr(text, filled(word, sizeof word, format, name)) != NULL;
}

/* The struct that an op of the library takes: `typedef adze_norm_args adze_rms_norm_args;` names it. */
static void struct_of(const char *header, const char *op, char *name, size_t size)
{
    char alias[NEW_PATH];
    snprintf(name, size, "adze_%s_args", op);
    const char *const at = strstr(header, filled(alias, sizeof alias, " adze_%s_args;\n", op));
    const char *line = at;
    while (line && line > header && line[-1] != '\n')
        line--;
    if (line && strncmp(line, "typedef adze_", 13) == 0)
        snprintf(name, size, "%.*s", (int)(at - line - 8), line + 8);
}

/* What adze.h says of the op: the template's block, or the args of an op of the library by another name. */
static int declare(new_files *files, const char *name, const char *like, int is_template, adze_text *block)
{
    char path[NEW_PATH], takes[NEW_PATH], found[NEW_PATH];
    adze_text source = {0};
    filled(path, sizeof path, "templates/%s/adze.h", like);
    int ok = new_source(files, is_template ? path : "include/adze.h", &source);
    if (ok && is_template) {
        ok = adze_text_renamed(block, source.data, source.size, like, name);
    } else if (ok && strcmp(name, like) == 0) { /* adze.h has it */
        ok = adze_text_print(block, "/* %s: as in adze.h */\n", name);
    } else if (ok) {
        struct_of(source.data, like, takes, sizeof takes);
        ok = adze_text_print(block,
                             "/* %s: made from %s, whose args it takes until it has a struct of its own */\n"
                             "typedef %s adze_%s_args;\n",
                             name, like, takes, name);
        static const char *const functions[] = {"ADZE_API adze_status adze_%s(",
                                                "ADZE_API adze_status adze_%s_scratch("};
        for (int f = 0; f < 2 && ok; f++) {
            const char *const at = strstr(source.data, filled(found, sizeof found, functions[f], like));
            if (at)
                ok = adze_text_renamed(block, at, strcspn(at, ";") + 1, like, name) && adze_text_add(block, "\n", 1);
        }
    }
    adze_text_free(&source);
    return ok;
}

/* Where the definition begins that `end` is in, or is the end of: after two empty lines. */
static const char *definition_at(const char *text, const char *end)
{
    while (end - text >= 3 && strncmp(end - 3, "\n\n\n", 3) != 0)
        end--;
    return end - text >= 3 ? end : text;
}

/* Adds the functions that a text names and that begin with an underscore, such as _gemm_shape, from the file it is
 * of. */
static int helpers_of(const char *source, const char *begin, const char *end, const char *like, const char *name,
                      adze_text *to)
{
    static const char def[] = "\n\n\ndef _";
    const size_t size = (size_t)(end - begin);
    int ok = 1;
    for (const char *at = source; ok && (at = strstr(at, def)) && at < begin;) {
        const char *const from = at + 3, *const word = from + 4;
        const size_t length = strcspn(word, "(");
        const char *const after = strstr(from, "\n\n\n");
        int named = 0;
        for (const char *use = begin; (size_t)(use - begin) + length <= size && !named; use++)
            named = strncmp(use, word, length) == 0 && strspn(use + length, "(),\n") > 0;
        if (named && after)
            ok = adze_text_renamed(to, from, (size_t)(after - from) + 3, like, name);
        at = after ? after : end;
    }
    return ok;
}

/* The op's Python function, with its decorators. A project also needs the functions that describe its outputs; the
   tree has them. */
static int function_of(new_files *files, const char *name, const char *like, int is_template, adze_text *to)
{
    char path[NEW_PATH], def[NEW_PATH];
    adze_text source = {0};
    filled(path, sizeof path, "templates/%s/function.py", like);
    int ok = new_source(files, is_template ? path : "python/adze/operators/functions.py", &source);
    const char *begin = ok ? source.data : NULL, *end = NULL;
    if (ok && is_template) {
        end = begin + source.size;
    } else if (ok) {
        begin = strstr(source.data, filled(def, sizeof def, "\ndef %s(", like));
        end = begin ? strstr(begin, "\n\n\n") : NULL;
        if (begin && end) {
            end++;
            begin = definition_at(source.data, begin + 1);
            ok = files->in_tree || helpers_of(source.data, begin, end, like, name, to);
        }
    }
    ok = ok && (!begin || !end || adze_text_renamed(to, begin, (size_t)(end - begin), like, name));
    adze_text_free(&source);
    return ok;
}

/* A file that is about to be written, or NULL. */
static new_file *planned(new_files *files, const char *path)
{
    for (int i = 0; i < files->count; i++)
        if (strcmp(files->file[i].path, path) == 0)
            return &files->file[i];
    return NULL;
}

/* A file of the root that is changed; its text is what it has now. */
static new_file *changed(new_files *files, const char *path, const char *what)
{
    if (planned(files, path))
        return planned(files, path);
    new_file *f = new_file_add(files, what, "%s", path);
    const int in_tree = files->in_tree;
    f->exists = 1;
    files->in_tree = 1; /* the root's own file, whatever the root is */
    if (!new_source(files, path, &f->text))
        new_fail(files, "%s/%s cannot be read", files->root, path);
    files->in_tree = in_tree;
    return files->failed ? NULL : f;
}

/* Puts text before the last `mark`. */
static int insert(new_files *files, new_file *f, const char *mark, const char *text)
{
    const char *last = NULL;
    for (const char *at = f->text.data; (at = strstr(at, mark)); at++)
        last = at;
    if (!last || !adze_text_insert(&f->text, (size_t)(last - f->text.data), text))
        new_fail(files, "%s/%s has no line '%.*s'", files->root, f->path, (int)strcspn(mark, "\n"), mark);
    return !files->failed;
}

/* Adds a word to the list of ops, whose lines end in a backslash but for the last. */
static int add_to_list(new_files *files, new_file *f, const char *name)
{
    char word[NEW_PATH];
    const char *at = strstr(f->text.data, "define ADZE_OPS(X)");
    if (at && in_text(f->text.data, "X(%s)", name)) {
        new_fail(files, "there is an op %s already, in %s/%s", name, files->root, f->path);
        return 0;
    }
    while (at && strchr(at, '\n') && strchr(at, '\n')[-1] == '\\')
        at = strchr(at, '\n') + 1;
    const char *const end = at ? strchr(at, '\n') : NULL;
    const char *line = end;
    while (line && line > f->text.data && line[-1] != '\n')
        line--;
    filled(word, sizeof word, line && (size_t)(end - line) + strlen(name) + 4 > 118 ? " \\\n        X(%s)" : " X(%s)",
           name);
    if (!end || !adze_text_insert(&f->text, (size_t)(end - f->text.data), word))
        new_fail(files, "%s/%s has no list ADZE_OPS", files->root, f->path);
    return !files->failed;
}

static int add_to_tree(new_files *files, const char *name, const adze_text *block, const adze_text *function)
{
    new_file *list = changed(files, "src/kernel.h", "its word in the list of ops");
    if (!list || !add_to_list(files, list, name))
        return 0;
    new_file *header = changed(files, "include/adze.h", "its formula, args and function");
    adze_text spaced = {0};
    if (!header || !adze_text_print(&spaced, "%s\n", block->data) ||
        !insert(files, header, "#ifdef __cplusplus\n", spaced.data)) {
        adze_text_free(&spaced);
        return 0;
    }
    adze_text_free(&spaced);
    if (!function->size)
        return 1;
    new_file *python = changed(files, "python/adze/operators/functions.py", "its function in Python");
    int ok = python && adze_text_print(&spaced, "%s\n\n", function->data) &&
             insert(files, python, "# ---- For hosts ----\n", spaced.data);
    adze_text_free(&spaced);
    return ok;
}

/* Text of a project's file, made from a template in templates/. */
int new_project_file(new_files *files, const char *template, const char *path, const char *what,
                     const char *const *pairs)
{
    new_file *f = new_file_add(files, what, "%s", path);
    return new_fill(files, template, pairs, &f->text);
}

/* A project that is there, or is being made, gets another op; otherwise it begins with this one. */
static int add_to_project(new_files *files, const char *name, const adze_text *block, const adze_text *function)
{
    char line[NEW_PATH], full[2 * NEW_PATH];
    const char *const pairs[] = {"name", name, NULL};
    new_file *header = new_file_add(files, "its formula, args and function", "%s.h", name);
    if (!adze_text_print(&header->text,
                         "/* %s.h - the args of %s, and its function. */\n#ifndef ADZE_OP_%s_H\n#define "
                         "ADZE_OP_%s_H\n\n#include \"adze.h\"\n\n%s\n#endif\n",
                         name, name, name, name, block->data))
        return 0;
    snprintf(full, sizeof full, "%s/ops.h", files->root);
    if (planned(files, "ops.h") || adze_exists(full)) {
        new_file *list = changed(files, "ops.h", "its word in the list of ops");
        new_file *python = changed(files, "functions.py", "its function in Python");
        return list && python && add_to_list(files, list, name) &&
               insert(files, list, "#define ADZE_OPS(X)", filled(line, sizeof line, "#include \"%s.h\"\n", name)) &&
               adze_text_print(&python->text, "\n\n%s", function->data ? function->data : "");
    }
    if (!new_project_file(files, "templates/project/ops.h", "ops.h", "the list of ops", pairs))
        return 0;
    new_file *python = new_file_add(files, "the functions in Python", "functions.py");
    return adze_text_add(&python->text, function->data ? function->data : "", function->size);
}

/* The templates, and the ops of the library as the program knows them. */
static void say_likes(new_files *files, const char *like)
{
    char names[600] = "", last[200] = "";
    const char *at = NULL;
    for (adze_file file; adze_bundle_next(&at, &file);) {
        char name[200];
        const int template =
            sscanf(file.path, "templates/%199[a-z0-9_]/ops.c", name) == 1 && strstr(file.path, "/ops.c");
        if (!template && sscanf(file.path, "check/%199[a-z0-9_].c", name) != 1)
            continue;
        if (strcmp(name, last) != 0)
            snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", *names ? ", " : "", name);
        snprintf(last, sizeof last, "%s", name);
    }
    new_fail(files, "--like is '%s', it must be one of %s", like, names);
}

/* Whether a file has a word, which is not a part of a longer one. */
static int has_word(new_files *files, const char *path, const char *word)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    adze_text source = {0};
    int found = 0;
    if (new_source(files, path, &source))
        for (const char *at = source.data; (at = strstr(at, word)) && !found; at++)
            found = (at == source.data || !strchr(letters, at[-1])) &&
                    (!at[strlen(word)] || !strchr(letters, at[strlen(word)]));
    adze_text_free(&source);
    return found;
}

/* An op NAME declares adze_NAME, which must not be there; but an op of a project may have the struct of adze.h. */
static int is_free(new_files *files, const char *name, const char *like)
{
    static const char *const paths[] = {"include/adze.h", "include/adze_kernel.h", "src/kernel.h", "src/value.h"};
    char word[NEW_PATH];
    filled(word, sizeof word, "adze_%s", name);
    for (size_t i = 0; i < sizeof paths / sizeof *paths && strcmp(name, like) != 0; i++)
        if (has_word(files, paths[i], word) && !files->failed)
            new_fail(files, "'%s' is no name for an op: %s has %s already", name, strchr(paths[i], '/') + 1, word);
    filled(word, sizeof word, "\"%s\"", name);
    if (files->in_tree && has_word(files, "python/adze/__init__.py", word))
        new_fail(files, "'%s' is no name for an op: the Python package has adze.%s already", name, name);
    return !files->failed;
}

int new_op(new_files *files, const char *name, const char *like)
{
    char path[NEW_PATH];
    adze_text probe = {0}, block = {0}, function = {0};
    const int is_template = new_source(files, filled(path, sizeof path, "templates/%s/ops.c", like), &probe);
    int ok = is_template || new_source(files, filled(path, sizeof path, "check/%s.c", like), &probe);
    adze_text_free(&probe);
    if (!ok || strcmp(like, "project") == 0) {
        say_likes(files, like);
        return 0;
    }
    ok = declare(files, name, like, is_template, &block) && function_of(files, name, like, is_template, &function);
    for (size_t i = 0; i < sizeof parts / sizeof *parts && ok; i++) {
        adze_text source = {0};
        if (is_template && !parts[i].template)
            continue;
        ok = new_source(files, filled(path, sizeof path, is_template ? parts[i].template : parts[i].op, like),
                        &source);
        if (!ok && !is_template && !files->failed && (strstr(parts[i].op, "cuda") || !parts[i].template)) {
            ok = 1; /* an op may be without it */
        } else if (ok) {
            char to[NEW_PATH];
            new_file *f = new_file_add(files, parts[i].what, "%s", filled(to, sizeof to, parts[i].to, name));
            ok = adze_text_renamed(&f->text, source.data, source.size, like, name);
        }
        adze_text_free(&source);
    }
    if (ok)
        ok = files->in_tree ? add_to_tree(files, name, &block, &function)
                            : add_to_project(files, name, &block, &function);
    ok = ok && is_free(files, name, like);
    adze_text_free(&block);
    adze_text_free(&function);
    if (!ok)
        new_fail(files, "%s cannot be made from %s", name, like);
    return !files->failed;
}
