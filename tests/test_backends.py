"""A requested backend is used, or refused with a reason; the enumerations are those of the C interface."""

import contextlib
import enum
import functools
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import NATIVE
from torch.utils._python_dispatch import TorchDispatchMode
from valid_calls import calls

import hpo_core as hpo
from hpo_core import __main__ as program
from hpo_core import specs, testing

backends = importlib.import_module("hpo_core.backends")  # the attribute of this name is the function
NAMES = ("reference", "cpu", "triton", "cuda", "cuda_emulated")
API = Path(__file__).parents[1] / "csrc" / "include" / "hpo" / "api"


@pytest.fixture(autouse=True)
def fresh():
    """A simulated environment ends with its test."""
    fallbacks = dict(backends._FALLS_BACK)
    for cached in (backends._resolve, backends.choice):
        cached.cache_clear()
    yield
    for cached in (backends._resolve, backends.choice):
        cached.cache_clear()
    backends._FALLS_BACK.clear()
    backends._FALLS_BACK.update(fallbacks)


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that devices of these capabilities are here, the first of them current, with an extension."""

    def pretend(*capabilities, built="sm_80 sm_90 compute_90", driver=13000, toolkit=13000):
        extension = SimpleNamespace(description=lambda: built, versions=lambda: (driver, toolkit))
        monkeypatch.setitem(sys.modules, "hpo_core._cuda", extension)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda of=None: capabilities[0 if of is None else of.index or 0]
        )

    return pretend


def loss(backend, device="cpu"):
    batch, logp = hpo.PackedBatch.from_lengths([2]).to(device), torch.zeros(2, device=device)
    return hpo.policy_loss(logp, None, logp.new_ones(1), batch, backend=backend).loss


def test_every_backend_is_listed_with_a_reason_or_a_description():
    found = hpo.backends()
    assert tuple(found) == NAMES
    for name, available in found.items():
        assert available.name == name and bool(available) == (not available.reason)
        assert (available.detail or available.reason) in repr(available)
    assert found["reference"] and found["cpu"], "an installation has at least these two"


def test_a_requested_backend_is_used(backend):
    assert loss(backend, testing.device_of(backend)) == -1


class Traced(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Traced])
def test_a_call_that_names_a_backend_runs_on_no_other(mode, monkeypatch):
    """But for what a batch counts once for all calls: the valid tokens of its rows, and where these begin and end."""
    own, named = backends._resolve, [call for call in calls() if call.takes_backend() and not call.is_of_testing()]

    def resolve(op, device, backend):
        found = own(op, device, backend)
        of_batches = ("row_counts", "row_weights", "row_spans")
        return found if backend else SimpleNamespace(**{name: getattr(found, name) for name in of_batches})

    with monkeypatch.context() as patched:
        patched.setattr(backends, "_resolve", resolve)
        for call in named:
            fits = {"state": None} if "state" in call.arguments and call.is_optional("state") else {}
            try:
                with mode():
                    call.run({**call.arguments, "backend": "cpu"} | fits)
            except ValueError as error:
                assert mode is Traced and "eager call" in str(error)
    assert len(named) > 150


@pytest.mark.parametrize("name", ["gpu", "CPU", "pallas"])
def test_an_unknown_backend(name):
    with pytest.raises(ValueError, match=f"backend: expected one of {', '.join(NAMES)}, got '{name}'"):
        loss(name)


def test_a_backend_of_another_device():
    with pytest.raises(ValueError, match="backend: 'cuda' serves cuda tensors, got a tensor on cpu"):
        loss("cuda")
    with pytest.raises(ValueError, match="backend: no backend serves meta tensors by itself"):
        batch = hpo.PackedBatch(torch.zeros(2, dtype=torch.int64), total_tokens=2).to("meta")
        hpo.policy_loss(torch.zeros(2, device="meta"), None, torch.ones(1, device="meta"), batch)
    with pytest.raises(ValueError, match="backend: 'triton' serves cuda tensors, got a tensor on meta"):
        hpo.entropy.forking_tokens().fit_score(torch.zeros(2, device="meta"), backend="triton")  # interpreter or not


@pytest.mark.filterwarnings("ignore:hpo_core. no native backend")
def test_a_missing_backend_is_an_error_with_the_reason(monkeypatch):
    missing = backends.Availability("cpu", "not built: no compiler")
    monkeypatch.setitem(backends._PROBES, "cpu", lambda _: missing)
    with pytest.raises(RuntimeError, match="backend: 'cpu' is not available: not built: no compiler"):
        loss("cpu")
    assert not hpo.backends()["cpu"] and hpo.backends()["cpu"].reason == "not built: no compiler"


def test_a_stub_in_place_of_triton_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert "another module stands in its place" in backends._probe_triton().reason
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton is not installed" in backends._probe_triton().reason


def test_without_a_native_backend_the_reference_serves_with_a_warning(monkeypatch):
    monkeypatch.setitem(backends._PROBES, "cuda", lambda _: backends.Availability("cuda", "no driver"))
    monkeypatch.setitem(backends._PROBES, "triton", lambda _: backends.Availability("triton", "no compiler"))
    with pytest.warns(
        RuntimeWarning, match=r"serves cuda tensors here \(cuda: no driver; triton: no compiler\), so the"
    ):
        assert backends.choice("gates", "cuda") == "reference"


def test_an_instruction_set_that_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setenv("HPO_CORE_ISA", "avx")
    monkeypatch.setitem(backends._PROBES, "cpu", lambda _: backends.Availability("cpu", "HPO_CORE_ISA=avx cannot run"))
    backends._FALLS_BACK.clear()
    with pytest.raises(RuntimeError, match="backend: 'cpu' is not available: HPO_CORE_ISA=avx cannot run"):
        loss(None)


@pytest.mark.parametrize(("asked", "expected"), [("reference", True), ("cpu", False)])
def test_the_environment_variable_chooses_the_default_backend(asked, expected, monkeypatch):
    monkeypatch.setenv("HPO_CORE_BACKEND", asked)
    backends._FALLS_BACK.clear()
    assert backends.choice("gates", "cpu") == backends.choice("gates", "cuda") == asked
    assert backends.is_reference(torch.zeros(1), None) == expected
    assert backends.is_reference(torch.zeros(1), "reference") and not backends.is_reference(torch.zeros(1), "cpu")
    assert loss(None) == loss("cpu") == -1
    monkeypatch.setenv("HPO_CORE_BACKEND", "abacus")
    backends.choice.cache_clear()
    with pytest.raises(ValueError, match=r"HPO_CORE_BACKEND: expected one of reference, cpu, .*, got 'abacus'"):
        backends.choice("gates", "cpu")


@pytest.mark.parametrize(("cuda", "triton", "expected"), [("", "", "cuda"), ("no", "", "triton"), ("", "no", "cuda")])
def test_the_order_on_a_gpu(cuda, triton, expected, monkeypatch):
    monkeypatch.setitem(backends._PROBES, "cuda", lambda _: backends.Availability("cuda", cuda))
    monkeypatch.setitem(backends._PROBES, "triton", lambda _: backends.Availability("triton", triton))
    assert all(backends.choice(op, "cuda") == expected for op in backends.OPS)
    assert all(backends.choice(op, "cpu") == "cpu" for op in backends.OPS)


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("sm_80 sm_90 compute_90", (8, 0), True),
        ("sm_80 sm_90 compute_90", (8, 9), True),  # a newer minor version
        ("sm_80 sm_90 compute_90", (9, 0), True),
        ("sm_80 sm_90 compute_90", (12, 1), True),  # compiled from PTX
        ("sm_80 sm_90 compute_90", (7, 5), False),
        ("sm_89", (8, 6), False),  # an older minor version
        ("sm_90a", (10, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),  # of one device alone
        ("sm_120a", (12, 1), False),
        ("sm_90 compute_90a", (12, 0), False),
        ("sm_100f", (10, 3), True),  # of the minor versions of one major
        ("sm_103f", (10, 0), False),
        ("compute_100f", (12, 0), False),
    ],
)
def test_a_cuda_build_knows_its_devices(built, capability, runs, gpus):
    gpus(capability, built=built)
    available = hpo.backends()["cuda"]
    assert bool(available) == runs
    assert runs or f"sm_{capability[0]}{capability[1]}" in available.reason


@pytest.mark.parametrize(
    ("driver", "toolkit", "capability", "reason"),
    [
        (12080, 13000, (9, 0), r"built with CUDA 13\.0, and the driver knows CUDA up to 12\.8; update the driver, or"),
        (13000, 13010, (9, 0), ""),  # of one major version an older driver runs what a newer toolkit has made,
        (13000, 13010, (12, 0), "not for this device"),  # but does not compile its PTX
        (13010, 13000, (12, 0), ""),
        (13000, 12080, (9, 0), ""),
    ],
)
def test_a_driver_that_is_too_old_is_a_reason(driver, toolkit, capability, reason, gpus):
    gpus(capability, driver=driver, toolkit=toolkit)
    available = hpo.backends()["cuda"]
    assert re.search(reason, available.reason) if reason else available


def test_each_gpu_has_the_backend_that_has_code_for_it(gpus, monkeypatch):
    gpus((9, 0), (7, 5))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert [backends.choice("gates", device) for device in ("cuda", "cuda:0", "cuda:1")] == ["cuda", "cuda", "triton"]
    with pytest.raises(RuntimeError, match=r"'cuda' is not available: built for .*, not for this device \(sm_75\)"):
        backends._resolve("gates", torch.device("cuda:1"), "cuda")


def test_a_forked_process_gets_a_reason(gpus, monkeypatch):
    gpus((9, 0))
    message = "Cannot re-initialize CUDA in forked subprocess"
    monkeypatch.setattr(torch.cuda, "get_device_capability", mock.Mock(side_effect=RuntimeError(message)))
    assert message in hpo.backends()["cuda"].reason


def test_on_amd_the_extension_is_none(gpus, monkeypatch):
    gpus((9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in hpo.backends()["cuda"].reason and backends.choice("gates", "cuda") == "triton"


def test_no_device_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "hpo_core._cuda", SimpleNamespace(description=lambda: "sm_90"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = hpo.backends()
    assert "sees no CUDA device" in found["cuda"].reason and "TRITON_INTERPRET=1" in found["triton"].reason


def test_a_broken_extension_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "hpo_core._cuda_emulated", None)
    monkeypatch.setattr(backends, "_build_info", dict)
    reason = hpo.backends()["cuda_emulated"].reason
    assert "cannot be imported" in reason and "reinstall" in reason


def test_the_reason_of_the_build_is_passed_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "hpo_core._cuda", None)
    monkeypatch.setattr(backends, "_build_info", lambda: {"_cuda": {"built": False, "reason": "nvcc was not found"}})
    assert hpo.backends()["cuda"].reason == "nvcc was not found"


def test_python_m_hpo_core():
    result = subprocess.run([sys.executable, "-m", "hpo_core"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for words in (hpo.__version__, torch.__version__, "used when nothing is asked", *NAMES, *backends.OPS):
        assert words in result.stdout


# -------------------------------------------------------------------------------------- the C interface in Python


KINDS = [kind for kind in vars(specs).values() if isinstance(kind, type) and issubclass(kind, enum.IntEnum)]


@pytest.mark.skipif(not API.exists(), reason="needs the source")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not specs.Unit])  # the batch resolves units
def test_enumerations_are_those_of_the_c_interface(kind):
    declared = "".join(header.read_text() for header in API.iterdir())
    [body] = re.findall(rf"enum class {kind.__name__} : int32_t {{(.*?)}}", declared, re.DOTALL)
    numbers = {name.upper(): int(number) for name, number in re.findall(r"(\w+) = (\d+)", body)}
    if kind is specs.Invalid:
        numbers["BREAK"] = numbers.pop("STOP")  # `break` is a word of C++
    assert numbers == {member.name: member.value for member in kind}


BUILT = [name for name in ("cpu", "cuda", "cuda_emulated") if importlib.util.find_spec(f"hpo_core._{name}")]


@pytest.mark.parametrize("name", BUILT)
def test_inputs_come_in_the_order_of_the_c_interface(name):
    assert tuple(importlib.import_module(f"hpo_core._{name}").inputs) == specs.PolicyLossInputs._fields


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_program_speaks_of_devices_that_are_there(gpus, monkeypatch, capsys):
    """A GPU that is not there has no line."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"model {index}")
    program.main([])
    said = capsys.readouterr().out
    assert ("cuda:0 model 0" in said) == ("cuda tensors: " in said) == bool(gpus)
    assert said.count("cpu tensors: ") == len(backends.OPS)


def test_the_program_says_its_version_and_refuses_words(capsys):
    for argument, code, said in (("--version", 0, hpo.__version__), ("--help", 0, "What is"), ("abacus", 2, "abacus")):
        with pytest.raises(SystemExit) as left:
            program.main([argument])
        assert left.value.code == code and said in "".join(capsys.readouterr())


# ------------------------------------------------------------------------------------------- threads of the CPU

THREADS = """
import os, torch, hpo_core as hpo
torch.set_num_threads(1)
tokens = 600_000
logp = torch.linspace(-3, -0.1, tokens)
batch, advantages = hpo.PackedBatch.from_lengths([1, tokens - 7, 6]), torch.tensor([1.0, -1.0, 2.0])
def workers_after(call):
    call()
    return len(os.listdir("/proc/self/task"))
alone = workers_after(lambda: torch.set_num_threads(4))
def count(tokens):
    torch.ops.hpo_core.row_counts(None, torch.tensor([0, tokens]), tokens, "cpu")
assert workers_after(lambda: count(16_000)) == alone, "a small call wakes nobody"
assert workers_after(lambda: count(tokens)) == alone + min(3, int(os.environ["OMP_THREAD_LIMIT"]) - 1)
def digest():
    out = hpo.policy_loss_and_grad(logp, logp - 0.1, advantages, batch, backend="cpu")
    return out.loss.item(), out.grad.double().sum().item()
expected = None
for threads in (1, 2, 70, 8):
    torch.set_num_threads(threads)
    expected = expected or digest()
    assert digest() == expected, threads
print("alike")
"""


@pytest.mark.skipif("cpu" not in NATIVE, reason="threads of the CPU")
@pytest.mark.parametrize("limit", ["1", "3", "200"])
def test_work_of_threads_that_do_not_come_is_done(limit):
    """OpenMP may give fewer threads than a call asks for, and a call may ask for more than its work has portions."""
    given = os.environ | {"OMP_THREAD_LIMIT": limit}
    run = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False, env=given)
    assert (run.returncode, run.stdout) == (0, "alike\n"), run.stderr


@pytest.mark.skipif("cpu" not in NATIVE, reason="threads of the CPU")
def test_other_threads_of_python_go_on_during_a_call():
    rows, tokens, stamps, ends = 20_000, 1 << 19, [], threading.Event()
    offsets = torch.randint(0, tokens, (rows + 1,), generator=torch.Generator().manual_seed(0))

    def stamp():
        while not ends.is_set():
            stamps.append(time.perf_counter())
            time.sleep(0.001)

    def went_on():
        """Rows in no order, for which a call takes a tenth of a second."""
        begin = time.perf_counter()
        torch.ops.hpo_core.row_counts(None, offsets, tokens, "cpu")
        took = time.perf_counter() - begin
        return any(0.3 < (each - begin) / took < 0.7 for each in stamps)

    worker = threading.Thread(target=stamp)
    worker.start()
    try:
        assert any(went_on() for _ in range(10))  # a busy machine may leave the other thread no core
    finally:
        ends.set()
        worker.join()


@pytest.mark.parametrize("name", [name for name in NATIVE if name != "triton"])
def test_bindings_refuse_what_their_arrays_do_not_hold(name):
    """The checks of Python come before them, but not for every caller."""
    module, term, pair = importlib.import_module(f"hpo_core._{name}"), (0, 0, 1, 0.0, 0, False, 0, 0, 1.0), (0.0, 0.0)
    for terms in ([], [term] * 9):
        with pytest.raises(ValueError, match="terms: expected 1 to 8"):
            module.GroupNormalisation(terms, 0, 0.0, 0.0)
    rule, both = (0, 0, False, pair, pair), (False, False)
    spec = functools.partial(module.PolicyLossSpec, 0, 0, 0, 0, False, both, both, pair, pair, 0.0, None)
    with pytest.raises(ValueError, match="row_corrections: expected at most 2"):
        spec(((rule, 0),) * 3)
    level = (0, 0, 0, (0.0,) * 4, (0.0,) * 4, 0.0)
    with pytest.raises(ValueError, match="levels: expected at most 4"):
        module.Hierarchy(False, pair, pair, [level] * 5, None)
    levels, fields = module.Hierarchy(False, pair, pair, [level], None), (None,) * len(module.inputs)
    call = functools.partial(module.hierarchy, spec(()), levels, 0, 0, 0)
    for given, outputs, tables, message in (
        (fields[1:], (None,) * 4, (), "inputs: expected a PolicyLossInputs"),
        (fields, (None,) * 3, (), "outputs: expected loss, metrics, grad and token_loss"),
        (fields, (None,) * 4, (None,) * 2, "tables: expected sums, largest and aggregate_grad, or nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            call(given, outputs, None, 0, tables, 1)
