"""What importing hpo_core costs and brings in, and which of its modules may know which."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpo_core

PACKAGE = Path(hpo_core.__file__).parent
# Data flows down this list; a module imports from those above it only.
ORDER = (
    *("checks", "specs", "metrics", "reference", "native", "backends", "ops", "batch", "ranks", "spanning"),
    "level_metrics",
    *(
        "kl",
        "gates",
        "corrections",
        "segments",
        "advantages",
        "entropy",
        "aggregation",
        "losses",
        "testing",
        "integrations",
        "__main__",
    ),
)


def run(program: str, **environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parents[1],
        env=os.environ | environment,
    )  # fmt: skip
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


@pytest.mark.parametrize("module", ORDER)
def test_modules_import_only_upwards(module):
    files = [PACKAGE / f"{module}.py"] if (PACKAGE / f"{module}.py").exists() else [*(PACKAGE / module).rglob("*.py")]
    assert files
    allowed = set(ORDER[: ORDER.index(module) + 1])
    for path in files:
        assert imported(path) <= allowed, path


def test_every_module_has_its_place():
    modules = {path.stem if path.suffix == ".py" else path.name for path in PACKAGE.iterdir() if path.name[0] != "_"}
    modules = {
        name for name in modules if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()
    }
    assert modules | {"__main__"} == set(ORDER)


def test_import_is_light(tmp_path):
    """The best of three, on a machine that does other things too; neither Triton, nor a trainer, nor hypothesis.

    From bytecode, which pip writes when it installs and the first run writes here, whatever the environment says.
    """
    program = (
        "import sys, time, torch\n"
        "start = time.process_time()\n"
        "import hpo_core\n"
        "print(time.process_time() - start)\n"
        "print(*[name for name in sys.modules if name.split('.')[0] in ('triton', 'trl', 'verl', 'hypothesis')])\n"
        "print(*[name for name in sys.modules if name.startswith('hpo_core._')])"
    )
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    runs = [run(program, **bytecode) for _ in range(4)][1:]
    assert min(float(first) for first, *_ in runs) < 0.1
    # The extensions are loaded by the first call that needs one.
    assert all(rest == ["hpo_core._version"] for _, *rest in runs), runs


@pytest.mark.parametrize(("module", "package"), [("verl", "verl"), ("trl", "trl")])
def test_an_integration_without_its_trainer_says_what_to_install(module, package):
    program = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "try:\n"
        f"    import hpo_core.integrations.{module}\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    assert f"'hpo-core[{package}]'" in run(program)


def test_public_names_exist():
    for name in hpo_core.__all__:
        assert getattr(hpo_core, name) is not None
    assert sorted(hpo_core.__all__, key=str.lower) == sorted(set(hpo_core.__all__), key=str.lower)
