"""policy_loss on every backend: every path against the float64 reference, and the bits of its quick ways."""

import functools
import itertools
import math
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
import torch
from breadth import at_length, number  # noqa: F401 (the first is a fixture)
from catalogue import KINDS, PENALTIES, assert_exact, assert_same_metrics, bits, run, the_long_way
from conftest import NATIVE
from devices import garbage_in_new_memory
from gate_examples import LONG, every_gate, example_of, optional_inputs, subsets
from hypothesis import strategies as st

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import Clip, RatioGate
from hpo_core.testing import Layout
from hpo_core.testing.promises import shifted


@pytest.mark.usefixtures("at_length")
@every_gate
def test_every_path(gate, native_backends):
    """Every subset of the optional inputs, with penalties in turn, at length. Otherwise those that differ from the
    smallest or the largest by one input, in which any two inputs are given together, alone and not at all; where
    kernels are interpreted these two alone."""
    names = optional_inputs(gate)
    most = len(names)
    for each, features in enumerate(subsets(names)):
        middle = min(len(features), most - len(features))  # inputs from the smallest or the largest subset
        backends = [
            backend
            for backend in native_backends
            if middle <= number(backend, at_length=most, machine_code=1, emulated=1, interpreted=0)
        ]
        if backends:
            example = example_of(each, gate, features, PENALTIES[each % len(PENALTIES)])
            expected = testing.expect_policy_loss(example)
            for backend in backends:
                assert_exact(backend, example, expected)


@pytest.mark.long
@every_gate
def test_every_path_with_every_penalty(gate, native_backends):
    for each, (features, penalty) in enumerate(itertools.product(subsets(optional_inputs(gate)), PENALTIES)):
        example = example_of(each, gate, features, penalty)
        expected = testing.expect_policy_loss(example)
        for backend in native_backends:
            assert_exact(backend, example, expected)


@pytest.mark.parametrize("penalty", PENALTIES[1:], ids=lambda k: f"{k.estimator.name}-{k.gradient.name}")
def test_every_penalty(penalty, native_backends):
    for each, gate in enumerate((gates.dapo(), gates.reinforce(), gates.gspo(0.1, 0.2), gates.gspo_token(0.1, 0.2))):
        example = example_of(each, gate, {"token_mask", "kl_weight"} if each % 2 else {"token_mask"}, penalty)
        expected = testing.expect_policy_loss(example)
        for backend in native_backends:
            assert_exact(backend, example, expected)


@pytest.mark.parametrize("backend", ["reference", *NATIVE])
def test_the_gradient_of_r_k3_is_r_s_however_far_the_reference_policy_is(backend):
    """The two shares of r e^-s in it cancel: rounded, what is left of them hides r s."""
    s, x = torch.tensor([-0.5, -12.0, -25.0, -45.0, -60.0, -90.0, 40.0, 90.0]), 0.25
    logp, beta = torch.full_like(s, -100.0), 0.125
    batch, weights = hpo.PackedBatch.from_lengths([len(s)]), torch.ones(1)
    given = {"weights": weights, "ref_logp": logp - s, "kl": hpo.kl.k3(beta, "importance"), "backend": backend}
    grad = hpo.policy_loss_and_grad(logp, logp - x, torch.zeros(1), batch, **given).grad
    torch.testing.assert_close(grad, beta * math.exp(x) * s.clamp(-60, 60), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "preset", [gates.ppo_clip(), gates.dapo(), gates.cispo(), gates.reinforce(), gates.gspo(), gates.gspo_token()],
    ids=lambda gate: gate.name,
)  # fmt: skip
@pytest.mark.usefixtures("at_length")
def test_presets(preset, native_backends):
    """On random batches: many of them on the cpu, three elsewhere."""
    features = [name for name in testing.FEATURES if name != "bounds" or preset.takes_bounds]
    for seed in range(30):
        example = testing.random_policy_loss(seed, preset, features[: 1 + seed % len(features)])
        expected = testing.expect_policy_loss(example)
        for backend in native_backends:
            if seed < number(backend, at_length=30, machine_code=30, emulated=3, interpreted=3):
                assert_exact(backend, example, expected)


@pytest.mark.parametrize(
    "gate", [gates.dapo(), gates.cispo(), gates.gspo(0.1, 0.2), gates.gspo_token(0.1, 0.2)], ids=lambda gate: gate.name
)
def test_rows_longer_than_a_tile(gate, native_backends):
    features = {"weights", "trajectories", "kl", "token_weight", "token_advantages"}
    for chosen in ("window", "kl_weight"):
        example = testing.random_policy_loss(0, gate, features | {chosen}, layout=LONG)
        expected = testing.expect_policy_loss(example)
        for backend in native_backends:
            assert_exact(backend, example, expected)


FEW_TOKENS = (5, 0, 30, 9)
MANY_TOKENS = ((0, 1, 2500, 130, 1, 0, 1025, 3), tuple(length % 4 for length in range(700)))


@pytest.mark.parametrize("gate", [gates.ppo_clip(), gates.gspo(), gates.fiberpo()], ids=lambda gate: gate.name)
def test_rows_that_begin_where_a_tile_does(gate, native_backends):
    """All rows of a padded batch of 512 columns do: tiles of 512 or 1,024 tokens are counted from the first one."""
    example = testing.random_policy_loss(1, gate, {"weights"}, layout=Layout((512, 1024, 512, 100), 0, "none", seed=1))
    expected = testing.expect_policy_loss(example)
    for backend in native_backends:
        assert_exact(backend, example, expected)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("masked", ["none", "some", "row"])
@every_gate
def test_loss_and_gradient_and_nothing_per_token(gate, masked, native_backends):
    """The call that trainers make: the CPU takes its whole vectors in one pass, which others do not reach."""
    for rows in (*MANY_TOKENS, FEW_TOKENS):
        few, fewest = rows == FEW_TOKENS, rows == FEW_TOKENS and masked == "some"
        backends = [
            each
            for each in native_backends
            if number(each, at_length=True, machine_code=True, emulated=few, interpreted=fewest)
        ]
        layout = Layout(rows, 16 - sum(rows) % 16, masked, True, 3)
        features = {"weights"} | ({"trajectories"} if gate.level is not None else set())
        example = testing.random_policy_loss(0, gate, features, layout=layout)
        expected = testing.expect_policy_loss(example)
        for backend in backends:
            fn = functools.partial(hpo.policy_loss, backend=backend)
            out = testing.run_policy_loss(fn, testing.move(example, testing.device_of(backend)))
            testing.assert_within_budget(f"{backend} loss", out.loss, expected["loss"])
            testing.assert_within_budget(f"{backend} gradient", out.grad, expected["grad"])
            testing.assert_within_budget(f"{backend} metrics", out.metrics.vector, expected["metrics"])
            assert bits(out.grad) == bits(run(backend, example).grad), f"{backend}: what else is asked for changes bits"


@pytest.mark.parametrize("masked", [False, True])
@every_gate
def test_tiles_of_few_rows_have_the_gradient_of_any_other(gate, masked, backend="cpu"):
    """Without anything exceptional the CPU goes through few rows one by one, each by its sign and its bounds alone.

    They meet inside a vector, in the last one of a group, where a group begins, and where a tile does; one has no valid
    token, and seven tokens are in no row. Entropies that are NaN and advantages of tokens that differ inside a row send
    them the long way.
    """
    borders = torch.tensor([0, 1020, 1144, 1152, 1400, 1401, 2048, 2500, 2563, 6000, 9001])
    tokens, lengths = 9008, borders.diff().tolist()
    draw = torch.Generator().manual_seed(1)
    mask = torch.rand(tokens, generator=draw) < (0.7 if masked else 2.0)
    mask[1152:1400] = False
    batch = hpo.PackedBatch.from_lengths(lengths, tokens, mask=mask if masked else None)
    old_logp = -torch.rand(tokens, generator=draw)
    logp = (old_logp + 0.3 * torch.randn(tokens, generator=draw)).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.25, 2.0, -0.5, -1.5, 0.75, 1.25, -0.125])
    with garbage_in_new_memory():  # a gradient that nobody writes is NaN
        plain = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, backend=backend)
    other = hpo.policy_loss(logp, old_logp, advantages, batch, gate, backend=backend, report=("tokens",))
    other.loss.backward()
    assert bits(plain.grad) == bits(logp.grad) and bits(plain.loss) == bits(other.loss)
    assert torch.equal(plain.metrics.vector, other.metrics.vector)
    unknown = torch.full((tokens,), math.nan)
    own = torch.ones(tokens).index_put((torch.arange(9001),), advantages.repeat_interleave(borders.diff()))
    given = {"advantage_level": "token", "entropy": unknown, "backend": backend}
    one_for_a_row = hpo.policy_loss_and_grad(logp, old_logp, own, batch, gate, **given)
    assert bits(plain.grad) == bits(one_for_a_row.grad)
    long_way = hpo.policy_loss_and_grad(logp, old_logp, own, batch, gate, **given, **the_long_way(logp.detach()))
    if not gate.levels:  # else the gradients of all tokens know of the others
        assert torch.equal(plain.grad, long_way.grad)
    torch.testing.assert_close(plain.grad, long_way.grad, rtol=2e-6, atol=1e-12)
    assert_same_metrics(plain, long_way)


@pytest.mark.parametrize(
    "gate",
    [*KINDS.values(), gates.fiberpo(), gates.fiberpo(0.8, (0.8, 0.8))],
    ids=[*KINDS, "fiberpo", "fiberpo, wide bounds"],
)
def test_log_ratios_near_0_have_the_bits_of_any_other(gate, backend="cpu"):
    """The CPU takes a tile for near 0 if the last one was, and has another exponential for those. A row alone has none
    before it; and advantages of tokens that differ inside each row send all of them the long way, which rounds
    differently."""
    lengths = [2048, 1024, 1024, 1024, 2048, *[40] * 60, 1024, 1024, 1030, 1100, 500, 2048]
    spreads = torch.tensor([0.01, 0.01, 0.5, 0.01, 2.0, *[0.01] * 59, 0.4, 0.01, 0.0, 0.3, 0.3, 0.5, 0.3])
    batch = hpo.PackedBatch.from_lengths(lengths)
    draw = torch.Generator().manual_seed(2)
    old_logp = -torch.rand(sum(lengths), generator=draw)
    noise = 2 * torch.rand(sum(lengths), generator=draw) - 1
    logp = old_logp + spreads.repeat_interleave(torch.tensor(lengths)) * noise
    old_logp[6000:6006] = -32.0  # halves, between two integers, and large ones in the row of 2.0
    logp[6000:6006] = old_logp[6000:6006] + torch.tensor([0.5, -0.5, 1.5, -2.5, 31.0, -31.0])
    logp.requires_grad_()
    advantages = torch.randn(len(lengths), generator=draw)
    weights = hpo.aggregation.token_mean(batch)
    keywords = {"weights": weights, "backend": backend}
    plain = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, **keywords)
    other = hpo.policy_loss(logp, old_logp, advantages, batch, gate, report=("tokens",), **keywords)
    other.loss.backward()
    assert bits(plain.grad) == bits(logp.grad) and bits(plain.loss) == bits(other.loss)
    assert torch.equal(plain.metrics.vector, other.metrics.vector)

    one_by_one = zip(logp.detach().split(lengths), old_logp.split(lengths), plain.grad.split(lengths), strict=True)
    for row, (new, old, grad) in enumerate(one_by_one):
        alone, this = hpo.PackedBatch.from_lengths([len(new)]), slice(row, row + 1)
        out = hpo.policy_loss_and_grad(new, old, advantages[this], alone, gate, weights=weights[this], backend=backend)
        assert bits(out.grad) == bits(grad)

    keywords |= the_long_way(logp.detach())
    long_way = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, **keywords)
    torch.testing.assert_close(plain.grad, long_way.grad, rtol=2e-6, atol=1e-12)
    assert_same_metrics(plain, long_way)


LEVELS_WITH_PENALTY = {
    "gspo": gates.gspo(0.1, 0.2),
    "gspo_token": gates.gspo_token(0.1, 0.2),
    "fiberpo": gates.fiberpo(),
    "fiberpo, wide bounds": gates.fiberpo(0.8, (0.8, 0.8)),
    "gmpo": gates.gmpo(),
}


@pytest.mark.parametrize("gate", LEVELS_WITH_PENALTY.values(), ids=LEVELS_WITH_PENALTY)
def test_a_penalty_beside_the_fast_path_of_levels(gate, backend="cpu"):
    """The CPU adds the penalty of a reference policy to what the fast path of a leaf has written. Rows that have a
    log-ratio to it of some size, or none, go the long way, which coefficients of tokens send all of them."""
    lengths = [2048, 1030, 300, *[40] * 30, 1100, 2048]
    draw, tokens = torch.Generator().manual_seed(3), sum(lengths)
    mask = torch.rand(tokens, generator=draw) < 0.8
    mask[:1030] = True
    old_logp = -torch.rand(tokens, generator=draw)
    ref_logp = old_logp + 0.5 * torch.randn(tokens, generator=draw)
    logp = (old_logp + 0.2 * torch.randn(tokens, generator=draw)).requires_grad_()
    ref_logp[2048], ref_logp[3100], ref_logp[3400] = -15.0, math.nan, -math.inf
    ref_logp[~mask] = math.nan
    advantages = torch.randn(len(lengths), generator=draw)
    coefficients = hpo.entropy.Selection(kl_weight=torch.ones(tokens))
    for masked, (estimator, gradient) in itertools.product(
        (False, True), ((hpo.kl.k1, "value"), (hpo.kl.k2, "value"), (hpo.kl.k3, "value"), (hpo.kl.k3, "importance"))
    ):
        batch = hpo.PackedBatch.from_lengths(lengths, mask=mask if masked else None)
        reference = ref_logp if masked else torch.where(mask, ref_logp, old_logp)
        weights = hpo.aggregation.token_mean(batch)
        keywords = {"weights": weights, "kl": estimator(0.3, gradient=gradient), "backend": backend}
        given = {"ref_logp": reference, **keywords}
        plain = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, **given)
        tokenwise = hpo.policy_loss(logp, old_logp, advantages, batch, gate, report=("tokens",), **given)
        tokenwise.loss.backward()
        assert bits(plain.grad) == bits(logp.grad) and bits(plain.loss) == bits(tokenwise.loss)
        logp.grad = None
        long_way = hpo.policy_loss(
            logp, old_logp, advantages, batch, gate, selection=coefficients, report=("tokens",), **given
        )
        long_way.loss.backward()
        torch.testing.assert_close(plain.grad, logp.grad, rtol=2e-6, atol=1e-10)
        torch.testing.assert_close(plain.loss, long_way.loss, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(plain.metrics.vector, long_way.metrics.vector, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(tokenwise.tokens, long_way.tokens, rtol=2e-6, atol=1e-7)
        assert not plain.grad[~mask].any() or not masked
        logp.grad = None
        parts = zip(
            logp.detach().split(lengths), old_logp.split(lengths), reference.split(lengths), mask.split(lengths),
            plain.grad.split(lengths), strict=True,
        )  # fmt: skip
        for row, (new, old, ref, kept, grad) in enumerate(parts):
            alone = hpo.PackedBatch.from_lengths([len(new)], mask=kept if masked else None)
            this = slice(row, row + 1)
            single = {**keywords, "weights": weights[this], "ref_logp": ref}
            out = hpo.policy_loss_and_grad(new, old, advantages[this], alone, gate, **single)
            assert bits(out.grad) == bits(grad), row


@pytest.mark.parametrize("gate", [*KINDS.values(), gates.fiberpo()], ids=[*KINDS, "fiberpo"])
def test_tiles_that_a_mask_leaves_whole_or_empty(gate):
    """The CPU goes through them without the mask, or not at all: no bit tells."""
    rows, length = 4, 3000
    draw = torch.Generator().manual_seed(2)
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[0, 700:], mask[2], mask[3, 2500:] = False, False, torch.rand(500, generator=draw) < 0.5
    old_logp = -torch.rand(rows, length, generator=draw)
    logp = (old_logp + 0.3 * torch.randn(rows, length, generator=draw)).where(mask, torch.nan)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.25])

    def call(logp, batch, **keywords):
        leaf = logp.clone().requires_grad_()
        out = hpo.policy_loss(leaf, old_logp, advantages, batch, gate, backend="cpu", **keywords)
        out.loss.backward()
        return bits(out.loss), bits(leaf.grad), bits(out.metrics.vector)

    batch = hpo.PackedBatch.from_padded(mask)
    assert call(logp, batch) == call(logp, batch, report=("tokens",))  # which takes another way
    assert not hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, backend="cpu").grad[~mask].any()
    everything, every_logp = torch.ones_like(mask), logp.nan_to_num(-1.0)
    unmasked = hpo.PackedBatch.from_padded(everything).replace(mask=None)
    assert call(every_logp, hpo.PackedBatch.from_padded(everything)) == call(every_logp, unmasked)


@pytest.mark.parametrize("gate", [gates.dapo(), gates.tis(), gates.sapo(), gates.gspo()], ids=lambda gate: gate.name)
def test_a_gradient_larger_than_the_caches_has_the_bits_of_any_other(gate, backend="cpu"):
    """A gradient of 2^20 tokens or more is written past the caches, those of its two parts are not."""
    lengths = torch.cat([torch.tensor([0, 1, 7, 60, 1500, 3, 100]).repeat(626), torch.tensor([2**14 + 5])])
    batch = hpo.PackedBatch.from_lengths(lengths, mask=torch.arange(int(lengths.sum())) % 500 < 450)
    draw = torch.Generator().manual_seed(0)
    logp, old_logp, rollout_logp = -0.5 + 0.2 * torch.randn(3, batch.total_tokens, generator=draw)
    advantages, weights = torch.randn(2, batch.rows, generator=draw).unbind()

    def gradient(rows, tokens, part):
        return hpo.policy_loss_and_grad(
            logp[tokens], old_logp[tokens], advantages[rows], part, gate, weights=weights[rows], backend=backend,
            rollout_logp=rollout_logp[tokens] if gate.reads_rollout else None,
        ).grad  # fmt: skip

    cut = batch.rows // 2
    middle = int(lengths[:cut].sum())
    first, second = (slice(0, cut), slice(0, middle)), (slice(cut, None), slice(middle, None))
    parts = [
        gradient(rows, tokens, hpo.PackedBatch.from_lengths(lengths[rows], mask=batch.mask[tokens]))
        for rows, tokens in (first, second)
    ]
    assert batch.total_tokens > 2**20
    with garbage_in_new_memory():
        whole = gradient(slice(None), slice(None), batch)
    assert bits(whole) == bits(torch.cat(parts))


@pytest.mark.parametrize("gate", [gates.dapo(), gates.gspo(0.1, 0.2)], ids=lambda gate: gate.name)
def test_many_short_rows(gate, native_backends):
    layout = Layout(tuple(length % 4 for length in range(700)), 3, "some", True, 5)
    example = testing.random_policy_loss(0, gate, {"weights", "trajectories"}, layout=layout)
    expected = testing.expect_policy_loss(example)
    for backend in native_backends:
        assert_exact(backend, example, expected)


@pytest.mark.parametrize("gate", [gates.dapo(), gates.gspo(0.1, 0.2), gates.gmpo(0.2, 0.2)], ids=lambda g: g.name)
def test_where_a_tensor_begins_changes_no_bit(gate, native_backends):
    """Each tensor of tokens alone begins off alignment, and then all others do, as those that are cut from a batch."""
    layout = Layout((9, 150, 1, 20), 3, "some", False, 5)
    features = {"weights", "kl", "entropy", "token_mask", "token_weight"} | ({"bounds"} if gate.takes_bounds else set())
    example = testing.random_policy_loss(0, gate, features, penalty=PENALTIES[1], layout=layout)
    tensors = set()
    example.on_tokens(lambda values: tensors.add(id(values)) or values)
    for backend in native_backends:
        loss = functools.partial(hpo.policy_loss, backend=backend)

        def outcome(off, loss=loss, backend=backend):
            moved = example.on_tokens(lambda values: shifted(values) if id(values) in off else values)
            out = testing.run_policy_loss(loss, testing.move(moved, testing.device_of(backend)))
            return bits(out.loss, out.grad, out.metrics.vector)

        expected = outcome(set())
        for one in tensors:
            assert outcome({one}) == outcome(tensors - {one}) == expected, backend


@hypothesis.settings(max_examples=1000)  # fewer in every run, as conftest.py says
@hypothesis.given(name=st.sampled_from(sorted(KINDS)), data=st.data())
def test_generated(backend, name, data):
    gate = KINDS[name]
    features = [name for name in testing.FEATURES if name != "bounds" or gate.takes_bounds]
    assert_exact(backend, data.draw(testing.policy_losses(gate, features)))


def test_the_budget_has_the_rounding_of_a_log_ratio(backend):
    """The squares of e^5 - 1 and e^4.6 - 1 make a metric, and eager float32 is near by luck: its errors cancel."""
    features = {"window", "token_advantages", "entropy", "kl", "kl_weight", "weights"}
    layout = Layout((3, 5), tail=3, masked="row", seed=195)
    assert_exact(backend, testing.random_policy_loss(0, KINDS["drop, score"], features, layout=layout))


def test_loss_and_grad_without_autograd_is_the_same(backend):
    for each, gate in enumerate(KINDS.values()):
        example = testing.move(example_of(each, gate, {"token_weight"}, PENALTIES[1]), testing.device_of(backend))
        fn = functools.partial(hpo.policy_loss_and_grad, backend=backend)
        direct, through = testing.run_policy_loss(fn, example), run(backend, example)
        assert bits(direct.loss) == bits(through.loss) and bits(direct.grad) == bits(through.grad)
        assert bits(direct.metrics.vector) == bits(through.metrics.vector)
        with torch.no_grad():  # a kernel that computes no gradient gives the same loss
            keywords = example.keywords | {"gate": gate, "backend": backend}
            loss = hpo.policy_loss(example.logp, example.old_logp, example.advantages, example.batch, **keywords).loss
        assert bits(loss) == bits(through.loss)


def own_gate(number):
    """A gate of parts, with a number in each place that kernels know."""
    clip = Clip((0, number / 2), (number * 2, number * 3), weight_low=(number, 2))
    pre = gates.LogClip((-number, -number), (number, number))
    return RatioGate("own", clip, pre=pre, penalty=gates.Penalty.K3, penalty_coefficient=number)


OF_ONE = {
    "sapo": lambda one: gates.sapo(one, one),
    "spo": gates.spo,
    "vespo": lambda one: gates.vespo((one, one), (one, one)),
    "tis": gates.tis,
    "parts": own_gate,
    "advantage_weights": lambda one: RatioGate("own", Clip(), advantage_weights=(one / 2, one * 2)),
    "corrections": lambda one: RatioGate(
        "own", Clip(), corrections=(gates.Correction(gates.Action.CLAMP, (-one, -one), (one, one)),)
    ),
}


@pytest.mark.parametrize("make", OF_ONE.values(), ids=OF_ONE)
def test_a_number_of_any_type_is_the_same_number(backend, make):
    logp = torch.linspace(-2, -0.1, 12)
    batch = hpo.PackedBatch.from_lengths([5, 7])

    def bits_of(one):
        gate = make(one)
        result = hpo.policy_loss_and_grad(
            logp, logp.flip(0), torch.tensor([1.0, -2.0]), batch, gate,
            rollout_logp=logp - 0.5 if gate.reads_rollout else None,
            ref_logp=logp + 0.25, kl=hpo.kl.KLPenalty(hpo.kl.KLEstimator.K3, one, hpo.kl.KLGradient.VALUE),
            backend=backend,
        )  # fmt: skip
        return bits(result.loss), bits(result.grad)

    expected = bits_of(1.0)
    for one in (1, Fraction(1), np.float32(1), np.int64(1)):
        assert bits_of(one) == expected, type(one)
    assert make(1) == make(1.0) and hash(make(1)) == hash(make(1.0))


def test_step_advantages_are_those_of_their_tokens(backend):
    example = testing.move(example_of(1, gates.dapo(), set(), None), testing.device_of(backend))
    steps = torch.randn(example.batch.num_steps, generator=torch.Generator().manual_seed(0)).to(example.logp.device)
    number = example.batch.step_of_token()
    tokens = torch.where(number >= 0, steps[number.clamp(min=0)], 0.0)
    by_step = run(backend, example._replace(advantages=steps).given(advantage_level="step"))
    by_token = run(backend, example._replace(advantages=tokens).given(advantage_level="token"))
    assert bits(by_step.grad) == bits(by_token.grad) and bits(by_step.loss) == bits(by_token.loss)


def test_a_mask_may_have_any_byte(backend):
    """Another library's true is 255; PyTorch's own mask has 0 and 1."""
    draw = torch.Generator().manual_seed(5)
    masks = [torch.rand(180, generator=draw) > 0.4 for _ in range(2)]
    any_byte = torch.tensor((2, 4, 128, 255), dtype=torch.uint8)[torch.arange(180) % 4]
    for gate, penalty in ((gates.ppo_clip(), None), (gates.fiberpo(), None), (gates.ppo_clip(), hpo.kl.k3(0.1))):
        logp, old_logp, ref_logp = torch.randn(3, 180, generator=draw) - 3
        results = []
        for mask, token_mask in (masks, [(each * any_byte).view(torch.bool) for each in masks]):
            batch = hpo.PackedBatch.from_lengths([100, 3, 77], mask=mask, group_ids=torch.arange(3))
            given = {"token_mask": token_mask, "ref_logp": None if penalty is None else ref_logp, "kl": penalty}
            out = hpo.policy_loss_and_grad(logp, old_logp, logp[:3] + 3, batch, gate, backend=backend, **given)
            results.append((bits(out.loss), bits(out.grad), bits(out.metrics.vector)))
        assert results[0] == results[1], gate.name


def test_padded_batch_keeps_its_shape_and_its_bits(backend):
    packed = testing.random_policy_loss(4, gates.gspo(0.1, 0.2), layout=Layout((6, 6, 6), masked="some", seed=4))
    padded = packed.on_tokens(lambda x: x.reshape(3, 6))._replace(batch=packed.batch.mask.reshape(3, 6))
    a, b = run(backend, packed), run(backend, padded)
    assert b.grad.shape == (3, 6) and b.tokens.shape == (3, 6)
    assert bits(a.grad) == bits(b.grad) and bits(a.loss) == bits(b.loss)
