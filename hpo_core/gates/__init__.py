"""Ratio gates: one constructor per published method, each a value of :class:`RatioGate`."""

from .ratio_gate import Clip, Drop, FirstOrder, Identity, Level, Provenance, RatioGate
from .sequence_level import gspo, gspo_token
from .token_level import cispo, dapo, ppo_clip, reinforce

__all__ = [
    "Clip",
    "Drop",
    "FirstOrder",
    "Identity",
    "Level",
    "Provenance",
    "RatioGate",
    "cispo",
    "dapo",
    "gspo",
    "gspo_token",
    "ppo_clip",
    "reinforce",
]
