"""Processes that share a process group, forked from this one: what is imported need not be imported again."""

import datetime
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = datetime.timedelta(seconds=60)


def _rank(rank, world, folder, function):
    torch.set_num_threads(1)  # a forked process has none of its parent's OpenMP threads, and would wait for them
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=PATIENCE)
    torch.save(function(rank), folder / str(rank))
    dist.destroy_process_group()


def on_ranks(world, function):
    """What each of ``world`` processes returns from ``function(rank)``."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        torch.multiprocessing.start_processes(_rank, (world, folder, function), world, start_method="fork")
        return [torch.load(folder / str(rank), weights_only=False) for rank in range(world)]
