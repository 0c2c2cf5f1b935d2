"""The tests of `make test-changed`: those that files changed since a commit can affect.

    python tests/changed.py COMMIT [options of pytest]

A rule says which test modules a change of some files can break, and on which backends. A file can have several rules. A
file beside the tests without any runs the tests that import it, another file without any runs everything.
tests/test_changed.py holds the rules to the tree and to the mutants.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EVERY_BACKEND = ("cpu", "triton", "cuda_emulated")
EVERY_MODULE = tuple(sorted(path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")))

LOSS = (
    *(
        "promises",
        "overflow",
        "structures",
        "gates",
        "gates_by_hand",
        "gate_paths",
        "row_advantages",
        "hierarchy",
        "random_gates",
        "presets",
        "terms",
        "stages",
        "metrics",
        "corrections",
    ),
    *("selection", "loss_from_logits", "scale", "alignment", "specialisations", "triton_guards"),
)
ADVANTAGES = (
    *("advantages", "group_terms", "estimators", "estimators_by_hand", "estimators_of_authors"),
    *("estimators_without_scores", "token_estimators", "rollout_selection", "remembered_rollouts", "schedules"),
    *("many_units", "triton_guards"),
)
ENTROPY = ("entropy", "entropy_selection", "select_top", "window_aggregates", "alignment", "specialisations",
           "triton_guards")  # fmt: skip
SCOPES = ("scopes", "scopes_over_ranks")
PRESETS = ("default_numbers", "selection", "entropy_presets", "entropy_shaping", "entropy_thresholds",
           "low_entropy_segments", "entropy_reconstructed", "entropy_properties", "entropy_sources",
           "entropy_over_ranks")  # fmt: skip
SEGMENTS = ("segments", "chains", "token_estimators")
LOGPROBS = (
    *(
        "logprobs",
        "logprobs_layouts",
        "logprobs_autograd",
        "logprobs_calls",
        "support",
        "linear_logprobs",
        "vocabulary_parallel",
        "logprobs_peers",
    ),
    *("loss_from_logits", "merged_states"),
)
OPERATORS = ("on_gpu", *LOSS, *ADVANTAGES, *ENTROPY, *SCOPES, *SEGMENTS, *LOGPROBS, "covariance")
MULTIPROCESS = (
    *("distributed", "segment_exchange", "aggregates", "advantages_over_ranks", "data_parallel", "deepspeed"),
    *("empty_rank", "scopes_over_ranks", "entropy_over_ranks"),
)
TESTING = ("testing", "testing_examples", "testing_faults")
PYTHON = (
    *("aggregation", "batch", "batch_caches", "couplings", "denominators", "docs", "gate_arguments", "gate_inputs"),
    *("imports", "level_metrics", "losses", "loss_errors", "single_call", "transforms", "compiled"),
    *("masks_and_totals", "micro_batches", "ops", "padded_masks", "python_mutants", "synchronisation", *TESTING),
    *("without_native", "backends", "wrong_arguments", "error_messages"),
)
TRL = ("trl", "trl_arguments", "trl_contract", "trl_head", "trl_steps", "trl_tools", "trl_over_ranks")
VERL = ("verl", "verl_advantages", "verl_rows", "verl_head", "verl_fit", "verl_steps")
# Each has a file in hpo_core/integrations; those of the second tuple are run against the trainer itself.
TRAINERS = (
    *("areal", "art", "axolotl", "easyr1", "miles", "ms_swift", "nemo_rl", "open_instruct", "openrlhf", "prime_rl"),
    *("rlinf", "rllm", "roll", "skyrl", "slime", "tinker", "torchforge", "torchrl", "trinity", "verl_agent"),
)
RECORDED = tuple(f"recorded_{name}" for name in ("trainers", "apps", "open_instruct", "rlinf", "slime"))
WITH_TESTS = ("areal", "axolotl", "ms_swift", "openrlhf", "skyrl", "torchrl", "trinity")


class Rule(NamedTuple):
    files: tuple[str, ...]  # patterns; a star matches slashes too
    modules: tuple[str, ...]
    backends: tuple[str, ...] = ("cpu",)


def kernels(names: str, modules: tuple[str, ...]) -> list[Rule]:
    """The rules of an op's kernels, which have the same names in every room."""
    stems = names.split()
    rules = [
        Rule(tuple(f"csrc/cpu/{stem}*" for stem in stems), modules),
        Rule(tuple(f"csrc/cuda/{stem}*" for stem in stems), (*modules, "cuda_compile"), ("cuda_emulated",)),
        Rule(
            tuple(f"csrc/include/hpo/{room}{stem}.h" for room in ("", "api/") for stem in stems),
            modules,
            ("cpu", "cuda_emulated"),
        ),
        Rule(tuple(f"kernels/hpo_triton/{stem}.py" for stem in stems), modules, ("triton",)),
        Rule(
            tuple(f"hpo_core/{room}/{stem}.py" for room in ("reference", "ops") for stem in stems),
            (*modules, "ops", "compiled", "transforms", "imports", "docs"),
            EVERY_BACKEND,
        ),
    ]
    return [rule for rule in rules if any(any(ROOT.glob(pattern)) for pattern in rule.files)]


RULES = [
    *kernels("gates hierarchy hierarchy_tokens leaves sums terms tokens gated_levels metrics", LOSS),
    *kernels("prepare_leaves flows fixed_point tickets", LOSS),
    *kernels("corrections correction_rules", LOSS),
    *kernels("advantages groups", ADVANTAGES),
    *kernels("entropy windows", ENTROPY),
    *kernels("scopes bins", (*ENTROPY, *SCOPES)),
    Rule(("csrc/cpu/order_keys.h", "csrc/include/hpo/entropy.h"), (*ENTROPY, *SCOPES), ("cpu", "cuda_emulated")),
    Rule(("kernels/hpo_triton/entropy.py",), SCOPES, ("triton",)),
    *kernels("covariance", ("covariance", "gate_inputs")),
    *kernels("segments", SEGMENTS),
    *kernels("logprobs logits logits_rows logit_types", LOGPROBS),
    *kernels("loss_from_logits", ("loss_from_logits",)),
    *kernels("scale", ("scale",)),
    Rule(("csrc/cpu/arithmetic.h",), (*OPERATORS, "ambient_defaults")),
    Rule(("csrc/cpu/row_advantages.h",), LOSS),
    Rule(("csrc/cpu/lanes.h", "csrc/cpu/parallel.h", "csrc/cpu/rows.h"), OPERATORS),
    Rule(("csrc/cpu/dispatch.cpp", "csrc/cpu/kernels.h", "csrc/bindings_cpu.cpp"), (*OPERATORS, "isas", "backends")),
    Rule(("csrc/cuda/grid.cuh", "csrc/cuda/units.cuh", "csrc/cuda/warp.cuh", "csrc/cuda/status.cu",
          "csrc/include/hpo/cuda.h", "csrc/include/hpo/launches.h", "csrc/bindings_cuda.cpp"),
         (*OPERATORS, "cuda_compile", "failed_launches"), ("cuda_emulated",)),
    Rule(("csrc/include/hpo/math.h", "csrc/include/hpo/rows.h", "csrc/include/hpo/api.h", "csrc/bindings.h",
          "csrc/bindings/*"), (*OPERATORS, "ops", "compiled", "cuda_compile"),
         ("cpu", "cuda_emulated")),
    Rule(("csrc/emulation/*",), (*OPERATORS, "emulation", "failed_launches"), ("cuda_emulated",)),
    Rule(("kernels/hpo_triton/math.py", "kernels/hpo_triton/launch.py", "kernels/hpo_triton/rows.py",
          "kernels/hpo_triton/segments.py", "kernels/hpo_triton/__init__.py"), OPERATORS, ("triton",)),
    Rule(("kernels/hpo_triton/*",), ("triton_compile", "interpreter"), ("triton",)),
    Rule(("hpo_core/*.py",), (*PYTHON, *LOSS, "presets", "liger", "second_opinions")),
    Rule(
        ("hpo_core/native.py", "hpo_core/backends.py", "hpo_core/specs/*.py"),
        (*OPERATORS, "backends", "without_native"),
        EVERY_BACKEND,
    ),
    Rule(("hpo_core/native.py", "hpo_core/checks.py", "hpo_core/arguments.py", "hpo_core/ops/*", "csrc/bindings.h",
          "csrc/bindings/*", "csrc/cpu/rows.h", "csrc/cpu/advantages.cpp"), ("ambient_defaults", "bounded_costs")),
    Rule(("hpo_core/value_loss.py", "hpo_core/metrics.py"), ("value_loss",)),
    Rule(("hpo_core/distributed.py", "hpo_core/segment_exchange.py", "hpo_core/metrics.py", "hpo_core/aggregation.py",
          "hpo_core/advantages/distributed.py"), MULTIPROCESS),
    Rule(("hpo_core/batch/*",), ("empty_rank",)),
    Rule(("csrc/cpu/widen.cpp",), ("linear_logprobs",)),
    Rule(("hpo_core/logprob_states.py", "hpo_core/linear_logprobs.py", "hpo_core/vocabulary_parallel.py",
          "hpo_core/*/logprob_states.py", "hpo_core/*/linear_logprobs.py"),
         ("linear_logprobs", "vocabulary_parallel", "merged_states", "imports", "docs")),
    Rule(("hpo_core/logprobs.py", "hpo_core/support.py"), (*LOGPROBS, "docs")),
    Rule(("hpo_core/loss_from_logits.py", "hpo_core/ops/logprobs.py"), ("loss_from_logits", "scale"), EVERY_BACKEND),
    Rule(("hpo_core/advantages/*",), (*ADVANTAGES, "default_numbers", "estimator_properties", "imports", "docs",
          "synchronisation", "trainers", "trl_contract", "verl_advantages", "advantages_over_ranks")),
    Rule(("hpo_core/advantages/ranks.py", "hpo_core/advantages/terms.py"), MULTIPROCESS),
    Rule(("hpo_core/entropy/*",), (*ENTROPY, *PRESETS, *SCOPES, "losses", "imports", "docs")),
    Rule(("hpo_core/gates/*",), (*LOSS, "default_numbers", "denominators", "gate_arguments", "gate_inputs", "balanced",
          "schedules", "hierarchy_theorems", "hierarchy_degenerate", "imports", "docs", "bench", "trainers", "verl",
          "skyrl")),
    Rule(("hpo_core/integrations/trl*.py", "hpo_core/integrations/turns.py", "hpo_core/integrations/replaced.py",
          "tests/trl_over_ranks.py"), (*TRL, "imports")),
    Rule(("hpo_core/integrations/verl*.py", "hpo_core/integrations/turns.py", "hpo_core/integrations/replaced.py",
          "hpo_core/integrations/prompt_advantages.py", "hpo_core/integrations/micro_batch.py",
          "hpo_core/integrations/served.py", "tests/verl_on_cpu.py", "tests/verl_fit_on_cpu.py",
          "tests/verl_v1_on_cpu.py", "tests/verl_batches.py"), (*VERL, "imports")),
    Rule(("hpo_core/integrations/needs.py", "hpo_core/integrations/entropy_methods.py"), (*TRL, *VERL)),
    Rule(("hpo_core/integrations/named.py", "hpo_core/integrations/micro_batch.py", "hpo_core/integrations/turns.py",
          "hpo_core/integrations/prompt_advantages.py", "hpo_core/integrations/served.py",
          "hpo_core/integrations/replaced.py", "tests/trainer_batches.py"),
         (*RECORDED, "trainers", "trainer_parts", "imports", "docs", *WITH_TESTS)),
    Rule(tuple(f"hpo_core/integrations/{name}.py" for name in TRAINERS),
         (*RECORDED, "trainers", "imports", "docs", *WITH_TESTS)),
    Rule(("hpo_core/plot/*", "hpo_core/reference/gates.py", "hpo_core/reference/hierarchy.py"),
         ("plot", "imports", "docs")),
    Rule(("hpo_core/testing/*", "tests/kernels_to_check.py"), (*TESTING, "explain", "promises", "imports")),
    Rule(("hpo_core/py.typed", "hpo_core/_version.py", "setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", ".ci/*",
          "LICENSE", "CITATION.cff", "THIRD_PARTY_NOTICES", ".gitignore"), ("packaging", "backends")),
    Rule(("README.md", "CONTRIBUTING.md", "docs/*", "mkdocs.yml"), ("docs",)),
    Rule(
        ("docs/gpu.md", "tests/gpu_page.py", "tests/cuda_kernels.py", "tests/sass.py"),
        ("cuda_compile", "triton_compile"),
    ),
    Rule(("examples/*",), ("demo", "demo_agent", "docs", "examples", "tour")),
    Rule(("docs/cluster.md",), ("examples",)),
    Rule(("hpo_core/advantages/distributed.py", "hpo_core/distributed.py", "hpo_core/integrations/verl*.py"),
         ("examples",)),
    Rule(("hpo_core/plot/*", "hpo_core/testing/*", "hpo_core/gates/*", "hpo_core/advantages/*"), ("tour",)),
    Rule(("examples/gate_pictures.py", "docs/pictures/*", "docs/gating_explained.md", "docs/gates.md"),
         ("plot",)),
    Rule(("bench/*_pictures.py", "docs/pictures/*", "docs/trl_measured.md", "docs/benchmarks*.md",
          "docs/logprobs_speed.md", "docs/gpu.md", "docs/demo_agent.md"), ("bench_pictures",)),
    Rule(("examples/demo.py", "examples/entropy_pictures.py", "docs/pictures/*", "docs/entropy_explained.md"),
         ("entropy_pictures",)),
    Rule(("bench/*", "*.md", ".clang-format"), ("packaging",)),
    Rule(("bench/*.py", "hpo_core/specs/*.py", "hpo_core/gates/ratio_gate.py"), ("bench",)),
    Rule(("hpo_core/losses.py", "hpo_core/prepared.py", "hpo_core/kl.py", "hpo_core/loss_from_logits.py"),
         ("selection",)),
    Rule(("tests/naive_entropy.py",), PRESETS),
    Rule(("tests/entropy_steps.py",), ("entropy_over_ranks",)),
    Rule(("tests/changed.py", "tests/sanitized.py"), ("changed",)),
    Rule(("tests/mutants.py", "tests/compiled.py"), ("mutants", "cuda_compile", "triton_compile"), EVERY_BACKEND),
    Rule(("tests/mutants.py",), ("python_mutants",), EVERY_BACKEND),
    Rule(("tests/carried.py",), ("carried",), EVERY_BACKEND),
    *(Rule((f"tests/test_{name}.py",), (name,), EVERY_BACKEND) for name in EVERY_MODULE),
]  # fmt: skip


def matches(rule: Rule, file: str) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in rule.files)


@functools.cache
def imports() -> dict[str, set[str]]:
    """The imports of each file beside the tests, and of each test, also in scripts that it holds as text."""
    paths = Path(__file__).parent.glob("*.py")
    return {path.stem: set(re.findall(r"^\s*(?:from|import)\s+(\w+)", path.read_text(), re.M)) for path in paths}


def importing(name: str) -> tuple[str, ...]:
    """The test modules that import this file, or another that does; none where every test has it, as of conftest."""
    found, added = set[str](), {name}
    while added:
        found |= added
        added = {other for other, imported in imports().items() if imported & found} - found
    tests = (each.removeprefix("test_") for each in found if each.startswith("test_"))
    return () if "conftest" in found else tuple(sorted(tests))


def rules_of(file: str) -> list[Rule]:
    modules = importing(Path(file).stem) if file.startswith("tests/") else ()
    otherwise = Rule((file,), modules or EVERY_MODULE, EVERY_BACKEND)
    return [rule for rule in RULES if matches(rule, file)] or [otherwise]


def affected(files: Iterable[str]) -> tuple[list[str], list[str]]:
    """Test modules and backends for changes of these files."""
    modules: set[str] = set()
    backends: set[str] = set()
    for file in files:
        rules = rules_of(file)
        modules.update(*(rule.modules for rule in rules))
        backends.update(*(rule.backends for rule in rules))
    return sorted(modules), [backend for backend in EVERY_BACKEND if backend in backends]


def git(*arguments: str) -> list[str]:
    return subprocess.check_output(("git", *arguments), cwd=ROOT, text=True).splitlines()


def changed_since(commit: str) -> list[str]:
    return git("diff", "--name-only", commit) + git("ls-files", "--others", "--exclude-standard")


def main(commit: str, *options: str) -> int:
    files = changed_since(commit)
    if not files:
        print(f"nothing has changed since {commit}, so no test has run; SINCE=HEAD~1 compares with the commit before")
        return 0
    modules, backends = affected(files)
    print(f"{len(files)} changed files can affect {' '.join(modules)} on {' '.join(backends)}", flush=True)
    environment = os.environ | {"HPO_CORE_TEST_BACKENDS": ",".join(backends)}
    tests = [f"tests/test_{module}.py" for module in modules]
    command = [str(Path(sys.executable).with_name("pytest")), "-m", "not long", *options, *tests]
    return subprocess.call(command, cwd=ROOT, env=environment)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
