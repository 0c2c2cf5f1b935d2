"""Examples with the optional inputs that a gate takes."""

import itertools

import pytest
from catalogue import KINDS

from hpo_core import testing
from hpo_core.testing import Layout

LONG = Layout(
    (0, 1, 2500, 130, 1, 0, 1025, 3), tail=5, masked="some", shared=True, seed=3
)  # beyond every kernel's tile

every_gate = pytest.mark.parametrize("gate", KINDS.values(), ids=KINDS)


def optional_inputs(gate):
    """The optional inputs that this gate takes and whose presence a kernel may see."""
    names = ["window", "token_mask", "token_weight", "on_policy", "token_advantages"]
    return names + ["bounds"] * gate.takes_bounds + ["trajectories"] * (gate.level is not None)


def subsets(names):
    return [set(chosen) for size in range(len(names) + 1) for chosen in itertools.combinations(names, size)]


def example_of(number, gate, features, penalty):
    """Small, ragged, with and without mask, tail and entropy; ``number`` also seeds the values."""
    masked = ("some", "none", "row")[number % 3]
    layout = Layout(((3, 0, 1, 4, 2), (1, 5, 2), (0, 2, 6, 1))[number % 3], number % 4, masked, True, number)
    features = {"weights", *features} | ({"kl"} if penalty else set()) | ({"entropy"} if number % 2 else set())
    features |= {"kl_weight"} if number % 3 == 1 else set()
    return testing.random_policy_loss(0, gate, features, penalty=penalty, layout=layout)
