"""Group-normalised advantages: one function per published estimator, each a configuration of one operator.

An estimator compares units: rows or trajectories (``[S]``), steps (``[N]``) or tokens (``[T]``). Advantages are
constants: no gradient flows to the rewards. Units of a group whose rewards are all equal get exactly 0 in every
precision, unless an estimator says otherwise, as with a shift, a virtual reward or a second stage over the batch.

Common arguments:
    rewards: ``[S]`` floating point, one per unit. NaN and infinite rewards are unscorable: they enter no statistic and
        get advantage 0. Rounded to float32, which the reference does not do, computed in float64 relative to a member
        of the group, and returned as float32.
    group_ids: ``[S]`` int32 or int64, the prompt of each unit: any integers in any order. A negative id belongs to no
        group (advantage 0). None: one group.
    mask: ``[S]`` bool, the units that enter the statistics. Default: all.
    apply_mask: ``[S]`` bool, the units that receive an advantage. Default: the same as ``mask``.
    ddof: the variance of n units divides by ``n - ddof``.
    eps: keeps the division by a deviation, or by another scale in its place, finite.
    singleton: a group of one: ``"zero"`` (its advantage is 0), or ``"raw"`` (its reward is kept, as if its mean were 0
        and its deviation 1, to which eps is added, or of :func:`lite_ppo` that of the batch: verl's loops do so).
    step_rewards: ``[N]`` floating point, the immediate reward of each step. One that is NaN or infinite makes the
        returns of its step and of the steps before it unknown, and the sum of its trajectory: unknown returns and sums
        are in no statistic and add 0.
    trajectory_ids: ``[N]`` integers, the trajectory of each step; negative: none. Beside ``group_ids`` equal numbers of
        two prompts are two trajectories; an estimator without ``group_ids`` takes them for one. Beside steps
        ``group_ids`` are ``[N]``, too (:meth:`~hpo_core.PackedBatch.ids_of_steps` makes both). A step without a prompt
        or a trajectory is as if it were not there.
    anchor_ids: ``[N]`` integers, the observation that a step starts from (of texts: :func:`hpo_core.segments.ids_of`):
        steps of one prompt with equal anchors are compared with each other; negative: with none.
    positions: ``[N]``, the order of steps inside their trajectory. Default: that in which they stand here.
    token_rewards: ``[T]`` floating point, the immediate reward of each token. A token whose advantage is unknown,
        because it is made of a number that is NaN or infinite, gets 0 and is in no statistic.
    batch: the :class:`~hpo_core.PackedBatch` that results ``[T]`` belong to, or the ``[B, L]`` mask of a padded one.
        If it is padded, tensors ``[T]`` may be ``[B, L]``, and so are the results.
    gamma, lam: the discount of returns, and lambda of generalised advantage estimation.
    backend: a name from :func:`hpo_core.backends`. Default: by device.
"""

from ..specs import Center, EpsMode, GroupTerm, Part, Presence, Provenance, Scale, Share
from . import reconstructed
from .baselines import a_star, poise
from .critics import HierarchicalAdvantages, archer_td, hiper, hiper_rewards, step_gae
from .distributed import over_ranks
from .flat import asymre, dgpo, dr_grpo, gpg, grpo, grpo_leave_one_out, lite_ppo, maxrl, opo, rloo
from .hierarchical import dr_mas, flow_grpo, gigpo, hbpo, hgpo, m_grpo, peco, stratified, thor
from .multi_reward import dvao, gdpo, hila, tool_star, unidoc_rl, vpo
from .priors import bnpo, ngrpo, v05
from .process_rewards import prime
from .ranks import arena, g2rpo, grpo_passk, mc_grpo, mc_grpo_samples, pass_at_k, pkpo, qae, unlikeliness
from .remembered import (
    BetaTracker,
    DcpoAdvantages,
    DeGrpoAdvantages,
    GroupHistory,
    RoleAdvantages,
    dcpo,
    de_grpo,
    rae,
    spo_single_stream,
)
from .returns import discounted_returns
from .selection import d3s_samples, pf_ppo, swarm_samples
from .shaping import adora, aspo_shaping, copo, grpo_lead, icpo, negative_sample, positive_sample, real, tpo
from .supergroups import sgrpo, sgrpo_hierarchical_sum, sgrpo_reward_sum
from .terms import Term, combine, estimator
from .tokens import hicra, iw_opd, otb, reinforce_pp, remax, rl_zvp, t_ppo, tir_otb, token_gae, vapo
from .trees import mars2, rose, rose_length_penalty, tree_grpo, treepo, treepo_segments, treerl
from .whitening import reinforce_pp_baseline, whiten

__all__ = [
    "BetaTracker",
    "Center",
    "DcpoAdvantages",
    "DeGrpoAdvantages",
    "EpsMode",
    "GroupHistory",
    "GroupTerm",
    "HierarchicalAdvantages",
    "Part",
    "Presence",
    "Provenance",
    "RoleAdvantages",
    "Scale",
    "Share",
    "Term",
    "a_star",
    "adora",
    "archer_td",
    "arena",
    "aspo_shaping",
    "asymre",
    "bnpo",
    "combine",
    "copo",
    "d3s_samples",
    "dcpo",
    "de_grpo",
    "dgpo",
    "discounted_returns",
    "dr_grpo",
    "dr_mas",
    "dvao",
    "estimator",
    "flow_grpo",
    "g2rpo",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_lead",
    "grpo_leave_one_out",
    "grpo_passk",
    "hbpo",
    "hgpo",
    "hicra",
    "hila",
    "hiper",
    "hiper_rewards",
    "icpo",
    "iw_opd",
    "lite_ppo",
    "m_grpo",
    "mars2",
    "maxrl",
    "mc_grpo",
    "mc_grpo_samples",
    "negative_sample",
    "ngrpo",
    "opo",
    "otb",
    "over_ranks",
    "pass_at_k",
    "peco",
    "pf_ppo",
    "pkpo",
    "poise",
    "positive_sample",
    "prime",
    "qae",
    "rae",
    "real",
    "reconstructed",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rl_zvp",
    "rloo",
    "rose",
    "rose_length_penalty",
    "sgrpo",
    "sgrpo_hierarchical_sum",
    "sgrpo_reward_sum",
    "spo_single_stream",
    "step_gae",
    "stratified",
    "swarm_samples",
    "t_ppo",
    "thor",
    "tir_otb",
    "token_gae",
    "tool_star",
    "tpo",
    "tree_grpo",
    "treepo",
    "treepo_segments",
    "treerl",
    "unidoc_rl",
    "unlikeliness",
    "v05",
    "vapo",
    "vpo",
    "whiten",
]
