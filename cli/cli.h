/* cli.h - the commands of the program `adze`; each gets the arguments after its name and returns an exit
 * status. */
#ifndef ADZE_CLI_H
#define ADZE_CLI_H

int adze_cli_info(int argc, char **argv);
int adze_cli_check(int argc, char **argv);
int adze_cli_run(int argc, char **argv);

#endif
