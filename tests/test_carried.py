"""Arguments that are carried to a device and back: results and what a kernel writes are those of the call itself."""

import pytest
import torch
from carried import Carried
from catalogue import Example
from hierarchies import GATES as HIERARCHIES
from hierarchies import inputs_of

import hpo_core as hpo
from hpo_core import gates
from hpo_core.backends import resolve
from hpo_core.specs import LogitRows

BACKEND = "cuda_emulated"


@pytest.fixture(autouse=True)
def emulated():
    if not hpo.backends()[BACKEND]:
        pytest.skip(f"{BACKEND} is not available")


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, tuple) else []


class Watched:
    """The functions of a backend that take no tensor from this side."""

    def __init__(self, op):
        self.functions = resolve(op, torch.empty(0), BACKEND)
        self.there = []

    def move(self, tensor):
        copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        self.there.append(copy)
        return copy

    def __getattr__(self, name):
        function = getattr(self.functions, name)

        def watched(*arguments):
            assert all(any(each is copy for copy in self.there) for each in tensors_in(arguments))
            return function(*arguments)

        return watched


def both(op):
    """The functions themselves, and around them those that carry."""
    watched = Watched(op)
    return watched.functions, Carried(watched, watched.move)


def are_same(one, two):
    one, two = tensors_in(one), tensors_in(two)
    assert len(one) == len(two) > 0
    return all(torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)) for mine, theirs in zip(one, two, strict=True))


@pytest.mark.parametrize("gate", [gates.ppo_clip(), gates.gspo(0.1, 0.2)], ids=["tokens", "rows"])
@pytest.mark.parametrize("want_grad", [True, False])
def test_a_loss(want_grad, gate):
    direct, carried = both("gates")
    inputs = inputs_of(Example(3), gate)
    before = [each.clone() for each in tensors_in(inputs)]
    got = carried.policy_loss(inputs, gate.spec(), want_grad, True)
    assert are_same(got, direct.policy_loss(inputs, gate.spec(), want_grad, True))
    assert (got[2] is None) == (not want_grad)
    assert are_same(tuple(before), tuple(tensors_in(inputs)))


class Exchanging:
    """Another process adds to what segments have added up; counts its calls."""

    def __init__(self):
        self.calls = []

    def sums(self, table):
        self.calls.append("sums")
        table[..., 1:] += table[..., 1:] // 2

    def largest(self, table):
        self.calls.append("largest")
        table.copy_(table.amax(1, keepdim=True).expand_as(table))

    def aggregate_grad(self, table):
        self.calls.append("aggregate_grad")
        table.neg_()


def test_an_exchange_changes_the_tables_there():
    direct, carried = both("gates")
    gate = HIERARCHIES["four levels, through, split"]
    inputs, one, two = inputs_of(Example(3), gate), Exchanging(), Exchanging()
    expected = direct.policy_loss(inputs, gate.spec(), True, True, one)
    assert are_same(carried.policy_loss(inputs, gate.spec(), True, True, two), expected)
    assert one.calls == two.calls == ["sums", "largest", "aggregate_grad"]
    alone = direct.policy_loss(inputs, gate.spec(), True, True)
    assert not torch.equal(alone[0], expected[0]) and not torch.equal(alone[2], expected[2])


def test_a_correction_whose_segments_are_reduced():
    direct, carried = both("corrections")
    gate = gates.tis(1.1, gates.Unit.TRAJECTORY)
    (correction,) = gate.corrections
    example = Example(3)
    leaves = example.batch.hierarchy((correction.unit,))
    inputs = inputs_of(example, gate)._replace(
        leaf_begin=leaves.begin, leaf_end=leaves.end, leaf_row=leaves.row, ancestors=leaves.ancestors
    )

    def reduce(segments, is_extremum):
        assert not is_extremum
        segments[:, 1:] *= 2

    expected = direct.correction(inputs, correction.spec(), reduce)
    assert are_same(carried.correction(inputs, correction.spec(), reduce), expected)
    assert not torch.equal(direct.correction(inputs, correction.spec()), expected)


def logits_and_targets():
    """Rows at a stride of their own."""
    draw = torch.Generator().manual_seed(5)
    return torch.randn(6, 48, generator=draw)[:, 3:40], torch.randint(0, 37, (6,), generator=draw), draw


@pytest.mark.parametrize("into", ["the logits", "another tensor", None])
def test_a_gradient_is_written_where_it_belongs(into):
    direct, carried = both("logprobs")
    logits, targets, draw = logits_and_targets()
    upstream = torch.randn(2, 6, generator=draw).unbind()
    found = []
    for functions in (direct, carried):
        whole = torch.full((6, 48), 7.0)
        own = whole[:, 3:40].copy_(logits)
        rows = LogitRows(own, targets, None, 0.7, -100, None, 0, 37)
        results = functions.token_logprobs(rows, 3)
        given = {"the logits": own, "another tensor": torch.empty(6, 37), None: None}[into]
        gradient = functions.token_logprobs_backward(rows, results[2], *upstream, given)
        assert into is None or gradient is given
        assert torch.equal(own, logits) == (into != "the logits")
        found.append((*results, gradient.contiguous(), whole))
    assert are_same(*found)
    assert (found[1][-1][:, :3] == 7).all() and (found[1][-1][:, 40:] == 7).all()


def test_tensors_that_stay_are_not_carried():
    """A call without tensors of this side is the function's own."""
    moved = []
    carried = Carried(resolve("gates", torch.empty(0), BACKEND), moved.append)
    shape = torch.empty(3, device="meta")
    result = carried.uninitialised(shape.shape, torch.float32, torch.device("meta"))
    assert result.device.type == "meta" and not moved
