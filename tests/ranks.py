"""Processes that are forked from this one, so that modules need not be imported again."""

import datetime
import functools
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

PATIENCE = datetime.timedelta(seconds=20)


def _alone(rank, world, folder, function, arguments):
    torch.set_num_threads(1)  # a forked process has none of its parent's OpenMP threads, and would wait for them
    torch.save(function(*arguments), folder / str(rank))


def _rank(rank, world, folder, function, arguments):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=PATIENCE)
    dist.barrier()  # a rank that ends before the others are connected to it breaks their connection
    _alone(rank, world, folder, function, (rank, *arguments))
    dist.destroy_process_group()


def _results(process, world, function, arguments):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        torch.multiprocessing.start_processes(process, (world, folder, function, arguments), world, start_method="fork")
        return [torch.load(folder / str(rank), weights_only=False) for rank in range(world)]


def on_ranks(world, function, *arguments):
    """The results of ``function(rank, *arguments)`` in ``world`` processes; a process that waits in vain fails."""
    if torch.cuda.is_initialized():
        pytest.skip("a forked process cannot use CUDA")
    return _results(_rank, world, function, arguments)


def apart(function, *arguments):
    """The result of ``function(*arguments)``, which uses no CUDA, in a process of its own: nothing of it stays here."""
    return _results(_alone, 1, function, arguments)[0]


def count_collectives():
    """All-reduces and gathers of this process from now on: their numbers, and the bytes of all and of the largest."""
    calls = Counter()

    def counted(name):
        function = getattr(dist, name)

        @functools.wraps(function)
        def call(*arguments, **keywords):
            own = arguments[1] if name == "all_gather" else arguments[0]
            calls[name] += 1
            calls["bytes"] += own.numel() * own.element_size()
            calls["largest"] = max(calls["largest"], own.numel() * own.element_size())
            return function(*arguments, **keywords)

        return call

    dist.all_reduce, dist.all_gather = counted("all_reduce"), counted("all_gather")
    return calls


def forget(*packages):
    """The next import of these packages is as if it were the first."""
    for name in list(sys.modules):
        if any(f"{name}.".startswith(f"{package}.") for package in packages):
            del sys.modules[name]
