"""The budget of errors, and the generators of examples, that check() works with."""

import math

import pytest
import torch

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import Clip, Drop, Head, Level, LogClip, Penalty, RatioGate, Rollback, Routing, Tanh, Unit
from hpo_core.metrics import slot
from hpo_core.testing import Expected, Layout, PolicyLossExample
from hpo_core.testing.strategies import LONG

# ---------------------------------------------------------------------------------------------------------- the budget


def expected(exact, eager, magnitude):
    return Expected(*(torch.tensor(values, dtype=torch.float64) for values in (exact, eager, magnitude)))


def test_budget_is_the_larger_of_its_two_parts():
    two = expected([1.0, 1.0], [1.0 + 1e-6, 1.0], [1.0, 100.0])  # e = 1e-6 for both elements
    assert testing.budget(two).tolist() == pytest.approx([2e-6, 400 * 2.0**-24])


def test_an_error_beyond_the_budget_is_reported():
    two = expected([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
    close = torch.tensor([1.0 + 3 * 2.0**-24, 2.0], dtype=torch.float64)
    assert testing.assert_within_budget("op", close, two) == pytest.approx(0.75)
    with pytest.raises(AssertionError, match=r"op: element \[1\] is 2.00001.*budget 4.77e-07.*1 of 2 elements"):
        testing.assert_within_budget("op", torch.tensor([1.0, 2.00001]), two)
    with pytest.raises(AssertionError, match="shape"):
        testing.assert_within_budget("op", torch.ones(3), two)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_must_be_met(value):
    one = expected([value], [value], [1.0])
    assert testing.assert_within_budget("op", torch.tensor([value]), expected([value], [value], [value])) == 0.0
    assert testing.assert_within_budget("op", torch.tensor([value]), one) == 0.0
    with pytest.raises(AssertionError):
        testing.assert_within_budget("op", torch.tensor([0.0]), one)
    with pytest.raises(AssertionError):
        testing.assert_within_budget("op", torch.tensor([value]), expected([1.0], [1.0], [1.0]))


@pytest.mark.parametrize("ulps", [4, -4])
def test_an_exponential_off_by_4_ulp_is_beyond_the_budget(ulps):
    """The budget is that of metrics of small log-ratios; far from 0 the rounding of a log-ratio is worth as much."""
    example = testing.random_policy_loss(layout=Layout((3, 4), masked="none", seed=15))
    expected = testing.expect_policy_loss(example)["metrics"]

    def metrics(ulps):
        ratio = (example.logp - example.old_logp).exp()
        deviation = (ratio.view(torch.int32) + ulps).view(torch.float32) - 1
        got = expected.exact.clone()
        got[slot("ratio_deviation_square")] = deviation.square().double().sum()
        return got

    testing.assert_within_budget("right", metrics(0), expected)
    with pytest.raises(AssertionError, match=r"1 of .* elements are off"):
        testing.assert_within_budget("wrong", metrics(ulps), expected)


def magnitudes(gate, x, advantages, **keywords):
    """Of loss_t and the gradient, of one row with these log-ratios and weight 1."""
    x, advantages = torch.tensor(x), torch.tensor(advantages)
    batch, token = hpo.PackedBatch.from_lengths([len(x)]), {"advantage_level": "token", "weights": torch.ones(1)}
    found = testing.expect_policy_loss(
        PolicyLossExample(x, torch.zeros_like(x), advantages, batch, gate, token | keywords)
    )
    return found["tokens"].magnitude.tolist(), found["grad"].magnitude.tolist()


def test_the_magnitude_of_a_gradient_through_levels_is_that_of_every_path():
    """A token's own residual, the mean in the residuals of tokens, and the mean in the gate above."""
    gate = RatioGate("tanh_budget", LogClip((-0.2, -0.2), (0.2, 0.2)), (Level(Tanh(0.1)),))
    x, advantages, mean = [0.5, 0.1, -0.45], [1.0, -2.0, 0.5], 0.05
    gated = [0.2, 0.05, -0.2]  # of which the second is inside its bounds
    bent = math.tanh(mean / 0.1)
    force = [abs(a) * math.exp(each + 0.1 * bent) for a, each in zip(advantages, gated, strict=True)]
    tokens, grad = magnitudes(gate, x, advantages)
    assert tokens == pytest.approx(force)
    through = force[1] / 3 + sum(force) / 3 * (1 + bent**2)  # of a slope of 1 - tanh^2
    assert grad == pytest.approx([through, force[1] + through, through])


def test_paths_that_cancel_by_construction_have_no_magnitude():
    """A residual below a straight-through aggregate does not depend on the token; without levels there is one path."""
    force = [abs(a) * math.exp(x) for a, x in ((1.0, 0.1), (-2.0, -0.1))]
    alone = magnitudes(RatioGate("alone", Clip((0.5, 0.5), (2.0, 2.0))), [0.1, -0.1], [1.0, -2.0])
    assert alone[0] == pytest.approx(force) and alone[1] == pytest.approx(force)
    level = Level(LogClip((-0.5, -0.5), (0.5, 0.5)), routing=Routing.SELF)
    straight = magnitudes(RatioGate("straight", gates.Identity(), (level,)), [0.1, -0.1], [1.0, -2.0])
    assert straight[1] == pytest.approx(force)


@pytest.mark.parametrize(
    ("head", "loss", "slope"),
    [
        (Head.MIRROR, lambda z, r: 3 * r + 2 * (z * r + r + 1), lambda z, r: 3 * r + 2 * z * r),
        (Head.SIMPLE, lambda z, r: 3 * r + 3 / 4 * (r - 1) * (r + 1), lambda z, r: 3 * r + 3 / 2 * r * (r + 1)),
        (Head.LOG, lambda z, r: 3 * z + z**2, lambda z, r: 3 + 2 * z),
        (Head.TARGET, lambda z, r: 3 * (r + 1.25), lambda z, r: 3 * r),
    ],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_the_magnitude_of_a_head_of_several_terms(head, loss, slope):
    gate = RatioGate("own", Clip((0.5, 0.5), (2.0, 2.0)), head=head, head_numbers=(2.0, 2.0))
    given = {"gate_inputs": gates.GateInputs(target=torch.tensor([1.25]))} if gate.takes_target else {}
    tokens, grad = magnitudes(gate, [0.25], [3.0], **given)
    assert tokens == pytest.approx([loss(0.25, math.exp(0.25))])
    assert grad == pytest.approx([slope(0.25, math.exp(0.25))])
    penalised = RatioGate("own", Clip((0.5, 0.5), (2.0, 2.0)), penalty=Penalty.K2, penalty_coefficient=4.0)
    tokens, grad = magnitudes(penalised, [-0.25], [3.0])  # the derivatives have different signs
    assert tokens == pytest.approx([3 * math.exp(-0.25) + 2 * 0.25**2])
    assert grad == pytest.approx([3 * math.exp(-0.25) + 4 * 0.25])


def test_the_magnitude_of_a_saturated_ratio_is_that_of_its_head():
    """The square of a ratio saturates at e^25, and so do the terms of a budget."""
    gate = RatioGate("own", gates.Identity(), head=Head.MIRROR, head_numbers=(2.0, 2.0))
    _, (grad,) = magnitudes(gate, [50.0], [3.0])
    assert grad == pytest.approx(math.exp(25) * (3 + 2 * 25))


# ------------------------------------------------------------------------------------------------------ the generators


def test_the_same_seed_gives_the_same_example():
    for draw in (testing.random_policy_loss, testing.random_rewards, testing.random_window, testing.random_scores):
        a, b, other = draw(3), draw(3), draw(4)
        assert str(a) == str(b) and str(a) != str(other)


def test_layouts_reach_the_places_where_kernels_break():
    seen = set()
    for seed in range(300):
        layout = testing.random_layout(seed)
        lengths = layout.lengths
        if lengths:
            places = {"first": lengths[0], "middle": lengths[len(lengths) // 2], "last": lengths[-1]}
            seen |= {f"{place} {length}" for place, length in places.items() if length < 2}
        seen |= {
            layout.masked,
            f"rows {min(len(lengths), 2)}",
            f"tail {min(layout.tail, 1)}",
            f"shared {layout.shared}",
        }
    places = {f"{place} {length}" for place in ("first", "middle", "last") for length in (0, 1)}
    assert seen >= places | {"none", "some", "row", "all", "rows 0", "rows 1", "tail 0", "tail 1", "shared True"}


@pytest.mark.parametrize(
    "gate", [gates.gspo(), gates.dapo(), gates.ppo_clip(ratio_dual=1.3)], ids=lambda gate: gate.name
)
def test_log_ratios_keep_off_every_branch_and_reach_every_side(gate):
    sides = set()
    for seed in range(120):
        example = testing.random_policy_loss(seed, gate, {"weights", "trajectories"})
        x, valid = example.log_ratio(), example.valid()
        clip, value = (gate.token, x) if gate.level is None else (gate.level.gate, None)
        if value is None:
            owner = example.trajectory()
            value = torch.stack([x[valid & (owner == own)].mean() for own in owner]) if x.numel() else x
        for bound in {*clip.low, *clip.high} - {0.0, float("inf")}:
            distance = (value - torch.tensor(bound, dtype=torch.float64).log())[valid]
            assert (distance.abs() >= 1e-5).all()
            sides |= {(bound, bool(above)) for above in distance > 0}
    assert len(sides) == 2 * len({*clip.low, *clip.high} - {0.0, float("inf")})


@pytest.mark.parametrize(
    ("token", "level"),
    [
        (LogClip((-0.2, -0.2), (0.2, 0.2)), Level(Tanh(0.1), unit=Unit.STEP)),
        (Drop(), Level(LogClip((-0.2, -0.1), (0.2, 0.3)), unit=Unit.STEP)),
        (Drop(), Level(Rollback((0.2, 0.1)), unit=Unit.STEP)),
    ],
    ids=str,
)
def test_residuals_keep_off_the_bounds_of_every_level(token, level):
    """On the aggregate of the level above, which is that of a trajectory."""
    gate = RatioGate("own", token, (level, Level(Tanh(0.5))))
    of_level = level.gate if isinstance(token, Drop) else token
    bounds = of_level.budgets if isinstance(of_level, Rollback) else {*of_level.low, *of_level.high}
    tried = 0
    for seed in range(40):
        example = testing.random_policy_loss(0, gate, {"weights"}, layout=Layout(LONG, seed=seed))
        x, valid, step = example.log_ratio(), example.valid(), example.batch.step_of_token()
        valid, row = valid & (step >= 0), example.row().clamp(min=0)
        counts = [torch.zeros(len(x)).double().index_add(0, ids[valid], x[valid] ** 0) for ids in (step, row)]
        means = [
            torch.zeros(len(x)).double().index_add(0, ids[valid], x[valid]) / count.clamp(min=1)
            for ids, count in zip((step, row), counts, strict=True)
        ]
        of_step, of_row = means[0][step.clamp(min=0)], means[1][row]
        residual = (of_step - of_row if isinstance(token, Drop) else x - of_step)[valid]
        residual = residual.abs() if isinstance(of_level, Rollback) else residual
        tried += residual.numel()
        assert all(bool(((residual - bound).abs() >= 1e-5).all()) for bound in bounds), seed
    assert tried > 50_000


@pytest.mark.parametrize("gate", [gates.gspo(), gates.cispo(), gates.dapo()], ids=lambda gate: gate.name)
def test_bounds_are_drawn_where_the_gate_has_some(gate):
    example = testing.random_policy_loss(0, gate, {"bounds"}, layout=Layout((3, 4)))
    assert (example.gate_inputs.bounds is not None) == gate.takes_bounds
    hpo.policy_loss(*example[:4], gate, **example.keywords)


def test_poison_reaches_every_hole_and_nothing_else():
    features = set(testing.FEATURES) - {"on_policy"}
    layout = Layout((3, 4), 2, "some", True, 1)
    weighted = testing.random_policy_loss(0, gates.dapo(), features - {"window"}, layout=layout)
    assert torch.equal(weighted.poisoned(float("nan")).kl_weight.isnan(), ~weighted.valid())
    assert "selection" not in weighted.without("kl", "ref_logp").keywords
    selection = weighted.keywords["selection"]._replace(mask=weighted.valid())
    left = weighted.given(selection=selection).without("kl", "ref_logp").keywords["selection"]
    assert left.mask is selection.mask and left.kl_weight is None
    example = testing.random_policy_loss(0, gates.dapo(), features, layout=layout)
    poisoned, hole = example.poisoned(float("nan")), ~example.valid()
    assert hole.any() and not hole.all()
    for name in ("ref_logp", "entropy", "token_weight"):
        assert torch.equal(poisoned.keywords[name].isnan(), hole)
    for tensor in (poisoned.logp, poisoned.old_logp, poisoned.advantages, *poisoned.gate_inputs.bounds):
        assert torch.equal(tensor.isnan(), hole)


def test_selecting_rows_takes_everything_along():
    example = testing.random_policy_loss(
        0, gates.icepop(), {"weights", "kl", "kl_weight"}, layout=Layout((3, 0, 4), 2, "some", True, 1)
    )
    part, tokens = example.select(torch.tensor([2, 0]))
    assert part.batch.cu_seqlens.tolist() == [0, 4, 7] and tokens.tolist() == [3, 4, 5, 6, 0, 1, 2]
    for name in ("ref_logp", "rollout_logp"):
        assert torch.equal(part.keywords[name], example.keywords[name][tokens])
    assert torch.equal(part.kl_weight, example.kl_weight[tokens])
    assert torch.equal(part.keywords["weights"], example.keywords["weights"][[2, 0]])
