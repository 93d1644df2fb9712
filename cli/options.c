/* options.c - the arguments of a command: `--name`, `--name value`, `--name=value`, and at most one word. */
#include "adze.h"
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPTIONS_MAX = 32 };

void adze_cli_version(void)
{
    printf("adze %d.%d.%d\n", ADZE_VERSION / 10000, ADZE_VERSION / 100 % 100, ADZE_VERSION % 100);
}

static int read_device(const char *word, int *device)
{
    char *end;
    const long number = strtol(word, &end, 10);
    if (strcmp(word, "cpu") == 0)
        *device = ADZE_CPU;
    else if (strcmp(word, "cuda") == 0)
        *device = 0;
    else if (strspn(word, "0123456789") > 0 && *end == '\0' && number < 1024)
        *device = (int)number;
    else
        return 0;
    return 1;
}

/* Whether `value` is one of "a|b|c". */
static int is_choice(const char *choices, const char *value)
{
    const size_t n = strlen(value);
    for (const char *at = choices; n && *at; at += strcspn(at, "|"), at += *at == '|')
        if (strcspn(at, "|") == n && memcmp(at, value, n) == 0)
            return 1;
    return 0;
}

/* 2 when the value is not allowed: then a message has been printed. */
static int set(const char *command, const adze_option *option, const char *value)
{
    if (option->flag) {
        *option->flag = 1;
    } else if (option->device) {
        if (!read_device(value, option->device)) {
            fprintf(stderr, "adze %s: no device is called '%s'; it is cpu, cuda or a number\n", command, value);
            return 2;
        }
    } else if (!option->choices && !*value) {
        fprintf(stderr, "adze %s: %s is empty\n", command, option->name);
        return 2;
    } else if (option->choices && !is_choice(option->choices, value)) {
        fprintf(stderr, "adze %s: %s is '%s', it must be %s\n", command, option->name, value, option->choices);
        return 2;
    } else {
        *option->text = value;
    }
    return 0;
}

static int misuse(const char *command, const char *help, const char *word, const char *what)
{
    fprintf(stderr, "adze %s: %s%s%s%s\n\n%s", command, *word ? "'" : "", word, *word ? "' " : "", what, help);
    return 2;
}

int adze_cli_options(const char *command, const char *help, const adze_option *options, const char **word, int argc,
                     char **argv, int *status)
{
    int seen[OPTIONS_MAX] = {0};
    *status = 0;
    for (int i = 0; i < argc && *status == 0; i++) {
        const char *const arg = argv[i];
        if (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0) {
            fputs(help, stdout);
            return 0;
        }
        if (strcmp(arg, "--version") == 0) {
            adze_cli_version();
            return 0;
        }
        if (arg[0] != '-') {
            if (!word || *word)
                *status = misuse(command, help, arg, word ? "is a second word, one is taken" : "is not understood");
            else
                *word = arg;
            continue;
        }
        const size_t n = strcspn(arg, "=");
        int k = 0;
        while (options[k].name && (strlen(options[k].name) != n || memcmp(options[k].name, arg, n) != 0))
            k++;
        const char *value = arg[n] ? arg + n + 1 : NULL;
        if (!options[k].name)
            *status = misuse(command, help, arg, "is not an option");
        else if (seen[k]++)
            *status = misuse(command, help, options[k].name, "is given twice");
        else if (options[k].flag && value)
            *status = misuse(command, help, options[k].name, "takes no value");
        else if (!options[k].flag && !value && i + 1 == argc)
            *status = misuse(command, help, options[k].name, "needs a value");
        else
            *status = set(command, &options[k], options[k].flag || value ? value : argv[++i]);
    }
    return *status == 0;
}
