"""Behind a launch that a GPU refuses no other of the call starts, and the call raises."""

import pytest
import torch
from valid_operators import operator_calls

import hpo_core as hpo
from hpo_core import gates

emulated = pytest.importorskip("hpo_core._cuda_emulated")

OPERATORS = [(name, given) for name, given, _ in operator_calls() if "backend" in given]
MOST = 6  # launches of a call


def launched():
    return sum(emulated.launches().values())


def refused_places(monkeypatch, run):
    """The places at which a refused launch ended the call."""
    for place in range(MOST):
        monkeypatch.setenv("HPO_EMULATION_REFUSED", str(place))
        before = launched()
        try:
            run()
        except RuntimeError as error:
            assert "HPO_EMULATION_REFUSED refuses this launch" in str(error)
            assert launched() - before == place + 1
        else:
            return place
    raise AssertionError("every launch was refused")


@pytest.mark.parametrize(("name", "given"), OPERATORS, ids=[f"{at}-{name}" for at, (name, _) in enumerate(OPERATORS)])
def test_an_operator_stops(name, given, monkeypatch):
    operator = getattr(torch.ops.hpo_core, name)
    assert refused_places(monkeypatch, lambda: operator(**given | {"backend": "cuda_emulated"})) >= 1


def loss_of_many_rows(gate):
    """A call over more rows than one launch would take."""
    rows = torch.arange(600)
    batch = hpo.PackedBatch.from_lengths(rows % 5 + 1, group_ids=rows // 4, domain_ids=rows // 40)
    logp = -1 - torch.rand(batch.total_tokens, generator=torch.Generator().manual_seed(0))
    advantages, weights = torch.where(rows % 2 == 0, 1.0, -1.0), torch.ones(600)
    return lambda: hpo.policy_loss_and_grad(
        logp, logp - 0.125, advantages, batch, gate, weights=weights, backend="cuda_emulated"
    )


@pytest.mark.parametrize(
    ("gate", "least"),
    [(gates.ppo_clip(), 1), (gates.gspo(), 2), (gates.reconstructed.fiberpo_domain(), 3)],
    ids=lambda given: getattr(given, "name", None),
)
def test_a_loss_stops(gate, least, monkeypatch):
    """Afterwards the loss is that of a process without failures."""
    run = loss_of_many_rows(gate)
    expected = run()
    assert refused_places(monkeypatch, run) >= least
    monkeypatch.delenv("HPO_EMULATION_REFUSED")
    again = run()
    assert torch.equal(again.loss, expected.loss) and torch.equal(again.grad, expected.grad)


def test_a_call_that_throws_leaves_no_count_behind(monkeypatch):
    run = loss_of_many_rows(gates.gspo())
    monkeypatch.setenv("HPO_EMULATION_REFUSED", "1")
    monkeypatch.setenv("HPO_EMULATION_ORDER", "sideways")
    with pytest.raises(RuntimeError, match="HPO_EMULATION_ORDER is"):
        run()
    monkeypatch.delenv("HPO_EMULATION_ORDER")
    before = launched()
    with pytest.raises(RuntimeError, match="HPO_EMULATION_REFUSED refuses this launch"):
        run()
    assert launched() - before == 2
