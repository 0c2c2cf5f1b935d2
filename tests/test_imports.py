"""The cost of an import of hpo_core, the modules that it loads, the order of imports between them, and their size."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_origin

import pytest

import hpo_core
from hpo_core import prepared

PACKAGE = Path(hpo_core.__file__).parent
TESTS = sorted(Path(__file__).parent.glob("*.py"))
# Data flows down this list; a module imports from those above it only.
ORDER = (
    *("checks", "arguments", "specs", "metrics", "reference", "native", "backends", "ops", "batch", "distributed"),
    *("segment_exchange", "level_metrics", "kl", "gates", "corrections", "segments", "advantages", "entropy"),
    *("aggregation", "prepared", "losses", "value_loss", "support", "vocabulary_parallel", "logprobs"),
    *("logprob_states", "linear_logprobs", "loss_from_logits", "plot", "testing", "integrations", "__main__"),
)


def run(program: str) -> list[str]:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parents[1])
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def imported(path: Path) -> set[str]:
    """The top-level modules of hpo_core that a file names, inside functions too."""
    depth = len(path.relative_to(PACKAGE).parts)  # the level of a relative import that reaches hpo_core itself
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            names |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpo_core"):
            parts = node.module.split(".")[1:]
            names |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            paths = [alias.name.split(".") for alias in node.names]
            names |= {path[1] for path in paths if path[0] == "hpo_core" and len(path) > 1}
    return names & set(ORDER)


def test_type_checkers_see_names_not_getattr():
    """A module-level ``__getattr__`` would give any misspelt name a type."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    assert "from . import plot, testing" in map(ast.unparse, checked.body)
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    of_tuples, _ = get_args(prepared.Report)  # mypy takes the strings of a tuple for literals only where one is meant
    assert get_origin(of_tuples) is tuple


@pytest.mark.parametrize("module", ORDER)
def test_modules_import_only_upwards(module):
    files = [PACKAGE / f"{module}.py"] if (PACKAGE / f"{module}.py").exists() else [*(PACKAGE / module).rglob("*.py")]
    assert files
    allowed = set(ORDER[: ORDER.index(module) + 1])
    for path in files:
        assert imported(path) <= allowed, path


def test_every_module_is_in_the_list():
    modules = {path.stem if path.suffix == ".py" else path.name for path in PACKAGE.iterdir() if path.name[0] != "_"}
    modules = {
        name for name in modules if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()
    }
    assert modules | {"__main__"} == set(ORDER)


def test_files_are_short():
    files = [path for room in ("hpo_core", "kernels", "csrc") for path in (PACKAGE.parent / room).rglob("*")]
    sources = [path for path in files if path.suffix in (".py", ".h", ".cuh", ".cpp", ".cu")]
    assert len(sources) > 250
    assert [path.name for path in sources if len(path.read_text().splitlines()) > 450] == []


def test_the_name_of_the_reference_stands_in_one_place():
    """Elsewhere it is :data:`hpo_core.checks.REFERENCE`, so that a misspelt one is an error."""
    strings = [
        (path.name, node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value == "reference"
    ]
    assert strings == [("checks.py", "reference")]


PEERS = ("triton", "trl", "transformers", "verl", "hypothesis", "matplotlib")


def test_import_is_light(tmp_path):
    """It takes a tenth of a second, the best of ten; no Triton, trainer, hypothesis or matplotlib is loaded, nor
    hpo_core.plot. A busy machine may be half as fast for minutes: there an import may take 3.8 times as long as work of
    the same kind beside it. On a quiet machine of 2 cores that is a tenth of a second.

    Modules come from bytecode, which pip writes at installation and the first run writes here.
    """
    program = (
        "import dataclasses, gc, os, sys, time\n"
        "import torch\n"
        f"sys.pycache_prefix, sys.dont_write_bytecode = {str(tmp_path)!r}, False\n"
        "def work():\n"
        "    for _ in range(30):\n"
        "        dataclasses.make_dataclass('Made', [f'field_{at}' for at in range(8)], frozen=True)\n"
        "work()\n"
        "for _ in range(10):\n"
        "    if os.fork() == 0:\n"
        "        gc.disable()\n"  # a collection of torch's objects would come at a random time
        "        times = [time.process_time()]\n"
        "        work()\n"
        "        times.append(time.process_time())\n"
        "        import hpo_core\n"
        "        times.append(time.process_time())\n"
        "        work()\n"
        "        times.append(time.process_time())\n"
        "        print(times[2] - times[1], 2 * (times[2] - times[1]) / (times[3] - times[2] + times[1] - times[0]))\n"
        f"        print(*[name for name in sys.modules if name.split('.')[0] in {PEERS}])\n"
        "        shown = 'hpo_core._', 'hpo_core.plot'\n"
        "        print(*[name for name in sys.modules if name.startswith(shown)], flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()"
    )
    found = run(program)
    # The extensions are loaded by the first call that needs one.
    assert found[2::3] == ["hpo_core._version"] * 10, found
    seconds, against_work = min(map(float, found[0::3])), statistics.median(map(float, found[1::3]))
    assert seconds < 0.1 or against_work < 3.8, (seconds, against_work)


# The integration that imports a package first.
INTEGRATION_OF = {
    name: name for name in ("axolotl", "nemo_rl", "rllm", "roll", "skyrl", "torchrl", "trinity", "trl", "verl")
} | {"swift": "ms_swift"}


def test_an_integration_without_its_trainer_says_what_to_install():
    program = (
        "import importlib, sys\n"
        f"for package, name in {INTEGRATION_OF}.items():\n"
        "    sys.modules[package] = None\n"
        "    try:\n"
        "        importlib.import_module(f'hpo_core.integrations.{name}')\n"
        "    except ImportError as error:\n"
        "        print(error)"
    )
    found = run(program)
    assert "'verl[verl-core]>=0.9.1,<0.10'" in found and "'trl>=1.16,<2'" in found
    assert {f"hpo_core.integrations.{name}" for name in INTEGRATION_OF.values()} <= set(found)


def test_public_names_exist():
    for name in hpo_core.__all__:
        assert getattr(hpo_core, name) is not None
    assert set(dir(hpo_core)) == set(hpo_core.__all__)
    assert sorted(hpo_core.__all__, key=str.lower) == sorted(set(hpo_core.__all__), key=str.lower)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_no_test_module_is_imported(path):
    """Cases and helpers that test modules share have modules of their own."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert not [name for name in names if name and name.startswith("test_")]


def test_collectives_name_their_group():
    """Without one they would wait for every process of a job that splits its ranks into groups."""
    calls = [
        (path.name, node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith(("torch.distributed.all_", "torch.distributed.broad", "dist.all_"))
    ]
    assert len(calls) > 10
    nameless = [(file, node.lineno) for file, node in calls if "group" not in {each.arg for each in node.keywords}]
    assert nameless == []
