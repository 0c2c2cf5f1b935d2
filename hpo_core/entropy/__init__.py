"""Entropy windows: windowed means on packed rows, exact quantile thresholds, and the token masks made of them."""

from .window import EntropyWindow, WindowState, ares, forking_tokens, window_mean

__all__ = ["EntropyWindow", "WindowState", "ares", "forking_tokens", "window_mean"]
