"""Simulated devices: tensors without data, modes that fail on a read or a copy, and memory that holds anything."""

import contextlib
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hpo_core as hpo


def has_no_order(function, args, result):
    """Whether a GPU may add up floats in another order at the next call: by atomics, or in a scan of one row."""
    name = function._schema.name.removeprefix("aten::").rstrip("_")
    added = name in ("index_add", "scatter_add", "scatter_reduce", "index_reduce", "bincount", "put")
    accumulates = name == "index_put" and len(args) > 3 and args[3]
    scans = name in ("cumsum", "logcumsumexp", "cumprod") and args[0].numel() == args[0].shape[args[1]]
    return (added or accumulates or scans) and result.is_floating_point()


class OnDevice(TorchDispatchMode):
    """Fails if a tensor on the host takes part, as in a copy, or with ``ordered`` the order of a sum of floats
    is not fixed. Collects kernels, without views and allocations."""

    def __init__(self, ordered=False):
        super().__init__()
        self.kernels, self.ordered = [], ordered

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.device.type == "meta" for tensor in tensors), function
        assert not (self.ordered and has_no_order(function, args, result)), function
        is_view = any(output.alias_info and not output.alias_info.is_write for output in function._schema.returns)
        if not is_view and "empty" not in function._schema.name:
            self.kernels.append(function._schema.name)
        return result


class Watched(TorchDispatchMode):
    """Acts like a tracer: no value may be read, although all exist."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class NoHostData(TorchFunctionMode):
    """Fails if a tensor is made of Python numbers, which is a copy on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        assert not made, "a tensor from Python data"
        return function(*args, **(kwargs or {}))


class Device(NamedTuple):
    """Tensors without data: reading a value of them raises."""

    rows: int = 8
    tokens: int = 64

    def __call__(self, *shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    def batch(self, **ids):
        offsets = self(self.rows + 1, dtype=torch.int64)
        return hpo.PackedBatch(offsets, self(self.tokens, dtype=torch.bool), validate=False, **ids)

    def ids(self):
        return self(self.rows, dtype=torch.int64)


@contextlib.contextmanager
def garbage_in_new_memory():
    """``torch.use_deterministic_algorithms`` does the same, and imports the compiler, which takes seconds."""
    torch.set_deterministic_debug_mode("error")  # fills what torch.empty gives
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
