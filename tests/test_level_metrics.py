"""Metrics of each level: they equal naive loops over segments, and a request for them changes nothing else."""

import functools
import itertools
import math

import pytest
import torch
from breadth import at_length, few, number, tried  # noqa: F401 (the first is a fixture)
from catalogue import Example, bits
from devices import Device, NoHostData, OnDevice
from hierarchies import DOMAIN, GATES, GROUP, SMALL, STEP, levels

import hpo_core as hpo
from hpo_core import gates
from hpo_core.gates import (
    Aggregate,
    Clip,
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
from hpo_core.level_metrics import slots

BALANCED = {name for name, gate in GATES.items() if any(level.aggregate is Aggregate.BALANCED for level in gate.levels)}
OBSERVED = {
    **{name: gate for name, gate in GATES.items() if name not in BALANCED},
    "gspo": gates.gspo(0.01, 0.02),
    "pre-gated": gates.gmpo(0.05, 0.1),
    "stays at its budget": RatioGate(
        "stays", SMALL, levels((Rollback((0.02, 0.01), 0.0), STEP), (Rollback((0.01, 0.02), 3.0), GROUP))
    ),
}
every_gate = pytest.mark.parametrize("gate", OBSERVED.values(), ids=OBSERVED)
REGIONS = ("pass", "clip_low", "clip_high", "rollback", "zero")
SIGNS = ("positive", "negative")


# ------------------------------------------------------------------------------------------------------- naive loops


def entering(x, sign, gate):
    """The part of a token's log-ratio that is added up, by channel."""
    if gate.head is Head.CENSORED:
        return [abs(math.exp(x) - 1)]
    if gate.pre is not None:
        pre = gate.pre
        low, high = pre.low[sign], pre.high[sign]
        if isinstance(pre, Clip):
            low, high = (math.log(bound) if bound else -math.inf for bound in (low, high))
        return [min(max(x, low), high)]
    return [max(x, 0.0), max(-x, 0.0)] if gate.split else [x]


def bounds_of(gate, sign, channel, size):
    """The interval of residuals of each region; ``pass`` is the rest."""
    if isinstance(gate, Clip):
        gate = LogClip(*(tuple(math.log(b) if b else -math.inf for b in pair) for pair in (gate.low, gate.high)))
    if isinstance(gate, LogClip):
        return [("clip_low", -math.inf, gate.low[sign]), ("clip_high", gate.high[sign], math.inf)]
    if isinstance(gate, Rollback):
        budget, slope = gate.budgets[channel], size if gate.slope is None else gate.slope
        if slope == 0:
            return [("clip_low", -math.inf, -budget), ("clip_high", budget, math.inf)]
        end = budget if slope == math.inf else budget * (slope + 1) / slope
        mirrored = [("rollback", -end, -budget), ("zero", -math.inf, -end)]
        return [("rollback", budget, end), ("zero", end, math.inf), *mirrored]
    if isinstance(gate, Excess):
        return [("zero", size * gate.budget, math.inf)]
    assert isinstance(gate, (Tanh, Identity, Drop))
    return []


def moments(found, name, values):
    found[f"log_ratio_mean{name}"] = sum(values) / len(values) if values else math.nan
    found[f"log_ratio_min{name}"] = min(values, default=math.nan)
    found[f"log_ratio_max{name}"] = max(values, default=math.nan)


def reduce(aggregate, values):
    if aggregate is Aggregate.LOG_MEAN_EXP:
        return math.log(sum(map(math.exp, values)) / len(values))
    return sum(values) / (len(values) if aggregate is Aggregate.MEAN else 1)


def observed(example, gate, advantages=None):
    """The expected ``compute`` of each level, from loops over its segments; and the distance of the nearest residual
    from the border of a region."""
    row = example.row().tolist()
    signs = [int(a < 0) for a in (example.advantages[row] if advantages is None else advantages).tolist()]
    difference = (example.logp.double() - example.old_logp.double()).tolist()
    valid = [t for t, inside in enumerate(example.covered(gate).tolist()) if inside]
    x = {t: entering(difference[t], signs[t], gate) for t in valid}
    names = [example.segment(level.unit).tolist() for level in gate.levels]
    margin, result, aggregates = math.inf, {}, []
    for level, name in zip(gate.levels, names, strict=True):
        members = {s: [t for t in valid if name[t] == s] for s in {name[t] for t in valid}}
        channels = range(1 + gate.split)
        aggregates.append(
            {s: [reduce(level.aggregate, [x[t][c] for t in each]) for c in channels] for s, each in members.items()}
        )
    for k, (level, name) in enumerate(zip(gate.levels, names, strict=True)):
        own = aggregates[k]
        whole = [a[0] - a[1] if gate.split else a[0] for a in own.values()]
        ratios = [math.exp(a) for a in whole]
        n = len(own)
        found = {
            "segments": n,
            "tokens": len(valid),
            "ratio_mean": sum(ratios) / n,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "effective_sample_size": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
            "kl_old_k1": -sum(whole) / n,
            "kl_old_k2": sum(a * a for a in whole) / 2 / n,
            "kl_old_k3": sum(r - 1 - a for r, a in zip(ratios, whole, strict=True)) / n,
        }
        moments(found, "", whole)
        for channel, called in enumerate(("_rise", "_fall") if gate.split else ("",)):
            moments(found, called, [a[channel] for a in own.values()])
            for sign in (0, 1):
                in_region = {region: ([], []) for region in REGIONS}
                for s, a in own.items():
                    members = [t for t in valid if name[t] == s]
                    some = members[0]
                    above = aggregates[k + 1][names[k + 1][some]][channel] if k + 1 < len(gate.levels) else 0.0
                    u, region = a[channel] - above, "pass"
                    for other, low, high in bounds_of(level.gate, sign, channel, len(members)):
                        region = other if low < u < high else region
                        margin = min(margin, abs(u - low), abs(u - high))
                    of_sign = [t for t in members if signs[t] == sign]
                    in_region[region][0].extend([s] if of_sign else [])
                    in_region[region][1].extend(of_sign)
                for at, (one, several) in enumerate((("segment", "segments"), ("token", "tokens"))):
                    count = sum(len(each[at]) for each in in_region.values())
                    found[f"{several}_{SIGNS[sign]}"] = count
                    for region, each in in_region.items():
                        key = f"{one}_fraction_{region}_{SIGNS[sign]}{called}"
                        found[key] = len(each[at]) / count if count else math.nan
        result[level.unit.name.lower()] = found
    return result, margin


def assert_same(computed, expected, backend, rel=1e-12, absolute=1e-12):
    assert list(computed) == list(expected), backend
    for level, numbers in expected.items():
        assert computed[level] == pytest.approx(numbers, rel=rel, abs=absolute, nan_ok=True), (backend, level)


@every_gate
def test_the_definition_is_the_naive_loop(gate):
    for seed in range(6):
        example = Example(seed, spread=(0.03, 0.1, 0.3)[seed % 3])
        for advantages in (None, example.token_advantages):
            given = {} if advantages is None else {"advantages": advantages}
            out = example.run(gate, "reference", report=("levels",), **given)
            assert_same(out.levels.compute(), observed(example, gate, advantages)[0], "reference")


def off_borders(gate, seed):
    """An example, the inputs of a call, and the loops' numbers; None if a residual is at the border of a region."""
    lengths = ((5, 0, 9, 1, 7, 12, 3), (40, 1, 200), (2, 2, 2, 2, 1))[seed % 3]
    example = Example(seed, lengths, spread=0.3 if seed % 5 == 4 else 0.1)
    given = {"advantages": example.token_advantages} if seed % 2 else {}
    expected, margin = observed(example, gate, given.get("advantages"))
    return None if margin < 1e-5 else (example, given, expected)


@pytest.mark.usefixtures("at_length")
@every_gate
def test_every_backend_is_the_naive_loop(gate, native_backends):
    calls = {each: number(each, at_length=16, machine_code=6, emulated=4, interpreted=1) for each in native_backends}
    seeds = range(max(calls.values()))
    found = [each for each in (off_borders(gate, seed) for seed in seeds) if each is not None]
    assert len(found) >= len(seeds) / 2
    for place, (example, given, expected) in enumerate(found):
        for backend in native_backends:
            if place < calls[backend]:
                out = example.run(gate, backend, report=("levels",), **given)
                assert_same(out.levels.compute(), expected, backend, 2e-5, 2e-6)


def test_there_are_residuals_in_every_region():
    """The examples of the first test reach every region, so its loops are a real check."""
    missing = {
        f"{several}_{region}_{sign}" for several in ("segments", "tokens") for region in REGIONS for sign in SIGNS
    }
    for gate, seed in itertools.product(OBSERVED.values(), range(6)):
        found = Example(seed, spread=(0.03, 0.1, 0.3)[seed % 3]).run(gate, "reference", report=("levels",)).levels
        channels = ("_rise", "_fall") if gate.split else ("",)
        missing -= {key for key in missing if any(found[f"{key}{channel}"].sum() for channel in channels)}
    assert not missing


# ------------------------------------------------------------------------------------------------ unchanged results


ON_TRITON = ("mixed routing", "score", "gspo")  # the interpreter is slow, and kernels distinguish gates only by kind
LENGTHS = {"triton": (5, 0, 4), "cuda_emulated": (5, 0, 600, 1, 130, 12, 3)}


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", OBSERVED)
def test_level_metrics_do_not_change_the_loss(name, native_backends):
    """Its bits stay; a gate with a fast path uses the general kernels instead, and agrees within rounding."""
    gate = OBSERVED[name]
    for backend in native_backends:
        if not tried(backend, True, name in ON_TRITON):
            continue
        example = Example(3, LENGTHS.get(backend, (5, 0, 900, 1, 130, 12, 3)), spread=0.3)
        for advantages in few(backend, (example.token_advantages, example.advantages)):
            plain = example.run(gate, backend, advantages=advantages)
            asked = example.run(gate, backend, advantages=advantages, report=("levels",))
            assert plain.levels is None, backend
            assert plain.grad.any() == asked.grad.any(), backend
            if gate.level is None:
                same = [bits(each.loss, each.grad, each.metrics.vector) for each in (asked, plain)]
                assert same[0] == same[1], backend
            assert torch.allclose(asked.grad, plain.grad, rtol=1e-5, atol=1e-6), backend
            assert torch.allclose(asked.loss, plain.loss, rtol=1e-5, atol=1e-6), backend


@pytest.mark.parametrize("name", ["fiberpo_domain", "gspo"])
def test_every_call_reports_the_same_level_metrics(name, backend):
    example, gate = Example(5, spread=0.3), OBSERVED[name]
    arguments = (example.logp.clone().requires_grad_(), example.old_logp, example.advantages, example.batch)
    keywords = {"gate": gate, "weights": example.weights, "backend": backend, "report": ("levels",)}
    expected = example.run(gate, backend, report=("levels",)).levels
    out = hpo.policy_loss(*arguments, **keywords | {"report": ("levels", "tokens")}, advantage_level="row")
    out.loss.backward()
    with torch.no_grad():
        without = hpo.policy_loss(*arguments, **keywords, advantage_level="row")
    single = hpo.hierarchical_policy_loss(*arguments, **keywords, advantage=lambda rewards: rewards)
    for each in (out, without, single):
        assert torch.equal(each.levels.table, expected.table)
        assert (each.levels.units, each.levels.split) == (expected.units, gate.split)
        assert not each.levels.table.requires_grad
    assert hpo.policy_loss(*arguments, gate, advantage_level="row", backend=backend).levels is None


def test_a_padded_batch(backend):
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 6, generator=draw) < 0.7
    old_logp, advantages = -torch.rand(4, 6, generator=draw), torch.randn(4, 6, generator=draw)
    logp = old_logp + 0.1 * torch.randn(4, 6, generator=draw)
    packed = hpo.PackedBatch(torch.arange(0, 25, 6), mask.flatten())
    keywords = {"gate": GATES["fiberpo"], "backend": backend, "report": ("levels",), "advantage_level": "token"}
    one = hpo.policy_loss(logp, old_logp, advantages, mask, **keywords).levels
    other = hpo.policy_loss(logp.flatten(), old_logp.flatten(), advantages.flatten(), packed, **keywords).levels
    assert torch.equal(one.table, other.table)
    assert one["tokens"].item() == mask.sum() and one["segments"].item() == mask.any(1).sum()


# ------------------------------------------------------------------------------------------------- sums, not quotients


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", ["four levels, through, split", "two_scale", "censored, group"])
def test_parts_without_a_common_segment_add_up_to_the_whole(name, backend):
    gate = GATES[name]
    example = Example(1, (5, 0, 9, 1, 7, 12, 3, 4, 8, 2), spread=0.2)
    domain = example.batch.domain_ids
    assert len(domain.unique()) > 1
    for field in few(backend, ("advantages", "token_advantages")):
        whole = example.run(gate, backend, report=("levels",), advantages=getattr(example, field)).levels
        parts = [example.select(torch.nonzero(domain == each).flatten())[0] for each in domain.unique()]
        parts.append(example.select(torch.tensor([], dtype=torch.int64))[0])
        found = [part.run(gate, backend, report=("levels",), advantages=getattr(part, field)).levels for part in parts]
        assert all(each["tokens"].sum() < whole["tokens"].sum() for each in found)
        for order in (found, found[::-1]):
            total = functools.reduce(lambda a, b: a + b, order)
            torch.testing.assert_close(total.table, whole.table, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", [(), (0, 0), (3, 2)])
def test_nothing_valid(lengths, backend):
    tokens, rows = sum(lengths), len(lengths)
    ids = torch.arange(rows)
    batch = hpo.PackedBatch.from_lengths(
        lengths, mask=torch.zeros(tokens, dtype=torch.bool), steps=torch.zeros(0, 2, dtype=torch.int64),
        trajectory_ids=ids, group_ids=ids, domain_ids=ids,
    )  # fmt: skip
    for name in ("four levels, through, split", "fiberpo"):
        out = hpo.policy_loss(
            torch.zeros(tokens), torch.zeros(tokens), torch.zeros(rows), batch, GATES[name], backend=backend,
            advantage_level="row", report=("levels",),
        )  # fmt: skip
        for numbers in out.levels.compute().values():
            counts = {key: value for key, value in numbers.items() if key.startswith(("segments", "tokens"))}
            assert len(counts) == 6 and not any(counts.values())
            assert all(math.isnan(value) for key, value in numbers.items() if key not in counts)


def test_steps_without_any_row(backend):
    batch = hpo.PackedBatch(torch.zeros(1, dtype=torch.int64), steps=torch.zeros(1, 2, dtype=torch.int64))
    nothing = torch.zeros(0)
    arguments = (nothing, nothing, nothing, batch, gates.step_gspo())
    out = hpo.policy_loss(*arguments, advantage_level="row", report=("levels",), backend=backend)
    assert out.levels["segments"].item() == 0


# ------------------------------------------------------------------------------------------------------------- counts


def test_masked_tokens_and_nan_log_ratios(backend):
    """A masked position is not read; a token with a NaN log-ratio leaves the aggregates, but its sign counts."""
    gate = GATES["four levels, through, split"]
    example = Example(4, masked=True)
    clean = example.run(gate, backend, report=("levels",), advantages=example.token_advantages).levels
    poisoned = {
        name: torch.where(example.covered(gate), values, math.nan)
        for name, values in (("logp", example.logp), ("advantages", example.token_advantages))
    }
    assert torch.equal(example.run(gate, backend, report=("levels",), **poisoned).levels.table, clean.table)

    batch = hpo.PackedBatch.from_lengths([3, 2])
    logp, old_logp = torch.tensor([math.nan, 0.5, 0.1, math.nan, math.nan]), torch.zeros(5)
    out = hpo.policy_loss(logp, old_logp, torch.tensor([0.0, -1.0]), batch, GATES["fiberpo"], backend=backend,
                          report=("levels",))  # fmt: skip
    numbers = out.levels.compute()["trajectory"]
    assert (numbers["tokens"], numbers["segments"]) == (2.0, 1.0)
    assert numbers["log_ratio_mean_rise"] == pytest.approx(0.3)
    assert (numbers["tokens_positive"], numbers["tokens_negative"], numbers["segments_negative"]) == (3.0, 0.0, 0.0)


def test_offsets_of_any_value_are_harmless(backend):
    draw = torch.Generator().manual_seed(0)
    for size in (9, 1 << 40):
        offsets, steps = (torch.randint(-size, size, shape, generator=draw) for shape in ((6,), (7, 2)))
        batch = hpo.PackedBatch(offsets, total_tokens=8, steps=steps, group_ids=offsets[1:], validate=False)
        for gate in (GATES["two_scale"], RatioGate("group", SMALL, levels((Tanh(0.1), GROUP)))):
            for level, count in (("row", 5), ("token", 8)):
                out = hpo.policy_loss(
                    torch.ones(8), None, torch.ones(count), batch, gate, report=("levels",), backend=backend,
                    advantage_level=level,
                )  # fmt: skip
                found = out.levels.table[:, [name.endswith("_positive") for name in slots(False)]]
                assert bool((found >= 0).all())


def test_the_effective_sample_size_of_ratios_whose_squares_are_0(backend):
    batch = hpo.PackedBatch.from_lengths([10, 10])
    logp = torch.full((20,), -40.0)
    out = hpo.policy_loss(logp, 0 * logp, torch.ones(2), batch, GATES["sums"], backend=backend, report=("levels",))
    numbers = out.levels.compute()["trajectory"]
    assert numbers["log_ratio_mean"] == -400.0 and math.isnan(numbers["effective_sample_size"])


def test_log_ratios_beyond_all_floats(backend):
    """Sums of a thousand log-ratios of 60: no float64 holds the ratio, and its metrics say so."""
    gate = GATES["sums"]
    logp = torch.full((1000,), 200.0)
    for sign in (1, -1):
        out = hpo.policy_loss(sign * logp, 0 * logp, torch.ones(1), hpo.PackedBatch.from_lengths([1000]), gate,
                              backend=backend, report=("levels",))  # fmt: skip
        numbers = out.levels.compute()["trajectory"]
        assert numbers["log_ratio_mean"] == numbers["log_ratio_max"] == sign * 60_000.0
        assert numbers["ratio_mean"] == pytest.approx(math.nan if sign > 0 else 0.0, nan_ok=True)
        assert numbers["kl_old_k3"] == pytest.approx(math.nan if sign > 0 else 59_999.0, nan_ok=True)
        assert math.isnan(numbers["effective_sample_size"])
        assert numbers["ratio_max"] == pytest.approx(math.exp(min(sign * 60_000.0, 300.0)))


@pytest.mark.parametrize("shift", [-280.0, -60.0, -20.0, 0.0, 20.0, 60.0, 280.0])
def test_ratios_of_sums_far_from_1(shift, backend):
    """The log-ratios of segments add up: neither distances from 1 nor a saturation hide the small ones."""
    sums = [shift, shift + 1, shift - 1, shift + 2, -290.0 if shift < 0 else shift - 2]
    batch = hpo.PackedBatch.from_lengths([100] * 5)
    logp = (torch.tensor(sums) / 100).repeat_interleave(100)
    ratios = [math.exp(each) for each in (100 * logp[::100].double()).tolist()]
    out = hpo.policy_loss(logp, 0 * logp, torch.ones(5), batch, GATES["sums"], backend=backend, report=("levels",))
    parts = [
        hpo.policy_loss(logp[part.tokens], 0 * logp[part.tokens], torch.ones(part.batch.rows), part.batch,
                        GATES["sums"], weights=torch.ones(part.batch.rows), backend=backend, report=("levels",)).levels
        for part in batch.micro_batches(200)
    ]  # fmt: skip
    for found in (out.levels, sum(parts)):
        numbers = found.compute()["trajectory"]
        assert numbers["ratio_mean"] == pytest.approx(sum(ratios) / 5, rel=1e-4)
        assert numbers["ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
        squares = sum(each * each for each in ratios)
        assert numbers["effective_sample_size"] == pytest.approx(sum(ratios) ** 2 / 5 / squares, rel=1e-4)
        assert numbers["kl_old_k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 5, rel=1e-4, abs=1e-4)


def test_signs_are_those_of_advantages_after_the_gates_weights(backend):
    """The gate's own weights make negative advantages positive here."""
    gate = RatioGate("turned", SMALL, levels((Tanh(0.1), Unit.TRAJECTORY)), advantage_weights=(1.0, -1.0))
    numbers = Example(0).run(gate, backend, report=("levels",)).levels.compute()["trajectory"]
    assert numbers["tokens_negative"] == 0 and numbers["tokens_positive"] == numbers["tokens"]


def test_given_aggregates_are_reported(backend):
    gate = RatioGate("given", Identity(), (Level(Tanh(0.1)), Level(SMALL, Routing.STOPPED, GROUP)))
    batch = hpo.PackedBatch.from_lengths([2, 2, 2], group_ids=torch.tensor([0, 0, 1]))
    logp = torch.tensor([0.1, 0.3, 0.0, 0.0, 0.2, 0.2])
    given = gates.GateInputs(aggregates={"group": torch.tensor([0.5, math.nan])})
    out = hpo.policy_loss(logp, torch.zeros(6), torch.ones(3), batch, gate, gate_inputs=given, backend=backend,
                          report=("levels",), advantage_level="row")  # fmt: skip
    numbers = out.levels.compute()["group"]
    assert (numbers["log_ratio_max"], numbers["log_ratio_min"]) == pytest.approx((0.5, 0.2))
    assert numbers["segment_fraction_clip_high_positive"] == 1.0


def test_a_segment_that_lies_in_several_parents(backend):
    """The segment of its first row is the parent."""
    gate = RatioGate("torn", Identity(), levels((SMALL, Unit.TRAJECTORY), (Tanh(0.1), GROUP)))
    for x, expected in (([0.0, 1.0], "clip_high"), ([1.0, 0.0], "clip_low")):
        for groups in ([3, 5], [5, 3]):
            batch = hpo.PackedBatch.from_lengths(
                [1, 1], total_tokens=2, trajectory_ids=torch.tensor([0, 0]), group_ids=torch.tensor(groups),
                validate=False,
            )  # fmt: skip
            out = hpo.policy_loss(
                torch.tensor(x), torch.zeros(2), torch.ones(2), batch, gate, advantage_level="row", backend=backend,
                report=("levels",),
            )  # fmt: skip
            assert out.levels.compute()["trajectory"][f"segment_fraction_{expected}_positive"] == 1.0


# ---------------------------------------------------------------------------------------------------- device and errors


at_length_too = [pytest.param(each, each, marks=pytest.mark.long) for each in (False, True)]


@pytest.mark.parametrize(("masked", "per_token"), [(False, True), (True, False), *at_length_too])
def test_nothing_synchronises(masked, per_token):
    """The metrics are computed from tables without data; the calls themselves are the same as without metrics."""
    make = Device()
    ids = {f"{unit}_ids": make.ids() for unit in ("trajectory", "group", "domain")}
    for gate in OBSERVED.values():
        spec = gate.spec()
        units = tuple(level.unit for level in spec.levels)
        with OnDevice(ordered=True), NoHostData():
            mask = make(64, dtype=torch.bool) if masked else None
            steps = make(5, 2, dtype=torch.int64) if STEP in units else None
            batch = hpo.PackedBatch(
                make(9, dtype=torch.int64), mask, total_tokens=64, steps=steps, validate=False, **ids
            )
            hierarchy = batch.hierarchy(units)
            inputs = hpo.specs.PolicyLossInputs(
                make(64), make(64), make(64 if per_token else 8), make(8), batch.cu_seqlens, mask,
                advantage_per_token=per_token, leaf_begin=hierarchy.begin, leaf_end=hierarchy.end,
                leaf_row=hierarchy.row, ancestors=hierarchy.ancestors,
            )  # fmt: skip
            exchange = hpo.segment_exchange.exchange_of(batch, spec, gate.name, (), None, None)
            exchange.sums(make(*hierarchy.ancestors.shape, 3, dtype=torch.int64))
            found = hpo.level_metrics.observed_levels(inputs, spec, exchange, make((), dtype=torch.float64))
            total = found + found
        assert total.table.shape == (len(units), len(slots(gate.split)))
        assert total.table.dtype == torch.float64


def test_tokens_are_counted_once_for_a_batch(monkeypatch):
    example, lengths = Example(0), []
    cumsum = torch.Tensor.cumsum
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, *rest: lengths.append(len(self)) or cumsum(self, *rest))
    for _ in range(2):
        example.run(GATES["fiberpo"], "cpu", report=("levels",))
    assert lengths.count(example.logp.numel()) == 1


def test_same_bits_on_any_number_of_threads():
    batch, draw = hpo.PackedBatch.from_lengths([3] * 50_000), torch.Generator().manual_seed(0)
    logp, advantages = torch.randn(150_000, generator=draw) / 9, torch.randn(50_000, generator=draw)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            given = (logp, torch.zeros(150_000), advantages, batch, gates.gspo())
            found.append(hpo.policy_loss(*given, report=("levels",)).levels.table)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_level_metrics_add_up_with_sum():
    batch = hpo.PackedBatch.from_lengths([3, 2])
    given = (torch.zeros(5), torch.arange(5) / 9, torch.ones(2), batch, gates.fiberpo())
    levels = hpo.policy_loss(*given, report=("levels",)).levels
    assert torch.equal(sum([levels, levels]).table, (levels + levels).table)


def test_errors():
    example = Example(0)
    for gate in (gates.ppo_clip(), RatioGate("flat", Identity(), head=Head.LOG, head_numbers=(1.0, 1.0))):
        with pytest.raises(
            ValueError, match=f"^report: 'levels' is for a gate with levels, got '{gate.name}'.*drop it"
        ):
            example.run(gate, "cpu", report=("levels",))
    narrow = Level(Identity(), aggregate=Aggregate.MEAN), Level(Identity(), unit=GROUP, aggregate=Aggregate.BALANCED)
    with pytest.raises(ValueError, match=r"^report: the level 'group' .* counts segments, and 'levels' is made of"):
        example.run(RatioGate("balanced", Identity(), narrow), "cpu", report=("levels",))
    with pytest.raises(ValueError, match=r"^report: only eager calls know it"), OnDevice(ordered=True):
        example.run(GATES["fiberpo"], "cpu", report=("levels",))
    found, other = (
        example.run(GATES[name], "cpu", report=("levels",)).levels for name in ("fiberpo", "fiberpo_domain")
    )
    with pytest.raises(ValueError, match=r"same levels \(trajectory, split=True\), got \(trajectory, group, domain"):
        _ = found + other
    with pytest.raises(ValueError, match="no slot named 'ratio'; the slots are segments, tokens"):
        _ = found["ratio"]
    assert DOMAIN in other.units
