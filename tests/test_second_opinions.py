"""verl's own loss functions against our gates, where definitions agree; docs/gate_traps.md says where they do not."""

import functools
import itertools

import pytest
import torch
from breadth import at_length, few  # noqa: F401 (the first is a fixture)
from lazily import Lazy, skip_without

import hpo_core as hpo
from hpo_core import aggregation, gates

skip_without("verl")
core_algos, workers = Lazy("verl.trainer.ppo.core_algos"), Lazy("verl.workers.config")

pytestmark = pytest.mark.peers

ROWS, LENGTH = 6, 24


class Batch:
    """Padded rows, one of them empty, in float64; verl's functions are plain PyTorch."""

    def __init__(self, seed):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=draw)
        lengths[seed % ROWS] = 0
        self.mask = torch.arange(LENGTH) < lengths
        self.old = (-torch.rand(ROWS, LENGTH, generator=draw) * 3 - 0.7).double()
        self.logp = self.old + 0.2 * torch.randn(ROWS, LENGTH, generator=draw)
        self.advantages = torch.randn(ROWS, generator=draw).double()
        self.is_weights = torch.rand(ROWS, LENGTH, generator=draw).double() + 0.5
        self.expanded = self.advantages[:, None].expand(ROWS, LENGTH).clone()


def of_verl(name, batch, mode, config, policy, is_weights):
    """Loss and dL/dlogp."""
    actor = workers.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
        policy_loss=workers.PolicyLossConfig(loss_mode=name, **policy), **config,
    )  # fmt: skip
    logp = batch.logp.clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=batch.old, log_prob=logp, advantages=batch.expanded, response_mask=batch.mask.double(),
        loss_agg_mode=mode, config=actor, rollout_is_weights=is_weights,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(loss, logp)
    return loss.detach(), grad


def kl_cov_inputs(batch, share):
    padded = hpo.PackedBatch.from_padded(batch.mask)
    taken = gates.kl_cov_mask(batch.logp.reshape(-1), batch.advantages, padded, share=share)
    return {"gate_inputs": gates.GateInputs(penalty_mask=taken.penalty_mask.view_as(batch.mask))}


def clip_cov_inputs(batch):
    """All eligible tokens are taken, so that verl's unseeded draw does not matter."""
    padded = hpo.PackedBatch.from_padded(batch.mask)
    kept = gates.clip_cov_mask(
        batch.logp.reshape(-1), batch.old.reshape(-1), batch.advantages, padded, seed=0, share=1.0, low=0.2, high=0.9
    )
    return {"gate_inputs": gates.GateInputs(token_mask=kept.token_mask.view_as(batch.mask))}


TOKEN, ROW = "token-mean", "seq-mean-token-mean"
# verl's name: (our gate, aggregation, fields of workers.ActorConfig, fields of its policy_loss, what our loss is given)
SAME = {
    "vanilla": (gates.ppo_clip(0.2, 0.25, 1.3), TOKEN, {"clip_ratio_high": 0.25, "clip_ratio_c": 1.3}, {}, None),
    "gspo": (gates.gspo_token(0.02, 0.03), ROW, {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03}, {}, None),
    "geo_mean": (gates.gmpo(0.1, 0.15), ROW, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}, {}, None),
    "cispo": (gates.cispo(1.25, 0.9), TOKEN, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.25}, {}, None),
    "sapo": (gates.sapo(0.9, 1.2), ROW, {"tau_pos": 0.9, "tau_neg": 1.2}, {}, None),
    "dppo_tv": (
        gates.dppo_tv(0.04, 0.03, 1.2),
        TOKEN,
        {"clip_ratio_low": 0.04, "clip_ratio_high": 0.03, "clip_ratio_c": 1.2},
        {},
        None,
    ),
    "dppo_kl": (gates.dppo_kl(0.004, 3.0), TOKEN, {"clip_ratio_low": 0.004, "clip_ratio_high": 0.004}, {}, None),
    "clip_cov": (
        gates.clip_cov(), TOKEN, {}, {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 0.9}, clip_cov_inputs
    ),
    "kl_cov": (
        gates.kl_cov(0.7), TOKEN, {}, {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7},
        functools.partial(kl_cov_inputs, share=0.1),
    ),
    "dro": (gates.dro(0.3), TOKEN, {}, {"dro_beta": 0.3}, None),
    "gpg": (gates.reinforce(), TOKEN, {}, {}, None),
}  # fmt: skip
WITHOUT_WEIGHTS = {"geo_mean", "kl_cov"}  # one takes their geometric mean, the other weighs the penalty
BY_ALL_ROWS = {"geo_mean"}  # verl divides by the number of rows, empty ones too


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", SAME)
def test_verl_agrees(name, backend):
    gate, mode, config, policy, given = SAME[name]
    weighted = (False,) if name in WITHOUT_WEIGHTS else (False, True)
    for seed, is_weighted in itertools.product(few(backend, range(4)), weighted):
        batch = Batch(seed)
        is_weights = batch.is_weights if is_weighted else None
        loss, grad = of_verl(name, batch, mode, config, policy, is_weights)
        padded = hpo.PackedBatch.from_padded(batch.mask)
        if mode == TOKEN:
            weights = aggregation.token_mean(padded)
        else:
            weights = aggregation.seq_mean_token_mean(padded, total=ROWS if name in BY_ALL_ROWS else None)
        keywords = {"token_weight": is_weights, "weights": weights, **(given(batch) if given else {})}
        for engine, dtype, near in (("reference", torch.float64, 2e-7), (backend, torch.float32, 3e-6)):
            cast = {
                key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                for key, value in keywords.items()
            }
            out = hpo.policy_loss_and_grad(
                batch.logp.to(dtype), batch.old.to(dtype), batch.advantages.to(dtype), padded, gate, backend=engine,
                **cast,
            )  # fmt: skip
            size = float(grad.abs().max())
            torch.testing.assert_close(out.loss.double(), loss, rtol=near, atol=near)
            torch.testing.assert_close(out.grad.double(), grad, rtol=0, atol=near * size)


def test_every_loss_of_verl_is_compared_or_explained():
    """bypass_mode corrects for the sampler, and then is vanilla or REINFORCE."""
    names = {name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("hpo_")}
    assert names - set(SAME) == {"bypass_mode"}
