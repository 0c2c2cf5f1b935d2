"""Log-probabilities and entropies from logits: the definition, accuracy, ignored rows, temperatures, errors."""

import importlib
import math

import pytest
import torch
from adversarial import ADVERSARIAL, integers, normal, upstreams
from breadth import at_length, crossed, few, number  # noqa: F401 (the first is a fixture)
from conftest import NATIVE
from logprob_examples import BOTH, IGNORED, TYPES, both, call, eager, exact, native, row_by_hand, rows_of, types

import hpo_core as hpo

resolve = importlib.import_module("hpo_core.backends").resolve  # hpo_core.backends is the function

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
    """Its gradient is 0, and NaN where the row is undefined."""
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
    """Some logits are a number of temperatures apart, others leave all to the greatest. The square of
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


@native
def test_of_a_temperature_that_is_not_read_before_a_kernel_says_nan(backend):
    """The temperatures of a GPU are such. Numbers below the least normal one of float32 are not allowed either."""
    held = torch.finfo(torch.float32)
    temperatures = torch.tensor(
        [held.tiny, held.max, 1.1754942e-38, 4e-39, 1e-45, 0.0, -1.0, math.inf, math.nan], dtype=torch.float32
    )
    rows = rows_of(normal(1, 5).repeat(9, 1), torch.full((9,), 2), temperatures=temperatures)
    functions, upstream = resolve("logprobs", rows.logits, backend), torch.ones(9)
    logp, entropy, statistics = functions.token_logprobs(rows, 3)
    grad = functions.token_logprobs_backward(rows, statistics, upstream, upstream, None)
    for found in (logp, entropy, statistics[0], grad[:, 0], grad[:, 2]):
        assert found.isnan().tolist() == [False] * 2 + [True] * 7, temperatures


@pytest.mark.parametrize("wrong", ["1", None, True, [1.0, 1.0], torch.ones(2, dtype=torch.int64)])
def test_a_temperature_of_another_type(wrong):
    with pytest.raises(TypeError, match="temperature: expected"):
        hpo.token_logprobs(normal(2, 5), torch.tensor([0, 1]), wrong)


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
        ({"targets": torch.zeros(2)}, TypeError, "targets: expected dtype int64 or int32.*; targets are ids of tokens"),
        ({"targets": torch.zeros(2, dtype=torch.uint8)}, TypeError, r"got uint8; use targets.to\(torch.int64\)"),
        ({"targets": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "targets: expected"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature: expected shape"),
        ({"temperature": torch.ones(2, requires_grad=True)}, ValueError, "temperature: it is a constant"),
        ({"temperature": torch.tensor(0.7)}, ValueError,
         r"temperature: .* = \[2\], got \[\]; one number for all is temperature.item\(\), or .*expand\(\[2\]\)"),
        ({"logits": torch.zeros(2, 3, 5), "targets": torch.zeros(2, 3).long(), "temperature": torch.ones(2)},
         ValueError, r"got \[2\]; one for each response is temperature.reshape\(-1, 1\).expand\(\[2, 3\]\)"),
        ({"temperature": 1e39}, ValueError, r"temperature: expected finite numbers above 0 that .*, got 1e\+39"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index: expected an integer, got 0.5"),
        ({"ignore_index": 2**63}, ValueError, "ignore_index: expected an integer that 64 bits hold, .* got 92233"),
    ],
)  # fmt: skip
def test_wrong_arguments(wrong, error, message):
    given = {"logits": torch.zeros(2, 5), "targets": torch.zeros(2, dtype=torch.int64), **wrong}
    with pytest.raises(error, match=message):
        hpo.token_logprobs(**given)
