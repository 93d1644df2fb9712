/* cli.h - the commands of the program `adze`; each gets the arguments after its name and returns an exit
 * status. */
#ifndef ADZE_CLI_H
#define ADZE_CLI_H

#include <stddef.h>

int adze_cli_info(int argc, char **argv);
int adze_cli_check(int argc, char **argv);
int adze_cli_run(int argc, char **argv);
int adze_cli_bench(int argc, char **argv);

/* "cpu", "cuda" or a number; 0 when the word is none of them. */
int adze_cli_device(const char *word, int *device);

/* machine.c: what the machine is called. Texts are empty where nothing is known. */
typedef struct adze_machine {
    char cpu[128], isa[32], gpu[128], driver[64], clocks[128];
    int cores, threads, sm, sm_count; /* sm 0: the CPU is meant */
    size_t gpu_memory;
} adze_machine;
void adze_machine_ask(adze_machine *machine, int device);

#endif
