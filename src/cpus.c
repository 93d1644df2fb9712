/* cpus.c - how many CPUs this process may use: those it may run on, and the share of their time that its cgroup has.
 */
#include "kernel.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The text of a small file; empty when it cannot be read. */
static void read_text(const char *path, char *text, size_t size)
{
    FILE *file = fopen(path, "re");
    const size_t n = file ? fread(text, 1, size - 1, file) : 0;
    text[n] = '\0';
    if (file)
        fclose(file);
}

/* quota / period in CPUs, rounded up; 0 when there is no limit. */
static int whole_cpus(long long quota, long long period)
{
    if (quota <= 0 || period <= 0)
        return 0;
    const long long cpus = (quota - 1) / period + 1;
    return cpus < ADZE_THREADS_MAX ? (int)cpus : ADZE_THREADS_MAX;
}

/* The limit of one cgroup: cpu.max of version 2, or cpu.cfs_quota_us and cpu.cfs_period_us of version 1. */
static int quota_of(const char *folder)
{
    char path[1200], text[64];
    long long quota = 0, period = 0;
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    read_text(path, text, sizeof text);
    if (text[0]) /* "max 100000" or "150000 100000" */
        return sscanf(text, "%lld %lld", &quota, &period) == 2 ? whole_cpus(quota, period) : 0;
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
    read_text(path, text, sizeof text);
    quota = atoll(text);
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    read_text(path, text, sizeof text);
    period = atoll(text);
    return whole_cpus(quota, period);
}

/* The smallest limit of a cgroup and its parents, up to the mount. Inside a container the mount often is the
   container's own cgroup, while its path is the host's: then only the last step finds files. */
static int quota_upward(const char *mount, const char *group)
{
    char folder[1100];
    int least = 0;
    if (snprintf(folder, sizeof folder, "%s%s", mount, group) >= (int)sizeof folder)
        return 0;
    for (;;) {
        const int cpus = quota_of(folder);
        if (cpus && (!least || cpus < least))
            least = cpus;
        char *slash = strrchr(folder + strlen(mount), '/');
        if (!slash)
            return least;
        *slash = '\0';
    }
}

/* Whether the list of a cgroup's controllers, up to the colon, has "cpu". */
static int has_cpu(const char *list)
{
    for (; *list && *list != ':'; list += *list == ',') {
        const size_t n = strcspn(list, ",:");
        if (n == 3 && memcmp(list, "cpu", 3) == 0)
            return 1;
        list += n;
    }
    return 0;
}

int adze_cpu_quota(const char *groups, const char *root)
{
    static const char *const version1[] = {"cpu", "cpu,cpuacct"};
    int least = 0;
    for (const char *line = groups; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        /* number:controllers:/path; version 2 has no controllers */
        const char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
        char mount[600], group[512];
        if (!path || path > line + strcspn(line, "\n"))
            continue;
        snprintf(group, sizeof group, "%.*s", (int)strcspn(path + 1, "\n"), path + 1);
        for (int i = 0; i < 2; i++) {
            if (list + 1 == path)
                snprintf(mount, sizeof mount, "%s%s", root, i ? "/unified" : "");
            else if (has_cpu(list + 1))
                snprintf(mount, sizeof mount, "%s/%s", root, version1[i]);
            else
                continue;
            const int cpus = quota_upward(mount, group);
            if (cpus && (!least || cpus < least))
                least = cpus;
        }
    }
    return least;
}

int adze_cpu_count(void)
{
    cpu_set_t set;
    int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    char groups[4096];
    read_text("/proc/self/cgroup", groups, sizeof groups);
    const int quota = adze_cpu_quota(groups, "/sys/fs/cgroup");
    cpus = quota && quota < cpus ? quota : cpus;
    return cpus < 1 ? 1 : cpus < ADZE_THREADS_MAX ? cpus : ADZE_THREADS_MAX;
}
