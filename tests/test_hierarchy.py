"""Gates on several levels at once: against naive loops, worked numbers, theorems and promises."""

import functools
import itertools
import math

import pytest
import torch

import hpo_core as hpo
from hpo_core import gates
from hpo_core.gates import (
    Aggregate,
    Clip,
    Drop,
    Head,
    Identity,
    Level,
    LogClip,
    RatioGate,
    Rollback,
    Routing,
    Tanh,
    Unit,
)

BACKENDS = ("reference", "cpu")
SMALL = LogClip((-0.05, -0.08), (0.06, 0.04))
STEP, GROUP, DOMAIN = Unit.STEP, Unit.GROUP, Unit.DOMAIN


def levels(*gates_and_units, routing=Routing.THROUGH):
    return tuple(Level(gate, routing, unit) for gate, unit in gates_and_units)


BUDGETS = Rollback((0.02, 0.015))
GENTLE = Rollback((0.02, 0.03), 2.0)
FOUR = ((Clip((0.0, 0.9), (1.05, 1.2)), STEP), (BUDGETS, Unit.TRAJECTORY), (Tanh(0.02), GROUP), (GENTLE, DOMAIN))
GATES = {
    "fiberpo": gates.fiberpo(0.05, (0.03, 0.02)),
    "fiberpo_domain": gates.fiberpo_domain(0.05, 0.03, 0.01, 0.01),
    "fiberpo_domain, stopped": gates.fiberpo_domain(0.05, 0.03, 0.01, 0.01, routing=Routing.STOPPED),
    "step_gspo": gates.step_gspo(0.02, 0.03),
    "two_scale": gates.two_scale((0.05, 0.04), (0.01, 0.02)),
    "two_scale, token": gates.two_scale((0.05, 0.04), (0.01, 0.02), 0.05),
    **{
        f"four levels, {routing.name.lower()}, {'split' if split else 'whole'}": RatioGate(
            "four", SMALL, levels(*FOUR, routing=routing), split=split
        )
        for routing, split in itertools.product(Routing, (False, True))
    },
    "mixed routing": RatioGate(
        "mixed",
        Identity(),
        (
            Level(BUDGETS, Routing.SELF, STEP),
            Level(SMALL, Routing.STOPPED),
            Level(GENTLE, Routing.THROUGH, GROUP),
            Level(Rollback((0.01, 0.01), 0.0), Routing.SELF, DOMAIN),
        ),
        split=True,
    ),
    "sums": RatioGate("sums", Drop(), (Level(LogClip((-0.6, -0.5), (0.5, 0.7)), aggregate=Aggregate.SUM),)),
    "dropped, self": RatioGate("dropped", Drop(), levels(*FOUR[:2], routing=Routing.SELF)),
    "zeroed at once": RatioGate("zeroed", Clip((0.9, 0.95), (1.1, 1.05)), (Level(Rollback((0.01, 0.02), math.inf)),)),
    "score": RatioGate("score", SMALL, levels(*FOUR), Head.SCORE),
}
EXACT = {name: gate for name, gate in GATES.items() if gate.first_order is gates.FirstOrder.EXACT}
every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


class Example:
    """A ragged batch with every level: rows of several steps, trajectories of several rows, groups, domains."""

    def __init__(self, seed=0, lengths=(5, 0, 9, 1, 7, 12, 3), spread=0.1, masked=True, several=True, gaps=True):
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.tensor(lengths)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        tokens, rows = int(offsets[-1]) + 3, len(lengths)
        steps = []
        for begin, end in zip(offsets.tolist(), offsets[1:].tolist(), strict=False):
            while begin < end:
                begin += int(torch.randint(0, 2, (), generator=draw)) if gaps else 0
                size = int(torch.randint(1, 5, (), generator=draw))
                if begin < end:
                    steps.append((begin, min(begin + size, end)))
                begin += size
        trajectory = torch.randint(0, max(1, rows // 2), (rows,), generator=draw) if several else torch.arange(rows)
        self.mask = torch.rand(tokens, generator=draw) < (0.8 if masked else 2.0)
        self.batch = hpo.PackedBatch(
            offsets, self.mask, steps=torch.tensor(steps), trajectory_ids=trajectory,
            group_ids=trajectory // 2, domain_ids=trajectory // 4,
        )  # fmt: skip
        self.old_logp = -torch.rand(tokens, generator=draw) * 3 - 0.1
        self.logp = self.old_logp + spread * torch.randn(tokens, generator=draw)
        self.advantages = torch.randn(rows, generator=draw)
        self.token_advantages = torch.randn(tokens, generator=draw)
        self.weights = torch.rand(rows, generator=draw) + 0.1

    def covered(self, gate):
        """Valid tokens: in a row, not masked, and in a step where steps are a level."""
        rows = torch.zeros(self.logp.numel(), dtype=torch.bool)
        rows[: int(self.batch.cu_seqlens[-1])] = True
        inside = self.batch.step_of_token() >= 0 if any(level.unit is STEP for level in gate.levels) else rows
        return rows & self.mask & inside

    def row(self):
        row = torch.searchsorted(self.batch.cu_seqlens[1:], torch.arange(self.logp.numel()), right=True)
        return row.clamp(max=self.lengths.numel() - 1)

    def segment(self, unit):
        if unit is STEP:
            return self.batch.step_of_token()
        ids = {Unit.TRAJECTORY: self.batch.trajectory_ids, GROUP: self.batch.group_ids, DOMAIN: self.batch.domain_ids}
        return ids[unit][self.row()]

    def run(self, gate, backend, **keywords):
        fn = functools.partial(hpo.policy_loss_and_grad, weights=self.weights, backend=backend)
        inputs = {"logp": self.logp, "old_logp": self.old_logp, "advantages": self.advantages, "batch": self.batch}
        inputs |= keywords
        if inputs["advantages"].shape == self.logp.shape:
            inputs.setdefault("advantage_level", "token")
        else:
            inputs.setdefault("advantage_level", "row")
        if backend == "reference":
            inputs = {
                name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                for name, value in inputs.items()
            }
        return fn(**inputs, gate=gate)


def straight(value, derivative_of):
    """``value`` with the derivative of another."""
    return value.detach() + derivative_of - derivative_of.detach()


def naive_gate(gate, u, sign, channel, n):
    """One gated residual, written out from its definition."""
    if isinstance(gate, Clip):
        gate = LogClip(*(tuple(math.log(b) if b else -math.inf for b in pair) for pair in (gate.low, gate.high)))
    if isinstance(gate, LogClip):
        low, high = gate.low[sign], gate.high[sign]
        return u if low <= u <= high else torch.full_like(u, low if u < low else high)
    if isinstance(gate, Rollback):
        budget, slope = gate.budgets[channel], n if gate.slope is None else gate.slope
        towards = 1.0 if u > 0 else -1.0
        if abs(u) <= budget:
            return u
        if slope == 0:
            return torch.full_like(u, towards * budget)
        if abs(u) < (1 + 1 / slope) * budget and slope < math.inf:
            return towards * (slope + 1) * budget - slope * u
        return torch.zeros_like(u)
    if isinstance(gate, Tanh):
        return gate.bound * torch.tanh(u / gate.bound)
    return torch.zeros_like(u) if isinstance(gate, Drop) else u


def naive(example, gate, advantages=None):
    """Loss and gradient in float64 from loops over tokens and segments; knows nothing of the package's own code."""
    logp = example.logp.double().requires_grad_()
    old_logp, row = example.old_logp.double(), example.row()
    advantages = example.advantages.double()[row] if advantages is None else advantages.double()
    valid = [t for t in range(logp.numel()) if example.covered(gate)[t]]
    x = {t: logp[t] - old_logp[t] for t in valid}
    channels = {t: {0: x[t]} for t in valid}
    if gate.split:
        zero = torch.zeros((), dtype=torch.float64)
        channels = {t: {0: x[t] if x[t] >= 0 else zero, 1: zero if x[t] >= 0 else -x[t]} for t in valid}
    segments = [example.segment(level.unit).tolist() for level in gate.levels]
    loss = torch.zeros((), dtype=torch.float64)
    for t in valid:
        sign, z = int(advantages[t] < 0), torch.zeros((), dtype=torch.float64)
        for channel in channels[t]:
            values, sizes = [channels[t][channel]], [1]
            for level, segment in zip(gate.levels, segments, strict=True):
                members = [channels[u][channel] for u in valid if segment[u] == segment[t]]
                value = torch.stack(members).sum() / (len(members) if level.aggregate is Aggregate.MEAN else 1)
                if level.routing is not Routing.THROUGH:
                    value = value.detach()
                if level.routing is Routing.SELF:
                    value = straight(value, channels[t][channel])
                values.append(value)
                sizes.append(len(members))
            values.append(torch.zeros((), dtype=torch.float64))
            for k, each in enumerate([gate.token, *(level.gate for level in gate.levels)]):
                gated = naive_gate(each, values[k] - values[k + 1], sign, channel, sizes[k])
                z = z + (1 if channel == 0 else -1) * gated
        ratio = torch.exp(z)
        objective = ratio if gate.head is Head.LINEAR else ratio.detach() * logp[t]
        loss = loss - example.weights[row[t]].double() * advantages[t] * objective
    (grad,) = torch.autograd.grad(loss, logp) if loss.requires_grad else (torch.zeros_like(logp),)
    return loss.detach(), grad


def clear_of_branches(example, gate):
    """Whether float32 and float64 take the same branch of every gate: the loss hardly moves with the log-ratios."""
    runs = [example.run(gate, "reference", logp=example.logp.double() + shift).grad for shift in (0.0, 2e-6, -2e-6)]
    size = runs[0].abs().max().clamp(min=1e-6)
    return all(bool((run - runs[0]).abs().max() < 1e-3 * size) for run in runs[1:])


@every_gate
def test_the_definition_is_the_naive_loop(gate):
    for seed in range(6):
        example = Example(seed)
        for advantages in (None, example.token_advantages):
            given = {} if advantages is None else {"advantages": advantages}
            out, (loss, grad) = example.run(gate, "reference", **given), naive(example, gate, advantages)
            torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(out.grad, grad, rtol=1e-11, atol=1e-12)


@every_gate
def test_cpu_is_the_definition(gate):
    seen = 0
    for seed in range(60):
        example = Example(seed, lengths=((5, 0, 9, 1, 7, 12, 3), (40, 1, 600), (2, 2, 2, 2, 1))[seed % 3])
        keywords = {}
        if seed % 2:
            keywords["advantages"] = example.token_advantages
        if seed % 4 == 2:
            keywords |= {"token_mask": example.logp > -2, "token_weight": example.weights[example.row()]}
        if seed % 5 == 3:
            keywords |= {"ref_logp": example.old_logp + 0.05, "kl": hpo.kl.k3(0.1), "entropy": -example.logp}
        if not clear_of_branches(example, gate):
            continue
        seen += 1
        out, expected = example.run(gate, "cpu", **keywords), example.run(gate, "reference", **keywords)
        terms = (example.weights[example.row()] * example.covered(gate)).double()
        terms = terms * keywords.get("advantages", example.advantages[example.row()]).abs()
        assert (out.loss.double() - expected.loss).abs() <= 1e-6 * terms.sum()
        assert (out.grad.double() - expected.grad).abs().max() <= 1e-5 * max(expected.grad.abs().max(), terms.max())
        torch.testing.assert_close(out.metrics.vector, expected.metrics.vector, rtol=1e-5, atol=1e-5)
    assert seen > 20
