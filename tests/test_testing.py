"""check() on right and wrong kernels, on the losses of verl and TRL, and the stopwatch beside it."""

import collections
import dataclasses
import functools
import inspect
import types
from fractions import Fraction

import pytest
import torch
from catalogue import CATALOGUE
from kernels_to_check import at_tokens, biased_std, eager_ppo, k3, masked_read, padded_ppo, rows_and_mask

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.reference.entropy import order_statistic
from hpo_core.specs import OrderRule

EXAMPLES = 30


def test_a_correct_kernel_keeps_every_supported_promise():
    report = testing.check(eager_ppo, examples=EXAMPLES)
    scores = "ties: a score equal to the threshold is selected (unless strict)"  # the kernel takes no window
    report.raise_for_broken()
    assert report.kept == tuple(name for name in testing.promises() if name != scores)
    assert 0 < report.worst <= 1
    head = f"policy_loss: of 14 promises 13 kept, 0 broken, 1 not supported; {EXAMPLES} examples each"
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
    of_penalties = ("exact", "deterministic", "strides are honoured", INCOMING, UNWRITTEN)
    assert square.kept == testing.promises("kl") == of_penalties
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
    assert report.ok and [each.detail for each in report.verdicts].count("the estimator gives NaN") == 4


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
        assert written.detail == f"the kernel wrote to the argument {name}"
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
    for name in ("only", "features"):
        with pytest.raises(TypeError, match=rf"^{name}: expected a tuple of names, got 'kl'; pass \('kl',\)"):
            testing.check(hpo.policy_loss, **{name: "kl"})
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
    for wrong in ({"features": ["windows"]}, {"device": "gpu"}, {"examples": 0}, {"examples": True}, {"seed": "x"}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: expected "):
            testing.check(hpo.policy_loss, **wrong)


@pytest.mark.parametrize("features", [[], ["weights"], ["window"]])
def test_promises_about_features_that_are_left_out_are_not_judged(features):
    only = [name for name in testing.promises() if name.startswith(("ties: a score", "batch-inv", "micro-batch-inv"))]
    report = testing.check(hpo.policy_loss, examples=3, features=features, only=only, backend="reference")
    needs = ("window", "weights", "weights")
    assert [verdict.kept for verdict in report.verdicts] == [True if need in features else None for need in needs]


# Gates of steps, groups and domains, with a target, and of the sampler.
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


BUDGET = gates.RatioGate("tanh_budget", gates.LogClip((-0.2, -0.2), (0.2, 0.2)), (gates.Level(gates.Tanh(0.1)),))
BOUNDED = gates.Clip((0.8, 0.8), (1.2, 1.2))
OWN = {
    "docs/own_gate.md": BUDGET,
    "two levels": dataclasses.replace(
        BUDGET, levels=(*BUDGET.levels, gates.Level(gates.Tanh(0.1), unit=gates.Unit.GROUP))
    ),
    "clip, target": gates.RatioGate("own", BOUNDED, head=gates.Head.TARGET),
    "tanh, target": gates.RatioGate("own", gates.Drop(), (gates.Level(gates.Tanh(0.1)),), gates.Head.TARGET),
    "mirror": gates.RatioGate("own", BOUNDED, head=gates.Head.MIRROR, head_numbers=(1.0, 1.0)),
}


@pytest.mark.parametrize("gate", OWN.values(), ids=OWN)
def test_our_own_loss_keeps_its_promises_under_a_gate_of_the_user(gate):
    """Terms may cancel in the gradient of a segment, in a pull and in a slope of 1 - tanh^2."""
    for seed in (0, 1):
        testing.check(hpo.policy_loss, gate=gate, examples=60, seed=seed, backend="cpu").raise_for_broken()


@pytest.mark.parametrize("gate", [BUDGET, OWN["mirror"]], ids=lambda gate: gate.name)
def test_a_kernel_off_by_a_millionth_under_a_gate_of_the_user_is_found(gate):
    def off(*given, **named):
        out = hpo.policy_loss_and_grad(*given, **named)
        return out._replace(grad=out.grad * (1 + 1e-6 * (out.grad > 0)))

    off = functools.wraps(hpo.policy_loss_and_grad)(off)
    assert testing.check(off, gate=gate, examples=60, only=["exact"]).broken == ("exact",)


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


def trl_policy_loss(level="token"):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    accelerator = types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)

    def fn(logp, old_logp, advantages, batch):
        current, old, _advantage, mask = padded_arguments(logp, old_logp, advantages, batch)
        if current.numel() == 0:
            return logp[:0].sum()
        itself = types.SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *a, **k: (current, torch.zeros_like(current), None),
            loss_type="bnpo", importance_sampling_level=level, epsilon_low=0.2, epsilon_high=0.2, beta=0.0,
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False,
            _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1, accelerator=accelerator,
            max_completion_length=current.shape[1], model=types.SimpleNamespace(training=True),
            args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False),
            _metrics={"train": collections.defaultdict(list)},
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
IDENTICAL, UNSCORED = "identical rewards get exactly 0", "a reward that is not finite is in no statistic"
MICRO = "micro-batch-invariant: parts add up to the whole"
INCOMING = "the incoming gradient scales the outgoing one"
UNWRITTEN = "inputs and earlier results are not written"
PEERS = {
    "verl vanilla": lambda: (verl_policy_loss("vanilla"), "policy_loss", gates.ppo_clip(0.2, 0.2, ratio_dual=3.0)),
    "verl gspo": lambda: (
        verl_policy_loss("gspo", clip_ratio_low=0.2, clip_ratio_high=0.2), "policy_loss", gates.gspo_token(0.2, 0.2),
    ),
    "TRL bnpo": lambda: (trl_policy_loss(), "policy_loss", gates.ppo_clip(0.2, 0.2)),
    "TRL bnpo, sequence": lambda: (trl_policy_loss("sequence"), "policy_loss", gates.gspo(0.2, 0.2)),
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
    "verl grpo": {IDENTICAL, OFFSET, UNSCORED, "exact"},
    "verl rloo": {IDENTICAL, OFFSET, UNSCORED, "exact"},
}
