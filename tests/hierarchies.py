"""Gates on several levels, the loops that define them, and a step whose segments several processes share."""

import itertools
import math
from typing import NamedTuple

import torch

import hpo_core as hpo
from hpo_core import gates
from hpo_core.backends import resolve
from hpo_core.gates import (
    Aggregate,
    Clip,
    Drop,
    Excess,
    GateInputs,
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
from hpo_core.specs import PolicyLossInputs

STEP, TRAJECTORY, GROUP, DOMAIN = Unit.STEP, Unit.TRAJECTORY, Unit.GROUP, Unit.DOMAIN


def levels(*gates_and_units, routing=Routing.THROUGH):
    return tuple(Level(gate, routing, unit) for gate, unit in gates_and_units)


AGGREGATES = {  # of the finest level, and of the others
    "mean exp": (Aggregate.LOG_MEAN_EXP, Aggregate.LOG_MEAN_EXP),
    "balanced": (Aggregate.MEAN, Aggregate.BALANCED),
    "balanced mean exp": (Aggregate.LOG_MEAN_EXP, Aggregate.BALANCED),
}


def aggregated(name, gates_and_units, routing):
    finest, others = AGGREGATES[name]
    return tuple(Level(gate, routing, unit, others if k else finest) for k, (gate, unit) in enumerate(gates_and_units))


SMALL = LogClip((-0.05, -0.08), (0.06, 0.04))
BUDGETS = Rollback((0.02, 0.015))
GENTLE = Rollback((0.02, 0.03), 2.0)
FOUR = ((Clip((0.0, 0.9), (1.05, 1.2)), STEP), (BUDGETS, TRAJECTORY), (Tanh(0.02), GROUP), (GENTLE, DOMAIN))
GATES = {
    "fiberpo": gates.fiberpo(0.05, (0.03, 0.02)),
    "fiberpo_domain": gates.reconstructed.fiberpo_domain(0.05, 0.03, 0.01, 0.01),
    "fiberpo_domain, stopped": gates.reconstructed.fiberpo_domain(0.05, 0.03, 0.01, 0.01, routing=Routing.STOPPED),
    "gspo": gates.gspo(0.02, 0.03),
    "step_gspo": gates.step_gspo(0.02, 0.03),
    "two_scale": gates.reconstructed.two_scale((0.05, 0.04), (0.01, 0.02)),
    "two_scale, token": gates.reconstructed.two_scale((0.05, 0.04), (0.01, 0.02), 0.05),
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
    **{
        f"censored, {unit.name.lower()}": RatioGate(
            "censored", Drop(), (Level(Excess(0.07), unit=unit, aggregate=Aggregate.SUM),), Head.CENSORED
        )
        for unit in (STEP, TRAJECTORY, GROUP)
    },
    "p3o": gates.reconstructed.p3o(),
    **{
        f"{aggregates}, {depth} levels, {routing.name.lower()}{', split' if split else ''}": RatioGate(
            aggregates, SMALL, aggregated(aggregates, FOUR[-depth:], routing), split=split
        )
        for aggregates, depth, routing, split in (
            ("mean exp", 1, Routing.THROUGH, False),
            ("mean exp", 2, Routing.SELF, True),
            ("mean exp", 3, Routing.STOPPED, False),
            ("mean exp", 4, Routing.THROUGH, True),
            ("balanced", 2, Routing.THROUGH, False),
            ("balanced", 2, Routing.STOPPED, True),
            ("balanced", 3, Routing.SELF, False),
            ("balanced", 4, Routing.THROUGH, True),
            ("balanced mean exp", 3, Routing.THROUGH, True),
        )
    },
    "balanced, mixed routing": RatioGate(
        "balanced",
        Identity(),
        (
            Level(Tanh(0.05), Routing.STOPPED, STEP, Aggregate.SUM),
            Level(BUDGETS, Routing.THROUGH, aggregate=Aggregate.BALANCED),
            Level(GENTLE, Routing.SELF, GROUP, Aggregate.MEAN),
            Level(Tanh(0.02), Routing.THROUGH, DOMAIN, Aggregate.BALANCED),
        ),
    ),
    "mean exp, dropped": RatioGate("mean exp", Drop(), aggregated("mean exp", FOUR[1:3], Routing.THROUGH)),
    "mean exp, score": RatioGate("mean exp", SMALL, aggregated("mean exp", FOUR, Routing.THROUGH), Head.SCORE),
    "balanced, score": RatioGate("balanced", SMALL, aggregated("balanced", FOUR, Routing.SELF), Head.SCORE),
    "balanced, log": RatioGate(
        "balanced", Drop(), aggregated("balanced", FOUR[1:], Routing.THROUGH), Head.LOG, head_numbers=(0.7, 1.3)
    ),
}
SEVEN = torch.tensor([0.30, -0.10, 0.05, -0.40, 0.25, 0.02, -0.05], dtype=torch.float64)  # log-ratios of worked numbers
SEVERAL = {name: GATES[name] for name in ("fiberpo", "fiberpo_domain", "mixed routing", "four levels, through, split")}


# -------------------------------------------------------------------------------------------------------- naive loops


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


def naive_censored(x, t, members, gate):
    """The deviation of a token's ratio from 1, within what the others leave of the budget."""
    spent = sum((torch.exp(x[u]) - 1).abs() for u in members if u != t)
    left = (len(members) * gate.levels[0].gate.budget - spent + 0 * x[t]).clamp(min=0)
    return torch.minimum(torch.maximum(torch.exp(x[t]) - 1, -left), left)


def naive_aggregate(levels, segments, k, t, valid, of_token):
    """The aggregate of the segment of token t at level k, and the segment's size."""
    members = [u for u in valid if segments[k][u] == segments[k][t]]
    values = torch.stack([of_token[u] for u in members])
    if levels[k].aggregate is Aggregate.BALANCED:
        children = {segments[k - 1][u]: u for u in members}
        values = [naive_aggregate(levels, segments, k - 1, u, valid, of_token)[0] for u in children.values()]
        return sum(values) / len(children), len(children)
    if levels[k].aggregate is Aggregate.LOG_MEAN_EXP:
        return torch.logsumexp(values, 0) - math.log(len(members)), len(members)
    return values.sum() / (len(members) if levels[k].aggregate is Aggregate.MEAN else 1), len(members)


def naive(example, gate, advantages=None):
    """Loss and gradient in float64 from loops over tokens and segments; knows nothing of the package's own code."""
    logp = example.logp.double().requires_grad_()
    old_logp, row = example.old_logp.double(), example.row()
    advantages = example.advantages.double()[row] if advantages is None else advantages.double()
    valid = example.covered(gate).nonzero().flatten().tolist()
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
            of_token = {u: channels[u][channel] for u in valid}
            for k, level in enumerate(gate.levels):
                value, size = naive_aggregate(gate.levels, segments, k, t, valid, of_token)
                if level.routing is not Routing.THROUGH:
                    value = value.detach()
                if level.routing is Routing.SELF:
                    value = straight(value, channels[t][channel])
                values.append(value)
                sizes.append(size)
            values.append(torch.zeros((), dtype=torch.float64))
            for k, each in enumerate([gate.token, *(level.gate for level in gate.levels)]):
                gated = naive_gate(each, values[k] - values[k + 1], sign, channel, sizes[k])
                z = z + (1 if channel == 0 else -1) * gated
        ratio = torch.exp(z)
        objective = ratio if gate.head is Head.LINEAR else ratio.detach() * logp[t]
        if gate.head is Head.LOG:
            number = gate.head_numbers[sign]
            objective = logp[t] - number * z.square() / (2 * advantages[t])
        if gate.head is Head.CENSORED:
            objective = 1 + naive_censored(x, t, [u for u in valid if segments[0][u] == segments[0][t]], gate)
        loss = loss - example.weights[row[t]].double() * advantages[t] * objective
    (grad,) = torch.autograd.grad(loss, logp) if loss.requires_grad else (torch.zeros_like(logp),)
    return loss.detach(), grad


def exact_off_branches(example, gate, **keywords):
    """The result of the definition if float32 and float64 take the same branch of every gate, so that the gradient
    hardly moves with the log-ratios; else None."""
    exact = example.run(gate, "reference", **keywords)
    size = exact.grad.abs().max().clamp(min=1e-6)
    for shift in (2e-6, -2e-6):
        moved = example.run(gate, "reference", **keywords, logp=example.logp.double() + shift)
        if not bool((moved.grad - exact.grad).abs().max() < 1e-3 * size):
            return None
    return exact


def assert_the_definition(example, gate, backend, exact, of_loss=1e-6, **keywords):
    """``exact``: what the reference says of the same call."""
    out = example.run(gate, backend, **keywords)
    terms = (example.weights[example.row()] * example.covered(gate)).double()
    terms = terms * keywords.get("advantages", example.advantages[example.row()]).abs()
    assert (out.loss.double() - exact.loss).abs() <= of_loss * terms.sum(), backend
    largest = max(exact.grad.abs().max(), terms.max())
    assert (out.grad.double() - exact.grad).abs().max() <= 1e-5 * largest, backend
    assert not out.grad[~example.covered(gate)].any(), backend
    assert torch.allclose(out.metrics.vector, exact.metrics.vector, rtol=1e-5, atol=1e-5), backend


# -------------------------------------------------------------------------------------------- a step that ranks share


def stopped_group(aggregate=Aggregate.MEAN, split=False):
    own = aggregate if aggregate is Aggregate.LOG_MEAN_EXP else Aggregate.MEAN  # all levels have it or none
    trajectory, group = Level(Tanh(0.05), aggregate=own), Level(Tanh(0.03), Routing.STOPPED, GROUP, aggregate)
    return RatioGate("stopped", LogClip((-0.1, -0.1), (0.15, 0.15)), (trajectory, group), split=split)


LENGTHS = (5, 0, 9, 1, 7, 12, 3, 6)
TRAJECTORIES = (3, 3, -2, 5, 5, 4, 9, 9)  # rows of a trajectory may lie apart, and any integer names one
GROUPS = (0, 0, 0, 4, 4, -1, -1, -1)  # a trajectory in no group is a group by itself, also that with the id 4
DOMAINS = (-1, -1, -1, 7, 7, -1, 7, 7)  # a group in no domain is one by itself, and a trajectory in neither


class Step(NamedTuple):
    """One optimiser step, the same in every process."""

    logp: torch.Tensor
    old_logp: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    batch: hpo.PackedBatch

    @staticmethod
    def make(seed=0):
        draw = torch.Generator().manual_seed(seed)
        tokens, rows = sum(LENGTHS), len(LENGTHS)
        old_logp = -torch.rand(tokens, generator=draw) * 3 - 0.1
        logp = old_logp + 0.1 * torch.randn(tokens, generator=draw)
        mask = torch.rand(tokens, generator=draw) < 0.85
        advantages, weights = torch.randn(rows, generator=draw), torch.rand(rows, generator=draw) + 0.1
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        steps, step_ids = [], []
        for end, length, trajectory in zip(ends, LENGTHS, TRAJECTORIES, strict=True):
            for at in range(end - length, end, 4):  # with gaps
                steps.append((at, min(at + 3, end)))
                # Two ranges to some steps, with one between them, and in rows one after the other.
                own, shared = 10**6 + len(steps), 100 * (trajectory + 5) + (at - end + length) // 9
                step_ids.append(own if at - end + length == 4 else shared)
        ids = {"trajectory_ids": TRAJECTORIES, "group_ids": GROUPS, "domain_ids": DOMAINS}
        batch = hpo.PackedBatch.from_lengths(
            LENGTHS, mask=mask, steps=torch.tensor(steps), step_ids=torch.tensor(step_ids),
            **{name: torch.tensor(each) for name, each in ids.items()},
        )  # fmt: skip
        return Step(logp, old_logp, advantages, weights, batch)

    def whole_rows(self, rows):
        """These rows, and the tokens they take."""
        batch, tokens = self.batch.select(rows)
        part = Step(self.logp[tokens], self.old_logp[tokens], self.advantages[rows], self.weights[rows], batch)
        return part, tokens

    def cut(self, start, stop):
        """The part of every row between these fractions of it, as sequence parallelism cuts rows."""
        begin, length = self.batch.cu_seqlens[:-1], self.batch.cu_seqlens.diff()
        first, last = begin + (length * start).long(), begin + (length * stop).long()
        parts = list(zip(first.tolist(), last.tolist(), strict=True))
        tokens = torch.cat([torch.arange(*each) for each in parts])
        place = {token: at for at, token in enumerate(tokens.tolist())}
        steps, step_ids = [], []
        for (start_of, stop_of), name in zip(self.batch.steps.tolist(), self.batch.step_ids.tolist(), strict=True):
            kept = [place[token] for token in range(start_of, stop_of) if token in place]
            if kept:
                steps.append((kept[0], kept[-1] + 1))
                step_ids.append(name)
        batch = hpo.PackedBatch.from_lengths(
            last - first, mask=self.batch.mask[tokens], trajectory_ids=self.batch.trajectory_ids,
            group_ids=self.batch.group_ids, domain_ids=self.batch.domain_ids,
            steps=torch.tensor(steps, dtype=torch.int64).reshape(-1, 2),
            step_ids=torch.tensor(step_ids, dtype=torch.int64),
        )  # fmt: skip
        return Step(self.logp[tokens], self.old_logp[tokens], self.advantages, self.weights, batch), tokens

    def run(self, gate, backend, **keywords):
        reals = {name: getattr(self, name) for name in ("logp", "old_logp", "advantages", "weights")}
        if backend == "reference":
            reals = {name: values.double() for name, values in reals.items()}
        arguments = {"batch": self.batch, "advantage_level": "row", **reals, **keywords}
        if "aggregates" in arguments:
            arguments["gate_inputs"] = GateInputs(aggregates=arguments.pop("aggregates"))
        return hpo.policy_loss_and_grad(gate=gate, backend=backend, **arguments)


# ------------------------------------------------------------------------------------------------------ the op itself


def inputs_of(example, gate):
    """The arguments of the op, which checks nothing, from an example."""
    hierarchy = example.batch.hierarchy(tuple(level.unit for level in gate.levels))
    return PolicyLossInputs(
        example.logp, example.old_logp, example.advantages, example.weights, example.batch.cu_seqlens,
        example.batch.mask, leaf_begin=hierarchy.begin, leaf_end=hierarchy.end, leaf_row=hierarchy.row,
        ancestors=hierarchy.ancestors,
    )  # fmt: skip


def index_inputs(example, gate):
    """The inputs that name places in memory."""
    inputs = inputs_of(example, gate)._asdict()
    return {name: inputs[name] for name in ("cu_seqlens", "leaf_begin", "leaf_end", "leaf_row", "ancestors")}


def raw(example, gate, backend, exchange=None, want_grad=True, **replaced):
    """Loss, metrics, gradient and the loss of every token, of the op with some of its inputs replaced."""
    inputs = inputs_of(example, gate)._replace(**replaced)
    return resolve("gates", inputs.logp, backend).policy_loss(inputs, gate.spec(), want_grad, True, exchange)
