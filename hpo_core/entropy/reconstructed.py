"""Entropy methods of which only an abstract, a figure or somebody's review is public: each
docstring states its assumptions, and coefficients that no source gives have no default."""

from __future__ import annotations

import math

import torch

from ..advantages.terms import among, as_advantages, known
from ..arguments import check_compat, check_finite, constant
from ..batch import PackedBatch, as_batch
from ..checks import check, check_rows, check_tokens, check_units
from ..reference.terms import SATURATION
from ..segments import dense_ids, statistics
from ..specs import Provenance
from .maps import two_knot
from .penalties import entropy_band
from .selection import Selection
from .shaping import check_bonus
from .signals import preset, read
from .statistics import means_of_segments

__all__ = ["dcpo_regulariser", "funrl", "openvl_band", "rlsp_rewards", "seed_grpo", "semantic_entropy"]


@preset(Provenance.RECONSTRUCTED)
def dcpo_regulariser(
    target_logp: torch.Tensor, old_logp: torch.Tensor, batch: PackedBatch | torch.Tensor, *, ratio_cap: float = math.inf
) -> Selection:
    """Distribution-centric policy optimisation: weights ``rho = pi_T / pi_old`` that make samples of the old policy
    stand for those of a distribution of higher temperature (arXiv 2601.12730, as its repository describes it). Returns
    a :class:`Selection` with a weight.

    The method adds ``coefficient`` times a second policy loss, with successful responses' rewards as advantages and
    these weights, to GRPO's: a REINFORCE term under the target distribution, without a sample of it.
    Code of the same name (repository 597358816/AEPO at b353a05) has these weights in one loss, with the advantage
    ``(1 - c) A + c rho`` of right and ``(1 - c) A`` of wrong responses, ``c = a / (a + 1)``, a the distance of the
    entropy from its target, at most 0.1, over the share of right responses: a ``Selection`` with that factor and
    addend.

    Args:
        target_logp: ``[T]``, of the old policy at the target's temperature: ``token_logprobs(..., temperature=T)``.
        old_logp: ``[T]``, at the temperature of sampling.
        ratio_cap: the largest weight. The source states none.

    :func:`.target_temperature` chooses the temperature. The gate :func:`hpo_core.gates.dcpo_clip` and the estimator
    :func:`hpo_core.advantages.dcpo` are another paper's.

    >>> given = torch.tensor([0.3, 0.5]).log(), torch.tensor([0.2, 0.5]).log()
    >>> dcpo_regulariser(*given, PackedBatch.from_lengths([2])).weight
    tensor([1.5000, 1.0000])
    """
    batch = as_batch(batch)
    check(ratio_cap >= 1, "ratio_cap: expected a ratio >= 1, got {}", ratio_cap)
    signal = read(batch, target_logp=target_logp, old_logp=old_logp)
    ratio = torch.exp((signal.values - signal.also(old_logp)).clamp(-SATURATION, SATURATION))
    return Selection(weight=signal.result(ratio.clamp(max=ratio_cap), 1.0))


@preset(Provenance.RECONSTRUCTED)
def rlsp_rewards(is_correct: torch.Tensor, exploration: torch.Tensor, *, share: float) -> torch.Tensor:
    """RLSP: ``(1 - share) 1[right] + share e``, e a reward for exploration that does not depend on the answer (arXiv
    2502.06773). Returns ``[S]`` float32.

    Args:
        is_correct: ``[S]`` bool.
        exploration: ``[S]`` in [0, 1]: the paper's simplest counts intermediate steps; :func:`.count_of_rows` of
            high-entropy windows over its largest value is another. NaN: no exploration is known, and e is 0.
        share: no number could be verified; the paper balances the two with care.

    Assumed: a convex combination of the two.

    >>> rlsp_rewards(torch.tensor([True, False]), torch.tensor([0.5, 1.0]), share=0.2)
    tensor([0.9000, 0.2000])
    """
    check_units(exploration=exploration, is_correct=is_correct)
    check(0 <= share <= 1, "share: expected a number in [0, 1], got {}", share)
    return ((1 - share) * is_correct.double() + share * known(exploration.detach().double())).float()


@preset(Provenance.RECONSTRUCTED, level="row")
def funrl(
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    *,
    alpha: float = 0.4,
    kappa: float = 2.0,
    backend: str | None = None,
) -> torch.Tensor:
    """FunRL (EGPO): ``A + alpha min(Hbar, |A| / kappa)``, Hbar the mean entropy of the response's chain of thought
    (arXiv 2508.05118). Returns ``[S]`` float32.

    Args:
        advantages: ``[S]``, GRPO's of a binary reward for format and answer.
        entropy: ``[T]`` in nats.
        mask: ``[T]`` bool, the tokens of the chain of thought. A response without any keeps its advantage.
        alpha, kappa: 0.4 and 2. With alpha below kappa no sign changes.

    Assumed: that form and those numbers, which a port (zhangdw156/verl) gives as the paper's; of the bonus the abstract
    says that it is clipped. The clip is inside alpha here, in :func:`.entropy_advantage` outside.

    >>> given = torch.tensor([1.0, -0.1]), torch.tensor([0.2, 0.4, 1.0]), torch.tensor([True, True, True])
    >>> funrl(*given, PackedBatch.from_lengths([2, 1]))
    tensor([ 1.1200, -0.0800])
    """
    batch = as_batch(batch)
    check_rows(batch, advantages=advantages)
    check_tokens(batch, mask=mask)
    check_bonus(alpha, kappa)
    signal = read(batch, entropy=entropy)
    mean = means_of_segments(signal.values, batch.row_of_token(), batch.rows, signal.usable & mask, backend)
    own = known(advantages.detach().double())
    bonus = alpha * two_knot(mean, low=(0.0, 1.0), high=(0.0, 1.0), most=own.abs() / kappa)
    return as_advantages(own + known(bonus), advantages, backend)


@preset(Provenance.RECONSTRUCTED, differentiable=True)
def openvl_band(
    entropy: torch.Tensor,
    batch: PackedBatch | torch.Tensor,
    weights: torch.Tensor,
    *,
    low: torch.Tensor,
    high: torch.Tensor,
    coefficient: float,
) -> torch.Tensor:
    """OpenVLThinkerV2's entropy shaping: ``coefficient`` times the distance of entropies to the band of the row's task
    (arXiv 2604.08539, as a review describes it). A 0-dim loss term with a gradient.

    Args:
        entropy, weights, low, high: as in :func:`.entropy_band`. No bounds and no coefficient are known.

    Its advantages are :func:`hpo_core.advantages.g2rpo`.

    >>> given = torch.tensor([0.2, 1.4]), PackedBatch.from_lengths([2]), torch.tensor([0.5])
    >>> round(openvl_band(*given, low=torch.tensor([0.3]), high=torch.tensor([1.2]), coefficient=2.0).item(), 4)
    0.3
    """
    batch = as_batch(batch)
    check_finite(coefficient=coefficient)
    return coefficient * entropy_band(entropy, batch, weights, low=low, high=high)


@preset(Provenance.RECONSTRUCTED, level="row")
def semantic_entropy(
    cluster_ids: torch.Tensor, group_ids: torch.Tensor | None = None, *, backend: str | None = None
) -> torch.Tensor:
    """The entropy of the clusters of a group's units, ``-sum_k p_k log p_k`` with p the shares of units, at each unit:
    ``[U]`` float32 nats.

    Args:
        cluster_ids: ``[U]`` integers: answers with the same meaning, or HICRA's strategic phrases of a batch. A unit
            with a negative id is in no cluster and in no share.
        group_ids: ``[U]``; None: one group.

    >>> semantic_entropy(torch.tensor([1, 1, 2, 2]))
    tensor([0.6931, 0.6931, 0.6931, 0.6931])
    """
    check_units(cluster_ids=cluster_ids, group_ids=group_ids)
    return _surprise(cluster_ids, group_ids, per_cluster=False, backend=backend).float()


@preset(Provenance.RECONSTRUCTED, level="row")
def seed_grpo(
    advantages: torch.Tensor,
    cluster_ids: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    alpha: float = 0.02,
    mean_logp: torch.Tensor | None = None,
    compat: str = "paper",
    backend: str | None = None,
) -> torch.Tensor:
    """SEED-GRPO: advantages times ``1 - alpha SE / log G``, SE the semantic entropy of the prompt's G answers (arXiv
    2505.12346, as others quote it). Returns ``[S]`` float32.

    ``SE = -(1 / K) sum_k log p_k`` over the K clusters, p the share of the answers in each. Equal answers have SE 0;
    with as many meanings as answers it is log G.

    Args:
        advantages: ``[S]``, in the paper :func:`hpo_core.advantages.dr_grpo`'s.
        cluster_ids: ``[S]``, equal for answers with the same meaning; negative: its meaning is unknown, and the answer
            is none of the G.
        alpha: 0.02 in the paper, 0.0417 in the release: no factor is below 0.96 there. At 1 a prompt whose answers all
            differ teaches nothing in the form of the paper.
        mean_logp: ``[S]``, the mean log-probability of an answer's tokens: its exponential is the weight of the answer
            in p, as in the release. None: all count the same. NaN or infinite: the answer is none of the G.
        compat: the ``"code"`` of the release is ``1 / (1 + alpha SE / log G)``, ``SE = -sum_k p_k log p_k``. An answer
            that it cannot read is a cluster of its own.

    Assumed: of the three functions that the paper names (linear, exponential, focal) the linear one, and shares of
    answers, where the paper sums their probabilities. The release was read in two descriptions that agree, and a port
    (liv-daliberti/maxent-grpo e7a589c) ran beside ``compat="code"``.

    >>> seed_grpo(torch.ones(4), torch.tensor([0, 0, 1, 1]), None, alpha=1.0)
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    check_units(advantages=advantages, cluster_ids=cluster_ids, group_ids=group_ids, mean_logp=mean_logp)
    check(0 <= alpha < math.inf, "alpha: expected a finite number >= 0, got {}", alpha)
    check_finite(alpha=alpha)
    as_code = check_compat(compat)
    if mean_logp is not None:
        cluster_ids = among(cluster_ids, torch.isfinite(mean_logp))
    surprise = _surprise(cluster_ids, group_ids, mean_logp, per_cluster=not as_code, backend=backend)
    size = statistics(torch.ones_like(advantages), group_ids, mask=cluster_ids >= 0, backend=backend).members
    most = constant(torch.where(size > 1, size, math.e).log(), backend)  # as their mean is
    share = alpha * surprise / most
    factor = torch.where(size > 1, 1 / (1 + share) if as_code else 1 - share, 1.0)
    return as_advantages(known(advantages.detach().double() * factor), advantages, backend)


def _surprise(
    cluster_ids: torch.Tensor,
    group_ids: torch.Tensor | None,
    mean_logp: torch.Tensor | None = None,
    *,
    per_cluster: bool,
    backend: str | None,
) -> torch.Tensor:
    """The mean of ``-log p`` over a group's units, or over its clusters, at each unit: ``[U]`` float64."""
    units = torch.ones_like(cluster_ids, dtype=torch.float32)
    groups = torch.zeros_like(cluster_ids) if group_ids is None else group_ids
    mass = units
    if mean_logp is not None:
        most = statistics(mean_logp, groups, mask=cluster_ids >= 0, backend=backend).greatest
        mass = constant((mean_logp.double() - most).exp(), backend)
    of_cluster = statistics(units, dense_ids(groups, cluster_ids), weights=mass, backend=backend)
    known_unit = of_cluster.members > 0
    of_group = statistics(units, groups, weights=mass, mask=known_unit, backend=backend).weight
    surprise = torch.where(known_unit, of_group / of_cluster.weight, 1.0).log()
    weights = 1 / of_cluster.members.clamp(min=1) if per_cluster else mass
    return statistics(surprise, groups, weights=weights, mask=known_unit, backend=backend).mean
