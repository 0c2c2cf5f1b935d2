"""Ratio gates: one constructor per published method, each a value of :class:`RatioGate`."""

from ..specs import Aggregate, Head, Routing, Unit
from .hierarchical import fiberpo, fiberpo_domain, step_gspo, two_scale
from .ratio_gate import Clip, Drop, FirstOrder, Identity, Level, LogClip, Provenance, RatioGate, Rollback, Tanh
from .sequence_level import gspo, gspo_token
from .token_level import cispo, dapo, ppo_clip, reinforce

__all__ = [
    "Aggregate",
    "Clip",
    "Drop",
    "FirstOrder",
    "Head",
    "Identity",
    "Level",
    "LogClip",
    "Provenance",
    "RatioGate",
    "Rollback",
    "Routing",
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
