/* pack.c - `adze pack`: runs hub/project.py of the installation, for it loads the package with Python's own library.
 */
#include "cli.h"
#include "new.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "adze pack [DIR] [--push ORGANISATION/NAME] [--dry-run]\n\n"
    "Builds a project (`adze new project`), runs its check (--brief), and makes DIR/package of it,\n"
    "a kernel repository for the Hugging Face Hub: build/VARIANT, sources for kernel-builder, card,\n"
    "benchmark, tests. Where this machine's torch has no CUDA, a variant for the CPU is built too.\n"
    "Then it is checked: layout, metadata, digests, symbols, glibc, CUDA, commit, and whether the\n"
    "library `kernels` loads it. Needs python3, with kernels and torch for the last check.\n\n"
    "  DIR         the project (default: here)\n"
    "  --push R    upload it to the repository R with your own login (`hf auth login`)\n"
    "  --dry-run   print what --push would upload, by which commands, and why it would be refused;\n"
    "              upload nothing\n";

int adze_cli_pack(int argc, char **argv)
{
    const char *dir = NULL, *push = NULL, *python = getenv("PYTHON");
    int dry = 0, status, n = 0;
    const adze_option list[] = {
        {.name = "--push", .text = &push}, {.name = "--dry-run", .flag = &dry}, {.name = NULL}};
    if (!adze_cli_options("pack", help, list, &dir, argc, argv, &status))
        return status;
    char prefix[NEW_PATH], script[2 * NEW_PATH];
    new_prefix(prefix, sizeof prefix);
    snprintf(script, sizeof script, "%s/share/adze/hub/project.py", prefix);
    if (!adze_exists(script)) {
        fprintf(stderr, "adze pack: %s is not there: adze must be installed (make install)\n", script);
        return 2;
    }
    const char *words[8];
    words[n++] = python && *python ? python : "python3";
    words[n++] = script;
    words[n++] = dir ? dir : ".";
    if (push)
        words[n++] = "--push", words[n++] = push;
    if (dry)
        words[n++] = "--dry-run";
    words[n] = NULL;
    fflush(stdout);
    execvp(words[0], (char **)words);
    fprintf(stderr, "adze pack: %s cannot be run: %s\n", words[0], strerror(errno));
    return 2;
}
