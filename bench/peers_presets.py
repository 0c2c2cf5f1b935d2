"""Every gate preset as a trainer would write it on ``[B, L]``, and verl's losses with the numbers that make them equal.

A formula returns the loss of each token ``[B, L]``, the loss of each row ``[B, 1]`` where its tokens share one, or the
weighed sum of all where tokens of a step share one. Numbers are the defaults of the presets. Constants of a row stay
``[B, 1]``, and factors without a gradient are made of detached tensors, so that autograd keeps nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from peers_gates import Objective, Run, differentiated, logged, verl_loss

INF = math.inf
LOGGED = Objective("ppo_clip", 0.2, 0.2)  # the bounds beyond which tokens are counted
GROUP, DOMAIN = 8, 32  # rows of a group and of a domain; two of the pairs of p3o


class Rows(NamedTuple):
    """B rows of L tokens, and the other tensors that presets read."""

    logp: torch.Tensor  # [B, L], as are the next two
    old_logp: torch.Tensor
    rollout_logp: torch.Tensor
    mask: torch.Tensor  # [B, L] bool
    advantages: torch.Tensor  # [B]
    weights: torch.Tensor  # [B], hpo_core's weights of the aggregation
    low: torch.Tensor  # [B, L], bounds of the ratio
    high: torch.Tensor
    token_mask: torch.Tensor  # [B, L] bool
    penalty_mask: torch.Tensor  # [B, L] bool
    token_weight: torch.Tensor  # [B, L]
    target: torch.Tensor  # [B]
    step: torch.Tensor  # [B L] int64, the step of each token
    row_of_step: torch.Tensor  # [N]


class View(NamedTuple):
    """The terms that formulas share: log-ratios, and the advantages as costs."""

    rows: Rows
    logp: torch.Tensor  # [B, L], the leaf
    x: torch.Tensor  # [B, L], the log-ratio
    cost: torch.Tensor  # [B, 1], -A
    bad: torch.Tensor  # [B, 1] bool, A < 0
    tokens: torch.Tensor  # [B, 1], how many are valid

    def ratio(self) -> torch.Tensor:
        return self.x.exp()

    def fixed_ratio(self) -> torch.Tensor:
        return self.x.detach().exp()

    def of_row(self, positive: float, negative: float) -> torch.Tensor:
        """A number for each sign of A, ``[B, 1]``."""
        return torch.where(self.bad, negative, positive)

    def added(self, values: torch.Tensor) -> torch.Tensor:
        return (values * self.rows.mask).sum(-1, keepdim=True)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return self.added(values) / self.tokens


def clipped(
    view: View, ratio: torch.Tensor, low: Any = 0.8, high: Any = 1.2, dual: float = INF, *, cost: Any = None
) -> torch.Tensor:
    """PPO's minimum, and with ``dual`` at most that multiple of the cost for A < 0."""
    cost = view.cost if cost is None else cost
    loss = torch.maximum(ratio * cost, ratio.clamp(low, high) * cost)
    return loss if dual == INF else torch.minimum(loss, torch.where(view.bad, dual * cost, INF))


def score(view: View, factor: torch.Tensor | float = 1.0) -> torch.Tensor:
    return factor * view.cost * view.logp


def bounded(view: View, dual: float) -> torch.Tensor:
    return clipped(view, view.ratio(), view.rows.low, view.rows.high, dual)


def ce_gppo(view: View) -> torch.Tensor:
    """The factor that stays beyond a bound, times a ratio of value 1 that has the gradient."""
    r = view.fixed_ratio()
    kept = torch.where(view.bad, torch.where(r < 0.8, 0.25 * 0.8, r), r.clamp(max=1.2))
    loss = kept * view.cost * torch.exp(view.x - view.x.detach())
    return torch.minimum(loss, torch.where(view.bad, 3.0 * view.cost, INF))


def aspo(view: View) -> torch.Tensor:
    r = view.ratio()
    below = r.clamp(max=1.2)
    flipped = torch.where(view.bad, r.clamp(min=0.8), below / below.detach().square())
    return torch.where(flipped.detach() > 3, 3 * view.cost * view.logp, flipped * view.cost)


def sapo(view: View) -> torch.Tensor:
    tau = view.of_row(1.0, 1.05)
    return (4 / tau * view.cost) * torch.sigmoid(tau * (view.ratio() - 1))


def spo(view: View) -> torch.Tensor:
    r = view.ratio()
    return r * view.cost + (r - 1).square() * (view.cost.abs() / 0.4)


def to_target(view: View) -> torch.Tensor:
    return (view.ratio() - view.rows.target[:, None]).abs() * view.cost.abs()


def nft(view: View) -> torch.Tensor:
    q = view.rows.target[:, None]
    implied = (1 - q * view.ratio()) / (1 - q)
    passed = implied + (implied.clamp(min=1) - implied).detach()
    return torch.where(view.bad, passed.log(), view.x) * -view.cost.abs()


def quadratic(view: View) -> torch.Tensor:
    return view.cost * view.logp + 0.05 * view.x.square()


def mdpo(view: View) -> torch.Tensor:
    r = view.ratio()
    return r * view.cost + 0.1 * (r * view.x - r + 1)


def ppo_penalty(view: View) -> torch.Tensor:
    r = view.ratio()
    return r * view.cost + 0.1 * (r - 1 - view.x)


def kl_cov(view: View) -> torch.Tensor:
    return view.ratio() * view.cost + view.x.abs() * view.rows.penalty_mask


def gspo(view: View, low: float = 3e-4, high: float = 4e-4) -> torch.Tensor:
    return clipped(view, view.mean(view.x).exp(), 1 - low, 1 + high)


def gspo_token(view: View) -> torch.Tensor:
    z = view.mean(view.x.detach()) + (view.logp - view.logp.detach())
    return clipped(view, z.exp(), 1 - 3e-4, 1 + 4e-4)


def gmpo(view: View) -> torch.Tensor:
    x = view.x.clamp(view.of_row(-INF, -0.4), view.of_row(0.4, INF))
    return view.mean(x).exp() * view.cost


def topr(view: View) -> torch.Tensor:
    product = view.added(view.x.detach()).exp()
    return score(view, torch.where(view.bad, product.clamp(max=1), 1.0))


def vespo(view: View) -> torch.Tensor:
    log = view.added(view.x.detach())
    k, lam = view.of_row(2.0, 3.0), view.of_row(3.0, 2.0)
    return score(view, (lam + k * log - lam * log.exp()).exp())


def a_lol(view: View) -> torch.Tensor:
    product = view.added(view.x.detach()).exp()
    return score(view, product.clamp(0.1, 1.9) * ~view.bad)


def rec(view: View) -> torch.Tensor:
    r = view.fixed_ratio()
    return score(view, (r >= view.of_row(-INF, 0.8)) & (r <= view.of_row(1.2, INF)))


def rolled_back(u: torch.Tensor, budget: float, slope: torch.Tensor | float) -> torch.Tensor:
    size = u.abs()
    return torch.where(size <= budget, u, u.sign() * ((slope + 1) * budget - slope * size).clamp(min=0))


def fiberpo(view: View) -> torch.Tensor:
    """Two channels: the mean of each row within its budget, and the clipped rest of each token."""
    z = torch.zeros_like(view.x)
    for sign, part in ((1, view.x.clamp(min=0)), (-1, (-view.x).clamp(min=0))):
        mean = view.mean(part)
        z = z + sign * (rolled_back(mean, 0.2, view.tokens) + (part - mean).clamp(-0.2, 0.2))
    return z.exp() * view.cost


def fiberpo_domain(view: View) -> torch.Tensor:
    z = torch.zeros_like(view.x)
    for sign, part in ((1, view.x.clamp(min=0)), (-1, (-view.x).clamp(min=0))):
        sums, base, parent = view.added(part), torch.zeros_like(view.cost), torch.zeros_like(view.cost)
        for rows, budget in ((DOMAIN, 0.1), (GROUP, 0.1), (1, 0.2)):  # the coarsest first
            mean = sums.view(-1, rows).sum(-1) / view.tokens.view(-1, rows).sum(-1)
            mean = mean.repeat_interleave(rows)[:, None]
            base, parent = base + rolled_back(mean - parent, budget, 1.0), mean
        z = z + sign * (base + (part - parent).clamp(-0.2, 0.2))
    return z.exp() * view.cost


def steps(view: View) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean log-ratio of each step, how much each counts, and its cost, all ``[N]``."""
    rows, row = view.rows, view.rows.row_of_step
    zeros = view.x.new_zeros(row.numel())
    tokens = zeros.index_add(0, rows.step, rows.mask.flatten().to(view.x.dtype))
    mean = zeros.index_add(0, rows.step, (view.x * rows.mask).flatten()) / tokens.clamp(min=1)
    return mean, tokens * rows.weights[row], view.cost[row, 0]


def step_gspo(view: View) -> torch.Tensor:
    mean, weight, cost = steps(view)
    return (clipped(view, mean.exp(), 1 - 3e-4, 1 + 4e-4, cost=cost) * weight).sum()


def two_scale(view: View) -> torch.Tensor:
    mean, weight, cost = steps(view)
    bad, whole = cost > 0, view.mean(view.x)[view.rows.row_of_step, 0]

    def pessimistic(u: torch.Tensor, epsilon: float) -> torch.Tensor:
        return torch.where(bad, u.clamp(min=math.log1p(-epsilon)), u.clamp(max=math.log1p(epsilon)))

    return ((pessimistic(mean - whole, 0.2) + pessimistic(whole, 0.1)).exp() * cost * weight).sum()


def apc(view: View) -> torch.Tensor:
    deviation = view.ratio() - 1
    size = deviation.abs()
    excess = (view.added(size) - 0.1 * view.tokens).clamp(min=0)
    return (1 + deviation.detach().sign() * (size - excess).clamp(min=0)) * view.cost


def p3o(view: View) -> torch.Tensor:
    joint = view.added(view.x.detach()).view(-1, 2).sum(-1).exp().clamp(0.8, 1.2)
    return score(view, joint.repeat_interleave(2)[:, None])


def hispo(view: View) -> torch.Tensor:
    rows = view.rows
    discrepancy = rows.old_logp - rows.rollout_logp
    agrees = (discrepancy.exp() - 1).abs() < 0.5
    sequence = (view.mean(discrepancy).exp() - 1).abs() < 0.1
    return clipped(view, (view.logp - rows.rollout_logp).exp(), 0.8, 1.28, 3.0) * (agrees & sequence)


def opsm(view: View) -> torch.Tensor:
    drift = view.mean(view.rows.rollout_logp - view.logp.detach())
    return clipped(view, view.ratio(), cost=view.cost * ~(view.bad & (drift > 0.5)))


def importance(view: View) -> torch.Tensor:
    return (view.rows.old_logp - view.rows.rollout_logp).exp()


def icepop(view: View) -> torch.Tensor:
    w = importance(view)
    return clipped(view, view.ratio()) * torch.where((w >= 0.5) & (w <= 5), w, 0.0)


def mis(view: View) -> torch.Tensor:
    w = view.added(view.rows.old_logp - view.rows.rollout_logp).exp()
    return clipped(view, view.ratio(), cost=view.cost * torch.where(w <= 3, w, 0.0))


def dppo_tv(view: View) -> torch.Tensor:
    moved = view.logp.detach().exp() - view.rows.old_logp.exp()
    kept = moved * view.of_row(1.0, -1.0) <= 0.15
    return score(view, view.fixed_ratio().clamp(max=20) * kept)


def dppo_kl(view: View) -> torch.Tensor:
    x, p, q = view.x.detach(), view.logp.detach().exp(), view.rows.old_logp.exp()
    divergence = (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8)) - q * x
    kept = (divergence <= 0.05) | ((p - q) * view.of_row(1.0, -1.0) <= 0)
    return score(view, x.exp().clamp(max=20) * kept)


FORMULAS: dict[str, Callable[[View], torch.Tensor]] = {
    "a_lol": a_lol,
    "apc": apc,
    "archer_clip": lambda view: bounded(view, 3.0),
    "aspo": aspo,
    "bapo": lambda view: bounded(view, 3.0),
    "bpo": to_target,
    "capo": lambda view: clipped(view, view.ratio()) * view.rows.token_mask,
    "ce_gppo": ce_gppo,
    "cispo": lambda view: score(view, view.fixed_ratio().clamp(max=5)),
    "clip_cov": lambda view: clipped(view, view.ratio()) * view.rows.token_mask,
    "dapo": lambda view: clipped(view, view.ratio(), 0.8, 1.28),
    "dcpo_clip": lambda view: bounded(view, 10.0),
    "decoupled": lambda view: clipped(view, view.ratio()) * importance(view),
    "dppo_kl": dppo_kl,
    "dppo_tv": dppo_tv,
    "dro": quadratic,
    "fiberpo": fiberpo,
    "fiberpo_domain": fiberpo_domain,
    "fipo": lambda view: clipped(view, view.ratio(), 0.8, 1.28, 10.0) * (view.rows.token_weight * view.rows.token_mask),
    "gbpo": to_target,
    "gmpo": gmpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "hapo_clip": lambda view: bounded(view, 3.0),
    "hispo": hispo,
    "icepop": icepop,
    "kimi": quadratic,
    "kl_cov": kl_cov,
    "luspo": lambda view: gspo(view, 2e-3, 2.5e-3),
    "m2po": lambda view: view.ratio() * view.cost * view.rows.token_mask,
    "m2po_clip": lambda view: bounded(view, INF),
    "mdpo": mdpo,
    "mis": mis,
    "nft": nft,
    "opmd": lambda view: score(view, 0.5),
    "opsm": opsm,
    "p3o": p3o,
    "ppo_clip": lambda view: clipped(view, view.ratio()),
    "ppo_penalty": ppo_penalty,
    "rec": rec,
    "rec_ring": lambda view: score(view, view.rows.token_mask),
    "reinforce": score,
    "sapo": sapo,
    "spo": spo,
    "step_gspo": step_gspo,
    "tis": lambda view: clipped(view, view.ratio()) * importance(view).clamp(max=2),
    "topr": topr,
    "triplet_clip": lambda view: clipped(view, view.ratio(), 0.8, 1.28, 3.0),
    "two_scale": two_scale,
    "vespo": vespo,
}


def eager(name: str, rows: Rows, make: Callable[[Rows, torch.Tensor], Rows] | None = None) -> Run:
    """``make``: makes inputs of the preset from its log-probabilities in every call."""
    formula, advantages = FORMULAS[name], rows.advantages[:, None]

    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        given = rows if make is None else make(rows, leaf.detach())
        tokens = given.mask.sum(-1, keepdim=True)
        view = View(given, leaf, leaf - given.old_logp, -advantages, advantages < 0, tokens)
        loss = formula(view)
        logged(LOGGED, view.x, advantages, given.mask)
        if loss.dim() == 0:
            return loss
        of_rows = loss * tokens if loss.shape[1] == 1 else view.added(loss)
        return (of_rows[:, 0] * given.weights).sum()

    return differentiated(rows.logp, loss_of)


@torch.no_grad()
def covariance(rows: Rows, logp: torch.Tensor) -> torch.Tensor:
    """The covariance of advantage and log-probability over the valid tokens, which come first; -inf elsewhere."""
    tokens = rows.mask.sum()
    advantages = rows.advantages[:, None]
    mean = (advantages[:, 0] * rows.mask.sum(-1)).sum() / tokens
    product = (advantages - mean) * (logp - (logp * rows.mask).sum() / tokens)
    return product.masked_fill_(~rows.mask, -INF)


def with_penalty_mask(rows: Rows, logp: torch.Tensor) -> Rows:
    found = covariance(rows, logp).flatten()
    highest = found.topk(max(1, int(2e-4 * rows.mask.sum().item())), sorted=False).indices
    paying = torch.zeros_like(rows.mask).flatten().index_fill_(0, highest, True)
    return rows._replace(penalty_mask=paying.view(logp.shape))


@torch.no_grad()
def with_token_mask(rows: Rows, logp: torch.Tensor) -> Rows:
    found, ratio, advantages = covariance(rows, logp), (logp - rows.old_logp).exp(), rows.advantages[:, None]
    clipped_away = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    eligible = ((found > 1) & (found < 5) & ~clipped_away).flatten().nonzero()[:, 0]
    dropped = eligible[torch.randperm(len(eligible))[: max(1, int(2e-4 * rows.mask.sum().item()))]]
    kept = torch.ones_like(rows.mask).flatten().index_fill_(0, dropped, False)
    return rows._replace(token_mask=kept.view(logp.shape))


# ----------------------------------------------------------------------------------------------------------------- verl


class Verl(NamedTuple):
    """A loss of verl's registry with the fields of its ActorConfig and of its policy_loss that make it the preset."""

    name: str
    fields: Mapping[str, float] = MappingProxyType({})
    policy_loss: Mapping[str, float] = MappingProxyType({})
    rollout: tuple[str, str] | None = None  # level and threshold of importance weights, made before the loss
    alike: bool = True


def _bounds(low: float, high: float, dual: float = 3.0) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}


VANILLA = _bounds(0.2, 0.2, 1e6)
VERL = {
    "reinforce, on policy": Verl("gpg"),  # it reads no old policy
    "ppo_clip": Verl("vanilla", VANILLA),
    "dapo": Verl("vanilla", _bounds(0.2, 0.28, 1e6)),
    "triplet_clip": Verl("vanilla", _bounds(0.2, 0.28)),
    "cispo": Verl("cispo", _bounds(1.0, 4.0)),
    "sapo": Verl("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gspo": Verl("gspo", _bounds(3e-4, 4e-4)),  # verl's is the token form: the same where a row has one advantage
    "gspo_token": Verl("gspo", _bounds(3e-4, 4e-4)),
    "luspo": Verl("gspo", _bounds(2e-3, 2.5e-3)),
    "gmpo": Verl("geo_mean", _bounds(0.4, 0.4)),
    "dppo_tv": Verl("dppo_tv", _bounds(0.15, 0.15, 20.0)),
    "dppo_kl": Verl("dppo_kl", _bounds(0.05, 0.05, 20.0)),
    "dro": Verl("dro", policy_loss={"dro_beta": 0.1}),
    "kimi": Verl("dro", policy_loss={"dro_beta": 0.1}),  # the same formula, tau for beta
    "decoupled": Verl("vanilla", VANILLA, rollout=("token", "1e9")),
    "tis": Verl("vanilla", VANILLA, rollout=("token", "2.0")),
    "icepop": Verl("vanilla", VANILLA, rollout=("token", "0.5_5.0")),
    "mis": Verl("vanilla", VANILLA, rollout=("sequence", "1e-30_3.0")),
    "clip_cov, mask made": Verl("clip_cov", VANILLA, alike=False),  # other tokens are drawn
    "kl_cov, mask made": Verl("kl_cov", policy_loss={"ppo_kl_coef": 1.0}),
}


def verl(peer: Verl, rows: Rows, mode: str) -> Run:
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    given: dict[str, torch.Tensor] = {}
    if peer.rollout is not None:
        drift = rows.old_logp - rows.rollout_logp
        given["rollout_is_weights"], _ = compute_rollout_correction_weights(drift, rows.mask.long(), *peer.rollout)
    return differentiated(rows.logp, verl_loss(peer.name, rows, mode, peer.fields, peer.policy_loss, **given))
