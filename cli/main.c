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
    {"bench", "verify each call, then time it; as a share of what this machine reaches", adze_cli_bench},
    {"tune", "time every variant of an op's kernel, and write the table of the fastest", adze_cli_tune},
    {"run", "repeat one call, given as the line that ADZE_TRACE=1 prints", adze_cli_run},
    {"new", "the files of a new op or project, which build and pass their check at once", adze_cli_new},
    {"pack", "make a Hugging Face kernel repository of a project, check it, upload it", adze_cli_pack},
    {"skills", "what a coding agent needs to write kernels: install it where the agent looks", adze_cli_skills},
};

/* The output must have been written: with a full disk the command fails. */
static int finish(int status)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return status;
    fprintf(stderr, "adze: standard output cannot be written\n");
    return status ? status : 1;
}

static void usage(FILE *to)
{
    fprintf(to, "adze %d.%d.%d - fast transformer kernels in C\n\n", ADZE_VERSION / 10000, ADZE_VERSION / 100 % 100,
            ADZE_VERSION % 100);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(to, "  adze %-6s %s\n", commands[i].name, commands[i].what);
    fprintf(to, "\n`adze COMMAND --help` explains a command; `adze --version` names the version.\n");
}

int main(int argc, char **argv)
{
    const char *const word = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(word, commands[i].name) == 0)
            return finish(commands[i].run(argc - 2, argv + 2));
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
        usage(stdout);
        return finish(0);
    }
    if (strcmp(word, "--version") == 0) {
        adze_cli_version();
        return finish(0);
    }
    if (argc > 1)
        fprintf(stderr, "adze: no command is called '%s'\n", word);
    usage(stderr);
    return 2;
}
