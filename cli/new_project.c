/* new_project.c - `adze new project`: kernels for a model, with what it takes to measure and to publish them. */
#include "cli.h"
#include "new.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "adze new project NAME --model MODEL --op OP,... [--dir DIR]\n\n"
    "Makes a project of kernels for a model: sources of the ops, their cases, the places of the\n"
    "kernels in the model, benchmarks alone and end to end, a Python package, and what a\n"
    "repository of the Hugging Face Hub needs (`adze pack`). It builds against the installed\n"
    "adze and works at once.\n\n"
    "  --model M   llama, qwen3, ltx-video or flux\n"
    "  --op OPS    of rms_norm, layer_norm, glu, activation, softmax, gated_add, rope, gemm,\n"
    "              attention and quantize, with commas between them; modulation (AdaLN) is a\n"
    "              part of the norms\n"
    "  --dir DIR   where (default: a new folder NAME)\n\n"
    "Nothing that exists is overwritten. NAME has a-z, 0-9 and -, as the Hub demands.\n";

static const char models[] = "llama|qwen3|ltx-video|flux";
static const char *const ops_known[] = {"rms_norm",  "layer_norm", "glu",  "activation", "softmax",
                                        "gated_add", "rope",       "gemm", "attention",  "quantize"};

typedef struct names {
    char module[64];   /* of the Python package */
    char list[400];    /* "a", "b" */
    char plain[400];   /* a, b */
    char of_model[64]; /* its file among the templates */
    char prefix[NEW_PATH];
} names;

static int add_ops(new_files *files, const char *ops, names *n)
{
    char op[64];
    for (const char *at = ops; *at; at += strcspn(at, ","), at += *at == ',') {
        const size_t length = strcspn(at, ",");
        int known = 0;
        snprintf(op, sizeof op, "%.*s", (int)length, at);
        for (size_t i = 0; i < sizeof ops_known / sizeof *ops_known; i++)
            known |= strcmp(op, ops_known[i]) == 0;
        if (!known) {
            new_fail(files,
                     "--op has '%s', it must be of rms_norm, layer_norm, glu, activation, softmax, gated_add, rope, "
                     "gemm, attention, quantize",
                     op);
            return 0;
        }
        if (!new_op(files, op, op))
            return 0;
        snprintf(n->list + strlen(n->list), sizeof n->list - strlen(n->list), "%s\"%s\"", *n->list ? ", " : "", op);
        snprintf(n->plain + strlen(n->plain), sizeof n->plain - strlen(n->plain), "%s%s", *n->plain ? ", " : "", op);
    }
    if (!*n->plain)
        new_fail(files, "--op names no op");
    return !files->failed;
}

static int add_files(new_files *files, const char *name, const char *model, const names *n)
{
    const char *const pairs[] = {"name",   name,      "module", n->module, "model",   model, "ops",
                                 n->plain, "op_list", n->list,  "prefix",  n->prefix, NULL};
    static const struct {
        const char *template, *path, *what;
    } own[] = {
        {"templates/model/inject.py", "inject.py", "puts the kernels into the model"},
        {"templates/model/benchmark.py", "benchmark.py", "the kernels alone, and the model end to end"},
        {"templates/model/test_kernels.py", "tests/test_kernels.py", "what Hugging Face's CI runs"},
        {"templates/model/setup.py", "setup.py", "pip install: the kernels as a Python package"},
        {"templates/model/pyproject.toml", "pyproject.toml", ""},
        {"templates/model/flake.nix", "flake.nix", "for kernel-builder"},
        {"templates/model/CARD.md", "CARD.md", "the card of the Hub repository"},
        {"templates/model/README.md", "README.md", "what this is, and how it is built"},
        {"templates/project/Makefile", "Makefile", "builds against the installed adze"},
        {"templates/project/gitignore", ".gitignore", ""},
    };
    int ok = new_project_file(files, n->of_model, "model.py", "the model, and the places of the kernels", pairs);
    for (size_t i = 0; i < sizeof own / sizeof *own && ok; i++)
        ok = new_project_file(files, own[i].template, own[i].path, own[i].what, pairs);
    if (ok && strstr(n->list, "\"attention\"") && (strcmp(model, "llama") == 0 || strcmp(model, "qwen3") == 0))
        ok = new_project_file(files, "templates/model/attention.py", "attention.py",
                              "the kernel in transformers' list of attentions", pairs);
    return ok;
}

static int name_holds(new_files *files, const char *name)
{
    const size_t n = strlen(name);
    const int good = n >= 2 && n <= 40 && strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-") == n &&
                     !strchr("0123456789-", name[0]) && name[n - 1] != '-';
    if (!good)
        new_fail(files, "'%s' is no name for a project: it has 2 to 40 of a-z, 0-9 and -, and begins with a letter",
                 name);
    return good;
}

static int make(new_files *files, const char *name, const char *model, const char *ops, const char *dir)
{
    names n = {.module = ""};
    snprintf(files->root, sizeof files->root, "%s", dir ? dir : name);
    snprintf(n.module, sizeof n.module, "%s", name);
    for (char *at = n.module; *at; at++)
        *at = *at == '-' ? '_' : *at;
    snprintf(n.of_model, sizeof n.of_model, "templates/model/%s.py", model);
    new_prefix(n.prefix, sizeof n.prefix);
    if (!name_holds(files, name) || !add_ops(files, ops, &n) || !add_files(files, name, model, &n))
        return 2;
    printf("%s, kernels for %s, in %s:\n", name, model, files->root);
    if (!new_write(files))
        return 1;
    printf("\nIt works as it is. In %s:\n"
           "  make check             every kernel against its definition\n"
           "  adze pack              package/: a repository for the Hub, checked\n"
           "  python benchmark.py    the kernels alone, then the model, against eager and torch.compile\n"
           "Then change, in this order: check/ (the calls of your model), src/cuda/ (the kernel), model.py (its "
           "places).\n",
           files->root);
    return 0;
}

int new_project(int argc, char **argv)
{
    const char *name = NULL, *model = NULL, *ops = NULL, *dir = NULL;
    const adze_option list[] = {
        {.name = "--model", .text = &model, .choices = models},
        {.name = "--op", .text = &ops},
        {.name = "--dir", .text = &dir},
        {.name = NULL},
    };
    int status;
    if (!adze_cli_options("new project", help, list, &name, argc, argv, &status))
        return status;
    if (!name || !model || !ops) {
        fprintf(stderr, "adze new project: %s is missing\n\n%s",
                !name    ? "a name"
                : !model ? "--model"
                         : "--op",
                help);
        return 2;
    }
    new_files *files = calloc(1, sizeof *files);
    if (!files)
        return 1;
    files->command = "new project";
    status = make(files, name, model, ops, dir);
    new_free(files);
    free(files);
    return status;
}
