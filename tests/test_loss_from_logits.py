"""policy_loss_from_logits: the two calls, to the bit, with the gradient of the logits made while they are at hand."""

import math

import pytest
import torch
from breadth import is_interpreted
from conftest import NATIVE

import hpo_core as hpo
from hpo_core import gates, loss_from_logits

native = pytest.mark.parametrize("backend", NATIVE)
V = 37


def data(dtype=torch.float32, seed=0):
    """Rows of several lengths, an empty one among them, with holes; logits and targets are NaN and wrong there."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [5, 0, 9, 3, 4]
    total = sum(lengths)
    mask = torch.rand(total, generator=draw) < 0.8
    batch = hpo.PackedBatch.from_lengths(lengths, mask=mask).without_first_tokens()
    logits = (2 * torch.randn(total, V, generator=draw)).to(dtype)
    targets = torch.randint(0, V, (total,), generator=draw)
    logp = torch.log_softmax(logits.float() / 0.7, -1).gather(-1, targets.roll(-1)[:, None]).squeeze(-1)
    old = logp.roll(1) + 0.3 * torch.randn(total, generator=draw)
    advantages = torch.randn(len(lengths), generator=draw)
    logits[~batch.mask.roll(-1)], targets[~batch.mask] = math.nan, 10**6
    return logits, targets, old, advantages, batch


def two_calls(logits, targets, old, advantages, batch, gate, **options):
    logp, entropy = hpo.token_logprobs(logits, targets, 0.7, batch=batch, backend=options.get("backend"))
    out = hpo.policy_loss(logp, old, advantages, batch, gate, entropy=entropy.detach(), **options)
    return out.loss, out.metrics, logp, entropy


def both(logits, *given, factor=1.0, inplace=False, **options):
    """Loss, metrics, logp, entropy and the gradient of the logits, of one call and of two."""
    results = []
    for run in (hpo.policy_loss_from_logits, two_calls):
        leaf = logits.clone().requires_grad_()
        fused = run is hpo.policy_loss_from_logits
        keywords = {"temperature": 0.7, "inplace_gradient": inplace} if fused else {}
        loss, metrics, logp, entropy = run(leaf * 1 if inplace else leaf, *given, **keywords, **options)
        (loss * factor).backward()
        results.append((loss.detach(), metrics.vector, logp.detach(), entropy.detach(), leaf.grad))
    return results


GATES = {
    "ppo_clip": (gates.ppo_clip(), {}),
    "cispo": (gates.cispo(), {}),
    "sapo": (gates.sapo(), {}),
    "tis": (gates.tis(), {"rollout_logp": True}),
    "kl": (gates.dapo(), {"ref_logp": True, "kl": hpo.kl.k3(0.1)}),
    "kl_weight": (gates.dapo(), {"ref_logp": True, "kl": hpo.kl.k3(0.1), "kl_weight": True}),
    "weights": (gates.dapo(), {"token_weight": True, "token_mask": True}),
}
FEW = ("sapo", "weights")  # in the interpreter


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, marks=[pytest.mark.long] if is_interpreted(backend) and name not in FEW else [])
        for backend in NATIVE
        for name in GATES
    ],
)
def test_one_call_is_two(name, backend, monkeypatch):
    """Over chunks of two rows of logits, of which rows of the batch are cut."""
    monkeypatch.setattr(loss_from_logits, "_CHUNK", 2 * 4 * V)
    gate, asked = GATES[name]
    logits, targets, old, advantages, batch = data()
    draw = torch.Generator().manual_seed(3)
    options = {key: value for key, value in asked.items() if key == "kl"}
    for key in ("rollout_logp", "ref_logp"):
        if key in asked:
            options[key] = old + 0.1 * torch.randn(old.shape, generator=draw)
    if "token_weight" in asked:
        options |= {"token_weight": torch.rand(old.shape, generator=draw), "token_mask": old > old.median()}
    if "kl_weight" in asked:
        options["selection"] = hpo.entropy.Selection(kl_weight=torch.rand(old.shape, generator=draw))
    for inplace in (False, True):
        one, two = both(logits, targets, old, advantages, batch, gate, inplace=inplace, backend=backend, **options)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))
        read = batch.mask.roll(-1)
        assert one[-1][read].any() and (one[-1][~read] == 0).all()


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_and_an_incoming_gradient(dtype, backend):
    one, two = both(*data(dtype), gates.ppo_clip(), backend=backend)
    assert one[-1].dtype == dtype and all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))
    one, two = both(*data(), gates.ppo_clip(), factor=3.0, backend=backend)
    assert torch.allclose(one[-1], two[-1], 1e-6, 0)


@pytest.mark.parametrize("backend", ["reference", *NATIVE])
def test_padded_logits_on_policy_with_an_advantage_for_each_token(backend, monkeypatch):
    monkeypatch.setattr(loss_from_logits, "_CHUNK", 3 * 4 * V)
    draw = torch.Generator().manual_seed(5)
    model = torch.randn(3, 8, V, generator=draw)
    tokens = torch.randint(0, V, (3, 8), generator=draw)
    mask = torch.rand(3, 8, generator=draw) < 0.7
    mask[:, 0] = False
    batch = hpo.PackedBatch.from_padded(mask)
    advantages = torch.randn(3, 8, generator=draw)
    given = (tokens, None, advantages, batch, gates.reinforce())
    one, two = both(model, *given, advantage_level="token", backend=backend)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, two, strict=True))
    plain = hpo.policy_loss_from_logits(model, *given, temperature=0.7, advantage_level="token", backend=backend)
    assert torch.equal(plain.loss, one[0]) and not plain.loss.requires_grad


def test_memory_and_a_second_backward():
    logits, *given = data()
    leaf = logits.requires_grad_()
    computed = leaf * 1
    loss = hpo.policy_loss_from_logits(computed, *given, inplace_gradient=True).loss
    version = computed._version
    loss.backward()
    assert version > 0
    with pytest.raises(ValueError, match="loss: its gradient has been handed on"):
        loss.backward()
    loss = hpo.policy_loss_from_logits(leaf * 1, *given).loss
    leaf.grad = None
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward()
    assert torch.equal(leaf.grad, 2 * once)


@pytest.mark.parametrize(
    ("gate", "options", "error", "message"),
    [
        (gates.gspo(), {}, ValueError, "gate: expected one on tokens alone, got 'gspo'"),
        (gates.fiberpo(), {}, ValueError, "gate: expected one on tokens alone, got 'fiberpo'"),
        (gates.opsm(0.1), {}, ValueError, "gate: expected one on tokens alone"),
        (None, {"report": ("tokens",)}, ValueError, "report, process_group: .* call token_logprobs and policy_loss"),
        (None, {"inplace_gradient": True}, ValueError, "inplace_gradient: expected logits that a model has computed"),
        (None, {"temperature": 0.0}, ValueError, "temperature: expected"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_named(gate, options, error, message):
    logits, *given = data()
    with pytest.raises(error, match=message):
        hpo.policy_loss_from_logits(logits.requires_grad_(), *given, gate, **options)
