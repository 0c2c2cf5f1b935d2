"""hpo_core: reinforcement-learning losses for language models, from hand-written kernels, over packed token batches.

Group-normalised advantages, hierarchical ratio gates and entropy-window masks, put together into one differentiable
loss.
Shapes: ``T`` tokens in the pack, ``S`` packed rows, ``N`` steps, ``G`` prompt groups.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import advantages, aggregation, entropy, gates, kl, logprob_states, segments
from ._version import __version__
from .backends import backends
from .batch import PackedBatch
from .level_metrics import LevelMetrics
from .linear_logprobs import linear_token_logprobs
from .logprobs import TokenLogprobs, TokenStatistics, token_logprobs, token_statistics
from .loss_from_logits import PolicyLossFromLogits, policy_loss_from_logits
from .losses import PolicyLoss, PolicyLossAndGrad, hierarchical_policy_loss, policy_loss, policy_loss_and_grad
from .metrics import Metrics
from .support import support_floor
from .value_loss import ValueLoss, ValueMetrics, value_loss

if TYPE_CHECKING:  # a __getattr__ that it saw would give any misspelt name a type
    from . import plot, testing
else:

    def __getattr__(name: str) -> Any:
        """``hpo_core.testing`` and ``hpo_core.plot`` are imported when they are first used: training needs neither."""
        if name in ("plot", "testing"):
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """The names that completion offers: also the modules above, and no name that this file imports for itself."""
        return __all__


__all__ = [
    "LevelMetrics",
    "Metrics",
    "PackedBatch",
    "PolicyLoss",
    "PolicyLossAndGrad",
    "PolicyLossFromLogits",
    "TokenLogprobs",
    "TokenStatistics",
    "ValueLoss",
    "ValueMetrics",
    "__version__",
    "advantages",
    "aggregation",
    "backends",
    "entropy",
    "gates",
    "hierarchical_policy_loss",
    "kl",
    "linear_token_logprobs",
    "logprob_states",
    "plot",
    "policy_loss",
    "policy_loss_and_grad",
    "policy_loss_from_logits",
    "segments",
    "support_floor",
    "testing",
    "token_logprobs",
    "token_statistics",
    "value_loss",
]
