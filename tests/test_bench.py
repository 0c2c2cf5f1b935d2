"""The cases of `make bench` at their small sizes: every contestant agrees with the float64 reference."""

import importlib
import runpy
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import bench_presets
import gpu_check
import peers_presets
from harness import check

BENCH = Path(__file__).parents[1] / "bench"
MODULES = [importlib.import_module(path.stem) for path in sorted(BENCH.glob("bench_*.py"))]


@pytest.mark.parametrize(
    "plan", [plan for module in MODULES for plan in module.plans(quick=False)], ids=lambda p: p.name
)
def test_contestants_agree_with_the_reference(plan):
    check(plan.small_case())


def test_what_a_gpu_is_checked_with(monkeypatch):
    """Every op agrees with its definition on the emulated kernels, and a result that does not is counted."""
    pytest.importorskip("hpo_core._cuda_emulated")
    assert gpu_check.exercise("cuda_emulated", "cpu", "small") == 0
    exact = bench_presets.truth
    twice = lambda *given: {name: 2 * tensor for name, tensor in exact(*given).items()}  # noqa: E731
    monkeypatch.setattr(bench_presets, "truth", twice)
    assert gpu_check.exercise("cuda_emulated", "cpu", "small") == len(bench_presets.PRESETS)


def test_a_case_that_is_none(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick", "--only", "abacus"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # which the script sets
    with pytest.raises(SystemExit):
        runpy.run_path(str(BENCH / "run.py"), run_name="__main__")
    assert "no case has 'abacus' in its name; there are\n" in (said := capsys.readouterr().err)
    assert "\n  ppo_clip 512 x 2048\n" in said


def test_every_preset_has_an_eager_formula():
    assert set(bench_presets.PRESETS) == set(peers_presets.FORMULAS)
    assert {"ppo_clip", "two_scale"} < set(bench_presets.PRESETS)


def test_every_loss_of_verl_stands_beside_a_preset():
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos")
    theirs = {name for name in algorithms.POLICY_LOSS_REGISTRY if not name.startswith("hpo_")}
    assert theirs - {"bypass_mode"} <= {peer.name for peer in peers_presets.VERL.values()}
    assert {name.partition(",")[0] for name in peers_presets.VERL} <= set(bench_presets.PRESETS)
