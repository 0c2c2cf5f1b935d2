"""Every preset against its paper's formula on every backend, loss and gradient; worked numbers."""

import functools
import math
from fractions import Fraction
from types import SimpleNamespace

import paper_formulas as paper
import pytest
import torch
from breadth import at_length, number  # noqa: F401 (the first is a fixture)
from catalogue import FAMILIES, PRESETS, Example, judging

import hpo_core as hpo
from hpo_core import entropy, gates, kl, specs, testing
from hpo_core.gates import Action, Aggregate, Channel, Correction, Reduction, Unit
from hpo_core.testing.budget import Expected, assert_within_budget

LENGTHS = (5, 0, 9, 1, 16, 33, 3)


def sequences(seed):
    """Rows that are their own trajectories; of every other batch one row is masked."""
    example = Example(seed, LENGTHS, spread=0.15, several=False)
    example.mask[5:14] = seed % 2 == 0
    return example


FUTURE = {"half_life": 3.0, "eps_low": 0.1, "eps_high": 0.15, "ratio_dual": 1.25, "ratio_unsafe": 1.15}


def influences(example):
    """FIPO's weights of all tokens by its formula, 1 at tokens that are in no sequence; 0 where the row is dropped."""
    weight, begin = torch.ones(example.logp.shape, dtype=torch.float64), 0
    for row, length in enumerate(example.lengths.tolist()):
        here = torch.arange(begin, begin + length)[example.mask[begin : begin + length]]
        begin += length
        pair, A = (each.double()[here] for each in (example.logp, example.old_logp)), example.advantages[row]
        s = SimpleNamespace(here=here, A=A.expand(here.numel()), **dict(zip(("l", "old"), pair, strict=True)))
        weight[here] = paper.influence(s)
    return weight


def inputs(example, given):
    """The inputs of a preset."""
    ring = ((0.08, 0.1), (0.13, 0.16))
    of_ring = (example.logp, example.old_logp, example.advantages, example.batch, *ring)
    return {
        "": dict,
        "bounds": lambda: {"bounds": (example.low, example.high)},
        "token_mask": lambda: {"token_mask": example.token_mask},
        "penalty_mask": lambda: {"penalty_mask": example.penalty_mask},
        "target": lambda: {"target": example.target},
        "future": lambda: {"token_weight": influences(example)},
        "roll": lambda: {"rollout_logp": example.rollout_logp},
        "pairs": dict,
        "ring": lambda: {"token_mask": gates.rec_ring_mask(*of_ring).token_mask},
        "chord_weight": lambda: {"token_weight": gates.chord_weight(example.logp.double())},
    }[given]()  # fmt: skip


def by_formula(example, objective, given, dtype=torch.float64):
    """Loss, gradient and the sum of absolute terms from the paper's formula, sequence by sequence."""
    logp = example.logp.to(dtype).requires_grad_()
    sequences, begin = [], 0
    for row, length in enumerate(example.lengths.tolist()):
        here = torch.arange(begin, begin + length)[example.mask[begin : begin + length]]
        begin += length
        s = SimpleNamespace(
            here=here,
            l=logp[here],
            old=example.old_logp.to(dtype)[here],
            roll=example.rollout_logp.to(dtype)[here],
            A=example.advantages.to(dtype)[row].expand(here.numel()),
            low=example.low.to(dtype)[here],
            high=example.high.to(dtype)[here],
            target=example.target.to(dtype)[row],
            pays=example.penalty_mask[here],
            other=None,
        )
        sequences.append(s)
    for first, second in zip(sequences[::2], sequences[1::2], strict=False):
        first.other, second.other = second, first
    loss, size = logp.sum() * 0, 0.0
    for row, s in enumerate(sequences):
        if s.here.numel() == 0:
            continue
        term = objective(s)
        if given == "token_mask":
            term = torch.where(example.token_mask[s.here], term, torch.zeros_like(term))
        loss = loss - example.weights.to(dtype)[row] * term.sum()
        size += example.weights.to(dtype)[row] * term.detach().abs().sum()
    (grad,) = torch.autograd.grad(loss, logp)
    return loss.detach(), grad, size


@pytest.mark.parametrize("name", FAMILIES["preset"])
def test_a_gate_is_shown_on_one_line_that_makes_it_again(name):
    gate = FAMILIES["preset"][name]
    shown = repr(gate)
    assert "\n" not in shown and "source" not in shown and shown.startswith(f"RatioGate({gate.name!r}, ")
    names = {"inf": math.inf, **vars(gates), **vars(specs)}
    assert eval(shown, names) == gate and hash(eval(shown, names)) == hash(gate)


@pytest.mark.parametrize(
    "value", [kl.k3(0.1, gradient="importance"), entropy.ares(), entropy.forking_tokens("0.1")], ids=repr
)
def test_penalties_and_windows_are_shown_like_gates(value):
    names = {"Fraction": Fraction, **vars(kl), **vars(entropy), **vars(specs)}
    assert eval(repr(value), names) == value and "\n" not in repr(value)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", PRESETS)
def test_every_backend_is_the_papers_formula(name, native_backends):
    gate, objective, given = PRESETS[name]
    for seed in range(6):
        example = sequences(seed)
        keywords, (loss, grad, size) = inputs(example, given), by_formula(example, objective, given)
        out = example.run(gate, "reference", **keywords)
        torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out.grad, grad, rtol=1e-12, atol=1e-12)
        eager = by_formula(example, objective, given, torch.float32)
        expected = Expected(loss, eager[0].double(), size)
        expected_grad = Expected(grad, eager[1].double(), grad.abs().max().expand_as(grad))
        for backend in judging(f"preset: {name}", native_backends):
            if seed < number(backend, at_length=6, machine_code=6, emulated=3, interpreted=3):
                out = example.run(gate, backend, **keywords)
                assert_within_budget(f"loss of {name} on {backend}", out.loss, expected)
                assert_within_budget(f"gradient of {name} on {backend}", out.grad, expected_grad)


@pytest.mark.parametrize("name", ["ppo_clip", "triplet_clip", "ce_gppo", "aspo", "gspo", "rec"])
def test_an_infinite_epsilon_is_no_bound(name, native_backends):
    """The result is that of a bound which no ratio reaches."""
    none, far = (getattr(gates, name)(eps_high=eps_high) for eps_high in (math.inf, 1e30))
    example = sequences(0)
    expected = example.run(far, "reference")
    for backend in ("reference", *native_backends):
        out = example.run(none, backend)
        torch.testing.assert_close([out.loss, out.grad], [expected.loss, expected.grad], check_dtype=False, msg=backend)


# ------------------------------------------------------------------------------------------------------ worked numbers

SEVEN = {
    "x": [0.30, -0.10, 0.05, -0.40, 0.25, 0.02, -0.05],
    "old": [-0.9, -1.2, -0.3, -2.0, -0.7, -1.5, -0.1],
    "d": [0.02, -0.01, 0.00, 0.60, -0.03, 0.01, 0.02],
}
MEAN, SMTM, FIXED, SUM = [1 / 7, 1 / 7], [1 / 6, 1 / 8], [1 / 8, 1 / 8], [0.5, 0.5]
WORKED = {  # (gate, weights, loss, gradient), advantages 1 and -.5
    "dual": (gates.ppo_clip(ratio_dual=1.25), MEAN, -0.163628, (0, -0.129262, -0.150182, 0, 0, 0.072872, 0.067945)),
    "gmpo": (
        gates.gmpo(0.2, 0.2), SMTM, -0.274382, (0, -0.175212, -0.175212, 0, 0.062813, 0.062813, 0.062813)
    ),
    "sapo": (
        gates.sapo(), SMTM, -0.578792, (-0.218230, -0.150465, -0.175097, 0.040665, 0.078493, 0.063755, 0.059413)
    ),
    "spo": (
        gates.spo(), MEAN, -0.109669, (0.144492, -0.190767, -0.111682, -0.031045, 0.221965, 0.080232, 0.051376)
    ),
    "topr": (
        gates.topr(), SMTM, 0.124458, (-0.166667, -0.166667, -0.166667, 0.052204, 0.052204, 0.052204, 0.052204)
    ),
    "topr, mean": (
        gates.topr(Aggregate.MEAN), SMTM, 0.090654,
        (-0.166667, -0.166667, -0.166667, 0.059750, 0.059750, 0.059750, 0.059750),
    ),
    "luspo": (  # e^(1/12) and e^-.045 are within the clip; each token has its sequence's, undivided
        gates.luspo(0.05, 0.1), SUM, -0.674359,
        (-0.543452, -0.543452, -0.543452, 0.238999, 0.238999, 0.238999, 0.238999),
    ),
    "luspo, clipped": (gates.luspo(), SUM, -0.505750, (0, 0, 0, 0, 0, 0, 0)),
    "hispo": (gates.hispo(0.1, 0.3), FIXED, -0.403388, (0, -0.111979, -0.131409, 0, 0, 0, 0)),
    "hispo, wider": (
        gates.hispo(0.2, 0.3), FIXED, -0.200452, (0, -0.111979, -0.131409, 0, 0.077880, 0.064403, 0.060653)
    ),
    "hispo, beyond 1": (
        gates.hispo(0.2, 1.5), FIXED, -0.124114, (0, -0.111979, -0.131409, 0.076338, 0.077880, 0.064403, 0.060653)
    ),
    "opsm": (gates.opsm(0.05), SMTM, -0.272552, (0, -0.150806, -0.175212, 0, 0.080252, 0.063763, 0.059452)),
    "opsm, fires": (gates.opsm(-0.2), SMTM, -0.526018, (0, -0.150806, -0.175212, 0, 0, 0, 0)),
    "icepop": (
        gates.icepop(0.5, 1.5), MEAN, -0.221123, (0, -0.127976, -0.150182, 0, 0.089005, 0.073604, 0.069318)
    ),
    "reinforce, total ratio": (
        gates.compose(
            gates.reinforce(),
            Correction(
                Action.CLAMP, high=(math.log(2),) * 2, unit=Unit.TRAJECTORY, reduction=Reduction.SUM,
                channel=Channel.TOTAL,
            ),
        ),
        SUM, -0.310397, (-0.648465, -0.648465, -0.648465, 0.380490, 0.380490, 0.380490, 0.380490),
    ),
    "dppo_tv": (
        gates.dppo_tv(0.1, 0.1), MEAN, -0.068639, (0, -0.129262, -0.150182, 0.047880, 0.091716, 0.072872, 0.067945)
    ),
    "dppo_tv, symmetric": (
        gates.dppo_tv(0.02, 0.1415, symmetric=True), MEAN, -0.111577,
        (0, 0, -0.150182, 0, 0.091716, 0.072872, 0),
    ),
    "aspo": (gates.aspo(), MEAN, -0.123144, (0, -0.157882, -0.135890, 0, 0.091716, 0.072872, 0.067945)),
    "vespo": (
        gates.vespo(), MEAN, -0.043256, (-0.100461, -0.100461, -0.100461, 0.057868, 0.057868, 0.057868, 0.057868)
    ),
    "dro": (
        gates.dro(), MEAN, -0.010515, (-0.138571, -0.144286, -0.142143, 0.065714, 0.075000, 0.071714, 0.070714)
    ),
    "a_lol": (gates.a_lol(), SUM, 1.380327, (-0.642013, -0.642013, -0.642013, 0, 0, 0, 0)),
    "ppo_penalty": (
        gates.ppo_penalty(), MEAN, -0.189558,
        (-0.187839, -0.130622, -0.149449, 0.043170, 0.095774, 0.073160, 0.067248),
    ),
    "apc": (
        gates.reconstructed.apc(), SMTM, -0.278448, (0, -0.150806, 0.175212, 0.041895, 0.080252, 0, 0)
    ),
    "bpo": (
        gates.bpo(), MEAN, 0.155188, (0.192837, -0.129262, -0.150182, -0.047880, 0.091716, 0.072872, 0.067945)
    ),
    "gbpo": (
        gates.gbpo(), MEAN, 0.118247, (0.192837, -0.129262, -0.150182, -0.047880, 0.091716, 0.072872, 0.067945)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKED)
def test_worked_numbers(name):
    gate, weights, loss, grad = WORKED[name]
    x, old, d = (torch.tensor(values, dtype=torch.float64) for values in SEVEN.values())
    advantages = torch.tensor([1.0, -0.5], dtype=torch.float64)
    soft = 0.8 + 0.4 * torch.sigmoid(advantages)  # the target advantage is the advantage
    given = {"bpo": gates.bpo_target(advantages), "gbpo": gates.GateInputs(target=soft)}.get(name)
    out = hpo.policy_loss_and_grad(
        old + x, old, advantages, hpo.PackedBatch.from_lengths([3, 4]), gate, gate_inputs=given, backend="reference",
        rollout_logp=old - d if gate.reads_rollout else None, weights=torch.tensor(weights, dtype=torch.float64),
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(loss, abs=1.5e-6)
    assert out.grad.tolist() == pytest.approx(grad, abs=1.5e-6)


def test_the_decay_of_fipo_is_not_rounded():
    """In float32 that of a half-life of 100,000 tokens is off by 0.6 % over 200,000."""
    tokens, half_life = 200_000, 100_000.0
    old = torch.full((tokens,), -1.0)
    logp = old.clone()
    logp[-1] += 0.1
    found = gates.fipo_weight(logp, old, torch.ones(1), hpo.PackedBatch.from_lengths([tokens]), half_life=half_life)
    future = (logp[-1] - old[-1]).double() * 2.0 ** (-(tokens - 1) / half_life)
    assert found.token_weight[0].item() - 1 == pytest.approx(future.expm1().item(), rel=1e-5)


def test_the_weights_of_fipo_are_its_sums(backend):
    """Rows that the dual clip touches twice are left out; a step of tokens knows its own sign."""
    dropped = unsafe = 0
    for seed in range(12):
        example = sequences(seed)
        where = testing.device_of(backend)
        given = [each.to(where) for each in (example.logp, example.old_logp, example.advantages)]
        found = gates.fipo_weight(*given, example.batch.to(where), **FUTURE)
        of_tokens = gates.fipo_weight(
            *given[:2], given[2][example.row().to(where)], example.batch.to(where), **FUTURE, advantage_level="token"
        )
        weight, mask = found.token_weight.cpu(), found.token_mask.cpu()
        assert torch.equal(of_tokens.token_weight.cpu(), weight) and torch.equal(of_tokens.token_mask.cpu(), mask)
        expected, valid = influences(example), example.covered(gates.fipo())
        assert torch.equal(mask, valid & (expected > 0))
        torch.testing.assert_close(weight[mask].double(), expected[mask], rtol=2e-6, atol=0)
        x, sign = example.logp - example.old_logp, example.advantages[example.row()]
        dropped += (valid & ~mask).sum()
        unsafe += (mask & (sign < 0) & (x.exp() > 1.15) & (weight == 1)).sum()
    assert dropped > 0 and unsafe > 0


def test_fipo_by_hand(backend):
    """Half-life 1: each token hears half of what the next one heard, and its own log-ratio whole."""
    where = testing.device_of(backend)
    x = torch.tensor([0.2, -0.4, 5.0, 0.4, -0.1, math.nan, 0.08, 0.1, -math.inf], device=where)
    batch = hpo.PackedBatch(torch.tensor([0, 5, 8, 9]), total_tokens=9).to(where)
    run = functools.partial(
        gates.fipo_weight,
        x,
        torch.zeros_like(x),
        torch.tensor([1.0, 1.0, -1.0], device=where),
        batch,
        half_life=1.0,
        ratio_dual=9.0,
    )
    future = [0.2 - 0.2 + 0.35 / 8, -0.4 + 0.35 / 4, 0.35 / 2, 0.35, -0.1, 0.13 / 2, 0.13, 0.1, -20.0]
    plain = run(eps_low=1.0, eps_high=9.0)
    torch.testing.assert_close(plain.token_weight.cpu(), torch.tensor(future).exp(), rtol=2e-6, atol=0)
    clipped = [min(max(math.exp(each), 0.9), 1.25) for each in future]
    both = run(eps_low=0.1, eps_high=0.25).token_weight.cpu()
    torch.testing.assert_close(both, torch.tensor(clipped), rtol=2e-6, atol=0)
    assert run().token_weight.cpu()[[1, 3, 4, 8]].tolist() == pytest.approx([1, 1.2, 1, 1])
    assert plain.token_mask.all()
    x[[0, 2, 3]] = 3.0
    mistakes = torch.tensor([-1.0, 1.0, -1.0], device=where)
    counted = functools.partial(gates.fipo_weight, x, torch.zeros_like(x), mistakes, batch, ratio_dual=9.0)
    assert counted(most_dual=3).token_mask.all()
    assert counted().token_mask.tolist() == [False] * 5 + [True] * 4


def test_worked_numbers_of_nft():
    """The advantage is +-w, w = .5."""
    x, old, _ = (torch.tensor(values, dtype=torch.float64) for values in SEVEN.values())
    out = hpo.policy_loss_and_grad(
        old + x, old, torch.tensor([0.5, -0.5], dtype=torch.float64), hpo.PackedBatch.from_lengths([3, 4]),
        gates.nft(), gate_inputs=gates.GateInputs(target=torch.full((2,), 0.5, dtype=torch.float64)),
        backend="reference", weights=torch.ones(2, dtype=torch.float64),
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(-0.291278, abs=1e-6)
    wanted = (-0.5, -0.5, -0.5, 0.252061, 0.642013, 0.510101, 0.453497)
    assert out.grad.tolist() == pytest.approx(wanted, abs=1e-6)


def test_one_token_that_takes_the_whole_budget(backend):
    """Its own gradient is 0 to the bit, and the others make room for what they leave it."""
    x, old = torch.tensor([120.0, 0.1, -0.2, 0.0]), torch.tensor([-121.0, -1.0, -1.0, -1.0])
    run = functools.partial(
        hpo.policy_loss_and_grad, old + x, old, torch.tensor([2.0]), hpo.PackedBatch.from_lengths([4]),
        weights=torch.ones(1), backend=backend,
    )  # fmt: skip
    spent = math.exp(0.1) - 1 + 1 - math.exp(-0.2)
    left = 4 * 0.5 - spent
    out = run(gate=gates.reconstructed.apc(0.5))
    assert out.grad.tolist() == pytest.approx([0, 2 * math.exp(0.1), -2 * math.exp(-0.2), 0], rel=1e-6)
    assert out.grad[0] == out.grad[3] == 0
    assert out.loss.item() == pytest.approx(-2 * (4 + left), rel=1e-4)
    out = run(gate=gates.reconstructed.apc(spent / 4 - 0.01))  # they leave nothing
    assert not out.grad.any()
    assert out.loss.item() == -8


def test_within_its_budget_a_ratio_is_not_censored(backend):
    """Deviations up to 2048 are counted as they are."""
    example = sequences(1)
    example.logp[20] = example.old_logp[20] + 7.6
    assert example.mask[20]
    out = example.run(gates.reconstructed.apc(500.0), backend)
    plain = example.run(gates.RatioGate("unclipped", gates.Identity()), backend)
    assert torch.equal(out.grad, plain.grad)
    torch.testing.assert_close(out.loss, plain.loss)


# ---------------------------------------------------------------------------------------- more than one call, or a row


def test_p3o_from_rewards(backend):
    """The gradient of the paper: ``E[clip(W) (R_1 - R_2) / 2 grad log(pi(y_1) / pi(y_2))]`` over pairs."""
    example, rewards = sequences(1), torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 1.5])
    rows = slice(0, sum(LENGTHS[:6]))
    batch, _ = example.batch.select([0, 1, 2, 3, 4, 5])
    advantages = hpo.advantages.dr_grpo(rewards, batch.group_ids)
    weights = hpo.aggregation.seq_mean_token_sum(batch, total=3)
    logp, old_logp = example.logp[rows], example.old_logp[rows]
    out = hpo.policy_loss_and_grad(
        logp, old_logp, advantages, batch, gates.reconstructed.p3o(), weights=weights, backend=backend
    )
    leaf = logp.double().requires_grad_()
    valid = torch.where(example.mask[rows], 1.0, 0.0).double()
    of_row = torch.stack([part.sum() for part in (leaf * valid).split(LENGTHS[:6])])
    ratio = of_row - torch.stack([part.sum() for part in (old_logp * valid).split(LENGTHS[:6])])
    loss = torch.zeros((), dtype=torch.float64)
    for one, two in ((0, 1), (2, 3), (4, 5)):
        joint = torch.exp(ratio[one] + ratio[two]).detach().clamp(0.8, 1.2)
        loss = loss - joint * (rewards[one] - rewards[two]) / 2 * (of_row[one] - of_row[two]) / 3
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(out.grad.double(), grad, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(out.loss.double(), loss.detach(), rtol=1e-6, atol=1e-6)


def test_chord(backend):
    """``(1 - mu) L_GRPO + mu L_SFT`` in two calls, each with the mean over its own tokens."""
    example, mu = sequences(1), 0.3
    expert = torch.tensor([False, True, False, True, False, True, False])
    row = example.row()
    logp = example.logp.clone().requires_grad_()
    mean = functools.partial(hpo.aggregation.token_mean, example.batch)
    grpo = hpo.policy_loss(
        logp, example.old_logp, example.advantages, example.batch, backend=backend,
        weights=mean(selected=~expert[row]) * (1 - mu) * ~expert,
    )  # fmt: skip
    sft = hpo.policy_loss(
        logp, None, torch.ones(len(LENGTHS)), example.batch, gates.reinforce(), backend=backend,
        weights=mean(selected=expert[row]) * mu * expert, token_weight=gates.chord_weight(logp),
    )  # fmt: skip
    (grpo.loss + sft.loss).backward()
    leaf = example.logp.double().requires_grad_()
    usual, others = (example.covered(gates.reinforce()) & kind for kind in (~expert[row], expert[row]))
    s = SimpleNamespace(l=leaf[usual], old=example.old_logp.double()[usual], A=example.advantages.double()[row[usual]])
    p = leaf.detach().exp()[others]
    loss = -(1 - mu) * paper.ppo_clip(s).mean() - mu * (p * (1 - p) * leaf[others]).mean()
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close((grpo.loss + sft.loss).double(), loss.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logp.grad.double(), grad, rtol=1e-6, atol=1e-9)


def test_the_weight_of_an_expert_token():
    """Exact where p is nearly 1, never negative, 0 at both ends."""
    logp = torch.tensor([-1e-6, 0.0, 1e-6, -torch.inf, math.log(0.5), math.nan])
    weight = gates.chord_weight(logp.requires_grad_())
    torch.testing.assert_close(weight[:5], torch.tensor([1e-6, 0.0, 0.0, 0.0, 0.25]), rtol=2e-6, atol=0)
    assert weight[5].isnan()
    assert not weight.requires_grad


def test_an_answer_with_one_token_of_great_divergence_is_left_out(native_backends):
    """TRM, in the call of docs/compositions.md: e^d - 1 - d of 0.8 is 0.4255, of -1 0.3679, of 0.7 0.3138."""
    discrepancy = torch.tensor([0.1, 0.8, 0.0, -1.0, 0.7, 0.7, 0.2])
    old, logp = torch.full((7,), -1.5), torch.linspace(-1.6, -1.4, 7)
    mask = torch.tensor([True, True, True, False, True, True, True])
    left_out = torch.tensor([True, True, False, False, False, False, False])
    batch, advantages = hpo.PackedBatch.from_lengths([2, 2, 3], mask=mask), torch.tensor([1.0, -1.0, 0.5])
    correction = Correction(
        Action.MASK, high=(0.35, 0.35), unit=Unit.TRAJECTORY, reduction=Reduction.MAX, statistic=specs.Statistic.K3
    )
    for backend in ("reference", *native_backends):
        place = testing.device_of(backend)
        given = [each.to(place) for each in (logp, old, advantages, batch)]
        run = functools.partial(hpo.policy_loss_and_grad, *given, backend=backend)
        plain = run(gates.dapo()).grad.cpu()
        found = run(gates.compose(gates.dapo(), correction), rollout_logp=(old - discrepancy).to(place)).grad.cpu()
        assert torch.equal(found, plain.masked_fill(left_out, 0.0)) and plain[left_out].all(), backend
        assert found[mask & ~left_out].all(), backend


@pytest.mark.parametrize("name", ["gvpo", "a_po", "flowrl"])
def test_regressions_are_reinforce_with_other_advantages(name):
    """docs/compositions.md: the squares that are minimised, and what they are as advantages."""
    draw, ids, beta, values = torch.Generator().manual_seed(0), torch.tensor([0, 0, 0, 1, 1, 1]), 0.3, 0.4
    batch = hpo.PackedBatch.from_lengths([3, 1, 4, 2, 5, 2])
    old = -torch.rand(17, generator=draw, dtype=torch.float64)
    logp = (old + 0.3 * torch.randn(17, generator=draw, dtype=torch.float64)).requires_grad_()
    rewards = torch.rand(6, generator=draw, dtype=torch.float64)
    s = torch.stack([row.sum() for row in (logp - old).split([3, 1, 4, 2, 5, 2])])
    fixed = s.detach()
    if name == "gvpo":
        targets = zip(s.split(3), rewards.split(3), strict=True)
        centred = [beta * (each - each.mean().detach()) - (r - r.mean()) for each, r in targets]
        loss = sum((0.5 * each**2).sum() for each in centred) / 2
        advantages = hpo.advantages.dr_grpo(rewards - beta * fixed, ids, backend="reference")
        weights = torch.full((6,), beta / 2, dtype=torch.float64)
    elif name == "flowrl":
        old, log_z, w = old - 1, torch.linspace(-1, 1, 6, dtype=torch.float64), fixed.exp().clamp(max=1.2)
        assert 0 < int((w == 1.2).sum()) < 6
        mean = torch.stack([row.mean() for row in (logp - old).split([3, 1, 4, 2, 5, 2])])  # old: the reference
        distance = log_z + mean - 15 * rewards
        loss, weights = (w * distance**2).mean(), hpo.aggregation.seq_mean_token_mean(batch).double()
        advantages = -2 * w * distance.detach()
    else:
        loss = ((beta * s - (rewards - values)) ** 2).mean()
        advantages = rewards - values - beta * fixed
        weights = 2 * beta * hpo.aggregation.seq_mean_token_sum(batch).double()
    (expected,) = torch.autograd.grad(loss, logp)
    out = hpo.policy_loss_and_grad(
        logp.detach(), old, advantages, batch, gates.reinforce(), weights=weights, backend="reference"
    )
    torch.testing.assert_close(out.grad, expected, rtol=1e-7, atol=0)


def test_fipo_holds_the_weight_of_a_likely_mistake_above_four_fifths():
    old, x = torch.zeros(2), torch.tensor([1.0, -5.0])
    batch, given = hpo.PackedBatch.from_lengths([2]), {"half_life": 1e9, "eps_low": 0.9, "ratio_unsafe": 2.0}
    found = gates.fipo_weight(x, old, torch.tensor([-1.0]), batch, **given).token_weight
    assert found.tolist() == pytest.approx([0.8, 0.1])
