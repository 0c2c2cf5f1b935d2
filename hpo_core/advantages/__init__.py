"""Group-normalised advantages: one function per published estimator, each a configuration of one operator."""

from ..specs import Center, EpsMode, GroupTerm, Part, Presence, Provenance, Scale, Share
from . import reconstructed
from .baselines import BetaTracker, GroupHistory, dcpo, poise, spo_single_stream
from .critics import HierarchicalAdvantages, archer_td, hiper, step_gae
from .distributed import over_ranks
from .flat import (
    bnpo,
    dgpo,
    dr_grpo,
    gpg,
    grpo,
    lite_ppo,
    maxrl,
    ngrpo,
    opo,
    reinforce_pp_baseline,
    rloo,
    v05,
    whiten,
)
from .hierarchical import dr_mas, flow_grpo, gigpo, hbpo, hgpo, m_grpo, peco, sgrpo, stratified
from .ranks import arena, g2rpo, mc_grpo, mc_grpo_samples, pass_at_k
from .returns import discounted_returns
from .selection import d3s_samples, pf_ppo
from .several import dvao, gdpo, vpo
from .shaping import adora, aspo_shaping, negative_sample, positive_sample
from .terms import Term, combine, estimator
from .tokens import hicra, otb, reinforce_pp, remax, rl_zvp, t_ppo
from .trees import mars2, rose, treepo

__all__ = [
    "BetaTracker",
    "Center",
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
    "hbpo",
    "hgpo",
    "hicra",
    "hiper",
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
    "reconstructed",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rl_zvp",
    "rloo",
    "rose",
    "sgrpo",
    "spo_single_stream",
    "step_gae",
    "stratified",
    "t_ppo",
    "treepo",
    "v05",
    "vpo",
    "whiten",
]
