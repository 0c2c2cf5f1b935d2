"""Group-normalised advantages: one function per published estimator, each a configuration of one operator."""

from ..specs import Center, EpsMode, GroupTerm, Part, Presence, Provenance, Scale, Share
from . import reconstructed
from .baselines import (
    BetaTracker,
    DcpoAdvantages,
    DeGrpoAdvantages,
    GroupHistory,
    dcpo,
    de_grpo,
    poise,
    spo_single_stream,
)
from .critics import HierarchicalAdvantages, archer_td, hiper, hiper_rewards, step_gae
from .distributed import over_ranks
from .flat import dgpo, dr_grpo, gpg, grpo, lite_ppo, maxrl, opo, reinforce_pp_baseline, rloo, whiten
from .hierarchical import dr_mas, flow_grpo, gigpo, hbpo, hgpo, m_grpo, peco, stratified
from .multi_reward import dvao, gdpo, hila, tool_star, unidoc_rl, vpo
from .priors import bnpo, ngrpo, v05
from .ranks import arena, g2rpo, grpo_passk, mc_grpo, mc_grpo_samples, pass_at_k
from .returns import discounted_returns
from .selection import d3s_samples, pf_ppo, swarm_samples
from .shaping import adora, aspo_shaping, icpo, negative_sample, positive_sample, real
from .supergroups import sgrpo, sgrpo_hierarchical_sum, sgrpo_reward_sum
from .terms import Term, combine, estimator
from .tokens import hicra, otb, reinforce_pp, remax, rl_zvp, t_ppo, tir_otb, token_gae, vapo
from .trees import mars2, rose, rose_length_penalty, treepo, treepo_segments

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
    "Scale",
    "Share",
    "Term",
    "adora",
    "archer_td",
    "arena",
    "aspo_shaping",
    "bnpo",
    "combine",
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
    "grpo_passk",
    "hbpo",
    "hgpo",
    "hicra",
    "hila",
    "hiper",
    "hiper_rewards",
    "icpo",
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
    "poise",
    "positive_sample",
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
    "tir_otb",
    "token_gae",
    "tool_star",
    "treepo",
    "treepo_segments",
    "unidoc_rl",
    "v05",
    "vapo",
    "vpo",
    "whiten",
]
