/* new.h - files that a command is about to write: all are made first, so that nothing is written when one cannot be.
 */
#ifndef ADZE_CLI_NEW_H
#define ADZE_CLI_NEW_H

#include "bundle.h"
#include "text.h"

enum { NEW_FILES = 96, NEW_PATH = 1024 };

typedef struct new_file {
    char path[NEW_PATH]; /* below the root */
    const char *what;    /* for the list that is printed */
    adze_text text;
    int exists, executable;
} new_file;

typedef struct new_files {
    char root[NEW_PATH];
    int in_tree; /* the root is adze's own tree */
    int count;
    int failed; /* a sentence has been printed */
    const char *command;
    new_file file[NEW_FILES];
} new_files;

/* Starts a file; its text is empty. */
new_file *new_file_add(new_files *files, const char *what, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The text of a file of adze's tree: from the root, if that is such a tree, otherwise as the program carries it. */
int new_source(new_files *files, const char *path, adze_text *text);
/* A template with each {{KEY}} replaced. `pairs` is key, value, ..., NULL. */
int new_fill(new_files *files, const char *path, const char *const *pairs, adze_text *text);
void new_fail(new_files *files, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Writes everything, unless a new file exists already, and prints the list. 0 on failure. */
int new_write(new_files *files);
void new_free(new_files *files);
/* Whether a name will do for C, CUDA and Python; a sentence is printed otherwise. */
int new_name_holds(new_files *files, const char *name);
/* Whether a name is a word of C, C++ or Python, or one that the files of an op use. */
int new_is_taken(const char *name);
/* Where adze is installed, as the project's Makefile has it. */
void new_prefix(char *prefix, size_t size);

/* new_op.c: adds the files of an op. `like` is a template or an op of the library. */
int new_op(new_files *files, const char *name, const char *like);
int new_project_file(new_files *files, const char *template, const char *path, const char *what,
                     const char *const *pairs);
/* new_project.c */
int new_project(int argc, char **argv);

#endif
