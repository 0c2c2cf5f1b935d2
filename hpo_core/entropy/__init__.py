"""Entropy windows: windowed aggregates on packed rows, exact quantile thresholds, and the masks, weights and bounds
made of them."""

from .aggregates import Window, window_aggregate, window_mean
from .hapo import hapo, hapo_redistribution, hapo_temperature
from .maps import two_knot
from .selection import Selection
from .shaping import aepo_ruc, entropy_advantage, entropy_change, steer, steer_linear
from .statistics import PivotState, ScopeStatistics, fit_pivot, fit_scopes
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
    "entropy_advantage",
    "entropy_change",
    "fit_pivot",
    "fit_scopes",
    "forking_tokens",
    "hapo",
    "hapo_redistribution",
    "hapo_temperature",
    "steer",
    "steer_linear",
    "two_knot",
    "window_aggregate",
    "window_mean",
]
