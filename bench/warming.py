"""Compiles before anything is timed, by several processes at once, into the cache that torch.compile keeps on disk.

Between the configurations of a kernel the process that uses it chooses, later, when nothing else runs.
"""

import multiprocessing
import os
import time

import torch

MOST = 14  # processes; each has a context on the GPU


def configure():
    """Settings that must be the same in every process, because they are a part of the cache's keys."""
    from torch._inductor import config

    config.compile_threads = 1
    config.autotune_local_cache = False


def workers(options):
    if options.workers is not None:
        return options.workers
    return min(MOST, max(1, os.cpu_count() - 1)) if options.device == "cuda" else 0


def one(work):
    function, job = work
    try:
        with torch.inference_mode():
            function(job)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    except Exception as error:  # the measurement will raise it again
        return f"{type(error).__name__}: {error}"
    finally:
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return None


def compile_before(function, jobs, count, seconds):
    """Runs function(job) for each job in `count` processes, for at most `seconds`. The measurement compiles the rest.
    Returns how many were done."""
    if count <= 0 or not jobs:
        return 0
    configure()
    begin, done = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(min(count, len(jobs)), configure) as pool:
        results = pool.imap_unordered(one, [(function, job) for job in jobs])
        try:
            for _ in jobs:
                done += results.next(max(0.1, begin + seconds - time.monotonic())) is None
        except multiprocessing.TimeoutError:
            pass
    print(
        f"{done} of {len(jobs)} compiled before, by {count} processes in {time.monotonic() - begin:.0f} s", flush=True
    )
    return done
