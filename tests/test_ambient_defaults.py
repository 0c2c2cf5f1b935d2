"""Nothing depends on torch's default dtype or default device, nor on rounding and subnormal numbers: neither a
process's first calls nor later ones."""

import ctypes
import hashlib
import json
import multiprocessing
import platform
import subprocess
import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from interpreter import patch_interpreter
from mutants import forget_backends
from ranks import on_ranks
from valid_calls import calls, tensors_of

import hpo_core as hpo

SINGLY = ("bfloat16", "meta", "float64", "float16")
DEFAULTS = ("bfloat16 on meta", *(pytest.param(name, marks=pytest.mark.long) for name in SINGLY))
BACKENDS = (None, "reference", "cuda_emulated", "triton")


@pytest.fixture(scope="module")
def first_calls():
    return in_fresh_processes("none", "bfloat16 on meta")


@pytest.fixture
def plain(first_calls):
    return first_calls["none"]


@pytest.mark.parametrize("default", DEFAULTS)
def test_first_calls(default, first_calls, plain):
    found = first_calls[default] if default in first_calls else in_fresh_processes(default)[default]
    assert {name: bits for name, bits in found.items() if bits != plain[name]} == {}


@pytest.mark.parametrize("default", ["bfloat16", "float64", "meta"])
def test_a_backend_that_is_loaded_under_them(default):
    """A backend makes its own tensors, the patterns of outputs and the workspace, at its first call."""
    forget_backends()
    logp, advantages, batch = torch.tensor([-1.0, -0.5, -2.0]), torch.ones(1), hpo.PackedBatch.from_lengths([3])
    with defaults(default):
        out = hpo.policy_loss_and_grad(logp, None, advantages, batch, hpo.gates.gspo(), backend="cpu")
    assert (out.loss.dtype, out.loss.item()) == (torch.float32, -1.0) and out.metrics["tokens"] == 3
    assert torch.equal(out.grad, torch.full((3,), -1 / 3))


@pytest.mark.parametrize("default", DEFAULTS)
def test_later_calls_in_a_thread_of_their_own(default, plain):
    found = {}

    def run():
        with defaults(default):
            found.update(results((None,)))

    results((None,))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert {name: bits for name, bits in found.items() if bits != plain[name]} == {}
    assert found


def test_a_factor_that_is_made_of_numbers_alone():
    """``torch.where`` of two numbers of Python has the default dtype."""
    tree = torch.tensor([0.0, 1.0, 0.5, 0.25]), torch.tensor([-1, 0, 0, 1]), torch.zeros(4, dtype=torch.int64)
    expected = hpo.advantages.mars2(*tree, compat="code")
    with defaults("bfloat16"):
        found = hpo.advantages.mars2(*tree, compat="code")
    assert torch.equal(found, expected)


def of_rank(rank, default):
    batch = hpo.PackedBatch.from_lengths([2], trajectory_ids=torch.tensor([7]), group_ids=torch.tensor([3]))
    logp, old_logp, reward = torch.tensor([-1.0, -0.5]), torch.tensor([-1.1, -0.9]), torch.tensor([float(rank)])
    world = torch.distributed.group.WORLD
    with defaults(default):
        advantage = hpo.advantages.over_ranks(hpo.advantages.grpo, world)
        out = hpo.hierarchical_policy_loss(
            logp, old_logp, reward, batch, advantage=advantage, gate=hpo.gates.fiberpo(), weights=reward + 1,
            process_group=world,
        )  # fmt: skip
        return _bits((out.loss, out.metrics.all_reduce(world).vector))


def test_over_ranks():
    assert on_ranks(2, of_rank, "bfloat16 on meta") == on_ranks(2, of_rank, "none")


def test_no_thread_flushes_or_rounds_as_its_caller_says():
    """The calling thread flushes subnormals and rounds up, threads of its pool may not: any may compute a token."""
    draw, tokens = torch.Generator().manual_seed(0), 1 << 16
    logp = -torch.rand(tokens, generator=draw)
    batch = hpo.PackedBatch.from_lengths([256] * 256)
    old_logp, upward = logp - 0.1, {"x86_64": 0x800, "aarch64": 1 << 22}[platform.machine()]
    advantages = torch.linspace(-1e-33, 1e-33, 256)  # times weights of 2^-16: most gradients are subnormal
    found = []

    def run():
        for gate in (hpo.gates.ppo_clip(), hpo.gates.gspo()):
            out = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, backend="cpu")
            found.append(_bits((out.loss, out.grad)))

    def run_elsewhere():
        assert torch.set_flush_denormal(True) and ctypes.CDLL(None).fesetround(upward) == 0
        torch.set_num_threads(2)
        torch.rand(1 << 20).exp()  # starts the pool, as kernels would do it in another state
        for threads in (2, 1, 2):
            torch.set_num_threads(threads)
            run()

    before = torch.get_num_threads()
    try:
        run()
        thread = threading.Thread(target=run_elsewhere)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert len(found) == 8 and len(set(found[::2])) == len(set(found[1::2])) == 1


@contextmanager
def defaults(name: str):
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        for default in name.split(" on "):
            if default == "meta":
                stack.enter_context(torch.device("meta"))
            elif default != "none":
                torch.set_default_dtype(getattr(torch, default))
                stack.callback(torch.set_default_dtype, dtype)
        yield


def in_fresh_processes(*names: str) -> dict[str, dict[str, str]]:
    """The results under each default, of a process that has called nothing, forked from one that has imported."""
    worker = subprocess.run([sys.executable, __file__, *names], capture_output=True, text=True, check=False)
    assert worker.returncode == 0, worker.stdout[-2000:] + worker.stderr[-2000:]
    return json.loads(worker.stdout)


def results(backends: tuple[str | None, ...]) -> dict[str, str]:
    """The bits of the result of every valid call; Triton in its interpreter computes one call of each function."""
    found: dict[str, str] = {}
    seen = set()
    for at, call in enumerate(calls()):
        for backend in backends:
            given = dict(call.arguments)
            if backend is not None:
                if not call.takes_backend() or (backend == "triton" and call.name in seen):
                    continue
                given["backend"] = backend
            try:
                found[f"{at} {call.name} {backend}"] = _bits(call.run(given))
            except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
                found[f"{at} {call.name} {backend}"] = f"{type(error).__name__}: {error}"
        seen.add(call.name)
    return found


def _bits(given: Any) -> str:
    tensors = [tensor.contiguous() for tensor in tensors_of(given)]
    described = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors]
    content = b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return f"{described} {hashlib.sha256(content).hexdigest()}"


def under(name: str) -> dict[str, str]:
    with defaults(name):
        return results(BACKENDS)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    patch_interpreter()
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(dict(zip(sys.argv[1:], pool.map(under, sys.argv[1:], chunksize=1), strict=True))))
