"""Logits on which log-probabilities and entropies lose digits: confident tokens, offsets, masked vocabularies."""

import math

import torch


def normal(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(below, *shape, seed=0):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def upstreams(targets):
    a, b = normal(2, *targets.shape, seed=9, scale=1.0)
    return a, b


def with_margin(logits, targets, margin):
    return logits.scatter(-1, targets[:, None], logits.amax(-1, keepdim=True) + margin)


def masked(logits, targets):
    """Two thirds of the vocabulary, the first 600 tokens among them, are out of the support; targets are in it."""
    out = (torch.arange(logits.shape[-1]) % 3 > 0) | (torch.arange(logits.shape[-1]) < 600)
    return logits.masked_fill(out & (torch.arange(logits.shape[-1]) != targets[:, None]), -math.inf)


ADVERSARIAL = {
    "plain": lambda x, y: x,
    "flat": lambda x, y: x * 0.0,
    "margin 6": lambda x, y: with_margin(x, y, 6.0),
    "margin 25": lambda x, y: with_margin(x, y, 25.0),
    "margin 36": lambda x, y: with_margin(x, y, 36.0),
    "margin 20, offset 40": lambda x, y: with_margin(x, y, 20.0) + 40.0,
    "all about -300": lambda x, y: x - 300.0,
    "all about 3e4": lambda x, y: x + 3e4,
    "masked": masked,
    "masked, margin 12": lambda x, y: with_margin(masked(x, y), y, 12.0),
    "ascending": lambda x, y: (x * 4).sort(-1).values,
    "descending": lambda x, y: (x * 4).sort(-1, descending=True).values,
    "wide": lambda x, y: x * 40.0,
}
