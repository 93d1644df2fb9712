/* machine.c - the names of the processor and the GPU, the driver and the clocks; and of the commit. */
#include "cli.h"
#include "gpu.h"
#include "kernel.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *adze_commit(void)
{
    return ADZE_COMMIT;
}

/* Quotes, which would end a JSON text, and what is not ASCII are left out of names. */
static int is_plain(int c)
{
    return c >= ' ' && c < 127 && c != '"' && c != '\\';
}

/* The first line of a file or of what a command prints, without its end. */
static void first_line(char *to, size_t size, FILE *from)
{
    size_t n = 0;
    for (int c = from ? fgetc(from) : EOF; c != EOF && c != '\n'; c = fgetc(from))
        if (n + 1 < size && is_plain(c))
            to[n++] = (char)c;
    to[n] = '\0';
}

/* Of /proc/cpuinfo: what follows the colon of the first line that begins with a name. */
static void cpuinfo(char *to, size_t size, const char *name)
{
    char line[512];
    FILE *f = fopen("/proc/cpuinfo", "r");
    size_t n = 0;
    int found = 0;
    while (f && !found && fgets(line, sizeof line, f)) {
        const char *colon = strchr(line, ':');
        found = strncmp(line, name, strlen(name)) == 0 && colon && colon[1];
        for (const char *at = found ? colon + 2 : ""; *at && n + 1 < size; at++)
            if (is_plain(*at))
                to[n++] = *at;
    }
    to[n] = '\0';
    if (f)
        fclose(f);
}

/* Linux gives Arm processors as numbers. */
static void arm_name(char *to, size_t size)
{
    static const struct {
        const char *maker, *part, *name;
    } known[] = {
        {"0x41", "0xd03", "Cortex-A53"},  {"0x41", "0xd08", "Cortex-A72"},  {"0x41", "0xd0b", "Cortex-A76"},
        {"0x41", "0xd0c", "Neoverse-N1"}, {"0x41", "0xd40", "Neoverse-V1"}, {"0x41", "0xd42", "Cortex-A78AE"},
        {"0x41", "0xd49", "Neoverse-N2"}, {"0x41", "0xd4f", "Neoverse-V2"}, {"0x41", "0xd83", "Neoverse-V3AE"},
        {"0x41", "0xd84", "Neoverse-V3"}, {"0x41", "0xd8e", "Neoverse-N3"}, {"0xc0", "0xac3", "Ampere-1"},
    };
    char maker[32], part[32];
    cpuinfo(maker, sizeof maker, "CPU implementer");
    cpuinfo(part, sizeof part, "CPU part");
    snprintf(to, size, "%s %s", maker, part);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].maker, maker) == 0 && strcmp(known[i].part, part) == 0)
            snprintf(to, size, "%s", known[i].name);
}

static void read_command(char *to, size_t size, const char *command)
{
    FILE *f = popen(command, "r");
    first_line(to, size, f);
    if (f)
        pclose(f);
}

static void read_clock(char *to, size_t size)
{
    char khz[32];
    FILE *f = fopen("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "r");
    first_line(khz, sizeof khz, f);
    if (f)
        fclose(f);
    if (*khz)
        snprintf(to, size, "cpu %s kHz", khz);
}

void adze_machine_ask(adze_machine *m, int device)
{
    memset(m, 0, sizeof *m);
    cpuinfo(m->cpu, sizeof m->cpu, "model name");
    if (!*m->cpu)
        arm_name(m->cpu, sizeof m->cpu);
    const int features = adze_cpu_features();
#if defined(__x86_64__)
    const char *least = "sse2";
#elif defined(__aarch64__)
    const char *least = "neon";
#else
    const char *least = "generic";
#endif
    snprintf(m->isa, sizeof m->isa, "%s",
             features & ADZE_CPU_AVX512 ? "avx512"
             : features & ADZE_CPU_AVX2 ? "avx2"
             : features & ADZE_CPU_SVE  ? "sve"
                                        : least);
    m->cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    m->threads = adze_thread_count();
    if (device == ADZE_CPU) {
        read_clock(m->clocks, sizeof m->clocks);
        return;
    }
    char command[256];
    static const char ask[] = "nvidia-smi -i %d --query-gpu=%s --format=csv,noheader 2>/dev/null";
    adze_gpu_describe(device, m->gpu, sizeof m->gpu, &m->gpu_memory);
    m->sm = adze_cuda_sm(device);
    m->sm_count = adze_cuda_sm_count(device);
    snprintf(command, sizeof command, ask, device, "driver_version");
    read_command(m->driver, sizeof m->driver, command);
    snprintf(command, sizeof command, ask, device, "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem");
    read_command(m->clocks, sizeof m->clocks, command);
}
