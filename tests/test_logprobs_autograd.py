"""Derivatives of log-probabilities and entropies, their operators, and compilation."""

import pytest
import torch
from adversarial import integers, normal, upstreams
from breadth import few
from devices import Device, NoHostData, OnDevice
from lazily import Lazy
from logprob_examples import IGNORED, TYPES, both, call, native, types
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import hpo_core as hpo

OPERATORS = torch.ops.hpo_core
dynamo = Lazy("torch._dynamo.testing")


@both
def test_upstream_gradients_of_any_stride(backend):
    logits, targets = normal(6, 33), integers(33, 6)

    def grad(upstream_of):
        leaf = logits.clone().requires_grad_()
        logp, entropy = hpo.token_logprobs(leaf, targets, backend=backend)
        return torch.autograd.grad((logp, entropy), leaf, upstream_of(logp))[0]

    ones = grad(lambda logp: (torch.ones(6), torch.ones(6)))
    assert torch.equal(grad(lambda logp: (torch.tensor(1.0).expand(6), torch.tensor(1.0).expand(6))), ones)
    a, b = upstreams(targets)
    expected = call(logits, targets, upstream=(a, b), backend=backend)[2]
    sliced = torch.stack((a, b, a), 1)
    assert torch.equal(grad(lambda logp: (sliced[:, 0], sliced[:, 1])), expected)


@both
def test_one_of_the_two_gradients(backend):
    logits, targets = normal(6, 33), integers(33, 6)
    a, b = upstreams(targets)
    leaf = logits.clone().requires_grad_()
    result = hpo.token_logprobs(leaf, targets, backend=backend)
    (of_logp,) = torch.autograd.grad(result.logp, leaf, a, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(result.entropy, leaf, b)
    whole = call(logits, targets, upstream=(a, b), backend=backend)[2]
    assert torch.allclose(of_logp + of_entropy, whole, 1e-5, 1e-7)
    assert torch.equal(of_logp, call(logits, targets, upstream=(a, torch.zeros(6)), backend=backend)[2])


@native
def test_a_row_without_an_upstream_gradient(backend):
    logits, targets = normal(3, 40), integers(40, 3)
    upstream = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 2.0])
    grad = call(logits, targets, upstream=upstream, backend=backend)[2]
    assert (grad[0] == 0).all() and (grad[1:] != 0).all()


@native
@types
def test_an_upstream_gradient_that_is_nan_makes_a_row_nan(dtype, backend):
    """Its bits do not matter: arithmetic on a GPU gives 0x7FFFFFFF, elsewhere 0x7FC00000."""
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7FFF8000, 0x7F800001, 0x7F808000])
    nan = torch.cat((bits, bits - 2**31)).to(torch.int32).view(torch.float32)  # of both signs
    logits, targets = normal(10, 90).to(dtype), integers(90, 10)
    for upstream in ((nan, torch.ones(10)), (torch.ones(10), nan)):
        assert call(logits, targets, upstream=upstream, backend=backend)[2].isnan().all()


def test_what_is_kept_for_the_backward():
    logits, targets, kept = normal(8, 1000).requires_grad_(), integers(1000, 8), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        hpo.token_logprobs(logits, targets)
    assert any(tensor.data_ptr() == logits.data_ptr() for tensor in kept)
    assert sum(tensor.numel() for tensor in kept if tensor.data_ptr() != logits.data_ptr()) <= 4 * 8


@native
def test_targets_of_a_rollout_under_inference_mode(backend):
    logits, hidden, weight = normal(3, 9), normal(3, 4), normal(9, 4)
    with torch.inference_mode():
        ids, temperatures, bias = integers(9, 3), torch.tensor([0.5, 1.0, 2.0]), normal(9)

    def gradients(ids, temperatures, bias):
        leaves = [each.clone().requires_grad_() for each in (logits, hidden)]
        one = hpo.token_logprobs(leaves[0], ids, temperatures, backend=backend)
        other = hpo.linear_token_logprobs(leaves[1], weight, ids, bias, temperatures, backend=backend)
        return torch.autograd.grad(sum(each.sum() for each in (*one, *other) if each is not None), leaves)

    expected = gradients(*(each.clone() for each in (ids, temperatures, bias)))
    assert all(map(torch.equal, gradients(ids, temperatures, bias), expected))


def test_logits_that_change_in_between_are_noticed():
    logits = normal(3, 9).requires_grad_() * 1
    logp = hpo.token_logprobs(logits, integers(9, 3)).logp
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    logits, targets = normal(3, 9).requires_grad_(), integers(9, 3)
    with context():
        result = hpo.token_logprobs(logits, targets)
    assert not result.logp.requires_grad and torch.equal(result.logp, hpo.token_logprobs(logits, targets).logp)


def test_derivatives_that_are_not_supported():
    logits, targets = normal(3, 9).requires_grad_(), integers(9, 3)
    (grad,) = torch.autograd.grad(hpo.token_logprobs(logits, targets).logp.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="token_logprobs: second derivatives are not supported"):
        grad.sum().backward()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="token_logprobs: forward-mode derivatives"):
        hpo.token_logprobs(forward_ad.make_dual(logits.detach(), logits.detach()), targets)
    logp = hpo.token_logprobs(logits, targets).logp
    with pytest.raises(RuntimeError, match=r"token_logprobs: vmap of its backward .*; leave is_grads_batched=False"):
        torch.autograd.grad(logp, logits, torch.ones(2, 3), is_grads_batched=True)


@pytest.mark.parametrize("function", [hpo.token_logprobs, hpo.token_statistics, hpo.linear_token_logprobs])
def test_transforms_that_are_not_supported(function):
    name = "linear_token_logprobs" if function is hpo.linear_token_logprobs else "token_logprobs"
    given = (normal(7, 9),) if function is hpo.linear_token_logprobs else ()
    rows, targets = normal(3, 9), integers(7, 3)

    def loss(rows):
        return function(rows, *given, targets).logp.sum()

    with pytest.raises(RuntimeError, match=rf"{name}: torch\.func\.vmap is not supported; pass .* as they are"):
        torch.vmap(lambda row, target: function(row, *given, target).logp)(rows, targets)
    for transform in (torch.func.hessian, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match=f"{name}: forward-mode derivatives .* are not supported"):
            transform(loss)(rows)
    with pytest.raises(RuntimeError, match=f"{name}: forward-mode derivatives .* are not supported"):
        torch.func.jvp(torch.func.grad(loss), (rows,), (rows,))
    with pytest.raises(RuntimeError, match=rf"{name}: vmap of its backward .*torch\.func\.jacrev"):
        torch.func.jacrev(loss)(rows)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{name}: torch.func transforms .* inside torch.compile"):
        torch.compile(torch.func.grad(loss), fullgraph=True, backend="eager")(rows)


def test_constants_in_a_compiled_transform():
    logits, targets = normal(3, 9), integers(9, 3)
    logp = hpo.token_logprobs(logits, targets).logp
    torch.compiler.reset()
    weighted = torch.func.grad(lambda weight: (weight * hpo.token_logprobs(logits, targets).logp).sum())
    assert torch.equal(torch.compile(weighted, fullgraph=True, backend="eager")(torch.ones(3)), logp)


@both
def test_functional_gradients(backend):
    logits, targets = normal(3, 9), integers(9, 3)

    def loss(x):
        logp, entropy = hpo.token_logprobs(x, targets, backend=backend)
        return (logp + 0.5 * entropy).sum()

    expected = call(logits, targets, upstream=(torch.ones(3), torch.full((3,), 0.5)), backend=backend)[2]
    assert torch.equal(torch.func.grad(loss)(logits), expected)


# -------------------------------------------------------------------------------------------- operators and compilation


@pytest.mark.parametrize(("kept", "dtype"), list(zip((2, 3, 4), TYPES, strict=True)), ids=str)
def test_opcheck(kept, dtype):
    logits, targets = normal(2, 3, 30).to(dtype).requires_grad_(), integers(30, 2, 3)
    for temperatures, floors in ((None, torch.full((2, 3), -4.0)), (torch.full((2, 3), 0.5), None)):
        given = (logits, targets, temperatures, 0.7, IGNORED, floors, 0, 30, "")
        torch.library.opcheck(OPERATORS.token_logprobs.default, (*given, kept))
        statistics = OPERATORS.token_logprobs(*given, kept)[2][:3].detach()
        gradients = (torch.ones(2, 3), torch.ones(2, 3) if kept > 2 else None)
        given = (logits.detach(), *given[1:])
        torch.library.opcheck(OPERATORS.token_logprobs_backward.default, (*given, statistics, *gradients))


@both
def test_compiled_without_a_break(backend):
    targets, temperature = integers(50, 2, 3), torch.full((2, 3), 0.5)
    for want_entropy in few(backend, (True, False)):

        def loss(logits, want=want_entropy):
            logp, entropy = hpo.token_logprobs(logits[:, :-1], targets, temperature, entropy=want, backend=backend)
            return (logp if entropy is None else logp + 0.5 * entropy).square().sum()

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        one, other = normal(2, 4, 50).requires_grad_(), normal(2, 4, 50).requires_grad_()
        loss(one).backward()
        compiled(other).backward()
        assert torch.allclose(one.grad, other.grad, 1e-6, 1e-7)


def test_temperatures_of_targets_are_run_time_values_of_a_compiled_graph():
    targets, logits = integers(9, 3), normal(3, 9)
    torch.compiler.reset()
    counter = dynamo.CompileCounter()
    run = lambda each: hpo.token_logprobs(logits, targets, each, entropy_temperature=each + 1)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for temperature in (0.5, 0.7, 0.9):
        each = torch.full((3,), temperature)
        for got, expected in zip(compiled(each), run(each), strict=True):
            assert torch.equal(got, expected)
    assert counter.frame_count == 1


def test_nothing_is_read_by_the_host():
    """Tensors that hold no numbers take the whole path."""
    make = Device()
    with OnDevice(), NoHostData():
        logits, targets, temperature = make(3, 9).requires_grad_(), make(3, dtype=torch.int64), make(3)
        logp, entropy = hpo.token_logprobs(logits, targets, temperature, backend="reference")
        (logp + entropy).sum().backward()
        assert logp.shape == entropy.shape == (3,) and logits.grad.shape == (3, 9)
    with FakeTensorMode():
        logits = torch.empty(3, 9, requires_grad=True)
        targets, temperature = torch.empty(3, dtype=torch.int64), torch.empty(3)
        hpo.token_logprobs(logits, targets, temperature).logp.sum().backward()
        assert logits.grad.shape == (3, 9)
