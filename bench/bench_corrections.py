"""Corrections and penalties beside the plain gate that they are added to, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
from bench_gates import PENALTY, PPO, STATISTICS, TOKEN_GATE, floor, ours, padded_batch, truth, with_autograd
from harness import Case, Contestant, Plan, small_test
from peers_gates import Padded

from hpo_core import gates, kl
from hpo_core.gates import RatioGate, Unit

GATES: dict[str, RatioGate] = {
    "tis": gates.tis(),
    "tis, trajectory": gates.tis(unit=Unit.TRAJECTORY),
    "mis, token": gates.mis(unit=None),
    "mis": gates.mis(),
    "mis, veto": gates.mis(ratio_veto=1e-4),
    "icepop": gates.icepop(),
    "decoupled": gates.decoupled(),
    "opsm": gates.opsm(),
    "hispo": gates.hispo(),
    "dppo_tv": gates.dppo_tv(),
    "dppo_kl": gates.dppo_kl(),
}
PENALTIES = {
    f"{name}, {gradient}": getattr(kl, name)(0.04, gradient)
    for name in ("k1", "k2", "k3")
    for gradient in ("value", "straight_through", "importance")
}


def case(name: str, *, rows: int, length: int, full: bool, backend: str | None) -> Case:
    data, batch = padded_batch(PPO, rows, length, ragged=False)
    # One less: no probability lies above 1.
    data = data._replace(logp=data.logp - 1, old_logp=data.old_logp - 1, ref_logp=data.ref_logp - 1)
    gate, options = GATES.get(name, gates.ppo_clip()), given(name, data)
    extra = 4 if name in PENALTIES or gate.reads_rollout else 0
    plain = with_autograd(gates.ppo_clip(), data, batch, weights=data.weights, backend=backend)
    return Case(
        op="policy_loss",
        name=f"{name if name in GATES else f'ppo_clip + {name}'}, {rows:,} rows of {length:,}",
        unit="token",
        units=rows * length,
        bytes_per_unit=13 + extra,  # the mask, too
        flops_per_unit=STATISTICS + TOKEN_GATE + PENALTY,
        ours=ours(gate, data, batch, backend, {}, **options),
        peers=[Contestant("ppo_clip", plain, alike=False)],
        floor=floor(PPO, data, data.mask.flatten()),
        truth=None if full else functools.partial(truth, gate, data, batch, **options),
    )


def given(name: str, data: Padded) -> dict[str, Any]:
    if name in PENALTIES:
        return {"ref_logp": data.ref_logp, "kl": PENALTIES[name]}
    if not GATES[name].reads_rollout:
        return {}
    draw = torch.Generator().manual_seed(3)
    return {"rollout_logp": data.old_logp + 0.05 * torch.randn(data.old_logp.shape, generator=draw)}


def plans(quick: bool) -> list[Plan]:
    names = ["dppo_tv"] if quick else [*GATES, *PENALTIES]
    sizes = {"rows": 512, "length": 2048}, {"rows": 8, "length": 48}
    return [Plan(f"beside ppo_clip: {name}", functools.partial(case, name), *sizes) for name in names]


test_corrections = small_test(plans(quick=True))
