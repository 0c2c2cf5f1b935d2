"""``values *= factor`` in place, and the backwards that hand on a gradient which the forward has computed."""

import importlib
import math

import pytest
import torch
from breadth import is_interpreted
from catalogue import Example
from conftest import NATIVE
from hierarchies import inputs_of

import hpo_core as hpo
from hpo_core import gates
from hpo_core.backends import resolve
from hpo_core.ops.gates import _numbers_of
from hpo_core.testing import device_of

OPERATORS = torch.ops.hpo_core
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
# A signalling NaN, which any multiplication makes a quiet one.
SIGNALLING = {torch.float32: 0x7F800001, torch.bfloat16: 0x7F81, torch.float16: 0x7C01}
GUARD = 8  # elements before and after the values

of_gpus = pytest.mark.parametrize("backend", [name for name in NATIVE if name != "cpu"])
types = pytest.mark.parametrize("dtype", INTEGERS, ids=str)


def bits(values):
    return values.detach().cpu().contiguous().view(INTEGERS[values.dtype])


def same(one, other):
    return torch.equal(bits(one), bits(other))


def memory(dtype, count, offset):
    """Numbers of many sizes, and the special ones where there is room, between guards; the values begin misaligned by
    ``offset``."""
    draw = torch.Generator().manual_seed(count + offset)
    whole = (
        torch.randn(2 * GUARD + offset + count, generator=draw)
        * torch.randn(2 * GUARD + offset + count, generator=draw).mul(6).exp2()
    )
    whole = whole.to(dtype)
    special = torch.tensor([math.inf, -math.inf, -0.0, 0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny / 4])
    values = whole[GUARD + offset : GUARD + offset + count]
    if count > len(special):
        values[-len(special) :] = special.to(dtype)
        values[0] = math.nan
        values.view(INTEGERS[dtype])[1] = SIGNALLING[dtype]
    return whole


def scaled(backend, dtype, count, offset, factor):
    """The memory before and after."""
    before = memory(dtype, count, offset)
    whole = before.to(device_of(backend), copy=True)
    assert whole.data_ptr() % 16 == 0
    values = whole[GUARD + offset : GUARD + offset + count]
    result = resolve("gates", values, backend).scale(values, torch.tensor(factor, device=whole.device))
    assert result.data_ptr() == values.data_ptr() and result.shape == values.shape
    return before, whole.cpu()


def ordered(values):
    """Integers in the order of the numbers, whose neighbours differ by 1; -0 and 0 are one."""
    integers = bits(values).int()
    return torch.where(integers < 0, torch.iinfo(INTEGERS[values.dtype]).min - integers, integers)


SIZES = pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, 70001])
OFFSETS = pytest.mark.parametrize("offset", [0, 1, 2, 3, 4])


@of_gpus
@types
@SIZES
@OFFSETS
@pytest.mark.parametrize("factor", [0.3, -3.0, 0.0, math.nan])
def test_values_are_products(factor, offset, count, dtype, backend):
    before, after = scaled(backend, dtype, count, offset, factor)
    first, last = GUARD + offset, GUARD + offset + count
    assert same(after[:first], before[:first]) and same(after[last:], before[last:])
    got, expected = after[first:last], (before[first:last].float() * factor).to(dtype)
    defined = ~expected.isnan()
    assert torch.equal(~got.isnan(), defined)
    if is_interpreted(backend) and dtype is not torch.float32:
        # The interpreter rounds to 16 bits in a way of its own, and loses bits of what is subnormal in bfloat16.
        defined &= (expected == 0) | (expected.abs() >= torch.finfo(dtype).tiny)
        assert ((ordered(got) - ordered(expected))[defined].abs() <= 1).all()
        assert torch.equal(got.signbit()[defined], expected.signbit()[defined])
    else:
        assert same(got[defined], expected[defined])


@of_gpus
@types
@SIZES
@OFFSETS
def test_a_factor_of_1_touches_nothing(offset, count, dtype, backend):
    before, after = scaled(backend, dtype, count, offset, 1.0)
    assert same(after, before)


@of_gpus
def test_a_thread_takes_more_than_one_vector(backend):
    """Where there are more than all blocks of a launch take at once."""
    count = 2_200_003
    with pytest.MonkeyPatch.context() as patched:
        if is_interpreted(backend):
            patched.setattr(importlib.import_module("hpo_core._triton.launch"), "MOST_PROGRAMS", 2)
            count = 200_003
        values = torch.arange(count, dtype=torch.float32, device=device_of(backend)).bfloat16()
        expected = -2 * values
        resolve("gates", values, backend).scale(values, torch.tensor(-2.0, device=values.device))
    assert same(values, expected)


class Elsewhere(torch.Tensor):
    """A number on a device: reading it would wait for the device."""

    is_cpu = False

    def item(self):
        raise AssertionError("a synchronisation")


@of_gpus
def test_a_factor_on_a_device_is_read_there(backend):
    """The kernel reads it for contiguous values and a factor in float32, PyTorch for others."""
    calls, ours = [], importlib.import_module("hpo_core.ops.gates")

    def scaling(op, values, asked):
        calls.append(op)
        assert asked == backend
        return resolve(op, values, asked)

    wide = torch.arange(24.0, device=device_of(backend)).view(4, 6)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ours, "resolve", scaling)
        for dtype in (torch.float32, torch.float64):
            for values, by_kernel in ((wide.clone(), dtype is torch.float32), (wide.clone()[:, 1:3], False)):
                expected = 3 * values
                factor = torch.tensor(3.0, dtype=dtype, device=wide.device).as_subclass(Elsewhere)
                result = ours.times(values, factor, backend)
                assert result.data_ptr() == values.data_ptr() and torch.equal(values, expected)
                assert bool(calls) == by_kernel
                calls.clear()


# ------------------------------------------------------------------------------------------------------------ backwards


def packed(device):
    logp, old = (-torch.rand(2, 12, generator=torch.Generator().manual_seed(1))).to(device).unbind()
    batch = hpo.PackedBatch(torch.tensor([0, 5, 12], device=device))
    return logp, old, torch.tensor([1.0, -0.5], device=device), batch


def from_logp(backend, dtype):
    logp, old, advantages, batch = packed(device_of(backend))
    leaf = logp.requires_grad_()
    return leaf, hpo.policy_loss(leaf, old, advantages, batch, gates.reinforce(), backend=backend).loss


def from_levels(backend, dtype):
    logp, old, advantages, batch = packed(device_of(backend))
    leaf = logp.requires_grad_()
    return leaf, hpo.policy_loss(leaf, old, advantages, batch, gates.gspo(0.5, 0.5), backend=backend).loss


def from_logits(backend, dtype):
    _, old, advantages, batch = packed(device_of(backend))
    draw = torch.Generator().manual_seed(2)
    leaf = torch.randn(12, 37, generator=draw).to(old.device, dtype).requires_grad_()
    targets = torch.randint(0, 37, (12,), generator=draw).to(old.device)
    batch = batch.without_first_tokens()
    arguments = (leaf, targets, old, advantages, batch, gates.reinforce())
    return leaf, hpo.policy_loss_from_logits(*arguments, backend=backend).loss


MADE = {"logp": from_logp, "levels": from_levels, "logits": from_logits}
LOSSES = pytest.mark.parametrize(
    ("made", "dtype"), [("logp", torch.float32), ("levels", torch.float32), *(("logits", dtype) for dtype in INTEGERS)]
)


def gradient(leaf, loss, factor, **keywords):
    return torch.autograd.grad(loss, leaf, torch.tensor(factor, device=loss.device), **keywords)[0]


def product(plain, factor):
    return (plain.float() * factor).to(plain.dtype)


@LOSSES
def test_a_backward_is_the_product_with_the_incoming_gradient(made, dtype, backend):
    plain = gradient(*MADE[made](backend, dtype), 1.0)
    assert plain.dtype == dtype and plain.any()
    for factor in (3.0, -0.375, 0.0):
        got = gradient(*MADE[made](backend, dtype), factor)
        assert same(got, product(plain, factor)), factor
    assert gradient(*MADE[made](backend, dtype), math.nan).isnan().all()


@pytest.mark.parametrize("made", MADE)
def test_a_backward_takes_the_backend_of_its_call(made, backend):
    asked = []
    with pytest.MonkeyPatch.context() as patched:
        for name in ("ops.gates", "loss_from_logits"):
            module = importlib.import_module(f"hpo_core.{name}")
            patched.setattr(module, "times", lambda values, factor, of: asked.append(of) or values)
        leaf, loss = MADE[made](backend, torch.float32)
        loss.backward()
    assert asked == [backend] and leaf.grad is not None


@LOSSES
def test_a_gradient_does_not_change_in_a_later_backward(made, dtype, backend):
    plain = gradient(*MADE[made](backend, dtype), 1.0)
    for first in (1.0, 3.0):
        leaf, loss = MADE[made](backend, dtype)
        factors = (first, -0.375, 3.0)
        found = [gradient(leaf, loss, factor, retain_graph=at < 2) for at, factor in enumerate(factors)]
        for got, factor in zip(found, factors, strict=True):
            assert same(got, product(plain, factor)), (first, factor)


@pytest.mark.parametrize("gate", [gates.ppo_clip(), gates.gspo(0.5, 0.5)], ids=["tokens", "rows"])
def test_the_gradient_that_the_operator_returns_is_its_callers(gate, backend):
    example, device = Example(3), device_of(backend)
    inputs = inputs_of(example, gate)
    inputs = type(inputs)(*(each.to(device) if isinstance(each, torch.Tensor) else each for each in inputs))
    for factor in (1.0, 3.0):
        leaf = inputs.logp.clone().requires_grad_()
        given = inputs._replace(logp=leaf)
        loss, _, grad, _ = OPERATORS.policy_loss(*given, *_numbers_of(gate.spec()), backend, True, False)
        held = grad.detach().clone()
        assert held.any()
        got = gradient(leaf, loss, factor)
        assert same(got, product(held, factor)) and same(grad, held)
        got += 1.0  # what a caller does to a gradient of its own
        assert same(grad, held)
