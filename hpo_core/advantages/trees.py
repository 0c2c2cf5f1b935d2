"""Estimators over trees of rollouts that share prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..arguments import check_compat, check_finite
from ..checks import check, check_device, check_floating, check_places, check_shape, check_units
from ..segments import chains, dense_ids, statistics
from ..specs import MOST_TERMS, GroupTerm, Presence, Provenance, Scale, Share
from .flat import grpo
from .returns import once
from .terms import Term, among, as_advantages, combine, estimator, grouped, keeps_singletons, scorable
from .whitening import whiten


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
    number of those leaves; below the root a leaf with a prefix of its own is left out.

    Args:
        prefix_ids: one ``[S]`` per depth, from the root (the prompt) on, at most 8: the id of the prefix of each leaf.
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
    for depth, node in enumerate(_nodes(rewards, prefix_ids)):
        presence = Presence.SPREAD if drop_flat and depth > 0 else Presence.ALWAYS
        rule = GroupTerm(scale=Scale.NONE, keep_singletons=depth == 0 and keeps, presence=presence)
        terms.append(Term(rewards, node, rule))
    advantages = combine(terms, share=Share.COUNT if by_size else Share.EQUAL, backend=backend)
    if lengths is None:
        return advantages
    return whiten(advantages, lengths, mask=grouped(scorable(rewards, None), prefix_ids[0]), backend=backend)


@estimator(Provenance.VERIFIED, tables=True)
def tree_grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    tree_ids: torch.Tensor,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Tree-GRPO: ``A = A_tree + A_prompt``, both GRPO's: a leaf against those of its tree of agent steps, and against
    those of all trees of the prompt (arXiv 2509.21240). Returns ``[S]`` float32.

    Args:
        tree_ids: ``[S]``, the id of the tree of each leaf inside its prompt.
        singleton: of a tree, or a prompt, with one leaf; ``"raw"`` keeps its reward, as the authors' code does.

    Traps: steps that leaves share are in the batch once for each of them, with different advantages.

    >>> leaves, trees = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    >>> tree_grpo(leaves, torch.zeros(4, dtype=torch.int64), trees)
    tensor([ 1.2071, -2.2071,  0.5000,  0.5000])
    """
    check_units(rewards=rewards, group_ids=group_ids, tree_ids=tree_ids, mask=mask)
    rule = GroupTerm(ddof=ddof, eps=eps, keep_singletons=keeps_singletons(singleton))
    terms = [Term(rewards, ids, rule) for ids in (dense_ids(group_ids, tree_ids), group_ids)]
    return combine(terms, mask=mask, backend=backend)


@estimator(Provenance.VERIFIED)
def rose(
    rewards: torch.Tensor, prefix_ids: Sequence[torch.Tensor], *, shared: bool = False, backend: str | None = None
) -> torch.Tensor:
    """ROSE: the value of a node is the mean reward of the leaves below it, the advantage of a segment the difference of
    values at its ends (arXiv 2601.05053). Returns ``[D, S]`` float32: row d is the segment below the prefix of depth d.

    Segments of a leaf add up to its reward minus the root's value. The authors' penalty on long leaves:
    :func:`rose_length_penalty`.

    Args:
        prefix_ids: one ``[S]`` per depth, from the root on: the id of the prefix of each leaf.
        shared: divide by the number of leaves that share the segment.

    >>> root, branch = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    >>> rose(torch.tensor([1.0, 0.0, 1.0]), [root, branch])
    tensor([[-0.1667, -0.1667,  0.3333],
            [ 0.5000, -0.5000,  0.0000]])
    """
    check_units(rewards=rewards)
    values, sharing, known = _of_leaves(rewards, prefix_ids, backend)
    segments = values[1:] - values[:-1]
    if shared:
        segments = segments / sharing
    return as_advantages(torch.where(known, segments, 0.0), rewards, backend)


@estimator(Provenance.VERIFIED)
def treerl(
    rewards: torch.Tensor, prefix_ids: Sequence[torch.Tensor], *, compat: str = "paper", backend: str | None = None
) -> torch.Tensor:
    """TreeRL: a segment's global plus its local advantage, ``((V - V_root) + (V - V_parent)) / sqrt(n)``, V the mean
    reward of the leaves below the node at its end and n their number (arXiv 2506.11902). Returns ``[D, S]`` float32:
    row d is the segment below the prefix of depth d.

    Args:
        prefix_ids: one ``[S]`` per depth, from the root (the prompt) on: the id of the prefix of each leaf.
        compat: ``"code"`` for the authors' form, where each leaf's reward is less the mean of the other leaves of its
            prompt and each node has a root of its own: ``N / (N - 1) (2 v / sqrt(n) - v_parent / sqrt(n_parent))`` over
            N leaves, with ``v = V - V_root``.

    Traps: a segment that n leaves share is in the batch n times, each with this advantage. The authors' code trains on
    some of its leaves, and counts n and n_parent among those; and where a local advantage is 0 it takes that of the
    segment above.

    >>> root, branch = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    >>> treerl(torch.tensor([1.0, 0.0, 1.0]), [root, branch])
    tensor([[-0.2357, -0.2357,  0.6667],
            [ 0.8333, -1.1667,  0.3333]])
    """
    check_units(rewards=rewards)
    as_code = check_compat(compat)
    values, sharing, known = _of_leaves(rewards, prefix_ids, backend)
    lead = values - values[0]
    local = lead[1:] / sharing.sqrt()
    segments = local + (lead[1:] - lead[:-1]) / sharing.sqrt()
    if as_code:
        leaves = statistics(rewards, prefix_ids[0], backend=backend).members
        above = torch.cat((torch.zeros_like(local[:1]), local[:-1]))  # the root leads by nothing
        segments = leaves / (leaves - 1).clamp(min=1) * (2 * local - above)
    return as_advantages(torch.where(known, segments, 0.0), rewards, backend)


@estimator(Provenance.VERIFIED)
def rose_length_penalty(
    segments: torch.Tensor,
    rewards: torch.Tensor,
    prefix_ids: Sequence[torch.Tensor],
    lengths: torch.Tensor,
    starts: torch.Tensor,
    *,
    alpha: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """ROSE's penalty on correct leaves that are longer than the shortest correct one of their prompt (arXiv
    2601.05053). Returns ``[D, S]`` float32, the segments' advantages.

    ``A - |A| (1 - ((L_short - k) / (L - k))^alpha)`` behind the token k at which the two leaves part; a prompt needs
    two correct leaves.

    Args:
        segments: ``[D, S]`` floating point, the advantages that :func:`rose` gives.
        rewards: ``[S]``; a leaf is correct if its reward is not 0.
        prefix_ids: as for :func:`rose`, one ``[S]`` per segment.
        lengths: L ``[S]`` floating point, tokens of each leaf from the root on.
        starts: ``[D, S]`` floating point, the token at which each segment begins: 0 in row 0.
        alpha: .5, 1, 2 or 3 in the paper; their code has no penalty by default.

    Of several shortest leaves the first is spared. The authors compare places of branches, so that leaves of different
    branches that begin at one token count as together up to there; here the prefixes decide.

    >>> root, branch = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    >>> r, n = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([6.0, 10.0, 4.0])
    >>> starts = torch.tensor([[0.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
    >>> rose_length_penalty(rose(r, [root, branch]), r, [root, branch], n, starts)
    tensor([[ 0.3333,  0.3333, -0.6667],
            [ 0.0000,  0.0000,  0.0000]])
    """
    check_units(rewards=rewards, lengths=lengths)
    check(alpha > 0, "alpha: expected a number > 0, got {}", alpha)
    nodes = _nodes(rewards, prefix_ids)
    for name, given in (("segments", segments), ("starts", starts)):
        check_floating(name, given)
        check_shape(name, given, (len(prefix_ids), *rewards.shape), "[D, S] (one row per depth)")
        check_device(name, given, rewards.device, "rewards")
    root = prefix_ids[0]
    correct = torch.isfinite(rewards) & (rewards != 0) & torch.isfinite(lengths)
    rivals = statistics(lengths, root, mask=correct, backend=backend)
    shortest = once(chains(among(root, correct & (lengths.double() == rivals.least)))) > 0
    shared = [statistics(shortest.float(), ids, backend=backend).greatest > 0 for ids in nodes]
    parting = torch.where(torch.stack(shared), starts.double(), 0.0).amax(dim=0)
    left, most = lengths.double() - parting, (rivals.least - parting).clamp(min=0)
    factor = (1 - torch.where(left > 0, most / left, 1.0) ** alpha).clamp(min=0)
    longer = correct & (rivals.members > 1) & ~shortest & (starts.double() >= parting)
    exact = segments.double()
    return as_advantages(torch.where(longer, exact - factor * exact.abs(), exact), segments, backend)


@estimator(Provenance.VERIFIED)
def treepo_segments(
    rewards: torch.Tensor,
    prefix_ids: Sequence[torch.Tensor],
    lengths: torch.Tensor | None = None,
    *,
    decay: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """TreePO's segments: the worth of a node minus that of its parent (arXiv 2508.17445). Returns ``[D, S]`` float32:
    row d is the segment below the prefix of depth d.

    A leaf is worth ``sum_d n_d (r - mean_d) / (1 + sum_d n_d)`` over its prefixes, n_d the leaves that share one; a
    node the mean of its *children*, the root 0. ``A_d = V_{d+1} - decay^(D - d) V_d``.

    Args:
        prefix_ids: one ``[S]`` per depth, from the root (the prompt) on: the id of the prefix of each leaf. All leaves
            have the same depth: one that lacks its deepest prefix (a negative id) is below no node, and gets 0.
        lengths: ``[D, S]`` floating point, tokens of each segment: whitens over them, as the authors do. None: not.
        decay: 1 in the authors' code, where it is the exponent's base; the segments of a leaf then add up to its worth.

    Differs from :func:`rose`, whose nodes are worth the mean of the *leaves* below them.

    >>> root, branch = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    >>> treepo_segments(torch.tensor([1.0, 0.0, 1.0]), [root, branch])
    tensor([[-0.0833, -0.0833,  0.2000],
            [ 0.4167, -0.4167,  0.0000]])
    """
    check_units(rewards=rewards)
    scored, nodes = scorable(rewards, None), _nodes(rewards, prefix_ids)
    is_held = len(nodes) * math.log(max(abs(decay), 1)) < 88  # e^88.7 is the largest float32
    check(is_held, "decay: expected a number whose power {} float32 holds, got {}", len(nodes), decay)
    worth = number = torch.zeros_like(rewards, dtype=torch.float64)
    for ids in nodes:
        table = statistics(rewards, ids, backend=backend)
        centred = (rewards.double() - table.least) - (table.mean - table.least)
        worth, number = worth + table.members * torch.where(scored, centred, 0.0), number + table.members
    values = [as_advantages(worth / (1 + number), rewards, backend)]
    member = grouped(scored, nodes[-1])  # a leaf that lacks its deepest prefix is below no node
    weights = None
    for ids in reversed(nodes[1:]):  # children count once, whatever is below them
        table = statistics(values[0], ids, weights=weights, mask=member, backend=backend)
        values.insert(0, as_advantages(table.mean, rewards, backend))  # that of one child is its value, to the bit
        weights = once(chains(among(ids, member)))
    values.insert(0, torch.zeros_like(values[0]))
    depths = len(nodes)
    exact = [values[d + 1].double() - decay ** (depths - d) * values[d].double() for d in range(depths)]
    segments = as_advantages(torch.where(member, torch.stack(exact), 0.0), rewards, backend)
    if lengths is None:
        return segments
    check_shape("lengths", lengths, segments.shape, "[D, S] (one row per depth)")
    mask = member.expand(depths, -1).reshape(-1)
    return whiten(segments.reshape(-1), lengths.reshape(-1), mask=mask, backend=backend).view_as(segments)


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
            which is none, but makes siblings. A node whose parent is beyond the nodes, or the node itself, is in no
            statistic and gets NaN, which the loss leaves out and counts. Longer cycles are not detected.
        group_ids: ``[N]``, the prompt of each tree.
        tree_ids: ``[N]``, the tree of each node: those below the root are siblings in their own tree alone. None: each
            prompt has one tree.
        shaping, siblings: g (.5 in the authors' class) and l.
        compat: ``"paper"`` shapes all nodes by the rewards as given; ``"code"`` from the root on, so that a child sees
            the shaped reward of its parent, but its siblings' as given, as the authors do in place.

    >>> r, parents = torch.tensor([0.2, 0.6, 0.8, 0.4]), torch.tensor([-1, -1, 0, 0])
    >>> mars2(r, parents, torch.zeros(4, dtype=torch.int64))
    tensor([-1.1742,  0.4958,  1.0959, -0.4175])
    """
    check_places("parents", parents, rewards)
    check_units(rewards=rewards, group_ids=group_ids, tree_ids=tree_ids)
    check_finite(shaping=shaping, siblings=siblings)
    in_place = check_compat(compat)
    here = torch.arange(rewards.numel(), device=rewards.device)
    lost = (parents >= rewards.numel()) | (parents == here)
    own = among(parents, ~lost)  # a place below N: adding 1 cannot overflow
    tree = group_ids if tree_ids is None else dense_ids(group_ids, tree_ids)
    family = statistics(rewards, dense_ids(among(tree, ~lost), own.clamp(min=-1) + 1), backend=backend)
    least = statistics(rewards, group_ids, backend=backend).least  # an offset of the prompt costs no digits of float32
    exact = torch.where((group_ids >= 0) & ~lost, rewards.double() - least, torch.nan)
    others = ((family.mean - least) * family.members - exact) / (family.members - 1).clamp(min=1)
    place = own.clamp(min=0)
    parent = exact[place] + (least[place] - least)  # a parent in another prompt has another offset
    has_parent, has_siblings = (own >= 0) & torch.isfinite(parent), family.members > 1
    mixed = (1 - siblings) * parent + siblings * others
    baseline = torch.where(
        has_parent, torch.where(has_siblings, mixed, parent), torch.where(has_siblings, others, exact)
    )
    gain = shaping * (exact - baseline)
    if in_place:  # a parent's gain g reaches its child as -shaping times its part of the baseline
        part = torch.where(has_siblings, 1 - siblings, torch.ones_like(gain))
        reach = torch.where(has_parent, -shaping * part, 0.0)
        above = torch.where(has_parent, own, here)
        for _ in range(rewards.numel().bit_length()):  # each time twice as far up
            gain, reach, above = gain + reach * gain[above], reach * reach[above], above[above]
    advantages = grpo(as_advantages(exact + gain, rewards, backend), group_ids, eps=eps, backend=backend)
    return torch.where(lost & torch.isfinite(rewards) & (group_ids >= 0), torch.nan, advantages)


def _nodes(rewards: torch.Tensor, prefix_ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The node above each leaf ``[S]`` at every depth, from the root on."""
    check(len(prefix_ids) > 0, "prefix_ids: expected at least one depth, got none")
    for ids in prefix_ids:
        check_units(rewards=rewards, prefix_ids=ids)
    nodes = [dense_ids(prefix_ids[0])]
    for ids in prefix_ids[1:]:
        nodes.append(dense_ids(nodes[-1], ids))
    return nodes


def _of_leaves(
    rewards: torch.Tensor, prefix_ids: Sequence[torch.Tensor], backend: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean reward of the leaves below each node above a leaf, from the root to the leaf itself, ``[D + 1, S]``
    float64; how many leaves share each of its segments ``[D, S]``; and which leaves are below all their prefixes."""
    tables = [statistics(rewards, ids, backend=backend) for ids in _nodes(rewards, prefix_ids)]
    values = torch.stack([*(table.mean for table in tables), rewards.double()])
    sharing = torch.stack([*(table.members for table in tables[1:]), torch.ones_like(tables[0].members)])
    return values, sharing.clamp(min=1).double(), torch.isfinite(rewards) & (tables[-1].members > 0)
