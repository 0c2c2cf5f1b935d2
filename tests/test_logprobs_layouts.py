"""Log-probabilities of logits of every type and layout, of each row alone, and what is asked of the kernels."""

import importlib
import itertools
import math

import numpy
import pytest
import torch
from adversarial import ADVERSARIAL, integers, normal, upstreams
from breadth import at_length, crossed, few, number  # noqa: F401 (the first is a fixture)
from conftest import NATIVE
from logprob_examples import BOTH, IGNORED, TYPES, both, call, exact, floored, native, rows_of, types

import hpo_core as hpo
from hpo_core.reference.logprobs import token_logprobs as definition

resolve = importlib.import_module("hpo_core.backends").resolve  # hpo_core.backends is the function


@both
@types
def test_results_are_float32_and_gradients_are_of_the_logits(dtype, backend):
    logp, entropy, grad = call(normal(3, 70).to(dtype), integers(70, 3), backend=backend)
    assert logp.dtype == entropy.dtype == torch.float32 and grad.dtype == dtype
    widened = call(normal(3, 70).to(dtype).float(), integers(70, 3), backend=backend)
    assert torch.equal(logp, widened[0]) if backend == "reference" else torch.allclose(logp, widened[0], 1e-6)
    assert torch.allclose(grad.float(), widened[2], torch.finfo(dtype).eps, 1e-7)


@pytest.mark.usefixtures("at_length")
@both
def test_all_numbers_of_16_bits(backend):
    """A row holds every finite one, subnormal numbers among them."""
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        numbers = numbers[numbers.isfinite()]
        targets = torch.tensor([int(numbers.argmax())])
        for temperature in few(backend, (1.0, 1e4)):
            got = call(numbers[None], targets, temperature, backend=backend)
            for mine, true in zip(got, exact(numbers[None], targets, temperature), strict=True):
                assert torch.allclose(mine.double(), true, 2e-6 if mine.dim() == 1 else 8e-3, 1e-7)


LAYOUTS = {
    "contiguous": (lambda x: x.clone(), lambda x: x),
    "slice of positions": (lambda x: torch.cat((x, x[:, :1] * math.nan), 1), lambda x: x[:, :-1]),
    "transposed": (lambda x: x.transpose(0, 1).contiguous(), lambda x: x.transpose(0, 1)),
    "slice of the vocabulary": (lambda x: torch.nn.functional.pad(x, (3, 5), value=math.nan), lambda x: x[..., 3:-5]),
    "every second row": (lambda x: x.repeat_interleave(2, 1), lambda x: x[:, ::2]),
    "flat": (lambda x: x.flatten(), lambda x: x.view(2, 4, 203)),
}


@crossed(BOTH, layout=tuple(LAYOUTS), dtype=TYPES)
def test_layouts(layout, dtype, backend):
    logits, targets = normal(2, 4, 203).to(dtype), integers(203, 2, 4)
    expected = call(logits, targets, backend=backend)
    store, view = LAYOUTS[layout]
    base = store(logits).requires_grad_()
    logp, entropy = hpo.token_logprobs(view(base), targets, backend=backend)
    assert torch.equal(logp, expected[0]) and torch.equal(entropy, expected[1])
    (grad,) = torch.autograd.grad((logp, entropy), base, upstreams(targets))
    assert torch.equal(view(grad), expected[2]) and not grad.isnan().any()


@pytest.mark.usefixtures("at_length")
@both
def test_leading_shapes(backend):
    logits, targets = normal(12, 31), integers(31, 12)
    expected = call(logits, targets, backend=backend)
    a, b = upstreams(targets)
    for shape in few(backend, ((2, 1, 3, 1, 2), (12,), (2, 6), (2, 3, 2), (1, 12, 1))):
        upstream = a.view(shape), b.view(shape)
        got = call(logits.view(*shape, 31), targets.view(shape), 1.0, upstream, backend=backend)
        assert got[0].shape == got[1].shape == shape
        assert all(torch.equal(x.flatten(), y.flatten()) for x, y in zip(got, expected, strict=True))
    scattered = logits.view(2, 3, 2, 31).permute(2, 0, 1, 3)  # of three strides, which no kernel knows
    got = hpo.token_logprobs(scattered, targets.view(2, 3, 2).permute(2, 0, 1), backend=backend)
    assert torch.equal(got.logp, expected[0].view(2, 3, 2).permute(2, 0, 1))
    one = call(logits[3], targets[3], 1.0, (a[3], b[3]), backend=backend)
    assert all(torch.equal(x, y[3]) for x, y in zip(one, expected, strict=True))


@both
def test_nothing_and_a_vocabulary_of_one(backend):
    for shape in ((0,), (3, 0), (0, 4)):
        logp, entropy, grad = call(torch.zeros(*shape, 9), torch.zeros(shape, dtype=torch.int64), backend=backend)
        assert logp.shape == entropy.shape == shape and grad.shape == (*shape, 9)
    logp, entropy, grad = call(normal(3, 1), torch.zeros(3, dtype=torch.int64), backend=backend)
    assert (logp == 0).all() and (entropy == 0).all() and (grad == 0).all()


@native
def test_expanded_rows(backend):
    logits, targets = normal(1, 50).requires_grad_(), integers(50, 7)
    got = hpo.token_logprobs(logits.expand(7, 50), targets, backend=backend)
    whole = hpo.token_logprobs(logits.detach().repeat(7, 1), targets, backend=backend)
    assert torch.equal(got.logp, whole.logp) and torch.equal(got.entropy, whole.entropy)
    (grad,) = torch.autograd.grad(got.logp.sum(), logits)
    leaf = logits.detach().repeat(7, 1).requires_grad_()
    (rows,) = torch.autograd.grad(hpo.token_logprobs(leaf, targets, backend=backend).logp.sum(), leaf)
    assert torch.equal(grad, rows.sum(0, keepdim=True))


@native
def test_offsets_beyond_32_bits(backend):
    """The second row of logits, and of the gradient in its place, lies behind the 2^31st element of memory that nobody
    touches elsewhere."""
    few, targets = normal(2, 203).to(torch.bfloat16), torch.tensor([5, 6])
    memory = torch.from_numpy(numpy.zeros(2**31 + 2**8, numpy.int16)).view(torch.bfloat16)
    rows = rows_of(memory.as_strided((2, 203), (2**31 + 8, 1)).copy_(few), targets)
    functions, upstream = resolve("logprobs", few, backend), upstreams(targets)
    expected, got = (functions.token_logprobs(each, 3) for each in (rows_of(few, targets), rows))
    assert all(map(torch.equal, got, expected))
    grad = functions.token_logprobs_backward(rows_of(few, targets), got[2], *upstream, None)
    assert torch.equal(functions.token_logprobs_backward(rows, got[2], *upstream, rows.logits), grad)


@pytest.mark.parametrize("backend", [pytest.param(n, marks=pytest.mark.long if n != "cpu" else ()) for n in NATIVE])
def test_more_rows_than_a_launch_has_blocks(backend):
    count, last = 2**16 + 3, [2**16 - 1, 2**16 + 2]
    logits, targets = torch.zeros(count, 9), torch.full((count,), IGNORED)
    logits[last], targets[last] = normal(2, 9), torch.tensor([5, 6])
    got = call(logits, targets, backend=backend)
    a, b = upstreams(targets)
    expected = call(logits[last], targets[last], 1.0, (a[last], b[last]), backend=backend)
    assert all(torch.equal(x[last], y) for x, y in zip(got, expected, strict=True))
    assert got[0].count_nonzero() == 2 and got[2].count_nonzero() == 2 * 9


# ----------------------------------------------------------------------------------------------------------- invariance


@pytest.mark.usefixtures("at_length")
@native
@types
def test_the_bits_of_a_row_depend_on_the_row_alone(dtype, backend):
    """Not on how many rows there are, where it is among them and in memory, or how many threads share them."""
    count = number(backend, at_length=40, machine_code=40, emulated=8, interpreted=3)
    vocabulary = number(backend, at_length=8300, machine_code=4500, emulated=8300, interpreted=2100)
    logits, targets = normal(count, vocabulary).to(dtype), integers(vocabulary, count)
    a, b = upstreams(targets)

    def assert_same(logits, rows):
        got = call(logits, targets[rows], 0.7, (a[rows], b[rows]), backend=backend)
        assert all(torch.equal(x, y[rows]) for x, y in zip(got, expected, strict=True))

    expected = call(logits, targets, 0.7, (a, b), backend=backend)
    for threads in (1, 2, 3) if backend == "cpu" else (1,):
        torch.set_num_threads(threads)
        for rows in (slice(0, count), slice(count - 1, count), slice(1, count // 2 + 1), slice(0, count, 2)):
            assert_same(logits[rows], rows)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    assert_same(logits[shuffled], shuffled)
    for skipped in few(backend, range(1, 4)):  # rows that begin anywhere in memory
        memory = torch.cat((logits.new_zeros(skipped), logits.flatten()))[skipped:].view(count, vocabulary)
        assert_same(memory, slice(0, count))


@crossed(NATIVE, name=("plain", "ascending", "masked, margin 12"), dtype=TYPES)
def test_an_entropy_that_is_not_wanted_changes_nothing(name, dtype, backend):
    targets = integers(5003, 2, seed=1)
    logits = ADVERSARIAL[name](normal(2, 5003), targets).to(dtype)
    leaf = logits.clone().requires_grad_()
    alone = hpo.token_logprobs(leaf, targets, entropy=False, backend=backend)
    assert alone.entropy is None
    assert torch.equal(alone.logp, hpo.token_logprobs(logits, targets, backend=backend).logp)
    a = upstreams(targets)[0]
    (grad,) = torch.autograd.grad(alone.logp, leaf, a)
    assert torch.equal(grad, call(logits, targets, upstream=(a, torch.zeros(2)), backend=backend)[2])


@native
@types
def test_floors_and_squares_are_those_of_the_definition(dtype, backend):
    logits, targets, floors = floored(dtype)
    rows = rows_of(logits, targets, floors=floors, temperatures=torch.linspace(0.5, 1.5, 7))
    wide = rows._replace(logits=logits.double().requires_grad_(), temperatures=rows.temperatures.double())
    expected = definition(wide, 4)
    functions = resolve("logprobs", logits, backend)
    got = functions.token_logprobs(rows, 4)
    for mine, true in zip((*got[:2], *got[2]), (*expected[:2], *expected[2]), strict=True):
        assert torch.allclose(mine.double(), true.detach(), 1e-6, 1e-7, equal_nan=True)
    for kept in (2, 3):
        fewer = functions.token_logprobs(rows, kept)
        assert torch.equal(fewer[0][:5], got[0][:5]) and torch.equal(fewer[2][:, :5], got[2][:kept, :5])
    a, b = upstreams(targets)
    known = expected[0].isfinite()
    (true,) = torch.autograd.grad(
        (expected[0][known], expected[1][known]), wide.logits, (a[known].double(), b[known].double())
    )
    grad = functions.token_logprobs_backward(rows, got[2][:3].contiguous(), a, b, None)
    assert torch.allclose(grad[known].double(), true[known], 4 * torch.finfo(dtype).eps, 1e-6)
    outside = logits < floors[:, None]
    assert (grad[:4] == 0)[outside[:4]].all() and (grad[4] == 0).all() and grad[5:].isnan().all()


@native
@types
def test_parts_of_a_vocabulary(dtype, backend):
    """Their statistics merge to those of the whole, a part of -inf among them; from these each has its gradient."""
    logits, targets = normal(5, 900).to(dtype), torch.tensor([3, 299, 300, 899, IGNORED])
    logits[:, 300:500] = -math.inf
    logits[2, 300] = 1.0
    functions, a, b = resolve("logprobs", logits, backend), *upstreams(targets)
    whole = functions.token_logprobs(rows_of(logits, targets), 4)
    borders = (0, 300, 500, 501, 900)
    parts = [rows_of(logits[:, i:j], targets, first=i, vocabulary=900) for i, j in itertools.pairwise(borders)]
    results = [functions.token_logprobs(part, 4) for part in parts]
    assert (results[1][2][1:, [0, 1, 3]] == 0).all() and (results[1][2][0, [0, 1, 3]] == -math.inf).all()
    top, others, distance, squares = torch.stack([each[2].double() for each in results], 1)
    scale = ((top - top.amax(0)) / 0.7).exp() * (1 + others)
    share = scale / scale.sum(0)
    merged = (top.amax(0), scale.sum(0) - 1, (share * (distance + (top.amax(0) - top).nan_to_num(0, 0) / 0.7)).sum(0),
              (share.square() * squares).sum(0))  # fmt: skip
    for mine, true in zip(merged, whole[2].double(), strict=True):
        assert torch.allclose(mine[:4], true[:4], 1e-6, 1e-7)
    for row, part in enumerate((0, 0, 1, 3)):
        assert [each[0][row].isfinite().item() for each in results] == [at == part for at in range(4)]
    grads = [functions.token_logprobs_backward(part, whole[2], a, b, None) for part in parts]
    assert torch.equal(torch.cat(grads, 1), functions.token_logprobs_backward(parts[0]._replace(
        logits=logits, first=0), whole[2], a, b, None))  # fmt: skip


@crossed(NATIVE, dtype=TYPES, skipped=(0, 1))
def test_a_gradient_may_take_the_place_of_its_logits(dtype, skipped, backend):
    """Aligned or not; rows that are not differentiated get their zeros and NaN, and what lies between rows stays."""
    logits, targets, floors = floored(dtype)
    memory = torch.full((7, 1111), 5.0, dtype=dtype)
    memory[:, skipped : skipped + 1100] = logits
    rows, (a, b) = rows_of(memory[:, skipped : skipped + 1100], targets, floors=floors), upstreams(targets)
    functions = resolve("logprobs", logits, backend)
    statistics = functions.token_logprobs(rows, 3)[2]
    expected = functions.token_logprobs_backward(rows, statistics, a, b, None)
    assert torch.equal(rows.logits.nan_to_num(9), logits.nan_to_num(9))
    got = functions.token_logprobs_backward(rows, statistics, a, b, rows.logits)
    assert got.data_ptr() == rows.logits.data_ptr() and torch.equal(got.nan_to_num(9), expected.nan_to_num(9))
    assert (memory[:, :skipped] == 5).all() and (memory[:, skipped + 1100 :] == 5).all()


@native
def test_one_launch_forward_and_one_backward(backend):
    if backend == "cpu":
        return  # it launches nothing
    if backend == "triton":
        launches = importlib.import_module("hpo_core._triton.launch").launches
        count = launches.copy
    else:
        count = importlib.import_module(f"hpo_core._{backend}").launches
    before = count()
    call(normal(3, 40), integers(40, 3), backend=backend)
    assert sorted(n - before.get(kernel, 0) for kernel, n in count().items() if n != before.get(kernel, 0)) == [1, 1]
