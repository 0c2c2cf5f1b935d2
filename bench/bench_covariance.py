"""Terms of the covariance of advantages and log-probabilities, by which Clip-Cov and KL-Cov choose tokens."""

from __future__ import annotations

import torch
from harness import Case, Contestant, Plan, Tensors, slower_by, small_test

from hpo_core import ops
from hpo_core.reference import covariance as reference
from hpo_core.specs import TokenDraw


def case(*, rows: int, length: int, full: bool, backend: str | None) -> Case:
    generator = torch.Generator().manual_seed(0)
    tokens = rows * length
    logp, advantages = -4 * torch.rand(tokens, generator=generator), torch.randn(rows, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.9
    cu_seqlens = torch.arange(rows + 1) * length
    out = torch.empty_like(logp)

    def ours() -> Tensors:
        return {"keys": ops.covariance(logp, advantages, cu_seqlens, mask, *TokenDraw(), backend)[0]}

    def eager() -> Tensors:
        x, a = logp.double(), advantages.double().repeat_interleave(length)
        n = mask.sum()
        means = [torch.where(mask, values, 0.0).sum() / n for values in (a, x)]
        return {"keys": torch.where(mask, (a - means[0]) * (x - means[1]), -torch.inf).float()}

    def floor() -> None:
        torch.add(logp, logp, out=out)

    def truth() -> Tensors:
        return {"keys": reference.covariance(logp, advantages, cu_seqlens, mask, TokenDraw())[0]}

    return Case(
        op="covariance",
        name=f"covariance, {rows:,} rows of {length:,}",
        unit="token",
        units=tokens,
        bytes_per_unit=2 * (4 + 1) + 4,
        flops_per_unit=5,
        ours=[Contestant("hpo_core", ours, tolerance=2e-6)],
        peers=[Contestant("eager, float64", eager, slower_by(3), tolerance=2e-6)],
        floor=floor,
        truth=None if full else truth,
    )


def plans(quick: bool) -> list[Plan]:
    sizes = {"rows": 512, "length": 2048}, {"rows": 7, "length": 20}
    return [] if quick else [Plan("covariance 512 x 2048", case, *sizes)]


test_covariance = small_test(plans(quick=False))
