"""Ratio gates: one constructor per published method, each a value of :class:`RatioGate`; and the functions
that make the inputs of some gates beside the batch, each a :class:`GateInputs`.

Common arguments:
    eps_low, eps_high: epsilons: a ratio r is clipped at ``1 - eps_low`` and at ``1 + eps_high``.
    logp, old_logp, advantages, batch, advantage_level: as in :func:`~hpo_core.policy_loss`.
"""

from ..specs import Action, Aggregate, Head, Penalty, Provenance, Reduction, Routing, Statistic, Unit
from . import reconstructed
from .balanced import bapo, bapo_bounds
from .bounded_gradient import gbpo_onerec_old_logp
from .corrected import compose, decoupled, dppo_kl, dppo_tv, hispo, icepop, mis, opsm, tis
from .experts import icpo_weight, ink_grpo_coefficient
from .future_kl import fipo, fipo_weight
from .group_expectation import gepo_old_logp
from .hierarchical import fiberpo, step_gspo
from .inputs import (
    archer_bounds,
    bpo_target,
    chord_weight,
    clip_cov_mask,
    dcpo_bounds,
    gbpo_target,
    hapo_bounds,
    kl_cov_mask,
    rec_ring_mask,
    vaco_mask,
)
from .objectives import bpo, dro, gbpo, kimi, kl_cov, nft, opmd, ppo_penalty, sapo, spo
from .parts import Channel, Clip, Correction, Drop, Excess, Gamma, Identity, Level, LogClip, Rollback, Tanh
from .ratio_gate import FirstOrder, GateInputs, RatioGate
from .second_moment import m2po, m2po_bounds, m2po_clip, m2po_mask
from .sequence_level import a_lol, gmpo, gspo, gspo_token, luspo, rec, rec_ring, topr, vespo
from .token_level import (
    archer_clip,
    aspo,
    capo,
    ce_gppo,
    cispo,
    clip_cov,
    dapo,
    dcpo_clip,
    hapo_clip,
    ppo_clip,
    reinforce,
    triplet_clip,
)

__all__ = [
    "Action",
    "Aggregate",
    "Channel",
    "Clip",
    "Correction",
    "Drop",
    "Excess",
    "FirstOrder",
    "Gamma",
    "GateInputs",
    "Head",
    "Identity",
    "Level",
    "LogClip",
    "Penalty",
    "Provenance",
    "RatioGate",
    "Reduction",
    "Rollback",
    "Routing",
    "Statistic",
    "Tanh",
    "Unit",
    "a_lol",
    "archer_bounds",
    "archer_clip",
    "aspo",
    "bapo",
    "bapo_bounds",
    "bpo",
    "bpo_target",
    "capo",
    "ce_gppo",
    "chord_weight",
    "cispo",
    "clip_cov",
    "clip_cov_mask",
    "compose",
    "dapo",
    "dcpo_bounds",
    "dcpo_clip",
    "decoupled",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "fiberpo",
    "fipo",
    "fipo_weight",
    "gbpo",
    "gbpo_onerec_old_logp",
    "gbpo_target",
    "gepo_old_logp",
    "gmpo",
    "gspo",
    "gspo_token",
    "hapo_bounds",
    "hapo_clip",
    "hispo",
    "icepop",
    "icpo_weight",
    "ink_grpo_coefficient",
    "kimi",
    "kl_cov",
    "kl_cov_mask",
    "luspo",
    "m2po",
    "m2po_bounds",
    "m2po_clip",
    "m2po_mask",
    "mis",
    "nft",
    "opmd",
    "opsm",
    "ppo_clip",
    "ppo_penalty",
    "rec",
    "rec_ring",
    "rec_ring_mask",
    "reconstructed",
    "reinforce",
    "sapo",
    "spo",
    "step_gspo",
    "tis",
    "topr",
    "triplet_clip",
    "vaco_mask",
    "vespo",
]
