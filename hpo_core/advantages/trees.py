"""Estimators over trees of rollouts that share prefixes; the rest is as in :mod:`.flat`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ..checks import check, check_device, check_dtype, check_shape, check_units
from ..segments import dense_ids, statistics
from ..specs import MOST_TERMS, GroupTerm, Presence, Provenance, Scale, Share
from .flat import grpo, whiten
from .terms import Term, among, as_advantages, check_compat, combine, estimator, grouped, keeps_singletons, scorable

__all__ = ["mars2", "rose", "treepo"]


@estimator(Provenance.VERIFIED, tables=True)
def treepo(
    rewards: torch.Tensor,
    prefix_ids: Sequence[torch.Tensor],
    lengths: torch.Tensor | None = None,
    *,
    by_size: bool = True,
    drop_flat: bool = False,
    singleton: str = "raw",
    backend: str | None = None,
) -> torch.Tensor:
    """TreePO: a leaf against those that share its prefix, averaged over all depths of the tree (arXiv 2508.17445).
    Returns ``[S]`` float32.

    ``a_d = r - mean`` over the leaves with the same prefix of depth d, ``A = sum_d n_d a_d / sum_d n_d`` with n_d the
    number of those leaves; below the root a leaf that shares its prefix with nobody is left out.

    Args:
        prefix_ids: one ``[S]`` per depth, from the root (the prompt) on, at most 8: what names the prefix of each leaf.
        lengths: ``[S]`` floating point, tokens: whitens over them, as the authors do. None: not.
        by_size: False weighs all depths the same.
        drop_flat: leave out prefixes below the root whose leaves all have the same reward.
        singleton: of a prompt with one leaf; the authors' code keeps its reward.

    >>> root, branch = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
    >>> treepo(torch.tensor([1.0, 0.0, 1.0, 1.0]), [root, branch])
    tensor([ 0.3333, -0.6667,  0.1667,  0.1667])
    """
    keeps = keeps_singletons(singleton)
    check_units(rewards=rewards, lengths=lengths)
    check(0 < len(prefix_ids) <= MOST_TERMS, "prefix_ids: expected 1 to {} depths, got {}", MOST_TERMS, len(prefix_ids))
    terms = []
    for depth, ids in enumerate(prefix_ids):
        check_units(rewards=rewards, prefix_ids=ids)
        presence = Presence.SPREAD if drop_flat and depth > 0 else Presence.ALWAYS
        rule = GroupTerm(scale=Scale.NONE, keep_singletons=depth == 0 and keeps, presence=presence)
        terms.append(Term(rewards, dense_ids(*prefix_ids[: depth + 1]), rule))
    advantages = combine(terms, share=Share.COUNT if by_size else Share.EQUAL, backend=backend)
    if lengths is None:
        return advantages
    return whiten(advantages, lengths, mask=grouped(scorable(rewards, None), prefix_ids[0]), backend=backend)


@estimator(Provenance.VERIFIED)
def rose(
    rewards: torch.Tensor, prefix_ids: Sequence[torch.Tensor], *, shared: bool = False, backend: str | None = None
) -> torch.Tensor:
    """ROSE: the value of a node is the mean reward of the leaves below it, the advantage of a segment the difference of
    values at its ends (arXiv 2601.05053). Returns ``[D, S]`` float32: row d is the segment below the prefix of depth d.

    Segments of a leaf add up to its reward minus the root's value. Left out: the authors' penalty on long leaves.

    Args:
        prefix_ids: one ``[S]`` per depth, from the root on: what names the prefix of each leaf.
        shared: divide by the number of leaves that share the segment.

    >>> root, branch = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    >>> rose(torch.tensor([1.0, 0.0, 1.0]), [root, branch])
    tensor([[-0.1667, -0.1667,  0.3333],
            [ 0.5000, -0.5000,  0.0000]])
    """
    check_units(rewards=rewards)
    check(len(prefix_ids) > 0, "prefix_ids: expected at least one depth, got none")
    tables = []
    for depth, ids in enumerate(prefix_ids):
        check_units(rewards=rewards, prefix_ids=ids)
        tables.append(statistics(rewards, dense_ids(*prefix_ids[: depth + 1]), backend=backend))
    values = [*(table.mean for table in tables), rewards.double()]
    sharing = [*(table.members for table in tables[1:]), torch.ones_like(values[0])]
    segments = torch.stack([below - above for above, below in itertools.pairwise(values)])
    if shared:
        segments = segments / torch.stack(sharing).clamp(min=1)
    known = torch.isfinite(rewards) & (tables[-1].members > 0)
    return as_advantages(torch.where(known, segments, 0.0), rewards, backend)


@estimator(Provenance.VERIFIED)
def mars2(
    rewards: torch.Tensor,
    parents: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    tree_ids: torch.Tensor | None = None,
    shaping: float = 0.3,
    siblings: float = 0.5,
    eps: float = 1e-9,
    compat: str = "paper",
    backend: str | None = None,
) -> torch.Tensor:
    """MARS^2: rewards of a tree's nodes shaped by parents and siblings, then GRPO over all nodes of the prompt (arXiv
    2604.14564). Returns ``[N]`` float32.

    ``b = (1 - l) r_parent + l mean(siblings)``, the one that exists where the other does not; ``r' = r + g (r - b)``,
    r where neither does. A parent or sibling without a reward, or in no prompt, does not exist.

    Args:
        parents: ``[N]`` integers, the place of each node's parent among the nodes; negative: the root is its parent,
            which is none, but makes siblings. A node whose parent is beyond the nodes is in no statistic and gets NaN,
            which the loss leaves out and counts.
        group_ids: ``[N]``, the prompt of each tree.
        tree_ids: ``[N]``, the tree of each node: those below the root are siblings in their own tree alone. None: each
            prompt has one tree.
        shaping, siblings: g (.5 in the authors' class) and l.
        compat: ``"paper"`` shapes all nodes by the rewards as given; ``"code"`` from the root on, so that a child sees
            what its parent has become, but its siblings as given, as the authors do in place.

    >>> r, parents = torch.tensor([0.2, 0.6, 0.8, 0.4]), torch.tensor([-1, -1, 0, 0])
    >>> mars2(r, parents, torch.zeros(4, dtype=torch.int64))
    tensor([-1.1742,  0.4958,  1.0959, -0.4175])
    """
    check_dtype("parents", parents, (torch.int32, torch.int64), "places of nodes are integers")
    check_shape("parents", parents, rewards.shape, "[N] (that of rewards)")
    check_device("parents", parents, rewards.device, "rewards")
    check_units(rewards=rewards, group_ids=group_ids, tree_ids=tree_ids)
    in_place = check_compat(compat)
    lost = parents >= rewards.numel()
    own = among(parents, ~lost)  # a place below N: adding 1 cannot overflow
    tree = group_ids if tree_ids is None else dense_ids(group_ids, tree_ids)
    family = statistics(rewards, dense_ids(among(tree, ~lost), own.clamp(min=-1) + 1), backend=backend)
    exact = torch.where((group_ids >= 0) & ~lost, rewards.double(), torch.nan)
    others = (family.mean * family.members - exact) / (family.members - 1).clamp(min=1)
    parent = exact[own.clamp(min=0)] if rewards.numel() else exact
    has_parent, has_siblings = (own >= 0) & torch.isfinite(parent), family.members > 1
    mixed = (1 - siblings) * parent + siblings * others
    baseline = torch.where(
        has_parent, torch.where(has_siblings, mixed, parent), torch.where(has_siblings, others, exact)
    )
    gain = shaping * (exact - baseline)
    if in_place:  # a parent's gain g reaches its child as -shaping times its part of the baseline
        reach = -shaping * torch.where(has_parent, torch.where(has_siblings, 1 - siblings, 1.0), 0.0)
        above = torch.where(has_parent, own, torch.arange(rewards.numel(), device=rewards.device))
        for _ in range(rewards.numel().bit_length()):  # each time twice as far up
            gain, reach, above = gain + reach * gain[above], reach * reach[above], above[above]
    advantages = grpo(as_advantages(exact + gain, rewards, backend), group_ids, eps=eps, backend=backend)
    return torch.where(lost & torch.isfinite(rewards) & (group_ids >= 0), torch.nan, advantages)
