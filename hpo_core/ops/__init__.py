"""The ops: plain tensors go straight to the backend, traced ones through operators of ``torch.library``."""

from .advantages import group_normalise
from .corrections import correction
from .covariance import covariance
from .entropy import order_statistic, select, select_top, window_score
from .gates import policy_loss, policy_loss_and_grad
from .library import is_traced, keeps_hooked
from .linear_logprobs import linear_token_logprobs
from .logprob_states import over_ranks
from .logprobs import token_logprobs
from .scopes import interpolated, order_statistics, segments_of_call, select_exact
from .segments import group_statistics, recurrence, row_counts, row_spans, row_weights

__all__ = [
    "correction",
    "covariance",
    "group_normalise",
    "group_statistics",
    "interpolated",
    "is_traced",
    "keeps_hooked",
    "linear_token_logprobs",
    "order_statistic",
    "order_statistics",
    "over_ranks",
    "policy_loss",
    "policy_loss_and_grad",
    "recurrence",
    "row_counts",
    "row_spans",
    "row_weights",
    "segments_of_call",
    "select",
    "select_exact",
    "select_top",
    "token_logprobs",
    "window_score",
]
