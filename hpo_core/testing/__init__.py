"""For kernel authors: random packed batches, adversarial inputs, error budgets, and :func:`check` for any kernel.

Layers, each usable alone:

* ``random_*(seed)`` draw one example, a NamedTuple of the arguments of a public function; :func:`policy_losses`,
  :func:`reward_groups`, :func:`steps`, :func:`windows`, :func:`masks` and :func:`scores` are hypothesis strategies;
* ``expect_*(example)`` give the results of the float64 reference with the error budget of a float32 kernel, and
  :func:`assert_within_budget` compares;
* :func:`explain` takes the first token at which two kernels differ through all gates of its way;
* :func:`check` searches for examples that break a promise of the op, shrinks them, and reports on every promise;
  :func:`bench` measures a policy loss next to the one of hpo_core.

>>> import torch
>>> import hpo_core as hpo
>>> from hpo_core import testing
>>> def biased(rewards, group_ids):  # a kernel with a common fault
...     return hpo.advantages.grpo(rewards, group_ids, ddof=0, backend="reference")
>>> report = testing.check(biased, "grpo", examples=20)
>>> report.ok, report.broken[0]
(False, 'exact')
>>> print(report.verdicts[0].detail.split("; ")[-1])
the standard deviation divides by n (biased) where n - 1 is meant
"""

from .benching import Measured, Measurements, bench
from .budget import Expected, assert_within_budget, budget
from .checking import Report, Verdict, check, promises
from .examples import (
    FEATURES,
    PolicyLossExample,
    RewardsExample,
    device_of,
    move,
    random_policy_loss,
    random_rewards,
    random_steps,
)
from .examples_of_entropy import MaskExample, ScoresExample, WindowExample, random_scores, random_window
from .expected import Outcome, expect_policy_loss, expect_rewards, expect_window, run_policy_loss
from .explaining import ExplainedLevel, Explanation, explain
from .layouts import Layout, random_batch, random_layout
from .strategies import layouts, masks, policy_losses, reward_groups, scores, steps, windows

__all__ = [
    "FEATURES",
    "Expected",
    "ExplainedLevel",
    "Explanation",
    "Layout",
    "MaskExample",
    "Measured",
    "Measurements",
    "Outcome",
    "PolicyLossExample",
    "Report",
    "RewardsExample",
    "ScoresExample",
    "Verdict",
    "WindowExample",
    "assert_within_budget",
    "bench",
    "budget",
    "check",
    "device_of",
    "expect_policy_loss",
    "expect_rewards",
    "expect_window",
    "explain",
    "layouts",
    "masks",
    "move",
    "policy_losses",
    "promises",
    "random_batch",
    "random_layout",
    "random_policy_loss",
    "random_rewards",
    "random_scores",
    "random_steps",
    "random_window",
    "reward_groups",
    "run_policy_loss",
    "scores",
    "steps",
    "windows",
]
