"""The errors of calls that people write: the argument, what was expected, what came, and the fix."""

import functools
import math
import types

import numpy
import pytest
import torch
from valid_calls import calls

import hpo_core as hpo
from hpo_core import gates
from hpo_core.integrations.turns import Step, steps_of_turns, turns


def short(message):
    return message.count("\n") < 3 and len(message) < 500 and " at 0x" not in message


def _valid_but(name, **wrong):
    call = next(call for call in calls() if call.name == name)
    return call.run(call.arguments | wrong)


def _loss(**keywords):
    return hpo.policy_loss(TOKENS, TOKENS, ROWS, BATCH, **keywords)


IDENTITY, BATCH = gates.Identity(), hpo.PackedBatch.from_lengths([3, 2])
TOKENS, ROWS = torch.zeros(5), torch.ones(2)
GROUPED = hpo.PackedBatch.from_lengths([3, 2], group_ids=torch.tensor([0, 0]))
HUGE = 10**400  # beyond all floats
LEVELS = _loss(gate=gates.gspo(), report=("levels",)).levels
CALLED = {
    "gate": (gates.gspo, {}),
    "kl": (hpo.kl.k3, {"ref_logp": TOKENS}),
    "window": (hpo.entropy.ares, {"entropy": TOKENS}),
}
ERRORS = [
    *(
        (lambda name=name, made=made, rest=rest: _loss(**{name: made}, **rest), f"{name}: .*; call it: {made.__name__}")
        for name, (made, rest) in CALLED.items()
    ),
    (lambda: gates.tis(gate=gates.gspo), r"gate: expected a RatioGate, got the function gspo; call it: gspo\(\)"),
    *(
        (
            lambda gate=gate: _loss(gate=gate),
            f"rollout_logp: the gate '{gate.name}' corrects .*, and got none; pass the",
        )
        for gate in (gates.tis(), gates.mis(), gates.icepop(), gates.decoupled(), gates.hispo())
    ),
    (lambda: _loss(gate="gspo"), r"gate: expected a RatioGate such as gates.dapo\(\), got 'gspo'"),
    (lambda: _loss(gate=torch.zeros(99)), r"gate: expected a RatioGate .*, got a tensor \[99\] of float32"),
    (lambda: hpo.hierarchical_policy_loss(TOKENS, None, ROWS, BATCH, advantage="grpo"), "advantage: .*, got 'grpo'"),
    (lambda: hpo.entropy.forking_tokens("20%"), "share: expected a number.*, got '20%'; write 0.2"),
    (lambda: hpo.entropy.ares(4, "0,95"), "quantile: expected a number.*, got '0,95'; write 0.95"),
    (lambda: hpo.entropy.forking_tokens(20), r"share: expected a fraction in \[0, 1\], got 20"),
    (lambda: _loss(backend=["cpu"]), r"backend: expected one of reference, .*, got \['cpu'\]; pass one name"),
    (lambda: hpo.advantages.grpo(ROWS, None, backend=["cpu"]), r"backend: .*, got \['cpu'\]; pass one name"),
    (lambda: hpo.kl.k3(0.1, gradient=["value"]), r"gradient: expected one of value, .*, got \['value'\]"),
    (lambda: hpo.entropy.ares().fit(TOKENS.long(), BATCH), r"entropy: expected .*, got int64; are these ids of"),
    (
        lambda: hpo.entropy.siren(TOKENS, BATCH, TOKENS == 0, ROWS[0].to("meta")),
        r"anchor: expected device cpu \(that of the batch\), got meta; use batch\.to\('meta'\)",
    ),
    (lambda: _loss().metrics + 1, r"unsupported operand type\(s\) for \+: 'Metrics' and 'int'"),
    (lambda: LEVELS + 1, r"unsupported operand type\(s\) for \+: 'LevelMetrics' and 'int'"),
    (lambda: LEVELS.all_reduce("x"), "group: expected a torch.distributed.ProcessGroup"),
    (lambda: hpo.entropy.two_knot(ROWS, low=0.1), r"low: expected a pair \(knot, gain\), got 0\.1"),
    (lambda: hpo.entropy.d3s_schedule("0.2", (4, "0.1"), (8, "0.5")), "progress: expected a number, got '0.2'"),
    (lambda: hpo.entropy.d3s_schedule(0.2, 4, 8), r"first: expected a pair \(responses, share\), got 4"),
    (lambda: hpo.advantages.GroupHistory.start("3"), "prompts: expected an integer, got '3'"),
    (lambda: hpo.advantages.GroupHistory.start(-3), "prompts: expected a count >= 0, got -3"),
    (lambda: hpo.entropy.AresPenalty.start(2.5), r"buckets: expected an integer, got 2\.5"),
    (
        lambda: BATCH.select(ROWS.numpy()),
        "rows: expected a tensor or a sequence of integers, .*; convert it with torch.as",
    ),
    (lambda: _loss(weights=hpo.aggregation.token_mean), r"weights: .*; call it: token_mean\(batch\)$"),
    (lambda: _loss(weights=ROWS.mean), r"weights: expected a tensor \[S\] \(one per row\), got the function mean$"),
    (lambda: _loss(weights="mean"), r"weights: expected a tensor \[S\] .*; the functions of hpo_core\.aggreg"),
    (lambda: _loss(kl=hpo.kl.k3, ref_logp=TOKENS), r"kl: expected a penalty .*; call it: k3\(beta\)$"),
    (lambda: hpo.kl.k3(-0.1), "beta: expected a number >= 0 that is finite in float32, got -0.1"),
    (
        lambda: hpo.hierarchical_policy_loss(TOKENS, None, ROWS, BATCH, advantage=ROWS),
        "advantage: .*; policy_loss takes",
    ),
    (lambda: hpo.advantages.grpo(ROWS[None], None), r"rewards: expected shape \[U\] .*; use rewards\.flatten\(\) if"),
    (lambda: hpo.aggregation.token_mean(next(BATCH.micro_batches(9))), r"batch: .*MicroBatch'>; pass its \.batch"),
    (lambda: hpo.token_logprobs(TOKENS[:, None], TOKENS.long(), BATCH), "temperature: .* a batch; pass batch="),
    (lambda: hpo.token_logprobs(TOKENS[:, None], TOKENS.long(), TOKENS == 0), "temperature: .* a batch; pass batch="),
    (lambda: _loss().metrics["clip_fraction"], r"metrics: no slot named 'clip_fraction'; compute\(\) has means; the"),
    (lambda: _loss(weights=types.SimpleNamespace(logits=ROWS)), r"weights: expected a tensor .*; pass its \.logits"),
    (lambda: _loss(weights=torch.nn.Linear(1, 1)), r"weights: expected a tensor .*Linear'>; pass its \.weight"),
    (lambda: BATCH.replace(group_ids=["a", "b"]), r"group_ids: .*'list'>; convert it with hpo_core\.segments\.ids_of"),
    (
        lambda: hpo.policy_loss(TOKENS, None, ROWS, next(BATCH.micro_batches(9))),
        r"batch: expected a PackedBatch or a mask .*MicroBatch'>; pass its \.batch",
    ),
    (lambda: _loss(token_mask=TOKENS.long()), r"token_mask: expected dtype bool, got int64; use token_mask\.bool\(\)"),
    (lambda: _loss(token_weight=TOKENS > 0), r"token_weight: .*, got bool; use token_weight\.float\(\)"),
    (
        lambda: hpo.token_logprobs(TOKENS.long(), torch.zeros(5, 7)),
        "logits: expected dtype float32 .*, got int64; are logits and targets exchanged",
    ),
    (lambda: gates.compose(gates.gspo(), gates.tis()), r"corrections: .*; pass those of another gate as \*gate\.corr"),
    *(
        (
            lambda call=call: call(eps_low=0.8, eps_high=1.2),
            "eps_low, eps_high: .*, which look like ratios; pass 0.2 and",
        )
        for call in (
            functools.partial(hpo.entropy.hapo, TOKENS, BATCH),
            functools.partial(hpo.entropy.erc, TOKENS, TOKENS, BATCH),
            functools.partial(gates.fipo_weight, TOKENS, TOKENS, ROWS, BATCH),
        )
    ),
    (lambda: hpo.advantages.grpo(ROWS, None, eps_mode=["add"]), r"eps_mode: expected one of add, .*, got \['add'\]"),
    (lambda: next(BATCH.micro_batches(4, ["row"])), r"whole: expected one of trajectory, .*, got \['row'\]"),
    (lambda: _loss(weights=ROWS.to_sparse()), r"weights: expected a dense tensor, .*; use weights\.to_dense"),
    (
        lambda: hpo.PackedBatch.from_lengths([1] * 500, group_ids=torch.zeros(3, dtype=torch.long)),
        r"^group_ids: expected shape .* = \[500\], got \[3\]",
    ),
    (lambda: hpo.PackedBatch.from_lengths([2**62] * 500), r"^from_lengths\(lengths=\[(\d+, )+\d* \.\.\.\): cu_seq"),
    (lambda: BATCH.micro_batches("4"), "max_tokens: expected an integer, got '4'"),
    (lambda: gates.Clip(("a", "b")), r"clip: low: expected numbers, got \('a', 'b'\)"),
    (lambda: gates.Clip(0.8), r"clip: low: expected a pair \(advantage >= 0, advantage < 0\) of numbers, got 0\.8"),
    (lambda: gates.Tanh((0.1, 0.2)), r"bound: expected a number, got \(0\.1, 0\.2\); pass one number"),
    (lambda: gates.Excess((0.1, 0.2)), r"budget: expected a number, got \(0\.1, 0\.2\); pass one number"),
    (lambda: gates.Rollback((0.1, 0.1), (1, 2)), r"slope: expected a number, got \(1, 2\); pass one number"),
    (lambda: gates.RatioGate("mine", gates.Tanh(0.2)), r"token: .*; put it on Level\(Tanh\(0\.2\), unit=Unit\.STEP\)$"),
    (
        lambda: hpo.aggregation.token_mean(BATCH, selected=hpo.entropy.Selection(TOKENS > 0)),
        r"selected: .*; its mask is \.as_mask\(\)\.mask",
    ),
    (lambda: hpo.entropy.EntropyWindow("mine", "0.8"), r"quantile: expected .* Fraction\('0\.8'\), got '0\.8'"),
    (lambda: gates.RatioGate(["mine"], IDENTITY), r"name: expected a string, got \['mine'\]"),
    (lambda: gates.RatioGate("mine", gates.Clip), r"token: expected Identity\(\), Drop\(\), .*, got <class"),
    (lambda: gates.RatioGate("mine", IDENTITY, [gates.Level(IDENTITY)]), r"levels: .*, got \[Level\(Identity\(\)\)\]"),
    (lambda: gates.Level(0.2), r"gate: expected Identity\(\), .*, got 0\.2"),
    (lambda: gates.RatioGate("mine", IDENTITY, advantage_weights=1.0), r"advantage_weights: expected a pair .*, got 1"),
    (lambda: gates.RatioGate("mine", IDENTITY, head_numbers=0.2), r"head_numbers: expected a pair .*, got 0\.2"),
    (lambda: hpo.entropy.cover(TOKENS > 0, BATCH, (0, 3)), "window: expected a Window, got <class 'tuple'>"),
    (lambda: hpo.advantages.a_star(ROWS, None, beta=0), "beta: expected a finite number above 0, got 0"),
    (lambda: hpo.advantages.a_star(ROWS, None, beta=math.inf), "beta: expected a finite number above 0, got inf"),
    (lambda: hpo.advantages.iw_opd(TOKENS, TOKENS, BATCH, gamma=math.inf), "gamma: expected a finite number >= 0"),
    (lambda: hpo.advantages.iw_opd(TOKENS.long(), TOKENS, BATCH), "teacher_logp: expected dtype .*, got int64"),
    (lambda: hpo.advantages.iw_opd(TOKENS, TOKENS.long(), BATCH), "old_logp: expected dtype .*, got int64"),
    (
        lambda: hpo.advantages.asymre(ROWS, None, shift=math.inf),
        "shift: expected a finite number that float32 holds, got",
    ),
    (lambda: hpo.advantages.asymre(ROWS, None, shift=1e39), r"shift: expected a finite .* float32 holds, got 1e\+39"),
    (lambda: hpo.advantages.iw_opd(TOKENS, TOKENS, BATCH, gamma=-1), "gamma: expected a finite number >= 0, got -1"),
    (lambda: hpo.advantages.maxrl(ROWS, None, least_mean=-1), "least_mean: expected a finite number >= 0 .*, got -1"),
    (lambda: hpo.advantages.reinforce_pp(TOKENS, BATCH, gamma=1.5), r"gamma: expected a number in \[0, 1\], got 1\.5"),
    (
        lambda: hpo.entropy.ares_penalty(hpo.entropy.AresPenalty.start(2), ROWS, period=0),
        "period: expected a number of calls >= 1, got 0",
    ),
    (lambda: hpo.entropy.epo_phase(1, math.inf), "steps: expected a finite number >= 2, got inf"),
    (
        lambda: gates.RatioGate("mine", IDENTITY, split="no"),
        "split: expected True or False, got 'no'; write it without quotes",
    ),
    (
        lambda: gates.Correction(gates.Action.MASK, strict=1),
        r"strict: expected True or False, got 1; use bool\(strict\)",
    ),
    # Numbers that would be right in these dtypes: codes of a quantised weight would be, too.
    (
        lambda: hpo.linear_token_logprobs(torch.zeros(2, 3), torch.ones(4, 3, dtype=torch.int8), torch.zeros(2).long()),
        "weight: expected dtype .*, got int8; dequantise a quantised weight first",
    ),
    (lambda: hpo.entropy.opened(TOKENS, BATCH, 2), r"mask: expected dtype bool, got float32; use mask\.bool\(\)"),
    (
        lambda: _valid_but("torch.ops.hpo_core.correction", bounds=[0.0, 1.0]),
        "bounds: expected low and high of both signs, got 2 numbers",
    ),
    (lambda: gates.opmd(math.inf), "tau: expected a finite number >= 0, got inf"),
    (
        lambda: gates.RatioGate("mine", IDENTITY, penalty_coefficient=0.1),
        "penalty_coefficient: without a penalty it does nothing, got 0.1",
    ),
    (lambda: gates.RatioGate("mine", IDENTITY, needs=(("target",),)), "needs: expected pairs of a field of GateInputs"),
    (lambda: gates.RatioGate("mine", IDENTITY, needs=((),)), "needs: expected pairs of a field of GateInputs"),
    (lambda: gates.RatioGate("mine", IDENTITY, needs=(("bounds", "f"),)), "needs: the token gate has no bounds"),
    (lambda: hpo.segments.ids_of([True]), "names: expected strings, bytes or integers, got True"),
    *(
        (lambda at=at: hpo.PackedBatch.from_lengths([4], 8, steps=torch.tensor([[0, 4], [at, at]])), "steps: expected")
        for at in (6, 9)
    ),
    (lambda: gates.tis(0), "ratio_cap: expected an absolute ratio >= 1 or None, got 0"),
    (lambda: gates.dapo(eps_high=HUGE), "eps_high: expected a number that a float holds, got one beyond"),
    (lambda: gates.vespo(k=(1.0, HUGE)), r"k\[1\]: expected a number that a float holds"),
    (lambda: gates.Clip(high=(HUGE, 1.0)), "clip: high: expected a number that a float holds"),
    (lambda: hpo.kl.k3(HUGE), "beta: expected a number that a float holds"),
    (lambda: hpo.aggregation.token_mean(BATCH, total=HUGE), "total: expected a number that a float holds"),
    (lambda: hpo.token_logprobs(TOKENS[:, None], TOKENS.long(), HUGE), "temperature: expected a number that a float"),
    (lambda: hpo.advantages.gdpo(ROWS[None], None, [HUGE]), "weights: expected a number that a float holds"),
    (
        lambda: _loss(
            window=hpo.entropy.ares(), entropy=TOKENS, threshold=hpo.entropy.forking_tokens().fit(TOKENS, BATCH)
        ),
        r"threshold: expected the quantile 19/20 of windows .* of 'ares', got the quantile 4/5 of windows 0 to 0 .*",
    ),
    (
        lambda: hpo.aggregation.token_mean([3, 2]),
        "batch: expected a PackedBatch or a mask .*; PackedBatch.from_lengths",
    ),
    (
        lambda: hpo.aggregation.token_mean(BATCH, process_group=types.SimpleNamespace(get_group=None)),
        r"process_group: expected a torch\.distributed\.ProcessGroup .*; pass its \.get_group\(\)",
    ),
    (
        lambda: hpo.PackedBatch.from_lengths(torch.tensor([3, 1], dtype=torch.uint8)),
        r"lengths: .* got uint8; use lengths\.to\(torch\.int64\)",
    ),
    (lambda: gates.tis(gate="dapo"), "gate: expected a RatioGate, got .*; the functions of hpo_core.gates make one"),
    (
        lambda: _loss(weights=0.1),
        r"weights: expected a tensor .*; make one of that shape, such as torch.full\(\(n,\), 0.1",
    ),
    (lambda: hpo.advantages.grpo(ROWS, GROUPED), "group_ids: expected a tensor, got .*; pass its .group_ids"),
    (lambda: hpo.segments.statistics(ROWS, GROUPED), "ids: expected a tensor, got .*; pass its .group_ids"),
    (lambda: hpo.segments.statistics(ROWS, BATCH), "ids: expected a tensor, got .*; it has no group_ids"),
    (lambda: hpo.policy_loss(BATCH, TOKENS, TOKENS, ROWS), r"logp: .*PackedBatch'>; a batch goes to batch=, if the "),
    (
        lambda: hpo.entropy.skywork_coefficient(0.0, TOKENS[0]),
        r"coefficient: expected a tensor, got .*, or torch\.tensor\(0\.0\) if it is 0-dim",
    ),
    (
        lambda: hpo.entropy.skywork_coefficient(hpo.entropy.skywork_coefficient(TOKENS[0], TOKENS[0]), TOKENS[0]),
        r"coefficient: .*ControlledCoefficient'>; pass one of its fields, such as \.state",
    ),
    (lambda: BATCH.select(slice(0, 2)), "rows: expected a tensor or a sequence of integers, .*; pass a range"),
    (lambda: hpo.PackedBatch(TOKENS[None] == 0), r"cu_seqlens: .*, got bool; a mask \[B, L\] goes to PackedBatch\.f"),
    (
        lambda: hpo.segments.ids_of(TOKENS.short()),
        "names: expected several names, got tensor.*; pass the tensor itself",
    ),
    (lambda: hpo.advantages.grpo(ROWS, ROWS.short()), r"group_ids: .*, got int16; use group_ids\.to\(torch\.int64\)"),
    (lambda: gates.Rollback(0.05), r"budgets: expected a pair of numbers \(log-ratio >= 0, log-ratio < 0; the first w"),
    (
        lambda: hpo.policy_loss(TOKENS, TOKENS, ROWS, numpy.ones((2, 3))),
        r"batch: expected .*; use torch.as_tensor\(mask",
    ),
    (
        lambda: hpo.value_loss(TOKENS, TOKENS, BATCH, clip=0.1),
        "old_values, clip: .* got clip alone; pass the other, or",
    ),
    (lambda: _loss(kl=hpo.kl.k3(0.1)), "kl: expected ref_logp beside it, got none; pass ref_logp=, or drop kl"),
    (lambda: _loss(ref_logp=TOKENS), "ref_logp: expected a penalty beside it, got none; pass kl=, such as"),
    (
        lambda: hpo.policy_loss(*[TOKENS.to("meta")] * 2, ROWS.to("meta"), BATCH),
        r"logp: expected device cpu \(that of the batch\), got meta; use batch.to\('meta'\)",
    ),
    (lambda: hpo.entropy.forking_tokens("1/0"), "share: expected a number, a Fraction"),
    (lambda: hpo.entropy.edge_grpo(ROWS, TOKENS, BATCH, most=math.nan), "most: expected a number, got nan"),
    (
        lambda: hpo.entropy.hapo_redistribution(*[TOKENS] * 3, BATCH, eps=(math.nan, 0.2)),
        r"eps\[0\]: expected a number",
    ),
    (lambda: hpo.advantages.bnpo(ROWS, None, most=-1.0), "most: expected a number > 0, got -1.0"),
    (
        lambda: hpo.advantages.lite_ppo(ROWS, None, about_groups=True, singleton="raw"),
        "singleton: expected 'zero' with",
    ),
    (lambda: hpo.advantages.negative_sample(ROWS > 0, positive_weight=math.inf), "positive_weight: expected a finite"),
    (
        lambda: hpo.advantages.reconstructed.a2fm_apo(ROWS, ROWS > 0, None, alpha=-1.0),
        "alpha: expected a number > 0, got -1.0",
    ),
    (lambda: hpo.advantages.reconstructed.ib_tpo(*[ROWS] * 6, beta=0.0), "beta: expected a number > 0, got 0.0"),
    (
        lambda: hpo.advantages.reconstructed.dynamic_contrastive(ROWS, None, ROWS, best=-1, worst=1),
        "best, worst: expected counts >= 0, got -1 and 1",
    ),
    (lambda: hpo.advantages.iw_opd(TOKENS.half(), TOKENS, BATCH), "teacher_logp: expected dtype float32 .*too coarse"),
    (
        lambda: hpo.entropy.target_temperature(torch.tensor(0.1), low=2.0),
        "low, high: expected low <= high, got 2.0 and",
    ),
    (lambda: hpo.segments.recurrence(TOKENS, TOKENS, torch.tensor([0, 9])), "cu_seqlens: expected a last offset <= 5"),
    (
        lambda: hpo.segments.recurrence(TOKENS, TOKENS, torch.tensor([0, 3, 1])),
        "cu_seqlens: expected offsets that never",
    ),
    (lambda: hpo.segments.recurrence(TOKENS, TOKENS, torch.tensor([1, 5])), "cu_seqlens: expected a first offset of 0"),
    (
        lambda: hpo.segments.chains(ROWS.long(), torch.tensor([math.nan, 1.0])),
        "positions: expected numbers, got nan for a unit with an id >= 0",
    ),
    # Numbers and terms that torch would refuse without the argument's name, and None.
    (lambda: hpo.PackedBatch(torch.tensor([0, -1])), "cu_seqlens: expected a last offset >= 0, got -1"),
    (
        lambda: hpo.PackedBatch.from_lengths([2**63]),
        r"lengths: expected a list of integers that 64 bits hold, got \[92",
    ),
    (
        lambda: hpo.PackedBatch.from_lengths([[1, 2], [3]]),
        r"lengths: expected a list of integers .*, got \[\[1, 2\], \[",
    ),
    (lambda: BATCH.select([2**63]), r"rows: expected a list of integers that 64 bits hold, got \[92"),
    (
        lambda: hpo.advantages.combine(hpo.advantages.Term(ROWS, ROWS.long())),
        r"terms: expected a sequence of Term, got one; pass it in a list, \[Term\(\.\.\.\)\]",
    ),
    *(
        (call, rf"{name}: .*NoneType'>; pass torch\.zeros\(n, dtype=torch\.int64\) if all units have one id")
        for call, name in (
            (lambda: hpo.advantages.gigpo(ROWS, None, ROWS.long(), ROWS.long()), "group_ids"),
            (lambda: hpo.advantages.rose(ROWS, [None]), r"prefix_ids\[0\]"),
            (lambda: hpo.segments.dense_ids(ROWS.long(), None), r"keys\[1\]"),
        )
    ),
    (lambda: hpo.advantages.grpo(None, None), "rewards: expected a tensor, got <class 'NoneType'>$"),
    # The fault of a part of the result, behind the arguments of which it was made.
    (lambda: gates.sapo(0), r"sapo\(positive=0\): head_numbers: expected at least"),
    (lambda: gates.dro(beta=-1), r"dro\(beta=-1\): head_numbers, penalty_coefficient: expected numbers >= 0"),
    (lambda: gates.icepop(5.0, 0.5), r"ratio_low, ratio_high: expected ratio_low <= 1 <= ratio_high, got 5\.0, 0\.5"),
    (lambda: gates.icepop(0.2, 0.28), r"ratio_low, ratio_high: expected ratio_low <= 1 <= ratio_high, got 0\.2, 0\.28"),
    (lambda: gates.icepop(1.05, 5.0), r"ratio_low, ratio_high: expected ratio_low <= 1 <= ratio_high, got 1\.05, 5\.0"),
    (lambda: gates.mis(ratio_low=-1.0), r"ratio_low: expected an absolute ratio >= 0, got -1\.0"),
    (lambda: gates.mis(ratio_veto=-1.0), r"ratio_veto: expected an absolute ratio >= 0, got -1\.0"),
    (lambda: _loss(process_group=1), "process_group: expected a torch.distributed.ProcessGroup"),
    (lambda: gates.dcpo_clip(0.5), r"dcpo_clip\(ratio_cap=0\.5\): ratio_dual: expected a ratio c > 1"),
    (lambda: gates.fiberpo(log_budgets=(-1, 1)), r"fiberpo\(log_budgets=\(-1, 1\)\): budgets: expected log-ratios"),
    (
        lambda: hpo.advantages.stratified(ROWS, ROWS.long(), ROWS.long(), alpha=math.inf),
        "alpha: expected a finite number that float32 holds, got inf",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_the_error_names_argument_expectation_value_and_fix(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}") as caught:
        call()
    assert short(str(caught.value))


A, B = Step("a"), Step("b", 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[A, B]], "steps: expected one list for each of 2 completions, got 1"),
        ([[A], [A]], r"steps\[0\]: expected 2 steps, got 1; a turn is a run of tokens that no tool wrote"),
        ([A, B], r"steps\[0\]: expected a list of Step, one for each turn, got Step\("),
        (["ab", "c"], r"steps\[0\]: expected a list of Step, one for each turn, got 'ab'"),
        ([[A, ("b", 0.5)], [A]], r"steps\[0\]\[1\]: expected Step\(observation, reward\) .*, got \('b', 0\.5\)"),
        (
            [[A, B], [Step(1.5)]],
            r"steps\[1\]\[0\]: expected Step\(observation, reward\) .*, got Step\(observation=1\.5",
        ),
        ([[A, Step("b", "0.5")], [A]], r"steps\[0\]\[1\]: expected Step\(observation, reward\) .*, got Step\("),
        (None, "steps: expected a list of Step for each completion, got <class 'NoneType'>"),
    ],
)
def test_wrong_steps_of_turns_are_named(given, message):
    mask = torch.tensor([[True, False, True], [True, True, False]])
    batch = hpo.PackedBatch.from_padded(mask, steps=turns(mask))
    with pytest.raises((TypeError, ValueError), match=f"^{message}") as caught:
        steps_of_turns(batch, given, torch.zeros(2))
    assert short(str(caught.value))
    rewards, _ = steps_of_turns(batch, [[A, B], (A,)], torch.tensor([1.0, 0.0]))
    assert rewards.tolist() == [0.0, 1.5, 0.0]
