"""Ratio gates: one constructor per published method, each a value of :class:`RatioGate`."""

from ..specs import Action, Aggregate, Head, Penalty, Reduction, Routing, Statistic, Unit
from .hierarchical import fiberpo, fiberpo_domain, step_gspo, two_scale
from .ratio_gate import (
    Channel,
    Clip,
    Correction,
    Drop,
    FirstOrder,
    Gamma,
    Identity,
    Level,
    LogClip,
    Provenance,
    RatioGate,
    Rollback,
    Tanh,
)
from .sequence_level import gspo, gspo_token
from .token_level import cispo, dapo, ppo_clip, reinforce

__all__ = [
    "Action",
    "Aggregate",
    "Channel",
    "Clip",
    "Correction",
    "Drop",
    "FirstOrder",
    "Gamma",
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
    "cispo",
    "dapo",
    "fiberpo",
    "fiberpo_domain",
    "gspo",
    "gspo_token",
    "ppo_clip",
    "reinforce",
    "step_gspo",
    "two_scale",
]
