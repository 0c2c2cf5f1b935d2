"""Entropy windows: windowed aggregates on packed rows, exact quantile thresholds, and the masks, weights and bounds
made of them."""

from .aggregates import Window, window_aggregate, window_mean
from .hapo import hapo, hapo_redistribution, hapo_temperature
from .maps import two_knot
from .masks import cover, group_confidence, opened, ulorl
from .selection import Selection
from .sequences import edge_grpo, empg, ettrl, hapo_advantages, ucas
from .shaping import aepo_ruc, covariance, entropy_advantage, entropy_change, steer, steer_linear
from .statistics import PivotState, ScopeStatistics, fit_pivot, fit_scopes
from .token_rewards import grpo_s, gtpo
from .window import EntropyWindow, WindowState, ares, forking_tokens

__all__ = [
    "EntropyWindow",
    "PivotState",
    "ScopeStatistics",
    "Selection",
    "Window",
    "WindowState",
    "aepo_ruc",
    "ares",
    "covariance",
    "cover",
    "edge_grpo",
    "empg",
    "entropy_advantage",
    "entropy_change",
    "ettrl",
    "fit_pivot",
    "fit_scopes",
    "forking_tokens",
    "group_confidence",
    "grpo_s",
    "gtpo",
    "hapo",
    "hapo_advantages",
    "hapo_redistribution",
    "hapo_temperature",
    "opened",
    "steer",
    "steer_linear",
    "two_knot",
    "ucas",
    "ulorl",
    "window_aggregate",
    "window_mean",
]
