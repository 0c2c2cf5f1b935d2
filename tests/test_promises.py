"""The promises of the README for a policy loss, each one test over all gates of the catalogue on every backend."""

import copy
import functools
import math

import catalogue
import hierarchies
import pytest
import torch
from breadth import at_length, number, tried  # noqa: F401 (the first is a fixture)
from catalogue import CATALOGUE, FIRSTS, Example, assert_exact, bits, run, running
from devices import garbage_in_new_memory
from hierarchies import DOMAIN, GROUP, STEP, TRAJECTORY
from promised import is_slow, of_every_gate, of_twelve_rows, twelve_rows, ways

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import FirstOrder, Penalty, RatioGate, Tanh
from hpo_core.testing import Layout

# ---------------------------------------------------------------------------------------------- masked is never read


def poisoned(inputs, hole, turn):
    """NaN, infinities and a large number wherever nothing may be read, and masks the other way round there."""
    poison = torch.tensor([math.nan, math.inf, -math.inf, 1e30])

    def spoil(values, place):
        if isinstance(values, tuple):
            return tuple(spoil(each, place + k) for k, each in enumerate(values))
        if not isinstance(values, torch.Tensor) or values.shape != hole.shape:
            return values
        if values.dtype == torch.bool:
            return values ^ hole
        return torch.where(hole, poison[(torch.arange(hole.numel()) + turn + place) % 4], values)

    return {name: spoil(values, place) for place, (name, values) in enumerate(inputs.items())}


@of_every_gate()
def test_masked_is_never_read(name, native_backends):
    """Poison at masked tokens, between steps where they are a level, and beyond the last row changes no bit; the
    gradient there is +0."""
    gate, example = CATALOGUE[name], twelve_rows()
    hole = ~example.covered(gate)
    assert hole.sum() >= 8
    for backend in running(name, native_backends):
        for way, (call, inputs) in enumerate(ways(example, gate, backend)):
            clean = of_twelve_rows(name, backend, way)
            assert bits(clean[1][hole]) == [bytes(4 * int(hole.sum()))], backend
            inputs = {"logp": example.logp, "old_logp": example.old_logp, **inputs}
            for turn in range(1 if is_slow(backend) else 4):
                assert bits(*call(example, gate, backend, **poisoned(inputs, hole, turn))) == bits(*clean), backend


@of_every_gate()
def test_rows_without_tokens_are_never_read(name, native_backends):
    """Poison in the numbers of rows that are masked throughout, of trajectories and groups with other rows too, changes
    no bit."""
    gate, example = CATALOGUE[name], Example(3, (5, 4, 9, 1, 7, 40, 3))
    hole = torch.tensor([False, True, False, True, False, False, True])
    example.mask[hole[example.row()]] = False
    for backend in running(name, native_backends):
        for call, inputs in ways(example, gate, backend):
            clean = call(example, gate, backend, **inputs)
            given = {"advantages": example.advantages, "weights": example.weights, **inputs}
            for turn in range(4 if backend == "cpu" else 1):
                assert bits(*call(example, gate, backend, **poisoned(given, hole, turn))) == bits(*clean), backend


@of_every_gate()
def test_nothing_valid_gives_zero(name, native_backends):
    """Loss and gradient are 0, connected and counted as nothing, whatever stands at the masked tokens."""
    gate, example = CATALOGUE[name], Example(0)
    example.mask[:] = False
    for backend in ("reference", *running(name, native_backends)):
        for call, inputs in ways(example, gate, backend):
            inputs = {"logp": example.logp, "old_logp": example.old_logp, **inputs}
            loss, grad, metrics, *tokens = call(example, gate, backend, **poisoned(inputs, ~example.mask, 0))
            assert loss.item() == 0.0, backend
            assert bits(grad, *tokens) == bits(*[torch.zeros_like(grad)] * (1 + len(tokens))), backend
            assert metrics[[hpo.metrics.slot("tokens"), hpo.metrics.slot("rows")]].tolist() == [0, 0], backend


@pytest.mark.parametrize(
    "layout", [Layout(()), Layout((), tail=4), Layout((0, 0)), Layout((1,)), Layout((0, 1, 0), 2)], ids=str
)
def test_degenerate_batches(layout, native_backends):
    for gate in (gates.dapo(), gates.gspo(), gates.cispo()):
        for features in ({"weights", "kl", "kl_weight", "token_weight"}, {"trajectories"}):
            example = testing.random_policy_loss(0, gate, features, layout=layout)
            expected = testing.expect_policy_loss(example)
            for backend in native_backends:
                assert_exact(backend, example, expected)


# -------------------------------------------------------------------------------------------------- first-order true


def on_policy(example, gate):
    """``logp == old_logp``, which differ in the sign of zero at some tokens: a log-ratio of -0 is -0 less +0."""
    turn = torch.arange(example.logp.numel()) % 3
    example.logp = torch.where(turn == 0, -0.0, torch.where(turn == 1, 0.0, example.old_logp))
    example.old_logp = torch.where(turn == 2, example.old_logp, 0.0)
    example.advantages[1] = example.token_advantages[[3, 5]] = 0.0
    side = 0.5 * example.advantages.sign(), 0.5 * example.token_advantages.sign()
    example.target, example.token_target = 1.0 + side[0], 1.0 + side[1]  # the side that the advantage asks for
    inputs = example.needed(gate)
    return inputs | ({"rollout_logp": example.old_logp} if gate.reads_rollout else {})


def calls_of(gate, backend):
    """How many of the three calls below: interpreted, a gate on levels takes as long as two others."""
    return 3 if not is_slow(backend) else 1 if gate.levels else 2


def keeps(first_order):
    """The gates with one of these promises; the penalty k1 has a slope on-policy as well."""
    return [
        name for name, gate in CATALOGUE.items() if gate.first_order in first_order and gate.penalty is not Penalty.K1
    ]


@of_every_gate(keeps([FirstOrder.EXACT, FirstOrder.TARGET]))
def test_on_policy_the_gradient_is_minus_w_a(name, native_backends):
    """It is that to the bit, with every input that leaves it so, and +0 for tokens that are not selected."""
    gate = CATALOGUE[name]
    for backends, lengths in (
        ([each for each in native_backends if is_slow(each)], (5, 0, 40, 1, 7)),
        ([each for each in native_backends if not is_slow(each)], (5, 0, 1100, 1, 7)),
    ):
        backends = running(name, backends)
        if not backends:
            continue
        example = Example(2, lengths)
        few = on_policy(example, gate)
        penalty = ("ref_logp", "kl")
        all_inputs = {key: value for key, value in example.everything(gate).items() if key not in penalty}
        if gate.reads_rollout:
            all_inputs["rollout_logp"] = example.old_logp
        row, covered = example.row(), example.covered(gate)
        selected = covered & example.token_mask & (example.entropy >= 0.7)
        kept = covered & few.get("token_mask", covered)
        of_rows = -(example.weights * example.advantages)[row]
        of_tokens = -(example.weights[row] * example.token_advantages)
        for place, (inputs, expected, chosen) in enumerate(
            (
                (all_inputs, of_tokens * example.token_weight, selected),
                (few | {"old_logp": None}, of_rows, kept),
                (few, of_rows, kept),
            )
        ):
            for backend in backends:
                if place >= calls_of(gate, backend):
                    continue
                grad = example.run(gate, backend, **inputs).grad
                assert torch.equal(grad[chosen], expected[chosen]), backend
                assert bits(grad[~chosen]) == [bytes(4 * int((~chosen).sum()))], backend


@of_every_gate(keeps([FirstOrder.SEGMENT_MEAN, FirstOrder.SEGMENT_SUM]))
def test_on_policy_a_gate_without_residual_gives_its_segment_the_mean(name, native_backends):
    """The mean is that of -w A over the finest level's segment, or its sum, for unselected tokens as well; to the bit
    where all of a segment's are equal."""
    gate, example = CATALOGUE[name], Example(2)
    inputs = on_policy(example, gate)
    row, covered = example.row(), example.covered(gate)
    chosen = covered & example.token_mask
    a = torch.where(chosen, -(example.weights[row].double() * example.token_advantages.double()), 0.0)
    segment = example.segment(gate.levels[0].unit)
    expected = torch.zeros_like(a)
    for each in segment[covered].unique():
        own = covered & (segment == each)
        expected[own] = a[own].mean() if gate.first_order is FirstOrder.SEGMENT_MEAN else a[own].sum()
    same = torch.full_like(example.weights, 0.3711)
    for backend in running(name, native_backends):
        given = inputs | {"advantages": example.token_advantages, "token_mask": example.token_mask}
        grad = example.run(gate, backend, **given).grad
        assert torch.allclose(grad.double(), expected, rtol=4 * 2.0**-24, atol=1e-9), backend
        if gate.first_order is FirstOrder.SEGMENT_MEAN:
            grad = example.run(gate, backend, **inputs, weights=same, advantages=same).grad
            assert torch.equal(grad, torch.where(covered, -(same * same)[0], 0.0)), backend


def test_gates_that_drop_the_residual_say_so():
    """The facts on which the tests above rely."""
    assert {gate.first_order for gate in (hpo.gates.bpo(), hpo.gates.gbpo())} == {FirstOrder.TARGET}
    first_order = {name: CATALOGUE[f"hierarchy: {name}"].first_order for name in ("step_gspo", "sums", "score")}
    assert first_order == {
        "step_gspo": FirstOrder.SEGMENT_MEAN, "sums": FirstOrder.SEGMENT_SUM, "score": FirstOrder.EXACT
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ deterministic


def longer(backend):
    """The length of a row beyond a tile, on the CPU of several workers."""
    emulated = number("cuda_emulated", at_length=2500, machine_code=600, emulated=600, interpreted=600)
    return {"cpu": (17_000,), "cuda_emulated": (emulated,)}.get(backend, ())


@of_every_gate()
def test_bits_are_those_of_every_run_and_of_any_number_of_threads(name, native_backends):
    """New memory may hold anything. Interpreted kernels run in one order on one thread: that memory does not matter to
    them shows in the test of micro-batches."""
    gate = CATALOGUE[name]
    for backend in running(name, native_backends):
        if is_slow(backend):
            continue
        example = twelve_rows(*longer(backend))
        for way, (call, inputs) in enumerate(ways(example, gate, backend)):
            first = bits(*of_twelve_rows(name, backend, way, *longer(backend)))
            for threads in (1, 2, 3) if backend == "cpu" else (1,):
                torch.set_num_threads(threads)
                with garbage_in_new_memory():
                    assert bits(*call(example, gate, backend, **inputs)) == first, (backend, threads)


@of_every_gate(sorted(FIRSTS))
def test_the_order_of_blocks_and_threads_does_not_matter(name, native_backends, monkeypatch):
    """A data race in a CUDA kernel shows as a difference between these orders; nor does it matter how many blocks find
    room."""
    if "cuda_emulated" not in native_backends:
        pytest.skip("cuda_emulated is not built")
    gate, seen = CATALOGUE[name], set()
    example = twelve_rows(*longer("cuda_emulated"))
    orders = ("forward", 3), ("random:1", 1), ("reverse", 4), ("random:2", 3)
    for order, processors in number(
        "cuda_emulated", at_length=orders, machine_code=orders, emulated=orders[:3], interpreted=orders[:3]
    ):
        monkeypatch.setenv("HPO_EMULATION_ORDER", order)
        monkeypatch.setenv("HPO_EMULATION_PROCESSORS", str(processors))
        outcomes = [
            call(example, gate, "cuda_emulated", **inputs) for call, inputs in ways(example, gate, "cuda_emulated")
        ]
        seen.add(tuple(bits(*(each for outcome in outcomes for each in outcome))))
    assert len(seen) == 1


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", ["preset: ppo_clip", "preset: gspo", "preset: fiberpo", "preset: apc", "preset: mis"])
def test_slices_off_a_boundary_have_the_same_bits(name, native_backends):
    """Tensors that begin one element behind a boundary of 16 bytes."""
    gate, example = CATALOGUE[name], twelve_rows(600)
    sliced = copy.copy(example)
    for attribute in Example.TOKENS:
        value = getattr(example, attribute)
        setattr(sliced, attribute, value.new_empty(value.numel() + 1)[1:].copy_(value))
    assert sliced.logp.data_ptr() % 16 == 4
    for backend in running(name, native_backends):
        call, inputs = ways(example, gate, backend)[0]
        _, of_slices = ways(sliced, gate, backend)[0]
        assert bits(*call(example, gate, backend, **inputs)) == bits(*call(sliced, gate, backend, **of_slices)), backend


# ------------------------------------------------------------------------------- batch-invariant, micro-batch-invariant


def coarsest(example, gate):
    """The segment of each row within which rows know of each other: of the coarsest unit of a level or a correction."""
    units = [level.unit for level in gate.levels] + [each.unit for each in gate.corrections if each.unit is not None]
    unit = max([TRAJECTORY, *units])
    return {
        TRAJECTORY: example.trajectory, GROUP: example.batch.group_ids, DOMAIN: example.batch.domain_ids
    }[unit]  # fmt: skip


@of_every_gate()
def test_a_gradient_does_not_depend_on_packing(name, native_backends):
    """Its bits are the same, whatever the order of rows, their place and alignment in the pack, and their
    neighbours. For interpreted kernels the test of micro-batches shows it, whose rows are in another order."""
    gate, order = CATALOGUE[name], torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for backend in running(name, native_backends):
        if is_slow(backend):
            continue
        example = twelve_rows(*longer(backend))
        shuffled, tokens = example.select(order)
        segment = coarsest(example, gate)
        kept = (segment == segment[2])[example.row()]
        loud = {"logp": torch.where(kept, example.logp, example.logp - 1.0)}
        for way, (call, inputs) in enumerate(ways(example, gate, backend)):
            _, grad, _, *of_tokens = of_twelve_rows(name, backend, way, *longer(backend))
            _, moved, _, *moved_tokens = call(shuffled, gate, backend, **ways(shuffled, gate, backend)[way][1])
            assert bits(moved, *moved_tokens) == bits(grad[tokens], *(each[tokens] for each in of_tokens)), backend
            _, other, _, *_ = call(example, gate, backend, **inputs, **loud)
            assert bits(other[kept]) == bits(grad[kept]), backend


@pytest.mark.parametrize("gate", [gates.gspo(0.2, 0.2), gates.dapo()], ids=lambda gate: gate.name)
def test_a_long_row_does_not_depend_on_its_place(gate, native_backends):
    """A row of several tiles, moved by 1 to 3 tokens: no tile boundary may be aligned to the pack."""
    layout = Layout((1, 2, 2600, 3), seed=2, masked="some")
    example = testing.random_policy_loss(0, gate, {"weights", "token_advantages"}, layout=layout)
    row, tokens = example.select(torch.tensor([2]))
    for backend in native_backends:
        alone = run(backend, row).grad
        for order in ([2, 0, 1, 3], [0, 2, 1, 3], [0, 1, 2, 3]):
            moved, index = example.select(torch.tensor(order))
            inside = torch.isin(index, tokens)
            assert bits(run(backend, moved).grad[inside]) == bits(alone), (backend, order)


def cancelling(length, known=False):
    """A trajectory whose parts cancel where gradient goes through aggregates: the rest of them shows in what order
    tokens were added. Where the gradient is known before the sweep, tokens of one sign are added alone: what cancels
    are their totals, but for what is cut off each slot's."""
    alone = Example(5, lengths=(length,), several=False, gaps=False, spread=0.3)
    token, quarter = torch.arange(length), 1 << length.bit_length() - 3
    large, sign = (token % 4 == 0) & (token < 4 * quarter), 1.0 - 2.0 * (token // quarter % 2)
    size = torch.ones(length)
    if known:
        large, sign = token < 4 * quarter, 1.0 - 2.0 * (token // (2 * quarter))
        half = torch.exp2(-30.0 * torch.rand(2 * quarter, generator=torch.Generator().manual_seed(7)))
        size[: 4 * quarter] = torch.cat([half, half.flip(0)])
    alone.logp[:length][large] = alone.old_logp[:length][large] = -1.0
    alone.token_advantages[:length][large] = (sign * size)[large] * 2.0**39
    alone.mask[:length][large] = True
    return alone


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", ["fiberpo", "zeroed at once", "two_scale, token", "bent", "wide"])
def test_a_trajectory_does_not_know_where_it_lies(name, native_backends):
    """Bitwise the same gradient alone and behind any number of tokens, though memory is read in groups of four."""
    bent = RatioGate("bent", hierarchies.SMALL, hierarchies.levels((Tanh(0.2), TRAJECTORY)))
    gate = {**hierarchies.GATES, "bent": bent, "wide": gates.gspo(0.5, 0.5)}[name]
    short = any(level.unit is STEP for level in gate.levels)  # a step is within a slot, and each of them costs
    for backend in native_backends:
        length, *places = tried(backend, (1100, 0, 1, 2, 3, 129, 515), (280, 0, 3, 131) if short else (1100, 0, 3, 515))
        alone, runs, weighted_runs, plain_runs = cancelling(length, name == "wide"), [], [], []
        for before in places:
            moved = Example(6, lengths=(before, length, 40), several=False, spread=0.3)
            inside = slice(before, before + length)
            moved.batch = hpo.PackedBatch(
                moved.batch.cu_seqlens, torch.cat([torch.ones(before), alone.mask[:length], torch.ones(43)]).bool(),
                steps=torch.cat([alone.batch.steps + before, torch.tensor([[before + length, before + length + 40]])]),
            )  # fmt: skip
            moved.logp[inside], moved.old_logp[inside] = alone.logp[:length], alone.old_logp[:length]
            moved.advantages[1], moved.weights[1] = alone.advantages[0], alone.weights[0]
            moved.token_advantages[inside] = alone.token_advantages[:length]
            runs.append(moved.run(gate, backend, advantages=moved.token_advantages).grad[inside])
            if name == "wide":
                weighted_runs.append(moved.run(gate, backend, token_weight=moved.token_advantages).grad[inside])
            plain_runs.append(moved.run(gate, backend).grad[inside])
        for one, *others in filter(None, (runs, weighted_runs, plain_runs)):
            assert one.any() or (name == "wide" and one is not plain_runs[0])  # there nothing is left
            assert all(torch.equal(other, one) for other in others), backend


@of_every_gate()
def test_micro_batches_give_the_same_gradient(name, native_backends):
    """It is the same to the bit for segments that stay whole, rows in any order, whatever new memory holds; losses and
    metrics of the parts add up to those of the step."""
    gate, example = CATALOGUE[name], twelve_rows()
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    place = coarsest(example, gate).unique(return_inverse=True)[1][order] % 2
    parts = [example.select(order[place == half]) for half in (0, 1)]
    for way, inputs in enumerate((example.everything(gate), example.needed(gate), example.paying(gate))):
        expected = testing.expect_policy_loss(example.call(gate, **inputs))
        for backend in running(name, native_backends):
            if way >= len(ways(example, gate, backend)):
                continue
            _, whole, _, *of_tokens = of_twelve_rows(name, backend, way)
            loss, metrics = 0.0, hpo.Metrics(hpo.metrics.empty_metrics("cpu"))
            for part, tokens in parts:
                call, inputs = ways(part, gate, backend)[way]
                with garbage_in_new_memory():
                    of_part, grad, vector, *part_tokens = call(part, gate, backend, **inputs)
                assert bits(grad, *part_tokens) == bits(whole[tokens], *(each[tokens] for each in of_tokens)), backend
                loss, metrics = loss + of_part.double().cpu(), metrics + hpo.Metrics(vector.cpu())
            testing.assert_within_budget(f"{backend} summed loss", loss, expected["loss"])
            testing.assert_within_budget(f"{backend} added metrics", metrics.vector, expected["metrics"])


@pytest.mark.parametrize("gate", [gates.dapo(), gates.cispo(), gates.gspo(0.1, 0.2), gates.gspo_token(0.1, 0.2)])
def test_micro_batches_of_a_batch(gate, native_backends):
    """:meth:`PackedBatch.micro_batches` cuts it."""
    layout = Layout((5, 2, 0, 7, 1, 4), 0, "some", False, 6)
    features = {"weights", "kl", "kl_weight", "token_weight"}
    example = testing.random_policy_loss(0, gate, features, layout=layout)
    for backend in native_backends:
        whole, grad, begin = run(backend, example).grad.cpu(), torch.empty(0), 0
        for part, rows, _, tokens in example.batch.micro_batches(8):
            micro, index = example.select(rows)
            assert torch.equal(index, tokens)
            grad, begin = torch.cat((grad, run(backend, micro).grad.cpu())), begin + part.rows
        assert begin == example.batch.rows
        assert bits(grad) == bits(whole), backend


# ----------------------------------------------------------------------------------------------- all of them at once


@pytest.mark.parametrize(
    "gate", [gates.dapo(), gates.cispo(), gates.gspo(0.1, 0.2), gates.gspo_token(0.1, 0.2)], ids=lambda gate: gate.name
)
@pytest.mark.usefixtures("at_length")
def test_the_public_check_finds_nothing(gate, backend):
    fn = functools.partial(hpo.policy_loss, backend=backend)
    examples = number(backend, at_length=15, machine_code=6, emulated=2, interpreted=1)
    report = testing.check(fn, gate=gate, examples=examples, device=testing.device_of(backend))
    report.raise_for_broken()
    assert report.kept == testing.promises("policy_loss")


# Presets without a target whose rows know of each other only within a trajectory, as generated batches have them.
CHECKED = [
    name
    for name, gate in catalogue.FAMILIES["preset"].items()
    if not gate.takes_target and all(level.unit <= TRAJECTORY for level in gate.levels)
]
FEW = [(name, 1) for name in CHECKED if f"preset: {name}" in FIRSTS]


@pytest.mark.parametrize(
    ("name", "examples"), FEW + [pytest.param(name, 20, marks=pytest.mark.long) for name in CHECKED]
)
def test_the_public_check_finds_nothing_in_a_preset(name, examples):
    """On the CPU, whose call is the cheapest; one preset of every structure, and at length all."""
    gate = catalogue.FAMILIES["preset"][name]
    fn = functools.partial(hpo.policy_loss, gate=gate, backend="cpu")
    report = testing.check(fn, "policy_loss", gate=gate, examples=examples)
    report.raise_for_broken()
    assert len(report.kept) >= 10
