"""Log-probabilities and entropies from logits: exact where others lose digits, and of each row alone."""

import importlib
import itertools
import math

import numpy
import pytest
import torch
from adversarial import ADVERSARIAL, integers, normal, upstreams
from breadth import at_length, crossed, few, number  # noqa: F401 (the first is a fixture)
from conftest import NATIVE
from devices import Device, NoHostData, OnDevice
from lazily import Lazy
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import hpo_core as hpo
from hpo_core.reference.logprobs import token_logprobs as definition
from hpo_core.specs import LogitRows

resolve = importlib.import_module("hpo_core.backends").resolve  # hpo_core.backends is the function
TYPES = (torch.float32, torch.bfloat16, torch.float16)
BOTH = ("reference", *NATIVE)
OPERATORS = torch.ops.hpo_core
IGNORED = -100
dynamo = Lazy("torch._dynamo.testing")

both = pytest.mark.parametrize("backend", BOTH)
native = pytest.mark.parametrize("backend", NATIVE)
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


def call(logits, targets, temperature=1.0, upstream=None, backend="cpu", **keywords):
    """logp, entropy and the gradient of the logits for upstream gradients of both."""
    leaf = logits.detach().requires_grad_()
    logp, entropy = hpo.token_logprobs(leaf, targets, temperature, backend=backend, **keywords)
    a, b = upstream or upstreams(targets)
    (grad,) = torch.autograd.grad((logp, entropy), leaf, (a.to(logp.dtype), b.to(logp.dtype)))
    return logp.detach(), entropy.detach(), grad


def exact(logits, targets, temperature=1.0, upstream=None):
    """The reference in float64, whose rows the tests below compare with loops over Python's numbers."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()
    return call(logits.double(), targets, temperature, upstream, backend="reference")


def eager(logits, targets, temperature, upstream):
    """What one writes without this library, in float32."""
    leaf = logits.float().requires_grad_()
    logps = torch.log_softmax(leaf / temperature, -1)
    logp = logps.gather(-1, targets[..., None]).squeeze(-1)
    entropy = -torch.where(logps.isinf(), 0.0, logps.exp() * logps.masked_fill(logps.isinf(), 0.0)).sum(-1)
    (grad,) = torch.autograd.grad((logp, entropy), leaf, upstream)
    return logp.detach(), entropy.detach(), grad


def row_by_hand(row, target, temperature):
    """logp, entropy, and the gradients of both, of numbers of Python, without a cancellation."""
    top = max(row)
    weights = [math.exp((x - top) / temperature) for x in row]
    first = row.index(top)
    others = math.fsum(w for at, w in enumerate(weights) if at != first)
    total = 1 + others
    p = [w / total for w in weights]
    distance = math.fsum((top - x) / temperature * w for x, w in zip(row, p, strict=True) if w > 0)
    rest = math.fsum(w for at, w in enumerate(p) if at != target) if row[target] > -math.inf else 0.0
    of_logp = [(rest if at == target else -w) / temperature for at, w in enumerate(p)]
    of_entropy = [
        -w * ((x - top) / temperature + distance) / temperature if w > 0 else 0.0 for x, w in zip(row, p, strict=True)
    ]
    return (row[target] - top) / temperature - math.log1p(others), math.log1p(others) + distance, of_logp, of_entropy


# ------------------------------------------------------------------------------------------------------- the definition


@both
def test_worked_numbers(backend):
    logits, targets = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 2), torch.tensor([0, 2])
    logp, entropy, grad = call(logits, targets, upstream=(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])),
                               backend=backend)  # fmt: skip
    assert torch.allclose(logp, torch.tensor([2.0, 0.0]) - 2.440189699, atol=1e-6)
    assert torch.allclose(entropy, torch.tensor(0.9475369640), atol=1e-6)
    assert torch.allclose(grad[0], torch.tensor([-0.3266881389, 0.1167009681, 0.1300762057, 0.0799109652]), atol=1e-7)
    p = torch.tensor([0.6439142599, 0.2368828181, 0.0871443187, 0.0320586033])
    assert torch.allclose(grad[1], torch.tensor([0.0, 0.0, 1.0, 0.0]) - p, atol=1e-7)
    assert math.isclose(
        hpo.token_logprobs(logits, targets, 0.5, backend=backend).entropy[0], 0.4554286229, rel_tol=1e-6
    )


@pytest.mark.parametrize("temperature", [1.0, 0.1, 2.0])
@pytest.mark.parametrize("gap", [0.0, 3.0, 20.0, 36.0])
def test_the_reference_is_the_formula(gap, temperature):
    """Every target of a row, with ties, a masked token and a greatest one that is ``gap`` above the rest."""
    row = [0.5, -1.25, 2.0, -math.inf, 2.0 + gap, 2.0, -30.0]
    logits = torch.tensor([row] * len(row), dtype=torch.float64)
    targets = torch.arange(len(row))
    leaf = logits.requires_grad_()
    logp, entropy = hpo.token_logprobs(leaf, targets, temperature, backend="reference")
    (of_logp,) = torch.autograd.grad(logp.sum(), leaf, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(entropy.sum(), leaf)
    for at in range(len(row)):
        expected = row_by_hand(row, at, temperature)
        results = (logp[at], entropy[at], of_logp[at], of_entropy[at])
        for got, wanted, digits in zip(results, expected, (12, 12, 12, 9), strict=True):
            assert torch.allclose(got, torch.tensor(wanted, dtype=torch.float64), rtol=10.0**-digits, atol=0)


@pytest.mark.parametrize("temperature", [0.7, "tensor"])
def test_gradcheck(temperature):
    logits, targets = normal(5, 7).double().requires_grad_(), torch.tensor([0, 6, IGNORED, 3, 3])
    if temperature == "tensor":
        temperature = torch.tensor([0.5, 1.0, 0.7, 2.0, 1.5], dtype=torch.float64)
    run = lambda x: tuple(hpo.token_logprobs(x, targets, temperature, backend="reference"))  # noqa: E731
    assert torch.autograd.gradcheck(run, logits)
    assert torch.autograd.gradgradcheck(run, logits)


# ------------------------------------------------------------------------------------------------------------- accuracy


@crossed(NATIVE, name=tuple(ADVERSARIAL), temperature=(1.0, 0.1, 0.7, 2.0), dtype=TYPES)
def test_error_against_float64(name, temperature, dtype, backend):
    """At most twice what eager PyTorch makes of the same numbers, or four units in the last place of the terms."""
    targets = integers(5003, 6, seed=1)
    logits = ADVERSARIAL[name](normal(6, 5003), targets).clamp(max=6e4).to(dtype)
    upstream = upstreams(targets)
    expected = exact(logits, targets, temperature, upstream)
    got = call(logits, targets, temperature, upstream, backend=backend)
    others = eager(logits, targets, temperature, upstream)
    z = logits.double() / temperature
    top = z.amax(-1)
    p = (z - top[:, None]).exp() / (z - top[:, None]).exp().sum(-1, keepdim=True)
    distance = torch.where(p > 0, (top[:, None] - z) * p, 0.0).sum(-1)
    a, b = upstream[0].abs().double(), upstream[1].abs().double()
    largest = torch.where(p > 0, p * (a[:, None] + b[:, None] * ((top[:, None] - z) + distance[:, None])), 0.0)
    of_target = a * (1 - p.gather(-1, targets[:, None]).squeeze(-1)) / temperature
    terms = (
        (top - z.gather(-1, targets[:, None]).squeeze(-1)) + expected[1], expected[1],
        (largest / temperature).scatter_add(-1, targets[:, None], of_target[:, None]),
    )  # fmt: skip
    unit = [2.0**-24, 2.0**-24, torch.finfo(dtype).eps / 2]
    for which, mine, theirs, true, term, ulp in zip("lHg", got, others, expected, terms, unit, strict=True):
        assert torch.isfinite(mine).all()
        error, allowed = (mine.double() - true).abs(), 2 * (theirs.double() - true).abs().max()
        if dtype == torch.float16 and which == "g":
            term = term + 2.0**-14  # below, float16 is subnormal
        assert (error <= torch.maximum(allowed, 4 * ulp * term)).all(), (which, error.max(), allowed)


@both
@pytest.mark.parametrize("margin", [9.0, 20.0, 25.0, 36.0, 80.0])
@pytest.mark.parametrize("offset", [0.0, 40.0, -300.0])
def test_a_confident_token_keeps_its_gradient_and_its_entropy(margin, offset, backend):
    """The probability of all others is e^-80 at least, where 1 - p is 0 in any floating-point type."""
    vocabulary = 3000
    logits = torch.full((2, vocabulary), offset)
    logits[:, 7] = offset + margin
    targets, one, zero = torch.tensor([7, 7]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    logp, entropy, grad = call(logits, targets, upstream=(one, zero), backend=backend)
    others = (vocabulary - 1) * math.exp(-margin)
    assert torch.allclose(logp.double(), torch.tensor(-math.log1p(others)).double(), rtol=4e-7, atol=0)
    true = math.log1p(others) + margin * others / (1 + others)
    assert torch.allclose(entropy.double(), torch.tensor(true).double(), rtol=4e-7, atol=0)
    assert math.isclose(grad[0, 7], others / (1 + others), rel_tol=4e-7)
    assert math.isclose(grad[0, 8], -math.exp(-margin) / (1 + others), rel_tol=4e-7)
    assert math.isclose(grad[1, 7], -margin * others / (1 + others) ** 2, rel_tol=8e-7)


@pytest.mark.usefixtures("at_length")
@both
def test_the_entropy_is_never_negative(backend):
    count = number(backend, at_length=500, machine_code=500, emulated=60, interpreted=12)
    margins = torch.linspace(0, 120, count)
    logits = torch.cat((normal(count, 40, scale=0.1), margins[:, None]), 1)
    for offset in few(backend, (40.0, 0.0, 3e4)):
        entropy = hpo.token_logprobs(logits + offset, integers(41, count), backend=backend).entropy
        assert (entropy >= 0).all()


# ------------------------------------------------------------------------------------------------ the masked vocabulary


@crossed(BOTH, dtype=TYPES, temperature=(1.0, 0.1))
def test_minus_infinity_is_outside_the_support(temperature, dtype, backend):
    """The results are those of the vocabulary without these tokens, whose gradients are exactly 0."""
    kept = normal(4, 700).to(dtype)
    where = 2500 + 2 * torch.arange(700)  # behind more than a block of nothing
    logits = torch.full((4, 4000), -math.inf, dtype=dtype)
    logits[:, where] = kept
    targets = integers(700, 4)
    logp, entropy, grad = call(logits, where[targets], temperature, upstreams(targets), backend=backend)
    expected = call(kept, targets, temperature, upstreams(targets), backend=backend)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-7}
    assert torch.allclose(logp, expected[0], 1e-6) and torch.allclose(entropy, expected[1], 1e-6)
    assert torch.allclose(grad[:, where], expected[2], **tolerance)
    grad[:, where] = 0
    assert (grad == 0).all() and not torch.signbit(grad).any()


@both
def test_one_token_in_the_support(backend):
    logits = torch.full((2, 100), -math.inf)
    logits[:, 3] = 5.0
    logp, entropy, grad = call(logits, torch.tensor([3, 4]), backend=backend)
    assert logp.tolist() == [0.0, -math.inf] and entropy.tolist() == [0.0, 0.0]
    assert (grad[0] == 0).all() and not grad.isnan().any()


@crossed(BOTH, dtype=TYPES)
def test_a_target_outside_the_support_has_the_gradient_0(dtype, backend):
    """Its log-probability is -inf, its own logit a constant; the others have -p_j, as in any row. A floor that takes it
    out says the same."""
    logits, targets = normal(2, 3000).to(dtype), torch.tensor([5, 2900])
    unit, zero = torch.ones(2), torch.zeros(2)
    masked = logits.scatter(1, targets[:, None], -math.inf)
    logp, entropy, grad = call(masked, targets, 2.0, (unit, zero), backend=backend)
    assert (logp == -math.inf).all() and entropy.isfinite().all()
    expected = -(masked.double() / 2).softmax(-1) / 2
    assert torch.allclose(grad.double(), expected, 4 * torch.finfo(dtype).eps, 1e-7)
    assert (grad.gather(1, targets[:, None]) == 0).all()
    lowest = logits.scatter(1, targets[:, None], -50.0)
    floored = call(lowest, targets, 2.0, (unit, zero), backend=backend, support_floor=torch.full((2,), -40.0))
    assert all(map(torch.equal, floored, (logp, entropy, grad)))


@both
@pytest.mark.parametrize("wrong", ["-inf only", "nan", "+inf", "target", "negative target"])
def test_an_undefined_row_is_nan_and_alone(wrong, backend):
    logits, targets = normal(3, 90), torch.tensor([4, 5, 6])
    expected = call(logits, targets, backend=backend)
    if wrong == "-inf only":
        logits[1] = -math.inf
    elif wrong in ("nan", "+inf"):
        logits[1, 77] = float(wrong)
    else:
        targets[1] = 90 if wrong == "target" else -1
    for mine, alone in zip(call(logits, targets, backend=backend), expected, strict=True):
        assert mine[1].isnan().all() and torch.equal(mine[::2], alone[::2])


@both
def test_a_vocabulary_of_one_token(backend):
    """Whose gradient is 0, and NaN where the row is undefined."""
    logits = torch.tensor([[2.0], [math.nan], [math.inf], [-math.inf], [2.0]])
    for mine in call(logits, torch.tensor([0, 0, 0, 0, 1]), backend=backend):
        assert mine.flatten()[0] == 0 and mine.flatten()[1:].isnan().all()


# --------------------------------------------------------------------------------------------------------- ignored rows


@both
@types
def test_an_ignored_row_is_not_read_and_gives_0(dtype, backend):
    logits, targets = normal(6, 1003).to(dtype), integers(1003, 6)
    expected = call(logits, targets, backend=backend)
    ignored = torch.tensor([True, False, False, True, True, False])
    poisoned = logits.masked_fill(ignored[:, None], math.nan)
    with torch.autograd.set_detect_anomaly(True):
        got = call(poisoned, targets.masked_fill(ignored, IGNORED), backend=backend)
    for mine, whole in zip(got, expected, strict=True):
        assert torch.equal(mine[~ignored], whole[~ignored])
        assert (mine[ignored] == 0).all() and not torch.signbit(mine[ignored]).any()
    a, b = (each.masked_fill(ignored, math.nan) for each in upstreams(targets))
    if backend != "reference":  # nothing of these rows is read
        grad = call(poisoned, targets.masked_fill(ignored, IGNORED), upstream=(a, b), backend=backend)[2]
        assert torch.equal(grad, got[2])


@both
def test_another_ignore_index(backend):
    logits, targets = normal(3, 11), torch.tensor([0, 5, 0])
    logp, entropy, grad = call(logits, targets, ignore_index=0, backend=backend)
    assert logp[[0, 2]].tolist() == entropy[[0, 2]].tolist() == [0.0, 0.0] and (grad[[0, 2]] == 0).all()
    assert torch.equal(logp[1], hpo.token_logprobs(logits, targets, backend=backend).logp[1])


# ---------------------------------------------------------------------------------------------------------- temperature


@both
def test_a_temperature_for_each_token(backend):
    logits, targets = normal(2, 3, 400), integers(400, 2, 3)
    temperature = torch.tensor([[0.5, 1.0, 2.0], [0.25, 1.5, 0.75]])
    got = call(logits, targets, temperature, backend=backend)
    a, b = upstreams(targets)
    for at in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        alone = call(logits[at], targets[at], temperature[at].item(), (a[at], b[at]), backend=backend)
        assert all(torch.equal(mine[at], one) for mine, one in zip(got, alone, strict=True))
    wide = call(logits, targets, temperature.double(), backend=backend)
    half = call(logits, targets, temperature.to(torch.bfloat16).expand(2, 3), backend=backend)
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(got, wide, half, strict=True))


@crossed(BOTH, temperature=(1e-10, 1e-20, 1e-30, 3e-36))
def test_a_temperature_near_0(temperature, backend):
    """Of logits that are a number of temperatures apart, and of others, which leave all to the greatest. The square of
    1 / temperature may be beyond float32: where logits are nearer to each other than 1e-17, a gradient is a number."""
    ones = torch.ones(2)
    logits = torch.tensor([[0.0, 0.5, -1.0, 0.25], [-3.0, 1.5, -2.0, 1.5]]).double()
    logits[0] *= temperature
    given = logits.float(), torch.tensor([1, 2]), temperature, (0 * ones, ones)
    logp, entropy, grad = call(*given, backend=backend)
    true = exact(*given)
    assert torch.allclose(entropy.double(), true[1], 1e-6) and logp.isfinite().all()
    known = slice(0 if temperature > 1e-19 or backend == "reference" else 1, 2)
    assert torch.allclose((grad.double() * temperature)[known], (true[2] * temperature)[known], 1e-5, 1e-7)
    assert grad.isfinite().all()


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, 1e-40, 0, -2])
def test_a_temperature_is_a_number_above_0(wrong):
    logits, targets = normal(2, 5), torch.tensor([0, IGNORED])
    with pytest.raises(
        ValueError, match=r"temperature: expected finite numbers above 0 that float32 holds, got .*greedy"
    ):
        hpo.token_logprobs(logits, targets, wrong)
    with pytest.raises(
        ValueError, match=r"temperature: expected finite numbers above 0 that float32 holds, got .*greedy"
    ):
        hpo.token_logprobs(logits, targets, torch.tensor([wrong, 1.0]))
    allowed = hpo.token_logprobs(logits, targets, torch.tensor([1.0, wrong]))  # of an ignored row nothing is read
    assert torch.equal(allowed.logp, hpo.token_logprobs(logits, targets).logp)


@pytest.mark.parametrize("wrong", ["1", None, True, [1.0, 1.0], torch.ones(2, dtype=torch.int64)])
def test_a_temperature_of_another_type(wrong):
    with pytest.raises(TypeError, match="temperature: expected"):
        hpo.token_logprobs(normal(2, 5), torch.tensor([0, 1]), wrong)


# ---------------------------------------------------------------------------------------------------- types and layouts


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
    """Of a row that holds every finite one, subnormal numbers among them."""
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


@pytest.mark.parametrize("backend", [pytest.param(n, marks=pytest.mark.long if n != "cpu" else ()) for n in NATIVE])
def test_offsets_beyond_32_bits(backend):
    """Rows behind the 2^31st element of memory that nobody touches elsewhere, and behind the 2^16th row."""
    rows, vocabulary = 2**16 + 3, 2**15
    logits = torch.from_numpy(numpy.zeros((rows, vocabulary), numpy.int16)).view(torch.bfloat16)
    few, where = normal(2, vocabulary).to(torch.bfloat16), [2**16 - 1, 2**16 + 2]
    logits[where] = few
    targets = torch.full((rows,), IGNORED)
    targets[where] = torch.tensor([5, 6])
    got = hpo.token_logprobs(logits, targets, backend=backend)
    expected = hpo.token_logprobs(few, torch.tensor([5, 6]), backend=backend)
    assert torch.equal(got.logp[where], expected.logp) and torch.equal(got.entropy[where], expected.entropy)
    assert got.logp.count_nonzero() == 2


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


# ---------------------------------------------------------------------------------- what is asked of the kernels alone


def rows_of(logits, targets, **others):
    given = {"temperatures": None, "temperature": 0.7, "floors": None, "first": 0, "vocabulary": logits.shape[-1]}
    return LogitRows(logits, targets, ignore_index=IGNORED, **given | others)


def floored(dtype):
    """Rows of every kind: all tokens are in the support, some, one, the target is not, ignored, NaN, none is."""
    logits, targets = normal(7, 1100).to(dtype), integers(1100, 7)
    targets[4] = IGNORED
    logits[5, 33] = math.nan
    most, target = logits[3].amax(), logits.float().gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1)
    floors = torch.stack((torch.tensor(-math.inf), target[1] - 1, logits[2].float().amax(), most / 2, most, most * 0,
                          torch.tensor(1e30)))  # fmt: skip
    logits[3, targets[3]] = most.float() / 4
    return logits, targets, floors


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


# ------------------------------------------------------------------------------------------------------------- autograd


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


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"logits": torch.zeros(2, 5, dtype=torch.float64)}, TypeError, "logits: expected dtype float32 or bfloat16"),
        ({"logits": torch.zeros(2, 5, dtype=torch.int64)}, TypeError, "logits: expected dtype"),
        ({"logits": torch.zeros(5, 2).t()}, ValueError, "logits: expected a contiguous last dimension, got a stride"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "logits: expected a vocabulary of at least one token"),
        ({"logits": torch.tensor(1.0)}, ValueError, "logits: expected shape"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ValueError, "targets: expected shape"),
        ({"targets": torch.zeros(2)}, TypeError, "targets: expected dtype int64 or int32"),
        ({"targets": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "targets: expected"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature: expected shape"),
        ({"temperature": torch.ones(2, requires_grad=True)}, ValueError, "temperature: it is a constant"),
        ({"temperature": torch.tensor(0.7)}, ValueError,
         r"temperature: .* = \[2\], got \[\]; one number for all is temperature.item\(\), or .*expand\(\[2\]\)"),
        ({"temperature": 1e39}, ValueError, r"temperature: expected finite numbers above 0 that .*, got 1e\+39"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index: expected an integer, got 0.5"),
        ({"ignore_index": 2**63}, ValueError, "ignore_index: expected an integer that 64 bits hold, .* got 92233"),
    ],
)  # fmt: skip
def test_wrong_arguments(wrong, error, message):
    given = {"logits": torch.zeros(2, 5), "targets": torch.zeros(2, dtype=torch.int64), **wrong}
    with pytest.raises(error, match=message):
        hpo.token_logprobs(**given)
