"""The closed choices that kernels know, in one place: Python's side of ``csrc/include/hpo/api/`` (a test compares
them).

A published method is a value of one of these structures; it never adds a kind of its own.
"""

from __future__ import annotations

from .advantages import (
    MOST_TERMS,
    Center,
    EpsMode,
    GroupInputs,
    GroupNormalisation,
    GroupStatistics,
    GroupTerm,
    Part,
    Presence,
    Scale,
    Share,
)
from .entropy import INDEX_RULES, Boundary, Invalid, OrderRule, Scopes, TokenDraw, WindowAggregate
from .gates import (
    MOST_ROW_CORRECTIONS,
    Action,
    Aggregate,
    CorrectionSpec,
    Exchange,
    Head,
    KLEstimator,
    KLGradient,
    LevelKind,
    LevelSpec,
    Penalty,
    PolicyLossInputs,
    PolicyLossSpec,
    Reduction,
    Routing,
    SegmentReduce,
    Stage,
    Statistic,
    TermSpec,
    TokenGate,
    Unit,
    in_floats,
    rows_as_weights,
)
from .logprobs import LOGITS, LogitRows, LogitType
from .provenance import Provenance
from .segments import Denominator

__all__ = [
    "INDEX_RULES",
    "LOGITS",
    "MOST_ROW_CORRECTIONS",
    "MOST_TERMS",
    "Action",
    "Aggregate",
    "Boundary",
    "Center",
    "CorrectionSpec",
    "Denominator",
    "EpsMode",
    "Exchange",
    "GroupInputs",
    "GroupNormalisation",
    "GroupStatistics",
    "GroupTerm",
    "Head",
    "Invalid",
    "KLEstimator",
    "KLGradient",
    "LevelKind",
    "LevelSpec",
    "LogitRows",
    "LogitType",
    "OrderRule",
    "Part",
    "Penalty",
    "PolicyLossInputs",
    "PolicyLossSpec",
    "Presence",
    "Provenance",
    "Reduction",
    "Routing",
    "Scale",
    "Scopes",
    "SegmentReduce",
    "Share",
    "Stage",
    "Statistic",
    "TermSpec",
    "TokenDraw",
    "TokenGate",
    "Unit",
    "WindowAggregate",
    "in_floats",
    "rows_as_weights",
]
