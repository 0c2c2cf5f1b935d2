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


def test_compiled_without_a_gradient():
    torch.compiler.reset()
    given = inputs()
    compiled = torch.compile(three_calls, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        loss, _ = compiled(*given)
    assert not loss.requires_grad and torch.equal(loss, three_calls(*given)[0])
