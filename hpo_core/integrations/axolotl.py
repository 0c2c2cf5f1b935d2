"""axolotl: GRPO with any gate, estimator and entropy window, from its yaml.

    hpo: {gate: "gspo(eps_low=3e-4, eps_high=4e-4)", advantage: rloo, window: "forking_tokens('0.2')"}

beside ``rl: grpo``. axolotl finds the plugin by its entry point (group ``axolotl.plugins``). The trainer is axolotl's
with :class:`~hpo_core.integrations.trl.HPOMixin` in front, so all that docs/trl.md says holds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

try:
    from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found,unused-ignore]
    from pydantic import BaseModel
except ImportError as error:
    raise ImportError("hpo_core.integrations.axolotl needs axolotl 0.21: pip install axolotl") from error

from ..checks import check
from .named import named_estimator, named_gate, named_window

__all__ = ["HPOArguments", "HPOPlugin"]

_MADE_FROM: dict[str, Callable[[str], Any]] = {"gate": named_gate, "advantage": named_estimator, "window": named_window}

# The arguments of HPOMixin that the yaml names, for the trainer of this process.
_keywords: dict[str, Any] = {}


class HPOArguments(BaseModel):
    """The fields that the plugin adds to axolotl's configuration."""

    hpo: dict[str, str] | None = None


class HPOPlugin(BasePlugin):  # type: ignore[misc]
    """Lets ``hpo:`` of the yaml choose the trainer; does nothing without it."""

    def get_input_args(self) -> str:
        return f"{__name__}.{HPOArguments.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """axolotl's own place for trainer classes, ``get_trainer_cls`` of a plugin, builds them without a model and
        without rewards; ``trainer_cls`` does not.

        Raises:
            ValueError: a key or a name that hpo_core does not know; a trainer that cannot be combined with ours.
        """
        if not cfg.hpo:
            return
        unknown = sorted(set(cfg.hpo) - set(_MADE_FROM))
        check(not unknown, "hpo: expected {}, got {}", ", ".join(_MADE_FROM), ", ".join(unknown))
        check(str(cfg.rl) in ("grpo", "RLType.GRPO"), "rl: hpo_core's loss is one of grpo, got {!r}", cfg.rl)
        ours = f"{__name__}.HPOAxolotlTrainer"
        check(cfg.trainer_cls in (None, ours), "trainer_cls: hpo: takes its place, got {!r}", cfg.trainer_cls)
        check(
            (cfg.context_parallel_size or 1) <= 1,
            "context_parallel_size: TRL's loss sees whole completions, expected 1, got {}",
            cfg.context_parallel_size,
        )
        trl = cfg.trl or {}
        for name in ("async_prefetch", "use_data_producer"):
            check(
                not trl.get(name), "trl.{}: axolotl's asynchronous trainer has a loss of its own; set it to false", name
            )
        _keywords.clear()
        _keywords.update({name: _MADE_FROM[name](text) for name, text in cfg.hpo.items()})
        cfg.trainer_cls = ours


def __getattr__(name: str) -> Any:
    """``HPOAxolotlTrainer``, made at its first use: plugins are imported in runs without GRPO, too."""
    if name != "HPOAxolotlTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = importlib.import_module("axolotl.core.trainers.grpo.trainer").AxolotlGRPOTrainer
    mixin = importlib.import_module("hpo_core.integrations.trl").HPOMixin

    def build(self: Any, *args: Any, **keywords: Any) -> None:
        super(trainer, self).__init__(*args, **{**_keywords, **keywords})

    trainer: Any = type(name, (mixin, base), {"__init__": build, "__module__": __name__})
    globals()[name] = trainer
    return trainer
