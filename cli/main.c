/* main.c - the program `adze`: finds the command. */
#include "adze.h"
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *what;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"info", "what this machine has, and every op with its kernels", adze_cli_info},
    {"check", "run every kernel against the definitions", adze_cli_check},
    {"bench", "time what was just proven, against the limits of this machine", adze_cli_bench},
    {"run", "repeat one call from its trace line", adze_cli_run},
};

int adze_cli_device(const char *word, int *device)
{
    char *end;
    const long number = strtol(word, &end, 10);
    if (strcmp(word, "cpu") == 0)
        *device = ADZE_CPU;
    else if (strcmp(word, "cuda") == 0)
        *device = 0;
    else if (*word && *end == '\0' && number >= 0 && number < 1024)
        *device = (int)number;
    else
        return 0;
    return 1;
}

int main(int argc, char **argv)
{
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (argc > 1 && strcmp(argv[1], commands[i].name) == 0)
            return commands[i].run(argc - 2, argv + 2);
    const int help = argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
    FILE *to = help ? stdout : stderr;
    if (argc > 1 && !help)
        fprintf(to, "adze: no command is called '%s'\n", argv[1]);
    fprintf(to, "adze %d.%d.%d - fast transformer kernels in C\n\n", ADZE_VERSION / 10000, ADZE_VERSION / 100 % 100,
            ADZE_VERSION % 100);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(to, "  adze %-6s %s\n", commands[i].name, commands[i].what);
    fprintf(to, "\n`adze COMMAND --help` says more.\n");
    return help ? 0 : 2;
}
