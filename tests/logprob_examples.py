"""Calls of token_logprobs, what one writes by hand, and rows of every kind."""

import math

import pytest
import torch
from adversarial import integers, normal, upstreams
from conftest import NATIVE

import hpo_core as hpo
from hpo_core.specs import LogitRows

TYPES = (torch.float32, torch.bfloat16, torch.float16)
BOTH = ("reference", *NATIVE)
IGNORED = -100

both = pytest.mark.parametrize("backend", BOTH)
native = pytest.mark.parametrize("backend", NATIVE)
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


def call(logits, targets, temperature=1.0, upstream=None, backend="cpu", **keywords):
    """logp, entropy and the gradient of the logits for upstream gradients of both."""
    leaf = logits.detach().requires_grad_()
    logp, entropy = hpo.token_logprobs(leaf, targets, temperature, backend=backend, **keywords)
    a, b = upstream or upstreams(targets)
    (grad,) = torch.autograd.grad((logp, entropy), leaf, (a.to(logp.dtype), b.to(logp.dtype)))
    return logp.detach(), entropy.detach(), grad


def exact(logits, targets, temperature=1.0, upstream=None):
    """The reference in float64, whose rows the tests below compare with loops over Python's numbers."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()
    return call(logits.double(), targets, temperature, upstream, backend="reference")


def eager(logits, targets, temperature, upstream):
    """The formula as one writes it without this library, in float32."""
    leaf = logits.float().requires_grad_()
    logps = torch.log_softmax(leaf / temperature, -1)
    logp = logps.gather(-1, targets[..., None]).squeeze(-1)
    entropy = -torch.where(logps.isinf(), 0.0, logps.exp() * logps.masked_fill(logps.isinf(), 0.0)).sum(-1)
    (grad,) = torch.autograd.grad((logp, entropy), leaf, upstream)
    return logp.detach(), entropy.detach(), grad


def row_by_hand(row, target, temperature):
    """logp, entropy, and the gradients of both, of numbers of Python, without a cancellation."""
    top = max(row)
    weights = [math.exp((x - top) / temperature) for x in row]
    first = row.index(top)
    others = math.fsum(w for at, w in enumerate(weights) if at != first)
    total = 1 + others
    p = [w / total for w in weights]
    distance = math.fsum((top - x) / temperature * w for x, w in zip(row, p, strict=True) if w > 0)
    rest = math.fsum(w for at, w in enumerate(p) if at != target) if row[target] > -math.inf else 0.0
    of_logp = [(rest if at == target else -w) / temperature for at, w in enumerate(p)]
    of_entropy = [
        -w * ((x - top) / temperature + distance) / temperature if w > 0 else 0.0 for x, w in zip(row, p, strict=True)
    ]
    return (row[target] - top) / temperature - math.log1p(others), math.log1p(others) + distance, of_logp, of_entropy


def rows_of(logits, targets, **others):
    given = {"temperatures": None, "temperature": 0.7, "floors": None, "first": 0, "vocabulary": logits.shape[-1]}
    return LogitRows(logits, targets, ignore_index=IGNORED, **given | others)


def floored(dtype):
    """Rows of every kind: all tokens are in the support, some, one, the target is not, ignored, NaN, none is."""
    logits, targets = normal(7, 1100).to(dtype), integers(1100, 7)
    targets[4] = IGNORED
    logits[5, 33] = math.nan
    most, target = logits[3].amax(), logits.float().gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1)
    floors = torch.stack((torch.tensor(-math.inf), target[1] - 1, logits[2].float().amax(), most / 2, most, most * 0,
                          torch.tensor(1e30)))  # fmt: skip
    logits[3, targets[3]] = most.float() / 4
    return logits, targets, floors
