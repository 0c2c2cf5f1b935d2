"""The loss in compiled code: no break, no graph for each size, the same numbers."""

import os
import shutil

import pytest
import torch
from lazily import Lazy
from op_inputs import GATES, inputs

import hpo_core as hpo

dynamo = Lazy("torch._dynamo.testing")
SHAPES = ((4, 8), (6, 9), (8, 17), (10, 5))


def three_calls(logp, old_logp, advantages, entropy, batch):
    result = hpo.policy_loss(logp, old_logp, advantages, batch, GATES["token"])
    return result.loss, result.metrics.vector


def single_call(logp, old_logp, rewards, entropy, batch, gate=GATES["trajectory"]):
    window = hpo.entropy.ares(2, "0.5")
    result = hpo.hierarchical_policy_loss(logp, old_logp, rewards, batch, gate=gate, window=window, entropy=entropy)
    return result.loss, result.metrics.vector


def own_batch(logp, old_logp, rewards, entropy, batch):
    """The batch, the gate and the weights are made inside the compiled function."""
    batch = hpo.PackedBatch(batch.cu_seqlens, batch.mask, group_ids=batch.group_ids, validate=False)
    weights = hpo.aggregation.seq_mean_token_mean(batch)
    result = hpo.policy_loss(
        logp, old_logp, rewards, batch, hpo.gates.dapo(), weights=weights, kl=hpo.kl.k3(0.1), ref_logp=old_logp
    )
    return result.loss, result.metrics.vector


def padded(logp, old_logp, rewards, entropy, batch):
    shape = (batch.rows, logp.numel() // batch.rows)
    mask = batch.mask.view(shape)
    result = hpo.policy_loss(logp.view(shape), old_logp.view(shape), rewards, mask, GATES["trajectory"])
    return result.loss, result.metrics.vector


def several_rows(logp, old_logp, rewards, entropy, batch):
    batch = hpo.PackedBatch(batch.cu_seqlens, batch.mask, trajectory_ids=batch.group_ids, validate=False)
    return three_calls(logp, old_logp, rewards, entropy, batch)


def compare(compiled, function, given):
    one, other = given.leaf(), given.leaf()
    loss, vector = compiled(one, *given[1:])
    loss.backward()
    expected, expected_vector = function(other, *given[1:])
    expected.backward()
    assert torch.equal(loss, expected) and torch.equal(one.grad, other.grad)
    assert torch.equal(vector, expected_vector) and not vector.requires_grad


def assert_two_graphs(backend, function):
    """One graph, and one more with sizes as symbols when they change; then none."""
    torch.compiler.reset()
    counter = dynamo.CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for shape in SHAPES:
        compare(compiled, function, inputs(*shape))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    "function", [three_calls, own_batch, padded, several_rows], ids=lambda function: function.__name__
)
def test_compiled(function):
    assert_two_graphs("aot_eager", function)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
def test_single_call_compiled_by_inductor():
    assert_two_graphs("inductor", single_call)


MADE_INSIDE = {
    "levels": lambda: hpo.gates.gspo(),
    "rollback": lambda: hpo.gates.fiberpo(),
    "gamma": lambda: hpo.gates.vespo(),
    "correction": lambda: hpo.gates.tis(),
    "numbers of a clip": lambda: hpo.gates.ce_gppo(),
}


@pytest.mark.parametrize("preset", MADE_INSIDE.values(), ids=MADE_INSIDE)
def test_a_gate_made_inside_a_compiled_function(preset):
    torch.compiler.reset()
    given = inputs()

    def loss(logp):
        gate = preset()
        return given.loss(logp, gate, rollout_logp=given.old_logp - 0.8 if gate.needs_rollout else None)

    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    assert torch.equal(compiled(given.logp), loss(given.logp))


def test_one_batch_compiled_again_and_again():
    """The cache of a batch costs at most one more compilation."""
    torch.compiler.reset()
    given = inputs()
    counter = dynamo.CompileCounterWithBackend("eager")
    compiled = torch.compile(three_calls, fullgraph=True, backend=counter)
    for _ in range(4):
        compare(compiled, three_calls, given)
    assert counter.frame_count <= 2


def test_bounds_are_run_time_values_of_a_compiled_graph():
    """The numbers of a gate are its constants (docs/numerics.md): their schedule goes through bounds per token."""
    given = inputs()
    counter = dynamo.CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()

    def loss(logp, bounds):
        return given.loss(logp, gate_inputs=hpo.gates.GateInputs(bounds=bounds))

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for epsilon in (0.1, 0.2, 0.3):
        bounds = torch.full_like(given.logp, 1 - epsilon), torch.full_like(given.logp, 1 + epsilon)
        assert torch.equal(compiled(given.logp, bounds), loss(given.logp, bounds))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_of_an_estimator_may_change_in_compiled_code(dynamic):
    """Dynamo then knows them by symbols alone."""
    torch.compiler.reset()
    rewards, ids = torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([0, 0, 1, 1])

    def both(rewards, number):
        steps = hpo.advantages.gigpo(rewards, ids, ids, ids, step_weight=number)
        return steps + hpo.advantages.ngrpo(rewards, ids, best=number)

    compiled = torch.compile(both, fullgraph=True, dynamic=dynamic, backend="eager")
    for number in (0.5, 0.7):
        assert torch.equal(compiled(rewards, number), both(rewards, number))


def test_a_gate_of_other_numbers_is_compiled_anew():
    given = inputs()
    torch.compiler.reset()
    compiled = torch.compile(lambda logp, gate: given.loss(logp, gate), fullgraph=True, backend="aot_eager")
    for epsilon in (0.1, 0.2, 0.3, 0.1):
        gate = hpo.gates.ppo_clip(epsilon, epsilon)
        assert torch.equal(compiled(given.logp, gate), given.loss(given.logp, gate))


@pytest.mark.long  # of Dynamo and AOT
def test_a_head_over_ranks_falls_back_to_eager_code():
    """After the graph break of a gather Dynamo compiles the functions behind it, but no kernel."""
    torch.compiler.reset()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        draw = torch.Generator().manual_seed(0)
        hidden, weight = torch.randn(5, 4, generator=draw), torch.randn(6, 4, generator=draw)
        given = {"targets": torch.tensor([3, 0, 5, 1, 2]), "process_group": torch.distributed.group.WORLD}
        compiled = torch.compile(lambda hidden: hpo.linear_token_logprobs(hidden, weight, **given), backend="aot_eager")
        assert torch.equal(compiled(hidden).logp, hpo.linear_token_logprobs(hidden, weight, **given).logp)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("captured", ["capture_dynamic_output_shape_ops", "capture_scalar_outputs"])
def test_a_batch_is_checked_in_compiled_code(captured):
    torch.compiler.reset()

    def loss(logp, lengths):
        return hpo.policy_loss(logp, None, torch.ones(2), hpo.PackedBatch.from_lengths(lengths)).loss

    with torch._dynamo.config.patch(**{captured: True}):
        assert torch.compile(loss, backend="eager")(torch.zeros(4), [2, 2]) == -1


class _Loss(torch.nn.Module):
    def forward(self, logp, advantages, offsets):
        batch = hpo.PackedBatch(offsets, total_tokens=logp.shape[0], validate=False)
        return hpo.policy_loss(logp, None, advantages, batch).loss


@pytest.mark.parametrize("strict", [False, True])
def test_exported_sizes_have_no_bounds(strict):
    tokens, rows = torch.export.Dim("tokens", min=2), torch.export.Dim("rows", min=2)
    given = torch.zeros(9), torch.ones(3), torch.tensor([0, 4, 6, 9])
    exported = torch.export.export(
        _Loss(), given, dynamic_shapes=({0: tokens}, {0: rows}, {0: rows + 1}), strict=strict
    )
    assert exported.module()(torch.zeros(5), torch.ones(2), torch.tensor([0, 1, 5])) == -1


def test_compiled_without_a_gradient():
    torch.compiler.reset()
    given = inputs()
    compiled = torch.compile(three_calls, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        loss, _ = compiled(*given)
    assert not loss.requires_grad and torch.equal(loss, three_calls(*given)[0])
