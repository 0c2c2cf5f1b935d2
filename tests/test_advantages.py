"""Group-normalised advantages on every backend: the float64 reference, worked numbers, the algebra of estimators."""

import functools
import itertools
import math
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
import torch
from breadth import at_length, at_most, few, number, tried  # noqa: F401 (the first is a fixture)
from hypothesis import strategies as st

import hpo_core as hpo
from hpo_core import advantages, testing
from hpo_core.testing import RewardsExample
from hpo_core.testing.budget import UNIT

# Every structure of the op: centre, scale, ddof, place of eps, singletons.
OPTIONS = [
    *(
        ("grpo", {"ddof": ddof, "eps": eps, "eps_mode": mode, "singleton": singleton})
        for ddof, eps, mode, singleton in itertools.product(
            (0, 1), (0.0, 1e-6, 0.3), ("add", "sqrt", "floor"), ("zero", "raw")
        )
    ),
    *((op, {"singleton": singleton}) for op in ("dr_grpo", "rloo") for singleton in ("zero", "raw")),
    *(
        ("lite_ppo", {"ddof": ddof, "eps": eps, "singleton": singleton})
        for ddof, eps, singleton in itertools.product((0, 1), (0.0, 1e-6), ("zero", "raw"))
    ),
]


def run(backend, example, op="grpo", **options):
    rewards, ids, keywords = testing.move(example, testing.device_of(backend))
    return getattr(advantages, op)(rewards, ids, backend=backend, **keywords, **options).cpu()


def assert_exact(backend, example, op="grpo", **options):
    got = run(backend, example, op, **options)
    assert got.dtype == torch.float32
    testing.assert_within_budget(f"{backend} {op} {options}", got, testing.expect_rewards(example, op, **options))
    return got


def grouped(rewards, ids):
    return RewardsExample(torch.tensor(rewards), torch.tensor(ids), {})


# ---------------------------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("op, options", OPTIONS, ids=str)
def test_every_option(backend, op, options):
    for seed, kind in enumerate(("normal", "binary", "equal", "offset")):
        assert_exact(backend, testing.random_rewards(seed, 14, kind), op, **options)


@hypothesis.settings(max_examples=60)
@hypothesis.given(example=testing.reward_groups(30), options=st.sampled_from(OPTIONS))
def test_generated(backend, example, options):
    op, keywords = options
    assert_exact(backend, example, op, **keywords)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("units", [1000, 5000])
def test_many_units(backend, units):
    # A program of the interpreter takes 256 units and compares them with 1,024 others in a step.
    crossing = {1000: 300, 5000: 1100}[units]
    units = tried(backend, at_most(backend, units), crossing)
    for kind in few(backend, ("normal", "offset")):
        example = testing.random_rewards(3, units, kind)  # groups of two on average
        assert_exact(backend, example, "grpo")
        example = example._replace(group_ids=torch.arange(units) % 3)
        assert_exact(backend, example, "grpo")
        assert_exact(backend, example._replace(group_ids=None), "lite_ppo")


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("op", ["grpo", "dr_grpo", "rloo", "lite_ppo"])
def test_keeps_every_promise(backend, op):
    fn = functools.partial(getattr(advantages, op), backend=backend)
    examples = number(backend, at_length=40, machine_code=15, emulated=6, interpreted=4)
    report = testing.check(fn, op, examples=examples, device=testing.device_of(backend))
    report.raise_for_broken()
    shared = {"groups do not see each other"} if op == "lite_ppo" else set()  # by definition groups share one scale
    assert set(testing.promises(op)) - set(report.kept) <= shared


# ----------------------------------------------------------------------------------------------------- worked numbers
# W1 of the methods' notes: a group of binary rewards and one of three different rewards, here interleaved.

R = [1.0, 2.0, 0.0, 0.0, 4.0, 1.0, 6.0]
IDS = [9, 1, 9, 9, 1, 9, 1]
BINARY, OTHER = [0, 2, 3, 5], [1, 4, 6]
W1 = [
    ("grpo", {}, [0.866024, -0.866024, -0.866024, 0.866024], [-1.0, 0.0, 1.0]),
    ("grpo", {"ddof": 0, "eps": 0.0}, [1, -1, -1, 1], [-1.224745, 0, 1.224745]),
    ("dr_grpo", {}, [0.5, -0.5, -0.5, 0.5], [-2, 0, 2]),
    ("rloo", {}, [0.666667, -0.666667, -0.666667, 0.666667], [-3, 0, 3]),
    ("lite_ppo", {}, [0.223607, -0.223607, -0.223607, 0.223607], [-0.894427, 0, 0.894427]),
]


@pytest.mark.parametrize("op, options, binary, other", W1, ids=lambda value: str(value))
def test_worked_numbers(backend, op, options, binary, other):
    out = run(backend, grouped(R, IDS), op, **options)
    assert out[BINARY].tolist() == pytest.approx(binary, abs=1e-6)
    assert out[OTHER].tolist() == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("op, options, binary, other", W1, ids=lambda value: str(value))
def test_worked_numbers_of_the_reference(op, options, binary, other):
    out = testing.expect_rewards(grouped(R, IDS), op, **options).exact
    assert out[BINARY].tolist() == pytest.approx(binary, abs=6e-7)
    assert out[OTHER].tolist() == pytest.approx(other, abs=6e-7)


# --------------------------------------------------------------------------------------------------------- properties
# Numbered as in section 5 of the methods' notes on advantages.

groups_of_several = st.builds(
    lambda seed, size, kind: RewardsExample(
        testing.random_rewards(seed, 4 * size, kind, masks=False).rewards, torch.arange(4 * size) * 7919 % 4, {}
    ),
    st.integers(0, 999), st.integers(2, 7), st.sampled_from(("normal", "binary", "offset")),
)  # fmt: skip


def of_groups(example, values):
    return [values[example.group_ids == key] for key in example.group_ids.unique().tolist()]


def close(got, expected, scale):
    """Within a few float32 roundings of numbers of this size."""
    assert (got.double() - expected.double()).abs().max().item() <= 8 * UNIT * scale, (got, expected)


@hypothesis.given(example=groups_of_several)
def test_p1_order_of_units_and_names_of_groups_do_not_matter(backend, example):
    out = run(backend, example)
    order = torch.randperm(out.numel(), generator=torch.Generator().manual_seed(1))
    renamed = torch.tensor([2**62, 3, 0, 17])[example.group_ids]  # any injective map onto ids >= 0
    close(run(backend, RewardsExample(example.rewards[order], renamed[order], {})), out[order], out.abs().max() + 1)


@hypothesis.given(example=groups_of_several, op=st.sampled_from(("grpo", "dr_grpo", "rloo", "lite_ppo")))
def test_p2_groups_sum_to_zero(backend, example, op):
    for group in of_groups(example, run(backend, example, op)):
        close(group.double().sum(), torch.tensor(0.0), group.abs().sum().item())


@pytest.mark.parametrize("ddof", [0, 1])
@hypothesis.given(example=groups_of_several)
def test_p3_second_moment(backend, ddof, example):
    """The two conventions differ: the other ddof must miss it."""
    for reward, group in zip(
        of_groups(example, example.rewards), of_groups(example, run(backend, example, ddof=ddof, eps=0.0)), strict=True
    ):
        n, moment = group.numel(), group.double().square().sum().item()
        if reward.unique().numel() == 1:
            assert moment == 0.0
            continue
        assert moment == pytest.approx(n - ddof, rel=16 * UNIT)
        assert moment != pytest.approx(n - (1 - ddof), rel=1e-2)


@hypothesis.given(example=groups_of_several)
def test_p4_bounds(backend, example):
    for ddof in (0, 1):
        for group in of_groups(example, run(backend, example, ddof=ddof, eps=0.0)):
            n = group.numel()
            bound = (n - 1) / math.sqrt(n) if ddof else math.sqrt(n - 1)
            assert group.abs().max().item() <= bound * (1 + 4 * UNIT)


@hypothesis.given(example=groups_of_several)
def test_p5_affine_rewards(backend, example):
    """Powers of two and small integers: the transformed rewards are exact, so only the kernel can err."""
    coarse = example._replace(rewards=(example.rewards.clamp(-50, 50) * 16).round() / 16)
    scale, offset = (
        torch.tensor([0.25, 1, 2, 8])[coarse.group_ids],
        torch.tensor([-3.0, 0, 100, 1024])[coarse.group_ids],
    )
    moved = coarse._replace(rewards=coarse.rewards * scale + offset)
    out = run(backend, coarse, eps=0.0)
    close(run(backend, moved, eps=0.0), out, out.abs().max() + 1)
    centred = run(backend, coarse, "dr_grpo")
    close(run(backend, moved, "dr_grpo") / scale, centred, centred.abs().max() + 1)


@hypothesis.given(example=groups_of_several, op=st.sampled_from(("grpo", "dr_grpo", "rloo", "lite_ppo")))
def test_p6_odd(backend, example, op):
    out = run(backend, example, op)
    close(run(backend, example._replace(rewards=-example.rewards), op), -out, out.abs().max() + 1)


@hypothesis.given(example=groups_of_several)
def test_p7_reductions(backend, example):
    n = torch.bincount(example.group_ids)[example.group_ids]
    out = run(backend, example, "rloo")
    close(out, run(backend, example, "dr_grpo") * (n / (n - 1)), out.abs().max() + 1)
    one = example._replace(group_ids=None)
    assert torch.equal(run(backend, one, "lite_ppo"), run(backend, one, "grpo"))


@hypothesis.given(example=testing.reward_groups(), poison=st.sampled_from((math.nan, math.inf, -math.inf)))
def test_p11_masking_is_removal(backend, example, poison):
    mask = torch.rand(example.rewards.shape, generator=torch.Generator().manual_seed(7)) > 0.3
    ids = torch.zeros(mask.shape, dtype=torch.int64) if example.group_ids is None else example.group_ids
    rewards = torch.where(mask, example.rewards, poison)
    for op in ("grpo", "rloo", "lite_ppo"):
        masked = run(backend, RewardsExample(rewards, ids, {"mask": mask}), op)
        removed = run(backend, RewardsExample(example.rewards[mask], ids[mask], {}), op)
        assert torch.equal(masked[mask], removed)
        assert masked[~mask].tolist() == [0.0] * int((~mask).sum())
        unscorable = run(backend, RewardsExample(rewards, ids, {}), op)  # a reward that is not finite acts like a mask
        assert torch.equal(unscorable, masked)


@hypothesis.given(
    constant=st.floats(-(2.0**100), 2.0**100, width=32), size=st.integers(2, 65), eps=st.sampled_from((0.0, 1e-8, 1e-4))
)
def test_p12_identical_rewards_get_exactly_zero(backend, constant, size, eps):
    ids = torch.arange(3 * size) % 3
    example = RewardsExample(torch.full((3 * size,), constant), ids, {})
    for op, options in (("grpo", {"eps": eps}), ("dr_grpo", {}), ("rloo", {}), ("lite_ppo", {"eps": eps})):
        assert not run(backend, example, op, **options).any()


def test_p13_groups_of_one_rank_are_those_of_the_whole_batch(backend):
    """The advantages of a group have the same bits in any cut between groups."""
    example = testing.random_rewards(2, 40, "offset", masks=False)
    whole = run(backend, example)
    for rank in range(3):
        own = example.group_ids % 3 == rank
        assert torch.equal(run(backend, RewardsExample(example.rewards[own], example.group_ids[own], {})), whole[own])


def test_p16_the_naive_formula_fails_these_tests():
    """Negative controls: the float32 formula of trainers breaks P12 and the accuracy at an offset."""

    def naive(rewards, group_ids):
        out = torch.zeros_like(rewards)
        for key in group_ids.unique():
            own = group_ids == key
            if own.sum() > 1:
                out[own] = (rewards[own] - rewards[own].mean()) / (rewards[own].std() + 1e-6)
        return out

    flat = [naive(torch.full((n,), 0.1 * k), torch.zeros(n)) for n in range(2, 30) for k in range(1, 20)]
    assert any(advantage.any() for advantage in flat)
    ids = torch.zeros(16, dtype=torch.int64)
    offset = RewardsExample(1e4 + 0.01 * torch.randn(16, generator=torch.Generator().manual_seed(0)), ids, {})
    with pytest.raises(AssertionError, match="budget"):
        expected = testing.expect_rewards(offset)
        testing.assert_within_budget("naive", naive(*offset[:2]), expected)


# ------------------------------------------------------------------------------------------------------------ accuracy


@pytest.mark.parametrize("offset, spread", [(1e2, 0.01), (1e3, 0.01), (1e4, 0.01), (1e6, 0.01), (1e6, 0.5)])
@pytest.mark.parametrize("size", [2, 16, 64])
def test_accuracy_at_an_offset(backend, offset, spread, size):
    """The absolute error is a float32 rounding, and trainers lose all digits. At 1e6 float32 has multiples of 1/16."""
    draw = torch.Generator().manual_seed(size)
    rewards = offset + spread * torch.randn(4 * size, generator=draw)
    example = RewardsExample(rewards, torch.arange(4 * size) % 4, {})
    exact = testing.expect_rewards(example).exact
    assert (run(backend, example).double() - exact).abs().max() <= 2 * UNIT * exact.abs().max()


def test_huge_rewards_do_not_overflow(backend):
    largest = torch.finfo(torch.float32).max
    example = grouped([largest, -largest, largest, 1e38, -1e38, 0.0], [0, 0, 0, 1, 1, 1])
    for op, options in (("grpo", {}), ("grpo", {"ddof": 0}), ("lite_ppo", {})):
        assert torch.isfinite(assert_exact(backend, example, op, **options)).all()


# ----------------------------------------------------------------------------------------------------------- degenerate


def test_mask_and_apply_mask_are_independent(backend):
    """Units outside the statistics may receive an advantage, also in a group without members."""
    rewards, ids = torch.tensor([1.0, 3.0, 8.0, 5.0, 2.0, 2.0]), torch.tensor([0, 0, 0, 1, 2, 2])
    mask = torch.tensor([True, True, False, False, True, True])
    receives = torch.tensor([True, False, True, True, True, True])
    example = RewardsExample(rewards, ids, {"mask": mask, "apply_mask": receives})
    assert run(backend, example, "dr_grpo").tolist() == [-1.0, 0.0, 6.0, 0.0, 0.0, 0.0]
    assert run(backend, example, "rloo").tolist() == [-2.0, 0.0, 6.0, 0.0, 0.0, 0.0]


def test_groups_of_one(backend):
    example = grouped([4.0, 1.0, 3.0], [7, 2, 2])
    assert run(backend, example, "dr_grpo").tolist() == [0.0, -1.0, 1.0]
    assert run(backend, example, "dr_grpo", singleton="raw").tolist() == [4.0, -1.0, 1.0]
    assert run(backend, example, "rloo", singleton="raw").tolist() == [4.0, -2.0, 2.0]
    assert run(backend, example, "grpo", eps=0.0, singleton="raw")[0].item() == 4.0


@pytest.mark.parametrize("units", [0, 1])
def test_no_units_and_one(backend, units):
    for ids in (None, torch.zeros(units, dtype=torch.int64), torch.full((units,), -1)):
        for op in ("grpo", "dr_grpo", "rloo", "lite_ppo"):
            assert run(backend, RewardsExample(torch.ones(units), ids, {}), op).tolist() == [0.0] * units


def test_groups_without_members(backend):
    nobody = torch.zeros(3, dtype=torch.bool)
    example = RewardsExample(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]), {"mask": nobody})
    for op in ("grpo", "lite_ppo", "rloo"):
        assert not run(backend, example, op).any()
        assert not run(backend, example._replace(keywords={"mask": nobody, "apply_mask": ~nobody}), op).any()


@pytest.mark.parametrize("extreme", [2**63 - 1, 2**62, -1, -(2**63)])
def test_any_integer_is_an_id(backend, extreme):
    example = grouped([1.0, 2.0, 5.0, 7.0], [extreme, 0, extreme, 0])
    expected = [-2.0, -2.5, 2.0, 2.5] if extreme >= 0 else [0.0, -2.5, 0.0, 2.5]
    assert run(backend, example, "dr_grpo").tolist() == expected


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("made", [int, Fraction, np.float32], ids=lambda made: made.__name__)
def test_a_number_of_any_type_is_the_same_number(backend, made):
    example = testing.random_rewards(1, 14, "normal")
    assert torch.equal(run(backend, example, eps=made(1)), run(backend, example, eps=1.0))
    assert torch.equal(run(backend, example, ddof=np.int64(1)), run(backend, example, ddof=1))


def test_same_bits_on_any_number_of_threads(backend):
    largest = number(backend, at_length=3000, machine_code=3000, emulated=1100, interpreted=1100)
    for units in few(backend, (300, largest)):
        example = testing.random_rewards(5, units, "normal")
        outs = []
        for threads in number(
            backend, at_length=(1, 2, 3), machine_code=(1, 2, 3), emulated=(1, 3), interpreted=(1, 3)
        ):
            torch.set_num_threads(threads)
            outs.append([run(backend, example, op) for op in ("grpo", "lite_ppo")])
        assert all(torch.equal(a, b) for out in outs for a, b in zip(out, outs[0], strict=True))


def test_advantages_carry_no_gradient(backend):
    rewards = torch.tensor([1.0, 2.0], device=testing.device_of(backend), requires_grad=True)
    assert not hpo.advantages.grpo(rewards, None, backend=backend).requires_grad
