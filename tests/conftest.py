"""Every test of an op runs on every backend of this process; what runs stands in the header.

HPO_CORE_TEST_BACKENDS=cpu,triton,... names the backends that must run: one that is missing fails the run.
"""

import os

# Read by Triton when it is imported: on machines without a GPU its kernels run in the interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest
import torch

import hpo_core as hpo

hypothesis.settings.register_profile("tests", deadline=None, database=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("tests")

NATIVE = [name for name, available in hpo.backends().items() if available and name != "reference"]


def pytest_report_header():
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} threads; backends:"]
    return lines + [f"  {available!r}" for available in hpo.backends().values()]


def pytest_sessionstart():
    named = [name for name in os.environ.get("HPO_CORE_TEST_BACKENDS", "").split(",") if name]
    found = hpo.backends()
    missing = [
        f"{name}: {found[name].reason if name in found else 'no such backend'}" for name in named if not found.get(name)
    ]
    if missing:
        pytest.exit(
            "HPO_CORE_TEST_BACKENDS asks for backends that cannot run here: " + "; ".join(missing), returncode=1
        )


def pytest_generate_tests(metafunc):
    """A test that takes ``backend`` runs on each."""
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", NATIVE)


@pytest.fixture(autouse=True)
def threads():
    """No test leaves another number of threads behind."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)
