/* cli.h - the commands of the program `adze`; each gets the arguments after its name and returns an exit
 * status. */
#ifndef ADZE_CLI_H
#define ADZE_CLI_H

#include <stddef.h>

int adze_cli_info(int argc, char **argv);
int adze_cli_check(int argc, char **argv);
int adze_cli_run(int argc, char **argv);
int adze_cli_bench(int argc, char **argv);
int adze_cli_new(int argc, char **argv);
int adze_cli_pack(int argc, char **argv);
int adze_cli_skills(int argc, char **argv);
int adze_cli_tune(int argc, char **argv);

/* options.c: what a command takes besides --help, -h and --version. An option has one of flag, device and text; the
   list ends with a row of no name. */
typedef struct adze_option {
    const char *name; /* with its dashes */
    int *flag;        /* becomes 1; without one, the option has a value */
    int *device;      /* "cpu", "cuda" or a number */
    const char **text;
    const char *choices; /* NULL, or what the text may be: "a|b|c" */
} adze_option;
/* Whether the command goes on; otherwise it ends with `status`, and a message has been printed. `word` NULL:
   the command takes none. */
int adze_cli_options(const char *command, const char *help, const adze_option *options, const char **word, int argc,
                     char **argv, int *status);
void adze_cli_version(void);

/* file.c: the text of a file, at most 16 MiB of it, which the caller frees; NULL when it cannot be read. */
char *adze_cli_read(const char *path);
/* file.c: the calls of an option --line, a list that ends with NULL: the text itself, or each line of @FILE but for
   empty ones and those that begin with #. They have one space between words, and no kernel after an arrow. NULL: one
   of them is no call, or has no place in ADZE_LINE_TEXT, and error has a sentence. */
enum { ADZE_LINE_TEXT = 1024 };
char **adze_cli_lines(const char *option, char *error, size_t error_size);
void adze_cli_lines_free(char **lines);

/* machine.c: what the machine is called. Texts are empty where nothing is known. */
typedef struct adze_machine {
    char cpu[128], isa[32], gpu[128], driver[64], clocks[128];
    int cores, threads, sm, sm_count; /* sm 0: this describes the CPU */
    size_t gpu_memory;
} adze_machine;
void adze_machine_ask(adze_machine *machine, int device);
const char *adze_commit(void); /* what this program was built from */

#endif
