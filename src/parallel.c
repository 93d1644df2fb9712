/* parallel.c - threads on the CPU: a small pool, or the host's own parallel loop. */
#include "kernel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

enum { THREADS_MAX = 256, SPINS = 4000 };

typedef struct task {
    adze_range_fn body;
    void *context;
    int64_t count, step;
    _Atomic int64_t next; /* first index nobody has taken */
} task;

static struct {
    pthread_mutex_t busy; /* held by the thread whose loop the pool is running */
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    _Atomic(uint64_t) ticket; /* counts loops; a worker runs each once */
    atomic_int running;       /* workers that have not finished the current loop */
    int threads, started;     /* threads to use, workers started */
    task task;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static _Atomic(adze_parallel_for_fn) host_parallel_for;
static pthread_once_t once = PTHREAD_ONCE_INIT;

void adze_set_parallel_for(adze_parallel_for_fn parallel_for)
{
    atomic_store(&host_parallel_for, parallel_for);
}

/* A forked child has none of the workers: it starts its own. */
static void after_fork(void)
{
    pool.started = 0;
    atomic_store(&pool.running, 0);
    pool.busy = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.done = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

static void count_threads(void)
{
    cpu_set_t set;
    pool.threads = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    if (pool.threads > THREADS_MAX)
        pool.threads = THREADS_MAX;
    pthread_atfork(NULL, NULL, after_fork);
}

int adze_thread_count(void)
{
    pthread_once(&once, count_threads);
    return pool.threads;
}

static void drain(task *t)
{
    for (;;) {
        const int64_t begin = atomic_fetch_add(&t->next, t->step);
        if (begin >= t->count)
            return;
        t->body(t->context, begin, begin + t->step < t->count ? begin + t->step : t->count);
    }
}

static void *worker(void *arg)
{
    uint64_t seen = (uint64_t)(uintptr_t)arg;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool.ticket) == seen; i++)
            ;
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.ticket) == seen)
            pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.ticket);
        pthread_mutex_unlock(&pool.lock);
        drain(&pool.task);
        if (atomic_fetch_sub(&pool.running, 1) == 1) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
    }
    return NULL;
}

/* Workers live as long as the process, with every signal blocked: they are the host's to handle. */
static void start_workers(void)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (pool.started < pool.threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(uintptr_t)atomic_load(&pool.ticket)) != 0)
            break;
        pthread_detach(thread);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static void run_in_pool(int64_t count, int64_t step, adze_range_fn body, void *context)
{
    start_workers();
    pool.task.body = body;
    pool.task.context = context;
    pool.task.count = count;
    pool.task.step = step;
    atomic_store(&pool.task.next, 0);
    atomic_store(&pool.running, pool.started);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.ticket, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    drain(&pool.task);
    for (int i = 0; i < SPINS && atomic_load(&pool.running); i++)
        ;
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.running))
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* Four pieces a thread, so that a slow core does not hold the others up. A second caller runs its loop by
 * itself. */
void adze_parallel_for(int64_t count, int64_t grain, adze_range_fn body, void *context)
{
    const adze_parallel_for_fn host = atomic_load(&host_parallel_for);
    if (count <= 0)
        return;
    if (host) {
        host(count, grain, body, context);
        return;
    }
    const int threads = adze_thread_count();
    int64_t step = (count + threads * 4 - 1) / (threads * 4);
    step = step < grain ? grain : step;
    if (threads == 1 || step >= count || pthread_mutex_trylock(&pool.busy) != 0) {
        body(context, 0, count);
        return;
    }
    run_in_pool(count, step, body, context);
    pthread_mutex_unlock(&pool.busy);
}
