"""Liger's GRPO losses against our gates, where the definitions agree, and measured where they do not; the table stands
in docs/gate_traps.md. Its fused linear loss is plain PyTorch, its Triton kernels run in the interpreter."""

import dataclasses
import functools
import math
import os

import pytest
import torch
from breadth import at_length, few  # noqa: F401 (the first is a fixture)
from lazily import Lazy, skip_without

import hpo_core as hpo
from hpo_core import aggregation, gates

skip_without("liger_kernel")
chunked, fused = Lazy("liger_kernel.chunked_loss.grpo_loss"), Lazy("liger_kernel.transformers.grpo_loss")
grpo_loss = Lazy("liger_kernel.ops.grpo_loss")

pytestmark = pytest.mark.peers

ROWS, LENGTH, VOCABULARY, HIDDEN = 6, 20, 11, 5


class Batch:
    """Padded rows, one of them empty, in float64; from a linear layer, so that every way in gets the same."""

    def __init__(self, seed):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=draw)
        lengths[seed % ROWS] = 0
        self.mask = torch.arange(LENGTH) < lengths
        self.hidden = torch.randn(ROWS, LENGTH, HIDDEN, generator=draw).double()
        self.matrix = torch.randn(VOCABULARY, HIDDEN, generator=draw).double()
        self.ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=draw)
        self.logits = self.hidden @ self.matrix.T
        self.logp = self.of_logits(self.logits)
        self.old = self.logp + 0.2 * torch.randn(ROWS, LENGTH, generator=draw)
        self.ref = self.logp + 0.3 * torch.randn(ROWS, LENGTH, generator=draw)
        self.advantages = torch.randn(ROWS, generator=draw).double()
        self.sampler = torch.rand(ROWS, LENGTH, generator=draw).double() + 0.5
        self.packed = hpo.PackedBatch.from_padded(self.mask)

    def of_logits(self, logits):
        return torch.log_softmax(logits, -1).gather(-1, self.ids[..., None])[..., 0]


def of_liger(batch, loss_type, **others):
    """Loss and dL/dlogp of the function behind its matrix product."""
    logp, mask = batch.logp.clone().requires_grad_(), batch.mask.long()
    others = {"beta": 0.0, **others}
    loss, _ = chunked.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        logp, mask, batch.advantages, mask, ref_per_token_logps=batch.ref, old_per_token_logps=batch.old,
        loss_type=loss_type, **others,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, logp)
    return loss.detach(), grad


def of_ours(batch, gate, weights, engine, logp=None, **others):
    """The same of ours. Weights are float32 numbers, and so in error by 2^-24 at most."""
    dtype = torch.float64 if engine == "reference" else torch.float32
    others = {"old_logp": batch.old, "weights": weights, **others}
    cast = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in others.items()
    }
    leaf = (batch.logp if logp is None else logp).to(dtype)
    return hpo.policy_loss_and_grad(
        leaf, advantages=batch.advantages.to(dtype), batch=batch.packed, gate=gate, backend=engine, **cast
    )


def differences(theirs, out):
    """The differences of loss and of gradient, relative to the largest element."""
    size = theirs[1].abs().max()
    return (
        (abs(out.loss - theirs[0]) / theirs[0].abs()).item(),
        ((out.grad.double() - theirs[1]).abs().max() / size).item(),
    )


# Liger divides by all rows, empty ones too; it takes no denominator but num_items_in_batch.
MEAN = aggregation.token_mean
OF_ROWS = functools.partial(aggregation.seq_mean_token_mean, total=ROWS)
SUMS = functools.partial(aggregation.seq_mean_token_sum, total=ROWS)
FIXED = functools.partial(aggregation.fixed_length, length=32)
PPO, SEQUENCES = {"epsilon_low": 0.1, "epsilon_high": 0.15}, {"importance_sampling_level": "sequence"}
NARROW = {"epsilon_low": 0.02, "epsilon_high": 0.03, **SEQUENCES}
CLIP, GSPO = gates.ppo_clip(0.1, 0.15), gates.gspo(0.02, 0.03)

# name: (its loss type, its keywords, our gate, our weights)
SAME = {
    "grpo": ("grpo", PPO, CLIP, OF_ROWS),
    "bnpo": ("bnpo", PPO, CLIP, MEAN),
    "dr_grpo": ("dr_grpo", PPO | {"max_completion_length": 32}, CLIP, FIXED),
    "dapo": ("dapo", PPO, CLIP, MEAN),
    "dapo, in micro-batches": ("dapo", PPO | {"num_items_in_batch": 200}, CLIP, functools.partial(MEAN, total=200)),
    "dapo, delta": ("dapo", PPO | {"delta": 1.2}, gates.ppo_clip(0.1, 0.15, ratio_dual=1.2), MEAN),
    "cispo": ("cispo", {"epsilon_high": 1.1}, gates.cispo(1.1), MEAN),
    "sapo": ("sapo", {"sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.3}, gates.sapo(0.8, 1.3), OF_ROWS),
    "vespo": ("vespo", {}, gates.vespo(), MEAN),
    "grpo, sequences": ("grpo", NARROW, GSPO, OF_ROWS),
    "bnpo, sequences": ("bnpo", NARROW, GSPO, MEAN),
    "dapo, sequences": ("dapo", NARROW, GSPO, MEAN),
    "dr_grpo, sequences": ("dr_grpo", NARROW | {"max_completion_length": 32}, GSPO, FIXED),
    "luspo, sequences": ("luspo", NARROW, GSPO, SUMS),
}
every_type = pytest.mark.parametrize("name", SAME)


def extras(name, batch):
    """The options that both sides have: a sampler's weights, the penalty k3 and its corrected form."""
    if name.startswith("luspo"):
        return [({}, {})]
    k3 = {"kl": hpo.kl.k3(0.3), "ref_logp": batch.ref}
    corrected = {"kl": hpo.kl.k3(0.3, gradient="importance"), "ref_logp": batch.ref}
    given = [({}, {}), ({"beta": 0.3}, k3)]
    if name != "vespo":
        given.append(({"vllm_is_ratio": batch.sampler}, {"token_weight": batch.sampler}))
    if not name.endswith("sequences"):
        given.append(({"beta": 0.3, "use_bias_correction_kl": True}, corrected))
    return given


@pytest.mark.usefixtures("at_length")
@every_type
def test_liger_agrees(name, backend):
    loss_type, keywords, gate, weights = SAME[name]
    for seed in few(backend, range(3)):
        batch = Batch(seed)
        for theirs, ours in few(backend, extras(name, batch), 2):
            expected = of_liger(batch, loss_type, **keywords, **theirs)
            for engine, near in (("reference", 3e-7), (backend, 5e-6)):
                out = of_ours(batch, gate, weights(batch.packed), engine, **ours)
                assert max(differences(expected, out)) < near


@every_type
def test_its_module_agrees(name, backend):
    """From hidden states: the gradient of its fused linear loss is ours times that of the log-softmax."""
    loss_type, keywords, gate, weights = SAME[name]
    batch = Batch(1)
    keywords = {key: value for key, value in keywords.items() if key != "num_items_in_batch"}
    module = chunked.LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, chunk_size=2, loss_type=loss_type, **keywords
    )
    results = []
    for loss_of in (
        lambda hidden, matrix: module(
            hidden, matrix, batch.ids, batch.mask.long(), batch.advantages, old_per_token_logps=batch.old,
            num_items_in_batch=SAME[name][1].get("num_items_in_batch"),
        )[0],
        lambda hidden, matrix: hpo.policy_loss(
            batch.of_logits(hidden @ matrix.T).float(), batch.old.float(), batch.advantages.float(), batch.packed,
            gate, weights=weights(batch.packed), backend=backend,
        ).loss,
    ):  # fmt: skip
        leaves = batch.hidden.clone().requires_grad_(), batch.matrix.clone().requires_grad_()
        loss = loss_of(*leaves)
        results.append((loss.detach().double(), *torch.autograd.grad(loss, leaves)))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6 * float(theirs.abs().max()))


in_the_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="without the interpreter Liger's Triton kernels need a GPU"
)


def of_its_kernels(batch, loss_type, **keywords):
    """Loss and logits, of which it wants those of one token more."""
    logits = torch.nn.functional.pad(batch.logits.float(), (0, 0, 0, 1)).requires_grad_()
    keywords = {key.replace("epsilon", "eps"): value for key, value in keywords.items()}
    loss, *_ = fused.triton_grpo_loss(
        logits, batch.old.float(), None, batch.ids, batch.advantages.float(), batch.mask.float(), temperature=1.0,
        beta=0.0, inplace=False, loss_type=loss_type, reduce=True, **keywords,
    )  # fmt: skip
    return loss, logits


def assert_its_kernels_are(out, batch, loss_type, **keywords):
    loss, logits = of_its_kernels(batch, loss_type, **keywords)
    (grad,) = torch.autograd.grad(loss, logits)
    leaf = batch.logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(batch.of_logits(leaf), leaf, out.grad)
    assert loss.item() == pytest.approx(out.loss.item(), rel=2e-5)
    assert (grad[:, :-1] - expected).abs().max() <= 2e-5 * expected.abs().max()


@in_the_interpreter
@pytest.mark.parametrize("name", [name for name in SAME if not name.startswith("luspo")])
def test_its_kernels_agree(name):
    loss_type, keywords, gate, weights = SAME[name]
    batch = Batch(2)
    out = of_ours(batch, gate, weights(batch.packed), "reference")
    assert_its_kernels_are(out, batch, loss_type, **keywords)


# ------------------------------------------------------------- where it differs: what it computes, and by how much
#
# Each number is the difference of the loss and that of the gradient, relative to Liger's, on one batch, and stands in
# docs/gate_traps.md.


@pytest.fixture
def batch():
    return Batch(2)


def ours(batch, gate, weights, **others):
    return of_ours(batch, gate, weights, "reference", **others)


def assert_differs(theirs, out, loss, grad):
    assert differences(theirs, out) == pytest.approx((loss, grad), rel=0.02)


def test_it_counts_empty_rows(batch):
    theirs = of_liger(batch, "grpo", **PPO)
    assert_differs(theirs, ours(batch, CLIP, aggregation.seq_mean_token_mean(batch.packed)), 0.2, 0.2)


def test_a_delta_below_the_clip_binds_the_other_sign(batch):
    """For A >= 0 it is the upper bound; for A < 0 the dual clip is at 1 + epsilon_high then, not at delta."""
    theirs = of_liger(batch, "dapo", **PPO, delta=1.05)
    same = gates.RatioGate("delta", gates.Clip((0.0, 0.9), (1.05, 1.15)))
    assert max(differences(theirs, ours(batch, same, MEAN(batch.packed)))) < 3e-7
    assert_differs(theirs, ours(batch, gates.ppo_clip(0.1, 0.15, ratio_dual=1.15), MEAN(batch.packed)), 0.0307, 0.963)


def test_its_luspo_of_tokens(batch):
    """Every position counts, padding too, which has a gradient; a row weighs its length over the padded length."""
    weights = batch.mask.sum(1) / (ROWS * LENGTH)
    theirs, out = of_liger(batch, "luspo", **PPO), ours(batch, CLIP, weights)
    assert theirs[1][~batch.mask].any()
    assert not out.grad[~batch.mask].any()
    torch.testing.assert_close(out.grad[batch.mask], theirs[1][batch.mask], rtol=1e-6, atol=0)
    assert_differs(theirs, out, 0.717, 1.0)


@in_the_interpreter
def test_luspo_of_its_kernels(batch):
    """Its two implementations differ: sequences too weigh their length over the padded length; padding does not count.

    The gradient of tokens is left alone: its kernel reads memory behind a tensor [B, 1] as if that were [B, L].
    """
    weights = batch.mask.sum(1) / (ROWS * LENGTH)
    assert_its_kernels_are(ours(batch, GSPO, weights), batch, "luspo", **NARROW)
    fused, kernels = of_liger(batch, "luspo", **NARROW)[0].item(), of_its_kernels(batch, "luspo", **NARROW)[0].item()
    assert kernels / fused == pytest.approx(0.287, rel=0.01)
    of_tokens, _ = of_its_kernels(batch, "luspo", **PPO)
    assert of_tokens.item() == pytest.approx(ours(batch, CLIP, weights).loss.item(), rel=2e-5)


def test_a_samplers_weight_in_its_vespo(batch):
    """It is a factor of W, as in TRL: our Channel.TOTAL. Its product runs over padding, too."""
    gate, weights = dataclasses.replace(gates.vespo(), channel=gates.Channel.TOTAL), MEAN(batch.packed)
    clean = batch.sampler.where(batch.mask, 1.0)
    out = ours(batch, gate, weights, rollout_logp=batch.old - batch.sampler.log())
    theirs = of_liger(batch, "vespo", vllm_is_ratio=clean)
    assert max(differences(theirs, out)) < 3e-7
    assert_differs(theirs, ours(batch, gates.vespo(), weights, token_weight=batch.sampler), 1.178, 0.928)
    assert_differs(of_liger(batch, "vespo", vllm_is_ratio=batch.sampler), out, 0.246, 0.608)


def test_its_corrected_penalty_of_sequences(batch):
    """Multiplied by the sequence's ratio; ours by the token's."""
    penalty = {"ref_logp": batch.ref, "kl": hpo.kl.k3(0.3, gradient="importance")}
    theirs = of_liger(batch, "grpo", **NARROW, beta=0.3, use_bias_correction_kl=True)
    _, grad = differences(theirs, ours(batch, GSPO, OF_ROWS(batch.packed), **penalty))
    assert grad == pytest.approx(0.0717, rel=0.02)


def test_it_reads_what_is_masked(batch):
    """A NaN in the padding is multiplied by 0."""
    clean = ours(batch, CLIP, MEAN(batch.packed)).loss
    batch.logp = batch.logp.where(batch.mask, math.nan)
    assert of_liger(batch, "dapo", **PPO)[0].isnan()
    assert torch.equal(ours(batch, CLIP, MEAN(batch.packed)).loss, clean)


def test_every_loss_type_is_compared():
    assert {loss_type for loss_type, *_ in SAME.values()} == set(grpo_loss.module()._str_to_loss_type)
