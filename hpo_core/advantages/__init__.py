"""Group-normalised advantages: one function per published estimator, each a configuration of one operator."""

from .flat import dr_grpo, grpo, lite_ppo, rloo

__all__ = ["dr_grpo", "grpo", "lite_ppo", "rloo"]
