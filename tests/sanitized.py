"""The tests of `make sanitize`: the path tests of C++ and of the emulated CUDA under AddressSanitizer and UBSan.

    python tests/sanitized.py FOLDER [options of pytest]

FOLDER holds hpo_core built with HPO_CORE_SANITIZE=address,undefined and HPO_CORE_EMULATED=1. Planted faults come first:
a run that could not find them would prove nothing.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ISAS = ("avx512", "avx2", "generic")
TESTS = [
    f"tests/test_{name}.py"
    for name in (
        "segments", "group_terms", "advantages", "estimators", "token_estimators", "entropy", "entropy_selection",
        "window_aggregates", "scopes", "select_top", "gates", "gate_paths", "promises", "gate_inputs", "presets",
        "hierarchy", "hierarchy_theorems", "hierarchy_degenerate", "level_metrics", "terms", "corrections", "stages",
        "segment_exchange", "aggregates", "losses", "metrics", "ops", "batch", "logprobs", "logprobs_calls",
        "linear_logprobs", "loss_from_logits", "covariance",
    )
]  # fmt: skip
# The emulation has no instruction sets, and the outcome of a wrong argument depends on none.
ONCE = ["tests/test_emulation.py", "tests/test_wrong_arguments.py"]
# Few examples are enough: a bad access shows in the first ones, and `make test` checks values.
OPTIONS = ["-p", "no:cacheprovider", "-m", "not long", "--examples", "20"]
# raw_overflow is a planted fault that ends the process, as test_emulation.py itself checks. Hooks, for which
# a sanitizer leaves no room, find unordered accesses. Compilers do not run with a sanitizer loaded.
LEFT_OUT = "not raw_overflow and not unordered and not nvcc and not inductor"

FAULTS = {  # three rows where there is one; counts at an odd address
    "AddressSanitizer: heap-buffer-overflow": "run(rows=3)",
    "runtime error: store to misaligned address": "run(odd=1)",
}
CALL = """
import importlib, torch, hpo_core
module = importlib.import_module("hpo_core._{backend}")
offsets, counts = torch.tensor([0, 5]), torch.zeros(3, dtype=torch.int64)
def run(rows=1, odd=0):
    module.row_counts(5, rows, None, offsets, counts.view(torch.uint8)[odd:], None, 0, 0.0, 1)
run()
assert counts.tolist() == [5, 0, 0]
{call}
print("came through")
"""


def environment(folder: Path, isa: str, backends: str = "cpu") -> dict[str, str]:
    compiler = shlex.split(os.environ.get("CXX", "g++"))

    def library(name: str) -> str:
        return subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()

    return os.environ | {
        "PYTHONPATH": str(folder),
        "HPO_CORE_TEST_BACKENDS": backends,  # Triton has nothing to instrument
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        # Python never frees all its memory. Reports go to files, because pytest would capture the terminal.
        "ASAN_OPTIONS": f"detect_leaks=0:detect_stack_use_after_return=1:log_path={folder}/report",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={folder}/report",
        "HPO_CORE_ISA": isa,
        "HPO_CORE_WHOLE_WALK": "1",  # of wrong arguments
        "OMP_WAIT_POLICY": "passive",
    }


def take_reports(folder: Path) -> str:
    text = ""
    for path in sorted(folder.glob("report.*")):
        text += path.read_text(errors="replace")
        path.unlink()
    return text


def python(folder: Path, isa: str, program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment(folder, isa), capture_output=True, text=True)


def find_planted_faults(folder: Path, isa: str) -> None:
    for backend in ("cpu", "cuda_emulated"):
        sound = python(folder, isa, CALL.format(backend=backend, call="print(module.__file__)"))
        if sound.returncode or not sound.stdout.startswith(str(folder)):
            sys.exit(
                f"{backend}: no instrumented extension in {folder}\n{sound.stdout}{sound.stderr}{take_reports(folder)}"
            )
        for words, call in FAULTS.items():
            done = python(folder, isa, CALL.format(backend=backend, call=call))
            report = take_reports(folder) + done.stderr
            if done.returncode == 0 or words not in report:
                sys.exit(f"{backend}, {isa}: {call} must end in {words!r}\n{done.stdout}{report}")
            print(f"{backend}, {isa}: a planted fault is found: {words}", flush=True)


def main() -> int:
    folder, options = Path(sys.argv[1]).resolve(), sys.argv[2:]
    take_reports(folder)
    runs = []
    for isa in ISAS:
        if python(folder, isa, "import hpo_core; assert hpo_core.backends()['cpu']").returncode:
            print(f"{isa}: not on this machine")
            continue
        find_planted_faults(folder, isa)
        tests, backends = (TESTS, "cpu") if runs else ([*TESTS, *ONCE], "cpu,cuda_emulated")
        command = [Path(sys.executable).with_name("pytest"), *OPTIONS, *tests, "-k", LEFT_OUT, *options]
        runs.append(subprocess.call(command, cwd=ROOT, env=environment(folder, isa, backends)))
    reports = take_reports(folder)
    print(reports or f"sanitizers: nothing found in {len(runs)} runs")
    return 1 if reports or any(runs) or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
