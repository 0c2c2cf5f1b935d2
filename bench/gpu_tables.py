"""Prints the tables of docs/gpu_measured.md and gpu_measured_losses.md from the results of gpu_check.py.

python bench/gpu_tables.py gpu_check_output/bench.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from report import digits

Results = dict[str, dict[str, dict[str, Any]]]  # by case, then by contestant


def read(lines: Iterable[str]) -> tuple[list[dict[str, Any]], Results]:
    """The devices of the measurement, and the results; of equal ones the last."""
    facts, found = [], defaultdict[str, dict[str, dict[str, Any]]](dict)
    for line in lines:
        result = json.loads(line)
        if "case" not in result:
            facts.append(result)
        elif "event_microseconds" in result:
            found[result["case"]][result["contestant"]] = result
    return facts, found


def kernels(result: dict[str, Any]) -> float:
    """Microseconds on the device, without the gaps between launches."""
    return float(result.get("graph_microseconds", result["event_microseconds"]))


def time_of(result: dict[str, Any] | None, unit: float = 1.0) -> str:
    return "" if result is None else digits(kernels(result) / unit)


def floors(result: dict[str, Any] | None) -> str:
    return "" if result is None else digits(kernels(result) / result["floor_microseconds"])


def times_slower(peer: dict[str, Any] | None, ours: dict[str, Any] | None) -> str:
    return "" if peer is None or ours is None else f"{digits(kernels(peer) / kernels(ours))}x"


def megabytes(result: dict[str, Any] | None) -> str:
    return "" if result is None else digits(result["extra_bytes"] / 1e6)


def launched(result: dict[str, Any] | None) -> str:
    return "" if result is None else str(sum(result["launches"].values()))


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows))


def chosen(found: Results, wanted: Callable[[str], bool]) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    return [(case, results) for case, results in found.items() if wanted(case)]


def from_logits(found: Results) -> str:
    heads = ("", "cuda ms", "floors", "triton ms", "eager", "torch.compile", "MB held: cuda, eager, torch.compile")
    rows = []
    for case, results in chosen(found, lambda case: case.startswith(("logits", "loss from logits"))):
        peers = results.get("eager"), results.get("torch.compile")
        for name in ("cuda", "cuda, no entropy", "cuda, in place"):
            ours = results.get(name)
            if ours is None:
                continue
            held = ", ".join(filter(None, map(megabytes, (ours, *peers))))
            rows.append(
                (
                    case.removeprefix("logits ") + name.removeprefix("cuda"), time_of(ours, 1e3), floors(ours),
                    time_of(results.get(name.replace("cuda", "triton")), 1e3),
                    *(times_slower(peer, ours) for peer in peers), held,
                )
            )  # fmt: skip
    return table(heads, rows)


def from_hidden_states(found: Results) -> str:
    heads = ("", "implementation", "ms", "ms with gaps", "products", "launches", "MB held")
    rows = []
    for case, results in chosen(found, lambda case: case.startswith("hidden")):
        alone = next((result for name, result in results.items() if name.endswith(("product", "products"))), None)
        for name, result in results.items():
            products = "" if alone is None else digits(kernels(result) / kernels(alone))
            with_gaps = digits(result["event_microseconds"] / 1e3)
            rows.append((case, name, time_of(result, 1e3), with_gaps, products, launched(result), megabytes(result)))
    return table(heads, rows)


def beside_eager(found: Results, wanted: Callable[[str], bool], ours: str, peers: tuple[str, ...] = ("eager",)) -> str:
    """Microseconds of the contestant ``{backend}ours`` on both backends, and how many times slower its peers are."""
    rows = []
    for case, results in chosen(found, wanted):
        cuda, triton = (results.get(f"{backend}{ours}") for backend in ("cuda", "triton"))
        if cuda is None:
            continue
        with_gaps = digits(cuda["event_microseconds"])
        slower = (times_slower(results.get(name), cuda) for name in peers)
        rows.append((case, time_of(cuda), floors(cuda), with_gaps, time_of(triton), *slower))
    return table(("", "cuda us", "floors", "us with gaps", "triton us", *peers), rows)


def of_rows(case: str) -> bool:
    return " x " in case


def losses(found: Results) -> str:
    return beside_eager(found, of_rows, ": hpo_core", ("eager", "torch.compile"))


def presets(found: Results) -> str:
    return beside_eager(dict(sorted(found.items())), lambda case: case.endswith(" x 2048"), "")


def others(found: Results) -> str:
    return beside_eager(found, lambda case: not of_rows(case), ": hpo_core")


def main(paths: list[str]) -> None:
    facts, found = read(line for path in paths for line in Path(path).read_text().splitlines())
    print(*facts, sep="\n")
    for each in (from_logits, from_hidden_states, losses, presets, others):
        print(f"\n{each(found)}")


if __name__ == "__main__":
    main(sys.argv[1:])
