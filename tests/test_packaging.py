"""What is built, what is installed, and what must never be: kernels/ as a package, stale libraries, test extensions."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the native extensions are built on Linux only")


# ---- the name `kernels` belongs to another library, which transformers imports ----


def test_kernels_folder_is_not_a_package():
    assert not (ROOT / "kernels/__init__.py").exists()


def test_repository_never_shadows_the_other_kernels():
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


def from_the_root(program, *path):
    """What a program prints that is started in the repository: that folder is then first on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_other_kernels_is_found_from_the_repository_root(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("name = 'the other'")
    assert from_the_root("import kernels; print(kernels.name)", tmp_path) == "the other"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_works_from_the_repository_root():
    program = "from transformers import AutoModelForCausalLM, Qwen2Config; print(Qwen2Config.model_type)"
    assert from_the_root(program) == "qwen2"


def test_nobody_imports_the_triton_code_by_its_folder():
    folders = ("hpo_core", "kernels", "tests", "bench", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    names = ("import kernels", "from kernels")
    assert not [path for path in files if any(name in path.read_text() for name in names)]
    assert importlib.util.find_spec("hpo_core._triton") is not None


# ---- the wheel ----


def python_files(folder, package):
    return {f"{package}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*.py")}


def test_wheel_holds_the_whole_package_and_nothing_else(tmp_path):
    environment = {**os.environ, "HPO_CORE_EMULATED": "0", "HPO_CORE_CUDA": "0"}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True)
    [path] = tmp_path.glob("hpo_core-*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        info = json.loads(wheel.read("hpo_core/_build_info.json"))
        [entry_points] = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt")]
    built = {f"hpo_core/{name}{SUFFIX}" for name, facts in info["extensions"].items() if facts["built"]}
    assert built <= {f"hpo_core/_cpu{SUFFIX}"}
    python = python_files("hpo_core", "hpo_core") | python_files("kernels/hpo_triton", "hpo_core/_triton")
    assert names == python | built | {"hpo_core/_build_info.json", "hpo_core/py.typed"}
    assert "[verl.plugins]\nhpo_core = hpo_core.integrations.verl" in entry_points


def test_sdist_holds_what_a_build_and_the_tests_need(tmp_path):
    for folder in ("hpo_core", "kernels", "csrc", "tests", "bench", "docs", "examples"):
        ignored = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__", "results")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "LICENSE", "THIRD_PARTY_NOTICES"):
        shutil.copy(ROOT / name, tmp_path)
    for path in ROOT.glob("*.md"):
        shutil.copy(path, tmp_path)
    kinds = {"", ".py", ".typed", ".md", ".sh", ".h", ".cpp", ".cu", ".cuh", ".toml"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    needed = {str(path.relative_to(tmp_path)) for path in files if path.suffix in kinds}
    for name in ("csrc/_cpu.so", "kernels/hpo_triton/old.pyc", "tests/_build_info.json"):
        (tmp_path / name).touch()
    command = [sys.executable, "setup.py", "-q", "sdist", "--formats=zip", "--dist-dir", "made"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    [path] = tmp_path.glob("made/*.zip")
    with zipfile.ZipFile(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.namelist()}
    assert needed <= names
    assert not {name for name in names if name.endswith((".so", ".pyc", "_build_info.json"))}


# ---- setup.py, on sources that compile in no time ----


@pytest.fixture
def tree(tmp_path):
    """A source tree with the files that setup.py asks for, and an nvcc that writes down how it was called."""
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    files = {
        "hpo_core/__init__.py": "",
        "csrc/bindings_cpu.cpp": "",
        "csrc/bindings_cuda.cpp": "",
        "csrc/cpu/dispatch.cpp": "namespace HPO_ISA {}",
        "csrc/cpu/gates.cpp": '#include "twice.h"\nnamespace HPO_ISA { int gates() { return twice(1); } }',
        "csrc/cuda/gates.cu": "",
        "csrc/include/twice.h": "inline int twice(int x) { return 2 * x; }",
        "toolkit/bin/nvcc": """#!/bin/sh
case "$*" in
--list-gpu-arch) echo compute_80; echo compute_90; exit;;
--version) echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit;;
esac
echo "$*" >> calls
while [ "$1" != -o ]; do shift; done
: > "$2"
""",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "toolkit/bin/nvcc").chmod(0o755)
    return tmp_path


def build(tree, **variables):
    """Builds in place; the finished process and, if it succeeded, what _build_info.json says."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HPO_CORE_", "CUDA", "CXX"))}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=inherited | variables, capture_output=True, text=True)
    info = {}
    if done.returncode == 0:
        info = json.loads((tree / "hpo_core/_build_info.json").read_text())["extensions"]
        libraries = {path.name for path in (tree / "hpo_core").glob(f"*{SUFFIX}")}
        assert libraries == {f"{name}{SUFFIX}" for name, facts in info.items() if facts["built"]}
    return done, info


def built(info):
    return {name for name, facts in info.items() if facts["built"]}


@linux_only
def test_a_library_of_an_earlier_build_does_not_survive(tree):
    toolkit = {"CUDA_HOME": str(tree / "toolkit")}
    _, first = build(tree, HPO_CORE_EMULATED="1", **toolkit)
    assert built(first) == {"_cpu", "_cuda", "_cuda_emulated"}
    _, second = build(tree, HPO_CORE_CUDA="0", **toolkit)
    assert built(second) == {"_cpu"}
    assert second["_cuda"]["reason"] == "hpo_core was built with HPO_CORE_CUDA=0"
    assert second["_cuda_emulated"]["reason"] == "a test double, built only with HPO_CORE_EMULATED=1"
    shutil.rmtree(tree / "csrc/cpu")
    _, third = build(tree, HPO_CORE_CUDA="0", **toolkit)
    assert built(third) == set()


@linux_only
def test_a_rebuild_compiles_what_changed(tree):
    build(tree, HPO_CORE_CUDA="0")
    unchanged, _ = build(tree, HPO_CORE_CUDA="0")
    assert "no work to do" in unchanged.stdout
    (tree / "csrc/include/twice.h").write_text("inline int twice(int x) { return x + x; }")
    changed, info = build(tree, HPO_CORE_CUDA="0")
    assert f"[{len(info['_cpu']['isas']) + 1}/" in changed.stdout  # each instruction set, and the link


@linux_only
def test_only_baseline_code_can_serve_other_objects(tree):
    """Of `twice`, which every object may define, the library must hold the copy that runs on any machine."""
    build(tree, HPO_CORE_CUDA="0")
    [manifest] = tree.glob("build/native/*/build.ninja")
    [link] = [line for line in manifest.read_text().splitlines() if f"_cpu{SUFFIX}: link" in line]
    objects = [word.rpartition("/")[2] for word in link.split(" link ")[1].split()]
    assert objects[:3] == ["_cpu.bindings_cpu.o", "_cpu.dispatch.o", "_cpu.gates.generic.o"]


@linux_only
@pytest.mark.parametrize(
    ("asked", "archs", "targets"),
    [
        (None, ["80", "90+ptx"], ["code=sm_80", "code=sm_90", "code=compute_90"]),  # all that this nvcc knows
        ("120", ["120"], ["code=sm_120"]),
        ("80, 100+ptx", ["80", "100+ptx"], ["code=sm_80", "code=sm_100", "code=compute_100"]),
    ],
)
def test_cuda_architectures(tree, asked, archs, targets):
    choice = {} if asked is None else {"HPO_CORE_CUDA_ARCHS": asked}
    _, info = build(tree, CUDA_HOME=str(tree / "toolkit"), **choice)
    assert info["_cuda"]["archs"] == archs
    assert info["_cuda"]["compiler"] == "nvcc release 13.0"
    compiled = (tree / "calls").read_text().splitlines()[0].split()
    assert [word.partition(",")[2] for word in compiled if word.startswith("arch=")] == targets
    assert "-fmad=false" in compiled


@linux_only
def test_without_a_compiler_the_install_succeeds_and_says_why(tree):
    _, info = build(tree, PATH="")
    assert {facts["reason"] for facts in info.values()} == {"no C++ compiler was found when hpo_core was built"}


@linux_only
@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"CXX": "no-such-compiler"}, "CXX='no-such-compiler' was not found: name a C++17 compiler, or unset CXX."),
        ({"HPO_CORE_CUDA": "1", "CUDA_HOME": ""}, "HPO_CORE_CUDA=1 asks for the CUDA extension, but there is no nvcc"),
    ],
)
def test_what_was_asked_for_and_is_missing_is_an_error(tree, variables, sentence):
    done, _ = build(tree, **variables)
    assert done.returncode != 0
    assert sentence in done.stderr


@linux_only
def test_a_source_that_does_not_compile_is_an_error(tree):
    (tree / "csrc/cpu/gates.cpp").write_text("not C++")
    done, _ = build(tree, HPO_CORE_CUDA="0")
    assert done.returncode != 0
    assert "hpo_core: the native extensions did not compile" in done.stderr


@linux_only
def test_a_sanitizer_build_keeps_out_of_the_other(tree):
    build(tree, HPO_CORE_CUDA="0")
    build(tree, HPO_CORE_CUDA="0", HPO_CORE_SANITIZE="undefined")
    unchanged, _ = build(tree, HPO_CORE_CUDA="0")
    assert "no work to do" in unchanged.stdout
    plain, sanitized = sorted(path.name for path in (tree / "build/native").iterdir())
    assert sanitized == f"{plain}-undefined"
