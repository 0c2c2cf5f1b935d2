"""Each promise that check() holds a kernel to has a kernel that breaks it, and the report names what is wrong."""

import dataclasses
import functools
import itertools
import math
import re
from fractions import Fraction

import pytest
import torch
from kernels_to_check import (
    at_tokens,
    biased_std,
    border_crossing,
    eager_ppo,
    ignored_stride,
    k3,
    masked_read,
    padded_ppo,
    rows_and_mask,
    wrong_tie,
)

import hpo_core as hpo
from hpo_core import testing
from hpo_core.gates import Level, LogClip, RatioGate, Tanh
from hpo_core.reference.entropy import order_statistic
from hpo_core.specs import OrderRule
from hpo_core.testing.promises import UNWRITTEN

EXAMPLES = 30

BROKEN = {
    "masked read": (masked_read, "policy_loss", "masked is never read", "nan"),
    "border crossing": (
        border_crossing,
        "window_mean",
        "packed: no window crosses a row",
        "only other rows were changed",
    ),
    "biased std": (biased_std, "grpo", "exact", "divides by n (biased) where n - 1 is meant"),
    "wrong tie": (
        wrong_tie,
        "policy_loss",
        "ties: a ratio exactly at its bound passes the gradient",
        "exactly at its bound",
    ),
    "ignored stride": (ignored_stride, "policy_loss", "strides are honoured", "inputs have stride 2"),
}


@pytest.mark.parametrize("kernel, op, promise, detail", BROKEN.values(), ids=BROKEN)
def test_the_fault_is_named(kernel, op, promise, detail):
    report = testing.check(kernel, op, examples=EXAMPLES, only=[promise])
    print(report)
    (verdict,) = report.verdicts
    assert verdict.kept is False and detail in verdict.detail and verdict.received


# One fault for every promise of every op: a promise that no kernel can break proves nothing.


def faulty(fault):
    """A fault as a function of kernels, which keep their signatures; it gets the kernel and what that is given."""
    return lambda kernel: functools.wraps(kernel)(functools.partial(fault, kernel))


def changed(out, by):
    out = out[0] if isinstance(out, tuple) else out
    return out ^ bool(by) if out.dtype == torch.bool else out + by


class WithoutIncoming(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, incoming):
        return torch.ones_like(incoming)


class WritesIncoming(WithoutIncoming):
    @staticmethod
    def backward(ctx, incoming):
        outgoing = incoming.clone()
        incoming.zero_()
        return outgoing


CALLS = itertools.count()
GENERAL = {
    "exact": faulty(lambda kernel, *given, **named: changed(kernel(*given, **named), 0.25)),
    "deterministic": faulty(lambda kernel, *given, **named: changed(kernel(*given, **named), next(CALLS) % 2)),
    "strides are honoured": faulty(
        lambda kernel, x, *given, **named: kernel(x.as_strided(x.shape, (1,)), *given, **named)
    ),
    "strides are honoured, of an address that is not aligned": faulty(
        lambda kernel, x, *given, **named: changed(kernel(x, *given, **named), x.is_contiguous() * x.storage_offset())
    ),
    "inputs and earlier results are not written": faulty(
        lambda kernel, x, *given, **named: (kernel(x.clone(), *given, **named), x.data.fill_(7.0))[0]
    ),
    "the incoming gradient": faulty(lambda kernel, *given, **named: WithoutIncoming.apply(kernel(*given, **named))),
    "the incoming gradient, which is written": faulty(
        lambda kernel, *given, **named: WritesIncoming.apply(kernel(*given, **named))
    ),
    "masked is never read": faulty(
        lambda kernel, x, *given, **named: changed(kernel(x, *given, **named), 0.25 * float((x.abs() > 1e20).any()))
    ),
    "batch-invariant": faulty(lambda kernel, x, *given, **named: kernel((1 + 1e-5 * len(x)) * x, *given, **named)),
}


def of_largest_advantage(logp, old_logp, advantages, batch, *, gate, weights):
    return eager_ppo(logp, old_logp, advantages * advantages.abs().sum(), batch, gate=gate, weights=weights)


def per_valid_token(logp, old_logp, advantages, batch, *, gate, weights):
    count = rows_and_mask(batch, logp.numel())[1].sum()
    return eager_ppo(logp, old_logp, advantages, batch, gate=gate, weights=weights) / count * count


def flat_on_policy(logp, old_logp, advantages, batch, *, gate, weights):
    same = logp.detach() == (logp.detach() if old_logp is None else old_logp)
    logp = torch.where(same, logp.detach(), logp)
    return eager_ppo(logp, old_logp, advantages, batch, gate=gate, weights=weights) + 0 * logp.sum()


def own_weights(logp, old_logp, advantages, batch, *, gate, weights):
    return eager_ppo(logp, old_logp, advantages, batch, gate=gate, weights=weights * len(weights))


def unsaturated(logp, old_logp, advantages, batch, *, gate, weights):
    row, valid = rows_and_mask(batch, logp.numel())
    ratio = torch.where(valid, logp - (logp.detach() if old_logp is None else old_logp), 0.0).exp()
    return -(at_tokens(weights * advantages, row) * ratio).sum()


def strict(logp, old_logp, advantages, batch, *, window=None, **given):
    window = window and dataclasses.replace(window, strict=not window.strict)
    return hpo.policy_loss(logp, old_logp, advantages, batch, window=window, **given)


def grpo(rewards, group_ids, mask=None, apply_mask=None):
    return hpo.advantages.grpo(rewards, group_ids, mask=mask, apply_mask=apply_mask)


def threshold(score, quantile):
    return order_statistic(score, *Fraction(str(quantile)).as_integer_ratio(), OrderRule.CEIL)[0]


def in_floats(score, quantile, rule):
    """The order statistic with an index that is computed in the precision of the scores."""
    known = score[score.isfinite()].sort().values
    exact = (torch.ceil, torch.floor, torch.round)[rule](score.new_tensor(quantile) * (len(known) - 1))
    return known[int(exact)].float() if len(known) else score.new_tensor(math.nan).float(), len(known)


def beginning(score):
    return score[:1].nan_to_num(0.0, 0.0, 0.0).sum()


def windowed(values, batch, first, last, *, boundary, invalid):
    return hpo.entropy.window_mean(values, batch, first, last, boundary=boundary, invalid=invalid)


def forking(entropy, batch):
    return hpo.entropy.forking_tokens().fit_apply(entropy, batch)[1]


SOUND = {
    "policy_loss": eager_ppo, "kl": k3, "grpo": grpo, "window_mean": windowed, "window_mask": forking,
    "order_statistic": order_statistic, "quantile": threshold,
}  # fmt: skip
SPECIAL = {
    "policy_loss": {
        "packed": of_largest_advantage, "nothing valid": per_valid_token, "first-order true": flat_on_policy,
        "ties: a ratio": wrong_tie, "ties: a score": strict, "overflow-safe": unsaturated,
        "micro-batch-invariant": own_weights, "batch-invariant": of_largest_advantage,
    },
    "kl": {},
    "grpo": {
        "groups do not see each other": lambda rewards, group_ids: grpo(rewards, group_ids) * rewards.sum(),
        "a reward that is not finite": lambda rewards, group_ids: grpo(rewards.nan_to_num(0.0, 0.0, 0.0), group_ids),
        "identical": lambda rewards, group_ids: grpo(rewards, group_ids) + 1e-9,
        "an offset": lambda rewards, group_ids: grpo(rewards.bfloat16().float(), group_ids),
    },
    "window_mean": {
        "packed": border_crossing, "a constant": lambda *given, **named: (1 + 1e-6) * windowed(*given, **named),
        "a value that": lambda *given, **named: windowed(*given, **named).nan_to_num(-math.inf),
        "exact, of carried windows": lambda *given, boundary, invalid: windowed(
            *given, boundary="shrink" if boundary == "carry" else boundary, invalid=invalid
        ),
        "exact, of wide windows": lambda values, batch, first, last, **named: windowed(
            values, batch, first, min(last, first + 7), **named
        ),
    },
    "window_mask": {
        "a token without": lambda entropy, batch: forking(entropy, batch) | windowed(
            entropy, batch, 0, 0, boundary="full", invalid="skip"
        ).isnan(),
    },
    "order_statistic": {
        "the order": lambda score, *quantile: (order_statistic(score, *quantile)[0] + beginning(score),),
        "undefined": lambda score, *quantile: order_statistic(score.nan_to_num(0.0, 0.0, 0.0), *quantile),
        "the index": lambda score, *quantile: (order_statistic(score, *quantile)[0] + 1,),
        "the index, of doubles": lambda score, p, q, rule: in_floats(score.double(), p / q, rule),
        "the index, of singles": lambda score, p, q, rule: in_floats(score, p / q, rule),
    },
    "quantile": {
        "the order": lambda score, quantile: threshold(score, quantile) + beginning(score),
        "the index": lambda score, quantile: threshold(score, quantile) + 1,
        "the index, of doubles": lambda score, quantile: in_floats(score.double(), quantile, OrderRule.CEIL)[0],
        "the index, of singles": lambda score, quantile: in_floats(score, quantile, OrderRule.CEIL)[0],
    },
}  # fmt: skip
FAULTS = [
    pytest.param(op, promise, kernel, id=f"{op}, {name}")
    for op, sound in SOUND.items()
    for promise in testing.promises(op)
    for name, kernel in {**{each: make(sound) for each, make in GENERAL.items()}, **SPECIAL[op]}.items()
    if promise.startswith(name.partition(", of")[0])
]


def test_each_promise_has_a_fault():
    tried = {fault.values[:2] for fault in FAULTS}
    assert tried == {(op, promise) for op in SOUND for promise in testing.promises(op)}


@pytest.mark.parametrize(("op", "promise", "kernel"), FAULTS)
def test_each_promise_can_be_broken(op, promise, kernel):
    # The draw of a seed depends on the modules that are loaded, too, and may miss the fault once in some hundred times.
    assert any(testing.check(kernel, op, examples=EXAMPLES, only=[promise], seed=seed).broken for seed in range(3))


def ppo_of(*returned):
    """A kernel that returns the first of these of its loss."""

    def kernel(logp, old_logp, advantages, batch):
        return returned[0](hpo.policy_loss(logp, old_logp, advantages, batch, backend="cpu").loss)

    return kernel


@pytest.mark.parametrize(
    ("kernel", "op", "detail"),
    [
        (ppo_of(lambda loss: (loss, 1)), "policy_loss", "the loss as a tensor .* the kernel returned a tuple"),
        (ppo_of(torch.Tensor.tolist), "policy_loss", "the kernel returned a float"),
        (ppo_of(lambda loss: loss[None]), "policy_loss", r"the kernel returned a loss of shape \[1\]"),
        (ppo_of(lambda loss: -loss), "policy_loss", "every element is -1 times the expected one"),
        (ppo_of(lambda loss: 3 * loss), "policy_loss", "every element is 3 times the expected one"),
        (ppo_of(lambda loss: 0 * loss), "policy_loss", "elements are off$"),
        (lambda logp, ref_logp: (logp - ref_logp,), "kl", "expected a tensor; the kernel returned a tuple"),
        (lambda rewards, group_ids: (rewards, rewards), "grpo", "expected a tensor; the kernel returned a tuple"),
    ],
)
def test_what_a_kernel_returns_instead_is_named(kernel, op, detail):
    (verdict,) = testing.check(kernel, op, examples=10, only=["exact"]).verdicts
    assert verdict.kept is False and re.search(detail, verdict.detail), verdict.detail


TIES = "ties: a ratio exactly at its bound passes the gradient"
CLIPPED = (hpo.gates.ppo_clip(), hpo.gates.gspo(), hpo.gates.step_gspo(), hpo.gates.fiberpo(), hpo.gates.gmpo())


@pytest.mark.parametrize("gate", CLIPPED, ids=lambda gate: gate.name)
def test_a_tie_with_a_bound_is_tried_wherever_a_gate_has_a_clip(gate):
    """Clips of tokens, of the mean of a trajectory or a step, of a residual, and before an aggregate."""

    def without_tied(logp, old_logp, advantages, batch, *, gate, weights):
        out = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, weights=weights)
        return out if gate in CLIPPED else out._replace(grad=torch.zeros_like(out.grad))

    assert testing.check(without_tied, gate=gate, examples=EXAMPLES, only=[TIES]).broken == (TIES,)


def test_a_score_at_the_threshold_is_selected_under_a_gate_whose_gradients_cancel():
    gate = RatioGate("tanh_budget", LogClip((-0.2, -0.2), (0.2, 0.2)), (Level(Tanh(0.1)),))
    (promise,) = (name for name in testing.promises() if name.startswith("ties: a score"))
    kernel = functools.partial(strict, gate=gate)
    assert testing.check(hpo.policy_loss, gate=gate, examples=EXAMPLES, only=[promise]).kept == (promise,)
    assert any(testing.check(kernel, gate=gate, examples=100, only=[promise], seed=seed).broken for seed in range(3))


BLOCK = 512


def ppo_of_a_block(logp, old_logp, advantages, batch, *, gate, weights):
    mask = torch.arange(batch.total_tokens) < BLOCK
    batch = batch.replace(mask=mask if batch.mask is None else batch.mask & mask)
    return hpo.policy_loss(logp, old_logp, advantages, batch, gate, weights=weights, backend="cpu")


def padded_ppo_of_a_block(logp, old_logp, advantages, mask, *, weights):
    weights = torch.where(torch.arange(len(weights)) < 128, weights, 0.0)
    return padded_ppo(logp, old_logp, advantages, mask, weights=weights)


def grpo_of_a_block(rewards, group_ids):
    return torch.where(torch.arange(rewards.numel()) < BLOCK, hpo.advantages.grpo(rewards, group_ids), 0.0)


def gigpo_of_a_block(rewards, group_ids, *, trajectory_ids, anchor_ids):
    found = hpo.advantages.gigpo(rewards, group_ids, trajectory_ids=trajectory_ids, anchor_ids=anchor_ids)
    return torch.where(torch.arange(rewards.numel()) < BLOCK, found, 0.0)


def window_of_a_block(values, batch, first, last, *, boundary, invalid):
    found = hpo.entropy.window_mean(values, batch, first, last, boundary=boundary, invalid=invalid)
    return torch.where(torch.arange(values.numel()) < BLOCK, found, 0.0)


def mask_of_a_block(entropy, batch):
    return hpo.entropy.forking_tokens().fit_apply(entropy, batch)[1] & (torch.arange(entropy.numel()) < BLOCK)


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        (ppo_of_a_block, "policy_loss"), (padded_ppo_of_a_block, "policy_loss"), (grpo_of_a_block, "grpo"),
        (gigpo_of_a_block, "gigpo"), (window_of_a_block, "window_mean"), (mask_of_a_block, "window_mask"),
        (lambda score, *quantile: order_statistic(score[:BLOCK], *quantile), "order_statistic"),
        (lambda score, quantile: threshold(score[:BLOCK], quantile), "quantile"),
        (lambda logp, ref_logp: torch.where(torch.arange(len(logp)) < BLOCK, k3(logp, ref_logp), 0.0), "kl"),
    ],
)  # fmt: skip
def test_a_kernel_that_forgets_what_lies_beyond_its_first_block_is_found(kernel, op):
    """Small examples fit into a block; the report of a long one is as short."""
    exact = testing.promises(op)[0]
    report = testing.check(kernel, op, padded=kernel is padded_ppo_of_a_block, examples=20, only=[exact])
    assert report.broken == (exact,) and len(str(report)) < 4000
    assert report.verdicts[0].detail.startswith("on a long example alone: ")
    assert " ... of shape [" in report.verdicts[0].received


def ppo_without_full_blocks(logp, old_logp, advantages, batch, *, gate, weights):
    lengths = batch.cu_seqlens.diff()
    weights = torch.where((lengths > 0) & (lengths % 256 == 0), 0.0, weights)
    return eager_ppo(logp, old_logp, advantages, batch, gate=gate, weights=weights)


def ppo_of_ragged_packs(logp, old_logp, advantages, batch, *, gate, weights):
    weights = weights if len(logp) % 128 else 0 * weights
    return eager_ppo(logp, old_logp, advantages, batch, gate=gate, weights=weights)


def padded_ppo_of_short_rows(logp, old_logp, advantages, mask, *, weights):
    return padded_ppo(logp, old_logp, advantages, mask & (torch.arange(mask.shape[1]) < BLOCK), weights=weights)


def grpo_without_full_blocks(rewards, group_ids):
    ids = torch.zeros_like(rewards, dtype=torch.int64) if group_ids is None else group_ids
    size = (ids[:, None] == ids).sum(1)
    return torch.where(size % 256 == 0, 0.0, hpo.advantages.grpo(rewards, group_ids))


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        (ppo_without_full_blocks, "policy_loss"), (ppo_of_ragged_packs, "policy_loss"),
        (padded_ppo_of_short_rows, "policy_loss"), (grpo_without_full_blocks, "grpo"),
    ],
)  # fmt: skip
def test_a_kernel_that_is_wrong_at_the_end_of_a_full_block_is_found(kernel, op):
    exact = testing.promises(op)[0]
    assert testing.check(kernel, op, padded=kernel is padded_ppo_of_short_rows, examples=60, only=[exact]).broken


@pytest.mark.parametrize("op", ["grpo", "window_mean"])
def test_results_in_memory_that_the_next_call_writes_are_found(op):
    buffer = torch.zeros(10_000)

    def kernel(*given, **named):
        out = SOUND[op](*given, **named)
        return buffer[: out.numel()].copy_(out)

    kernel = functools.wraps(SOUND[op])(kernel)
    (verdict,) = testing.check(kernel, op, examples=EXAMPLES, only=[UNWRITTEN]).verdicts
    assert verdict.kept is False and "an earlier call returned" in verdict.detail


@pytest.mark.parametrize("narrow", [torch.int32, torch.float32])
def test_ids_that_lose_bits_are_found(narrow):
    def narrow_grpo(rewards, group_ids):
        return grpo(rewards, None if group_ids is None else group_ids.to(narrow).long())

    assert testing.check(narrow_grpo, "grpo", examples=EXAMPLES, only=["exact"]).broken
