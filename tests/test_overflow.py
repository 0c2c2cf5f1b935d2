"""The promises of the README for a policy loss about extreme numbers, and about those that are not finite."""

import math

import pytest
import torch
from breadth import at_length  # noqa: F401 (a fixture)
from catalogue import CATALOGUE, KINDS, PENALTIES, Example, assert_exact, bits, run, running
from hierarchies import exact_off_branches
from promised import is_slow, of_every_gate

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import Head, RatioGate
from hpo_core.gates.ratio_gate import _LEAST
from hpo_core.testing import Layout


@of_every_gate()
def test_extreme_log_ratios(name, native_backends):
    """Far beyond +-60 at every token, and at every third: nothing is NaN or infinite, and the loss is that of the
    definition. Interpreted kernels meet them in test_log_probabilities_that_are_not_finite."""
    gate, example = CATALOGUE[name], Example(6)
    extreme = torch.tensor([120.0, -120.0, 59.0, -61.0, 0.1, 1e30, 88.0, 300.0, 61.0, -1e30])
    extreme = extreme.repeat(5)[: example.logp.numel()]
    every_third = torch.arange(example.logp.numel()) % 3 == 0
    for where in (torch.ones_like(every_third), every_third):
        x = torch.where(where, extreme, example.logp - example.old_logp)
        logp, old_logp = torch.where(x > 0, -0.5, x - 0.5), torch.where(x > 0, -x - 0.5, -0.5)
        inputs = example.needed(gate) | {"logp": logp, "old_logp": old_logp}
        exact = example.run(gate, "reference", **inputs)
        for backend in running(name, native_backends):
            if is_slow(backend):
                continue
            out = example.run(gate, backend, **inputs)
            assert torch.isfinite(out.loss) and torch.isfinite(out.grad).all(), backend
            assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4, abs=1e-6), backend


@pytest.mark.parametrize("head", [head for head in Head if head is not Head.CENSORED], ids=lambda head: head.name)
def test_numbers_of_heads_that_are_extreme(head, native_backends):
    """Under the least that RatioGate allows and numbers almost as large as floats go, loss and gradient are finite."""
    example = Example(6)
    for numbers in (_LEAST.get(head, (0.0, 0.0)), (3e38, 3e38)):
        gate = RatioGate("extreme", gates.Identity(), head=head, head_numbers=numbers)
        for old_logp in (example.logp, example.old_logp):
            for backend in native_backends:
                if not is_slow(backend):
                    out = example.run(gate, backend, **example.needed(gate), old_logp=old_logp)
                    assert torch.isfinite(out.loss) and torch.isfinite(out.grad).all(), (backend, numbers)


def of_the_mean(gate):
    return RatioGate("wide", gates.Drop(), (gates.Level(gate),))


@pytest.mark.parametrize(
    ("wide", "alike"),
    [
        *((of_the_mean(gates.Tanh(bound)), of_the_mean(gates.Identity())) for bound in (1e3, 1e10, 1e16, 3e38)),
        (gates.gmpo(1e39, 1e39), gates.gmpo(math.inf, math.inf)),
        (of_the_mean(gates.LogClip((-1e39, -1e39), (1e39, 1e39))), of_the_mean(gates.Identity())),
    ],
    ids=lambda gate: repr(gate)[:60],
)
def test_bounds_far_beyond_every_ratio_are_none(wide, alike, native_backends):
    example = Example(6)
    expected = example.run(alike, "reference")
    for backend in native_backends:
        out = example.run(wide, backend)
        assert out.loss.item() == pytest.approx(expected.loss.item(), rel=2e-6), backend
        assert torch.allclose(out.grad, expected.grad.float(), rtol=1e-5, atol=1e-7), backend


# Log-probabilities (now, then): beyond every place where something saturates, and as low as numbers go.
LOWEST = torch.finfo(torch.float32).min
EDGES = [
    (-0.5, -61.5), (-61.5, -0.5), (-0.5, -120.5), (LOWEST, -0.5), (-0.5, LOWEST), (LOWEST, LOWEST), (-0.4, -0.5),
    (-0.5, -31.5), (-0.5, -52.0), (-46.0, -0.5), (-0.5, -28.0),
]  # fmt: skip


@of_every_gate()
def test_the_largest_products(name, native_backends):
    """|w A| = 1e12, in the advantage or in the weight, of one sign or of both: nothing overflows, and the gradient is
    that of the definition."""
    gate, example = CATALOGUE[name], Example(6, masked=False)
    logp, old_logp = torch.tensor([EDGES[t % len(EDGES)] for t in range(example.logp.numel())]).T.contiguous()
    signs = torch.ones_like(example.advantages)
    mixed = torch.where(torch.arange(signs.numel()) % 2 == 0, signs, -signs)
    for advantages, weight in ((1e12 * mixed, 1.0), (signs, 1e12), (-signs, 1e12), (mixed, 1e12)):
        inputs = example.needed(gate) | {"logp": logp, "old_logp": old_logp, "advantages": advantages}
        inputs |= {"weights": torch.full_like(example.weights, weight)}
        if gate.reads_rollout:
            inputs["rollout_logp"] = old_logp
        exact = example.run(gate, "reference", **inputs)
        for backend in ("reference", *running(name, native_backends)):
            if not is_slow(backend):
                out = exact if backend == "reference" else example.run(gate, backend, **inputs)
                assert torch.isfinite(out.loss.float()) and torch.isfinite(out.grad.float()).all(), backend
                largest = exact.grad.abs().max().clamp(min=1e12)
                assert (out.grad - exact.grad).abs().max() <= 1e-4 * largest, backend


@pytest.mark.parametrize("name", KINDS)
def test_overflow(name, native_backends):
    """Log-ratios far beyond +-60 and |w A| = 1e12: slopes stay those of e^60, within the budget."""
    gate = KINDS[name]
    example = testing.random_policy_loss(0, gate, {"weights"}, layout=Layout((6, 4), 0, "none", False, 1))
    x = torch.tensor([120.0, -120.0, 59.0, -61.0, 0.1, 1e30, 88.0, 300.0, 61.0, 120.0])
    size = 1e9 if gate.head is Head.SCORE else 1e12  # under the score head the loss has a factor logp as well
    old = torch.where(x > 0, -x, 0.0) - 0.5
    example = example._replace(
        logp=torch.where(x > 0, -0.5, x - 0.5), old_logp=old, advantages=torch.tensor([size, -size])
    )
    example = example.given(weights=torch.ones(2))
    expected = testing.expect_policy_loss(example)
    for backend in native_backends:
        out = assert_exact(backend, example, expected)
        assert torch.isfinite(out.loss) and torch.isfinite(out.grad).all()


@pytest.mark.parametrize("levels", [(), (gates.Level(gates.Identity()),)], ids=["token", "trajectory"])
def test_huge_losses_of_both_signs_cancel(levels, native_backends):
    """The sum of three of these overflows a float32, and yet the loss is right."""
    gate = RatioGate("identity", gates.Identity(), levels)
    for backend in native_backends:
        batch = hpo.PackedBatch.from_lengths([48, 47]).to(testing.device_of(backend))
        logp, one = torch.full((95,), -0.5, device=batch.device), torch.ones(2, device=batch.device)
        advantages = torch.tensor([1e12, -1e12], device=batch.device)
        out = hpo.policy_loss_and_grad(logp, logp - 61, advantages, batch, gate, weights=one, backend=backend)
        assert out.loss.item() == pytest.approx(-1e12 * math.exp(60), rel=2e-6), backend


def test_saturation_keeps_the_slope(native_backends):
    example = testing.random_policy_loss(0, KINDS["identity"], {"weights"}, layout=Layout((4,), 0, "none"))
    example = example._replace(logp=torch.full((4,), -0.5), old_logp=torch.tensor([-60.5, -61.5, -100.5, -1e20]))
    for backend in native_backends:
        grad = run(backend, example).grad.cpu()
        assert (grad == grad[0]).all() and grad[0] != 0, backend


# Log-ratios by place: all at once, each in a row of its own, and one by one.
STRAY = [
    {1: math.nan, 7: -math.inf, 14: math.inf, 20: 120.0, 30: -120.0, 35: 1e30},
    *({7: value} for value in (math.nan, -math.inf, math.inf, 100.0, -100.0)),
]


@of_every_gate()
def test_log_probabilities_that_are_not_finite(name, native_backends):
    """NaN takes its token out, infinity saturates without a derivative and large numbers with one; none spoils its
    segments, and each is counted."""
    gate = CATALOGUE[name]
    for stray in STRAY:
        places, values = torch.tensor(list(stray)), torch.tensor(list(stray.values()))
        for seed in range(9):
            example = Example(seed, masked=False, gaps=False)
            example.logp[places] = values
            inputs = example.needed(gate)
            exact = exact_off_branches(example, gate, **inputs)
            if exact is not None:
                break
        else:
            raise AssertionError("no example keeps off the branches")
        largest = exact.grad.abs().max().clamp(min=1e-3)
        for backend in running(name, native_backends):
            if is_slow(backend) and stray is not STRAY[0]:
                continue
            out = example.run(gate, backend, **inputs)
            assert torch.isfinite(out.loss) and torch.isfinite(out.grad).all(), backend
            assert out.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4, abs=1e-6), backend
            assert (out.grad.double() - exact.grad).abs().max() <= 1e-5 * largest, backend
            assert (out.grad[places][~torch.isfinite(values)] == 0).all(), backend
            for counter in ("nan_tokens", "infinite_tokens", "tokens", "selected", "bad_advantages", "bad_offsets"):
                assert out.metrics[counter] == exact.metrics[counter], (backend, counter)
            assert out.metrics["nan_tokens"] == values.isnan().sum(), backend
            assert out.metrics["infinite_tokens"] == values.isinf().sum(), backend


@pytest.mark.parametrize("name", KINDS)
def test_infinite_and_nan_log_ratios(name, native_backends):
    """Log-ratios of the policy and of the reference stay within the budget."""
    features, layout = {"weights", "kl", "kl_weight"}, Layout((7, 5), 1, "none", False, 9)
    example = testing.random_policy_loss(0, KINDS[name], features, layout=layout)
    logp, reference = example.logp.clone(), example.keywords["ref_logp"].clone()
    logp[1], logp[3], logp[8] = -math.inf, math.nan, -math.inf
    reference[4], reference[9] = -math.inf, math.nan
    example = example._replace(logp=logp).given(ref_logp=reference)
    expected = testing.expect_policy_loss(example)
    for backend in native_backends:
        out = assert_exact(backend, example, expected)
        assert torch.isfinite(out.loss) and torch.isfinite(out.grad).all(), backend
        assert out.grad[[1, 3, 8, 9]].tolist() == [0.0] * 4, backend
        assert out.metrics["nan_tokens"].item() == 2 and out.metrics["infinite_tokens"].item() == 3, backend


def test_every_nan_leaves(native_backends):
    """Whatever its lower bits say, also where whole vectors of a row go through one pass."""
    for gate in (gates.dapo(), gates.gspo(0.1, 0.2), gates.fiberpo()):
        for backend in native_backends:
            batch = hpo.PackedBatch.from_lengths([48, 33]).to(testing.device_of(backend))
            found = []
            for nan in (0x7FC00000, 0x7FC00001, 0x7FC000FF, 0x7FD55555, -0x3FFFFF):
                logp = torch.full((81,), -0.5)
                logp.view(torch.int32)[[5, 40, 60]] = nan
                logp = logp.to(batch.device)
                advantages = torch.tensor([1.0, -2.0], device=batch.device)
                old_logp = torch.full_like(logp, -0.6)
                out = hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate, backend=backend)
                assert out.metrics["nan_tokens"].item() == 3, backend
                assert out.grad[[5, 40, 60]].tolist() == [0.0] * 3, backend
                found.append(bits(out.grad, out.loss))
            assert all(each == found[0] for each in found), backend


@pytest.mark.parametrize("penalty", PENALTIES[1:], ids=lambda k: f"{k.estimator.name}-{k.gradient.name}")
def test_penalties_at_infinite_log_ratios(penalty, native_backends):
    example = testing.random_policy_loss(
        0, gates.dapo(), {"weights", "kl"}, penalty=penalty, layout=Layout((6,), 0, "none", False, 9)
    )
    old, reference = example.old_logp.clone(), example.keywords["ref_logp"].clone()
    old[1], old[2], reference[3], reference[4] = -math.inf, math.inf, -math.inf, math.inf
    example = example._replace(old_logp=old).given(ref_logp=reference)
    factors = hpo.entropy.Selection(kl_weight=torch.tensor([1.5, -0.5, 2.0, 0.5, -2.0, 0.0]))
    for each in (example, example.given(selection=factors)):
        expected = testing.expect_policy_loss(each)
        for backend in native_backends:
            assert_exact(backend, each, expected)


@pytest.mark.parametrize("gate", [gates.dapo(), gates.gspo(0.1, 0.2), gates.reinforce()], ids=lambda gate: gate.name)
def test_advantages_and_weights_that_are_not_finite(gate, native_backends):
    example = testing.random_policy_loss(0, gate, {"weights", "kl"}, layout=Layout((3, 2, 4, 2), 0, "none", False, 3))
    advantages, weights = example.advantages.clone(), example.keywords["weights"].clone()
    advantages[0], advantages[1], weights[2] = math.nan, math.inf, math.inf
    weights[0] = weights[1] = weights[3] = 0.25
    example = example._replace(advantages=advantages).given(weights=weights)
    expected = testing.expect_policy_loss(example)
    for backend in native_backends:
        out = assert_exact(backend, example, expected)
        assert out.metrics["bad_advantages"].item() == 9 and torch.isfinite(out.grad).all(), backend


@pytest.mark.parametrize("drift", [0.0, 1e-4])
def test_the_reference_computes_a_long_row_in_float64(drift):
    """Means and gradients over 2^16 tokens, of log-probabilities in float32 as trainers have them."""
    draw = torch.Generator().manual_seed(1)
    old = -3 * torch.rand(2**16, generator=draw)
    logp = old + drift * torch.randn(2**16, generator=draw)
    batch, gate = hpo.PackedBatch.from_lengths([2**16]), hpo.gates.gspo(0.01, 0.01)
    gradients = []
    for leaf in (logp.clone().requires_grad_(), logp.double().requires_grad_()):
        anchor = old.to(leaf.dtype)
        hpo.policy_loss(leaf, anchor, torch.ones(1, dtype=leaf.dtype), batch, gate, backend="reference").loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1].float(), rtol=1e-7, atol=0)
