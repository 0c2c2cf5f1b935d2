"""The loss in transforms of torch.func, traces and dispatch modes: it works, or an error says why not."""

import functools
import os
import shutil
import subprocess
import sys

import pytest
import torch
from op_inputs import GATES, Log, gradient, inputs
from torch.autograd import forward_ad

import hpo_core as hpo


def test_a_batch_outlives_the_transform_it_was_first_used_in():
    batch = hpo.PackedBatch.from_lengths([3, 2], trajectory_ids=torch.tensor([0, 1]))
    logp, advantages = torch.zeros(5), torch.tensor([1.0, -1.0])
    for gate in (hpo.gates.gspo(), hpo.gates.fiberpo()):

        def loss(logp, gate=gate):
            return hpo.policy_loss(logp, torch.zeros(5), advantages, batch, gate).loss

        expected = torch.tensor([-0.2, -0.2, -0.2, 0.2, 0.2])
        assert torch.equal(torch.func.grad(loss)(logp), expected) and torch.equal(torch.func.grad(loss)(logp), expected)
        torch.testing.assert_close(loss(logp), torch.tensor(-0.2))


def test_functional_gradients():
    given = inputs()
    expected = gradient(given.loss, given)
    assert torch.equal(torch.func.grad(given.loss)(given.logp), expected)
    value, pull = torch.func.vjp(given.loss, given.logp)
    assert torch.equal(value, given.loss(given.logp)) and torch.equal(pull(torch.tensor(2.0))[0], 2 * expected)
    parameters = {"logp": given.logp}
    got = torch.func.grad(lambda parameters: given.loss(parameters["logp"], GATES["trajectory"]))(parameters)
    assert torch.equal(got["logp"], gradient(lambda logp: given.loss(logp, GATES["trajectory"]), given))


def functions():
    draw = torch.Generator().manual_seed(0)
    logits, weight = torch.randn(8, 20, generator=draw), torch.randn(20, 6, generator=draw)
    hidden, targets = torch.randn(8, 6, generator=draw), torch.randint(20, (8,), generator=draw)
    given = inputs()
    logprobs = functools.partial(hpo.token_logprobs, targets=targets)
    linear = functools.partial(hpo.linear_token_logprobs, weight=weight, targets=targets)
    return {
        "policy_loss": (lambda logp: given.loss(logp), given.logp),
        "policy_loss, levels": (lambda logp: given.loss(logp, GATES["trajectory"]), given.logp),
        "token_logprobs": (lambda x: logprobs(x).logp.square().sum() + logprobs(x).entropy.sum(), logits),
        "linear_token_logprobs": (lambda x: linear(x).logp.square().sum(), hidden),
    }


@pytest.mark.parametrize("name", functions())
def test_a_trace_of_a_transform_records_the_kernels(name):
    """A node inside a transform runs below the transforms, where the trace still listens."""
    function, x = functions()[name]
    graph = torch.fx.experimental.proxy_tensor.make_fx(torch.func.grad(function))(x)
    first, other = (each.clone().requires_grad_() for each in (x, 0.5 * x))
    expected = [torch.autograd.grad(function(leaf), leaf)[0] for leaf in (first, other)]
    torch.testing.assert_close(graph(0.5 * x), expected[1])
    assert not torch.allclose(*expected)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert torch.func.grad(function)(mode.from_tensor(x)).shape == x.shape


def test_transforms_without_a_rule_say_so():
    given = inputs()
    with pytest.raises(RuntimeError, match=r"policy_loss: torch\.func\.vmap is not supported; call the loss once"):
        torch.func.vmap(given.loss)(torch.stack((given.logp, given.logp)))


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and tells each check of a shape
def test_a_trace_records_the_loss():
    given, other = inputs(), inputs()
    traced = torch.jit.trace(given.loss, given.leaf(), check_trace=False)
    leaf = (other.logp - 0.1).requires_grad_()
    (got,) = torch.autograd.grad(traced(leaf), leaf)
    assert torch.equal(got, gradient(lambda logp: given.loss(logp - 0.1), other))


FORWARD_MODE = "forward-mode derivatives .* are not supported"


def test_forward_mode_is_refused_by_name():
    """An incoming tangent would be lost, of logp and, like a gradient, of constants."""
    given = inputs()
    of_one_tangent = functools.partial(torch.func.jvp, given.loss, (given.logp,), (given.logp,))
    for transform in (torch.func.jacfwd, torch.func.hessian, lambda _: lambda _: of_one_tangent()):
        with pytest.raises(RuntimeError, match=FORWARD_MODE):
            transform(given.loss)(given.logp)
    with forward_ad.dual_level():
        for logp in (given.logp, given.leaf()):
            with pytest.raises(RuntimeError, match=FORWARD_MODE):
                given.loss(forward_ad.make_dual(logp, torch.ones_like(logp)))
        dual = forward_ad.make_dual(given.old_logp, given.logp)
        with pytest.raises(ValueError, match="old_logp: it is a constant of the loss but has a tangent"):
            hpo.policy_loss(given.logp, dual, given.advantages, given.batch)
        assert given.loss(given.logp).isfinite()


def test_the_reference_has_forward_mode():
    given = inputs()
    _, tangent = torch.func.jvp(lambda logp: given.loss(logp, backend="reference"), (given.logp,), (given.old_logp,))
    torch.testing.assert_close(tangent, (gradient(given.loss, given) * given.old_logp).sum())


def test_transforms_inside_compiled_code_are_refused_by_name():
    given = inputs()
    compiled = torch.compile(torch.func.grad_and_value(given.loss), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="take the transform out of the compiled function, or call"):
        compiled(given.logp)


def test_the_gradient_inside_compiled_code():
    given = inputs()

    def both(logp):
        out = hpo.policy_loss_and_grad(logp, given.old_logp, given.advantages, given.batch, GATES["token"])
        return out.loss, out.grad

    loss, grad = torch.compile(both, fullgraph=True, backend="aot_eager")(given.logp)
    assert torch.equal(loss, given.loss(given.logp)) and torch.equal(grad, gradient(given.loss, given))


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
@pytest.mark.long  # nine seconds of Dynamo in a process of its own
def test_a_graph_break_before_the_first_call_leaves_backends_intact():
    """Dynamo continues to trace after a break, and would keep an empty copy of a backend made during the trace."""
    program = """
import torch, hpo_core as hpo
batch, zeros = hpo.PackedBatch.from_lengths([3, 2]), torch.zeros(5)
loss = lambda logp: hpo.policy_loss(logp, zeros, torch.ones(2), batch).loss
grad, value = torch.compile(torch.func.grad_and_value(loss))(zeros)
assert value == -1 and grad.tolist() == hpo.policy_loss_and_grad(zeros, zeros, torch.ones(2), batch).grad.tolist()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_transforms_of_the_reference_see_corrections_of_segments():
    """In float64, which no operator takes."""
    batch = hpo.PackedBatch.from_lengths([3, 2], trajectory_ids=torch.tensor([4, 4]))
    old = -torch.rand(5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = {"rollout_logp": old + 0.1, "backend": "reference"}

    def loss(logp):
        return hpo.policy_loss(logp, old, torch.ones(2).double(), batch, hpo.gates.mis(), **options).loss

    leaf = (old + 0.05).requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(leaf.detach()), expected) and expected.abs().max() > 0


def test_dispatch_modes_see_the_operators():
    plain, given = gradient(inputs().loss, inputs()), inputs()
    with Log() as log:
        window = hpo.entropy.ares(2, "0.5")
        leaf = given.leaf()
        rewards = given.advantages
        hpo.hierarchical_policy_loss(leaf, given.old_logp, rewards, given.batch, window=window, entropy=given.entropy)
        assert torch.equal(gradient(given.loss, given), plain)
        hpo.policy_loss_and_grad(given.logp, given.old_logp, given.advantages, given.batch)
    seen = [name.split(".")[1] for name in log.names if name.startswith("hpo_core")]
    single = ["group_normalise", "row_spans", "window_score", "order_statistic"]
    expected = [*single, *["row_weights", "policy_loss"] * 3]
    assert seen == expected


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of a subclass")


def test_subclasses_go_through_the_dispatcher():
    given = inputs()
    with pytest.raises(NotImplementedError, match=r"hpo_core\.policy_loss\.default of a subclass"):
        given.loss(given.logp.as_subclass(Subclass))
