"""Processes that share a process group, forked from this one so that modules need not be imported again."""

import datetime
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

PATIENCE = datetime.timedelta(seconds=20)


def _rank(rank, world, folder, function, arguments):
    torch.set_num_threads(1)  # a forked process has none of its parent's OpenMP threads, and would wait for them
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=PATIENCE)
    torch.save(function(rank, *arguments), folder / str(rank))
    dist.destroy_process_group()


def on_ranks(world, function, *arguments):
    """The results of ``function(rank, *arguments)`` in ``world`` processes; a process that waits in vain fails."""
    if torch.cuda.is_initialized():
        pytest.skip("a forked process cannot use CUDA")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        torch.multiprocessing.start_processes(_rank, (world, folder, function, arguments), world, start_method="fork")
        return [torch.load(folder / str(rank), weights_only=False) for rank in range(world)]
