/* new_project.c - `adze new project`: kernels for a model, with what it takes to measure and to publish them. */
#include "cli.h"
#include "new.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "adze new project NAME --model MODEL --op [OWN=]OP,... [--dir DIR]\n\n"
    "Makes a project of kernels for a model: sources of the ops, their cases, the model's forwards\n"
    "that call them, benchmarks alone and end to end, a Python package, and what a repository of\n"
    "the Hugging Face Hub needs (`adze pack`). It builds against the installed adze and works at\n"
    "once.\n\n"
    "  --model M   llama, qwen3, ltx-video or flux\n"
    "  --op OPS    of rms_norm, layer_norm, glu, activation, softmax, gated_add, rope, gemm,\n"
    "              attention and quantize, with commas between them; modulation (AdaLN) is a\n"
    "              part of the norms. OWN=OP is an op of your own that begins as a copy of OP;\n"
    "              the model, the benchmark and the tests call it instead of OP\n"
    "  --dir DIR   where (default: a new folder NAME)\n\n"
    "Nothing that exists is overwritten. NAME has a-z, 0-9 and -, as the Hub demands.\n";

static const char models[] = "llama|qwen3|ltx-video|flux";
enum { OPS_KNOWN = 10 };
static const char *const ops_known[OPS_KNOWN] = {"rms_norm",  "layer_norm", "glu",  "activation", "softmax",
                                                 "gated_add", "rope",       "gemm", "attention",  "quantize"};
/* A call of each, for the card; %s is its name. x is [8, 4096], weight [4096]. */
static const char *const calls_known[OPS_KNOWN] = {
    "y = kernel.%s(x, weight, eps=1e-6)",
    "y = kernel.%s(x, weight, eps=1e-6)",
    "y = kernel.%s(x, x)  # silu(gate) * up",
    "y = kernel.%s(x, \"silu\")",
    "y = kernel.%s(x)",
    "y = kernel.%s(x, x, weight)  # x, residual, gate",
    "angles = torch.rand(8, 128, device=device)\n"
    "y = kernel.%s(x.view(8, 32, 128), None, angles.cos(), angles.sin())  # q alone",
    "y = kernel.%s(x, torch.randn(1024, 4096, device=device, dtype=x.dtype))  # x @ w.T",
    "q = x.view(1, 32, 8, 128)\n"
    "y = kernel.%s(q, q, q, causal=True)  # [batch, heads, tokens, dim]",
    "numbers, scale = kernel.%s(x, \"i8\")",
};

/* Calls that the models make, which `make bench` times first. */
static const struct {
    const char *model, *op, *line;
} calls_of_models[] = {
    {"llama", "rms_norm", "x=$[128,4096] weight=$[4096] eps=1e-5 rounding=1"},
    {"llama", "glu", "x=$[128,11008] value=$[128,11008] act=silu rounding=2"},
    {"qwen3", "rms_norm", "x=$[128,4096] weight=$[4096] eps=1e-6 rounding=1"},
    {"qwen3", "rms_norm", "x=$[1,128,32,128] weight=$[128] eps=1e-6 rounding=1"},
    {"qwen3", "rms_norm", "x=$[1,128,8,128] weight=$[128] eps=1e-6 rounding=1"},
    {"qwen3", "glu", "x=$[128,12288] value=$[128,12288] act=silu rounding=2"},
    {"ltx-video", "rms_norm", "x=$[1,2688,2048] eps=1e-6"},
    {"ltx-video", "rms_norm", "x=$[1,2688,2048] weight=$[2048] eps=1e-5"},
    {"ltx-video", "activation", "x=$[1,2688,8192] act=gelu_tanh"},
    {"flux", "layer_norm", "x=$[1,4608,3072] eps=1e-6"},
    {"flux", "rms_norm", "x=$[1,4608,24,128] weight=$[128] eps=1e-6"},
    {"flux", "activation", "x=$[1,4608,12288] act=gelu_tanh"},
};

typedef struct names {
    char module[64];         /* of the Python package */
    char list[600];          /* "a", "b" */
    char plain[600];         /* a, b */
    char calls[2000];        /* a call of each, as Python */
    char own[OPS_KNOWN][64]; /* OWN=OP: the name, of each op of ops_known */
    int taken[OPS_KNOWN];    /* whether the project has it */
    char of_model[64];       /* its file among the templates */
    char prefix[NEW_PATH];
} names;

static int known_at(const char *op)
{
    for (int i = 0; i < OPS_KNOWN; i++)
        if (strcmp(op, ops_known[i]) == 0)
            return i;
    return -1;
}

/* One op, as --op names it: OP, or OWN=OP. */
static int add_op(new_files *files, const char *word, names *n)
{
    char name[64];
    const char *const equals = strchr(word, '='), *const like = equals ? equals + 1 : word;
    const int at = known_at(like);
    if (at < 0)
        new_fail(files,
                 "--op has '%s', it must be of rms_norm, layer_norm, glu, activation, softmax, gated_add, rope, "
                 "gemm, attention, quantize, or OWN= and one of these",
                 like);
    else if (n->taken[at])
        new_fail(files, "--op has %s twice", like);
    if (files->failed)
        return 0;
    snprintf(name, sizeof name, "%.*s", (int)(equals ? equals - word : (long)strlen(word)), word);
    if (equals && known_at(name) >= 0)
        new_fail(files, "--op has '%s': %s is an op of adze, yours needs another name", word, name);
    if (files->failed || !new_name_holds(files, name) || !new_op(files, name, like))
        return 0;
    snprintf(n->own[at], sizeof n->own[at], "%s", name);
    n->taken[at] = 1;
    snprintf(n->list + strlen(n->list), sizeof n->list - strlen(n->list), "%s\"%s\"", *n->list ? ", " : "", name);
    snprintf(n->plain + strlen(n->plain), sizeof n->plain - strlen(n->plain), "%s%s", *n->plain ? ", " : "", name);
    const char *const call = calls_known[at], *const hole = strstr(call, "%s");
    snprintf(n->calls + strlen(n->calls), sizeof n->calls - strlen(n->calls), "%s%.*s%s%s", *n->calls ? "\n" : "",
             (int)(hole - call), call, name, hole + 2);
    return 1;
}

static int add_ops(new_files *files, const char *ops, names *n)
{
    char word[128];
    for (const char *at = ops; *at; at += strcspn(at, ","), at += *at == ',') {
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, ","), at);
        if (!add_op(files, word, n))
            return 0;
    }
    if (!*n->plain)
        new_fail(files, "--op names no op");
    return !files->failed;
}

/* Puts `to` in the place of each `from` in a file. */
static int replace_all(new_file *f, const char *from, const char *to)
{
    adze_text text = {0};
    int ok = 1;
    for (const char *at = f->text.data; ok && at && *at;) {
        const char *const found = strstr(at, from);
        ok = adze_text_add(&text, at, found ? (size_t)(found - at) : strlen(at)) &&
             (!found || adze_text_add(&text, to, strlen(to)));
        at = found ? found + strlen(from) : at + strlen(at);
    }
    adze_text_free(&f->text);
    f->text = text;
    return ok;
}

/* Python files name an op as text and as a function of the package: those of an own op get its name. */
static int use_own_names(new_files *files, const names *n)
{
    static const char *const forms[] = {"\"%s\"", "kernel.%s(", "k.%s(", "ops.%s("};
    char from[100], to[100];
    for (int i = 0; i < files->count; i++) {
        new_file *f = &files->file[i];
        const size_t length = strlen(f->path);
        if (length < 3 || strcmp(f->path + length - 3, ".py") != 0 || strcmp(f->path, "functions.py") == 0)
            continue;
        for (int op = 0; op < OPS_KNOWN; op++)
            for (size_t k = 0; k < sizeof forms / sizeof *forms && n->taken[op]; k++) {
                const char *const at = strchr(forms[k], '%');
                const int before = (int)(at - forms[k]);
                snprintf(from, sizeof from, "%.*s%s%s", before, forms[k], ops_known[op], at + 2);
                snprintf(to, sizeof to, "%.*s%s%s", before, forms[k], n->own[op], at + 2);
                if (strcmp(from, to) != 0 && !replace_all(f, from, to))
                    new_fail(files, "there is no memory");
            }
    }
    return !files->failed;
}

/* Puts the model's calls before the others that are timed. */
static int add_calls(new_files *files, const char *model, const names *n)
{
    static const char list[] = "static const char *const bench[] = {\n";
    char path[100], text[200];
    for (size_t i = sizeof calls_of_models / sizeof *calls_of_models; i-- > 0 && !files->failed;) {
        const int at = known_at(calls_of_models[i].op);
        if (strcmp(calls_of_models[i].model, model) != 0 || !n->taken[at])
            continue;
        snprintf(path, sizeof path, "check/%s.c", n->own[at]);
        snprintf(text, sizeof text, "    \"%s\",\n", calls_of_models[i].line);
        for (int f = 0; f < files->count; f++) {
            adze_text *to = &files->file[f].text;
            const char *found = strcmp(files->file[f].path, path) == 0 ? strstr(to->data, list) : NULL;
            if (found && !adze_text_insert(to, (size_t)(found - to->data) + strlen(list), text))
                new_fail(files, "there is no memory");
        }
    }
    return !files->failed;
}

static int add_files(new_files *files, const char *name, const char *model, const names *n)
{
    const char *const pairs[] = {"name",    name,    "module", n->module, "model", model,    "ops", n->plain,
                                 "op_list", n->list, "prefix", n->prefix, "calls", n->calls, NULL};
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
    int ok =
        new_project_file(files, n->of_model, "model.py", "the model, and the forwards that call the kernels", pairs);
    for (size_t i = 0; i < sizeof own / sizeof *own && ok; i++)
        ok = new_project_file(files, own[i].template, own[i].path, own[i].what, pairs);
    const int language = strcmp(model, "llama") == 0 || strcmp(model, "qwen3") == 0;
    if (ok && language && n->taken[known_at("attention")])
        ok = new_project_file(files, "templates/model/attention.py", "attention.py",
                              "the kernel in transformers' list of attentions", pairs);
    if (ok && language && n->taken[known_at("rms_norm")])
        ok = new_project_file(files, "templates/model/layers.py", "layers.py", "layers for kernelize", pairs);
    return ok && use_own_names(files, n);
}

/* A project is a Python package too, beside what it imports and its own modules. */
static int module_holds(new_files *files, const char *module)
{
    static const char *const taken[] = {
        "transformers", "diffusers", "kernels",   "numpy",   "safetensors", "setup", "model", "inject", "benchmark",
        "attention",    "layers",    "functions", "package", "build",       "check", "src",   "tests"};
    int bad = new_is_taken(module);
    for (size_t i = 0; i < sizeof taken / sizeof *taken && !bad; i++)
        bad = strcmp(module, taken[i]) == 0;
    if (bad)
        new_fail(files, "'%s' is no name for a project: its Python package could not be imported by that name",
                 module);
    return !bad;
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
    if (snprintf(files->root, sizeof files->root, "%s", dir ? dir : name) >= (int)sizeof files->root)
        new_fail(files, "%s is longer than %d", dir ? "--dir" : "the name", (int)sizeof files->root);
    snprintf(n.module, sizeof n.module, "%s", name);
    for (char *at = n.module; *at; at++)
        *at = *at == '-' ? '_' : *at;
    snprintf(n.of_model, sizeof n.of_model, "templates/model/%s.py", model);
    new_prefix(n.prefix, sizeof n.prefix);
    if (files->failed || !name_holds(files, name) || !module_holds(files, n.module) || !add_ops(files, ops, &n) ||
        !add_calls(files, model, &n) || !add_files(files, name, model, &n))
        return 2;
    printf("%s, kernels for %s, in %s:\n", name, model, files->root);
    if (!new_write(files))
        return 1;
    printf("\nIt works as it is. In %s:\n"
           "  make check             every kernel against its definition\n"
           "  adze pack              package/: a repository for the Hub, checked\n"
           "  python benchmark.py    the kernels alone, then the model, against eager and torch.compile\n"
           "Then change, in this order: check/ (the calls of your model), src/cuda/ (the kernel), model.py (the "
           "forwards that call it).\n",
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
