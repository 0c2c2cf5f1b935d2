"""Measures hpo_core next to its peers on this machine's CPU; writes a table, JSON, CSV and a roofline picture."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import warnings
from pathlib import Path

# First calls include compilation, so no graph may come from the cache of an earlier run.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="hpo_core_bench_")

import report
from harness import Outcome, available, ceilings, measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the headline cases, under 90 s")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("results"), help="folder for JSON, CSV and picture"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)

    modules = [importlib.import_module(path.stem) for path in sorted(Path(__file__).parent.glob("bench_*.py"))]
    plans = [plan for module in modules for plan in module.plans(arguments.quick)]
    names = dict.fromkeys(plan.name for plan in plans)
    plans = [plan for plan in plans if arguments.only in plan.name]
    if not plans:
        parser.error(f"--only: no case has {arguments.only!r} in its name; there are\n  " + "\n  ".join(names))
    facts = report.environment()
    print("\n".join(f"{name:12} {value}" for name, value in facts.items()))
    limits = ceilings()
    facts["ceilings"] = limits
    print("\n".join(f"{name.replace('_', ' '):42} {value:.1f}" for name, value in limits.items()))

    outcomes: list[Outcome] = []
    for plan in plans:
        outcomes.append(measure(plan, plan.seconds or (2.0 if arguments.quick else 5.0)))
        print(report.table(outcomes[-1]), flush=True)
        report.write(arguments.out, facts, outcomes)
    print(report.summary(outcomes))
    if available("matplotlib"):
        report.roofline(arguments.out / "roofline.png", limits, outcomes)
    else:
        print("matplotlib is not installed: no roofline picture")
    print(f"written to {arguments.out}")
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
