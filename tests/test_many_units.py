"""Triton's kernels for more units than one program takes, here for few of them: each option of each term is read."""

import importlib

import pytest
import torch
from conftest import NATIVE

from hpo_core.backends import resolve
from hpo_core.specs import Center, GroupInputs, GroupNormalisation, GroupTerm, Scale, Share
from hpo_core.testing import device_of, move

TERMS = {
    "ddof, singletons, coefficient": (
        (
            GroupTerm(ddof=0, keep_singletons=True, coefficient=0.5),
            GroupTerm(scale=Scale.NONE, keep_singletons=True, coefficient=2.0),
        ),
        (Share.DEVIATION, 0.25, 0.5),
    ),
    "batch and absolute": ((GroupTerm(scale=Scale.BATCH, ddof=0), GroupTerm(scale=Scale.ABSOLUTE)), ()),
    "leave one out": ((GroupTerm(Center.LEAVE_ONE_OUT, Scale.NONE, coefficient=3.0),), ()),
    "singletons of a batch": (
        (GroupTerm(keep_singletons=True), GroupTerm(scale=Scale.BATCH, keep_singletons=True)),
        (),
    ),
    "batches": ((GroupTerm(scale=Scale.BATCH), GroupTerm(scale=Scale.BATCH), GroupTerm(scale=Scale.GROUP)), ()),
}  # fmt: skip
GROUPED = {"all": range(3), "none": (), "every second": range(0, 3, 2)}


def drawn(units, terms, grouped, weighted):
    draw = torch.Generator().manual_seed(units + terms)

    def uniform():
        return torch.rand(units, generator=draw)

    def ids():
        return torch.randint(0, max(units // 3, 1), (units,), generator=draw)

    values = tuple(torch.randint(1, 10, (units,), generator=draw).float() * (k + 1) for k in range(terms))
    groupings = tuple(ids() if k in grouped else None for k in range(terms))
    weights = tuple(uniform() + 0.5 if weighted else None for _ in range(terms))
    return GroupInputs(values, groupings, weights, uniform() > 0.3, uniform() > 0.3)


@pytest.fixture
def many(monkeypatch):
    """Every number of units is many."""
    for name in ("advantages", "segments"):
        monkeypatch.setattr(importlib.import_module(f"hpo_core._triton.{name}"), "SCANNED", 0)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("backend", [name for name in NATIVE if name == "triton"])
@pytest.mark.parametrize("units", [30, 1100])
@pytest.mark.parametrize("grouped", GROUPED)
@pytest.mark.parametrize("case", TERMS)
def test_terms(case, grouped, units, backend):
    terms, share = TERMS[case]
    spec = GroupNormalisation(terms, *share)
    for weighted in (False, True):
        inputs = drawn(units, len(terms), GROUPED[grouped], weighted)
        doubles = inputs._replace(values=tuple(each.double() for each in inputs.values))
        expected = resolve("advantages", doubles.values[0], "reference").group_normalise(doubles, spec)
        inputs = move(inputs, device_of(backend))
        advantages = resolve("advantages", inputs.values[0], backend).group_normalise(inputs, spec)
        torch.testing.assert_close(advantages.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("backend", [name for name in NATIVE if name == "triton"])
@pytest.mark.parametrize("units", [1, 8, 130, 200])
def test_statistics(units, backend):
    draw = torch.Generator().manual_seed(1)
    values = torch.randint(1, 10, (units,), generator=draw).float()
    ids = torch.randint(0, max(units // 3, 1), (units,), generator=draw)
    expected = resolve("segments", values, "reference").group_statistics(values.double(), ids, None, None)
    tensors = [each.to(device_of(backend)) for each in (values, ids)]
    statistics = resolve("segments", tensors[0], backend).group_statistics(*tensors, None, None)
    torch.testing.assert_close(statistics.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif("triton" not in NATIVE, reason="needs Triton")
def test_sums_of_programs_have_room():
    launch, covariance, scopes = (
        importlib.import_module(f"hpo_core._triton.{name}") for name in ("launch", "covariance", "scopes")
    )
    assert min(covariance.PROGRAMS.value, scopes.PROGRAMS.value) >= launch.MOST_PROGRAMS
