"""Runs a function in several processes that share a gloo group; one that waits for another in vain fails in seconds."""

import datetime
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing


def _process(rank, path, count, function, arguments, results):
    torch.set_num_threads(1)  # a forked process has none of its parent's OpenMP threads, and would wait for them
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=count, timeout=datetime.timedelta(seconds=20)
    )
    try:
        results[rank] = function(rank, *arguments)
    except Exception:
        results[rank] = traceback.format_exc()
        raise
    finally:
        dist.destroy_process_group()


def in_processes(count, function, *arguments):
    """What each of ``count`` ranks returned for ``function(rank, *arguments)``."""
    with tempfile.TemporaryDirectory() as folder, torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        given = (f"{folder}/store", count, function, arguments, results)
        try:
            torch.multiprocessing.start_processes(_process, given, count, start_method="fork")
        except Exception as error:
            raise AssertionError("\n".join(map(str, results.values()))) from error
        return [results[rank] for rank in range(count)]
