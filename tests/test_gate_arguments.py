"""How gates are made: constructors, their numbers, and the gates that a trainer refuses."""

import dataclasses
import functools
import inspect
import math
import pickle
import re

import pytest
import torch
from catalogue import PRESETS

import hpo_core as hpo
from hpo_core import gates
from hpo_core.gates import Channel, Provenance, RatioGate
from hpo_core.integrations.needs import check_needs

ELSEWHERE = {"step_gspo", "two_scale", "fiberpo_domain"}  # of steps and groups: tests/test_hierarchy.py


def constructors():
    """Every function of the gates that returns a gate."""
    spaces = (gates, gates.reconstructed)
    found = {name: getattr(space, name) for space in spaces for name in space.__all__}
    return {
        name: fn for name, fn in found.items() if inspect.isfunction(fn) and fn.__annotations__["return"] == "RatioGate"
    }


FIVE, TOKENS, ONE = hpo.PackedBatch.from_lengths([5]), torch.tensor([0.1, 0.2, 0.4, 0.8, 1.6]), torch.ones(1)
_cov = functools.partial(gates.clip_cov_mask, TOKENS, TOKENS, ONE, FIVE, seed=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gates.dppo_tv(0.15, 15), r"high: expected a difference of probabilities in \[0, 1\], got 15"),
        (lambda: gates.dppo_tv(-0.1), r"low: expected a difference of probabilities in \[0, 1\], got -0.1"),
        (lambda: gates.dppo_kl(-1), "delta: expected a divergence >= 0, got -1"),
        (lambda: gates.kl_cov_mask(TOKENS, ONE, FIVE, share=20), r"share: expected a number in \[0, 1\], got 20"),
        (lambda: gates.kl_cov_mask(TOKENS, ONE, FIVE, share=math.inf), "share: expected a number in .*, got inf"),
        (lambda: _cov(share=-1), r"share: expected a number in \[0, 1\], got -1"),
        (lambda: _cov(low=5, high=1), "low, high: expected low <= high, got 5.0 and 1.0"),
        (lambda: _cov(eps_low=0.8, eps_high=1.2), "eps_low, eps_high: .* look like ratios; pass 0.2 and 0.2"),
        (lambda: gates.archer_bounds(TOKENS > 1, (0.8, 1.2)), r"eps_narrow\[0\], .* look like ratios"),
        (lambda: gates.archer_bounds(TOKENS > 1, eps_wider=(0.4, -1)), r"eps_wider\[1\]: expected an epsilon >= 0"),
        (lambda: gates.dcpo_bounds(TOKENS, ratio_cap=0.5), "ratio_cap: expected an absolute ratio >= 1, got 0.5"),
        (lambda: gates.tis(0.5), "ratio_cap: expected an absolute ratio >= 1 or None, got 0.5"),
        (lambda: gates.decoupled(ratio_cap=0.1), "ratio_cap: expected an absolute ratio >= 1 or None, got 0.1"),
        (lambda: gates.ce_gppo(low_weight=-1.0), "low_weight: expected a share of the gradient >= 0, got -1.0"),
        (lambda: gates.ce_gppo(high_weight=-0.5), "high_weight: expected a share of the gradient >= 0, got -0.5"),
        (lambda: gates.dcpo_bounds(TOKENS, eps_high=-1), "eps_high: expected an epsilon >= 0, got -1"),
        (lambda: gates.dcpo_bounds(TOKENS, eps_low=math.inf), r"eps_low: .* in \[0, 1\], got inf; the ratio's bound"),
        (lambda: gates.aspo(ratio_dual=math.inf), "ratio_dual: expected a finite factor, got inf"),
        (lambda: gates.mis(ratio_veto=1.5), "ratio_veto: expected a ratio <= 1, .*, got 1.5"),
        (lambda: gates.hapo_bounds(TOKENS, FIVE, eps_low=-1), r"eps_low: expected an epsilon in \[0, 1\], got -1"),
        (
            lambda: gates.hapo_bounds(TOKENS.bfloat16(), FIVE),
            "entropy: expected dtype float32 or float64, got bfloat16",
        ),
        (lambda: gates.hapo_bounds(TOKENS, FIVE, pivot=0.8), "pivot: expected a pair of integers, got 0.8"),
        (lambda: gates.hapo_bounds(TOKENS, FIVE, pivot=(8, 5)), r"pivot: expected a fraction in .*, got \(8, 5\)"),
        (lambda: gates.hapo_bounds(TOKENS, FIVE, pivot=(4, 0)), r"pivot: expected a fraction in .*, got \(4, 0\)"),
        (lambda: gates.hapo_bounds(TOKENS, FIVE, pivot=(0, 0)), r"pivot: expected a fraction in .*, got \(0, 0\)"),
        (lambda: gates.hapo_bounds(TOKENS, FIVE, alpha=math.inf), "alpha: expected a finite number >= 0, got inf"),
        (lambda: gates.m2po_mask(TOKENS, TOKENS, FIVE, -1.0), "threshold: expected a mean square >= 0, got -1.0"),
        (lambda: gates.bpo_target(ONE, 20), r"eps: expected an epsilon in \[0, 1\], got 20"),
        (lambda: gates.bpo_target(ONE, temperature=-1), "temperature: expected a finite number >= 0, got -1"),
        (lambda: gates.bpo_target(ONE, temperature=math.inf), "temperature: expected a finite number >= 0, got inf"),
        (lambda: gates.gbpo_target(ONE, eps_low=-0.2), r"eps_low: expected an epsilon in \[0, 1\], got -0.2"),
        (lambda: gates.gbpo_target(ONE, eps_high=math.inf), "eps_high: expected a finite number .*, got inf"),
        (lambda: gates.gbpo_target(ONE, temperature=0.0), "temperature: expected a number above 0, got 0.0"),
        (lambda: gates.a_lol(1.5), r"eps: expected an epsilon in \[0, 1\], got 1.5"),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    """Percentages, ratios in place of epsilons, and bounds in the wrong order made another method without a word."""
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        make()


def test_every_constructor_is_tested_and_needs_no_argument():
    tested = {entry[0].name for entry in PRESETS.values()} | ELSEWHERE
    found = constructors()
    assert set(found) - {"compose"} == tested, "a gate is in PRESETS of catalogue.py"
    for name, constructor in found.items():
        if name != "compose":
            gate = constructor()
            assert gate.name == name
            assert gate.source
            assert pickle.loads(pickle.dumps(gate)) == gate
            assert hash(gate) == hash(constructor())
            assert gate.provenance in Provenance
            assert (gate.provenance is Provenance.RECONSTRUCTED) == hasattr(gates.reconstructed, name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RatioGate("x", gates.Identity(), head=gates.Head.SIMPLE), "head_numbers"),
        (lambda: RatioGate("x", gates.Drop(), (gates.Level(gates.Gamma((2.0, 2.0), (1.0, 1.0))),)), "Head.SCORE"),
        (lambda: RatioGate("x", gates.Identity(), channel=Channel.DISCREPANCY), "no gradient"),
        (lambda: RatioGate("x", gates.Identity(), corrections=gates.icepop().corrections[0]), "tuple of Correction"),
        (lambda: gates.Level(gates.ce_gppo().token), "clip of tokens"),
        (lambda: RatioGate("x", gates.ce_gppo().token, (gates.Level(gates.Identity()),)), "weights beyond its bounds"),
        (lambda: gates.Rollback((0.1, 0.1), 2.0, most=3.0), "drop slope= or most="),
        (lambda: gates.Correction(gates.Action.BAND, statistic=gates.Statistic.K3), "only a log-ratio has a weight"),
        (lambda: gates.hispo(eps_sequence=0.0), "eps_sequence: expected a deviation from 1 above 0"),
        (lambda: gates.hapo_clip(eps_high=math.inf), "eps_high: expected a finite number"),
        (lambda: gates.fiberpo(math.inf), "log_clip: expected a finite log-ratio"),
        (lambda: gates.dapo(0.8, 1.28), r"look like ratios; pass 0.2 and 0.28"),
        (lambda: gates.gspo(0.9997, 1.0004), r"look like ratios; pass 0.0003 and 0.0004"),
        (
            lambda: gates.aspo(ratio_dual=0.5),
            "ratio_dual: expected a factor >= 1",
        ),  # at r = 1 it would scale the gradient
        *(
            (make, "finite in float32, got .*1e\\+39")
            for make in (
                lambda: hpo.kl.k3(1e39),
                lambda: gates.ppo_penalty(1e39),
                lambda: RatioGate("x", gates.Identity(), head=gates.Head.LOG, head_numbers=(0.0, 1e39)),
                lambda: RatioGate("x", gates.Identity(), advantage_weights=(1.0, -1e39)),
                lambda: gates.Clip(weight_high=(1.0, 1e39)),
                lambda: gates.Rollback((0.1, 1e39)),
                lambda: gates.Tanh(1e39),
                lambda: gates.Gamma((1.0, 1e39), (1.0, 1.0)),
                lambda: gates.Excess(1e39),
            )
        ),
        (lambda: RatioGate("x", gates.Identity(), head=gates.Head.FLIPPED, head_numbers=(1.0, 0.9)), "at least"),
        (lambda: gates.spo(1e-5), "at least"),  # |w A| r^2 / epsilon would overflow
        (lambda: gates.nft(0.0), "at least"),  # R is 0 or less where r > 1 / q
    ],
)
def test_what_has_no_meaning_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_bounds_of_a_divergence_may_look_like_ratios():
    """A statistic is 0 where policies agree: bounds above 0 leave such tokens out."""
    correction = gates.Correction(gates.Action.MASK, (0.1, 0.1), (2.0, 2.0), statistic=gates.Statistic.K2)
    assert correction.low == (0.1, 0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gates.Level(gates.Identity(), gates.Unit.GROUP), "routing: expected one of Routing (THROUGH, SELF, "),
        (lambda: gates.Level(gates.Identity(), unit=gates.Aggregate.BALANCED), "unit: expected one of Unit (STEP, "),
        (lambda: gates.Level(gates.Identity(), aggregate=gates.Reduction.SUM), "aggregate: expected one of Aggregate"),
        (lambda: gates.ppo_penalty(1.0, hpo.specs.KLEstimator.K2), "penalty: expected one of Penalty (NONE, "),
        (lambda: RatioGate("x", gates.Identity(), channel="TOTAL"), "channel: expected one of Channel (STALENESS, "),
        (lambda: RatioGate("x", gates.Identity(), head=1), "head: expected one of Head (LINEAR, "),
        (lambda: gates.Correction(gates.Action.MASK, (0.9, 0.9), (1.1, 1.1)), "which look like ratios"),
        (lambda: gates.Correction(gates.Statistic.K2), "action: expected one of Action (MASK, BAND, CLAMP), got <Sta"),
        (
            lambda: gates.Correction(gates.Action.BAND, (-9.0, -9.0), (9.0, 9.0), gates.Reduction.MAX),
            "unit: expected one of Unit (STEP, TRAJECTORY, GROUP, DOMAIN or None), got <Reduction.MAX: 3>",
        ),
        (lambda: gates.Correction(gates.Action.BAND, reduction=gates.Aggregate.SUM), "reduction: expected one of Redu"),
        (lambda: gates.Correction(gates.Action.BAND, channel="DISCREPANCY"), "channel: expected one of Channel"),
        (lambda: gates.Correction(gates.Action.MASK, statistic=hpo.specs.KLEstimator.K2), "statistic: expected one of"),
        (lambda: hpo.kl.KLPenalty(gates.Penalty.K2, 1.0, hpo.specs.KLGradient.VALUE), "estimator: expected one of KLE"),
        (lambda: hpo.kl.KLPenalty(hpo.specs.KLEstimator.K2, 1.0, "value"), "gradient: expected one of KLGradient"),
        (lambda: clipped_before(gates.Tanh(0.05)), "pre: expected Clip() or LogClip(), or None, got Tanh(0.05)"),
        (lambda: clipped_before(0.05), "pre: expected Clip() or LogClip(), or None, got 0.05"),
        (lambda: clipped_before(gates.ce_gppo().token), "pre: slopes and weights beyond the bounds are for the clip"),
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_named(make, message):
    """Members of two enumerations of integers may be equal: each of these was another method, without a word."""
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make()


def clipped_before(pre):
    return RatioGate("x", gates.Drop(), (gates.Level(gates.Identity()),), pre=pre)


def test_arguments_a_gate_does_not_take_are_refused():
    batch, logp, advantages = hpo.PackedBatch.from_lengths([2]), torch.zeros(2), torch.ones(1)
    run = functools.partial(hpo.policy_loss, logp, None, advantages, batch)
    for keywords, message in (
        ({"rollout_logp": logp}, "does not read the sampler"),
        ({"gate_inputs": gates.GateInputs(target=advantages)}, "takes none"),
        ({"gate_inputs": gates.GateInputs(penalty_mask=torch.ones(2, dtype=torch.bool))}, "no penalty of its own"),
    ):
        with pytest.raises(ValueError, match=message):
            run(gates.ppo_clip(), **keywords)
    with pytest.raises(TypeError, match="gate_inputs: expected a GateInputs"):
        run(gates.bpo(), gate_inputs=advantages)


@pytest.mark.parametrize("name", sorted(name for name, make in constructors().items() if name != "compose"))
def test_a_gate_without_what_it_needs_is_refused_with_the_call_that_makes_it(name):
    """HAPO without its bounds is PPO's clip, and its name would say otherwise."""
    gate = constructors()[name]()
    run = functools.partial(hpo.policy_loss, torch.zeros(2), None, torch.ones(1), hpo.PackedBatch.from_lengths([2]))
    assert ("gate_inputs=" in constructors()[name].__doc__) == bool(gate.required)
    for field, call in gate.required.items():
        with pytest.raises(ValueError, match=rf"the gate '{name}' needs {field}, got none; pass gate_inputs=") as error:
            run(gate)
        assert call in str(error.value) and hasattr(gates, call.removeprefix("gates.").split("(")[0])


@pytest.mark.parametrize("name", ["hapo_clip", "clip_cov", "fipo", "icepop", "tis"])
def test_a_trainer_that_would_make_ppo_of_a_gate_refuses_it(name):
    with pytest.raises(ValueError, match=rf"gate: '{name}' (needs \w+, as from gates\.|corrects by the sampler's)"):
        check_needs(getattr(gates, name)(), None, ("entropy",), "the sampler does not say")


@pytest.mark.parametrize("shaping", [0.0, -0.1])
def test_the_shaping_of_icpo_is_above_0(shaping):
    with pytest.raises(ValueError, match=f"^shaping: expected a number above 0, got {shaping}"):
        gates.icpo_weight(torch.zeros(2), shaping=shaping)


def test_numbers_of_losses_are_in_their_range():
    for run, message in (
        (lambda: gates.opmd(-0.1), "tau: expected a finite number >= 0, got -0.1"),
        (lambda: _fipo_weight(half_life=0.0), "half_life: expected a number above 0, got 0.0"),
        (lambda: _fipo_weight(ratio_unsafe=-1.0), "ratio_unsafe: expected a number above 0, got -1.0"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            run()


def _fipo_weight(**numbers):
    return gates.fipo_weight(*torch.zeros(2, 2), torch.ones(1), hpo.PackedBatch.from_lengths([2]), **numbers)


def test_a_bound_of_0_is_accepted():
    assert gates.gmpo(0.0, 0.0).pre.high == (0.0, math.inf)


def test_sources_are_those_of_the_method():
    assert gates.dapo().source == "arXiv 2503.14476" and gates.hapo_clip().source == "starriver030515/HAPO"


def test_weights_of_advantages_scale_the_first_order():
    assert {gate.first_order for gate in (gates.opmd(), gates.a_lol(), gates.nft())} == {gates.FirstOrder.SCALED}


@pytest.mark.parametrize("made", [gates.tis(), gates.Correction(gates.Action.MASK), hpo.entropy.ares()], ids=type)
def test_all_fields_make_the_same_again(made):
    """FSDP1 does so with dataclasses among a module's arguments."""
    again = dataclasses.replace(made, **{each.name: getattr(made, each.name) for each in dataclasses.fields(made)})
    assert again == made and again.__dict__.keys() == made.__dict__.keys()
