"""The inputs of gates: corrections, bounds, targets and masks, and those that callers compute."""

import functools
import itertools
import math

import pytest
import torch
from catalogue import Example

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import RatioGate
from hpo_core.gates.draws import key_of_places
from hpo_core.reference.covariance import draws_of_places


def test_impossible_bounds_are_counted_and_left_out(native_backends):
    """Epsilons in place of ratios, NaN, bounds on the wrong side of 1; what is masked is never read."""
    example = Example(0)
    low, high = example.low.clone(), example.high.clone()
    low[0], low[1], low[2], high[3], high[4] = math.nan, -0.1, 1.01, 0.2, math.nan
    wrong = torch.arange(low.numel()) < 5
    low[~example.mask] = math.nan
    inside = wrong & example.mask
    inside[int(example.batch.cu_seqlens[-1]) :] = False
    assert 0 < inside.sum() < 5
    for backend in ("reference", *native_backends):
        out = example.run(gates.ppo_clip(), backend, bounds=(low, high), token_weight=example.token_weight)
        clean = {"bounds": (example.low, example.high), "token_weight": example.token_weight}
        expected = example.run(gates.ppo_clip(), backend, **clean, token_mask=~wrong)
        assert torch.equal(out.grad, expected.grad), backend
        assert out.metrics.compute()["bad_advantages"] == inside.sum(), backend
        only = example.run(gates.ppo_clip(), backend, bounds=(None, high))
        assert only.metrics.compute()["bad_advantages"] == inside[3:5].sum(), backend


def test_the_mask_of_a_method_and_that_of_the_loss_are_both_kept(native_backends):
    example = Example(0)
    first, second = example.token_mask, example.penalty_mask
    for backend in ("reference", *native_backends):
        both = example.run(gates.ppo_clip(), backend, gate_inputs=gates.GateInputs(token_mask=first), token_mask=second)
        assert torch.equal(both.grad, example.run(gates.ppo_clip(), backend, token_mask=first & second).grad), backend


def test_the_weight_of_a_method_and_that_of_the_loss_are_multiplied(native_backends):
    example = Example(0)
    first, second = example.token_weight, example.token_weight.flip(0)
    for backend in ("reference", *native_backends):
        run = functools.partial(example.run, gates.ppo_clip(), backend)
        dtype = torch.float64 if backend == "reference" else torch.float32
        both = run(gate_inputs=gates.GateInputs(token_weight=first.to(dtype)), token_weight=second)
        expected = run(token_weight=first.to(dtype) * second.to(dtype))
        assert torch.equal(both.grad, expected.grad) and torch.equal(both.loss, expected.loss), backend
        alone = run(gate_inputs=gates.GateInputs(token_weight=first.to(dtype)))
        assert torch.equal(alone.grad, run(token_weight=first).grad), backend
        assert not torch.equal(alone.grad, both.grad), backend


@pytest.mark.parametrize(
    ("gate", "low", "high"),
    [
        (gates.ppo_clip(), (None, 0.5), (1.5, None)),
        (gates.ppo_clip(ratio_dual=3.0), (None, 0.5), (1.5, 3.0)),
        (gates.ppo_clip(ratio_dual=1.2), (None, 0.5), (1.5, 1.2)),  # a dual clip that lies at 1 + high is one, too
        (gates.ppo_clip(eps_low=1.0, ratio_dual=3.0), (None, None), (1.5, 3.0)),
        (gates.cispo(4.0, 0.8), (0.5, 0.5), (1.5, 1.5)),
        (gates.cispo(4.0), (None, None), (1.5, 1.5)),
        (RatioGate("x", gates.Clip((0.7, 0.8), (math.inf, math.inf))), (0.5, 0.5), (None, None)),
        (RatioGate("x", gates.Clip((0.7, 0.8), (1.3, 1.2))), (0.5, 0.5), (1.5, 1.5)),
        (RatioGate("x", gates.Clip((0.7, 0.8), (1.2, math.inf))), (0.5, 0.5), (1.5, None)),
    ],
)
def test_bounds_replace_all_that_a_clip_has_but_the_dual(gate, low, high, backend):
    """Just inside a bound a token has a gradient, just outside none; with None nothing stops it."""
    batch, tensors = (
        hpo.PackedBatch.from_lengths([4]),
        functools.partial(torch.tensor, device=testing.device_of(backend)),
    )
    given = gates.GateInputs(bounds=(tensors([0.5] * 4), tensors([1.5] * 4)))
    for sign, lowest, highest in ((1.0, low[0], high[0]), (-1.0, low[1], high[1])):
        below, above = (0.01, 0.02) if lowest is None else (lowest * 0.99, lowest * 1.01), (90.0, 91.0)
        if highest is not None:
            above = (highest * 0.99, highest * 1.01)
        ratio = tensors([*below, *above])
        out = hpo.policy_loss_and_grad(
            ratio.log(), torch.zeros_like(ratio), tensors([sign]), batch.to(ratio.device), gate, gate_inputs=given,
            backend=backend,
        )  # fmt: skip
        if gate.head is gates.Head.SCORE:  # every token has a gradient: of the clipped ratio
            torch.testing.assert_close(out.grad, -sign / 4 * ratio.clamp(lowest, highest))
        else:
            assert (out.grad != 0).tolist() == [lowest is None, True, True, highest is None]


@pytest.mark.parametrize("target", [math.nan, math.inf])
def test_targets_that_are_not_finite_are_counted_and_left_out(target, backend):
    example = Example(0)
    example.target[4] = target
    out = example.run(gates.bpo(), backend, target=example.target)
    here = example.row() == 4
    here[int(example.batch.cu_seqlens[-1]) :] = False
    assert not out.grad[here].any()
    assert out.metrics.compute()["bad_advantages"] == example.mask[here].sum()


@pytest.mark.parametrize(
    "bounds", [(1.5, 2.0), (-0.5, 2.0), (0.5, 0.9), (0.5, 0.0), (math.inf, 2.0), (1.5, None), (None, 0.9)]
)
@pytest.mark.parametrize("split", [False, True])
def test_bounds_that_are_no_ratios_are_counted_and_left_out(split, bounds, native_backends):
    """Also where both channels of a split are at a bound whose logarithm is infinite."""
    gate = gates.dapo()
    if split:
        gate = RatioGate("split", gate.token, (gates.Level(gates.Identity()),), split=True)
    for backend in ("reference", *native_backends):
        place = testing.device_of(backend)
        of_tokens = tuple(bound if bound is None else torch.full((2,), bound, device=place) for bound in bounds)
        given = gates.GateInputs(bounds=of_tokens)
        logp, batch = torch.zeros(2, device=place), hpo.PackedBatch.from_lengths([2]).to(place)
        ones = torch.ones(1, device=place)
        out = hpo.policy_loss_and_grad(logp, logp, ones, batch, gate, gate_inputs=given, backend=backend)
        assert out.loss == 0 and not out.grad.any(), backend
        assert out.metrics["bad_advantages"] == 2, backend


def test_success_rates_of_0_and_1(native_backends):
    """A wrong answer where all are right has no implied policy: it is counted and left out. A right one has its
    gradient, and where none is right nothing pulls at a wrong one."""
    batch, logp, advantages = (
        hpo.PackedBatch.from_lengths([2, 1]),
        torch.tensor([-1.0, -1.0, -1.2]),
        torch.tensor([1.0, -1.0]),
    )
    largest = 1 - 2**-24  # below 1; the slope stays within what a float holds
    for rate, last, bad in ((0.0, 0.0, 0), (1.0, 0.0, 1), (-0.5, 0.0, 1), (1.5, 0.0, 1), (largest, 2.0**24, 0)):
        for backend in ("reference", *native_backends):
            place = testing.device_of(backend)
            for x in (0.0, 120.0):
                old_logp = logp - torch.tensor([0.0, 0.0, x])
                given = gates.GateInputs(target=torch.full((2,), rate, device=place))
                out = hpo.policy_loss_and_grad(
                    logp.to(place), old_logp.to(place), advantages.to(place), batch.to(place), gates.nft(),
                    gate_inputs=given, weights=torch.ones(2, device=place), backend=backend,
                )  # fmt: skip
                assert out.metrics["bad_advantages"] == bad, (backend, rate)
                slope = last * (2.0**36 if x else 1.0)
                assert out.grad.tolist() == pytest.approx([-1.0, -1.0, slope], rel=1e-5), (backend, rate)
                assert torch.isfinite(out.loss), (backend, rate)


def test_corrections_compose(backend):
    """Masks and weights multiply, in any order, and with what the caller gives."""
    example = Example(0)
    gate = gates.compose(gates.gspo(0.02, 0.03), *gates.icepop(0.9, 1.2).corrections, *gates.opsm(0.01).corrections)
    turned = gates.compose(gates.gspo(0.02, 0.03), *reversed(gate.corrections))
    given = {"rollout_logp": example.rollout_logp, "token_weight": example.token_weight}
    out = example.run(gate, backend, **given)
    torch.testing.assert_close(example.run(turned, backend, **given).grad, out.grad)
    exact = example.run(gate, "reference", **given)
    torch.testing.assert_close(out.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


def test_draws_depend_on_the_seed_only():
    generator = torch.Generator().manual_seed(0)
    logp, advantages = torch.randn(2, 4000, generator=generator)
    take = functools.partial(
        gates.clip_cov_mask, logp, logp, advantages, hpo.PackedBatch.from_lengths([4000]), share=0.02, low=0.1, high=50,
        advantage_level="token",
    )  # fmt: skip
    first = take(seed=1).token_mask
    assert torch.equal(first, take(seed=1).token_mask)
    assert not torch.equal(first, take(seed=2).token_mask)
    assert (~first).sum() == 80


def test_no_two_places_have_the_same_draw():
    """Half of the places of any seed are drawn about as often in each sixteenth of them, and by two seeds together."""
    places = torch.arange(2**16)
    found = [draws_of_places(places, *key_of_places(seed)) for seed in (0, 1, 2, -1, 2**32, 2**40 + 1)]
    assert all(draw.unique().numel() == places.numel() for draw in found)
    taken = torch.stack([draw > 0 for draw in found]).double()
    assert (taken.unflatten(1, (16, -1)).mean(-1) - 0.5).abs().max() < 0.04  # five deviations
    for one, other in itertools.combinations(taken, 2):
        assert ((one * other).mean() - 0.25).abs() < 0.01


@pytest.mark.parametrize("level", ["row", "token"])
def test_masks_of_covariances_are_those_of_loops(level):
    """In float64, token by token, over rows without tokens, tokens in no row, masked ones, NaN and infinities."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        lengths = torch.randint(0, 30, (5,), generator=generator).tolist()
        tokens, row = sum(lengths) + 3, [row for row in range(5) for _ in range(lengths[row])]
        logp, old_logp, advantages = torch.randn(3, tokens, generator=generator)
        mask = torch.rand(tokens, generator=generator) < 0.8
        for values in (logp, old_logp, advantages):
            values[torch.rand(tokens, generator=generator) < 0.05] = math.nan
            values[torch.rand(tokens, generator=generator) < 0.05] = -math.inf
        given = advantages if level == "token" else advantages[:5]
        of_token = [given[token if level == "token" else at].item() for token, at in enumerate(row)]
        batch = hpo.PackedBatch(torch.tensor([0, *lengths]).cumsum(0), mask)
        known = [t for t in range(len(row)) if mask[t] and math.isfinite(of_token[t]) and logp[t].isfinite()]
        means = [math.fsum(each[t] for t in known) / max(len(known), 1) for each in (of_token, logp.tolist())]
        covariance = {t: (of_token[t] - means[0]) * (logp[t].item() - means[1]) for t in known}
        ratio = (logp - old_logp).exp()
        passes = {t: ratio[t] <= 1.2 if of_token[t] > 0 else ratio[t] >= (0.8 if of_token[t] < 0 else 0) for t in known}
        eligible = [t for t in known if 0.2 < covariance[t] < 2 and passes[t]]
        highest = sorted(known, key=lambda t: -covariance[t])[: max(1, int(0.3 * len(known)))]
        of_level, shared = {"advantage_level": level}, {"seed": 2, "low": 0.2, "high": 2.0}
        pays = gates.kl_cov_mask(logp, given, batch, share=0.3, **of_level).penalty_mask
        assert pays.nonzero()[:, 0].tolist() == sorted(highest)
        kept = gates.clip_cov_mask(logp, old_logp, given, batch, share=1.0, **shared, **of_level).token_mask
        assert (~kept).nonzero()[:, 0].tolist() == eligible
        kept = gates.clip_cov_mask(logp, old_logp, given, batch, share=0.05, **shared, **of_level).token_mask
        drawn = set((~kept).nonzero()[:, 0].tolist())
        assert drawn <= {*eligible} and len(drawn) == min(len(eligible), max(1, int(0.05 * len(known))))


def test_paying_tokens_do_not_depend_on_the_order_of_rows():
    """Masked tokens, and a row of none; no two covariances are equal."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([3, 0, 700, 1, 20_000, 60])
    order = torch.tensor([4, 2, 5, 1, 3, 0])
    rows = [torch.randn(length, generator=generator) for length in lengths.tolist()]
    masks = [torch.rand(length, generator=generator) < 0.8 for length in lengths.tolist()]
    advantages = torch.randn(6, generator=generator)

    def paying(of):
        mask = torch.cat([masks[row] for row in of])
        batch = hpo.PackedBatch.from_lengths(lengths[of].tolist(), mask=mask)
        found = gates.kl_cov_mask(torch.cat([rows[row] for row in of]), advantages[of], batch, share=0.01)
        return found.penalty_mask.split(lengths[of].tolist())

    first, moved = paying(torch.arange(6)), paying(order)
    assert sum(map(torch.sum, first)) > 100
    assert all(torch.equal(moved[at], first[row]) for at, row in enumerate(order.tolist()))


def test_of_equal_covariances_the_first_pay():
    """Sixteen advantages and two log-probabilities: many ties, and masked tokens among them."""
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randint(-2, 3, (16,), generator=generator).float()
    logp = -1.0 - torch.randint(0, 2, (16 * 50,), generator=generator)
    valid = torch.rand(logp.shape, generator=generator) < 0.7
    batch = hpo.PackedBatch(torch.arange(17) * 50, valid)
    of_token, values = advantages.repeat_interleave(50).double(), logp.double()
    covariance = (of_token - of_token[valid].mean()) * (values - values[valid].mean())
    found = {}
    for share in (1e-9, 0.02, 0.3, 1.0):
        highest = sorted(valid.nonzero()[:, 0].tolist(), key=lambda token: -covariance[token].item())
        wanted = max(1, int(share * valid.sum().item()))
        found[share] = gates.kl_cov_mask(logp.where(valid, torch.nan), advantages, batch, share=share).penalty_mask
        assert found[share].nonzero()[:, 0].tolist() == sorted(highest[:wanted])
    assert torch.equal(found[1.0], valid)


@pytest.mark.parametrize(("broken", "number"), [("logp", math.nan), ("logp", -math.inf), ("advantages", math.nan)])
def test_a_token_without_a_number_is_as_if_it_were_masked(broken, number):
    generator = torch.Generator().manual_seed(0)
    given = dict(zip(("logp", "old_logp", "advantages"), torch.randn(3, 40, generator=generator), strict=True))
    valid = torch.arange(40) != 7
    given[broken] = given[broken].where(valid, number)
    batches = hpo.PackedBatch(torch.tensor([0, 40]), valid), hpo.PackedBatch.from_lengths([40])
    shared = {"share": 0.2, "advantage_level": "token"}
    one, other = (gates.clip_cov_mask(**given, batch=each, seed=3, low=0.0, **shared) for each in batches)
    assert torch.equal(one.token_mask, other.token_mask) and not one.token_mask.all()
    del given["old_logp"]
    one, other = (gates.kl_cov_mask(**given, batch=each, **shared) for each in batches)
    assert torch.equal(one.penalty_mask, other.penalty_mask)


def test_a_token_without_an_old_log_probability_takes_no_draw():
    """Its loss is left out already."""
    logp, advantages = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    old_logp = logp.where(torch.arange(40) != 7, math.nan)
    given = (logp, old_logp, advantages, hpo.PackedBatch.from_lengths([40]))
    mask = gates.clip_cov_mask(*given, seed=3, share=1.0, low=-99, high=99, advantage_level="token").token_mask
    assert mask.nonzero().tolist() == [[7]]


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, [0.4, 0.36, 0.32, 0.28, 0.24, 0.2, 0.2], [0.2] * 6 + [0.4]),
        ({"pivot": (1, 2)}, [0.4, 1 / 3, 0.8 / 3, 0.2, 0.2, 0.2, 0.2], [0.2] * 4 + [0.8 / 3, 1 / 3, 0.4]),
        ({"eps_high": 0.28, "alpha": 0.5}, [0.3, 0.28, 0.26, 0.24, 0.22, 0.2, 0.2], [0.28] * 6 + [0.42]),
    ],
)
def test_hapo_bounds_by_hand(given, low, high):
    """Entropies that double: the pivot is the sixth of seven, or the fourth, and h falls by equal steps below it."""
    entropy, batch = 0.05 * 2.0 ** torch.arange(7), hpo.PackedBatch.from_lengths([7])
    bounds = gates.hapo_bounds(entropy, batch, **given).bounds
    torch.testing.assert_close(1 - bounds[0], torch.tensor(low), rtol=0, atol=1e-6)
    torch.testing.assert_close(bounds[1] - 1, torch.tensor(high), rtol=0, atol=1e-6)


@pytest.mark.parametrize("compat", ["paper", "code"])
def test_hapo_bounds_are_those_of_the_entropy_preset(compat):
    entropy = torch.rand(60, generator=torch.Generator().manual_seed(3)) ** 3
    batch = hpo.PackedBatch.from_lengths([21, 39]).replace(mask=torch.arange(60) % 7 != 0)
    ours = gates.hapo_bounds(entropy, batch, compat=compat).bounds
    theirs = hpo.entropy.hapo(entropy, batch, eps_high=0.2, compat=compat).bounds
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[batch.mask], other[batch.mask])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_an_entropy_that_is_not_finite_concerns_its_token_alone(wrong, backend):
    entropy = torch.tensor([0.2, 0.4, wrong, 0.8, 1.6, 3.2, wrong])
    batch = hpo.PackedBatch.from_lengths([5, 2]).replace(mask=torch.tensor([1, 1, 1, 1, 1, 1, 0]))
    finite = torch.isfinite(entropy)
    given = gates.hapo_bounds(entropy, batch)
    alone = gates.hapo_bounds(entropy[finite], hpo.PackedBatch.from_lengths([4, 1])).bounds
    for bound, expected in zip(given.bounds, alone, strict=True):
        assert torch.equal(bound[finite], expected) and bound[2].isnan()
    place = testing.device_of(backend)
    given = given.on_tokens(lambda values: values.to(place), per_token=False)
    out = hpo.policy_loss_and_grad(
        torch.zeros(7, device=place), None, torch.ones(2, device=place), batch.to(place), gates.hapo_clip(),
        gate_inputs=given, backend=backend,
    )  # fmt: skip
    assert out.metrics["bad_advantages"] == 1 and out.grad.isfinite().all() and out.grad.count_nonzero() == 5


def test_hapo_bounds_of_no_tokens():
    assert gates.hapo_bounds(torch.zeros(0), hpo.PackedBatch.from_lengths([0, 0])).bounds[0].numel() == 0


def test_inputs_of_a_padded_batch_are_padded():
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)) < 0.8
    draw = -torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(3))
    logp, old_logp, entropy, advantages = draw[0] / 2, draw[1] / 2, -draw[2], draw[3] + 0.5
    packed, padded = hpo.PackedBatch.from_lengths([5] * 3, mask=mask.reshape(-1)), hpo.PackedBatch.from_padded(mask)
    of_both = {"logp": logp, "old_logp": old_logp}
    of_tokens = {"advantages": advantages, "advantage_level": "token"}
    for make, given in (
        (gates.hapo_bounds, {"entropy": entropy}),
        (gates.m2po_mask, of_both),
        (gates.rec_ring_mask, {**of_both, "advantages": torch.tensor([1.0, -1.0, 1.0])}),
        (gates.vaco_mask, {**of_both, **of_tokens, "delta": 0.1}),
        (gates.bapo_bounds, {**of_both, **of_tokens}),
        (gates.m2po_bounds, {**of_both, **of_tokens}),
        (gates.clip_cov_mask, {**of_both, **of_tokens, "seed": 1, "low": 0.0}),
        (gates.kl_cov_mask, {"logp": logp, **of_tokens}),
        (gates.fipo_weight, {**of_both, **of_tokens}),
    ):
        flat = {name: each.reshape(-1) if isinstance(each, torch.Tensor) else each for name, each in given.items()}
        expected = make(**flat, batch=packed).on_tokens(lambda values: values.reshape(3, 5), per_token=False)
        for found, one in zip(make(**given, batch=padded), expected, strict=True):
            pairs = zip(found, one, strict=True) if isinstance(found, tuple) else [(found, one)]
            assert all(a is b or torch.equal(a, b) for a, b in pairs), make.__name__
    hpo.policy_loss(
        logp, old_logp, advantages, padded, gates.m2po(), gate_inputs=gates.m2po_mask(logp, old_logp, padded),
        advantage_level="token",
    )  # fmt: skip


def test_hapo_bounds_as_coded_never_tighten():
    entropy = torch.rand(50, generator=torch.Generator().manual_seed(0))
    low, high = gates.hapo_bounds(entropy, hpo.PackedBatch.from_lengths([50]), compat="code").bounds
    assert (high >= 1.2 - 1e-6).all()
    assert torch.equal(low, torch.full_like(low, 0.8))


def test_bpo_targets_of_a_temperature_are_those_of_the_authors():
    """``1 - eps + 2 eps sigmoid(A / temperature)``; the sign where the temperature is far below every advantage."""
    lead = torch.tensor([0.4, -0.02, 0.0])
    torch.testing.assert_close(
        gates.bpo_target(lead, 0.3, temperature=0.1).target, torch.tensor([1.289208, 0.970100, 1.0]), atol=1e-6, rtol=0
    )
    assert gates.bpo_target(lead, 0.3, temperature=1e-4).target.equal(gates.bpo_target(lead, 0.3).target)


def test_capo_as_its_authors_divide(backend):
    """Responses weigh the same, and so do the tokens that a response keeps; one that keeps none is a response."""
    kept = torch.tensor([True, False, True, False, False, True], device=testing.device_of(backend))
    batch = hpo.PackedBatch.from_lengths([3, 2, 1]).to(kept.device)
    logp, advantages = torch.full((6,), -1.0, device=kept.device), torch.tensor([2.0, 1.0, -1.0], device=kept.device)
    weights = hpo.aggregation.seq_mean_token_mean(batch, total=batch.rows, selected=kept)
    given = gates.GateInputs(token_mask=kept)
    out = hpo.policy_loss_and_grad(
        logp, logp, advantages, batch, gates.capo(), weights=weights, gate_inputs=given, backend=backend
    )
    torch.testing.assert_close(out.grad.cpu(), torch.tensor([-1, 0, -1, 0, 0, 1]) / 3)


def test_gbpo_target_by_hand():
    scores = torch.tensor([1.0, 0.0, 3.0, 5.0, 2.0])
    target = gates.gbpo_target(scores, torch.tensor([4, 4, 9, 4, 4])).target
    group = torch.tensor([1.0, 0.0, 5.0, 2.0])
    relative = (group - 1.5) / (group.std() + 1e-6)
    torch.testing.assert_close(target[[0, 1, 3, 4]], 0.8 + 0.4 * torch.sigmoid(relative))
    torch.testing.assert_close(target[2], 0.8 + 0.4 * torch.sigmoid(torch.tensor(3.0)))
    in_none = gates.gbpo_target(scores, torch.tensor([-1, -1, 9, -7, -1], dtype=torch.int32)).target
    torch.testing.assert_close(in_none, 0.8 + 0.4 * torch.sigmoid(scores))
    scored = torch.tensor([1.0, math.nan, 0.0, 3.0, 5.0, -math.inf, 2.0])
    with_nan = gates.gbpo_target(scored, torch.tensor([4, 4, 4, 9, 4, 4, 4])).target
    assert torch.equal(with_nan[scored.isfinite()], target) and with_nan[[1, 5]].isnan().all()


def test_vaco_mask_by_hand():
    """The means of |r - 1| are 1.25 and 0.2; no token outside the mask, and none without a ratio, is in them."""
    ratio = torch.tensor([0.25, 1.0, 4.0, 99.0, math.nan, 0.7, 1.1])
    batch = hpo.PackedBatch.from_lengths([5, 2], mask=torch.arange(7) != 3)
    for delta, kept in ((1.24, [0, 1, 4, 5, 6]), (1.26, [0, 1, 2, 4, 5, 6]), (0.19, [0, 1, 4, 6])):
        for level, given in (("row", torch.tensor([1.0, -1.0])), ("token", torch.tensor([1.0] * 5 + [-1.0] * 2))):
            for scale in (1.0, 1e-45):  # the sign counts, however small the product
                mask = gates.vaco_mask(
                    ratio.log(), torch.zeros(7), scale * given, batch, delta, advantage_level=level
                ).token_mask
                assert mask.nonzero().flatten().tolist() == kept, (delta, level)
    back = gates.vaco_mask(ratio.log(), torch.zeros(7), torch.tensor([-1.0, 1.0]), batch, 0.19).token_mask
    assert back.nonzero().flatten().tolist() == [1, 2, 4, 5]
    one = hpo.PackedBatch.from_lengths([2])
    gone = torch.tensor([-math.inf, 2.0]), torch.tensor([-1.0, -500.0])
    assert gates.vaco_mask(*gone, torch.tensor([1.0]), one, 1e8).token_mask.tolist() == [True, False]  # (1 + e^20) / 2
    fallen = gone[0][:1], torch.zeros(1), torch.tensor([-1.0]), hpo.PackedBatch.from_lengths([1])
    assert gates.vaco_mask(*fallen, 1.0).token_mask.all() and not gates.vaco_mask(*fallen, 0.99).token_mask.any()


def test_vaco_mask_leaves_gradients_of_what_it_keeps(backend):
    generator = torch.Generator().manual_seed(5)
    device = testing.device_of(backend)
    logp, old_logp = (-torch.rand(2, 40, generator=generator)).to(device)
    batch = hpo.PackedBatch.from_lengths([9, 11, 20]).to(device)
    advantages = torch.tensor([1.0, -1.0, 0.5], device=device)
    mask = gates.vaco_mask(logp, old_logp, advantages, batch, 0.35)
    row, x = batch.row_of_token(), logp - old_logp
    away = x.sign() * advantages[row] > 0
    expected = [
        (x[row == each].exp() - 1).abs().mean().item() <= 0.35 or not away[token].item()
        for token, each in enumerate(row.tolist())
    ]
    assert mask.token_mask.tolist() == expected and 0 < sum(expected) < 40
    gradients = []
    for given in ({"gate_inputs": mask}, {}):
        leaf = logp.clone().requires_grad_()
        hpo.policy_loss(leaf, old_logp, advantages, batch, gates.dapo(), backend=backend, **given).loss.backward()
        gradients.append(leaf.grad)
    kept = torch.tensor(expected, device=device)
    assert torch.equal(gradients[0], torch.where(kept, gradients[1], 0.0)) and gradients[1][~kept].any()


def test_rec_ring_mask_by_hand():
    """Bounds belong to the ring; an advantage of 0 counts as positive; what is masked is never in it."""
    ratio = torch.tensor([0.2, 0.5, 0.79, 0.9, 1.0, 1.21, 2.9, 3.1, math.nan])
    batch = hpo.PackedBatch.from_lengths([9])
    batch = hpo.PackedBatch(batch.cu_seqlens, torch.arange(9) < 8)
    for advantage, kept in ((1.0, [0, 3, 4]), (0.0, [0, 3, 4]), (-1.0, [3, 4, 7])):
        for level, given in (("row", torch.tensor([advantage])), ("token", torch.full((9,), advantage))):
            mask = gates.rec_ring_mask(ratio.log(), torch.zeros(9), given, batch, advantage_level=level).token_mask
            assert mask.nonzero().flatten().tolist() == kept
    edges = torch.tensor([math.log1p(each) for each in (-0.5, -0.25, 0.25, 1.0)], dtype=torch.float64)
    run = functools.partial(gates.rec_ring_mask, eps_near=(0.25, 0.25), eps_far=(0.5, 1.0))
    assert run(edges, edges * 0, edges.new_ones(1), hpo.PackedBatch.from_lengths([4])).token_mask.tolist() == [
        1,
        1,
        1,
        0,
    ]
    assert run(edges, edges * 0, -edges.new_ones(1), hpo.PackedBatch.from_lengths([4])).token_mask.tolist() == [
        0,
        1,
        1,
        1,
    ]
    with pytest.raises(ValueError, match="far"):
        run(edges, edges, edges, hpo.PackedBatch.from_lengths([4]), eps_far=(1.0, 2.0))


def test_m2po_mask_by_hand():
    generator = torch.Generator().manual_seed(0)
    logp, old_logp = torch.randn(2, 200, generator=generator) * 0.3
    kept = gates.m2po_mask(logp, old_logp, hpo.PackedBatch.from_lengths([200])).token_mask
    square = (logp - old_logp).double() ** 2
    assert square[kept].mean() < 0.04
    assert torch.cat([square[kept], square[~kept].min()[None]]).mean() >= 0.04
    assert square[kept].max() <= square[~kept].min()


def test_m2po_mask_leaves_out_a_token_with_which_the_mean_is_the_threshold():
    logp = torch.tensor([0.5, 0.5])
    kept = gates.m2po_mask(logp, torch.zeros(2), hpo.PackedBatch.from_lengths([2]), threshold=0.25).token_mask
    assert kept.tolist() == [True, False]


def test_m2po_mask_keeps_the_smallest():
    """AReaL does the same; here no token stays where none is valid, and no masked or unknown one in its place."""
    logp = torch.tensor([0.0, -0.9, 0.7, 0.7, math.nan])
    batch = hpo.PackedBatch(torch.tensor([0, 5]), torch.tensor([0, 1, 1, 1, 1]))
    run = functools.partial(gates.m2po_mask, logp, torch.zeros(5))
    assert run(batch).token_mask.tolist() == [False, False, True, False, False]
    assert not run(batch.replace(mask=torch.zeros(5, dtype=torch.bool))).token_mask.any()
    assert gates.m2po_mask(logp[:0], logp[:0], hpo.PackedBatch.from_lengths([])).token_mask.numel() == 0


@pytest.mark.parametrize(
    ("x", "advantages", "budget", "log_bound"),
    [
        ([0.1, 0.2, 0.5, -0.3], [1, 1, 1, 1], 0.04, 0.2),  # .01 + 2 x .04 is below 3 x .04, .01 + .04 + .25 is not
        ([0.1, 0.2, 0.3, 9.0], [1, 1, 1, -1], 0.05, math.inf),  # .14 is below .15; what falls back has no say
        ([0.25, 0.25], [1, 1], 0.0625, math.inf),  # a mean of the budget itself needs no bound
        ([0.5, -0.6], [1, -1], 0.04, 0.0),  # the smallest is beyond the budget: nothing may run ahead
        ([-0.1, -0.2, -0.5, 0.3], [-1, -1, -1, -1], 0.04, 0.2),
        ([0.1, 0.2, 0.5, math.inf, 5.0], [1, 1, 1, 1, math.nan], 0.04, 0.2),
        ([0.1, 0.2], [0, -1], 0.0, math.inf),
    ],
)
def test_m2po_bounds_by_hand(x, advantages, budget, log_bound):
    x, advantages = torch.tensor([*x, math.nan]), torch.tensor([*map(float, advantages), 1.0])
    batch = hpo.PackedBatch(torch.tensor([0, len(x)]), torch.arange(len(x)) < len(x) - 1)
    low, high = gates.m2po_bounds(
        x, torch.zeros(len(x)), advantages, batch, budget=budget, advantage_level="token"
    ).bounds
    assert low.dtype == torch.float32 and low.tolist() == pytest.approx([math.exp(-log_bound)] * len(x), rel=3e-6)
    assert high.tolist() == pytest.approx([math.exp(log_bound)] * len(x), rel=3e-6)


def test_m2po_bounds_are_those_of_a_search_and_let_their_own_token_pass(backend):
    where = testing.device_of(backend)
    for seed in (0, 1, 2, 12):  # of the last one the token of tau is clipped by rounding, without the millionth
        x, advantages = 0.4 * torch.randn(2, 40, generator=torch.Generator().manual_seed(seed))
        batch = hpo.PackedBatch.from_lengths([40]).to(where)
        given = [each.to(where) for each in (x, torch.zeros(40), advantages)]
        inputs = gates.m2po_bounds(*given, batch, advantage_level="token")
        ahead = [abs(d) for d, a in zip(x.tolist(), advantages.tolist(), strict=True) if a * d > 0]
        least = [tau for tau in ahead if sum(min(d, tau) ** 2 for d in ahead) < 0.04 * len(ahead)]
        assert inputs.bounds[1][0].item() == pytest.approx(math.exp(max(least)), rel=3e-6)
        out = hpo.policy_loss_and_grad(
            *given, batch, gates.m2po_clip(), advantage_level="token", gate_inputs=inputs, backend=backend
        )
        kept = (advantages * x <= 0) | (x.abs() <= max(least))
        assert torch.equal(out.grad.cpu() != 0, kept) and 0 < (~kept).sum() < len(ahead) - 1


def test_m2po_bounds_of_no_tokens_and_wrong_numbers():
    nothing = torch.zeros(0)
    assert gates.m2po_bounds(nothing, nothing, nothing, hpo.PackedBatch.from_lengths([])).bounds[0].numel() == 0
    with pytest.raises(ValueError, match="budget: expected a mean square >= 0, got -1"):
        gates.m2po_bounds(*torch.zeros(3, 1), hpo.PackedBatch.from_lengths([1]), budget=-1)


def test_every_input_of_tokens_is_moved():
    """All but the aggregates, which are of segments."""
    each = dict.fromkeys(gates.GateInputs._fields, torch.ones(3)) | {"bounds": (torch.ones(3),) * 2, "aggregates": None}
    moved = gates.GateInputs(**each).on_tokens(lambda values: 2 * values, per_token=True)._asdict()
    assert moved.pop("aggregates") is None
    tensors = [*moved.pop("bounds"), *moved.values()]
    assert all(torch.equal(tensor, torch.full((3,), 2.0)) for tensor in tensors), "change each in GateInputs.on_tokens"
