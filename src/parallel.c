/* parallel.c - threads on the CPU: a small pool, or the host's own parallel loop. */
#include "kernel.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { SPINS = 4000 };

typedef struct task {
    adze_range_fn body;
    void *context;
    int64_t count, step;
    _Atomic int64_t next; /* first index that no thread has taken */
} task;

/* A loop has places for as many workers as it can use. A worker that takes a place runs until the loop has no piece
   left. The caller, when it finds no piece either, withdraws the free places and waits for the running workers. So
   nobody waits for a worker that is slow to wake. Both counts are in one word, so that they change atomically. */
enum { PLACE = 1 };
static const uint64_t AT_WORK = (uint64_t)1 << 32;

static struct {
    pthread_mutex_t busy; /* held by the thread whose loop the pool is running */
    pthread_mutex_t lock; /* guards the fields from here to the task, and the sleeping workers */
    pthread_cond_t wake, done;
    int started, sleeping;
    pid_t process; /* the process that started the workers */
    pthread_t worker[ADZE_THREADS_MAX];
    task task;
    _Atomic uint64_t state; /* free PLACEs, and workers AT_WORK */
    atomic_int stopping;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static _Atomic(adze_parallel_for_fn) host_parallel_for;
static atomic_int threads_requested; /* of adze_set_threads; 0: the default */
static int threads_default;
static pthread_once_t once = PTHREAD_ONCE_INIT;

void adze_set_parallel_for(adze_parallel_for_fn parallel_for)
{
    atomic_store(&host_parallel_for, parallel_for);
}

adze_status adze_set_threads(int32_t threads)
{
    ADZE_REQUIRE(threads >= 0 && threads <= ADZE_THREADS_MAX, ADZE_BAD_ARG,
                 "set_threads: threads is %d, it must be 1 to %d, or 0 for the default", threads, ADZE_THREADS_MAX);
    atomic_store(&threads_requested, threads);
    return ADZE_OK;
}

/* A forked child has no workers: it starts its own. */
static void after_fork(void)
{
    pool.started = pool.sleeping = 0;
    atomic_store(&pool.state, 0);
    pool.busy = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.lock = (pthread_mutex_t)PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
    pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.done = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

int adze_threads_requested(void)
{
    const char *text = getenv("ADZE_THREADS");
    char *end;
    if (!text || !*text)
        return 0;
    const long threads = strtol(text, &end, 10);
    return *end || threads < 0 || threads > ADZE_THREADS_MAX ? -1 : (int)threads;
}

static void count_threads(void)
{
    threads_default = adze_threads_requested();
    if (threads_default <= 0)
        threads_default = adze_cpu_count();
    pthread_atfork(NULL, NULL, after_fork);
}

int adze_thread_count(void)
{
    pthread_once(&once, count_threads);
    const int requested = atomic_load(&threads_requested);
    return requested ? requested : threads_default;
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

static int places(void)
{
    return (uint32_t)atomic_load(&pool.state) != 0;
}

static int take_place(void)
{
    uint64_t state = atomic_load(&pool.state);
    while ((uint32_t)state)
        if (atomic_compare_exchange_weak(&pool.state, &state, state - PLACE + AT_WORK))
            return 1;
    return 0;
}

static void *worker(void *unused)
{
    (void)unused;
    for (;;) {
        for (int i = 0; i < SPINS && !places() && !atomic_load(&pool.stopping); i++)
            ;
        if (!places()) {
            pthread_mutex_lock(&pool.lock);
            pool.sleeping++;
            while (!places() && !atomic_load(&pool.stopping))
                pthread_cond_wait(&pool.wake, &pool.lock);
            pool.sleeping--;
            pthread_mutex_unlock(&pool.lock);
        }
        if (atomic_load(&pool.stopping))
            return NULL;
        if (!take_place())
            continue;
        drain(&pool.task);
        if (atomic_fetch_sub(&pool.state, AT_WORK) >> 32 == 1) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
    }
}

/* Workers have every signal blocked: they are the host's to handle. */
static void start_workers(int wanted)
{
    if (pool.started >= wanted)
        return;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pool.process = getpid();
    while (pool.started < wanted && pthread_create(&pool.worker[pool.started], NULL, worker, NULL) == 0)
        pool.started++;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/* Stops the workers before the library is unloaded, at dlclose() or at exit. A loop that another thread still runs
   is finished by that thread. A child whose fork() ran no handlers has no workers to join. Nor can the workers be
   joined when a signal handler that interrupted the lock's owner calls exit(). */
__attribute__((destructor)) static void stop_workers(void)
{
    if (pthread_mutex_lock(&pool.lock) != 0)
        return;
    const int started = pool.process == getpid() ? pool.started : 0;
    atomic_store(&pool.stopping, 1);
    pool.started = 0;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 0; i < started; i++)
        pthread_join(pool.worker[i], NULL);
}

/* Running workers look for places themselves; sleeping ones are woken only for the places beyond those. */
static void run_in_pool(int64_t count, int64_t step, int helpers, adze_range_fn body, void *context)
{
    pool.task.body = body;
    pool.task.context = context;
    pool.task.count = count;
    pool.task.step = step;
    atomic_store(&pool.task.next, 0);
    pthread_mutex_lock(&pool.lock);
    if (!atomic_load(&pool.stopping))
        start_workers(helpers);
    helpers = helpers < pool.started ? helpers : pool.started;
    int wake = helpers - (pool.started - pool.sleeping);
    atomic_store(&pool.state, (uint64_t)helpers * PLACE);
    if (wake >= pool.sleeping)
        pthread_cond_broadcast(&pool.wake);
    else
        for (; wake > 0; wake--)
            pthread_cond_signal(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    drain(&pool.task);
    atomic_fetch_and(&pool.state, ~(uint64_t)UINT32_MAX);
    for (int i = 0; i < SPINS && atomic_load(&pool.state); i++)
        ;
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.state))
        pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* Four pieces per thread balance the load when a core is slow. A concurrent second caller runs its loop alone. */
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
    if (threads == 1 || step >= count || atomic_load(&pool.stopping) || pthread_mutex_trylock(&pool.busy) != 0) {
        body(context, 0, count);
        return;
    }
    const int64_t others = (count - 1) / step; /* pieces besides the caller's first */
    run_in_pool(count, step, others < threads - 1 ? (int)others : threads - 1, body, context);
    pthread_mutex_unlock(&pool.busy);
}
