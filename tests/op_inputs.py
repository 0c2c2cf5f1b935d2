"""Random inputs of a loss, its gradient, and the operators that run."""

from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hpo_core as hpo
from hpo_core import testing

GATES = {
    "token": hpo.gates.ppo_clip(0.1, 0.2, ratio_dual=2.0),
    "trajectory": hpo.gates.gspo(0.05, 0.05),
    "score": hpo.gates.cispo(1.2),
}


class Inputs(NamedTuple):
    logp: torch.Tensor
    old_logp: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor
    batch: hpo.PackedBatch

    def leaf(self):
        return self.logp.clone().requires_grad_()

    def loss(self, logp, gate=None, **keywords):
        gate = GATES["token"] if gate is None else gate  # the Dynamo of torch 2.10 takes no gate as a method's default
        return hpo.policy_loss(logp, self.old_logp, self.advantages, self.batch, gate, **keywords).loss


def inputs(rows=6, length=7, backend="cpu", **ids):
    """Random inputs on the device of the backend."""
    generator, device = torch.Generator().manual_seed(rows * 1000 + length), testing.device_of(backend)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    tokens = rows * length
    logp = -normal(tokens).abs()
    ids = {"group_ids": torch.arange(rows) // 2, **ids}
    batch = hpo.PackedBatch.from_lengths([length] * rows, mask=(normal(tokens) > -1).cpu(), **ids).to(device)
    return Inputs(logp, logp + 0.3 * normal(tokens), normal(rows), normal(tokens).abs(), batch)


def gradient(loss_of, given):
    leaf = given.leaf()
    return torch.autograd.grad(loss_of(leaf), leaf)[0]


class Log(TorchDispatchMode):
    """Records every operator that runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))
