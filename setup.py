"""Builds the native extensions of hpo_core with ninja; pyproject.toml holds everything else.

    hpo_core._cpu                 csrc/bindings_cpu.cpp and csrc/cpu/*.cpp, these once per instruction set
    hpo_core._cuda                csrc/bindings_cuda.cpp and csrc/cuda/*.cu, where nvcc is found
    hpo_core._cuda_emulated       the same two through the C++ compiler, for tests
    hpo_core._emulation_selftest  csrc/emulation/selftest*, for tests

The result for each extension, or the reason why it was not built, is written to hpo_core/_build_info.json, which
hpo_core.backends() reads.

Environment:
    CXX                  the C++ compiler; default: the first of g++, c++, clang++
    CUDA_HOME            the CUDA toolkit; default: the one whose nvcc is in PATH, then /usr/local/cuda
    HPO_CORE_CUDA        0: no CUDA extension; 1: an error if nvcc is missing
    HPO_CORE_CUDA_ARCHS  such as "90" or "80+ptx 90"; default: the part of CUDA_ARCHS that nvcc knows
    HPO_CORE_EMULATED    1: build the two test extensions
    HPO_CORE_SANITIZE    such as "address,undefined": instruments all but _cuda, in a build folder of its own
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
EXTENSIONS = ("_cpu", "_cuda", "_cuda_emulated", "_emulation_selftest")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
SANITIZE = os.environ.get("HPO_CORE_SANITIZE", "")

# Pip builds in a new folder each time; with a fixed one a rebuild without changes takes a second. The path is relative,
# so that the commands, which ninja compares, do not depend on the folder of the checkout.
BUILD = Path("build/native") / "-".join([SUFFIX.split(".")[1], *SANITIZE.split(",")]).rstrip("-")

# Bits agree between instruction sets, and between C++ and CUDA, only if no compiler fuses a multiply-add by itself.
CXX_FLAGS = "-std=c++17 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wextra -Icsrc/include"
CPU_FLAGS = "-O3 -fopenmp -fno-math-errno -fno-trapping-math"
# With -Og a small call takes a fifth more instructions of its extension; -O2 compiles a quarter longer and spares 3 %.
BINDING_FLAGS = "-O1"
# GCC's -O3 takes half as long again for loops that are written in vectors, and makes none of them faster.
VECTOR_FLAGS = "-O2 -fvect-cost-model=dynamic"
IN_VECTORS = ("gates.cpp", "hierarchy.cpp")
NVCC_FLAGS = "-std=c++17 -O3 -fmad=false --threads 0 -Icsrc/include -Xcompiler -fPIC,-fvisibility=hidden"
# -O2 takes half as long again and makes no kernel faster; the machine, which is called at every access, gets it.
EMULATED_FLAGS = "-O1 -Wno-unknown-pragmas -DHPO_EMULATE -Icsrc/emulation"
# Calls of hooks, which csrc/emulation/machine.cpp defines, at every access to memory of a kernel.
HOOKED_FLAGS = f"{EMULATED_FLAGS} {'' if SANITIZE else '-fsanitize=thread'}"
# Hooks at every call of a function, which do nothing: without them kernels run in a tenth less time.
NO_HOOKS_OF_CALLS = "--param tsan-instrument-func-entry-exit=0"  # GCC 11 or newer
SANITIZER_FLAGS = f"-O1 -g -fno-omit-frame-pointer -fsanitize={SANITIZE} -fno-sanitize-recover=all" if SANITIZE else ""

ISAS = {"generic": ""}
if platform.machine() in ("x86_64", "AMD64"):
    # Few machines lack AVX2: loops 4 to 20 % slower than with everything inside compile in a third of the time.
    ISAS["generic"] = "-Og -DHPO_QUICK_TO_COMPILE"
    ISAS["avx2"] = "-mavx2 -mfma -mf16c"
    ISAS["avx512"] = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c"
CUDA_ARCHS = "80+ptx 90 100 120"
# Without --no-cache-dir pip would install the wheel again that it built before.
REINSTALL = "pip install --force-reinstall --no-cache-dir --no-deps hpo-core"
NO_COMPILER = f"no C++ compiler was found when hpo_core was built; install g++ or clang++, then {REINSTALL}"


class Plan:
    """The ninja statements that build one extension, or the reason why it is not built."""

    def __init__(self, name: str, *, reason: str = "", link: str = "link", facts: dict[str, object] | None = None):
        self.name, self.reason, self.link, self.facts = name, reason, link, facts or {}
        self.library = BUILD / f"{name}{SUFFIX}"
        self.objects: list[str] = []
        self.statements: list[str] = []

    def compile(self, source: Path, rule: str, flags: str, variant: str = "", owner: str = "") -> None:
        """Several plans may compile one object, that of its owner."""
        name = BUILD / ".".join(filter(None, [owner or self.name, source.stem, variant, "o"]))
        self.objects.append(str(name))
        self.statements.append(f"build {name}: {rule} {source}\n  flags = {flags}\n")

    def ninja(self) -> list[str]:
        return [*self.statements, f"build {self.library}: {self.link} {' '.join(self.objects)}\n"]

    def info(self) -> dict[str, object]:
        return {"built": False, "reason": self.reason} if self.reason else {"built": True, **self.facts}


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sources(pattern: str) -> list[Path]:
    """The sources, relative and sorted: the link order, and so the bits, are the same everywhere."""
    return sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))


def find_compiler() -> list[str] | None:
    if "CXX" in os.environ:
        command = shlex.split(os.environ["CXX"])
        if not command or not shutil.which(command[0]):
            raise PlatformError(f"CXX={os.environ['CXX']!r} was not found: name a C++17 compiler, or unset CXX.")
        return command
    return next(([name] for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def version_of(compiler: list[str]) -> str:
    return output(*compiler, "--version").splitlines()[0]


def find_nvcc() -> str | None:
    if "CUDA_HOME" in os.environ:
        return shutil.which("nvcc", path=f"{os.environ['CUDA_HOME']}/bin")
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def cuda_archs(nvcc: str) -> list[str]:
    asked = re.split(r"[ ,;]+", os.environ.get("HPO_CORE_CUDA_ARCHS", "").strip())
    known = output(nvcc, "--list-gpu-arch").split()
    return [a for a in asked if a] or [a for a in CUDA_ARCHS.split() if f"compute_{a.removesuffix('+ptx')}" in known]


def gencode(archs: list[str]) -> str:
    """The architectures as options of nvcc, which takes most of its time to make PTX. The PTX of 80 is that
    of 90, and the PTX of 100 is that of 120, so the lowest one on either side serves the others there."""
    options = []
    for arch in archs:
        number, _, ptx = arch.partition("+")
        alike = [each for each in (one.partition("+")[0] for one in archs) if len(each) == len(number)]
        lowest = min(alike, key=int) if all(map(str.isdigit, alike)) else number  # 90a is like no other
        options += [f"-gencode arch=compute_{lowest},code=sm_{number}"]
        options += [f"-gencode arch=compute_{number},code=compute_{number}"] if ptx else []
    return " ".join(options)


def python_headers() -> str:
    """Include flags, through links with the version in their name: real paths are new in every isolated build."""
    import pybind11

    folders = {
        f"pybind11-{pybind11.__version__}": pybind11.get_include(),
        f"python-{platform.python_version()}": sysconfig.get_paths()["include"],
    }
    for name, target in folders.items():
        link = ROOT / BUILD / "include" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() or os.readlink(link) != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    return " ".join(f"-isystem {BUILD}/include/{name}" for name in folders)


def plan_cpu(compiler: str, headers: str) -> Plan:
    binding, dispatch = Path("csrc/bindings_cpu.cpp"), Path("csrc/cpu/dispatch.cpp")
    kernels = [source for source in sources("csrc/cpu/*.cpp") if source != dispatch]
    if not (kernels and (ROOT / dispatch).exists()):
        return Plan("_cpu", reason=f"this source tree has no {dispatch}")
    plan = Plan("_cpu", facts={"compiler": compiler, "flags": f"{CXX_FLAGS} {CPU_FLAGS}", "isas": list(ISAS)})
    plan.compile(binding, "cxx", f"{BINDING_FLAGS} {SANITIZER_FLAGS} {headers}")
    plan.compile(dispatch, "cxx", f"{CPU_FLAGS} {SANITIZER_FLAGS} -DHPO_ISA=generic")
    # Baseline objects come first: if several objects define an inline function, the linker keeps the first copy, and
    # only the baseline copy runs on every machine.
    for isa, flags in ISAS.items():
        for source in kernels:
            own = VECTOR_FLAGS if source.name in IN_VECTORS and "clang" not in compiler else ""
            plan.compile(source, "cxx", f"{CPU_FLAGS} {own} {SANITIZER_FLAGS} {flags} -DHPO_ISA={isa}", isa)
    return plan


def plan_cuda(nvcc: str | None, headers: str) -> Plan:
    wanted = os.environ.get("HPO_CORE_CUDA", "")
    if wanted == "0":
        return Plan("_cuda", reason="hpo_core was built with HPO_CORE_CUDA=0")
    if nvcc is None:
        if wanted == "1":
            raise PlatformError(
                "HPO_CORE_CUDA=1 asks for the CUDA extension, but there is no nvcc in the bin folder of CUDA_HOME or, "
                "where that is unset, in PATH or /usr/local/cuda/bin. Install the CUDA toolkit, or unset HPO_CORE_CUDA."
            )
        return Plan("_cuda", reason="nvcc was not found when hpo_core was built")
    kernels = sources("csrc/cuda/*.cu")
    if not kernels:
        return Plan("_cuda", reason="this source tree has no csrc/cuda")
    archs = cuda_archs(nvcc)
    version = re.search(r"release [\d.]+", output(nvcc, "--version"))
    facts = {"compiler": f"nvcc {version[0] if version else ''}".strip(), "flags": NVCC_FLAGS, "archs": archs}
    plan = Plan("_cuda", link="link_cuda", facts=facts)
    targets = " ".join(re.findall(r"code=(\w+)", gencode(archs)))
    names = f"-DHPO_MODULE=_cuda '-DHPO_CUDA_TARGETS=\"{targets}\"'"
    plan.compile(Path("csrc/bindings_cuda.cpp"), "cxx", f"{BINDING_FLAGS} {names} {headers}")
    for source in kernels:
        plan.compile(source, "nvcc", gencode(archs))
    return plan


def accepts(compiler: list[str], flags: str) -> bool:
    command = [*compiler, *flags.split(), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def plan_emulated(name: str, compiler: list[str], headers: str, binding: Path, kernels: list[Path]) -> Plan:
    if os.environ.get("HPO_CORE_EMULATED") != "1":
        return Plan(name, reason="a test double, built only with HPO_CORE_EMULATED=1")
    if not (kernels and (ROOT / binding).exists()):
        return Plan(name, reason=f"this source tree has no {binding}")
    hooked = f"{HOOKED_FLAGS} {NO_HOOKS_OF_CALLS}" if accepts(compiler, NO_HOOKS_OF_CALLS) else HOOKED_FLAGS
    plan = Plan(name, facts={"compiler": version_of(compiler), "flags": f"{CXX_FLAGS} {EMULATED_FLAGS}"})
    # Tests alone call these bindings, and -Og compiles them in a sixth less time.
    plan.compile(binding, "cxx", f"{EMULATED_FLAGS} -Og {SANITIZER_FLAGS} -DHPO_MODULE={name} {headers}")
    for source in sources("csrc/emulation/machine.cpp"):
        plan.compile(source, "cxx", f"{EMULATED_FLAGS} -O2 {SANITIZER_FLAGS}", owner="_cuda_emulated")
    for source in kernels:
        plan.compile(source, "cxx", f"{hooked} {SANITIZER_FLAGS} -x c++")
    return plan


def plan_all(compiler: list[str], nvcc: str | None) -> list[Plan]:
    headers = python_headers()
    selftest = sources("csrc/emulation/selftest*.cu")
    return [
        plan_cpu(version_of(compiler), headers),
        plan_cuda(nvcc, headers),
        plan_emulated("_cuda_emulated", compiler, headers, Path("csrc/bindings_cuda.cpp"), sources("csrc/cuda/*.cu")),
        plan_emulated("_emulation_selftest", compiler, headers, Path("csrc/emulation/selftest_bindings.cpp"), selftest),
    ]


def compile_all(plans: list[Plan], compiler: list[str], nvcc: str | None) -> None:
    import ninja

    cxx, strip = shlex.join(compiler), "" if SANITIZE else "-Wl,-s"
    manifest = f"""\
builddir = {BUILD}
rule cxx
  command = {cxx} {CXX_FLAGS} $flags -MMD -MF $out.d -c $in -o $out
  description = $out
  depfile = $out.d
  deps = gcc
rule nvcc
  command = {nvcc} {NVCC_FLAGS} $flags -MD -MF $out.d -c $in -o $out
  description = $out
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -shared -fopenmp {SANITIZER_FLAGS} {strip} $in -o $out
  description = $out
rule link_cuda
  command = {nvcc} -shared -cudart static -Xlinker -s $in -o $out
  description = $out
""" + "".join(dict.fromkeys(statement for plan in plans for statement in plan.ninja()))
    path = ROOT / BUILD / "build.ninja"
    path.write_text(manifest)
    if subprocess.call([os.path.join(ninja.BIN_DIR, "ninja"), "-f", str(path)], cwd=ROOT):
        raise CompileError("hpo_core: the native extensions did not compile; the compiler's message stands above.")


def up_to_date(package: Path) -> dict[str, dict[str, object]]:
    """The entries of _build_info.json whose libraries are newer than every source."""
    info = package / "_build_info.json"
    known = json.loads(info.read_text())["extensions"] if info.exists() else {}
    # The dates of folders count, too: a deleted file changes the date of its folder.
    changed = max(path.stat().st_mtime for path in [ROOT / "setup.py", *ROOT.glob("csrc/**"), *ROOT.glob("csrc/**/*")])
    libraries = {name: package / f"{name}{SUFFIX}" for name, facts in known.items() if facts["built"]}
    return {name: known[name] for name, path in libraries.items() if path.exists() and path.stat().st_mtime > changed}


class NinjaBuildExt(build_ext):
    """Compiles into BUILD, then copies each library to the path that setuptools expects.

    A build in place keeps up-to-date libraries that it does not build: `make demo` keeps the libraries of `make test`.
    No outdated library survives, and no library of an earlier build gets into a wheel.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # setuptools would keep a wrong library with a newer date, such as an uninstrumented one

    def run(self) -> None:
        if sys.platform != "linux":  # nothing is compiled, and Windows has no fcntl
            super().run()
            return
        import fcntl

        (ROOT / BUILD).mkdir(parents=True, exist_ok=True)
        with open(ROOT / BUILD / "lock", "w") as lock:  # two builds at once would write the same files
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()

    def build_extensions(self) -> None:
        compiler, nvcc = find_compiler(), find_nvcc()
        if sys.platform != "linux":
            plans = [Plan(name, reason="the native extensions are built on Linux only") for name in EXTENSIONS]
        elif compiler is None:
            plans = [Plan(name, reason=NO_COMPILER) for name in EXTENSIONS]
        else:
            plans = plan_all(compiler, nvcc)
        built = {f"hpo_core.{plan.name}": plan.library for plan in plans if not plan.reason}
        if compiler is not None and built:
            compile_all([plan for plan in plans if not plan.reason], compiler, nvcc)

        self.facts = {plan.name: plan.info() for plan in plans}
        self.extensions = [extension for extension in self.extensions if extension.name in built]
        self.clean(Path(self.build_lib) / "hpo_core", kept={})
        for extension in self.extensions:
            path = self.get_ext_fullpath(extension.name)
            self.copy_file(str(ROOT / built[extension.name]), path, preserve_times=False)  # newer than its sources

    def copy_extensions_to_source(self) -> None:
        self.clean(ROOT / "hpo_core", kept=up_to_date(ROOT / "hpo_core"))
        super().copy_extensions_to_source()

    def clean(self, package: Path, kept: dict[str, dict[str, object]]) -> None:
        package.mkdir(parents=True, exist_ok=True)
        for name in set(EXTENSIONS) - set(kept):
            (package / f"{name}{SUFFIX}").unlink(missing_ok=True)
        facts = self.facts | {name: earlier for name, earlier in kept.items() if not self.facts[name]["built"]}
        (package / "_build_info.json").write_text(json.dumps({"extensions": facts}, indent=2) + "\n")


class FreshBuildPy(build_py):
    """A build that keeps modules of an earlier build, such as deleted ones, out of a wheel."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib) / "hpo_core", ignore_errors=True)
        super().run()


setup(
    ext_modules=[Extension(f"hpo_core.{name}", sources=[]) for name in EXTENSIONS],
    cmdclass={"build_ext": NinjaBuildExt, "build_py": FreshBuildPy},
)
