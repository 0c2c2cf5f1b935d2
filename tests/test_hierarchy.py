"""Gates on several levels at once: against naive loops, worked numbers, theorems and promises."""

import functools
import itertools
import math
import sys

import pytest
import torch

import hpo_core as hpo
from hpo_core import gates
from hpo_core.gates import (
    Action,
    Aggregate,
    Channel,
    Clip,
    Correction,
    Drop,
    Excess,
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

SMALL = LogClip((-0.05, -0.08), (0.06, 0.04))
STEP, GROUP, DOMAIN = Unit.STEP, Unit.GROUP, Unit.DOMAIN


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


BUDGETS = Rollback((0.02, 0.015))
GENTLE = Rollback((0.02, 0.03), 2.0)
FOUR = ((Clip((0.0, 0.9), (1.05, 1.2)), STEP), (BUDGETS, Unit.TRAJECTORY), (Tanh(0.02), GROUP), (GENTLE, DOMAIN))
GATES = {
    "fiberpo": gates.fiberpo(0.05, (0.03, 0.02)),
    "fiberpo_domain": gates.reconstructed.fiberpo_domain(0.05, 0.03, 0.01, 0.01),
    "fiberpo_domain, stopped": gates.reconstructed.fiberpo_domain(0.05, 0.03, 0.01, 0.01, routing=Routing.STOPPED),
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
        for unit in (STEP, Unit.TRAJECTORY, GROUP)
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


def naive_censored(x, t, members, gate):
    """The deviation of a token's ratio from 1, within what the others leave of the budget."""
    spent = sum((torch.exp(x[u]) - 1).abs() for u in members if u != t)
    left = (len(members) * gate.levels[0].gate.budget - spent + 0 * x[t]).clamp(min=0)
    return torch.minimum(torch.maximum(torch.exp(x[t]) - 1, -left), left)


def naive_aggregate(levels, segments, k, t, valid, of_token):
    """That of the segment of token t at level k, and the segment's size."""
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


def assert_the_definition(example, gate, backend, **keywords):
    out, expected = example.run(gate, backend, **keywords), example.run(gate, "reference", **keywords)
    terms = (example.weights[example.row()] * example.covered(gate)).double()
    terms = terms * keywords.get("advantages", example.advantages[example.row()]).abs()
    assert (out.loss.double() - expected.loss).abs() <= 1e-6 * terms.sum()
    assert (out.grad.double() - expected.grad).abs().max() <= 1e-5 * max(expected.grad.abs().max(), terms.max())
    assert bool((out.grad[~example.covered(gate)] == 0).all())
    torch.testing.assert_close(out.metrics.vector, expected.metrics.vector, rtol=1e-5, atol=1e-5)


@every_gate
def test_every_backend_is_the_definition(gate, backend):
    seen, seeds = 0, {"cpu": 60, "triton": 4}.get(backend, 15)  # interpreted Triton is slow
    for seed in range(seeds):
        example = Example(seed, lengths=((5, 0, 9, 1, 7, 12, 3), (40, 1, 600), (2, 2, 2, 2, 1))[seed % 3])
        keywords = {}
        if seed % 2:
            keywords["advantages"] = example.token_advantages
        if seed % 4 == 2:
            keywords |= {"token_mask": example.logp > -2, "token_weight": example.weights[example.row()]}
        if seed % 5 == 3:
            keywords |= {"ref_logp": example.old_logp + 0.05, "kl": hpo.kl.k3(0.1), "entropy": -example.logp}
        if seed % 7 == 4:
            keywords |= {"entropy": -example.logp, "window": hpo.entropy.forking_tokens(0.5, scope="call")}
        if not clear_of_branches(example, gate):
            continue
        seen += 1
        assert_the_definition(example, gate, backend, **keywords)
    assert seen > seeds // 3


def bits(out):
    return [x.numpy().tobytes() for x in (out.loss, out.grad, out.metrics.vector)]


SEVERAL = {name: GATES[name] for name in ("fiberpo", "fiberpo_domain", "mixed routing", "four levels, through, split")}
several_gates = pytest.mark.parametrize("gate", SEVERAL.values(), ids=SEVERAL)
TRAJECTORIES = RatioGate("trajectories", SMALL, levels((BUDGETS, Unit.TRAJECTORY)), split=True)


@pytest.mark.parametrize("gate", [GATES["fiberpo"], GATES["fiberpo_domain"], TRAJECTORIES], ids=lambda gate: gate.name)
def test_a_long_piece_is_shared_by_many_workers(gate, backend):
    for seed in range(8):
        example = Example(seed, lengths=(3, 20_001, 1, 513), several=seed % 2 == 0)
        if clear_of_branches(example, gate):
            assert_the_definition(example, gate, backend)
            return
    raise AssertionError("no example keeps off the branches")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("gate", [GATES["fiberpo"], GATES["fiberpo_domain"], TRAJECTORIES], ids=lambda gate: gate.name)
def test_stretches_of_a_long_piece_are_masked_alike(gate, several, backend):
    """What workers skip, what they need not look up and what they must, in one row."""
    for seed in range(16):
        example = Example(seed, (3, 9000, 40), masked=False, several=several, gaps=False)
        draw = torch.Generator().manual_seed(seed)
        long_row = example.mask[3:9003]
        long_row[1500:4200] = False
        long_row[4200:4900] = torch.rand(700, generator=draw) < 0.5
        long_row[6141:8189] = False
        example.logp[~example.mask] = torch.nan
        if clear_of_branches(example, gate):
            assert_the_definition(example, gate, backend)
            return
    raise AssertionError("no example keeps off the branches")


@pytest.mark.parametrize("masked", [False, True])
@every_gate
def test_what_else_is_asked_for_changes_no_bit(gate, masked, backend="cpu"):
    """The call that trainers make: the CPU takes its tokens in one pass, those under open levels in another, and what
    else is asked for apart. A mask of tokens that masks none sends them the long way, which rounds differently."""
    opened = 0
    for spread in (0.0, 0.01, 0.04, 0.3):  # with 0.04 levels are open that tokens are beyond the clip of
        for several in (False, True):
            example = Example(3, (5, 0, 4500, 1, 130, 1025, 3, 16), spread, masked, several)
            plain = example.run(gate, backend)
            logp = example.logp.clone().requires_grad_()
            keywords = {"weights": example.weights, "advantage_level": "row", "return_tokens": True, "backend": backend}
            other = hpo.policy_loss(logp, example.old_logp, example.advantages, example.batch, gate, **keywords)
            other.loss.backward()
            assert plain.grad.numpy().tobytes() == logp.grad.numpy().tobytes()
            assert plain.loss.item() == other.loss.item()
            assert torch.equal(plain.metrics.vector, other.metrics.vector)
            long_way = example.run(gate, backend, token_mask=torch.ones_like(example.logp, dtype=torch.bool))
            largest = long_way.grad.abs().max().item()
            torch.testing.assert_close(plain.grad, long_way.grad, rtol=2e-6, atol=2e-6 * largest)
            torch.testing.assert_close(plain.metrics.vector, long_way.metrics.vector, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(plain.loss, long_way.loss, rtol=1e-6, atol=1e-6)
            opened += bool(plain.grad.any())
    assert opened


@pytest.mark.parametrize("routing", Routing)
def test_many_short_pieces(routing, backend):
    """So many segments on a few workers that each works for several, and domains that all share."""
    bent = ((Tanh(0.05), STEP), (Tanh(0.02), GROUP), (Tanh(0.01), DOMAIN))
    gate = RatioGate("short", Identity(), levels(*bent, routing=routing))
    few = backend == "triton" and routing is not Routing.THROUGH  # interpreted: slow
    example = Example(1, lengths=(2, 3, 0, 5) * (30 if few else 300))
    assert_the_definition(example, gate, backend)


def test_an_empty_step_of_no_row(backend):
    none = torch.zeros(0)
    ids = {f"{name}_ids": torch.zeros(0, dtype=torch.int64) for name in ("trajectory", "group", "domain")}
    batch = hpo.PackedBatch(torch.tensor([0]), steps=torch.tensor([[0, 0]]), **ids)
    for gate in (GATES["two_scale"], GATES["four levels, through, split"]):
        out = hpo.policy_loss_and_grad(none, none, none, batch, gate, backend=backend, advantage_level="row")
        assert out.loss == 0
        assert out.grad.shape == (0,)


@every_gate
def test_masked_is_never_read(gate, backend):
    example = Example(4)
    tokens = {"advantages": example.token_advantages, "token_weight": example.weights[example.row()]}
    tokens |= {"ref_logp": example.old_logp + 0.05, "entropy": -example.logp}
    clean = example.run(gate, backend, kl=hpo.kl.k3(0.1), **tokens)
    assert bool((clean.grad[~example.covered(gate)] == 0).all())
    tokens |= {"logp": example.logp, "old_logp": example.old_logp}
    for poison in (math.nan, math.inf, -math.inf):
        dirty = {name: torch.where(example.covered(gate), values, poison) for name, values in tokens.items()}
        assert bits(example.run(gate, backend, kl=hpo.kl.k3(0.1), **dirty)) == bits(clean)


@pytest.mark.parametrize("gate", EXACT.values(), ids=EXACT)
def test_on_policy_the_gradient_is_minus_w_a(gate, backend):
    example = Example(2, lengths=(5, 90 if backend == "triton" else 700, 9, 1, 7))
    out = example.run(gate, backend, old_logp=example.logp)
    expected = torch.where(example.covered(gate), -(example.weights * example.advantages)[example.row()], 0.0)
    assert torch.equal(out.grad, expected)


@pytest.mark.parametrize("lengths", [(5, 0, 9, 1, 7, 12, 3), (40, 5, 64)])
@pytest.mark.parametrize("name", ["two_scale, token", "zeroed at once"])
def test_bounds_of_tokens_replace_those_of_the_residual(name, lengths, backend):
    gate, example = GATES[name], Example(11, lengths, masked=False)
    draw = torch.Generator().manual_seed(0)
    low, high = 0.9 + 0.09 * torch.rand(2, example.logp.numel(), generator=draw)
    own = {"bounds": (low, high + 0.11)}
    assert_the_definition(example, gate, backend, **own)
    assert not torch.equal(example.run(gate, backend, **own).grad, example.run(gate, backend).grad)


@several_gates
def test_exceptional_log_ratios(gate, backend):
    """NaN leaves, infinity saturates without a derivative, what is finite saturates with one."""
    for value in (math.nan, math.inf, -math.inf, 100.0, -100.0):
        example = Example(3, masked=False, gaps=False)
        example.logp[7] = value
        out, expected = example.run(gate, backend), example.run(gate, "reference")
        largest = expected.grad.abs().max()
        assert bool(torch.isfinite(out.grad).all())
        assert (out.grad.double() - expected.grad).abs().max() <= 1e-5 * largest
        for counter in ("nan_tokens", "infinite_tokens", "tokens", "selected"):
            at = hpo.metrics.slot(counter)
            assert out.metrics.vector[at] == expected.metrics.vector[at]


@pytest.mark.parametrize("name", ["fiberpo", "zeroed at once", "two_scale, token", "bent"])
def test_a_trajectory_does_not_know_where_it_lies(name, backend):
    """Bitwise the same gradient alone and behind any number of tokens, though memory is read in groups of four."""
    bent = RatioGate("bent", SMALL, levels((Tanh(0.2), Unit.TRAJECTORY)))
    gate, length = GATES.get(name, bent), 1100
    alone = Example(5, lengths=(length,), several=False, gaps=False, spread=0.3)
    # What cancels where gradient goes through aggregates: the rest of it shows in what order tokens were added.
    token = torch.arange(length)
    large, sign = (token % 4 == 0) & (token < 1024), 1.0 - 2.0 * (token // 256 % 2)
    alone.logp[:length][large] = alone.old_logp[:length][large] = -1.0
    alone.token_advantages[:length][large] = sign[large] * 2.0**39
    alone.mask[:length][large] = True
    steps = alone.batch.steps
    runs, plain_runs = [], []
    for before in (0, 3, 515) if backend == "triton" else (0, 1, 2, 3, 129, 515):
        lengths = torch.tensor([before, length, 40])
        moved = Example(6, lengths=lengths.tolist(), several=False, spread=0.3)
        inside = slice(before, before + length)
        moved.batch = hpo.PackedBatch(
            moved.batch.cu_seqlens, torch.cat([torch.ones(before), alone.mask[:length], torch.ones(43)]).bool(),
            steps=torch.cat([steps + before, torch.tensor([[before + length, before + length + 40]])]),
        )  # fmt: skip
        moved.logp[inside], moved.old_logp[inside] = alone.logp[:length], alone.old_logp[:length]
        moved.advantages[1], moved.weights[1] = alone.advantages[0], alone.weights[0]
        moved.token_advantages[inside] = alone.token_advantages[:length]
        runs.append(moved.run(gate, backend, advantages=moved.token_advantages).grad[inside])
        plain_runs.append(moved.run(gate, backend).grad[inside])
    for one, *others in (runs, plain_runs):
        assert one.abs().sum() > 0
        assert all(torch.equal(other, one) for other in others)


def index_inputs(example, gate):
    hierarchy = example.batch.hierarchy(tuple(level.unit for level in gate.levels))
    names = ("piece_begin", "piece_end", "piece_row", "ancestors")
    return {"cu_seqlens": example.batch.cu_seqlens, **dict(zip(names, hierarchy, strict=True))}


def raw(example, gate, backend, **replaced):
    """The op itself, which checks nothing."""
    inputs, spec, _, _ = sys.modules["hpo_core.losses"]._prepare(
        example.logp, example.old_logp, example.advantages, example.batch, gate, example.weights, *[None] * 12, "row",
        None, None, False, False, backend,
    )  # fmt: skip
    return (
        sys.modules["hpo_core.backends"]
        .resolve("gates", inputs.logp, backend)
        .policy_loss(inputs._replace(**replaced), spec, True, True)
    )


@several_gates
def test_broken_pieces_are_left_out_and_counted(gate, backend):
    example = Example(0, lengths=(5, 0, 9, 1, 7, 12, 3) * 6, masked=False)
    inputs = index_inputs(example, gate)
    begin, end, row = (inputs[name].clone() for name in ("piece_begin", "piece_end", "piece_row"))
    ancestors = inputs["ancestors"].clone()
    end[0] = end[1] + 1 if len(end) > 1 else end[0]  # runs into the next, or leaves its row
    row[3], ancestors[0, 4] = -1, len(end)
    broken = {"piece_begin": begin, "piece_end": end, "piece_row": row, "ancestors": ancestors}
    got, expected = raw(example, gate, backend, **broken), raw(example, gate, "cpu", **broken)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert got[1][hpo.metrics.slot("bad_offsets")] >= 3


@several_gates
def test_no_value_of_offsets_and_pieces_is_dangerous(gate, backend):
    example, draw = Example(0), torch.Generator().manual_seed(0)
    inputs = index_inputs(example, gate)
    for size in (3, 60, 1 << 40):
        for _ in range(1 if backend == "triton" else 5):
            garbage = {name: torch.randint(-size, size, x.shape, generator=draw) for name, x in inputs.items()}
            for names in (["cu_seqlens"], ["piece_begin", "piece_end"], ["piece_row"], ["ancestors"], list(inputs)):
                loss, metrics, grad, token_loss = raw(example, gate, backend, **{name: garbage[name] for name in names})
                assert bool(torch.isfinite(loss)) and bool(torch.isfinite(grad).all())
                assert bool(torch.isfinite(token_loss).all())
                assert (
                    0 <= metrics[hpo.metrics.slot("bad_offsets")] <= inputs["piece_row"].numel() + len(example.lengths)
                )


@several_gates
def test_bits_depend_on_nothing_else(gate, backend, monkeypatch):
    """Not on what the workspace held, not on the order of emulated threads or on how many blocks find room."""
    example = Example(8, lengths=(5, 0, 9, 300 if backend == "triton" else 1500, 7, 12, 3), spread=0.3)
    runs = []
    emulated = (("forward", 3), ("reverse", 4), ("random:1", 3), ("random:2", 1))
    for order, processors in emulated if backend == "cuda_emulated" else (("", 0), ("", 0)):
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        monkeypatch.setenv("HPO_EMULATION_PROCESSORS", str(processors))
        runs.append(bits(example.run(gate, backend, advantages=example.token_advantages, entropy=-example.logp)))
    assert all(run == runs[0] for run in runs[1:])


def corrected(unit):
    return RatioGate(
        "corrected",
        Drop(),
        levels((SMALL, GROUP)),
        corrections=(Correction(Action.MASK, unit=unit, channel=Channel.TOTAL),),
    )


def launches_on_cuda(call):
    module = pytest.importorskip("hpo_core._cuda_emulated")
    before = module.launches()
    call()
    launched = {kernel: n - before.get(kernel, 0) for kernel, n in module.launches().items()}
    return {kernel: n for kernel, n in launched.items() if n}


def test_launches_on_cuda():
    """Two, and a third where gradient flows through aggregates. A correction: one."""
    plain = ["prepare_pieces", "sweep_pieces"]
    coupled = [*plain, "deliver_gradient"]
    for gate, expected in (
        (GATES["fiberpo"], coupled),
        (GATES["fiberpo_domain, stopped"], coupled),
        (GATES["score"], plain),
        (GATES["dropped, self"], plain),
        (GATES["mean exp, 4 levels, through, split"], coupled),
        (GATES["balanced, 4 levels, through, split"], coupled),
        (GATES["balanced, score"], plain),
        (RatioGate("log", Identity(), head=Head.LOG, head_numbers=(0.7, 1.3)), plain),
        (corrected(None), [*coupled, "correct_tokens"]),
        (corrected(STEP), [*coupled, "correct_tokens"]),
    ):
        launched = launches_on_cuda(functools.partial(Example(0).run, gate, "cuda_emulated"))
        assert launched == dict.fromkeys(expected, 1)


@pytest.mark.parametrize("of_steps", [False, True], ids=["grpo", "gigpo"])
def test_launches_of_the_single_call(of_steps):
    """Steps cost two scans more: the returns of trajectories, discounted and not."""
    example = Example(0)
    steps = torch.arange(example.batch.num_steps)
    rewards = (steps % 5).float() if of_steps else example.advantages
    estimator = functools.partial(hpo.advantages.gigpo, anchor_ids=steps % 3) if of_steps else hpo.advantages.grpo

    def call():
        logp = example.logp.clone().requires_grad_()
        hpo.hierarchical_policy_loss(
            logp, example.old_logp, rewards, example.batch, advantage=estimator, gate=gates.fiberpo(),
            window=hpo.entropy.ares(), entropy=-example.logp, weights=example.weights, backend="cuda_emulated",
        ).loss.backward()  # fmt: skip

    launched = launches_on_cuda(call)
    assert sum(launched.values()) == (10 if of_steps else 8)
