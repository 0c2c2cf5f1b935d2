"""PackedBatch is immutable, and a cached result is never used after its tensors have changed."""

import pickle
import threading
from copy import copy, deepcopy

import pytest
import torch
import torch.utils._python_dispatch
from torch._subclasses.fake_tensor import FakeTensorMode

import hpo_core as hpo
from hpo_core import PackedBatch, aggregation
from hpo_core.batch import immutable

TOKENS = 8
GATE = hpo.gates.fiberpo()  # two levels need a hierarchy, trajectories and default weights, all computed once


def make(**changed):
    given = {
        "cu_seqlens": torch.tensor([0, 4, 6, 8]),
        "mask": torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool),
        "steps": torch.tensor([[0, 2], [2, 4], [4, 6], [6, 8]]),
        "step_ids": torch.tensor([0, 1, 2, 3]),
        "trajectory_ids": torch.tensor([0, 0, 1]),
        "group_ids": torch.tensor([0, 0, 0]),
        "domain_ids": torch.tensor([5, 5, 5]),
    }
    return PackedBatch(**given | changed)


def loss(batch, gate=GATE):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(TOKENS, generator=generator)
    logp = old + 0.3 * torch.randn(TOKENS, generator=generator)
    advantages = torch.randn(batch.rows, generator=generator)
    return hpo.policy_loss_and_grad(logp, old, advantages, batch, gate)


def same(one, other):
    return torch.equal(one.loss, other.loss) and torch.equal(one.grad, other.grad)


# -------------------------------------------------------------------------------------------------- never assigned to


NAMES = (
    "cu_seqlens", "mask", "cu_steps", "steps", "step_ids", "trajectory_ids", "group_ids", "domain_ids", "rows",
    "total_tokens", "padded_shape",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_no_attribute_can_be_assigned_or_deleted(name):
    batch = make()
    before = getattr(batch, name)
    with pytest.raises(AttributeError, match=rf"{name}: a PackedBatch is immutable; make a new one with batch.replace"):
        setattr(batch, name, before)
    with pytest.raises(AttributeError, match=f"{name}: a PackedBatch is immutable"):
        delattr(batch, name)
    assert getattr(batch, name) is before


def test_offsets_cannot_be_narrowed_after_the_checks():
    batch = make()
    with pytest.raises(AttributeError, match=r"cu_seqlens: .* batch.replace\(cu_seqlens=...\)"):
        batch.cu_seqlens = batch.cu_seqlens.int()
    assert batch.replace(cu_seqlens=batch.cu_seqlens.int()).cu_seqlens.dtype == torch.int64


def test_replace_keeps_everything_else():
    batch = make()
    loss(batch)  # fills the cache
    mask = torch.ones(TOKENS, dtype=torch.bool)
    other = batch.replace(mask=mask)
    assert other.row_counts.tolist() == [4, 2, 2] and batch.row_counts.tolist() == [3, 2, 2]
    for name in NAMES:
        if name != "mask":
            assert getattr(other, name) is getattr(batch, name)
    assert same(loss(other), loss(make(mask=mask)))
    assert batch.replace(mask=None).mask is None


def test_replace_checks():
    with pytest.raises(ValueError, match=r"mask: expected shape \[T\] = \[8\], got \[3\]"):
        make().replace(mask=torch.ones(3).bool())
    with pytest.raises(ValueError, match="group_ids: expected one group for all of trajectory 0, got 0 and 1"):
        make().replace(group_ids=torch.tensor([0, 1, 1]))
    assert make().replace(group_ids=torch.tensor([0, 1, 1]), validate=False).group_ids.tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"replace: expected some of mask, cu_seqlens, .*, got padded_shape, rows"):
        make().replace(rows=3, padded_shape=None)


def test_replace_of_a_padded_batch():
    batch = PackedBatch.from_padded(torch.ones(2, 3).bool())
    other = batch.replace(mask=torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert other.padded_shape == (2, 3) and other.row_counts.tolist() == [2, 1]
    assert batch.replace(mask=torch.ones(6).bool()).padded_shape == (2, 3)
    assert batch.replace(cu_seqlens=torch.tensor([0, 6])).padded_shape is None


@pytest.mark.parametrize("again", [copy, deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_copies_are_immutable_and_have_an_empty_cache(again):
    batch = make()
    first = loss(batch)
    other = again(batch)
    assert other._cache == {} and batch._cache
    assert same(loss(other), first)
    with pytest.raises(AttributeError, match="immutable"):
        other.mask = None


def test_row_counts_are_a_copy():
    batch = make()
    first = loss(batch)
    batch.row_counts.zero_()
    assert batch.row_counts.tolist() == [3, 2, 2] and same(loss(batch), first)


# ------------------------------------------------------------------------------------------------- refilled in place


REFILLS = {
    "mask": torch.tensor([0, 1, 1, 0, 1, 0, 1, 0], dtype=torch.bool),
    "cu_seqlens": torch.tensor([0, 2, 5, 8]),
    "steps": torch.tensor([[0, 1], [1, 4], [4, 6], [7, 8]]),
    "step_ids": torch.tensor([0, 0, 2, 3]),
    "trajectory_ids": torch.tensor([0, 1, 1]),
    "group_ids": torch.tensor([1, 1, 0]),
    "domain_ids": torch.tensor([5, 5, 6]),
}
GATES = {
    "mask": GATE,
    "cu_seqlens": GATE,
    "steps": hpo.gates.step_gspo(),
    "step_ids": hpo.gates.step_gspo(),
    "trajectory_ids": GATE,
}


def of_all_levels():
    from hpo_core.gates import Level, LogClip, RatioGate, Tanh, Unit

    units = (Unit.STEP, Unit.TRAJECTORY, Unit.GROUP, Unit.DOMAIN)
    levels = (Level(Tanh(bound), unit=unit) for unit, bound in zip(units, (0.01, 0.02, 0.03, 0.04), strict=True))
    return RatioGate("all", LogClip((-0.2, -0.2), (0.2, 0.2)), tuple(levels))


def replaced(tensor, value):
    tensor.data = value.clone()  # other memory with the same version


@pytest.mark.parametrize("fill", [torch.Tensor.copy_, replaced], ids=["in place", "other memory"])
@pytest.mark.parametrize("name", REFILLS)
def test_a_refilled_tensor_invalidates_cached_results(name, fill):
    """The loss is that of a new batch of the same values: no denominator and no hierarchy of the old values stays."""
    gate = GATES.get(name, of_all_levels())
    batch = make()
    before = loss(batch, gate)
    assert same(loss(batch, gate), before)
    fill(getattr(batch, name), REFILLS[name])
    fresh = loss(make(**{name: REFILLS[name]}, validate=False), gate)
    assert same(loss(batch, gate), fresh) and not same(fresh, before)


def test_the_denominators_of_a_refilled_mask():
    """The mask drops half of the tokens: the mean loss stays -1, it does not become -0.5."""
    mask = torch.ones(32, dtype=torch.bool)
    batch = PackedBatch(torch.arange(5) * 8, mask=mask)
    logp = torch.zeros(32)
    assert hpo.policy_loss(logp, None, torch.ones(4), batch).loss == -1
    mask[:16] = False
    assert hpo.policy_loss(logp, None, torch.ones(4), batch).loss == -1
    assert batch.row_counts.tolist() == [0, 0, 8, 8]


def test_views_share_the_versions():
    """A padded mask is refilled through the tensor that the trainer has."""
    mask = torch.ones(2, 4, dtype=torch.bool)
    batch = PackedBatch.from_padded(mask)
    assert batch.row_counts.tolist() == [4, 4]
    mask[0, 1:] = False
    assert batch.row_counts.tolist() == [1, 4]


def test_unchanged_results_are_computed_once():
    calls = []

    def count(batch, *rest):
        calls.append(rest)
        return len(calls)

    batch = make()
    assert [batch.once(count), batch.once(count), batch.once(count, 1)] == [1, 1, 2]
    batch.mask.logical_not_()
    assert [batch.once(count), batch.once(count)] == [3, 3]


def test_static_results_do_not_depend_on_the_mask():
    batch, calls = make(), []
    batch.once(calls.append, static=True)
    batch.mask.logical_not_()
    batch.once(calls.append, static=True)
    assert len(calls) == 1
    batch.group_ids.add_(1)
    batch.once(calls.append, static=True)
    assert len(calls) == 2


# ------------------------------------------------------------------------------------------------------------ tracing


def test_fake_tensors_are_not_cached():
    batch = make()
    with FakeTensorMode(allow_non_fake_inputs=True):
        hpo.policy_loss(torch.zeros(TOKENS), None, torch.ones(3), batch, GATE)
    assert batch._cache == {}
    assert same(loss(batch), loss(make()))


def test_a_trace_reads_no_cached_result():
    """Weights of an earlier call are no constants of a trace."""
    batch = make()
    first = hpo.policy_loss(torch.zeros(TOKENS), None, torch.ones(3), batch).loss
    graph = torch.fx.experimental.proxy_tensor.make_fx(
        lambda logp, mask: hpo.policy_loss(logp, None, torch.ones(3), batch.replace(mask=mask, validate=False)).loss
    )(torch.zeros(TOKENS), batch.mask)
    assert graph(torch.zeros(TOKENS), batch.mask) == first == -1
    half = torch.arange(TOKENS) % 2 == 0
    assert graph(torch.zeros(TOKENS), half) == -1


def test_an_export_caches_nothing():
    batch = make()

    class Loss(torch.nn.Module):
        def forward(self, logp):
            return hpo.policy_loss(logp, None, torch.ones(3), batch, GATE).loss

    torch.export.export(Loss(), (torch.zeros(TOKENS),))
    assert batch._cache == {}
    assert same(loss(batch), loss(make()))


def test_compiled_code_counts_a_refilled_mask_and_is_compiled_once():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    batch = make()
    loss(make())  # loads the backend, which would break the first graph in two
    run = torch.compile(lambda logp: hpo.policy_loss(logp, None, torch.ones(3), batch).loss, backend=backend)
    assert run(torch.zeros(TOKENS)) == -1
    assert hpo.policy_loss(torch.zeros(TOKENS), None, torch.ones(3), batch).loss == -1  # an eager call in between
    batch.mask[4:] = False
    assert run(torch.zeros(TOKENS)) == -1 and len(compiled) == 1


def test_fake_tensors_outside_their_mode_are_refused():
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(TOKENS, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask: expected a tensor with memory of its own, got a FakeTensor"):
        make(mask=fake, validate=False)


def test_transforms_cache_nothing():
    batch = make()
    torch.func.grad(lambda logp: hpo.policy_loss(logp, None, torch.ones(3), batch).loss)(torch.zeros(TOKENS))
    assert batch._cache == {}


def test_a_dispatch_mode_sees_every_kernel():
    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            names.append(function.name())
            return function(*arguments, **(keywords or {}))

    batch = make()
    loss(batch)
    names = []
    with Names():
        loss(batch)
    assert "hpo_core::row_weights" in names


def test_default_weights_are_refused_once_there_are_ranks(monkeypatch):
    """The weights are cached; the check that the batch is the whole step is not."""
    batch = make()
    loss(batch)
    monkeypatch.setattr("hpo_core.distributed.world_size", lambda group: 2)
    with pytest.raises(ValueError, match="weights: 2 ranks are initialised"):
        loss(batch)


def test_training_after_a_first_call_in_inference_mode():
    """Autograd cannot save tensors that were made in inference mode."""
    batch = make()
    with torch.inference_mode():
        batch.once(aggregation.token_mean), batch.trajectories, batch.row_counts
    assert batch._cache == {}
    with torch.inference_mode():
        inside = make()
        first = batch.once(aggregation.token_mean)
        assert torch.equal(inside.once(aggregation.token_mean), first)
        inside.mask[4:] = False
        assert not torch.equal(inside.once(aggregation.token_mean), first)  # without versions nothing is kept
    assert inside._cache == {}
    weights = batch.once(aggregation.token_mean)
    (torch.ones(3, requires_grad=True) * weights).sum().backward()


# --------------------------------------------------------------------------------------- CUDA graphs, without a GPU


@pytest.fixture
def capturing(monkeypatch):
    """Switches the state of the current stream."""
    state = {"now": False}
    monkeypatch.setattr(immutable, "_is_capturing", lambda tensor: state["now"])
    return lambda now: state.update(now=now)


def test_a_capture_neither_fills_nor_reads_the_cache(capturing):
    batch = make()
    capturing(True)
    loss(batch)  # the first call: its results are in the pool of the graph
    assert batch._cache == {}
    capturing(False)
    weights = batch.once(aggregation.token_mean)
    capturing(True)
    inside = batch.once(aggregation.token_mean)  # a replay has to count the mask at that time
    assert inside is not weights and torch.equal(inside, weights)
    capturing(False)
    assert batch.once(aggregation.token_mean) is weights


def new_object(batch):
    return object()


def test_a_capture_takes_sizes_of_an_earlier_call(capturing):
    batch = make()
    capturing(True)
    with pytest.raises(ValueError, match="call the loss once before the capture"):
        batch.once(new_object, static=True)
    capturing(False)
    before = batch.once(new_object, static=True)
    capturing(True)
    batch.mask.logical_not_()
    assert batch.once(new_object, static=True) is before
    batch.cu_seqlens.clamp_(max=7)
    with pytest.raises(ValueError, match=r"batch: .* inside a CUDA graph"):
        batch.once(new_object, static=True)


# ------------------------------------------------------------------------------------------------------------ threads


def test_threads_share_a_batch():
    batch = make()
    expected, wrong = loss(make()), []
    start = threading.Barrier(4)

    def work():
        torch.set_num_threads(1)
        start.wait()
        for _ in range(50):
            if not same(loss(batch), expected):
                wrong.append(1)
            batch.mask.logical_or_(batch.mask)  # a new version with the same values

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_change_during_a_computation_invalidates_its_result():
    """The state is read before the computation: a result of half-changed tensors is not kept for the state after it."""
    batch = make()

    def slow(batch):
        count = int(batch.mask.sum())
        batch.mask[:] = True  # as another thread might, during the computation
        return count

    assert batch.once(slow) == 7 and batch.once(slow) == 8
