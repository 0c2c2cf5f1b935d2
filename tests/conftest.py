"""Every test of an op runs on every backend of this process, as the header of the run lists them.

HPO_CORE_TEST_BACKENDS=cpu,triton,... names the native backends of a run: a missing backend fails the run. Without it
the tests run on every native backend found here.
"""

import atexit
import functools
import gc
import os
from pathlib import Path

# Read by Triton when it is imported: on machines without a GPU its kernels run in the interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Read by Inductor when it is imported: for a few small kernels it would start processes that import torch, try which
# vectors the compiler and the machine know, and compile headers in advance, which takes longer than all else together.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

import hypothesis
import pytest
import torch
from ranks import on_ranks

import hpo_core as hpo

ROOT = Path(__file__).resolve().parents[1]

gc.set_threshold(100_000)  # collecting tests and tracing make many objects that live on

if hpo.backends()["triton"] and os.environ["TRITON_INTERPRET"] == "1":
    from interpreter import patch_interpreter

    patch_interpreter()

# The first backward of a process decides how many threads autograd has. After a compilation a torch for CUDA counts a
# device for it where there is none, and processes forked from this one could not differentiate.
if not torch.cuda.is_available():
    torch.ones(1, requires_grad=True).backward()

hypothesis.settings.register_profile("tests", deadline=None, database=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("tests")

# On a machine with a GPU its backends run there, whatever the device of a test's tensors.
ON_GPU = torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] != "1"
if ON_GPU:
    from carried import carry

    for on_gpu in ("cuda", "triton"):
        carry(on_gpu)

os.environ.pop("HPO_GATE", None)  # of trainers; a test sets its own
NAMED = [name for name in os.environ.get("HPO_CORE_TEST_BACKENDS", "").split(",") if name]
NATIVE = NAMED or [name for name, available in hpo.backends().items() if available and name != "reference"]


def pytest_report_header():
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} threads; backends:"]
    return lines + [f"  {available!r}" for available in hpo.backends().values()]


def pytest_sessionstart():
    found = hpo.backends()
    missing = [
        f"{name}: {found[name].reason if name in found else 'no such backend'}" for name in NAMED if not found.get(name)
    ]
    if missing:
        pytest.exit(
            "HPO_CORE_TEST_BACKENDS asks for backends that cannot run here: " + "; ".join(missing), returncode=1
        )


def pytest_terminal_summary(terminalreporter):
    """pytest builds nothing: a run on libraries that are older than csrc says so."""
    sources = [path for path in ROOT.glob("csrc/**/*") if path.is_file()]
    newest = max(sources, key=lambda path: path.stat().st_mtime, default=None)
    built = [path for path in ROOT.glob("hpo_core/_c*.so") if newest and path.stat().st_mtime < newest.stat().st_mtime]
    if built:
        names = " and ".join(path.name.partition(".")[0] for path in sorted(built))
        terminalreporter.write_line(
            f"{newest.relative_to(ROOT)} is newer than {names}, which ran here as built before: `make build`", red=True
        )


def pytest_generate_tests(metafunc):
    """A test with the argument ``backend`` runs on each backend, unless it names its own."""
    named = any("backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "backend" in metafunc.fixturenames and not named:
        metafunc.parametrize("backend", NATIVE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """After an error in a kernel no call of this process works: a new worker of xdist goes on."""
    if ON_GPU and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(3)


# Modules that wait for compilers come first, so that the last module of a worker is a short one.
FIRST = ("test_triton_compile", "test_cuda_compile", "test_mutants", "test_wrong_arguments", "test_demo")


def runs_a_kernel(item):
    values = getattr(item, "callspec", None) and item.callspec.params.values()
    named = any(isinstance(value, str) and value in NATIVE for value in values or ())
    return named or "native_backends" in item.fixturenames or item.path.stem == "test_on_gpu"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--of-kernels"):
        items[:] = [item for item in items if runs_a_kernel(item)]
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish():
    """Modules and tests live to the end: the garbage collector would go through them some hundred times. They are
    unfrozen when the process ends, where extensions look for objects that were never freed."""
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture
def native_backends():
    """All of them, for tests that compute an expensive expectation once and compare every backend with it."""
    return NATIVE


MOST_EXAMPLES = {"triton": 12, "cuda_emulated": 25, "cpu": 50}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fewer examples where a call takes milliseconds instead of microseconds."""
    function = getattr(item, "function", None)
    run = getattr(function, "_hypothesis_internal_use_settings", None)
    most = item.config.getoption("--examples")
    if run and most is None:
        most = MOST_EXAMPLES.get(getattr(item, "callspec", None) and item.callspec.params.get("backend"))
    if not run or most is None or most >= run.max_examples:
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "_hypothesis_internal_use_settings", hypothesis.settings(run, max_examples=most))
        return (yield)


def pytest_addoption(parser):
    parser.addoption("--of-kernels", action="store_true", help="leave out tests that name no backend of this run")
    parser.addoption("--examples", type=int, help="at most so many generated examples in a test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Restores the number of threads after each test, at less than a fixture of every test costs."""
    number = torch.get_num_threads()
    try:
        return (yield)
    finally:
        torch.set_num_threads(number)


@pytest.fixture
def three_ranks():
    """Runs a function of the rank in three processes that share a group; returns the results of all."""
    return functools.partial(on_ranks, 3)
