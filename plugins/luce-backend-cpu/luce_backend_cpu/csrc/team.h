/* Threads: one parallel region per call, spin barriers between its stages.
 *
 * The region runs in the OpenMP team torch already has (its `GOMP_parallel` is handed over at load time), so that there is
 * one set of worker threads in the process. Where torch brings no such runtime, a small pthread pool takes its place.
 * Barriers spin a bounded number of times, then yield: on a crowded machine the thread that has work must get the core. */
#ifndef LUCE_TEAM_H
#define LUCE_TEAM_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>
#include "base.h"

#define SPINS_BEFORE_YIELD 4000 /* about 50-100 us: longer than any stage of a small model takes to even out */
#define MAX_THREADS 256

typedef struct {
    _Atomic int32_t arrived;
    char pad0[60];
    _Atomic int32_t generation;
    char pad1[60];
    _Atomic int32_t next;       /* next work item of the current stage */
    char pad2[60];
} luce_team;

typedef struct {
    luce_team *team;
    int32_t id, size;
    void *run;
} luce_worker;

INLINE void relax(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

INLINE void wait_for_change(_Atomic int32_t *word, int32_t old) {
    for (int spins = 0; atomic_load_explicit(word, memory_order_acquire) == old; spins++) {
        if (spins < SPINS_BEFORE_YIELD) relax();
        else sched_yield();
    }
}

/* Everyone has finished the stage; its work items start again at 0. */
static void barrier(luce_worker *w) {
    luce_team *team = w->team;
    if (w->size == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    int32_t generation = atomic_load_explicit(&team->generation, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == w->size - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->generation, generation + 1, memory_order_release);
    } else {
        wait_for_change(&team->generation, generation);
    }
}

/* The next item of this stage, or one >= `count` when there is none left. */
INLINE int32_t take(luce_worker *w) { return atomic_fetch_add_explicit(&w->team->next, 1, memory_order_relaxed); }

/* --- one region on n threads */

typedef void (*region_fn)(void *run, int32_t id, int32_t size);

typedef struct {
    region_fn fn;
    void *run;
} region;

static void (*omp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_thread_num)(void);
static int (*omp_num_threads)(void);

static void omp_entry(void *arg) {
    region *r = arg;
    r->fn(r->run, omp_thread_num(), omp_num_threads());
}

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, finished;
    region job;
    int32_t size, workers, running;
    _Atomic int32_t ticket;
    pid_t owner;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .finished = PTHREAD_COND_INITIALIZER};

static void *pool_main(void *arg) {
    const int32_t id = (int32_t)(intptr_t)arg;
    int32_t seen = 0;
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (pool.ticket == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = pool.ticket;
        region job = pool.job;
        const int32_t size = pool.size;
        pthread_mutex_unlock(&pool.lock);
        if (id >= size) continue;
        job.fn(job.run, id, size);
        pthread_mutex_lock(&pool.lock);
        if (--pool.running == 0) pthread_cond_signal(&pool.finished);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

static void pool_parallel(region job, int32_t threads) {
    pthread_mutex_lock(&pool.lock);
    if (pool.owner != getpid()) {            /* a fork took the threads away */
        pool.owner = getpid();
        pool.workers = 0;
    }
    while (pool.workers + 1 < threads) {     /* worker ids count from 1; the caller is 0 */
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_main, (void *)(intptr_t)(pool.workers + 1))) break;
        pthread_detach(thread);
        pool.workers++;
    }
    pool.size = imin(threads, pool.workers + 1);
    pool.running = pool.size - 1;
    pool.job = job;
    pool.ticket++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    job.fn(job.run, 0, pool.size);
    pthread_mutex_lock(&pool.lock);
    while (pool.running) pthread_cond_wait(&pool.finished, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

static void parallel(region_fn fn, void *run, int32_t threads) {
    region job = {fn, run};
    if (threads <= 1) fn(run, 0, 1);
    else if (omp_parallel) omp_parallel(omp_entry, &job, (unsigned)threads, 0);
    else pool_parallel(job, threads);
}

#endif
