"""check() on correct and broken kernels, the budget, the generators, and the losses of verl and TRL."""

import dataclasses
import functools
import inspect
import itertools
import re
import types
from fractions import Fraction

import pytest
import torch
from catalogue import CATALOGUE

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.metrics import slot
from hpo_core.reference.entropy import order_statistic
from hpo_core.reference.segments import row_of_token
from hpo_core.specs import OrderRule
from hpo_core.testing import Expected, Layout

EXAMPLES = 30

# ------------------------------------------------------------------------------------------------- an honest kernel


def log_ratio(logp, old_logp, valid):
    """The log-ratio, saturated at +-60 with its slope kept; 0 at tokens that must not be read."""
    old_logp = logp.detach() if old_logp is None else old_logp
    x = torch.where(valid, logp, 0.0) - torch.where(valid, old_logp, 0.0)
    return x.detach().clamp(-60, 60) + (x - x.detach())


def rows_and_mask(batch, tokens):
    row = row_of_token(batch.cu_seqlens, tokens)
    return row, (row >= 0) if batch.mask is None else (row >= 0) & batch.mask


def at_tokens(values, row):
    return torch.cat((values, values.new_zeros(1)))[row]  # row -1: the zero at the end


def clip(ratio, bounds, negative):
    low, high = torch.tensor(bounds.low)[negative], torch.tensor(bounds.high)[negative]
    return torch.where(ratio < low, low, torch.where(ratio > high, high, ratio))


def eager_ppo(logp, old_logp, advantages, batch, *, gate, weights):
    """PPO in eager PyTorch, as careful as hpo_core."""
    row, valid = rows_and_mask(batch, logp.numel())
    advantage = at_tokens(advantages, row)
    ratio = clip(log_ratio(logp, old_logp, valid).exp(), gate.token, (advantage < 0).long())
    return torch.where(valid, -(at_tokens(weights, row) * advantage) * ratio, 0.0).sum()


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - 1 - (ref_logp - logp)


def test_a_correct_kernel_keeps_every_supported_promise():
    report = testing.check(eager_ppo, examples=EXAMPLES)
    scores = "ties: a score equal to the threshold is selected (unless strict)"  # the kernel takes no window
    report.raise_for_broken()
    assert report.kept == tuple(name for name in testing.promises() if name != scores)
    assert 0 < report.worst <= 1
    head = f"policy_loss: of 13 promises 12 kept, 0 broken, 1 not supported; {EXAMPLES} examples each"
    assert str(report).startswith(head)
    assert f"not supported  {scores}  (the kernel has no window, threshold, entropy)" in str(report)


def test_the_reference_keeps_every_promise():
    for op, examples in (("grpo", EXAMPLES), ("rloo", 8)):
        estimator = functools.partial(getattr(hpo.advantages, op), backend="reference")
        assert testing.check(estimator, op, examples=examples).kept == testing.promises(op)
    of_scores = testing.check(order_statistic, "order_statistic", examples=EXAMPLES)
    assert of_scores.kept == testing.promises("order_statistic")


@pytest.mark.parametrize("off", [-1, 1])
def test_an_order_statistic_beside_the_right_one_is_found(off):
    promise = "the index is exact in integers"

    def kernel(*given):
        threshold, counts = order_statistic(*given)
        return threshold + off, counts

    assert testing.check(kernel, "order_statistic", examples=2, only=[promise]).broken == (promise,)


def user_ppo(pessimistic):
    """PPO as a user writes it: old_logp is a tensor, the denominator the number of tokens, there is no gate."""

    def ppo(logp, old_logp, advantages, batch):
        row, valid = rows_and_mask(batch, logp.numel())
        advantage = at_tokens(advantages, row)
        ratio = torch.where(valid, logp - old_logp, 0.0).exp()
        loss = -pessimistic(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return torch.where(valid, loss, 0.0).sum() / valid.sum().clamp(min=1)

    return ppo


def test_a_right_and_a_wrong_ppo_differ_in_the_first_line_of_the_table():
    """An input that a plain kernel does not take is no fault; its other broken promises are in the report as well."""
    right, wrong = (testing.check(user_ppo(each), examples=EXAMPLES) for each in (torch.minimum, torch.maximum))
    assert "  pass           exact  (largest error" in str(right).splitlines()[1]
    assert str(wrong).splitlines()[1] == "  FAIL           exact"
    assert set(wrong.broken) - set(right.broken) == {"exact"}
    assert set(right.broken) <= {OVERFLOW}  # the kernel's ratios do not saturate
    assert "old_logp=None, on which the kernel raised TypeError" in right.notes
    assert not wrong.ok and "expected 0.0" in dict(zip(testing.promises(), wrong.verdicts, strict=True))["exact"].detail
    with pytest.raises(AssertionError, match="FAIL exact: the gradient"):
        wrong.raise_for_broken()


def test_a_report_without_a_verdict_is_not_ok():
    report = testing.check(user_ppo(torch.minimum), only=[MICRO], examples=1)
    assert (report.kept, report.broken, report.ok) == ((), (), False)


def test_the_report_shows_the_arguments_that_the_kernel_received():
    """The report shows the poison at the masked token, not the clean example that was drawn."""
    report = testing.check(masked_read, examples=EXAMPLES, only=["masked is never read"])
    assert "logp = [nan]" in report.verdicts[0].received and "gate" in report.verdicts[0].received


def forward_only(logp, old_logp, advantages, batch, *, gate, weights):
    return eager_ppo(logp.detach(), old_logp, advantages, batch, gate=gate, weights=weights)


def test_gradient_false_checks_a_loss_without_a_gradient():
    report = testing.check(forward_only, gradient=False, examples=8)
    assert report.ok and {"exact", "masked is never read", MICRO} <= set(report.kept)
    assert "not supported  packed: rows do not see each other  (the kernel has no gradient)" in str(report)
    report = testing.check(forward_only, examples=5)
    assert "exact" in report.broken and "gradient=False" in str(report)


def padded_ppo(logp, old_logp, advantages, mask, *, weights, ref_logp=None, kl=None, off_by_one=False):
    old_logp = logp.detach() if old_logp is None else old_logp
    x = torch.where(mask, logp - old_logp, 0.0)
    ratio = (x.detach().clamp(-60, 60) + (x - x.detach())).exp()
    loss = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    if kl is not None:
        s = torch.where(mask, logp - ref_logp, 0.0)
        loss = loss + kl.beta * ((-s).exp() - 1 + s)
    if off_by_one:
        mask = mask.roll(1, -1)
    return (torch.where(mask, loss, 0.0) * weights[:, None]).sum()


def test_padded_kernels_are_given_rectangles():
    report = testing.check(padded_ppo, padded=True, examples=EXAMPLES)
    assert "exact" in report.kept and "masked is never read" in report.kept and set(report.broken) <= {OVERFLOW}
    wrong = functools.partial(padded_ppo, off_by_one=True)
    wrong = testing.check(wrong, padded=True, examples=EXAMPLES, only=["exact"])
    assert wrong.broken == ("exact",) and "mask = [[" in str(wrong)
    ours = testing.check(functools.partial(hpo.policy_loss, backend="cpu"), padded=True, examples=8)
    ours.raise_for_broken()
    ours = functools.partial(hpo.entropy.window_mean, backend="cpu")
    assert testing.check(ours, "window_mean", padded=True, examples=15, only=["exact"]).ok


def test_penalties():
    assert testing.check(k3, "kl", examples=EXAMPLES).ok
    square = testing.check(lambda logp, ref: 0.5 * (logp - ref) ** 2, "kl", penalty=hpo.kl.k2(1.0), examples=EXAMPLES)
    assert square.kept == testing.promises("kl") == ("exact", "deterministic", "strides are honoured", UNWRITTEN)
    only = {"examples": EXAMPLES, "only": ["exact"]}
    assert not testing.check(lambda logp, ref: 0.5 * (logp - ref) ** 2, "kl", **only).ok
    k1 = hpo.kl.k1(1.0)
    no_gradient = testing.check(lambda logp, ref: logp.detach() - ref, "kl", penalty=k1, gradient=False, examples=8)
    assert no_gradient.ok
    assert not testing.check(lambda logp, ref: logp.detach() - ref, "kl", penalty=k1, **only).ok


def test_masks_of_windows():
    for window in (hpo.entropy.forking_tokens(), hpo.entropy.ares()):

        def ours(entropy, batch, window):
            return window.fit_apply(entropy, batch, backend="cpu")[1]

        report = testing.check(ours, "window_mask", window=window, examples=8)
        assert report.kept == testing.promises("window_mask")

    def of_padding(entropy, mask):  # the quantile of masked tokens as well, as some trainers take it
        return (entropy >= entropy.quantile(0.8, interpolation="higher")) & mask if entropy.numel() else mask

    report = testing.check(of_padding, "window_mask", padded=True, examples=EXAMPLES)
    assert "exact, ties included" in report.broken and "masked is never read" in report.broken


def test_quantiles():
    def of_rule(rule):
        def fn(scores, quantile):
            q = Fraction(str(quantile))
            return scores.sort().values[rule.index(q.numerator, q.denominator, scores.numel())]

        return fn

    ceil, nearest = of_rule(OrderRule.CEIL), of_rule(OrderRule.NEAREST)
    assert testing.check(ceil, "quantile", examples=EXAMPLES).kept == testing.promises("quantile")
    ties = "exact, ties included"
    assert testing.check(nearest, "quantile", examples=EXAMPLES, only=[ties]).broken == (ties,)
    assert testing.check(nearest, "quantile", rule=OrderRule.NEAREST, examples=EXAMPLES).ok
    interpolating = testing.check(torch.quantile, "quantile", examples=EXAMPLES, only=[ties])
    assert interpolating.broken == (ties,)


def test_estimators_of_rows_and_steps_by_name_and_by_function():
    def flat(rewards, group_ids):
        return hpo.advantages.grpo(rewards, group_ids, backend="reference")

    assert testing.check(flat, "advantages", examples=8).ok
    other = testing.check(flat, "advantages", estimator=hpo.advantages.rloo, examples=20, only=["exact"])
    assert other.broken == ("exact",)
    for estimator in (hpo.advantages.gigpo, hpo.advantages.hgpo):  # by name, with more examples, in the next test
        of_steps = functools.partial(estimator, backend="cpu")
        report = testing.check(of_steps, "advantages", estimator=estimator, examples=6)
        report.raise_for_broken()
        assert "exact" in report.kept

    def without_steps(rewards, group_ids, trajectory_ids, anchor_ids):
        return flat(rewards, group_ids)

    wrong = testing.check(without_steps, "gigpo", examples=20, only=["exact"])
    assert wrong.broken == ("exact",) and "anchor_ids = [" in str(wrong)
    with pytest.raises(ValueError, match="bind its other inputs with"):
        testing.check(flat, "sgrpo")


@pytest.mark.parametrize("name", testing.subjects.ESTIMATORS)
def test_every_estimator_keeps_its_promises_or_is_refused(name):
    """Refused are those that take other inputs, several rewards, or give no advantage of each."""
    estimator = getattr(hpo.advantages, name)
    _, *second = inspect.signature(estimator).parameters.values()
    required = [each.name for each in second[1:] if each.default is each.empty]
    of_units = estimator.level in ("row", "step") and not estimator.multi_reward and second[0].name == "group_ids"
    if of_units and set(required) <= {"trajectory_ids", "anchor_ids", "lengths"}:
        testing.check(estimator, name, examples=4).raise_for_broken()
    else:
        with pytest.raises(
            ValueError, match=rf"estimator: expected one of rewards \[S\], .* got {name}\(.*wrap it in a"
        ):
            testing.check(estimator, name)


def test_a_wrapped_estimator_is_judged_like_any_other():
    def wrapped(rewards, group_ids, **keywords):
        return hpo.advantages.dvao(rewards[None], group_ids, **keywords)

    testing.check(wrapped, "advantages", estimator=wrapped, examples=8).raise_for_broken()


def test_faults_of_the_definition_are_its_own():
    def own(rewards, group_ids):  # takes no backend
        return hpo.advantages.dr_grpo(rewards, group_ids)

    def raises(rewards, group_ids):
        raise KeyError("prompt")

    def half(rewards, group_ids):  # NaN where the id is negative
        return torch.where(group_ids < 0, torch.nan, own(rewards, group_ids))

    testing.check(own, "advantages", estimator=own, examples=5).raise_for_broken()
    with pytest.raises(ValueError, match=r"^estimator: expected advantages of every .* but raises raised KeyError: "):
        testing.check(own, "advantages", estimator=raises, examples=5)
    report = testing.check(half, "advantages", estimator=half, examples=EXAMPLES)
    assert report.ok and [each.detail for each in report.verdicts].count("the estimator gives NaN") == 3


# ---------------------------------------------------------------------------------------------------- broken kernels


def masked_read(logp, old_logp, advantages, batch, *, gate, weights):
    """Multiplies by the mask: 0 * NaN is NaN."""
    row, valid = rows_and_mask(batch, logp.numel())
    advantage = at_tokens(advantages, row)
    everywhere = torch.ones_like(valid)
    ratio = clip(log_ratio(logp, old_logp, everywhere).exp(), gate.token, (advantage < 0).long())
    return (valid.float() * -(at_tokens(weights, row) * advantage) * ratio).sum()


def border_crossing(values, batch, first, last, *, boundary, invalid):
    """Treats the pack as one row."""
    whole = hpo.PackedBatch(batch.cu_seqlens[[0, -1]], batch.mask, total_tokens=batch.total_tokens)
    return hpo.entropy.window_mean(values, whole, first, last, boundary=boundary, invalid=invalid, backend="reference")


def biased_std(rewards, group_ids):
    return hpo.advantages.grpo(rewards, group_ids, ddof=0, backend="reference")


def wrong_tie(logp, old_logp, advantages, batch, *, gate, weights):
    """A ratio at its bound counts as clipped: value right, gradient 0."""
    row, valid = rows_and_mask(batch, logp.numel())
    advantage = at_tokens(advantages, row)
    negative = (advantage < 0).long()
    ratio = log_ratio(logp, old_logp, valid).exp()
    low, high = torch.tensor(gate.token.low)[negative], torch.tensor(gate.token.high)[negative]
    clipped = torch.where(ratio <= low, low, torch.where(ratio >= high, high, ratio))
    return torch.where(valid, -(at_tokens(weights, row) * advantage) * clipped, 0.0).sum()


def ignored_stride(logp, old_logp, advantages, batch, *, gate, weights):
    """Reads logp as if it were contiguous."""
    memory = logp.as_strided((logp.numel(),), (1,))
    return eager_ppo(memory, old_logp, advantages, batch, gate=gate, weights=weights)


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
    "inputs are not written": faulty(
        lambda kernel, x, *given, **named: (kernel(x.clone(), *given, **named), x.data.fill_(7.0))[0]
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
        "identical": lambda rewards, group_ids: grpo(rewards, group_ids) + 1e-9,
        "an offset": lambda rewards, group_ids: grpo(rewards.bfloat16().float(), group_ids),
    },
    "window_mean": {
        "packed": border_crossing, "a constant": lambda *given, **named: (1 + 1e-6) * windowed(*given, **named),
    },
    "window_mask": {},
    "order_statistic": {
        "the order": lambda score, *quantile: (order_statistic(score, *quantile)[0] + beginning(score),),
        "undefined": lambda score, *quantile: order_statistic(score.nan_to_num(0.0, 0.0, 0.0), *quantile),
        "the index": lambda score, *quantile: (order_statistic(score, *quantile)[0] + 1,),
    },
    "quantile": {
        "the order": lambda score, quantile: threshold(score, quantile) + beginning(score),
        "the index": lambda score, quantile: threshold(score, quantile) + 1,
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
    # What a seed draws depends on the modules that are loaded, too, and may miss the fault once in some hundred times.
    assert any(testing.check(kernel, op, examples=EXAMPLES, only=[promise], seed=seed).broken for seed in range(3))


def test_a_kernel_that_writes_its_inputs_is_judged_by_what_it_was_given():
    def clamps(logp, old_logp, advantages, batch, *, gate, weights):
        return eager_ppo(logp, old_logp, advantages.clamp_(min=0.0), batch, gate=gate, weights=weights)

    def zeroes_rewards(rewards, group_ids):
        return hpo.advantages.dr_grpo(rewards.zero_(), group_ids, backend="reference")

    def zeroes(entropy, batch):
        return hpo.entropy.forking_tokens().fit_apply(entropy.zero_(), batch, backend="reference")[1]

    for kernel, op, name in (
        (clamps, "policy_loss", "advantages"),
        (zeroes_rewards, "dr_grpo", "rewards"),
        (zeroes, "window_mask", "entropy"),
    ):
        exact = next(each for each in testing.promises(op) if each.startswith("exact"))
        report = testing.check(kernel, op, examples=40, only=[exact, UNWRITTEN])
        assert report.broken == (exact, UNWRITTEN), report
        written = report.verdicts[1]
        assert written.detail == f"the kernel wrote what it was given as {name}"
        if op == "dr_grpo":  # what was given, not what was left
            assert "rewards = [" in written.received and "rewards = [0.0]" not in written.received
    assert testing.explain(testing.random_policy_loss(0, gates.ppo_clip()), clamps).differing == 2


def test_the_example_is_shrunk():
    """One masked token is enough to show a read of masked tokens, and one row to show weights of its own."""

    def own_mean(logp, old_logp, advantages, batch, *, gate, weights):
        return eager_ppo(logp, old_logp, advantages, batch, gate=gate, weights=torch.ones_like(weights))

    for kernel, promise in (
        (masked_read, "masked is never read"),
        (own_mean, "micro-batch-invariant: parts add up to the whole"),
    ):
        report = testing.check(kernel, examples=EXAMPLES, only=[promise])
        assert "tokens=1" in report.verdicts[0].received


def test_an_exception_is_a_broken_promise_too():
    def crashes(rewards, group_ids):
        raise RuntimeError("no kernel for this device")

    report = testing.check(crashes, "grpo", examples=5)
    assert "exact" in report.broken and "raised RuntimeError: no kernel" in str(report)


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


def test_the_same_seed_finds_the_same_example():
    first, second = (str(testing.check(biased_std, "grpo", examples=20, only=["exact"], seed=4)) for _ in range(2))
    assert first == second and "FAIL exact" in first


def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match="fn: expected a function"):
        testing.check("grpo")
    with pytest.raises(ValueError, match="estimator: op='grpo' names it already"):
        testing.check(biased_std, "grpo", estimator=hpo.advantages.rloo)
    with pytest.raises(ValueError, match="op: expected one of"):
        testing.check(biased_std, "gpro")
    with pytest.raises(ValueError, match="only: expected names"):
        testing.check(biased_std, "grpo", only=["exakt"])
    with pytest.raises(ValueError, match="features: expected names"):
        testing.random_policy_loss(features=["weight"])
    for wrong, made in (
        ({"gate": "dapo"}, "gates.dapo"),
        ({"penalty": 0.1}, "kl.k3"),
        ({"window": 3}, "entropy.forking_tokens"),
    ):
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))}: expected one such as {made}"):
            testing.check(hpo.policy_loss, **wrong)
    for op, unread in (
        ("kl", {"gate": gates.gspo(), "window": hpo.entropy.ares(), "padded": True}),
        ("grpo", {"penalty": hpo.kl.k1(1.0), "gradient": False}),
        ("policy_loss", {"estimator": hpo.advantages.rloo}),
        ("window_mean", {"features": ["weights"]}),
    ):
        with pytest.raises(ValueError, match=f"^{', '.join(unread)}: op='{op}' does not read it; drop it"):
            testing.check(hpo.policy_loss, op, **unread)
    with pytest.raises(ValueError, match=r"^padded: a mask \[B, L\] has no steps, .*'p3o'"):
        testing.check(padded_ppo, gate=gates.reconstructed.p3o(), padded=True)
    for wrong in ({"features": ["windows"]}, {"device": "gpu"}, {"examples": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected "):
            testing.check(hpo.policy_loss, **wrong)


@pytest.mark.parametrize("features", [[], ["weights"], ["window"]])
def test_promises_about_features_that_are_left_out_are_not_judged(features):
    only = [name for name in testing.promises() if name.startswith(("ties: a score", "batch-inv", "micro-batch-inv"))]
    report = testing.check(hpo.policy_loss, examples=3, features=features, only=only, backend="reference")
    needs = ("window", "weights", "weights")
    assert [verdict.kept for verdict in report.verdicts] == [True if need in features else None for need in needs]


# Of steps, groups and domains, with a target, and of the sampler.
ODD = (
    *("hierarchy: step_gspo", "hierarchy: two_scale", "preset: p3o", "hierarchy: fiberpo_domain", "preset: bpo"),
    "preset: hispo",
)

OTHERS = [name for name in CATALOGUE if name.startswith(("preset: ", "hierarchy: ")) and name not in ODD]


@pytest.mark.parametrize("name", [*ODD, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_our_own_loss_keeps_its_promises_under_every_gate(name):
    report = testing.check(functools.partial(hpo.policy_loss, backend="cpu"), gate=CATALOGUE[name], examples=5)
    report.raise_for_broken()
    coarse = {level.unit for level in CATALOGUE[name].levels} & {gates.Unit.GROUP, gates.Unit.DOMAIN}
    assert sum("whose rows see each other" in each.detail for each in report.verdicts) == (2 if coarse else 0)


def test_without_weights_a_gate_of_steps_counts_the_tokens_in_steps():
    testing.check(hpo.policy_loss, gate=gates.step_gspo(), features=[], only=["exact"], examples=20).raise_for_broken()


@pytest.mark.parametrize("gate", [gates.icepop(), gates.opsm()], ids=lambda gate: gate.name)
def test_a_kernel_without_the_correction_of_its_gate_is_wrong(gate):
    report = testing.check(eager_ppo, gate=gate, features=["weights"], only=["exact"], examples=EXAMPLES)
    assert report.broken == ("exact",) and "rollout_logp, which the gate reads" in str(report)


def test_strategies_without_hypothesis_say_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hypothesis.strategies", None)
    with pytest.raises(ImportError, match="pip install hypothesis"):
        testing.layouts()


# ------------------------------------------------------------------------------------------------------- the stopwatch


def test_bench_measures_a_loss_next_to_hpo_core(monkeypatch, tmp_path):
    """One call gives time, memory and a picture, eager and compiled (here without a compiler of machine code)."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    picture = tmp_path / "bench.png"
    measured = testing.bench(padded_ppo, padded=True, tokens=4096, rows=8, seconds=0.1, picture=picture)
    names = ["hpo_core", "hpo_core, compiled", "padded_ppo", "padded_ppo, compiled"]
    assert [line.name for line in measured.lines] == names
    for line in measured.lines:
        assert 0 < line.low <= line.milliseconds <= line.high and line.bytes_per_token >= 4 and not line.note
    assert str(measured).startswith("ppo_clip, 4,096 tokens in 8 rows, ") and len(str(measured).splitlines()) == 6
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_does_not_time_functions_that_differ_or_raise():
    def wrong(logp, old_logp, advantages, batch):
        return 1.1 * user_ppo(torch.minimum)(logp, old_logp, advantages, batch)

    def raises(logp, old_logp, advantages, batch):
        raise RuntimeError("no kernel for this device")

    for fn, gate, note in (
        (wrong, gates.ppo_clip(), "its loss is off by"),
        (user_ppo(torch.minimum), gates.icepop(), "its loss is off by"),
        (raises, gates.ppo_clip(), "raised RuntimeError: no kernel for this device"),
    ):
        ours, theirs = testing.bench(fn, gate=gate, tokens=512, rows=2, compiled=False, seconds=0.01).lines
        assert ours.milliseconds > 0 and theirs.milliseconds is None and theirs.note.startswith(note)


@pytest.mark.parametrize("gate, needs", [(gates.kl_cov(), "penalty_mask"), (gates.step_gspo(), "steps")])
def test_bench_refuses_gates_that_need_more_than_its_batch_has(gate, needs):
    with pytest.raises(ValueError, match=rf"^gate: expected one such as .*{gate.name}.* needs {needs}"):
        testing.bench(eager_ppo, gate=gate)


def test_bench_refuses_no_tokens_and_a_picture_without_matplotlib(monkeypatch):
    with pytest.raises(ValueError, match="tokens: expected a number >= 1, got 0"):
        testing.bench(padded_ppo, tokens=0)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        testing.bench(padded_ppo, padded=True, tokens=64, rows=1, compiled=False, seconds=0.01, picture="bench.png")


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
    """Of the metrics of small log-ratios; far from 0 the rounding of a log-ratio is worth as much."""
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


# ----------------------------------------------------------------------------------------------------------- the peers
# Thin adapters convert a pack to the padded layout of a trainer, and use its own mean over tokens. The broken promises
# are a record of the pinned versions, not a judgement: each is a convention, or a limit that its trainer never reaches.


def padded(values, batch, fill=0.0):
    """``[T]`` to ``[S, L]``, by indexing, so that gradients return."""
    lengths = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
    longest = int(lengths.max()) if batch.rows else 0
    position = torch.arange(longest)
    inside = position < lengths[:, None]
    index = (batch.cu_seqlens[:-1, None] + position).clamp(max=max(values.numel() - 1, 0))
    return torch.where(inside, values[index], fill) if values.numel() else values.new_zeros(batch.rows, longest)


def padded_arguments(logp, old_logp, advantages, batch):
    old_logp = logp.detach() if old_logp is None else old_logp
    mask = torch.ones(logp.shape, dtype=torch.bool) if batch.mask is None else batch.mask
    shape = padded(logp, batch).shape
    return padded(logp, batch), padded(old_logp, batch), advantages[:, None].expand(shape), padded(mask, batch, False)


def verl_policy_loss(name, **settings):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    config = pytest.importorskip("verl.workers.config")

    def fn(logp, old_logp, advantages, batch):
        current, old, advantage, mask = padded_arguments(logp, old_logp, advantages, batch)
        if current.numel() == 0:  # trainers have no such batch
            return logp[:0].sum()
        actor = config.ActorConfig(
            strategy="fsdp",
            rollout_n=4,
            ppo_micro_batch_size_per_gpu=2,
            policy_loss=config.PolicyLossConfig(),
            **settings,
        )
        loss = core_algos.get_policy_loss_fn(name)
        return loss(old, current, advantage, mask.float(), loss_agg_mode="token-mean", config=actor)[0]

    return fn


def trl_policy_loss(loss_type, level="token", **settings):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    accelerator = types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)

    def fn(logp, old_logp, advantages, batch):
        current, old, _advantage, mask = padded_arguments(logp, old_logp, advantages, batch)
        if current.numel() == 0:
            return logp[:0].sum()
        itself = types.SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *a, **k: (current, torch.zeros_like(current), None),
            loss_type=loss_type, importance_sampling_level=level, epsilon_low=0.2, epsilon_high=0.2, beta=0.0,
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False,
            _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1, accelerator=accelerator,
            max_completion_length=current.shape[1], model=types.SimpleNamespace(training=True),
            args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False),
            _metrics={"train": __import__("collections").defaultdict(list)}, **settings,
        )  # fmt: skip
        ids = torch.zeros_like(mask, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :0], "prompt_mask": ids[:, :0], "completion_ids": ids,
            "completion_mask": mask.int(), "advantages": advantages, "old_per_token_logps": old,
        }  # fmt: skip
        return trainer._compute_loss(itself, None, inputs)

    return fn


def verl_advantage(name):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")

    def fn(rewards, group_ids):
        import numpy

        ids = torch.zeros(rewards.numel()) if group_ids is None else group_ids
        ids = torch.where(ids < 0, -1 - torch.arange(ids.numel()), ids)  # units of no group: groups of one
        mask = torch.ones(rewards.numel(), 1)
        out = getattr(core_algos, name)(rewards[:, None].clone(), mask, numpy.array(ids.tolist()))[0][:, 0]
        sizes = (ids[:, None] == ids).sum(1)
        return torch.where(sizes > 1, out, 0.0)  # a convention: verl keeps the raw reward of a group of one

    return fn


MASKED, OVERFLOW = "masked is never read", "overflow-safe: log-ratios saturate at +-60 and keep their slope"
NOTHING, OFFSET = "nothing valid: loss 0, gradient 0", "an offset common to a group costs no digits"
IDENTICAL = "identical rewards get exactly 0"
MICRO = "micro-batch-invariant: parts add up to the whole"
UNWRITTEN = "inputs are not written"
PEERS = {
    "verl vanilla": lambda: (verl_policy_loss("vanilla"), "policy_loss", gates.ppo_clip(0.2, 0.2, ratio_dual=3.0)),
    "verl gspo": lambda: (
        verl_policy_loss("gspo", clip_ratio_low=0.2, clip_ratio_high=0.2), "policy_loss", gates.gspo_token(0.2, 0.2),
    ),
    "TRL bnpo": lambda: (trl_policy_loss("bnpo"), "policy_loss", gates.ppo_clip(0.2, 0.2)),
    "TRL bnpo, sequence": lambda: (trl_policy_loss("bnpo", "sequence"), "policy_loss", gates.gspo(0.2, 0.2)),
    "verl grpo": lambda: (verl_advantage("compute_grpo_outcome_advantage"), "grpo", None),
    "verl rloo": lambda: (verl_advantage("compute_rloo_outcome_advantage"), "rloo", None),
}  # fmt: skip


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "examples"),
    [
        *((name, EXAMPLES) for name in ("TRL bnpo", "verl grpo")),  # a loss and an estimator
        *(pytest.param(name, 200, marks=pytest.mark.long) for name in PEERS),
    ],
)
def test_promises_that_peers_break(name, examples):
    fn, op, gate = PEERS[name]()
    features = ["on_policy"] if gate else None  # rows are trajectories there
    report = testing.check(fn, op, gate=gate, features=features, examples=examples)
    print(report)
    assert set(report.broken) == BREAKS[name]


BREAKS = {
    "verl vanilla": {NOTHING, OVERFLOW},
    "verl gspo": {MASKED, NOTHING, OVERFLOW},
    "TRL bnpo": {MASKED, OVERFLOW},
    "TRL bnpo, sequence": {MASKED, OVERFLOW},
    "verl grpo": {IDENTICAL, OFFSET, "exact"},
    "verl rloo": {IDENTICAL, OFFSET, "exact"},
}
