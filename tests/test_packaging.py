"""The build and the installation: no package named kernels, no stale libraries, no test extensions for users."""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting  # Python 3.10 has two
from pathlib import Path

import pytest
from ranks import apart, forget

ROOT = Path(__file__).resolve().parents[1]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps hpo-core"
NO_COMPILER = f"no C++ compiler was found when hpo_core was built; install g++ or clang++, then {REINSTALL}"
USE = """
import torch
import hpo_core as hpo

logp = torch.full((4,), -1.0, requires_grad=True)
batch = hpo.PackedBatch.from_lengths([3, 1])
loss = hpo.policy_loss(logp, torch.full((4,), -1.0), torch.tensor([1.0, -1.0]), batch).loss
loss.backward()
print(hpo.__file__, loss.item() / 2, *logp.grad.tolist())
"""
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the native extensions are built on Linux only")


# ---- the name `kernels` belongs to another library, which transformers imports ----


def test_kernels_folder_is_not_a_package():
    assert not (ROOT / "kernels/__init__.py").exists()


def test_repository_never_shadows_the_other_kernels():
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


def from_the_root(program, *path):
    """The output of a program started in the repository, whose folder is then first on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_other_kernels_is_found_from_the_repository_root(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("name = 'the other'")
    assert from_the_root("import kernels; print(kernels.name)", tmp_path) == "the other"


def a_type_of_model():
    transformers = importlib.import_module("transformers")
    assert transformers.AutoModelForCausalLM
    return transformers.Qwen2Config.model_type


def a_type_of_model_from_the_root():
    os.chdir(ROOT)
    sys.path.insert(0, "")
    forget("transformers", "kernels")
    return a_type_of_model()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_transformers_works_from_the_repository_root():
    assert a_type_of_model() == apart(a_type_of_model_from_the_root) == "qwen2"


def test_no_module_imports_the_triton_code_by_its_folder():
    folders = ("hpo_core", "kernels", "tests", "bench", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    by_its_folder = re.compile(r"\b(import|from) kernels\b")  # tests/kernels_to_check.py is a module of its own
    assert not [path for path in files if by_its_folder.search(path.read_text())]
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
    assert "[axolotl.plugins]\nhpo_core = hpo_core.integrations.axolotl:HPOPlugin" in entry_points


def test_sdist_holds_what_a_build_and_the_tests_need(tmp_path):
    for folder in ("hpo_core", "kernels", "csrc", "tests", "bench", "docs", "examples"):
        ignored = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__", "results")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "LICENSE", "THIRD_PARTY_NOTICES"):
        shutil.copy(ROOT / name, tmp_path)
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(path, tmp_path)
    kinds = {"", ".py", ".typed", ".md", ".yml", ".sh", ".h", ".cpp", ".cu", ".cuh", ".toml"}
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
--list-gpu-arch) for arch in ${KNOWN-80 90}; do echo compute_$arch; done; exit;;
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


def without_settings():
    """The environment without variables that choose how hpo_core is built or that an outer make passes down."""
    ours = re.compile("HPO_CORE_|CUDA|CXX|MAKE|MFLAGS|(PYTHON|VENV|TORCH|TRITON|TRL|PEERS|TOOLS|V)$")
    return {name: value for name, value in os.environ.items() if not ours.match(name)}


def build_in_place(tree, **variables):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=tree, env=without_settings() | variables, capture_output=True, text=True)


def build_info(tree):
    """The entries of _build_info.json, checked against the libraries in the tree."""
    info = json.loads((tree / "hpo_core/_build_info.json").read_text())["extensions"]
    libraries = {path.name for path in (tree / "hpo_core").glob(f"*{SUFFIX}")}
    assert libraries == {f"{name}{SUFFIX}" for name in built(info)}
    return info


def build(tree, **variables):
    """Builds in place; returns the finished process and, if it succeeded, the entries of _build_info.json."""
    done = build_in_place(tree, **variables)
    return done, build_info(tree) if done.returncode == 0 else {}


def built(info):
    return {name for name, facts in info.items() if facts["built"]}


@linux_only
def test_an_outdated_library_of_an_earlier_build_does_not_survive(tree):
    toolkit = {"CUDA_HOME": str(tree / "toolkit")}
    _, first = build(tree, HPO_CORE_EMULATED="1", **toolkit)
    assert built(first) == {"_cpu", "_cuda", "_cuda_emulated"}
    (tree / "csrc/cuda/gates.cu").write_text("// changed")
    _, second = build(tree, HPO_CORE_CUDA="0", **toolkit)
    assert built(second) == {"_cpu"}
    assert second["_cuda"]["reason"] == "hpo_core was built with HPO_CORE_CUDA=0"
    assert second["_cuda_emulated"]["reason"] == "a test double, built only with HPO_CORE_EMULATED=1"
    shutil.rmtree(tree / "csrc/cpu")
    _, third = build(tree, HPO_CORE_CUDA="0", **toolkit)
    assert built(third) == set()


@linux_only
def test_a_build_in_place_keeps_an_up_to_date_library_that_it_does_not_build(tree):
    toolkit = {"CUDA_HOME": str(tree / "toolkit")}
    build(tree, HPO_CORE_EMULATED="1", **toolkit)
    (tree / "csrc/cpu/gates.cpp").touch()  # this source is now newer than the libraries that the build does not link
    _, everything = build(tree, HPO_CORE_EMULATED="1", **toolkit)
    _, less = build(tree, HPO_CORE_CUDA="0")
    assert built(less) == built(everything) == {"_cpu", "_cuda", "_cuda_emulated"}
    assert [less[name] for name in built(less)] == [everything[name] for name in built(less)]


@linux_only
def test_a_build_waits_for_another_in_the_same_checkout(tree):
    build(tree, HPO_CORE_CUDA="0")
    (tree / "csrc/cpu/gates.cpp").write_text("not C++")
    [lock] = tree.glob("build/native/*/lock")
    with ThreadPoolExecutor() as pool, open(lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = pool.submit(build_in_place, tree, HPO_CORE_CUDA="0")
        with pytest.raises(StillWaiting):
            waiting.result(timeout=3)
        (tree / "csrc/cpu/gates.cpp").write_text("namespace HPO_ISA { int gates() { return 1; } }")
        fcntl.flock(held, fcntl.LOCK_UN)
        assert waiting.result().returncode == 0


@linux_only
def test_a_rebuild_compiles_changed_files_only(tree):
    build(tree, HPO_CORE_CUDA="0")
    unchanged, _ = build(tree, HPO_CORE_CUDA="0")
    assert "no work to do" in unchanged.stdout
    (tree / "csrc/include/twice.h").write_text("inline int twice(int x) { return x + x; }")
    changed, info = build(tree, HPO_CORE_CUDA="0")
    assert f"[{len(info['_cpu']['isas']) + 1}/" in changed.stdout  # each instruction set, and the link


@linux_only
def test_only_baseline_code_can_serve_other_objects(tree):
    """Every object may define `twice`; the library must hold the copy that runs on any machine."""
    build(tree, HPO_CORE_CUDA="0")
    [manifest] = tree.glob("build/native/*/build.ninja")
    [link] = [line for line in manifest.read_text().splitlines() if f"_cpu{SUFFIX}: link" in line]
    objects = [word.rpartition("/")[2] for word in link.split(" link ")[1].split()]
    assert objects[:3] == ["_cpu.bindings_cpu.o", "_cpu.dispatch.o", "_cpu.gates.generic.o"]


@linux_only
@pytest.mark.parametrize(
    ("asked", "archs", "targets"),
    [
        (
            None,
            ["80+ptx", "90"],
            ["80,code=sm_80", "80,code=compute_80", "80,code=sm_90"],
        ),  # those that this nvcc knows
        ("120", ["120"], ["120,code=sm_120"]),
        (
            "100+ptx, 80 120",
            ["100+ptx", "80", "120"],
            ["100,code=sm_100", "100,code=compute_100", "80,code=sm_80", "100,code=sm_120"],
        ),
        ("90a,90", ["90a", "90"], ["90a,code=sm_90a", "90,code=sm_90"]),
    ],
)
def test_cuda_architectures(tree, asked, archs, targets):
    choice = {} if asked is None else {"HPO_CORE_CUDA_ARCHS": asked}
    _, info = build(tree, CUDA_HOME=str(tree / "toolkit"), **choice)
    assert info["_cuda"]["archs"] == archs
    assert info["_cuda"]["compiler"] == "nvcc release 13.0"
    compiled = (tree / "calls").read_text().splitlines()[0].split()
    assert [word.removeprefix("arch=compute_") for word in compiled if word.startswith("arch=")] == targets
    assert "-fmad=false" in compiled


@linux_only
def test_a_new_nvcc_compiles_for_every_architecture(tree):
    _, info = build(tree, CUDA_HOME=str(tree / "toolkit"), KNOWN="75 80 86 90 100 103 120 121")
    assert info["_cuda"]["archs"] == ["80+ptx", "90", "100", "120"]


@linux_only
def test_without_a_compiler_the_install_succeeds_and_records_the_reason(tree):
    _, info = build(tree, PATH="")
    assert {facts["reason"] for facts in info.values()} == {NO_COMPILER}


@linux_only
def test_an_installation_without_a_compiler_works(tmp_path):
    """An installation by pip gives a loss and its gradient from another folder, with one warning, and the report."""
    source, site = tmp_path / "source", tmp_path / "site"
    for folder in ("hpo_core", "kernels", "csrc"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES"):
        shutil.copy(ROOT / name, source)
    environment = without_settings() | {"PATH": "", "TRITON_INTERPRET": "0"}

    def run(*arguments, **variables):
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | variables, check=True, capture_output=True, text=True
        )

    run("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-compile", "--target", site, source)
    assert not list(site.rglob(f"*{SUFFIX}"))
    # Without the module site: an editable install beside this one would lend its extensions.
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    done = run("-S", "-c", USE, PYTHONPATH=path)
    assert done.stdout.split() == [str(site / "hpo_core/__init__.py"), "-0.25", "-0.25", "-0.25", "-0.25", "0.25"]
    assert done.stderr.count("Warning") == 1
    assert f"no native backend serves cpu tensors here (cpu: {NO_COMPILER})" in done.stderr
    report = run("-S", "-m", "hpo_core", PYTHONPATH=path)
    assert re.search("gates +cpu tensors: reference", report.stdout) and report.stderr == ""


@linux_only
def test_on_another_system_the_install_succeeds_and_records_the_reason(tree):
    """The simulated system is Windows, which has no fcntl and no fork."""
    program = (
        "import os, runpy, sys; import setuptools.command.build_ext\n"
        "sys.modules['fcntl'], sys.platform = None, 'win32'; del os.register_at_fork\n"
        "sys.argv = ['setup.py', '-q', 'build_ext', '--inplace']; runpy.run_path('setup.py', run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tree, env=without_settings(), check=True)
    info = build_info(tree)
    assert {facts["reason"] for facts in info.values()} == {"the native extensions are built on Linux only"}


@linux_only
@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"CXX": "no-such-compiler"}, "CXX='no-such-compiler' was not found: name a C++17 compiler, or unset CXX."),
        ({"HPO_CORE_CUDA": "1", "CUDA_HOME": ""}, "HPO_CORE_CUDA=1 asks for the CUDA extension, but there is no nvcc"),
    ],
)
def test_a_requested_tool_that_is_missing_is_an_error(tree, variables, sentence):
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
def test_a_sanitizer_build_has_a_folder_of_its_own(tree):
    build(tree, HPO_CORE_CUDA="0")
    build(tree, HPO_CORE_CUDA="0", HPO_CORE_SANITIZE="undefined")
    unchanged, _ = build(tree, HPO_CORE_CUDA="0")
    assert "no work to do" in unchanged.stdout
    plain, sanitized = sorted(path.name for path in (tree / "build/native").iterdir())
    assert sanitized == f"{plain}-undefined"


# ---- the Makefile, on the same sources and with a pip that installs nothing ----


def make(folder, *arguments, **variables):
    """The output of make, with its errors."""
    path = os.pathsep.join([str(folder / "toolkit/bin"), os.environ["PATH"]])
    environment = without_settings() | {"PATH": path} | variables
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(["make", *arguments], cwd=folder, env=environment, text=True, **both)
    if done.returncode:
        raise RuntimeError(done.stdout)
    return done.stdout


@pytest.fixture
def checkout(tree):
    """A tree in which make finds a Python without torch, no GPU, and a pip that writes down how it was called."""
    shutil.copy(ROOT / "Makefile", tree)
    python = f"""#!/bin/sh
case "$*" in *"import importlib.metadata"*|"-m venv .venv") exit;; esac
exec {sys.executable} "$@"
"""
    scripts = {
        "toolkit/bin/python3": python,
        "toolkit/bin/nvidia-smi": "#!/bin/sh\nexit 9\n",
        ".venv/bin/python": python,
        ".venv/bin/pip": '#!/bin/sh\necho "$*" >>pip-calls\n',
    }
    for name, text in scripts.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
        (tree / name).chmod(0o755)
    (tree / "examples").mkdir()
    (tree / "examples/demo.py").write_text("print('the demo runs')")
    return tree


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
def test_help_lists_every_target():
    [targets] = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [line.split() for line in make(ROOT, "help").splitlines()]
    assert [target for _, target, *_ in lines] == targets.split()
    assert all(words for _, _, *words in lines)


@linux_only
@needs_make
def test_the_demo_sets_up_its_packages_and_keeps_those_of_the_tests(checkout):
    planned = make(checkout, "--dry-run", "demo")
    assert "setup.py" in planned and "nvcc" not in planned and "_cuda_emulated" not in planned

    assert make(checkout, "demo").endswith("the demo runs\n")
    assert built(build_info(checkout)) == {"_cpu"}
    assert not (checkout / "calls").exists()  # nvcc was not called
    installed = (checkout / "pip-calls").read_text()
    assert "torch==" in installed and "trl==" in installed and "matplotlib" in installed
    assert not [name for name in ("triton", "verl", "liger", "mypy", "ruff", "testing") if name in installed]

    make(checkout, "setup")
    assert built(build_info(checkout)) == {"_cpu", "_cuda_emulated"}
    added = (checkout / "pip-calls").read_text().removeprefix(installed)
    assert "torch==" in added and "verl" in added

    printed = make(checkout, "demo").splitlines()
    assert re.fullmatch(r"hpo_core: native code \.\.\. \d+ s", printed[0])
    assert printed[1:] == [".venv/bin/python examples/demo.py", "the demo runs"]
    assert built(build_info(checkout)) == {"_cpu", "_cuda_emulated"}
    assert (checkout / "pip-calls").read_text() == installed + added


@linux_only
@needs_make
def test_packages_of_the_tests_are_resolved_at_once(checkout):
    make(checkout, "setup")
    _, everything, project = (checkout / "pip-calls").read_text().splitlines()  # the first builds the extensions
    names = (
        "torch==",
        "triton",
        "trl==",
        "verl",
        "liger",
        "mypy",
        "ruff",
        "clang-format",
        "--requirement .venv/required.txt",
    )
    assert [name for name in names if name not in everything] == []
    assert "--no-deps --editable ." in project
    required = (checkout / ".venv/required.txt").read_text().splitlines()
    assert [
        name for name in ("numpy", "torch>=2.10", "hypothesis", "pytest>=9", "matplotlib") if name not in required
    ] == []
    assert any(line.startswith("triton>=3.6; platform_system") for line in required)


@linux_only
@needs_make
@pytest.mark.parametrize(
    ("target", "gpu", "settings", "extensions"),
    [
        ("setup", True, {}, {"_cpu", "_cuda", "_cuda_emulated"}),
        ("setup", False, {"HPO_CORE_CUDA": "1"}, {"_cpu", "_cuda", "_cuda_emulated"}),
        ("setup", True, {"HPO_CORE_CUDA": "0", "HPO_CORE_EMULATED": "0"}, {"_cpu"}),
        ("demo", True, {}, {"_cpu"}),
        ("demo", False, {"HPO_CORE_EMULATED": "1"}, {"_cpu", "_cuda_emulated"}),
    ],
)
def test_nvcc_runs_for_a_gpu_or_on_request(checkout, target, gpu, settings, extensions):
    if gpu:
        (checkout / "toolkit/bin/nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: one'\n")
    make(checkout, target, **settings)
    assert built(build_info(checkout)) == extensions


@linux_only
@needs_make
def test_a_requested_torch_is_installed(checkout):
    calls = checkout / "pip-calls"
    make(checkout, "demo")
    before = calls.read_text()
    make(checkout, "demo", "TORCH=torch==2.11.0 --index-url https://example.org")
    after = calls.read_text()
    alone, together, project = after.removeprefix(before).splitlines()
    assert alone.endswith("torch==2.11.0 --index-url https://example.org")
    assert "torch==2.11.0 trl==" in together and "example.org" not in together + project
    make(checkout, "demo")
    assert calls.read_text() == after


@linux_only
@needs_make
def test_the_output_of_a_failed_stage_is_shown_in_full(checkout):
    quiet = make(checkout, "build")
    assert "ninja" not in quiet
    assert "ninja: no work to do" in make(checkout, "build", "V=1")
    (checkout / "csrc/cpu/gates.cpp").write_text("not C++")
    with pytest.raises(RuntimeError, match=r"gates\.cpp:1:1: error(.|\n)*hpo_core: native code \.\.\. failed"):
        make(checkout, "build")
