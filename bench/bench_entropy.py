"""Entropy windows: the exact quantile of a batch with its mask, windowed means that stay inside their rows, and exact
quantiles and top-k of rows and of prompt groups."""

from __future__ import annotations

import functools
from fractions import Fraction

import peers_entropy as peers
import torch
from harness import Case, Contestant, Plan, Tensors, available, slower_by, small_test

import hpo_core as hpo
from hpo_core.reference import entropy as reference
from hpo_core.specs import Boundary, Invalid, OrderRule

KEEP = 0.2


def entropies(rows: int, length: int) -> tuple[torch.Tensor, hpo.PackedBatch]:
    """``[B, L]`` with few equal values (float32 has 24 bits), all valid, and the batch of the rows end to end."""
    entropy = torch.rand(rows, length, generator=torch.Generator().manual_seed(0)).mul_(5)
    return entropy, hpo.PackedBatch(torch.arange(rows + 1) * length)


# ------------------------------------------------------------------------------------------------------- exact quantile


def selection_case(*, rows: int, length: int, full: bool, backend: str | None) -> Case:
    entropy, batch = entropies(rows, length)
    flat, mask = entropy.flatten(), torch.ones_like(entropy, dtype=torch.bool)
    window = hpo.entropy.forking_tokens(Fraction(str(KEEP)))
    read, written = flat, torch.empty_like(flat, dtype=torch.bool).view(torch.int8)

    def ours() -> Tensors:
        state, mask = window.fit_apply(flat, batch, backend=backend)
        return {"threshold": state.threshold, "mask": mask}

    def one_by_one() -> Tensors:
        state = window.fit(flat, batch, backend=backend)
        return {"threshold": state.threshold, "mask": window.apply(flat, batch, state, backend=backend)}

    def threshold_alone() -> Tensors:
        return {"threshold": window.fit_score(flat, backend=backend).threshold}

    def truth() -> Tensors:
        quantile = window.quantile
        threshold, _ = reference.order_statistic(flat, quantile.numerator, quantile.denominator, OrderRule.CEIL)
        return {"threshold": threshold, "mask": flat >= threshold}

    def floor() -> None:
        read.sum()
        written.zero_()

    others = [
        Contestant("kthvalue", lambda: peers.kthvalue(flat, KEEP), slower_by(8), tolerance=0),
        Contestant("topk", lambda: peers.topk(flat, KEEP), slower_by(8), tolerance=0),
        Contestant("numpy.partition", lambda: peers.partition(flat, KEEP), slower_by(6), tolerance=0),
    ]
    if flat.numel() <= 1 << 24:  # torch.quantile refuses more
        others.append(Contestant("torch.quantile", lambda: peers.quantile(flat, KEEP), slower_by(80), tolerance=0))
        if available("trl"):
            others.append(Contestant("trl", lambda: peers.trl(entropy, mask, KEEP), slower_by(80), tolerance=0))
    return Case(
        op="order_statistic",
        name=f"threshold and mask of the top {KEEP:.0%} of {flat.numel():,}",
        unit="token",
        units=flat.numel(),
        bytes_per_unit=5,  # read the entropy, write the mask
        flops_per_unit=2,  # a digit and a comparison
        ours=[
            Contestant("hpo_core", ours, tolerance=0),
            Contestant("hpo_core, fit and apply", one_by_one, tolerance=0),
            Contestant("hpo_core, threshold alone", threshold_alone, tolerance=0),
        ],
        peers=others,
        floor=floor,
        truth=None if full else truth,
    )


# ------------------------------------------------------------------------------------------------------- windowed means


def window_case(width: int, *, rows: int, length: int, full: bool, backend: str | None) -> Case:
    entropy, batch = entropies(rows, length)
    flat, out = entropy.flatten(), torch.empty(entropy.numel())

    def ours() -> Tensors:
        return {"score": hpo.entropy.window_mean(flat, batch, 0, width - 1, backend=backend)}

    def truth() -> Tensors:
        score = reference.window_score(flat.double(), None, batch.cu_seqlens, 0, width - 1, Boundary.FULL, Invalid.SKIP)
        return {"score": score}

    others = [
        Contestant("avg_pool1d per row", lambda: peers.average_pool(entropy, width), slower_by(3.5)),
        Contestant(
            "avg_pool1d over the pack", lambda: peers.average_pool_over_pack(flat, width), slower_by(3.5), alike=False
        ),
        Contestant("differences of cumsum", lambda: peers.cumulative_sum(entropy, width)),
    ]
    return Case(
        op="window_score",
        name=f"means over {width}, {rows:,} rows of {length:,}",
        unit="token",
        units=flat.numel(),
        bytes_per_unit=8,  # read the entropy, write the mean
        flops_per_unit=width,
        ours=[Contestant("hpo_core", ours, tolerance=1e-6)],
        peers=others,
        floor=lambda: torch.neg(flat, out=out),
        truth=None if full else truth,
    )


# ------------------------------------------------------------------------------------------------ scopes: rows, groups

GROUP = 8  # rows of a prompt


def scope_case(what: str, scope: str, *, rows: int, length: int, full: bool, backend: str | None) -> Case:
    """``what``: the 80 % quantile of each scope, or the mask of its largest fifth."""
    entropy, batch = entropies(rows, length)
    flat, size = entropy.flatten(), length if scope == "row" else GROUP * length
    of_scopes = flat.reshape(-1, size)  # [C, values of a scope]; rows of a group lie together
    batch = batch.replace(group_ids=torch.arange(rows) // GROUP)
    k = size // 5
    run = {
        "quantiles": lambda backend: {
            "threshold": hpo.entropy.quantiles(flat, batch, "0.8", scope=scope, backend=backend)[: len(of_scopes)]
        },
        "top_k": lambda backend: {"mask": hpo.entropy.top_k(flat, batch, k, scope=scope, backend=backend)},
    }[what]
    others = {
        "quantiles": [
            Contestant("loop of torch.quantile", lambda: peers.quantile_loop(of_scopes), slower_by(3), tolerance=0),
            Contestant("loop of kthvalue", lambda: peers.kthvalue_loop(of_scopes), slower_by(3), tolerance=0),
            Contestant("padded torch.quantile", lambda: peers.quantile_padded(of_scopes), tolerance=0),
        ],
        "top_k": [
            Contestant("loop of topk", lambda: peers.topk_loop(of_scopes, k), slower_by(2), tolerance=0),
            Contestant("padded topk", lambda: peers.topk_padded(of_scopes, k), tolerance=0),
        ],
    }[what]
    read, written = flat.view(torch.float32), torch.empty_like(flat, dtype=torch.bool).view(torch.int8)

    def floor() -> None:
        read.sum()
        if what == "top_k":
            written.zero_()

    return Case(
        op="order_statistics" if what == "quantiles" else "select_exact",
        name=f"{what} of {len(of_scopes):,} {scope}s of {size:,}",
        unit="token",
        units=flat.numel(),
        bytes_per_unit=4 if what == "quantiles" else 5,
        flops_per_unit=2,
        ours=[Contestant("hpo_core", lambda: run(backend), tolerance=0)],
        peers=others,
        floor=floor,
        truth=None if full else lambda: run("reference"),
    )


def plans(quick: bool) -> list[Plan]:
    def selection(rows: int) -> Plan:
        size, small = {"rows": rows, "length": 1000}, {"rows": 3, "length": 100}
        return Plan(f"selection {rows} x 1000", selection_case, size, small)

    def window(width: int) -> Plan:
        build = functools.partial(window_case, width)
        return Plan(f"window {width}", build, {"rows": 1000, "length": 1000}, {"rows": 3, "length": 50})

    def scopes(what: str, scope: str, rows: int = 1000) -> Plan:
        build = functools.partial(scope_case, what, scope)
        size = {"rows": rows, "length": 1_000_000 // rows}
        return Plan(f"scopes: {what} of {rows} rows by {scope}", build, size, {"rows": 2 * GROUP, "length": 50})

    if quick:
        return [selection(1000), window(4)]
    of_scopes = [scopes(what, scope) for what in ("quantiles", "top_k") for scope in ("row", "group")]
    few = [scopes(what, "group", 8 * GROUP) for what in ("quantiles", "top_k")]
    return [selection(1000), selection(10_000), window(4), window(32), *of_scopes, *few]


test_entropy = small_test(plans(quick=False))
