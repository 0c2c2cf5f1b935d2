"""Gates that nobody published: any levels, clips, heads, penalties and corrections together, against the definition."""

import contextlib
import dataclasses
import itertools
import math
import random

import pytest
from breadth import at_length, number  # noqa: F401 (the first is a fixture)
from catalogue import Example
from hierarchies import DOMAIN, GROUP, STEP, TRAJECTORY, assert_the_definition, exact_off_branches

import hpo_core as hpo
from hpo_core.gates import (
    Action,
    Aggregate,
    Channel,
    Clip,
    Correction,
    Drop,
    Excess,
    Gamma,
    Head,
    Identity,
    Level,
    LogClip,
    Penalty,
    RatioGate,
    Reduction,
    Rollback,
    Routing,
    Statistic,
    Tanh,
)

HEADS = [head for head in Head if head is not Head.CENSORED]  # which has one level of its own
PARTS, AT_LENGTH = 4, {"cpu": 2_500, "cuda": 2_500, "cuda_emulated": 500, "triton": 20}


def pair(draw, low, high):
    return draw.uniform(low, high), draw.uniform(low, high)


def level_gate(draw):
    return draw.choice([
        lambda: Identity(),
        lambda: LogClip(pair(draw, -0.1, -0.01), pair(draw, 0.01, 0.1)),
        lambda: Clip(pair(draw, 0.8, 0.95), pair(draw, 1.05, 1.2)),
        lambda: Rollback(pair(draw, 0.01, 0.05), draw.choice([None, 0.0, 0.7, 2.0, math.inf])),
        lambda: Tanh(draw.uniform(0.02, 0.2)),
        lambda: Gamma(pair(draw, 0.5, 2.0), pair(draw, 0.5, 2.0)),  # RatioGate allows it under Head.SCORE
    ])()  # fmt: skip


def token_gate(draw, of_levels):
    ratio = Clip(pair(draw, 0.7, 0.95), pair(draw, 1.05, 1.4))
    sloped = Clip(ratio.low, ratio.high, slope_low=pair(draw, 0, 1), slope_high=pair(draw, 0, 1))
    weighted = dataclasses.replace(sloped, weight_low=pair(draw, 0.5, 1.5), weight_high=pair(draw, 0.5, 1.5))
    return draw.choice([
        Identity(), Drop(), ratio, sloped, *([LogClip((-0.1, -0.05), (0.06, 0.12))] if of_levels else [weighted]),
    ])  # fmt: skip


def correction(draw):
    statistic = draw.choice(list(Statistic))
    action = draw.choice(list(Action)) if statistic is Statistic.LOG_RATIO else Action.MASK
    unit = draw.choice([None, None, TRAJECTORY, GROUP])
    low = (-0.3, -0.2) if statistic not in (Statistic.K2, Statistic.K3) else (-math.inf, -math.inf)
    return Correction(action, low, (0.25, 0.35), unit, draw.choice(list(Reduction)), Channel.DISCREPANCY, statistic)


def attempted(draw):
    shared = {
        "penalty": draw.choice([Penalty.NONE] * 3 + list(Penalty)),
        "penalty_coefficient": draw.choice([0.0, 0.3]),
        "corrections": tuple(correction(draw) for _ in range(draw.choice([0, 0, 1, 2]))),
        "channel": Channel.TOTAL if draw.random() < 0.15 else Channel.STALENESS,
        "advantage_weights": pair(draw, 0.5, 1.5) if draw.random() < 0.2 else (1.0, 1.0),
    }
    if draw.random() < 0.1:
        routing, unit = draw.choice([Routing.THROUGH, Routing.STOPPED]), draw.choice([STEP, TRAJECTORY, GROUP, DOMAIN])
        level = Level(Excess(draw.uniform(0.02, 0.1)), routing, unit, Aggregate.SUM)
        return RatioGate("random", Drop(), (level,), Head.CENSORED, **shared)
    units = [unit for unit in (STEP, TRAJECTORY, GROUP, DOMAIN) if draw.random() < 0.4]
    exponential = bool(units) and draw.random() < 0.15
    levels = []
    for k, unit in enumerate(units):
        aggregate = Aggregate.SUM if draw.random() < 0.15 else Aggregate.MEAN
        if exponential:
            aggregate = Aggregate.LOG_MEAN_EXP
        if k > 0 and draw.random() < 0.2:
            aggregate = Aggregate.BALANCED
        levels.append(Level(level_gate(draw), draw.choice(list(Routing)), unit, aggregate))
    return RatioGate(
        "random",
        token_gate(draw, bool(levels)),
        tuple(levels),
        head=draw.choice([Head.LINEAR, Head.LINEAR, Head.SCORE, *HEADS]),
        head_numbers=pair(draw, 1.0, 2.0),
        split=bool(levels) and draw.random() < 0.3,
        pre=LogClip((-0.3, -0.25), (0.2, 0.3)) if draw.random() < 0.15 else None,
        **shared,
    )


def drawn_gate(draw):
    """One that is allowed: what the pieces refuse together is drawn again."""
    for _ in range(1000):
        with contextlib.suppress(ValueError):
            return attempted(draw)
    raise AssertionError("no gate is allowed")


def drawn_inputs(draw, gate, example):
    of_tokens = draw.random() < 0.3
    given = {"rollout_logp": example.rollout_logp} if gate.reads_rollout else {}
    if of_tokens:
        given["advantages"] = example.token_advantages
    if gate.takes_target:
        given["target"] = example.token_target if of_tokens else example.target
    if gate.takes_bounds and draw.random() < 0.3:
        given["bounds"] = (example.low, example.high)
    if gate.penalty_coefficient and gate.penalty is not Penalty.NONE and draw.random() < 0.3:
        given["penalty_mask"] = example.penalty_mask
    if draw.random() < 0.3:
        given |= {"ref_logp": example.ref_logp, "kl": draw.choice([hpo.kl.k1, hpo.kl.k2, hpo.kl.k3])(0.1)}
        if draw.random() < 0.3:
            given["kl_weight"] = example.kl_weight
    for name in ("token_weight", "token_mask", "entropy"):
        if draw.random() < 0.2:
            given[name] = getattr(example, name)
    return given


def magnifies(example, exact, advantages):
    """Whether ratios are so far from 1 that they show the rounding of their logarithm."""
    coefficients = (example.weights[example.row()] * advantages).abs().double()
    return bool(exact.loss.abs() > coefficients.sum() or exact.grad.abs().max() > 20 * coefficients.max())


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_gates(part, native_backends):
    wanted = {
        backend: number(backend, at_length=AT_LENGTH[backend], machine_code=10, emulated=4, interpreted=int(part == 0))
        for backend in native_backends
    }
    tried = 0
    for seed in itertools.count(part << 20):
        draw = random.Random(seed)
        gate = drawn_gate(draw)
        lengths = draw.choice([(5, 0, 9, 1, 7, 12, 3), (40, 1, 600), (2, 2, 2, 2, 1)])
        example = Example(seed, lengths, masked=draw.random() < 0.7, several=draw.random() < 0.5)
        given = drawn_inputs(draw, gate, example)
        exact = exact_off_branches(example, gate, **given)
        if exact is None or magnifies(example, exact, given.get("advantages", example.advantages[example.row()])):
            continue
        for backend, most in wanted.items():
            if tried < most:
                assert_the_definition(
                    example, gate, backend, exact, of_loss=4e-6, **given
                )  # sums of log-ratios are large
        tried += 1
        if tried >= max(wanted.values()):
            return
