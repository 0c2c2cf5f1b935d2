"""Estimators of steps that take the values of a critic."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..arguments import check_finite, constants, examines
from ..checks import check_device, check_dtype, check_shape, check_units
from ..segments import chains, scan
from ..specs import GroupTerm, Provenance
from .returns import check_discounts, generalised_advantages
from .terms import Term, about_group, as_advantages, combine, estimator, known
from .whitening import whiten


@estimator(Provenance.VERIFIED, level="step", tables=True)
def step_gae(
    step_rewards: torch.Tensor,
    values: torch.Tensor,
    trajectory_ids: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whitened: bool = True,
    eps: float = 1e-8,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """StepPO: GAE over the steps of each trajectory, whitened over *steps*, not tokens (arXiv 2604.18401). Returns
    ``[N]`` float32.

    ``d_j = r_j + gamma V_{j+1} - V_j``, ``A_j = d_j + gamma lambda A_{j+1}``, V 0 behind the last step; then
    ``(A - mean) / (std + eps)``, ddof 1.

    Args:
        step_rewards: ``[N]``. A reward or value that is NaN or infinite makes the advantages of its step and of the
            steps before it unknown: they are in no statistic and 0, as is that of a step in no trajectory. Where a
            trajectory was cut off, gamma times the critic behind it belongs to its last reward.
        values: ``[N]``, the critic at the last prompt token of each step, before its first response token.
        whitened: False leaves the advantages as they are; returns for the critic (:func:`~hpo_core.value_loss`) are
            those plus ``values``.

    Traps: discounts count steps; the same numbers per token discount far more.

    >>> step_gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]), torch.tensor([0, 0]), whitened=False)
    tensor([0.5000, 0.5000])
    """
    check_units(step_rewards=step_rewards, values=values, trajectory_ids=trajectory_ids)
    check_discounts(gamma=gamma, lam=lam)
    steps = chains(trajectory_ids, positions)
    advantages = generalised_advantages(step_rewards, values, steps, gamma, lam, backend=backend)
    if not whitened:
        return as_advantages(known(advantages), step_rewards, backend)
    compared = trajectory_ids >= 0
    advantages = about_group(advantages, step_rewards, None, mask=compared, backend=backend)
    return whiten(advantages, mask=compared, eps=eps, backend=backend)


@estimator(Provenance.VERIFIED, level="step")
def archer_td(
    first_critic: torch.Tensor,
    second_critic: torch.Tensor,
    values: torch.Tensor,
    *,
    second_values: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """ArCHer: ``A = min(Q1, Q2) - min(V1, V2)`` of utterances (arXiv 2402.19446). Returns ``[N]`` float32.

    Args:
        first_critic, second_critic: Q1 and Q2 ``[N]``. The authors' code takes its critics as they are trained, not the
            target copies that it keeps for their own targets.
        values, second_values: V1 and V2 ``[N]``. None: V1 alone.

    A token baseline goes in by ``policy_loss(advantages=)`` per token: subtract it from these advantages. An
    utterance for which a critic gives NaN gets 0.

    >>> archer_td(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([0.25]))
    tensor([0.2500])
    """
    check_units(first_critic=first_critic, second_critic=second_critic, values=values, second_values=second_values)
    value = values if second_values is None else torch.minimum(values, second_values)
    exact = torch.minimum(first_critic, second_critic).double() - value.double()
    return as_advantages(known(exact), first_critic, backend)


class HierarchicalAdvantages(NamedTuple):
    """HiPER's streams, ``[N]`` float32 each: for the tokens of actions, for those of sub-goals (0 but where a segment
    begins), and for those of the switch (None without a critic of it)."""

    low: torch.Tensor
    high: torch.Tensor
    switch: torch.Tensor | None


@estimator(Provenance.VERIFIED, level="step")
def hiper(
    step_rewards: torch.Tensor,
    trajectory_ids: torch.Tensor,
    switches: torch.Tensor,
    low_values: torch.Tensor,
    high_values: torch.Tensor,
    *,
    switch_values: torch.Tensor | None = None,
    is_truncated: torch.Tensor | None = None,
    gamma: float = 0.95,
    low_lam: float = 0.95,
    high_lam: float = 0.95,
    normalised: bool = True,
    eps: float = 1e-8,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> HierarchicalAdvantages:
    """HiPER's hierarchical advantage estimation: GAE inside sub-goals, and over sub-goals as single steps (arXiv
    2602.16165).

    A trajectory's turns are cut into segments where the policy switches its sub-goal. Inside one:
    ``d_t = r_t + gamma V+ - V_low_t``, V+ the next turn's V_low, or behind the segment's last turn V_high of the next
    segment, 0 behind the trajectory; the recursion with gamma lambda ends with the segment. Over segments of n turns:
    ``R = sum gamma^i r``, ``D = R + gamma^n V_high' - V_high``, ``A = D + gamma^n lambda A'``. With a critic of the
    switch its advantage is the return inside the segment, followed by V_high, minus that critic.

    Args:
        switches: ``[N]`` bool, whether a turn begins a sub-goal; the first turn of a trajectory always does.
        low_values, high_values: ``[N]``, the critics; of the second only the entries at switches count.
        switch_values: ``[N]``, of the switch; None: no such stream.
        is_truncated: ``[N]`` bool, whether the episode was cut off behind a turn that is the last of its trajectory:
            V_low of that turn, and V_high where its segment begins, then stand for the values behind it. None: all
            episodes end where they end, and nothing stands behind.
        low_lam, high_lam: lambda inside sub-goals and over them.
        normalised: each stream centred and scaled over its own turns, ddof 0: ``(A - mean) / (std + eps)``.

    An advantage that a NaN among rewards and values makes unknown is in no statistic and 0, as is that of a turn in no
    trajectory. The penalties of the authors on turns that keep a sub-goal: :func:`hiper_rewards`.

    >>> out = hiper(torch.tensor([0.0, 0.1, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64),
    ...             torch.tensor([True, False, True, False]), torch.tensor([0.3, 0.4, 0.5, 0.7]),
    ...             torch.tensor([0.35, 0.0, 0.55, 0.0]), normalised=False)
    >>> out.low, out.high
    (tensor([0.2808, 0.2225, 0.4358, 0.3000]), tensor([0.5843, 0.0000, 0.4000, 0.0000]))
    """
    check_units(
        step_rewards=step_rewards, trajectory_ids=trajectory_ids, low_values=low_values, high_values=high_values,
        switch_values=switch_values,
    )  # fmt: skip
    check_discounts(gamma=gamma, low_lam=low_lam, high_lam=high_lam)
    _check_turns(step_rewards, switches=switches, is_truncated=is_truncated)
    steps = chains(trajectory_ids, positions)
    reward, low, high = (steps.sorted(given).double() for given in (step_rewards, low_values, high_values))
    valid = steps.chain >= 0
    begins = steps.begins() | (valid & steps.sorted(switches))
    closes = torch.ones_like(begins)  # the last turn of a segment
    closes[:-1] = begins[1:]

    # Segments are chains of their own, because a gain of 0 would not keep a NaN of one segment from those before it.
    segments = chains(torch.where(valid, begins.cumsum(0), -1))
    cut = valid & steps.ends() & (steps.sorted(is_truncated) if is_truncated is not None else False)
    high_behind = torch.where(cut, segments.first(high), steps.following(high))

    def inside(values: torch.Tensor, gain: float) -> torch.Tensor:
        return scan(values, torch.full_like(values, gain), segments.cu_seqlens, backend)

    low_behind = torch.where(cut, low, torch.where(closes, steps.following(high), steps.following(low)))
    difference = reward + gamma * low_behind - low
    streams = [inside(difference, gamma * low_lam)]
    # The worth of a segment at each of its turns, V_high of the next one included.
    worth = inside(reward + gamma * torch.where(closes, high_behind, 0.0), gamma)
    # gamma^n and the difference of the next segment reach a turn through the turns between.
    gains = torch.full_like(reward, gamma).masked_fill(closes, gamma * high_lam)
    begun = torch.where(begins, worth - high, 0.0)
    later = scan(torch.where(closes, gamma * high_lam * steps.following(begun), 0.0), gains, steps.cu_seqlens, backend)
    streams.append(torch.where(begins, begun + later, 0.0))
    if switch_values is not None:
        streams.append(torch.where(valid, worth - steps.sorted(switch_values), 0.0))
    if normalised:
        turns = (valid, begins, valid)
        streams = [_normalised(stream, own, eps, backend) for stream, own in zip(streams, turns, strict=False)]
    finished = [as_advantages(known(steps.unsorted(stream)), step_rewards, backend) for stream in streams]
    return HierarchicalAdvantages(finished[0], finished[1], finished[2] if switch_values is not None else None)


@examines
@constants
def hiper_rewards(
    step_rewards: torch.Tensor,
    trajectory_ids: torch.Tensor,
    switches: torch.Tensor,
    *,
    is_changed: torch.Tensor | None = None,
    keep_penalty: float = -0.3,
    spread: bool = True,
    change_penalty: float = -0.3,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """HiPER's rewards: turns that keep their sub-goal pay for it (arXiv 2602.16165, official code). Returns ``[N]``
    float32.

    ``r + keep_penalty / T`` at each such turn of a trajectory of T turns, T > 1; plus ``change_penalty`` where the turn
    says that it keeps its sub-goal and writes another one, unless it is the first.

    Args:
        switches: ``[N]`` bool, whether a turn says that it begins a sub-goal.
        is_changed: ``[N]`` bool, whether its sub-goal differs from that of the turn before. None: nowhere.
        keep_penalty: -.3 for ALFWorld, -3.5 for WebShop.
        spread: False gives every such turn all of ``keep_penalty``, also in a trajectory of one turn: "fixed".

    Traps: the share of turns that keep, over their number, is ``1 / T`` whatever that number is: a trajectory pays for
    the share. The first turn counts like all others, although it begins a segment whatever it says.

    >>> hiper_rewards(torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.tensor([True, False, False]))
    tensor([ 0.0000, -0.1000, -0.1000])
    """
    check_units(step_rewards=step_rewards, trajectory_ids=trajectory_ids)
    _check_turns(step_rewards, switches=switches, is_changed=is_changed)
    check_finite(keep_penalty=keep_penalty, change_penalty=change_penalty)
    steps = chains(trajectory_ids, positions)
    turns = steps.unsorted(steps.ranks()[1]).double()
    keeps, exact = (trajectory_ids >= 0) & ~switches, step_rewards.double()
    pays, share = (keeps & (turns > 1), keep_penalty / turns) if spread else (keeps, keep_penalty)
    exact = torch.where(pays, exact + share, exact)
    if is_changed is not None:
        exact = torch.where(keeps & is_changed & ~steps.unsorted(steps.begins()), exact + change_penalty, exact)
    return as_advantages(exact, step_rewards, backend)


def _check_turns(step_rewards: torch.Tensor, **turns: torch.Tensor | None) -> None:
    """One bool ``[N]`` for every turn."""
    for name, given in turns.items():
        if given is not None:
            check_dtype(name, given, (torch.bool,), f"use {name}.bool()")
            check_shape(name, given, step_rewards.shape, "[N] (that of step_rewards)")
            check_device(name, given, step_rewards.device, "step_rewards")


def _normalised(stream: torch.Tensor, turns: torch.Tensor, eps: float, backend: str | None) -> torch.Tensor:
    stream = about_group(stream, stream, None, mask=turns, backend=backend)
    return combine([Term(stream, None, GroupTerm(ddof=0, eps=eps))], mask=turns, backend=backend)
