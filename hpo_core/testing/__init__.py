"""For who writes kernels: random packed batches, adversarial inputs, error budgets, and :func:`check` for any kernel.

Three layers, each usable alone:

* ``random_*(seed)`` draw one example, a NamedTuple of the arguments of a public function; :func:`policy_losses`,
  :func:`reward_groups`, :func:`windows` and :func:`scores` are the same as hypothesis strategies;
* ``expect_*(example)`` give what the float64 reference says, with what an honest float32 kernel may miss of it, and
  :func:`assert_within_budget` compares;
* :func:`check` searches for an example that breaks a promise of the op, shrinks it, and names the promise.

>>> import torch
>>> import hpo_core as hpo
>>> from hpo_core import testing
>>> def biased(rewards, group_ids):  # a kernel with a common fault
...     return hpo.advantages.grpo(rewards, group_ids, ddof=0, backend="reference")
>>> try:
...     testing.check(biased, "grpo", examples=20)
... except AssertionError as error:
...     print(str(error).splitlines()[0].split("; ")[-1])
the standard deviation divides by n (biased) where n - 1 is meant
"""

from .budget import REGIONS, Expected, assert_within_budget, budget
from .checking import Report, check, promises
from .examples import (
    FEATURES,
    Layout,
    PolicyLossExample,
    RewardsExample,
    ScoresExample,
    WindowExample,
    device_of,
    layouts,
    move,
    policy_losses,
    random_batch,
    random_layout,
    random_policy_loss,
    random_rewards,
    random_scores,
    random_window,
    reward_groups,
    scores,
    windows,
)
from .expected import Outcome, expect_policy_loss, expect_rewards, expect_window, run_policy_loss

__all__ = [
    "FEATURES",
    "REGIONS",
    "Expected",
    "Layout",
    "Outcome",
    "PolicyLossExample",
    "Report",
    "RewardsExample",
    "ScoresExample",
    "WindowExample",
    "assert_within_budget",
    "budget",
    "check",
    "device_of",
    "expect_policy_loss",
    "expect_rewards",
    "expect_window",
    "layouts",
    "move",
    "policy_losses",
    "promises",
    "random_batch",
    "random_layout",
    "random_policy_loss",
    "random_rewards",
    "random_scores",
    "random_window",
    "reward_groups",
    "run_policy_loss",
    "scores",
    "windows",
]
