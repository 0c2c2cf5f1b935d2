"""The rules of `make test-changed` cover every file and every test; test_mutants.py checks them against killed bugs."""

import shutil
import subprocess

import pytest
from changed import EVERY_BACKEND, EVERY_MODULE, ROOT, RULES, affected, matches


def tracked():
    if not shutil.which("git") or subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("needs the files that git tracks")
    return subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()


def test_every_source_has_a_rule():
    sources = [file for file in tracked() if not file.startswith("tests/") or file.startswith("tests/test_")]
    assert [file for file in sources if not any(matches(rule, file) for rule in RULES)] == []


def test_every_rule_has_a_file():
    files = tracked()
    assert [rule.files for rule in RULES if not any(matches(rule, file) for file in files)] == []


def test_every_test_is_reached_from_a_source():
    own = {f"tests/test_{name}.py" for name in EVERY_MODULE}
    reached = {module for rule in RULES if not own.issuperset(rule.files) for module in rule.modules}
    assert reached == set(EVERY_MODULE), "name each test module in a rule or a tuple of tests/changed.py"


def test_a_kernel_runs_on_its_own_backend_only():
    for file, backend in (
        ("csrc/cpu/gates.cpp", "cpu"),
        ("csrc/cuda/hierarchy.cu", "cuda_emulated"),
        ("kernels/hpo_triton/entropy.py", "triton"),
    ):
        assert affected([file])[1] == [backend]
    assert affected(["csrc/include/hpo/gates.h"])[1] == ["cpu", "cuda_emulated"]


def test_a_file_beside_the_tests_runs_those_that_import_it():
    """At once, through others and in scripts; nothing else."""
    modules, backends = affected(["tests/paper_formulas.py"])
    assert {"presets", "promises", "isas", "cuda_compile"} <= set(modules) and backends == list(EVERY_BACKEND)
    assert not {"segments", "estimators", "trl", "docs"} & set(modules)
    estimators = ["estimator_properties", "estimators", "estimators_of_authors", "synchronisation"]
    assert affected(["tests/naive_hierarchies.py"])[0] == estimators


@pytest.mark.parametrize(
    "file", ["tests/conftest.py", "tests/interpreter.py", "tests/gone.py", "tests/data.bin", "gone.py"]
)
def test_a_file_that_no_rule_knows_runs_everything(file):
    assert affected([file]) == (sorted(EVERY_MODULE), list(EVERY_BACKEND))
