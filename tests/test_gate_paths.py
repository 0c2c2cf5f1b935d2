"""The ways of the CPU through a tile: what the fast path makes of a call has the gradient of any other way."""

import math

import pytest
import torch
from catalogue import bits
from devices import garbage_in_new_memory

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import Action, Channel, Correction, GateInputs
from hpo_core.metrics import SLOTS

TOKENS = 2400  # two whole tiles, and one that ends inside a vector
FEW = (700, 348, 1000, 345, 7)  # rows that meet inside vectors and groups, and where a tile ends
MANY = (21,) * 114 + (6,)
LOST = (5, 1029, 2100)  # one in each tile

OPEN = (gates.Level(gates.Rollback((1.0, 1.0)), gates.Routing.STOPPED),)
GATES = {
    "reinforce": gates.reinforce(),
    "dapo": gates.dapo(),
    "cispo": gates.cispo(1.3, 0.8),
    "dcpo": gates.dcpo_clip(),
    "sapo": gates.sapo(),
    "spo": gates.spo(),
    "kimi": gates.kimi(),
    "opmd": gates.opmd(),
    "ce_gppo": gates.ce_gppo(),
    "aspo": gates.aspo(),
    "bpo": gates.bpo(),
    "nft": gates.nft(),
    "penalty": gates.ppo_penalty(),
    "kl_cov": gates.kl_cov(),
    "gmpo": gates.gmpo(0.2, 0.2),
    "gspo": gates.gspo(0.02, 0.02),
    "gspo_token": gates.gspo_token(0.02, 0.02),
    "vespo": gates.vespo(),
    "levels that are open": gates.RatioGate(
        "open",
        gates.LogClip((-0.3, -0.3), (0.2, 0.2)),
        (gates.Level(gates.Rollback((1.0, 1.0)), gates.Routing.STOPPED),),
    ),
    "fiberpo": gates.fiberpo(0.3, (0.05, 0.05), 1.0),
    "dppo_tv": gates.dppo_tv(0.05, 0.04),
    "dppo_kl": gates.dppo_kl(0.02),
    "band": gates.compose(
        gates.ppo_clip(), Correction(Action.BAND, (-0.4, -0.3), (0.5, 0.4), channel=Channel.STALENESS)
    ),
    "band, sapo": gates.compose(gates.sapo(), Correction(Action.CLAMP, high=(0.5, 0.4), channel=Channel.STALENESS)),
}
PENALTIES = {
    f"{estimator}, {gradient}": getattr(hpo.kl, estimator)(0.3, gradient)
    for estimator in ("k1", "k2", "k3")
    for gradient in ("value", "straight_through", "importance")
}


class Data:
    """Tokens of which nothing is extraordinary but the lost ones, which a mask leaves out or NaN."""

    def __init__(self, lengths):
        draw = torch.Generator().manual_seed(3)

        def uniform(low, high, count=TOKENS):
            return low + (high - low) * torch.rand(count, generator=draw)

        assert sum(lengths) == TOKENS
        self.lengths, rows = lengths, len(lengths)
        self.old_logp = uniform(-3.0, 0.0)
        self.logp = self.old_logp + 0.3 * torch.randn(TOKENS, generator=draw)
        self.ref_logp = self.logp + 0.5 * torch.randn(TOKENS, generator=draw)
        self.advantages, self.token_advantages = uniform(-1.0, 1.0, rows), uniform(-1.0, 1.0)
        self.token_weight, self.entropy = uniform(0.5, 2.0), uniform(0.0, 3.0)
        self.token_mask, self.penalty_mask = uniform(0.0, 1.0) < 0.8, uniform(0.0, 1.0) < 0.7
        self.weights = uniform(0.5, 2.0, rows) / TOKENS
        self.bounds, self.target = (uniform(0.7, 1.0), uniform(1.0, 1.3)), uniform(0.2, 0.9)
        self.bounds[0][::97], self.bounds[1][::97] = 1 + 8e-7, 1 - 8e-7  # which cross by what rounding may make of 1
        self.kl_weight = torch.where(uniform(0.0, 1.0) < 0.2, 0.0, uniform(-0.5, 2.0))

    def run(self, gate, long_way, backend, *, report=False, advantages=None, **given):
        kept = torch.ones(TOKENS, dtype=torch.bool)
        old_logp = self.old_logp.clone()
        if long_way:
            old_logp[list(LOST)] = math.nan
        else:
            kept[list(LOST)] = False
        batch = hpo.PackedBatch.from_lengths(list(self.lengths), mask=None if long_way else kept)
        advantages = self.advantages if advantages is None else advantages
        inputs = GateInputs(
            bounds=self.bounds if gate.takes_bounds else None,
            target=self.target if gate.takes_target and "advantage_level" in given else None,
            penalty_mask=self.penalty_mask if "penalty_mask" in gate.required else None,
        )
        if gate.takes_target and inputs.target is None:
            inputs = GateInputs(target=self.target[: len(self.lengths)])
        given["weights"] = self.weights
        if not report:
            return hpo.policy_loss_and_grad(
                self.logp, old_logp, advantages, batch, gate, gate_inputs=inputs, backend=backend, **given
            )
        return hpo.policy_loss(
            self.logp,
            old_logp,
            advantages,
            batch,
            gate,
            gate_inputs=inputs,
            report=("tokens",),
            backend=backend,
            **given,
        )


def inputs_of_tokens(data):
    window = hpo.entropy.forking_tokens(0.5, scope="call")
    given = {
        "none": {},
        "weight": {"token_weight": data.token_weight},
        "mask": {"token_mask": data.token_mask},
        "advantages": {"advantages": data.token_advantages, "advantage_level": "token"},
        "entropy": {"entropy": data.entropy},
        "window": {"entropy": data.entropy, "window": window, "threshold": torch.tensor([1.5])},
    }
    given |= {name: {"ref_logp": data.ref_logp, "kl": kl} for name, kl in PENALTIES.items()}
    coefficients = {"selection": hpo.entropy.Selection(kl_weight=data.kl_weight)}
    given |= {f"{name}, coefficients": given[name] | coefficients for name in PENALTIES}
    return given | {"all": {key: value for name in ("weight", "mask", "advantages", "window", "k3, value")
                            for key, value in given[name].items()}}  # fmt: skip


def assert_one_way(short, long, alike):
    """``alike``: to the bit; what comes back through aggregates is a sum, which may round otherwise."""
    assert bits(short.grad) == bits(long.grad) or not alike
    torch.testing.assert_close(short.grad, long.grad, rtol=2e-6, atol=0.0)
    same = [name != "nan_tokens" for name in SLOTS]
    vectors = [each.metrics.vector[torch.tensor(same)] for each in (short, long)]
    torch.testing.assert_close(*vectors, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(short.loss, long.loss, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_the_fast_path_has_the_gradient_of_any_other_way(gate, lengths, backend):
    """A NaN in each tile sends it the long way; masked, that token says nothing to anybody."""
    data = Data(lengths)
    for given in inputs_of_tokens(data).values():
        ways = (data.run(gate, long_way, backend, **given) for long_way in (False, True))
        assert_one_way(*ways, not gate.levels)


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_losses_of_tokens_change_no_bit_of_the_fast_path(gate, lengths, backend):
    data = Data(lengths)
    for name, given in inputs_of_tokens(data).items():
        plain, reported = (data.run(gate, False, backend, report=report, **given) for report in (False, True))
        assert bits(plain.loss) == bits(reported.loss), name
        assert torch.equal(plain.metrics.vector, reported.metrics.vector), name
        long = data.run(gate, True, backend, report=True, **given)
        assert bits(reported.tokens) == bits(long.tokens), name


BOUNDED = gates.Clip((0.8, 0.8), (1.2, 1.2))
SLOPES = gates.Clip((0.8, 0.8), (1.2, 1.2), (0.5, 0.25), (2.0, 3.0), (0.7, 0.6), (1.5, 1.7))
CROSSED = [
    gates.RatioGate("token", BOUNDED),
    gates.RatioGate("level", BOUNDED, OPEN),
    gates.RatioGate("split", BOUNDED, OPEN, split=True),
    gates.RatioGate("slopes", SLOPES),
]


@pytest.mark.parametrize("gate", CROSSED, ids=lambda gate: gate.name)
def test_of_bounds_that_cross_by_rounding_the_upper_one_wins(gate, backend):
    """And nothing is inside, be it on a bound: a second rule would differ in whole gradients there."""
    low, high = 1 + 8e-7, 1 - 8e-7
    logp = torch.tensor([-0.125, -(2.0**-17), 0.0, 0.0, 0.0, 2.0**-17, 0.125])  # of mean 0
    bounds = (
        torch.tensor([low, low, low, 1.0, low, low, low]),
        torch.tensor([high, high, 1.0, high, high, high, high]),
    )
    batch = hpo.PackedBatch.from_lengths([7])
    for advantage in (1.0, -1.0):
        call = (logp, torch.zeros(7), torch.tensor([advantage]), batch, gate)
        given = {"gate_inputs": GateInputs(bounds=bounds), "weights": torch.ones(1), "report": ("tokens",)}
        ours, defined = (grad_tokens_and_clipped(call, each, given) for each in (backend, "reference"))
        torch.testing.assert_close(ours, defined, rtol=2e-7, atol=0.0)


def grad_tokens_and_clipped(call, backend, given):
    logp = call[0].clone().requires_grad_()
    result = hpo.policy_loss(logp, *call[1:], backend=backend, **given)
    result.loss.backward()
    return logp.grad, result.tokens, result.metrics.vector[[name.startswith("clipped") for name in SLOTS]]


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("name, value", [
    ("token_weight", math.inf), ("token_weight", math.nan), ("ref_logp", -math.inf), ("ref_logp", math.nan),
    ("ref_logp", -65.0), ("ref_logp", -90.0), ("entropy", math.nan), ("token_weight", 3e38), ("kl_weight", math.nan),
    ("kl_weight", math.inf),
])  # fmt: skip
def test_what_is_extraordinary_leaves_the_fast_path(name, value, backend):
    """It is counted, left out or saturates as the definition says."""
    data = Data(FEW)
    given = {
        "token_weight": data.token_weight,
        "ref_logp": data.ref_logp,
        "kl": hpo.kl.k3(0.1),
        "entropy": data.entropy,
    }
    given[name] = given[name].clone() if name in given else data.kl_weight
    given[name][100:116] = value
    if name == "kl_weight":
        given["selection"] = hpo.entropy.Selection(kl_weight=given.pop(name))
    if name == "token_weight":  # what is wrong with a weight counts where the token itself does not
        given["token_mask"] = torch.arange(TOKENS) >= 116
    batch = hpo.PackedBatch.from_lengths(list(FEW))
    call = (data.logp, data.old_logp, data.advantages, batch, gates.dapo())
    got, wanted = (hpo.policy_loss_and_grad(*call, backend=each, **given) for each in (backend, "reference"))
    torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(got.metrics.vector, wanted.metrics.vector, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("gate", [gates.dapo(), gates.cispo()], ids=lambda gate: gate.name)
@pytest.mark.parametrize("value", [math.inf, math.nan, 3.2e38])
def test_an_extraordinary_weight_leaves_the_fast_path_of_weights_alone(value, gate, backend):
    """Infinite weights are left out and counted; with 3.2e38 losses of either sign add up beyond all floats."""
    data, batch = Data(FEW), hpo.PackedBatch.from_lengths(list(FEW))
    logp, weight, advantages = data.logp.clone(), data.token_weight.clone(), torch.tensor([0.5, -0.5, 0.5, -0.5, 0.5])
    for tokens in (slice(96, 128), slice(800, 832)):  # two to a lane, of a row above 0 and of one below
        weight[tokens], logp[tokens] = value, data.old_logp[tokens] + 0.2
    given = {"token_weight": weight, "weights": torch.ones(len(FEW))}
    call = (logp, data.old_logp, advantages, batch, gate)
    got, wanted = (hpo.policy_loss_and_grad(*call, backend=each, **given) for each in (backend, "reference"))
    torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-9)
    others = [name != "loss" for name in SLOTS]  # of which nothing is left but the rounding of sums beyond all floats
    metrics = (each.metrics.vector[others] for each in (got, wanted))
    torch.testing.assert_close(*metrics, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.isfinite(got.loss)


@pytest.mark.parametrize("backend", ["cpu"])
def test_exponents_of_truncated_weights_end_at_20(backend):
    data = Data(FEW)
    rollout = data.old_logp.clone()
    rollout[100:116] -= 30
    rollout[200:216] += 30
    batch = hpo.PackedBatch.from_lengths(list(FEW))
    call = (data.logp, data.old_logp, data.advantages, batch, gates.decoupled())
    got, wanted = (
        hpo.policy_loss_and_grad(*call, rollout_logp=rollout, backend=each) for each in (backend, "reference")
    )
    torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("gate", [
    gates.gspo(0.02, 0.02), gates.gmpo(0.2, 0.2), gates.vespo(), gates.fiberpo(0.3),
    gates.RatioGate("paid", gates.Drop(), gates.gspo().levels, penalty=gates.kimi().penalty),
], ids=lambda gate: gate.name)  # fmt: skip
def test_an_advantage_of_a_token_that_is_not_finite_is_counted_once_under_levels(gate, value, backend):
    """Be the other tiles of its row on the fast path or not."""
    data = Data((TOKENS,))
    advantages, far = data.token_advantages.clone(), data.logp.clone()
    advantages[100:116], far[1500] = value, data.old_logp[1500] - 45
    batch, given = hpo.PackedBatch.from_lengths([TOKENS]), {"weights": data.weights, "advantage_level": "token"}
    for logp in (data.logp, far):
        call = (logp, data.old_logp, advantages, batch, gate)
        got, wanted = (hpo.policy_loss_and_grad(*call, backend=each, **given) for each in (backend, "reference"))
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(got.metrics.vector, wanted.metrics.vector, rtol=1e-5, atol=1e-6)
        assert got.metrics["bad_advantages"] == 16


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize("name, value, gate", [("advantages", math.inf, gates.kimi()), ("target", 1.5, gates.nft())])
def test_what_is_extraordinary_of_a_row_leaves_the_fast_path(name, value, gate, lengths, backend):
    """Even where no sum of losses tells of it: these saturate under the one head, and are finite under the other."""
    data = Data(lengths)
    data.advantages[1] = -1.0
    getattr(data, name)[1] = value
    short, long = (data.run(gate, long_way, backend) for long_way in (False, True))
    assert short.metrics["bad_advantages"] == long.metrics["bad_advantages"] > 0
    assert_one_way(short, long, alike=True)


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30])
@pytest.mark.parametrize("gate", [GATES["levels that are open"], GATES["fiberpo"]], ids=lambda gate: gate.name)
def test_the_weight_of_a_row_without_tokens_chooses_no_way(gate, value, backend):
    """Short rows are measured together, and what is summed over all rows rounds otherwise on another way."""
    data = Data(MANY)
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[3 * 21 : 4 * 21] = False
    batch, spoiled = hpo.PackedBatch.from_lengths(list(MANY), mask=mask), data.weights.clone()
    spoiled[3] = value
    call, penalty = (data.logp, data.old_logp, data.advantages, batch, gate), inputs_of_tokens(data)["k3, value"]
    clean, got = (
        hpo.policy_loss_and_grad(*call, weights=weights, backend=backend, **penalty)
        for weights in (data.weights, spoiled)
    )
    assert bits(clean.loss, clean.grad, clean.metrics.vector) == bits(got.loss, got.grad, got.metrics.vector)


@pytest.mark.parametrize("name", ["dapo", "sapo", "kimi", "gspo", "fiberpo", "dppo_tv"])
@pytest.mark.parametrize("report", [(), ("tokens",)])
def test_a_tile_without_a_valid_token_has_no_gradient(report, name, backend):
    """No other tile writes its gradient: a row begins with a prompt of two tiles, and another row is masked."""
    device, tokens = testing.device_of(backend), 3600
    mask = (torch.arange(tokens) >= 2100) & (torch.arange(tokens) % 7 > 0)
    mask[3000:] = False
    batch = hpo.PackedBatch.from_lengths([3000, 600], mask=mask, group_ids=torch.zeros(2).long()).to(device)
    x = torch.linspace(-2.0, -0.1, tokens).to(device)
    leaf, ones = x.clone().requires_grad_(), torch.ones(2, device=device)
    with garbage_in_new_memory():
        out = hpo.policy_loss(leaf, x, ones, batch, GATES[name], report=report, backend=backend)
        grad = torch.autograd.grad(out.loss, leaf)[0].cpu()
    assert not grad[~mask].any() and grad[mask].all() and bool(grad.isfinite().all())
    assert not report or not out.tokens.cpu()[~mask].any()
