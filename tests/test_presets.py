"""Every preset against its paper's formula on every backend, loss and gradient; worked numbers; what they promise."""

import functools
import math
from types import SimpleNamespace

import paper_formulas as paper
import pytest
import torch

import hpo_core as hpo
from hpo_core import gates
from hpo_core.gates import (
    Action,
    Aggregate,
    Channel,
    Correction,
    FirstOrder,
    Penalty,
    Reduction,
    Unit,
)
from hpo_core.testing.budget import Expected, assert_within_budget

# name: (gate, the objective of a sequence, what it is given). Numbers are such that every branch fires.
PRESETS = {
    "reinforce": (gates.reinforce(), paper.reinforce, ""),
    "ppo_clip": (gates.ppo_clip(), paper.ppo_clip, ""),
    "ppo_clip, dual": (gates.ppo_clip(dual=1.3), functools.partial(paper.ppo_clip, dual=1.3), ""),
    "dapo": (gates.dapo(), functools.partial(paper.ppo_clip, high=0.28), ""),
    "triplet_clip": (
        gates.triplet_clip(0.1, 1.4, 0.3), functools.partial(paper.ppo_clip, low=0.1, high=0.3, dual=1.4), ""
    ),
    "ce_gppo": (gates.ce_gppo(dual=1.4), functools.partial(paper.ce_gppo, c=1.4), ""),
    "cispo": (gates.cispo(1.2, 0.9), functools.partial(paper.cispo, cap=1.2, low=0.9), ""),
    "cispo, unified": (
        gates.cispo(1.2, 0.9, unified=True), functools.partial(paper.cispo, cap=1.2, low=0.9, unified=True), ""
    ),
    "aspo": (gates.aspo(dual=1.3), functools.partial(paper.aspo, c=1.3), ""),
    "hapo_clip": (gates.hapo_clip(dual=1.4), functools.partial(paper.ppo_with_bounds, dual=1.4), "bounds"),
    "archer_clip": (gates.archer_clip(dual=None), paper.ppo_with_bounds, "bounds"),
    "dcpo_clip": (gates.dcpo_clip(1.5), functools.partial(paper.ppo_with_bounds, dual=1.5), "bounds"),
    "clip_cov": (gates.clip_cov(), paper.ppo_clip, "token_mask"),
    "capo": (gates.capo(), paper.ppo_clip, "token_mask"),
    "m2po": (gates.m2po(), paper.unclipped, "token_mask"),
    "kl_cov": (gates.kl_cov(0.5), functools.partial(paper.kl_cov, coefficient=0.5), "penalty_mask"),
    "sapo": (gates.sapo(), paper.sapo, ""),
    "spo": (gates.spo(), paper.spo, ""),
    "bpo": (gates.bpo(), paper.bpo, "target"),
    "gbpo": (gates.gbpo(), paper.bpo, "target"),
    "nft": (gates.nft(), paper.nft, "target"),
    "dro": (gates.dro(0.7), functools.partial(paper.quadratic, beta=0.7), ""),
    "kimi": (gates.kimi(), paper.quadratic, ""),
    "opmd": (gates.opmd(), paper.opmd, ""),
    "mdpo": (gates.reconstructed.mdpo(0.5), functools.partial(paper.mdpo, tau=0.5), ""),
    **{
        f"ppo_penalty, {penalty.name}": (
            gates.ppo_penalty(0.5, penalty), functools.partial(paper.ppo_penalty, beta=0.5, k=int(penalty)), ""
        )
        for penalty in (Penalty.K1, Penalty.K2, Penalty.K3)
    },
    "gspo": (gates.gspo(0.02, 0.03), functools.partial(paper.gspo, low=0.02, high=0.03), ""),
    "gspo_token": (gates.gspo_token(0.02, 0.03), functools.partial(paper.gspo_token, low=0.02, high=0.03), ""),
    "gmpo": (gates.gmpo(0.1, 0.1), functools.partial(paper.gmpo, low=0.1, high=0.1), ""),
    "topr": (gates.topr(), paper.topr, ""),
    "topr, mean": (gates.topr(Aggregate.MEAN), functools.partial(paper.topr, mean=True), ""),
    "vespo": (gates.vespo(), paper.vespo, ""),
    "a_lol": (gates.a_lol(0.3), functools.partial(paper.a_lol, c=0.3), ""),
    "rec": (gates.rec(), paper.rec, ""),
    "rec, two sides": (
        gates.rec(0.1, 0.2, one_sided=False, importance=True),
        functools.partial(paper.rec, low=0.1, one_sided=False, importance=True),
        "",
    ),
    "rec_ring": (
        gates.rec_ring(),
        functools.partial(paper.rec_ring, low=0.08, high=0.1, far_low=0.13, far_high=0.16),
        "ring",
    ),
    "rec_ring, importance": (
        gates.rec_ring(importance=True),
        functools.partial(paper.rec_ring, low=0.08, high=0.1, far_low=0.13, far_high=0.16, importance=True),
        "ring",
    ),
    "fiberpo": (
        gates.fiberpo(0.1, (0.08, 0.05)), functools.partial(paper.fiberpo, epsilon=0.1, plus=0.08, minus=0.05), ""
    ),
    "fiberpo, slope 2": (
        gates.fiberpo(0.1, (0.06, 0.05), 2.0),
        functools.partial(paper.fiberpo, epsilon=0.1, plus=0.06, minus=0.05, slope=2.0),
        "",
    ),
    "apc": (gates.reconstructed.apc(0.12), functools.partial(paper.apc, delta=0.12), ""),
    "apc, censored": (gates.reconstructed.apc(0.02), functools.partial(paper.apc, delta=0.02), ""),
    "p3o": (gates.reconstructed.p3o(), paper.p3o, "pairs"),
    "chord, rows of an expert": (gates.reinforce(), paper.chord_expert, "chord_weight"),
    "hispo": (gates.hispo(0.05, 0.2), functools.partial(paper.hispo, sequence=0.05, token=0.2), "roll"),
    "opsm": (gates.opsm(0.01), functools.partial(paper.opsm, delta=0.01), "roll"),
    "decoupled": (gates.decoupled(), paper.decoupled, "roll"),
    "decoupled, capped": (gates.decoupled(cap=1.1), functools.partial(paper.decoupled, cap=1.1), "roll"),
    "tis": (gates.tis(1.1), functools.partial(paper.decoupled, cap=1.1), "roll"),
    "tis, sequence": (
        gates.tis(1.1, Unit.TRAJECTORY), functools.partial(paper.sequence_tis, cap=1.1), "roll"
    ),
    "icepop": (gates.icepop(0.9, 1.2), functools.partial(paper.icepop, low=0.9, high=1.2), "roll"),
    "mis": (gates.mis(high=1.2), functools.partial(paper.mis, high=1.2), "roll"),
    "mis, geometric, veto": (
        gates.mis(0.98, 1.02, reduction=Reduction.MEAN, veto=0.8),
        functools.partial(paper.mis, low=0.98, high=1.02, mean=True, veto=0.8),
        "roll",
    ),
    "dppo_tv": (gates.dppo_tv(0.03, 0.02, 1.1), functools.partial(paper.dppo_tv, low=0.03, high=0.02, cap=1.1), ""),
    "dppo_tv, total": (
        gates.dppo_tv(0.03, 0.02, 1.1, Channel.TOTAL),
        functools.partial(paper.dppo_tv, low=0.03, high=0.02, cap=1.1, anchor="roll"),
        "roll",
    ),
    "dppo_kl": (gates.dppo_kl(0.003), functools.partial(paper.dppo_kl, delta=0.003), ""),
}  # fmt: skip
every_preset = pytest.mark.parametrize("name", PRESETS)


class Example:
    """Ragged sequences with a mask, and everything that some gate takes."""

    def __init__(self, seed, lengths=(5, 0, 9, 1, 16, 33, 3), spread=0.15):
        draw = torch.Generator().manual_seed(seed)
        self.lengths, self.rows = lengths, len(lengths)
        tokens = sum(lengths)
        self.mask = torch.rand(tokens, generator=draw) < 0.8
        self.mask[5:14] = seed % 2 == 0  # sometimes a whole sequence is masked
        self.batch = hpo.PackedBatch.from_lengths(list(lengths))
        self.batch = hpo.PackedBatch(self.batch.cu_seqlens, self.mask, group_ids=torch.arange(self.rows) // 2)
        self.old_logp = -torch.rand(tokens, generator=draw) * 3 - 0.8
        self.logp = self.old_logp + spread * torch.randn(tokens, generator=draw)
        self.rollout_logp = self.old_logp + spread / 3 * torch.randn(tokens, generator=draw)
        self.advantages = torch.randn(self.rows, generator=draw)
        self.weights = torch.rand(self.rows, generator=draw) + 0.1
        self.low = 0.7 + 0.25 * torch.rand(tokens, generator=draw)
        self.high = 1.05 + 0.25 * torch.rand(tokens, generator=draw)
        self.token_mask = torch.rand(tokens, generator=draw) < 0.7
        self.penalty_mask = torch.rand(tokens, generator=draw) < 0.5
        self.target = 0.2 + 0.6 * torch.rand(self.rows, generator=draw)

    def keywords(self, given):
        taken = {
            "": {},
            "bounds": {"bounds": (self.low, self.high)},
            "token_mask": {"token_mask": self.token_mask},
            "penalty_mask": {"penalty_mask": self.penalty_mask},
            "target": {"target": self.target},
            "roll": {"rollout_logp": self.rollout_logp},
            "pairs": {},
            "ring": {
                "token_mask": gates.rec_ring_mask(
                    self.logp, self.old_logp, self.advantages, self.batch, (0.08, 0.1), (0.13, 0.16)
                )
            },
            "chord_weight": {"token_weight": gates.chord_weight(self.logp.double())},
        }
        return {"old_logp": self.old_logp, **taken[given]}

    def run(self, gate, given, backend, **others):
        to = torch.float64 if backend == "reference" else torch.float32

        def cast(value):
            if isinstance(value, tuple):
                return tuple(map(cast, value))
            return value.to(to) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        keywords = {
            "logp": self.logp, "advantages": self.advantages, "weights": self.weights, **self.keywords(given), **others
        }  # fmt: skip
        keywords = {name: cast(value) for name, value in keywords.items()}
        return hpo.policy_loss_and_grad(batch=self.batch, gate=gate, backend=backend, **keywords)

    def naive(self, objective, given, dtype=torch.float64):
        """Loss and gradient from the paper's formula, sequence by sequence."""
        logp = self.logp.to(dtype).requires_grad_()
        sequences, begin = [], 0
        for row, length in enumerate(self.lengths):
            here = torch.arange(begin, begin + length)[self.mask[begin : begin + length]]
            begin += length
            s = SimpleNamespace(
                here=here,
                l=logp[here],
                old=self.old_logp.to(dtype)[here],
                roll=self.rollout_logp.to(dtype)[here],
                A=self.advantages.to(dtype)[row].expand(here.numel()),
                low=self.low.to(dtype)[here],
                high=self.high.to(dtype)[here],
                target=self.target.to(dtype)[row],
                pays=self.penalty_mask[here],
                other=None,
            )
            sequences.append(s)
        for first, second in zip(sequences[::2], sequences[1::2], strict=False):
            first.other, second.other = second, first
        loss = logp.sum() * 0
        for row, s in enumerate(sequences):
            if s.here.numel() == 0:
                continue
            term = objective(s)
            if given == "token_mask":
                term = torch.where(self.token_mask[s.here], term, torch.zeros_like(term))
            loss = loss - self.weights.to(dtype)[row] * term.sum()
        (grad,) = torch.autograd.grad(loss, logp)
        return loss.detach(), grad


@every_preset
@pytest.mark.parametrize("seed", range(6))
def test_reference_is_the_papers_formula(name, seed):
    gate, objective, given = PRESETS[name]
    example = Example(seed)
    out, (loss, grad) = example.run(gate, given, "reference"), example.naive(objective, given)
    torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.grad, grad, rtol=1e-12, atol=1e-12)


@every_preset
def test_every_backend_is_the_papers_formula(name, backend):
    gate, objective, given = PRESETS[name]
    for seed in range(2):
        example = Example(seed)
        out, exact = example.run(gate, given, backend), example.naive(objective, given)
        eager = example.naive(objective, given, torch.float32)
        for got, wanted, rounded in zip((out.loss, out.grad), exact, eager, strict=True):
            size = wanted.abs().max().expand_as(wanted)
            assert_within_budget(f"{name} on {backend}", got, Expected(wanted, rounded.double(), size))


@every_preset
def test_poison_at_masked_positions_changes_no_bit(name, backend):
    gate, _, given = PRESETS[name]
    example = Example(0)
    clean = example.run(gate, given, backend)
    for poison in (math.nan, math.inf, -math.inf):
        for tensor in (example.logp, example.old_logp, example.rollout_logp, example.low, example.high):
            tensor[~example.mask] = poison
        out = example.run(gate, given, backend)
        assert out.loss.item() == clean.loss.item()
        assert torch.equal(out.grad, clean.grad)
        assert not out.grad[~example.mask].any()


@every_preset
def test_extreme_log_ratios_stay_finite(name, backend):
    gate, _, given = PRESETS[name]
    example = Example(0)
    example.logp = example.old_logp + torch.where(torch.arange(example.logp.numel()) % 2 == 0, 120.0, -120.0)
    out = example.run(gate, given, backend)
    assert torch.isfinite(out.loss)
    assert torch.isfinite(out.grad).all()


EXACT = [
    name
    for name, (gate, _, given) in PRESETS.items()
    if gate.first_order is FirstOrder.EXACT
    and gate.penalty is not Penalty.K1
    and given not in ("target", "chord_weight")
]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_on_policy_gradient(name, zero, backend):
    """-w A to the bit where the gate promises it, at +0 and at -0; sampler and trainer agree.

    A number less itself is +0: only -0 less +0 is a log-ratio of -0.
    """
    gate, _, given = PRESETS[name]
    example = Example(0)
    even = torch.arange(example.old_logp.numel()) % 2 == 0
    example.old_logp = torch.where(even, 0.0, example.old_logp)
    example.logp = torch.where(even, zero, example.old_logp)
    given = "" if given == "roll" else given
    out = example.run(gate, given, backend)
    counted = example.mask & example.token_mask if given == "token_mask" else example.mask
    row = torch.repeat_interleave(torch.arange(example.rows), torch.tensor(example.lengths))
    wanted = torch.where(counted, -(example.weights * example.advantages)[row], torch.zeros(()))
    assert torch.equal(out.grad, wanted)


@every_preset
def test_bits_do_not_depend_on_threads_or_packing(name, backend):
    gate, _, given = PRESETS[name]
    lengths = (700, 5, 0, 1300, 9) if backend != "triton" else (70, 5, 0, 130, 9)
    example = Example(2, lengths)
    grads = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        grads.append(example.run(gate, given, backend).grad)
    assert torch.equal(*grads)
    order = [3, 1, 4, 0, 2]
    turned = Example(2, lengths)
    turned.lengths = tuple(lengths[row] for row in order)
    batch, tokens = example.batch.select(order)
    turned.batch = batch
    for field in ("mask", "old_logp", "logp", "rollout_logp", "low", "high", "token_mask", "penalty_mask"):
        setattr(turned, field, getattr(example, field)[tokens])
    for field in ("advantages", "weights", "target"):
        setattr(turned, field, getattr(example, field)[order])
    assert torch.equal(turned.run(gate, given, backend).grad, grads[0][tokens])


@pytest.mark.parametrize("name", [name for name, (_, _, given) in PRESETS.items() if given in ("", "roll")])
def test_check_finds_nothing(name):
    """Batches, features and promises of :func:`hpo_core.testing.check`, on the CPU."""
    gate = PRESETS[name][0]
    fn = functools.partial(hpo.policy_loss, gate=gate, backend="cpu")
    report = hpo.testing.check(fn, "policy_loss", gate=gate, examples=8)
    assert len(report.promises) >= 10


# ------------------------------------------------------------------------------------------------------ worked numbers

SEVEN = {
    "x": [0.30, -0.10, 0.05, -0.40, 0.25, 0.02, -0.05],
    "old": [-0.9, -1.2, -0.3, -2.0, -0.7, -1.5, -0.1],
    "d": [0.02, -0.01, 0.00, 0.60, -0.03, 0.01, 0.02],
}
MEAN, SMTM, FIXED, SUM = [1 / 7, 1 / 7], [1 / 6, 1 / 8], [1 / 8, 1 / 8], [0.5, 0.5]
WORKED = {  # (gate, weights, loss, gradient), advantages 1 and -.5
    "dual": (gates.ppo_clip(dual=1.25), MEAN, -0.163628, (0, -0.129262, -0.150182, 0, 0, 0.072872, 0.067945)),
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
    "hispo": (gates.hispo(0.1, 0.3), FIXED, -0.403388, (0, -0.111979, -0.131409, 0, 0, 0, 0)),
    "hispo, wider": (
        gates.hispo(0.2, 0.3), FIXED, -0.200452, (0, -0.111979, -0.131409, 0, 0.077880, 0.064403, 0.060653)
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
    target = {"bpo": gates.bpo_target(advantages), "gbpo": soft}.get(name)
    out = hpo.policy_loss_and_grad(
        old + x, old, advantages, hpo.PackedBatch.from_lengths([3, 4]), gate, target=target, backend="reference",
        rollout_logp=old - d if gate.reads_rollout else None, weights=torch.tensor(weights, dtype=torch.float64),
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(loss, abs=1.5e-6)
    assert out.grad.tolist() == pytest.approx(grad, abs=1.5e-6)


def test_worked_numbers_of_nft():
    """The advantage is +-w, w = .5."""
    x, old, _ = (torch.tensor(values, dtype=torch.float64) for values in SEVEN.values())
    out = hpo.policy_loss_and_grad(
        old + x, old, torch.tensor([0.5, -0.5], dtype=torch.float64), hpo.PackedBatch.from_lengths([3, 4]),
        gates.nft(), target=torch.full((2,), 0.5, dtype=torch.float64), backend="reference",
        weights=torch.ones(2, dtype=torch.float64),
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
    example = Example(1)
    example.logp[20] = example.old_logp[20] + 7.6
    assert example.mask[20]
    out = example.run(gates.reconstructed.apc(500.0), "", backend)
    plain = example.run(gates.m2po(), "", backend)
    assert torch.equal(out.grad, plain.grad)
    torch.testing.assert_close(out.loss, plain.loss)


# ---------------------------------------------------------------------------------------- more than one call, or a row


def test_p3o_from_rewards(backend):
    """The gradient of the paper: ``E[clip(W) (R_1 - R_2) / 2 grad log(pi(y_1) / pi(y_2))]`` over pairs."""
    example, rewards = Example(1), torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 1.5])
    rows = slice(0, sum(example.lengths[:6]))
    batch, _ = example.batch.select([0, 1, 2, 3, 4, 5])
    advantages = hpo.advantages.dr_grpo(rewards, batch.group_ids)
    weights = hpo.aggregation.seq_mean_token_sum(batch, total=3)
    logp, old_logp = example.logp[rows], example.old_logp[rows]
    out = hpo.policy_loss_and_grad(
        logp, old_logp, advantages, batch, gates.reconstructed.p3o(), weights=weights, backend=backend
    )
    leaf = logp.double().requires_grad_()
    valid = torch.where(example.mask[rows], 1.0, 0.0).double()
    of_row = torch.stack([part.sum() for part in (leaf * valid).split(example.lengths[:6])])
    ratio = of_row - torch.stack([part.sum() for part in (old_logp * valid).split(example.lengths[:6])])
    loss = torch.zeros((), dtype=torch.float64)
    for one, two in ((0, 1), (2, 3), (4, 5)):
        joint = torch.exp(ratio[one] + ratio[two]).detach().clamp(0.8, 1.2)
        loss = loss - joint * (rewards[one] - rewards[two]) / 2 * (of_row[one] - of_row[two]) / 3
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(out.grad.double(), grad, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(out.loss.double(), loss.detach(), rtol=1e-6, atol=1e-6)


def test_chord(backend):
    """``(1 - mu) L_GRPO + mu L_SFT`` in two calls, each with the mean over its own tokens."""
    example, mu = Example(1), 0.3
    expert = torch.tensor([False, True, False, True, False, True, False])
    row = torch.repeat_interleave(torch.arange(example.rows), torch.tensor(example.lengths))
    logp = example.logp.clone().requires_grad_()
    mean = functools.partial(hpo.aggregation.token_mean, example.batch)
    grpo = hpo.policy_loss(
        logp, example.old_logp, example.advantages, example.batch, backend=backend,
        weights=mean(selected=~expert[row]) * (1 - mu) * ~expert,
    )  # fmt: skip
    sft = hpo.policy_loss(
        logp, None, torch.ones(example.rows), example.batch, gates.reinforce(), backend=backend,
        weights=mean(selected=expert[row]) * mu * expert, token_weight=gates.chord_weight(logp),
    )  # fmt: skip
    (grpo.loss + sft.loss).backward()
    leaf = example.logp.double().requires_grad_()
    usual, others = (example.mask & kind for kind in (~expert[row], expert[row]))
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
