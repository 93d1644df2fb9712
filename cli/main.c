/* main.c - the program `adze`: finds the command. */
#include "adze.h"
#include "cli.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *what;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"info", "what this machine has, and every op with its kernels", adze_cli_info},
    {"check", "run every kernel against the definitions", adze_cli_check},
    {"run", "repeat one call from its trace line", adze_cli_run},
};

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
