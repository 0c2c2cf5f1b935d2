"""Estimators whose advantages differ from token to token, ``[T]`` of a packed batch.

A token whose advantage is unknown, because a number that it is made of is NaN or infinite, gets 0 and is in no
statistic; so are the tokens before such a reward or value, whose returns contain it. Only an entropy, of
:func:`rl_zvp`, gives NaN.
"""

from __future__ import annotations

import math

import torch

from ..arguments import check_finite
from ..batch import PackedBatch, as_batch, place_in_row, spread_rows, valid_tokens
from ..checks import check, check_rows, check_tokens
from ..segments import Chains, chains, dense_ids, scan, statistics
from ..specs import Provenance
from .returns import check_discounts, finished_tokens, generalised_advantages
from .terms import about_group, as_advantages, estimator, grouped, known, scorable


@estimator(Provenance.VERIFIED, level="token")
def reinforce_pp(
    token_rewards: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    gamma: float = 1.0,
    whitened: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """REINFORCE++: discounted returns of token rewards, whitened over the batch's tokens (arXiv 2501.03262). Returns
    ``[T]`` float32.

    ``G_t = r_t + gamma G_t'``, t' the next *valid* token of the row: masked tokens are transparent, they neither cut
    credit nor discount it, and rewards on them do not count. Then ``(G - mean) / sqrt(var + 1e-8)``, ddof 1.

    Args:
        token_rewards: ``[T]``, the outcome at a row's last *valid* token (at a masked one, such as the last of a tool's
            output, it is lost), and a KL penalty where there is one.
        whitened: False leaves the returns as they are, for ``over_ranks(whiten)`` where other ranks have tokens, too.

    >>> mask = torch.tensor([True, True, False, False, True, True])
    >>> batch = PackedBatch(torch.tensor([0, 6]), mask)
    >>> reinforce_pp(torch.tensor([0.0, 0.5, 0, 0, 0, 1]), batch, gamma=0.9, whitened=False)
    tensor([1.1790, 1.3100, 0.0000, 0.0000, 0.9000, 1.0000])
    """
    batch = as_batch(batch)
    check_tokens(batch, token_rewards=token_rewards)
    check_discounts(gamma=gamma)
    valid = valid_tokens(batch)
    valid_rewards = torch.where(valid, token_rewards, 0.0)
    gains = torch.where(valid, torch.full_like(valid_rewards, gamma, dtype=torch.float64), 1.0)  # exact over long rows
    exact = torch.where(valid, scan(valid_rewards, gains, batch.cu_seqlens, backend), 0.0)
    return finished_tokens(exact, token_rewards, batch, valid, whitened, backend)


@estimator(Provenance.VERIFIED, level="token")
def remax(
    token_rewards: torch.Tensor,
    greedy_rewards: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """ReMax: the return from each token on, minus the reward of the prompt's greedy response (arXiv 2310.10505).
    Returns ``[T]`` float32.

    Args:
        token_rewards: ``[T]``; those at masked tokens do not count.
        greedy_rewards: ``[S]``, of the greedy response to each row's prompt.

    >>> remax(torch.tensor([0.0, 1.0]), torch.tensor([0.25]), PackedBatch.from_lengths([2]))
    tensor([0.7500, 0.7500])
    """
    batch = as_batch(batch)
    check_tokens(batch, token_rewards=token_rewards)
    check_rows(batch, greedy_rewards=greedy_rewards)
    valid = valid_tokens(batch)
    valid_rewards = torch.where(valid, token_rewards, 0.0)
    returns = scan(valid_rewards, torch.ones_like(valid_rewards), batch.cu_seqlens, backend)
    exact = torch.where(valid, known(returns - spread_rows(greedy_rewards.double(), batch, 0.0)), 0.0)
    return as_advantages(exact, token_rewards, backend)


@estimator(Provenance.PAPER, level="token")
def hicra(
    advantages: torch.Tensor, is_planning: torch.Tensor, batch: PackedBatch | torch.Tensor, *, alpha: float = 0.2
) -> torch.Tensor:
    """HICRA: planning tokens get ``A + alpha |A|`` (arXiv 2509.03646). Returns ``[T]`` float32.

    Args:
        advantages: ``[S]``, in the paper :func:`dr_grpo`'s.
        is_planning: ``[T]`` bool, tokens of strategy and not of execution.
        alpha: .2 in the paper; below 1 no sign flips.

    >>> hicra(torch.tensor([1.0, -1.0]), torch.tensor([True, False, True]), PackedBatch.from_lengths([2, 1]))
    tensor([ 1.2000,  1.0000, -0.8000])
    """
    batch = as_batch(batch)
    check_rows(batch, advantages=advantages)
    check_tokens(batch, is_planning=is_planning)
    check_finite(alpha=alpha)
    own = torch.where(valid_tokens(batch), known(spread_rows(advantages, batch, 0.0)), 0.0)
    return torch.where(is_planning, own + alpha * own.abs(), own)


@estimator(Provenance.PAPER, level="token")
def rl_zvp(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    advantages: torch.Tensor,
    *,
    alpha: float = 0.1,
    threshold: float = 0.5,
    backend: str | None = None,
) -> torch.Tensor:
    """RL-ZVP: prompts whose rewards are all equal teach by entropy: ``alpha H_t`` where all are right,
    ``-alpha (max_k H_k - H_t)`` where all are wrong (arXiv 2509.21880). Returns ``[T]`` float32.

    Args:
        entropy: ``[T]`` in nats; the maximum is over the valid tokens of the response. A token taught by one that is
            not finite gets NaN, so that the loss leaves it out and counts it.
        advantages: ``[S]``, of the other prompts, as from :func:`grpo`; 0 takes their place where a row has no reward
            or no prompt.
        alpha: .1 to .2 in the paper.
        threshold: rewards above it are right.

    >>> batch = PackedBatch.from_lengths([2])
    >>> rl_zvp(torch.tensor([1.0]), None, torch.tensor([0.5, 1.0]), batch, torch.tensor([0.0]))
    tensor([0.0500, 0.1000])
    """
    batch = as_batch(batch)
    check_rows(batch, rewards=rewards, group_ids=group_ids, advantages=advantages)
    check_tokens(batch, entropy=entropy)
    check_finite(alpha=alpha)
    row = batch.row_of_token()
    valid = valid_tokens(batch)
    group = statistics(rewards, group_ids, backend=backend)
    scored = grouped(torch.isfinite(rewards), group_ids)
    flat = scored & (group.least == group.greatest)
    entropy = torch.where(torch.isfinite(entropy), entropy, torch.nan)
    greatest = statistics(entropy, row, mask=valid, backend=backend).greatest
    right = spread_rows(rewards > threshold, batch, False)
    shaped = torch.where(right, alpha * entropy, alpha * (entropy - greatest)).to(advantages.dtype)
    others = spread_rows(known(torch.where(scored, advantages, 0.0)), batch, 0.0)
    return torch.where(valid, torch.where(spread_rows(flat, batch, False), shaped, others), 0.0)


@estimator(Provenance.VERIFIED, level="token")
def iw_opd(
    teacher_logp: torch.Tensor,
    old_logp: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    gamma: float = 0.5,
    backend: str | None = None,
) -> torch.Tensor:
    """IW-OPD: on-policy distillation, in which the gaps to the teacher before a token take weight from it (arXiv
    2606.22600). Returns ``[T]`` float32.

    ``A_t = (1 + gamma (1 - sum_{k < t} |d_k| / sum_k |d_k|)) d_t``, ``d = teacher_logp - old_logp``, sums over the
    valid tokens of the trajectory, through all its rows. The gate is ``reinforce()``, in TRL with ``token_mean``.

    Args:
        teacher_logp, old_logp: ``[T]``, log-probabilities of the sampled tokens under the teacher and the sampler.
        gamma: .5 in TRL; 0 is plain on-policy distillation (MOPD, arXiv 2601.02780).

    Traps: weights are 1 to ``1 + gamma``, so the step grows with gamma. A gap that is not finite is that of a masked
    token, where TRL raises.

    >>> teacher, old = torch.tensor([-0.5, -2.0, -1.0]), torch.tensor([-1.0, -1.0, -0.5])
    >>> iw_opd(teacher, old, PackedBatch.from_lengths([3]))
    tensor([ 0.7500, -1.3750, -0.5625])
    """
    batch = as_batch(batch)
    check_tokens(batch, teacher_logp=teacher_logp, old_logp=old_logp)
    check(0 <= gamma < math.inf, "gamma: expected a finite number >= 0, got {}", gamma)
    check_finite(gamma=gamma)
    gap = torch.where(valid_tokens(batch), known(teacher_logp.double() - old_logp.double()), 0.0)
    tokens = _trajectories(batch)
    size = tokens.sorted(gap.abs())
    remaining = scan(size, torch.ones_like(size), tokens.cu_seqlens, backend)
    share = remaining / torch.where(size > 0, tokens.first(remaining), 1.0)  # a gap of 0 has no use for its weight
    return as_advantages((1 + gamma * tokens.unsorted(share)) * gap, teacher_logp, backend)


@estimator(Provenance.VERIFIED, level="token")
def otb(
    token_rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    batch: PackedBatch | torch.Tensor,
    chosen_probability: torch.Tensor,
    squared_probabilities: torch.Tensor,
    *,
    importance: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Optimal token baseline: ``A_t = G_t - sum_i G_{i,t} W_{i,t} / sum_i W_{i,t}`` over the prompt's responses with a
    valid token at the position (verl ``optimal_token_baseline``). Returns ``[T]`` float32.

    G is the return from the token on, not discounted, ``W_t = sum_{s <= t} c_s^2 (1 - 2 p_s + sum_v p_s(v)^2)`` over
    valid tokens. Positions count from the first valid token of the row. A response that is alone at a position, as the
    longest is at its end, has the baseline 0 there, as has a position whose tokens were all certain (W is 0).

    Args:
        chosen_probability, squared_probabilities: ``[T]``, p of the sampled token, and the sum of p^2 over the
            vocabulary.
        importance: ``[T]`` floating point, c, the truncated weight of the loss for a sampler that is not the policy.
            None: 1.

    >>> batch = PackedBatch.from_lengths([1, 1], group_ids=torch.tensor([0, 0]))
    >>> half = torch.full((2,), 0.5)
    >>> otb(torch.tensor([1.0, 0.0]), batch.group_ids, batch, half, half)
    tensor([ 0.5000, -0.5000])
    """
    batch = as_batch(batch)
    row = batch.row_of_token()
    token = torch.arange(batch.total_tokens, device=row.device)
    first = torch.full((batch.rows,), batch.total_tokens, dtype=torch.int64, device=row.device)
    if batch.rows:
        valid_token = torch.where(valid_tokens(batch), token, batch.total_tokens)
        first = first.scatter_reduce(0, row.clamp(min=0), valid_token, "amin")
    position = token - spread_rows(first, batch, 0)
    return _against_positions(
        token_rewards, group_ids, batch, chosen_probability, squared_probabilities, importance, position, backend
    )


@estimator(Provenance.VERIFIED, level="token")
def tir_otb(
    token_rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    batch: PackedBatch | torch.Tensor,
    chosen_probability: torch.Tensor,
    squared_probabilities: torch.Tensor,
    *,
    importance: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Optimal token baseline for responses with tools inside: :func:`otb` whose positions count the valid tokens alone
    (verl ``tir_optimal_token_baseline``). Returns ``[T]`` float32.

    A token is compared with those that the policy wrote after as many of its own, however long the tools' outputs in
    between are. Without such outputs this is :func:`otb`. Arguments as there.

    >>> mask = torch.tensor([True, False, True, True, True])
    >>> batch = PackedBatch(torch.tensor([0, 3, 5]), mask, group_ids=torch.tensor([0, 0]))
    >>> half = torch.full((5,), 0.5)
    >>> tir_otb(torch.tensor([0.0, 0, 1, 0, 0]), batch.group_ids, batch, half, half)
    tensor([ 0.5000,  0.0000,  0.5000, -0.5000, -0.5000])
    """
    batch = as_batch(batch)
    position = place_in_row(valid_tokens(batch), batch)
    return _against_positions(
        token_rewards, group_ids, batch, chosen_probability, squared_probabilities, importance, position, backend
    )


def _against_positions(
    token_rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    batch: PackedBatch,
    chosen_probability: torch.Tensor,
    squared_probabilities: torch.Tensor,
    importance: torch.Tensor | None,
    position: torch.Tensor,
    backend: str | None,
) -> torch.Tensor:
    """Returns minus the optimal baseline of the prompt's tokens at the same position."""
    if group_ids is not None:
        check_rows(batch, group_ids=group_ids)
    check_tokens(
        batch, token_rewards=token_rewards, chosen_probability=chosen_probability,
        squared_probabilities=squared_probabilities, importance=importance,
    )  # fmt: skip
    energy = 1 - 2 * chosen_probability + squared_probabilities  # the squared norm of a token's score function
    energy = energy if importance is None else energy * importance.square()
    row = batch.row_of_token()
    valid = valid_tokens(batch)
    values, energy = torch.where(valid, token_rewards, 0.0), torch.where(valid, energy, 0.0)
    returns = scan(values, torch.ones_like(values), batch.cu_seqlens, backend)
    weight = scan(energy, torch.ones_like(energy), batch.cu_seqlens, backend, forward=True).to(energy.dtype)
    groups = torch.zeros_like(row) if group_ids is None else spread_rows(group_ids.to(torch.int64), batch, -1)
    ids = dense_ids(torch.where(valid, groups, -1), torch.where(valid, position, -1))
    centred = about_group(returns, token_rewards, ids, mask=valid, backend=backend)
    # A certain token weighs nothing but is a response: the other one at its position is not alone.
    responses = statistics(centred, ids, mask=valid, backend=backend).members
    baseline = statistics(centred, ids, weights=weight, mask=valid, backend=backend)
    exact = torch.where((responses > 1) & (baseline.members > 0), centred.double() - baseline.mean, returns)
    return as_advantages(torch.where((responses > 0) & scorable(centred, valid), exact, 0.0), token_rewards, backend)


@estimator(Provenance.VERIFIED, level="token")
def token_gae(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whitened: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """StepPO's GAE of tokens, along all rows of a trajectory as if they were one, whitened over the batch's tokens
    (arXiv 2604.18401). Returns ``[T]`` float32.

    ``d_t = r_t + gamma V_t' - V_t``, ``A_t = d_t + gamma lambda A_t'``, t' the next *valid* token of the trajectory, in
    its next row where this one has no more; V is 0 behind the last. Then ``(A - mean) / sqrt(var + 1e-8)``, ddof 1.

    Args:
        token_rewards, values: ``[T]``, the critic before each token. Those at masked tokens do not count. Where a
            trajectory was cut off, gamma times the critic behind it belongs to its last reward.
        batch: rows of a trajectory (``trajectory_ids``) stand in the order of its steps. Without such ids this is GAE
            of each row, as verl's ``gae`` is.
        whitened: False leaves the advantages as they are: for ``over_ranks(whiten)``, where other ranks have tokens,
            too, and for the returns of the critic (:func:`~hpo_core.value_loss`), which are those plus ``values``.

    >>> batch = PackedBatch.from_lengths([1, 1], trajectory_ids=torch.tensor([4, 4]))
    >>> token_gae(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25]), batch, gamma=0.5, whitened=False)
    tensor([0.0000, 0.7500])
    """
    batch = as_batch(batch)
    check_tokens(batch, token_rewards=token_rewards, values=values)
    check_discounts(gamma=gamma, lam=lam)
    return _along_trajectories(token_rewards, values, batch, _trajectories(batch), gamma, lam, whitened, backend)


@estimator(Provenance.VERIFIED, level="token")
def vapo(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    gamma: float = 1.0,
    alpha: float = 0.05,
    whitened: bool = True,
    backend: str | None = None,
) -> torch.Tensor:
    """VAPO's length-adaptive GAE: :func:`token_gae` with ``lambda = max(1 - 1 / (alpha n), 0)`` for a trajectory of n
    valid tokens (arXiv 2504.05118). Returns ``[T]`` float32.

    The temporal differences behind a token weigh ``1 / (1 - lambda) = alpha n`` together: in proportion to the length.

    Args:
        token_rewards, values, batch, whitened: as in :func:`token_gae`.
        alpha: .05 in the paper.

    Traps: below ``1 / alpha`` tokens, 20 of them, the formula is negative; AReaL and NeMo-RL take 0 there, too. The
    critic learns from lambda 1: ``token_gae(token_rewards, values, batch, whitened=False) + values``.

    >>> batch = PackedBatch.from_lengths([3])
    >>> vapo(torch.tensor([0.0, 0.0, 1.0]), torch.zeros(3), batch, alpha=0.5, whitened=False)
    tensor([0.1111, 0.3333, 1.0000])
    """
    batch = as_batch(batch)
    check_tokens(batch, token_rewards=token_rewards, values=values)
    check_discounts(gamma=gamma)
    check(0 < alpha < math.inf, "alpha: expected a finite number above 0, got {}", alpha)
    trajectories = _trajectories(batch)
    length = trajectories.ranks()[1].double()
    lam = (1 - 1 / (alpha * length)).clamp(min=0)
    return _along_trajectories(token_rewards, values, batch, trajectories, gamma, lam, whitened, backend)


def _trajectories(batch: PackedBatch) -> Chains:
    """The valid tokens of each trajectory, through all its rows."""
    row = batch.row_of_token()
    of_rows = torch.arange(batch.rows, device=row.device) if batch.trajectories is None else batch.trajectories[0]
    return chains(torch.where(valid_tokens(batch), spread_rows(of_rows, batch, -1), -1))


def _along_trajectories(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    batch: PackedBatch,
    trajectories: Chains,
    gamma: float,
    lam: float | torch.Tensor,
    whitened: bool,
    backend: str | None,
) -> torch.Tensor:
    """GAE of valid tokens, whitened over them where asked."""
    valid = valid_tokens(batch)
    reward, value = torch.where(valid, token_rewards, 0.0), torch.where(valid, values, 0.0)
    exact = generalised_advantages(reward, value, trajectories, gamma, lam, backend=backend)
    return finished_tokens(torch.where(valid, exact, 0.0), token_rewards, batch, valid, whitened, backend)


@estimator(Provenance.PAPER, level="token")
def t_ppo(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    is_truncated: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """T-PPO's EGAE: GAE of tokens, where a response that was cut off takes its last value for the one behind it (arXiv
    2506.15050). Returns ``[T]`` float32.

    ``d_t = r_t + gamma V_t' - V_t``, ``A_t = d_t + gamma lambda A_t'``, t' the next *valid* token of the row, as in
    :func:`reinforce_pp`; behind a finished response V is 0, behind a truncated one that of its last token.

    Args:
        token_rewards, values: ``[T]``, the critic before each token. Those at masked tokens do not count.
        is_truncated: ``[S]`` bool.

    Traps: the paper keeps the last tokens of a truncated response out of the policy's loss; that is a mask for the
    loss, not for the advantages, which need their rewards and values.

    >>> batch = PackedBatch.from_lengths([2])
    >>> t_ppo(torch.tensor([0.0, 0.0]), torch.tensor([0.5, 0.25]), batch, torch.tensor([True]))
    tensor([-0.2500,  0.0000])
    """
    batch = as_batch(batch)
    check_tokens(batch, token_rewards=token_rewards, values=values)
    check_rows(batch, is_truncated=is_truncated)
    check_discounts(gamma=gamma, lam=lam)
    row = batch.row_of_token()
    valid = valid_tokens(batch)
    value = torch.where(valid, values, 0.0)
    is_valid = valid.to(value.dtype)

    def behind(tokens: torch.Tensor) -> torch.Tensor:
        """The value of the next valid token of each token's row; 0 behind the last."""
        scanned = scan(tokens, 1 - is_valid, batch.cu_seqlens, backend).to(tokens.dtype)
        following = torch.zeros_like(scanned)
        following[:-1] = torch.where(row[1:] == row[:-1], scanned[1:], 0.0)
        return following

    cut = spread_rows(is_truncated, batch, False) & (behind(is_valid) == 0)
    following = torch.where(cut, value, behind(value))
    exact = token_rewards.double() + gamma * following.double() - value  # values far from 0 cancel
    difference = torch.where(valid, exact, 0.0)
    gains = torch.where(valid, torch.full_like(difference, gamma * lam), 1.0)
    advantages = torch.where(valid, known(scan(difference, gains, batch.cu_seqlens, backend)), 0.0)
    return as_advantages(advantages, token_rewards, backend)
