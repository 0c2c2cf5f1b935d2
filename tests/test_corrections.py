"""The factors of corrections, by hand: what statistics reach, which tokens have a say, what stays outside."""

import dataclasses
import functools
import itertools
import math
import random

import pytest
import torch
from breadth import crossed, few
from conftest import NATIVE

import hpo_core as hpo
from hpo_core import gates, ops, testing
from hpo_core.backends import resolve
from hpo_core.gates import Action, Channel, Correction, Reduction, Statistic, Unit
from hpo_core.specs import PolicyLossInputs
from hpo_core.testing.promises import shifted

INF = math.inf

# Log-probabilities (first, second) of tokens: near each other, far, as far as statistics go, and beyond.
PAIRS = [
    (-1.0, -1.0), (-1.0, -1.01), (-3.0, -2.5), (-8.31, -1.0), (-1.0, -8.31), (-0.5, -15.5), (-19.9, 0.0), (-2.0, -62.0),
    (-70.0, -3.0), (-99.0, -1.0), (-1.0, -99.0),
]  # fmt: skip


def measured(statistic, first, second):
    """A statistic as its definition reads."""
    u = min(max(first - second, -60.0), 60.0)
    p, q = math.exp(first), math.exp(second)
    if statistic is Statistic.LOG_RATIO:
        return u
    if statistic is Statistic.K2:
        return u * u / 2
    if statistic is Statistic.K3:
        u = min(max(u, -20.0), 20.0)
        return math.exp(u) - 1 - u
    if statistic is Statistic.PROBABILITY:
        return p - q
    other = math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return math.copysign(1, p - q) * ((1 - q) * other - q * u) if p != q else 0.0


def factors(backend, pairs, correction, batch=None, **given):
    """The result of the op for these pairs, one row unless a batch says otherwise."""
    device, dtype = testing.device_of(backend), torch.float64 if backend == "reference" else torch.float32
    batch = hpo.PackedBatch.from_lengths([len(pairs)]) if batch is None else batch
    first, second = torch.as_tensor(pairs, dtype=dtype).T.contiguous()
    ones, hierarchy = torch.ones(batch.rows), batch.hierarchy(() if correction.unit is None else (correction.unit,))
    inputs = PolicyLossInputs(
        first, second, ones, ones, batch.cu_seqlens, batch.mask, leaf_begin=hierarchy.begin, leaf_end=hierarchy.end,
        leaf_row=hierarchy.row, ancestors=hierarchy.ancestors,
    )._replace(**given)  # fmt: skip
    inputs = PolicyLossInputs(*(each.to(device) if isinstance(each, torch.Tensor) else each for each in inputs))
    if backend == "reference":
        return resolve("corrections", inputs.logp, backend).correction(inputs, correction.spec())
    return ops.correction(inputs, correction.spec(), backend)


def lies_at(backend, pairs, value, statistic, unit=None, reduction=Reduction.MEAN):
    """Whether masks on both sides of ``value`` find the statistic of all tokens there, within rounding."""
    margin = 2e-6 * abs(value) + 1e-8
    for low, high, inside in (
        (value - margin, value + margin, 1.0),
        (-INF, value - margin, 0.0),
        (value + margin, INF, 0.0),
    ):
        mask = Correction(
            Action.MASK, (low, low), (high, high), unit, reduction, statistic=statistic, strict=inside == 0
        )
        if factors(backend, pairs, mask).tolist() != [inside] * len(pairs):
            return False
    return True


@pytest.mark.parametrize("statistic", Statistic)
def test_statistics_reach_as_far_as_they_say(statistic, native_backends):
    """Statistics of a token and of a segment, where a few far tokens outweigh all others: none is cut off."""
    for backend in ("reference", *native_backends):
        for pair in few(backend, PAIRS[::-1], 3):
            assert lies_at(backend, [pair], measured(statistic, *pair), statistic), (backend, pair)
        values = [measured(statistic, *pair) for pair in PAIRS]
        by_hand = {
            Reduction.MEAN: math.fsum(values) / len(values),
            Reduction.SUM: math.fsum(values),
            Reduction.MIN: min(values),
            Reduction.MAX: max(values),
        }
        for reduction, value in by_hand.items():
            assert lies_at(backend, PAIRS, value, statistic, Unit.TRAJECTORY, reduction), (backend, reduction)


@pytest.mark.parametrize("statistic", Statistic)
def test_a_token_without_a_log_ratio_has_no_statistic(statistic, native_backends):
    """Nor has one of a probability of 0 under either policy, or under both: no such token was sampled."""
    pairs = [(-INF, -INF), (math.nan, -1.0), (-INF, -1.0), (-1.0, -INF), (-1.0, INF), (-1.0, -1.1)]
    value = measured(statistic, *pairs[-1])
    of_row = {"low": (value - 1e-6,) * 2, "high": (value + 1e-6,) * 2, "unit": Unit.TRAJECTORY}
    for backend, bounds in itertools.product(("reference", *native_backends), ({}, of_row)):
        found = factors(backend, pairs, Correction(Action.MASK, statistic=statistic, **bounds))
        assert found[:-1].isnan().all() and found[-1] == 1, (backend, bounds)


def test_an_infinite_log_probability_of_the_sampler_takes_its_token_out(native_backends):
    """Also of weights that are truncated, and of rows that lie whole in a chunk: it had the largest weight there is."""
    batch, rollout = hpo.PackedBatch.from_lengths([3]), [-2.0, -INF, -2.1]
    for backend, gate in itertools.product(
        ("reference", *native_backends),
        (gates.tis(), gates.tis(unit=Unit.TRAJECTORY), gates.decoupled(), gates.icepop(), gates.mis()),
    ):
        for wrong in (-INF, INF):
            rollout[1] = wrong
            out = loss_of(backend, batch, gate, logp=[-2.0] * 3, old_logp=[-2.0] * 3, rollout_logp=rollout)
            assert out.grad[1] == 0 and bool((out.grad[[0, 2]] < -0.5).all()), (backend, gate.name)
            assert out.metrics["bad_advantages"] == 1, (backend, gate.name)


def test_far_tokens_do_not_cost_near_ones_their_digits(backend):
    """A mean of K3 is e^20 / n within its rounding, and means of what is near are none of a coarser grid."""
    near = [(-1.0, -1.0 - 0.1 * (k % 7)) for k in range(600)]
    far = [(-1.0, -40.0)]
    for pairs in (near, near + far, far * 300):
        mean = math.fsum(measured(Statistic.K3, *pair) for pair in pairs) / len(pairs)
        assert lies_at(backend, pairs, mean, Statistic.K3, Unit.TRAJECTORY)


def test_a_row_is_rejected_for_its_mean_k3(backend):
    """One token in a hundred at a ratio of e^7.31 has a mean of 14.9: far above 1."""
    logp = torch.full((100,), -1.0, device=testing.device_of(backend))
    rollout = logp.clone()
    rollout[3] -= 7.31
    mask = Correction(Action.MASK, high=(1.0, 1.0), unit=Unit.TRAJECTORY, statistic=Statistic.K3)
    batch = hpo.PackedBatch.from_lengths([100]).to(logp.device)
    gate = gates.compose(gates.ppo_clip(), mask)
    ones = torch.ones(1, device=logp.device)
    out = hpo.policy_loss_and_grad(logp, logp, ones, batch, gate, rollout_logp=rollout, backend=backend)
    assert not out.grad.any()


# ------------------------------------------------------------------------------------------------- who has a say


def loss_of(backend, batch, gate, *, logp, old_logp, rollout_logp, **given):
    place = testing.device_of(backend)
    tensors = [torch.tensor(each, device=place) for each in (logp, old_logp, [1.0] * batch.rows)]
    given = {name: value.to(place) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    given.setdefault("weights", torch.ones(batch.rows, device=place))
    rollout = torch.tensor(rollout_logp, device=place)
    call = hpo.policy_loss_and_grad
    return call(*tensors, batch.to(place), gate, rollout_logp=rollout, backend=backend, **given)


WEIGHT = Correction(Action.CLAMP, unit=Unit.TRAJECTORY, reduction=Reduction.SUM)  # e^(sum of d)


@pytest.mark.parametrize("reads_reference", [False, True], ids=["policy", "reference"])
def test_a_token_the_loss_leaves_out_has_no_say_in_a_correction(reads_reference, native_backends):
    """Its own log-ratio is NaN, that of the correction is not."""
    batch, ones, hole = hpo.PackedBatch.from_lengths([4]), [-1.0] * 4, [-1.0, math.nan, -1.0, -1.0]
    given = {"ref_logp": torch.tensor(hole), "kl": hpo.kl.k3(0.1)} if reads_reference else {}
    if reads_reference:
        given["report"] = ("corrections",)
    for backend in ("reference", *native_backends):
        out = loss_of(
            backend, batch, gates.compose(gates.reinforce(), WEIGHT), logp=ones if reads_reference else hole,
            old_logp=ones, rollout_logp=[-1.1, -4.0, -1.2, -1.0], **given,
        )  # fmt: skip
        expected = -math.exp(0.3)
        assert out.grad.tolist() == pytest.approx([expected, 0.0, expected, expected], rel=1e-6), backend
        assert [seen["tokens"] for seen in out.corrections] == [3.0] * len(out.corrections)


def test_a_token_of_an_infinite_log_ratio_counts_in_the_metrics_of_a_correction(native_backends):
    batch, gate = hpo.PackedBatch.from_lengths([3]), gates.compose(gates.reinforce(), Correction(Action.CLAMP))
    for backend in ("reference", *native_backends):
        out = loss_of(
            backend, batch, gate, logp=[-1.0, -INF, -1.0], old_logp=[-1.0] * 3, rollout_logp=[-1.0] * 3,
            report=("corrections",),
        )  # fmt: skip
        assert (out.metrics["tokens"], out.corrections[0]["tokens"]) == (3.0, 3.0), backend


@pytest.mark.parametrize("channel", [Channel.STALENESS, Channel.TOTAL])
def test_a_correction_on_the_total_ratio_leaves_them_out_too(channel, backend):
    """The loss reads one of ``old_logp`` and ``rollout_logp``, the correction the other."""
    batch, hole, ones = hpo.PackedBatch.from_lengths([3]), [-1.0, math.nan, -1.0], [-1.0, -1.0, -1.0]
    of_other = Channel.TOTAL if channel is Channel.STALENESS else Channel.STALENESS
    mask = Correction(Action.MASK, (-1.5, -1.5), (1.5, 1.5), Unit.TRAJECTORY, Reduction.MAX, of_other)
    gate = gates.RatioGate("x", gates.Identity(), channel=channel, corrections=(mask,))
    read, seen = hole, [-1.0, -9.0, -1.0]
    old, rollout = (read, seen) if channel is Channel.STALENESS else (seen, read)
    out = loss_of(backend, batch, gate, logp=ones, old_logp=old, rollout_logp=rollout)
    assert out.grad.tolist() == [-1.0, 0.0, -1.0]


# ------------------------------------------------------------------------------------------------------ over steps


def test_tokens_outside_all_steps_keep_what_they_have(native_backends):
    """A correction of steps says nothing of them: the caller's weights and earlier corrections stay."""
    steps = torch.tensor([[1, 3], [5, 6]])
    batch, old = hpo.PackedBatch(torch.tensor([0, 3, 7]), steps=steps), [-1.0] * 7
    rollout = [-1.1, -1.2, -1.3, -1.4, -1.5, -1.6, -1.7]
    token_weight = torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    of_token = Correction(Action.CLAMP)
    of_step = Correction(Action.CLAMP, unit=Unit.STEP, reduction=Reduction.SUM)
    d = [old[t] - rollout[t] for t in range(7)]
    of_steps = [0.0, d[1] + d[2], d[1] + d[2], 0.0, 0.0, d[5], 0.0]
    expected = [
        -w * math.exp(own + of_step) for w, own, of_step in zip(token_weight.tolist(), d, of_steps, strict=True)
    ]
    for backend, orders in itertools.product(
        ("reference", *native_backends), ((of_token, of_step), (of_step, of_token))
    ):
        gate = gates.compose(gates.ppo_clip(), *orders)
        out = loss_of(backend, batch, gate, logp=old, old_logp=old, rollout_logp=rollout, token_weight=token_weight)
        assert out.grad.tolist() == pytest.approx(expected, rel=1e-5), backend


def test_tokens_outside_all_leaves_get_their_weight_whatever_it_is(native_backends):
    """At the op: masked tokens and those between steps have the factor 1."""
    batch = hpo.PackedBatch(
        torch.tensor([0, 6]), torch.tensor([1, 1, 0, 1, 1, 1]), steps=torch.tensor([[1, 3], [4, 5]])
    )
    pairs, weight = [(-1.0, -1.5)] * 6, torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    of_step = Correction(Action.CLAMP, unit=Unit.STEP)
    e = math.exp(0.5)
    for backend in ("reference", *native_backends):
        bare = factors(backend, pairs, of_step, batch)
        assert bare.tolist() == pytest.approx([1.0, e, 1.0, 1.0, e, 1.0]), backend
        weighted = factors(backend, pairs, of_step, batch, token_weight=weight)
        assert weighted.tolist() == pytest.approx((bare.double().cpu() * weight).tolist()), backend


@pytest.mark.parametrize("unit", [None, Unit.TRAJECTORY])
def test_no_input_needs_to_begin_on_a_boundary(unit, native_backends):
    """At the op: each input of tokens by itself, also those of the loss that a correction does not read."""
    pairs, tokens = [(-1.0, -1.5), (-1.0, -0.5)] * 32, 64
    names = ("logp", "old_logp", "advantages", "token_weight", "entropy", "score", "low", "high")
    given = {name: torch.linspace(0.5, 1.5, tokens) for name in names}
    given |= {"mask": torch.arange(tokens) % 5 > 0, "token_mask": torch.ones(tokens, dtype=torch.bool)}
    correction, others = Correction(Action.CLAMP, unit=unit), {"threshold": torch.zeros(1), "advantage_per_token": True}
    for backend in native_backends:
        expected = factors(backend, pairs, correction, **given, **others)
        for name, values in given.items():
            got = factors(backend, pairs, correction, **(given | {name: shifted(values)}), **others)
            assert torch.equal(got, expected), (backend, name)


@pytest.mark.parametrize(("end", "mask"), [(3, None), (4, torch.tensor([1, 1, 1, 0, 1, 1]))])
def test_what_lies_between_steps_is_masked_for_every_correction(end, mask, native_backends):
    """Under a gate of steps a correction of trajectories does not read there, nor where the batch is masked."""
    batch, old = hpo.PackedBatch(torch.tensor([0, 6]), mask, steps=torch.tensor([[1, end]])), [-1.0] * 6
    rollout = [math.nan, -1.1, -1.2, math.inf, -9.0, -9.0]
    gate = gates.compose(gates.step_gspo(), WEIGHT)
    for backend, report in itertools.product(("reference", *native_backends), ((), ("corrections",))):
        out = loss_of(backend, batch, gate, logp=old, old_logp=old, rollout_logp=rollout, report=report)
        weight = -math.exp(0.3)
        assert out.grad.tolist() == pytest.approx([0.0, weight, weight, 0.0, 0.0, 0.0], rel=1e-6), backend
        assert [seen["tokens"] for seen in out.corrections] == [2.0] * len(report)


@pytest.mark.parametrize("statistic", [Statistic.PROBABILITY, Statistic.BINARY_KL])
def test_statistics_of_probabilities_keep_their_digits(statistic, backend):
    """Pairs near each other, near 0 and far apart. The divergence of near ones is the square of what its terms are."""
    draw = random.Random(7)
    pairs = []
    for k in range(240):
        first = -(10 ** draw.uniform(-4, 1.9))
        near = first * (1 + draw.choice([-1, 1]) * 10 ** draw.uniform(-3, -0.3))
        pairs.append((first, (near, -(10 ** draw.uniform(-4, 1.9)), first - draw.uniform(0, 0.5))[k % 3]))
    for pair in few(backend, torch.tensor(pairs, dtype=torch.float32).double().tolist(), 15):
        assert lies_at(backend, [pair], measured(statistic, *pair), statistic), pair


@pytest.mark.parametrize("delta, above", [(1e-4, -INF), (0.004, -INF), (0.05, -INF), (0.5, -INF), (0.05, 0.5)])
@pytest.mark.parametrize("statistic", [Statistic.PROBABILITY, Statistic.BINARY_KL])
def test_a_mask_of_the_sweep_is_that_of_the_op(statistic, delta, above, backend):
    """Bounds on a statistic decide most masks of the fast path, the statistic itself those of the op: also for tokens
    that are nearly certain or nearly impossible, for those close to a limit, and where 0 is not between the limits."""
    place, draw = testing.device_of(backend), torch.Generator().manual_seed(5)
    rows, length = 64 if backend == "cpu" else 4, 1024
    p = torch.rand(rows, length, generator=draw, dtype=torch.float64)
    p = torch.stack([p[0::4], p[1::4] ** 8, 1 - p[2::4] ** 8, 1e-6 * p[3::4]]).flatten(0, 1).clamp(1e-20, 1 - 1e-7)
    old_logp = p.log().float().flatten()
    usual = (2 * delta * (1 - p) / p).sqrt() if statistic is Statistic.BINARY_KL else delta / p
    spread = usual.clamp(max=1.0) * torch.randn(p.shape, generator=draw, dtype=torch.float64)
    spread[:, :32] = 0.01 * spread[:, :32].abs()  # whole vectors that rise a little
    logp = (old_logp + spread.flatten().float()).clamp(max=-1e-7)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(p.shape[0] // 4)
    batch = hpo.PackedBatch.from_lengths([length] * p.shape[0]).to(place)
    low, high = max(-delta, above * delta), delta
    own = gates.dppo_kl()
    mask = Correction(Action.MASK, (above * delta, low), (high, INF), channel=own.channel, statistic=statistic)
    gate = dataclasses.replace(own, corrections=(mask,))
    pair = list(zip(logp.tolist(), old_logp.tolist(), strict=True))
    kept = factors(backend, pair, gate.corrections[0], batch, advantages=advantages)
    out = hpo.policy_loss_and_grad(
        logp.to(place), old_logp.to(place), advantages.to(place), batch, gate, backend=backend
    )
    assert 0.02 < float(kept.mean()) < 0.98
    assert torch.equal(out.grad != 0, kept != 0)


# ------------------------------------------------------------------------------------------- over rows, in the loss


def rows_of_all_sizes(tokens):
    """Lengths that add up to ``tokens``: none, a few, across the borders of any blocks, and half of all in one."""
    draw, lengths = random.Random(0), [0, 1, tokens // 2]
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, draw.choice([0, 1, 3, 17, 64, 300, 1000, 2048])))
    draw.shuffle(lengths)
    return lengths


REDUCTIONS = {
    "sum": Correction(Action.BAND, (-1.0, -0.5), (3.0, 1.0), Unit.TRAJECTORY, Reduction.SUM),
    "mean": Correction(Action.CLAMP, (-0.02, -INF), (0.01, 0.02), Unit.TRAJECTORY),
    "largest": Correction(Action.MASK, (-INF, -INF), (0.06, 0.07), Unit.TRAJECTORY, Reduction.MAX),
    "mean k3": Correction(Action.MASK, high=(2e-4, 2.1e-4), unit=Unit.TRAJECTORY, statistic=Statistic.K3),
}
# All but one are masks: products have the same bits in any order.
JOINED = {name: (each,) for name, each in REDUCTIONS.items()} | {
    "two of one statistic": (REDUCTIONS["sum"], REDUCTIONS["largest"]),
    "two statistics": (REDUCTIONS["mean k3"], REDUCTIONS["mean"]),
    "of tokens and rows": (Correction(Action.CLAMP, (-0.03, -0.02), (0.01, 0.04)), REDUCTIONS["largest"]),
    "of tokens and two of rows": (
        REDUCTIONS["mean k3"],
        Correction(Action.MASK, (-0.04, -0.05), (0.03, 0.02)),
        REDUCTIONS["sum"],
    ),
}
CORRECTED = {each.name: each for each in (gates.ppo_clip(), gates.gspo(), gates.fiberpo(), gates.sapo(), gates.gmpo())}


@crossed(NATIVE, joined=tuple(JOINED), gate=tuple(CORRECTED))
def test_corrections_in_the_loss_are_those_of_the_op(backend, joined, gate):
    """They agree to the bit with masks, weights and advantages of tokens, undefined statistics and rows of any size."""
    place, draw = testing.device_of(backend), torch.Generator().manual_seed(1)
    tokens = 1500 if backend in ("triton", "cuda_emulated") else 40_000
    batch = hpo.PackedBatch.from_lengths(rows_of_all_sizes(tokens))
    batch = batch.replace(group_ids=torch.arange(batch.rows) // 3)
    old = -1 - torch.rand(tokens, generator=draw)
    logp, rollout = (old + scale * torch.randn(tokens, generator=draw) for scale in (0.1, 0.02))
    rollout[torch.rand(tokens, generator=draw) < 1e-3] = math.nan
    logp[torch.rand(tokens, generator=draw) < 1e-3] = math.nan
    weight, mask = (torch.rand(tokens, generator=draw) for _ in range(2))
    known = logp == logp
    cases = (
        (batch, known, torch.randn(batch.rows, generator=draw), None, {}),
        (batch.replace(mask=mask < 0.9), (mask < 0.9) & known, torch.randn(tokens, generator=draw), "token",
         {"token_weight": weight.to(place)}),
    )  # fmt: skip
    for each, counted, advantages, level, given in cases:
        each, advantages = each.to(place), advantages.to(place)
        factor = given
        for correction in JOINED[joined]:
            factor = {"token_weight": factors(
                backend, torch.stack((old, rollout), 1), correction, each.replace(mask=counted.to(place)),
                advantages=advantages, advantage_per_token=level is not None, **factor,
            )}  # fmt: skip
        call = functools.partial(
            hpo.policy_loss_and_grad, logp.to(place), old.to(place), advantages, each, advantage_level=level,
            backend=backend,
        )  # fmt: skip
        got = call(gate=gates.compose(CORRECTED[gate], *JOINED[joined]), rollout_logp=rollout.to(place), **given)
        expected = call(gate=CORRECTED[gate], **factor)
        assert torch.equal(got.loss, expected.loss)
        assert torch.equal(got.grad, expected.grad)
        assert got.metrics["tokens"] == expected.metrics["tokens"]
        assert bool(got.grad.any()) and len(set(factor["token_weight"].tolist())) > 1


@pytest.mark.parametrize("unit", [None, Unit.TRAJECTORY])
def test_one_correction_given_three_times_counts_three_times(unit, backend):
    """The loss computes the factors of the first, of rows also of the second, and the op those of the third."""
    place, batch = testing.device_of(backend), hpo.PackedBatch.from_lengths([2, 3]).to(testing.device_of(backend))
    old, rollout = (torch.tensor(values, device=place) for values in ([-1.0] * 5, [-1.1, -1.3, -1.2, -0.9, -1.4]))
    correction = Correction(Action.CLAMP, unit=unit, reduction=Reduction.SUM)
    factors_of = [0.1, 0.3, 0.2, -0.1, 0.4] if unit is None else [0.4, 0.4, 0.5, 0.5, 0.5]
    gate = gates.compose(gates.ppo_clip(), correction, correction, correction)
    weights = torch.ones(2, device=place)
    out = hpo.policy_loss_and_grad(
        old, old, weights, batch, gate, weights=weights, rollout_logp=rollout, backend=backend
    )
    assert out.grad.tolist() == pytest.approx([-math.exp(3 * d) for d in factors_of], rel=1e-5)


def test_corrections_of_two_channels_read_what_is_theirs(backend):
    """The weight of a token compares old_logp with rollout_logp, that of its row logp with it."""
    logp, old, rollout = [-1.0, -1.2, -0.9], [-1.1, -1.0, -1.2], [-1.3, -1.1, -1.0]
    of_token = Correction(Action.CLAMP)
    of_row = Correction(Action.CLAMP, unit=Unit.TRAJECTORY, reduction=Reduction.SUM, channel=Channel.TOTAL)
    gate = gates.RatioGate("x", gates.Identity(), corrections=(of_token, of_row))
    batch = hpo.PackedBatch.from_lengths([1, 2])
    out = loss_of(backend, batch, gate, logp=logp, old_logp=old, rollout_logp=rollout)
    total = [new - seen for new, seen in zip(logp, rollout, strict=True)]
    of_rows = [total[0], total[1] + total[2], total[1] + total[2]]
    expected = [-math.exp(own + row) for own, row in zip(total, of_rows, strict=True)]
    assert out.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_rows_of_a_trajectory_that_cancel_leave_nothing(native_backends):
    """Wherever a row begins: the gradient through the aggregate, a sum over both rows, is 0 to the bit."""
    gate = dataclasses.replace(gates.gspo(0.5, 0.5), corrections=(Correction(Action.CLAMP, (-20, -20), (20, 20)),))
    batch = hpo.PackedBatch.from_lengths([1, 131, 131], trajectory_ids=torch.tensor([0, 1, 1]))
    draw = torch.Generator().manual_seed(0)
    alone = -1.0 - torch.rand(131, generator=draw)
    rollout = alone + 3 * torch.randn(131, generator=draw)
    logp, rollout = (torch.cat([-torch.ones(1), each, each]) for each in (alone, rollout))
    for backend in native_backends:
        given = {"weights": torch.ones(3), "rollout_logp": rollout, "backend": backend}
        out = hpo.policy_loss_and_grad(logp, logp, torch.tensor([1.0, 1.0, -1.0]), batch, gate, **given)
        assert out.grad[0] == -1 and not out.grad[1:].any(), backend


def test_hispo_masks_a_token_at_its_bound(backend):
    """Its condition is strict."""
    batch, old = hpo.PackedBatch.from_lengths([2]), [0.0, math.log(0.5)]
    gate = gates.hispo(eps_sequence=9.0, eps_token=0.5)
    out = loss_of(backend, batch, gate, logp=[0.0, 0.0], old_logp=old, rollout_logp=[0.0, 0.0])
    assert out.grad.tolist() == [-1.0, 0.0]


# ------------------------------------------------------------------------------------------- choices of the host


def test_all_of_a_long_row_is_in_its_statistic(backend):
    """Also what lies in the tasks behind its first; the loss and the op would agree without it."""
    tokens = 40_000 if backend == "cpu" else 1_200
    second = torch.full((tokens,), -1.0)
    second[-1] -= 8.0
    pairs = torch.stack((torch.full((tokens,), -1.0), second), 1)
    assert lies_at(backend, pairs, 8.0, Statistic.LOG_RATIO, Unit.TRAJECTORY, Reduction.MAX)
    assert lies_at(backend, pairs, 8.0, Statistic.LOG_RATIO, Unit.TRAJECTORY, Reduction.SUM)


def test_two_statistics_of_a_row_that_share_a_pass(native_backends):
    """An extremum behind a mean does not take its saturation away."""
    batch, old = hpo.PackedBatch.from_lengths([4]), [-1.0] * 4
    weight = Correction(Action.CLAMP, unit=Unit.TRAJECTORY)
    mask = Correction(Action.MASK, high=(99.0, 99.0), unit=Unit.TRAJECTORY, reduction=Reduction.MAX)
    for backend, order in itertools.product(("reference", *native_backends), ((weight, mask), (mask, weight))):
        gate = gates.compose(gates.reinforce(), *order)
        out = loss_of(backend, batch, gate, logp=old, old_logp=old, rollout_logp=[-1.5, -99.0, -0.75, -1.0])
        assert out.grad.tolist() == pytest.approx([-math.exp(60.25 / 4)] * 4, rel=1e-5), backend


def test_a_mask_of_tokens_is_decided_by_its_own_statistic(native_backends):
    """The extrema that a correction of rows has found are those of another statistic."""
    batch, old = hpo.PackedBatch.from_lengths([4]), [-1.0] * 4
    of_row = Correction(Action.MASK, high=(9.0, 9.0), unit=Unit.TRAJECTORY, statistic=Statistic.K2)
    of_token = Correction(Action.MASK, (-0.7, -0.7), (0.7, 0.7))  # K2 is 0.5 at most, the log-ratio 1
    for backend in ("reference", *native_backends):
        gate = gates.compose(gates.reinforce(), of_token, of_row)
        out = loss_of(backend, batch, gate, logp=old, old_logp=old, rollout_logp=[-1.0, -2.0, -1.5, -0.25])
        assert out.grad.tolist() == [-1.0, 0.0, -1.0, 0.0], backend


def test_advantages_of_tokens_choose_the_bounds_of_their_segment(native_backends):
    """At the op: the tokens of a row have both signs."""
    pairs, advantages = [(-1.0, -1.5)] * 4, torch.tensor([1.0, -1.0, -2.0, 0.5])
    clamp = Correction(Action.CLAMP, high=(0.1, 0.3), unit=Unit.TRAJECTORY)
    expected = [math.exp(0.1), math.exp(0.3), math.exp(0.3), math.exp(0.1)]
    for backend in ("reference", *native_backends):
        got = factors(backend, pairs, clamp, advantages=advantages, advantage_per_token=True)
        assert got.tolist() == pytest.approx(expected, rel=1e-6), backend


def test_the_reference_corrects_in_float64():
    """Whatever the dtype of the log-probabilities, also beside the loss and in the metrics of a correction."""
    draw, tokens = torch.Generator().manual_seed(0), 200_000
    old = -3 * torch.rand(tokens, generator=draw)
    rollout = old - 1e-5 * torch.rand(tokens, generator=draw)
    u = old.double() - rollout.double()
    batch = hpo.PackedBatch.from_lengths([tokens], trajectory_ids=torch.tensor([0]))
    options = {"weights": torch.full((1,), 1 / tokens), "rollout_logp": rollout, "report": ("corrections",)}
    gate = gates.tis(1e9, Unit.TRAJECTORY)
    out = hpo.policy_loss(old, old, torch.ones(1), batch, gate, backend="reference", **options)
    assert -out.loss.item() == pytest.approx(u.sum().exp().item(), rel=1e-6)
    assert out.corrections[0].compute()["kl_old_k3"] == pytest.approx((u.expm1() - u).mean().item(), rel=1e-6)
