"""The cases of `make bench` at their small sizes: every contestant agrees with the float64 reference."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import bench_advantages
import bench_entropy
import bench_gates
import bench_hierarchy
import bench_linear_logprobs
import bench_logprobs
import bench_losses
import bench_segments
from harness import check

MODULES = (
    bench_advantages, bench_entropy, bench_gates, bench_hierarchy, bench_linear_logprobs, bench_logprobs, bench_losses,
    bench_segments,
)  # fmt: skip


@pytest.mark.parametrize(
    "plan", [plan for module in MODULES for plan in module.plans(quick=False)], ids=lambda p: p.name
)
def test_contestants_agree_with_the_reference(plan):
    check(plan.small_case())
