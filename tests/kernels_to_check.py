"""Kernels for check(): one that is right, as careful as hpo_core, and others with the faults that kernels have."""

import torch

import hpo_core as hpo
from hpo_core.reference.segments import row_of_token

# ------------------------------------------------------------------------------------------------------- right kernels


def log_ratio(logp, old_logp, valid):
    """The log-ratio, saturated at +-60 with its slope kept; 0 at tokens that must not be read."""
    old_logp = logp.detach() if old_logp is None else old_logp
    x = torch.where(valid, logp, 0.0) - torch.where(valid, old_logp, 0.0)
    return x.detach().clamp(-60, 60) + (x - x.detach())


def rows_and_mask(batch, tokens):
    row = row_of_token(batch.cu_seqlens, tokens)
    return row, (row >= 0) if batch.mask is None else (row >= 0) & batch.mask


def at_tokens(values, row):
    return torch.cat((values, values.new_zeros(1)))[row]  # row -1: the zero at the end


def clip(ratio, bounds, negative):
    low, high = torch.tensor(bounds.low)[negative], torch.tensor(bounds.high)[negative]
    return torch.where(ratio < low, low, torch.where(ratio > high, high, ratio))


def eager_ppo(logp, old_logp, advantages, batch, *, gate, weights):
    """PPO in eager PyTorch, as careful as hpo_core."""
    row, valid = rows_and_mask(batch, logp.numel())
    advantage = at_tokens(advantages, row)
    ratio = clip(log_ratio(logp, old_logp, valid).exp(), gate.token, (advantage < 0).long())
    return torch.where(valid, -(at_tokens(weights, row) * advantage) * ratio, 0.0).sum()


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - 1 - (ref_logp - logp)


def padded_ppo(logp, old_logp, advantages, mask, *, weights, ref_logp=None, kl=None, off_by_one=False):
    old_logp = logp.detach() if old_logp is None else old_logp
    x = torch.where(mask, logp - old_logp, 0.0)
    ratio = (x.detach().clamp(-60, 60) + (x - x.detach())).exp()
    loss = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    if kl is not None:
        s = torch.where(mask, logp - ref_logp, 0.0)
        loss = loss + kl.beta * ((-s).exp() - 1 + s)
    if off_by_one:
        mask = mask.roll(1, -1)
    return (torch.where(mask, loss, 0.0) * weights[:, None]).sum()


# ---------------------------------------------------------------------------------------------------- broken kernels


def masked_read(logp, old_logp, advantages, batch, *, gate, weights):
    """Multiplies by the mask: 0 * NaN is NaN."""
    row, valid = rows_and_mask(batch, logp.numel())
    advantage = at_tokens(advantages, row)
    everywhere = torch.ones_like(valid)
    ratio = clip(log_ratio(logp, old_logp, everywhere).exp(), gate.token, (advantage < 0).long())
    return (valid.float() * -(at_tokens(weights, row) * advantage) * ratio).sum()


def border_crossing(values, batch, first, last, *, boundary, invalid):
    """Treats the pack as one row."""
    whole = hpo.PackedBatch(batch.cu_seqlens[[0, -1]], batch.mask, total_tokens=batch.total_tokens)
    return hpo.entropy.window_mean(values, whole, first, last, boundary=boundary, invalid=invalid, backend="reference")


def biased_std(rewards, group_ids):
    return hpo.advantages.grpo(rewards, group_ids, ddof=0, backend="reference")


def wrong_tie(logp, old_logp, advantages, batch, *, gate, weights):
    """A ratio at its bound counts as clipped: value right, gradient 0."""
    row, valid = rows_and_mask(batch, logp.numel())
    advantage = at_tokens(advantages, row)
    negative = (advantage < 0).long()
    ratio = log_ratio(logp, old_logp, valid).exp()
    low, high = torch.tensor(gate.token.low)[negative], torch.tensor(gate.token.high)[negative]
    clipped = torch.where(ratio <= low, low, torch.where(ratio >= high, high, ratio))
    return torch.where(valid, -(at_tokens(weights, row) * advantage) * clipped, 0.0).sum()


def ignored_stride(logp, old_logp, advantages, batch, *, gate, weights):
    """Reads logp as if it were contiguous."""
    memory = logp.as_strided((logp.numel(),), (1,))
    return eager_ppo(memory, old_logp, advantages, batch, gate=gate, weights=weights)
