/* skills.c - `adze skills`: installs the skills that the program carries where coding agents look for them. */
#include "adze.h"
#include "bundle.h"
#include "cli.h"
#include "sha256.h"
#include "text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "adze skills add [NAME] PLACE [--global] [--force]\n"
    "adze skills list\n"
    "adze skills verify [NAME] PLACE [--global]\n"
    "adze skills remove [NAME] PLACE [--global] [--force]\n\n"
    "A skill is what a coding agent or a newcomer needs to write the next kernel: a short guide,\n"
    "references, templates, scripts. The program carries it: nothing is downloaded. MANIFEST,\n"
    "among its files, has the SHA-256 of each: `sha256sum -c MANIFEST` reads it too.\n\n"
    "  NAME        the skill (default: adze-kernels)\n"
    "  PLACE       one or more of\n"
    "                --claude     .claude/skills      --codex      .codex/skills\n"
    "                --opencode   .opencode/skills    --cursor     .cursor/skills\n"
    "                --dest DIR   DIR\n"
    "  --global    in the home folder instead of here\n"
    "  --force     overwrite or remove files that are not as they were installed\n\n"
    "`verify` compares an installed skill with the program's.\n";

enum { PATH = 4096 };

static const struct agent {
    const char *option, *here, *home;
} agents[] = {
    {"--claude", ".claude/skills", ".claude/skills"},
    {"--codex", ".codex/skills", ".codex/skills"},
    {"--opencode", ".opencode/skills", "opencode/skills"},
    {"--cursor", ".cursor/skills", ".cursor/skills"},
};
enum { AGENTS = sizeof agents / sizeof *agents, OPENCODE = 2 };

typedef struct request {
    const char *name, *dest;
    int agent[AGENTS], global, force;
} request;

/* The folder of an agent's skills; 0 when there is no home folder. */
static int folder_of(int agent, int global, char *folder)
{
    const char *const home = getenv("HOME"), *const config = getenv("XDG_CONFIG_HOME");
    if (!global)
        return snprintf(folder, PATH, "%s", agents[agent].here) < PATH;
    if (agent == OPENCODE && config && *config)
        return snprintf(folder, PATH, "%s/%s", config, agents[agent].home) < PATH;
    if (!home || !*home)
        return 0;
    return snprintf(folder, PATH, "%s/%s%s", home, agent == OPENCODE ? ".config/" : "", agents[agent].home) < PATH;
}

/* The files of a skill, one after the other; paths are below the skill's folder. */
static int next_of(const char *skill, const char **at, adze_file *file)
{
    const size_t n = strlen(skill);
    while (adze_bundle_next(at, file))
        if (strncmp(file->path, "skills/", 7) == 0 && strncmp(file->path + 7, skill, n) == 0 &&
            file->path[7 + n] == '/') {
            memmove(file->path, file->path + 8 + n, strlen(file->path + 8 + n) + 1);
            return 1;
        }
    return 0;
}

static int manifest_of(const char *skill, adze_text *text)
{
    char sum[SHA256_TEXT];
    const char *at = NULL;
    int ok = adze_text_print(text, "# %s of adze %d.%d.%d\n", skill, ADZE_VERSION / 10000, ADZE_VERSION / 100 % 100,
                             ADZE_VERSION % 100);
    for (adze_file file; ok && next_of(skill, &at, &file);) {
        adze_sha256(file.text, file.size, sum);
        ok = adze_text_print(text, "%s  %s\n", sum, file.path);
    }
    return ok;
}

typedef enum state { MISSING, SAME, OTHER } state;

/* A file of a skill's folder, compared with a checksum. */
static state compare(const char *folder, const char *path, const char *sum)
{
    char full[2 * PATH], found[SHA256_TEXT];
    snprintf(full, sizeof full, "%s/%s", folder, path);
    if (!adze_exists(full))
        return MISSING;
    char *text = adze_cli_read(full);
    if (!text)
        return OTHER;
    adze_sha256(text, strlen(text), found);
    free(text);
    return strncmp(found, sum, SHA256_TEXT - 1) == 0 ? SAME : OTHER;
}

/* The next line of a manifest: sum and path, both as pointers into `line`, which is changed. */
static int next_line(char **line, char **sum, char **path)
{
    while (**line) {
        char *const begin = *line, *const end = begin + strcspn(begin, "\n");
        *line = *end ? end + 1 : end;
        *end = '\0';
        if (strlen(begin) > SHA256_TEXT + 1 && begin[0] != '#' && !strstr(begin, "..") &&
            begin[SHA256_TEXT + 1] != '/') {
            begin[SHA256_TEXT - 1] = '\0';
            *sum = begin, *path = begin + SHA256_TEXT + 1;
            return 1;
        }
    }
    return 0;
}

static char *installed_manifest(const char *folder)
{
    char path[3 * PATH];
    snprintf(path, sizeof path, "%s/MANIFEST", folder);
    return adze_exists(path) ? adze_cli_read(path) : NULL;
}

static int has_line(const char *manifest, const char *path)
{
    char line[PATH];
    snprintf(line, sizeof line, "  %s\n", path);
    return manifest && strstr(manifest, line) != NULL;
}

/* Prints the files that are not as they were installed and, where a skill is added, those that others have written at
   a place of it. */
static int count_changed(const char *folder, const char *skill, int adding)
{
    int changed = 0;
    char *const listed = installed_manifest(folder), *const old = installed_manifest(folder);
    char *line = old, *sum, *path;
    while (old && next_line(&line, &sum, &path))
        if (compare(folder, path, sum) == OTHER) {
            fprintf(stderr, "  %s/%s was changed since it was installed\n", folder, path);
            changed++;
        }
    const char *at = NULL;
    for (adze_file file; adding && next_of(skill, &at, &file);) {
        char now[SHA256_TEXT];
        if (has_line(listed, file.path))
            continue;
        adze_sha256(file.text, file.size, now);
        if (compare(folder, file.path, now) == OTHER) {
            fprintf(stderr, "  %s/%s is there, and is another file\n", folder, file.path);
            changed++;
        }
    }
    free(old);
    free(listed);
    return changed;
}

static void remove_file(const char *folder, const char *path)
{
    char full[2 * PATH];
    snprintf(full, sizeof full, "%s/%s", folder, path);
    unlink(full);
    for (char *slash = strrchr(full, '/'); slash && (size_t)(slash - full) > strlen(folder);
         slash = strrchr(full, '/')) {
        *slash = '\0';
        rmdir(full); /* goes on only while folders are empty */
    }
}

static int remove_installed(const char *folder)
{
    char *const old = installed_manifest(folder), *line = old, *sum, *path;
    int removed = 0;
    while (old && next_line(&line, &sum, &path)) {
        remove_file(folder, path);
        removed++;
    }
    if (old) {
        remove_file(folder, "MANIFEST");
        rmdir(folder);
    }
    free(old);
    return removed;
}

static int add(const char *folder, const request *r)
{
    adze_text manifest = {0};
    char full[2 * PATH];
    char *const old = installed_manifest(folder);
    int ok = manifest_of(r->name, &manifest), files = 0;
    const int same = old && ok && strcmp(old, manifest.data) == 0;
    free(old);
    const int changed = count_changed(folder, r->name, 1);
    if (changed && !r->force) {
        fprintf(stderr, "adze skills: nothing was written to %s; --force overwrites\n", folder);
        adze_text_free(&manifest);
        return 1;
    }
    if (!same)
        remove_installed(folder);
    const char *at = NULL;
    for (adze_file file; ok && next_of(r->name, &at, &file); files++) {
        snprintf(full, sizeof full, "%s/%s", folder, file.path);
        ok = adze_write_file(full, file.text, file.size, file.executable);
        if (ok && !same)
            printf("  %s\n", full);
    }
    snprintf(full, sizeof full, "%s/MANIFEST", folder);
    ok = ok && adze_write_file(full, manifest.data, manifest.size, 0);
    adze_text_free(&manifest);
    if (!ok)
        fprintf(stderr, "adze skills: %s cannot be written: %s\n", full, strerror(errno));
    else if (same && !changed)
        printf("%s is installed in %s already\n", r->name, folder);
    else
        printf("%s: %d files and MANIFEST, in %s\n", r->name, files, folder);
    return !ok;
}

static int verify(const char *folder, const request *r)
{
    adze_text manifest = {0};
    char *const old = installed_manifest(folder);
    int wrong = 0, files = 0;
    if (!old || !manifest_of(r->name, &manifest)) {
        fprintf(stderr, "adze skills: %s is not installed in %s\n", r->name, folder);
        free(old);
        return 1;
    }
    const int same = strcmp(old, manifest.data) == 0;
    if (!same)
        printf("%s: not the release of this program: MANIFEST begins with '%.*s'\n", folder, (int)strcspn(old, "\n"),
               old);
    char *line = old, *sum, *path;
    for (; next_line(&line, &sum, &path); files++) {
        const state found = compare(folder, path, sum);
        if (found != SAME)
            printf("%s/%s %s\n", folder, path, found == MISSING ? "is missing" : "was changed");
        wrong += found != SAME;
    }
    printf("%s: %d files, %d are not as they were installed\n", folder, files, wrong);
    free(old);
    adze_text_free(&manifest);
    return wrong > 0 || !same;
}

static int take_out(const char *folder, const request *r)
{
    char *const old = installed_manifest(folder);
    free(old);
    if (!old) {
        fprintf(stderr, "adze skills: %s is not installed in %s\n", r->name, folder);
        return 1;
    }
    if (count_changed(folder, r->name, 0) && !r->force) {
        fprintf(stderr, "adze skills: nothing was removed from %s; --force removes\n", folder);
        return 1;
    }
    printf("%s: %d files removed from %s\n", r->name, remove_installed(folder), folder);
    return 0;
}

static int list(void)
{
    char last[200] = "";
    const char *at = NULL;
    for (adze_file file; adze_bundle_next(&at, &file);) {
        char name[200], folder[PATH], sum[SHA256_TEXT];
        adze_text manifest = {0};
        if (sscanf(file.path, "skills/%199[^/]", name) != 1 || strcmp(name, last) == 0 ||
            !manifest_of(name, &manifest))
            continue;
        snprintf(last, sizeof last, "%s", name);
        adze_sha256(manifest.data, manifest.size, sum);
        printf("%s, of adze %d.%d.%d, sha256 of its MANIFEST %s\n", name, ADZE_VERSION / 10000,
               ADZE_VERSION / 100 % 100, ADZE_VERSION % 100, sum);
        for (int a = 0; a < AGENTS; a++)
            for (int global = 0; global < 2; global++) {
                char own[2 * PATH];
                if (!folder_of(a, global, folder))
                    continue;
                snprintf(own, sizeof own, "%s/%s", folder, name);
                char *old = installed_manifest(own);
                if (old)
                    printf("  in %s%s\n", own, strcmp(old, manifest.data) ? ", of another release" : "");
                free(old);
            }
        adze_text_free(&manifest);
    }
    return 0;
}

static int each(const request *r, int (*act)(const char *folder, const request *r))
{
    char folder[2 * PATH], place[PATH];
    int status = 0, places = 0;
    for (int a = 0; a <= AGENTS; a++) {
        if (a < AGENTS ? !r->agent[a] : !r->dest)
            continue;
        places++;
        if (a == AGENTS && snprintf(place, PATH, "%s", r->dest) >= PATH) {
            fprintf(stderr, "adze skills: --dest is longer than %d\n", (int)PATH);
            return 2;
        }
        if (a < AGENTS && !folder_of(a, r->global, place)) {
            fprintf(stderr, "adze skills: there is no home folder: HOME is not set, or too long\n");
            return 2;
        }
        snprintf(folder, sizeof folder, "%s/%s", place, r->name);
        status |= act(folder, r);
    }
    if (!places) {
        fprintf(stderr, "adze skills: a place is missing: --claude, --codex, --opencode, --cursor or --dest DIR\n");
        return 2;
    }
    return status;
}

int adze_cli_skills(int argc, char **argv)
{
    request r = {0};
    const adze_option options[] = {
        {.name = agents[0].option, .flag = &r.agent[0]},
        {.name = agents[1].option, .flag = &r.agent[1]},
        {.name = agents[2].option, .flag = &r.agent[2]},
        {.name = agents[3].option, .flag = &r.agent[3]},
        {.name = "--dest", .text = &r.dest},
        {.name = "--global", .flag = &r.global},
        {.name = "--force", .flag = &r.force},
        {.name = NULL},
    };
    static const struct {
        const char *name;
        int (*act)(const char *folder, const request *r);
    } words[] = {{"add", add}, {"verify", verify}, {"remove", take_out}, {"list", NULL}};
    const char *const word = argc > 0 && argv[0][0] != '-' ? argv[0] : NULL;
    int status, w = 0;
    if (!adze_cli_options("skills", help, options, &r.name, argc - (word != NULL), argv + (word != NULL), &status))
        return status;
    while (word && w < 4 && strcmp(word, words[w].name) != 0)
        w++;
    if (!word || w == 4) {
        fprintf(stderr, "adze skills: %s%s%s\n\n%s", word ? "'" : "", word ? word : "a word is missing",
                word ? "' is none of add, list, verify, remove" : ": add, list, verify or remove", help);
        return 2;
    }
    if (!words[w].act)
        return list();
    if (!r.name)
        r.name = "adze-kernels";
    const char *at = NULL;
    adze_file file;
    if (strpbrk(r.name, "/.") || !next_of(r.name, &at, &file)) {
        fprintf(stderr, "adze skills: no skill is called '%s': `adze skills list` prints those there are\n", r.name);
        return 2;
    }
    return each(&r, words[w].act);
}
