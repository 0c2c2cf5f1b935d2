"""Entropy windows: windowed aggregates on packed rows, exact quantile thresholds, and the token masks made of them."""

from .aggregates import Window, window_aggregate, window_mean
from .scopes import quantiles, segment_aggregate, top_k
from .window import EntropyWindow, WindowState, ares, forking_tokens

__all__ = [
    "EntropyWindow",
    "Window",
    "WindowState",
    "ares",
    "forking_tokens",
    "quantiles",
    "segment_aggregate",
    "top_k",
    "window_aggregate",
    "window_mean",
]
