/* dlopen.c - the library is loaded, called and unloaded many times over, as plugins are: no thread outlives its code.
   Nor does a process hang when it ends, however it ends: with workers that sleep or spin, in the middle of a call of
   another thread, in a forked child, from the handler of a signal. */
#include <adze.h>
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "expect.h"

enum { ROWS = 64, DIM = 4096, THREADS = 4 };
static float x[ROWS][DIM];

typedef struct library {
    void *handle;
    adze_status (*rms_norm)(adze_stream, const adze_rms_norm_args *);
    adze_status (*set_threads)(int32_t);
} library;

static void *find(void *handle, const char *name)
{
    return handle ? dlsym(handle, name) : NULL;
}
static int open_library(library *l)
{
    void *symbol;
    l->handle = dlopen("libadze.so", RTLD_NOW | RTLD_LOCAL);
    if (!l->handle)
        printf("%s\n", dlerror());
    memcpy(&l->rms_norm, (symbol = find(l->handle, "adze_rms_norm"), &symbol), sizeof symbol);
    memcpy(&l->set_threads, (symbol = find(l->handle, "adze_set_threads"), &symbol), sizeof symbol);
    return l->rms_norm && l->set_threads && l->set_threads(THREADS) == ADZE_OK;
}

/* One call, of which the pool has a part. */
static int call(const library *l, float *out)
{
    const adze_tensor view = {x, {ROWS, DIM}, {DIM, 1}, 2, ADZE_F32};
    adze_rms_norm_args args = {.call = ADZE_CALL(rms_norm), .out = view, .x = view, .eps = 1e-6f};
    args.out.data = out;
    return l->rms_norm((adze_stream){ADZE_CPU, NULL}, &args) == ADZE_OK && out[ROWS * DIM - 1] > 0;
}

static int threads_here(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int n = 0;
    for (const struct dirent *d; tasks && (d = readdir(tasks));)
        n += d->d_name[0] != '.';
    if (tasks)
        closedir(tasks);
    return n;
}

typedef struct caller {
    const library *library;
    float *out;
    int calls, good;
} caller;
static void *run_caller(void *arg)
{
    caller *c = arg;
    for (int i = 0; c->calls < 0 || i < c->calls; i++)
        c->good += call(c->library, c->out);
    return NULL;
}

/* Opened and closed `times` times, with calls of two threads in between; every other time the workers have had time
   to fall asleep. */
static void check_reload(int times)
{
    static float out[2][ROWS * DIM];
    const int before = threads_here();
    int opened = 0, good = 0, most = 0, left = 0;
    for (int i = 0; i < times; i++) {
        library l;
        if (!open_library(&l))
            break;
        opened++;
        caller callers[2] = {{&l, out[0], 3, 0}, {&l, out[1], 3, 0}};
        pthread_t id;
        pthread_create(&id, NULL, run_caller, &callers[1]);
        run_caller(&callers[0]);
        pthread_join(id, NULL);
        good += callers[0].good == 3 && callers[1].good == 3;
        most = threads_here() > most ? threads_here() : most;
        if (i % 2)
            nanosleep(&(struct timespec){0, 20 * 1000 * 1000}, NULL);
        dlclose(l.handle);
        void *still = dlopen("libadze.so", RTLD_NOW | RTLD_NOLOAD);
        left += still != NULL || (threads_here() > before && !UNDER_TSAN);
    }
    expect(opened == times && good == times, "every time it is loaded, it works");
    expect(most > before, "with threads of its own");
    expect(left == 0, "and leaves nothing behind");
}

/* How a child ends: 0 when it exits by itself with status 0, within 20 seconds. */
typedef enum ending { RETURNS, RETURNS_AT_REST, OTHER_THREAD_CALLS, FORKS, SIGNAL } ending;

static void leave(int signal)
{
    (void)signal;
    exit(0);
}

static void child(ending how, int turn)
{
    static float out[2][ROWS * DIM];
    static library l;
    static caller busy = {&l, out[1], -1, 0};
    pthread_t id;
    alarm(20);
    if (!open_library(&l) || !call(&l, out[0]))
        exit(2);
    switch (how) {
    case RETURNS: break;
    case RETURNS_AT_REST: nanosleep(&(struct timespec){0, 20 * 1000 * 1000}, NULL); break;
    case OTHER_THREAD_CALLS:
        pthread_create(&id, NULL, run_caller, &busy);
        nanosleep(&(struct timespec){0, 1000 * 1000 * (turn + 1)}, NULL);
        break;
    case FORKS: {
        const pid_t pid = fork();
        if (pid == 0)
            exit(turn % 2 || call(&l, out[0]) ? 0 : 3); /* with and without threads of its own */
        int status = -1;
        if (waitpid(pid, &status, 0) != pid || status != 0 || !call(&l, out[0]))
            exit(4);
        break;
    }
    case SIGNAL:
        signal(SIGVTALRM, leave);
        setitimer(ITIMER_VIRTUAL, &(struct itimerval){{0, 0}, {0, 1000 + 731 * turn}}, NULL);
        run_caller(&(caller){&l, out[0], -1, 0});
        break;
    }
    exit(0);
}

static void check_endings(void)
{
    static const struct {
        ending how;
        int times;
        const char *what;
    } endings[] = {{RETURNS, 8, "a process ends with workers that spin"},
                   {RETURNS_AT_REST, 3, "with workers that sleep"},
                   {OTHER_THREAD_CALLS, 8, "in the middle of another thread's call"},
                   {FORKS, 6, "after a fork, and so does the child"},
                   {SIGNAL, 12, "from the handler of a signal, in the middle of a call"}};
    for (size_t e = 0; e < sizeof endings / sizeof *endings; e++) {
        int good = 0;
        if (UNDER_TSAN && endings[e].how == FORKS)
            continue;
        fflush(stdout);
        for (int turn = 0; turn < endings[e].times; turn++) {
            const pid_t pid = fork();
            if (pid == 0)
                child(endings[e].how, turn);
            int status = -1;
            good += waitpid(pid, &status, 0) == pid && status == 0;
        }
        expect(good == endings[e].times, endings[e].what);
    }
}

int main(void)
{
    for (int i = 0; i < ROWS * DIM; i++)
        x[i / DIM][i % DIM] = (float)(i % 17) + 1;
    check_reload(UNDER_TSAN ? 10 : 50);
    check_endings();
    return expect_report();
}
