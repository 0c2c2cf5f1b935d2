"""Entropy windows: windowed aggregates on packed rows, exact quantile thresholds, and the masks, weights and bounds
made of them.

Common arguments:
    entropy: ``[T]`` float32 or float64, in nats: a constant of the differentiation, except in penalties. Functions that
        only average entropies take 16 bits, too.
    batch: a :class:`~hpo_core.PackedBatch`, or the ``[B, L]`` mask of a padded one. If it is padded, tensors ``[T]``
        may be ``[B, L]``, and so are the results. Values at masked positions are not read.
    logp, old_logp, advantages, advantage_level: as in :func:`~hpo_core.policy_loss`.
    is_correct: ``[S]`` bool, whether the response of each row is right.
    group_ids: ``[S]`` integers, the prompt of each row; negative: none. None: one group.
    process_group: the result is that of the tokens of all these ranks.
    backend: a name from :func:`hpo_core.backends`. Default: by device.
"""

from ..specs import OrderRule
from . import reconstructed
from .aggregates import Window, window_aggregate, window_mean
from .controllers import (
    AresPenalty,
    ControlledCoefficient,
    ares_kappa,
    ares_penalty,
    entropic,
    epo_phase,
    skywork_coefficient,
    target_temperature,
    trl_coefficient,
)
from .high_entropy_windows import ares_next_windows, ares_penalty_weights, ares_threshold, ares_windows, count_of_rows
from .low_entropy_segments import less, less_tokens
from .maps import two_knot
from .masks import checked_mask, cover, erc, group_confidence, opened, ulorl
from .penalties import entropy_band, epo, mean_entropy, siren, siren_mean
from .pivots import hapo, hapo_redistribution, hapo_temperature
from .rewards import AresTargets, ares_difficulty, ares_entropy_reward, ares_rewards, ares_scales, ares_targets
from .scopes import quantiles, segment_aggregate, top_k
from .selection import Selection
from .sequences import edge_grpo, empg, ettrl, hapo_advantages, ucas
from .shaping import aepo_ruc, covariance, entropy_advantage, entropy_change, steer, steer_linear
from .statistics import PivotState, ScopeStatistics, fit_pivot, fit_scopes
from .thresholds import archer, d3s_schedule, d3s_tokens, hicra_tokens, siren_tokens
from .token_rewards import grpo_s, gtpo
from .window import EntropyWindow, WindowState, ares, forking_tokens

__all__ = [
    "AresPenalty",
    "AresTargets",
    "ControlledCoefficient",
    "EntropyWindow",
    "OrderRule",
    "PivotState",
    "ScopeStatistics",
    "Selection",
    "Window",
    "WindowState",
    "aepo_ruc",
    "archer",
    "ares",
    "ares_difficulty",
    "ares_entropy_reward",
    "ares_kappa",
    "ares_next_windows",
    "ares_penalty",
    "ares_penalty_weights",
    "ares_rewards",
    "ares_scales",
    "ares_targets",
    "ares_threshold",
    "ares_windows",
    "checked_mask",
    "count_of_rows",
    "covariance",
    "cover",
    "d3s_schedule",
    "d3s_tokens",
    "edge_grpo",
    "empg",
    "entropic",
    "entropy_advantage",
    "entropy_band",
    "entropy_change",
    "epo",
    "epo_phase",
    "erc",
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
    "hicra_tokens",
    "less",
    "less_tokens",
    "mean_entropy",
    "opened",
    "quantiles",
    "reconstructed",
    "segment_aggregate",
    "siren",
    "siren_mean",
    "siren_tokens",
    "skywork_coefficient",
    "steer",
    "steer_linear",
    "target_temperature",
    "top_k",
    "trl_coefficient",
    "two_knot",
    "ucas",
    "ulorl",
    "window_aggregate",
    "window_mean",
]
