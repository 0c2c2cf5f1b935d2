"""Log-probabilities and entropies from hidden states: what logits give, without the logits, and row by row the same
bits."""

import math

import pytest
import torch
from lazily import Lazy
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import hpo_core as hpo
from hpo_core.backends import resolve
from hpo_core.ops import linear_logprobs as ops
from hpo_core.testing.timing import extra_bytes

dynamo = Lazy("torch._dynamo.testing")
OPERATORS = torch.ops.hpo_core
IGNORED = -100
BLOCK = (16, 100)  # several of each in the calls below
COUNT, VOCABULARY, WIDTH = 45, 259, 12

backends = pytest.mark.parametrize("backend", ["cpu"])
types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head(dtype=torch.float32, count=COUNT, vocabulary=VOCABULARY, width=WIDTH):
    """Hidden states, a weight, targets, of which two are ignored, and upstream gradients of logp and entropy."""
    targets = torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(1))
    targets[count // 3 :: count // 2 + 1] = IGNORED
    weight = normal(vocabulary, width, seed=2).to(dtype)
    return normal(count, width).to(dtype), weight, targets, *normal(2, count, seed=3)


def call(hidden, weight, targets, a, b, temperature=1.0, *, bias=None, backend="cpu", **keywords):
    """logp, entropy, and the gradients of hidden states, weight and bias."""
    leaves = [each.detach().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    logp, entropy = hpo.linear_token_logprobs(
        *leaves[:2], targets, leaves[2] if bias is not None else None, temperature, backend=backend, **keywords
    )
    outputs, upstream = ([logp], [a]) if entropy is None else ([logp, entropy], [a, b])
    gradients = torch.autograd.grad(outputs, leaves, [each.to(logp.dtype) for each in upstream])
    return [logp.detach(), logp.detach() if entropy is None else entropy.detach(), *gradients]


def eager(hidden, weight, targets, a, b, temperature=1.0, *, bias=None, entropy=True, softcap=None, logit_scale=1.0):
    """The function as one writes it, in the dtype of the arguments."""
    leaves = [each.detach().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    logits = leaves[0] @ leaves[1].t()
    logits = logit_scale * (logits if bias is None else logits + leaves[2])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature[:, None]
    logps = torch.log_softmax(logits / temperature, -1)
    ignored = targets == IGNORED
    logp = logps.gather(-1, targets.clamp(min=0)[:, None]).squeeze(-1).masked_fill(ignored, 0.0)
    h = -(logps.exp() * logps).sum(-1).masked_fill(ignored, 0.0)
    outputs, upstream = ([logp, h], [a, b]) if entropy else ([logp], [a])
    gradients = torch.autograd.grad(outputs, leaves, [each.to(logp.dtype) for each in upstream])
    return [logp.detach(), h.detach() if entropy else logp.detach(), *gradients]


VARIANTS = {
    "plain": {},
    "no entropy": {"entropy": False},
    "bias": {"bias": normal(VOCABULARY, seed=4)},
    "softcap": {"softcap": 4.0},
    "scale": {"logit_scale": 0.25},
    "everything": {"bias": normal(VOCABULARY, seed=4), "softcap": 6.0, "logit_scale": 1.7, "temperature": 0.7},
    "temperatures": {"temperature": torch.linspace(0.5, 2.0, COUNT), "logit_scale": 2.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_is_the_formula(variant):
    given = [each.double() if each.is_floating_point() else each for each in head()]
    keywords = {
        name: value.double() if isinstance(value, torch.Tensor) else value for name, value in VARIANTS[variant].items()
    }
    got, expected = call(*given, backend="reference", **keywords), eager(*given, **keywords)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.float64 and torch.allclose(mine, theirs, 1e-11, 1e-12)


@backends
@types
@pytest.mark.parametrize("variant", VARIANTS)
def test_error_against_float64(variant, dtype, backend):
    """At most twice what eager PyTorch makes of the same numbers in float32, or a few units of the sums' terms."""
    given, keywords = head(dtype), VARIANTS[variant]
    exact = [each.double() if each.is_floating_point() else each for each in given]
    expected = call(*exact, backend="reference", **keywords)
    got = call(*given, backend=backend, block=BLOCK, **keywords)
    others = eager(*(each.float() if each.is_floating_point() else each for each in given), **keywords)
    assert [each.dtype for each in got[:4]] == [torch.float32] * 2 + [dtype] * 2
    for which, (mine, theirs, true) in enumerate(zip(got, others, expected, strict=True)):
        error, allowed = (mine.double() - true).abs().max(), 2 * (theirs.double() - true).abs().max()
        unit = 2.0**-23 if which < 2 or dtype == torch.float32 else torch.finfo(dtype).eps
        assert error <= max(allowed, 2 * unit * true.abs().max()), (which, error, allowed)


def test_every_backend_has_kernels_for_parts(backend):
    """Blocks that end inside a tile, a softcap, which needs a gradient beside the logits, and a bias."""
    given, bias = head(count=9, vocabulary=40, width=5), normal(40, seed=4)
    for keywords in ({"bias": bias, "softcap": 6.0, "temperature": 0.7}, {"temperature": torch.linspace(0.5, 2.0, 9)}):
        expected = call(*given, backend="reference", **keywords)
        for mine, true in zip(call(*given, backend=backend, block=(4, 16), **keywords), expected, strict=True):
            assert torch.allclose(mine, true, 1e-5, 2e-6)


@backends
def test_operands_of_different_types(backend):
    hidden, weight, *rest = head()
    expected = call(hidden.bfloat16(), weight.bfloat16(), *rest, backend="reference")
    for left, right in ((hidden.bfloat16().float(), weight.bfloat16()), (hidden.bfloat16(), weight.bfloat16().float())):
        got = call(left, right, *rest, backend=backend, block=BLOCK)
        assert got[2].dtype == left.dtype and got[3].dtype == right.dtype
        for mine, true in zip(got, expected, strict=True):
            assert torch.allclose(mine.float(), true.float(), 1e-2, 1e-3)
        assert torch.allclose(got[0], expected[0], 1e-6, 1e-6)


@pytest.mark.parametrize("offset", [0, 1, 5])
def test_widened_weights_are_exact(offset):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    memory = torch.full((len(every) + offset + 1,), 7.0)
    into = memory[offset:-1]
    widened = resolve("logprobs", every, "cpu").widen(every, into)
    assert widened.data_ptr() == into.data_ptr()
    assert torch.equal(into.view(torch.int32), every.view(torch.int16).int() << 16)
    assert (torch.cat([memory[:offset], memory[-1:]]) == 7.0).all()
    columns = torch.arange(6.0).bfloat16().view(2, 3).t()
    assert torch.equal(resolve("logprobs", columns, "cpu").widen(columns, torch.empty(3, 2)), columns.float())


@backends
def test_a_confident_token_keeps_its_gradient_and_its_entropy(backend):
    """Its block of the vocabulary has a partial sum of its own; the others are e^-30 of it."""
    weight = torch.zeros(VOCABULARY, WIDTH)
    weight[150, 0] = 30.0
    hidden = torch.zeros(1, WIDTH)
    hidden[0, 0] = 1.0
    one = torch.ones(1)
    logp, entropy, *_, of_weight = call(hidden, weight, torch.tensor([150]), one, 0 * one, backend=backend, block=BLOCK)
    others = (VOCABULARY - 1) * math.exp(-30.0)
    assert math.isclose(logp, -math.log1p(others), rel_tol=4e-7)
    assert math.isclose(entropy, math.log1p(others) + 30 * others / (1 + others), rel_tol=4e-7)
    assert math.isclose(of_weight[150, 0], others / (1 + others), rel_tol=4e-7)
    assert math.isclose(of_weight[7, 0], -math.exp(-30.0) / (1 + others), rel_tol=4e-7)


# ----------------------------------------------------------------------------------------------------------- invariance


@backends
@types
@pytest.mark.parametrize(
    ("width", "block", "vocabulary"),
    [
        *((12, BLOCK, VOCABULARY), (37, BLOCK, VOCABULARY), (12, (512, 8192), VOCABULARY)),
        *((5, (33, 64), 16), (11, (100, 64), 31), (17, BLOCK, 9), (17, BLOCK, 3)),  # narrow products
    ],
)
def test_the_bits_of_a_row_depend_on_the_row_alone(width, block, vocabulary, dtype, backend):
    """Not on how many rows there are, on their order, nor on which of them are ignored."""
    rows = block[0]
    hidden, weight, targets, a, b = head(dtype, 3 * rows + 5, vocabulary, width)
    expected = call(hidden, weight, targets, a, b, 0.7, backend=backend, block=block)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 7, rows - 1, rows, 3 * rows + 5):
            chosen = torch.arange(3 * rows + 5 - count, 3 * rows + 5).flip(0)
            got = call(hidden[chosen], weight, targets[chosen], a[chosen], b[chosen], 0.7, backend=backend, block=block)
            for mine, all_rows in zip(got[:3], expected[:3], strict=True):
                assert torch.equal(mine, all_rows[chosen])


@backends
def test_two_passes_over_the_same_weights_have_a_ratio_of_1(backend):
    hidden, weight, targets, *_ = head(torch.bfloat16)
    with torch.no_grad():
        old = hpo.linear_token_logprobs(hidden[:20], weight, targets[:20], backend=backend, block=BLOCK)
    leaf = hidden.clone().requires_grad_()
    new = hpo.linear_token_logprobs(leaf, weight.clone().requires_grad_(), targets, backend=backend, block=BLOCK)
    ratio = (new.logp[:20] - old.logp).exp()
    assert new.logp.requires_grad and (ratio == 1).all() and torch.equal(new.entropy[:20], old.entropy)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ignored_rows_are_not_read(dtype, backend):
    hidden, weight, targets, a, b = head(dtype)
    bias = normal(VOCABULARY)
    hidden[targets == IGNORED] = math.nan
    got = call(hidden, weight, targets, a, b, bias=bias, backend=backend, block=BLOCK)
    assert all(each.isfinite().all() for each in got)
    counted = targets != IGNORED
    alone = call(
        hidden[counted], weight, targets[counted], a[counted], b[counted], bias=bias, backend=backend, block=BLOCK
    )
    for mine, all_rows in zip(alone[:3], got[:3], strict=True):
        assert torch.equal(all_rows[counted], mine) and (all_rows[~counted] == 0).all()
    for mine, all_rows in zip(alone[3:], got[3:], strict=True):
        assert torch.equal(mine, all_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_rows_cannot_be_counted_they_are_zeros(dtype, monkeypatch):
    """A GPU does the same: no row is left out of the products, and none that is ignored is read."""
    hidden, weight, targets, a, b = head(dtype)
    a[:7], b[:7] = 0.0, 0.0
    expected = call(hidden, weight, targets, a, b, block=BLOCK)
    monkeypatch.setattr(ops, "_is_readable", lambda tensor: False)
    hidden[targets == IGNORED] = math.nan
    got = call(hidden, weight, targets, a, b, block=BLOCK)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got[:3], expected[:3], strict=True))
    assert torch.allclose(got[3].float(), expected[3].float(), 1e-2, 1e-4)


@backends
def test_rows_without_an_upstream_gradient_cost_nothing(backend, monkeypatch):
    """Rows that count for the loss alone reach the products of the backward."""
    hidden, weight, targets, a, b = head()
    a[5:], b[5:] = 0.0, 0.0
    leaf = hidden.requires_grad_()
    result = hpo.linear_token_logprobs(leaf, weight, targets, backend=backend, block=BLOCK)
    products, multiply = [], hpo.ops.linear_logprobs._multiply
    monkeypatch.setattr(
        hpo.ops.linear_logprobs, "_multiply", lambda *args, **kw: products.append(multiply(*args, **kw))
    )
    (grad,) = torch.autograd.grad((result.logp, result.entropy), leaf, (a, b))
    assert len(products) == 2 * 3  # logits and hidden states, three blocks of the vocabulary, one chunk of rows
    assert (grad[5:] == 0).all() and (grad[:5] != 0).all()


@backends
def test_undefined_rows_are_nan_and_no_others(backend):
    hidden, weight, targets, a, b = head()
    hidden[3, 2], targets[7] = math.nan, VOCABULARY
    a[7], b[7] = 0.0, 0.0  # rows without an upstream gradient take part in no product, if they are defined
    logp, entropy, of_hidden, of_weight = call(hidden, weight, targets, a, b, backend=backend, block=BLOCK)
    undefined = torch.tensor([row in (3, 7) for row in range(COUNT)])
    assert torch.equal(logp.isnan(), undefined) and torch.equal(entropy.isnan(), undefined)
    assert torch.equal(of_hidden.isnan().any(-1), undefined) and of_weight.isnan().all()


@backends
def test_a_masked_vocabulary(backend):
    """A bias of -inf takes tokens out of the support, whole blocks of them."""
    hidden, weight, targets, a, b = head()
    bias = torch.zeros(VOCABULARY)
    bias[:130], bias[200:240] = -math.inf, -math.inf
    targets = torch.where(targets == IGNORED, IGNORED, 130 + targets % 70)
    got = call(hidden, weight, targets, a, b, bias=bias, backend=backend, block=BLOCK)
    expected = call(hidden, weight, targets, a, b, bias=bias, backend="reference")
    for mine, true in zip(got, expected, strict=True):
        assert mine.isfinite().all() and torch.allclose(mine, true, 1e-5, 1e-5)
    assert (got[3][bias.isinf()] == 0).all()
    targets[targets != IGNORED] = 7  # outside the support: only the others have a gradient
    got = call(hidden, weight, targets, a, b, bias=bias, backend=backend, block=BLOCK)
    expected = call(hidden, weight, targets, a, b, bias=bias, backend="reference")
    assert all(torch.allclose(mine, true, 1e-5, 1e-5) for mine, true in zip(got, expected, strict=True))
    assert (got[3][bias.isinf()] == 0).all()
    lost = hpo.linear_token_logprobs(hidden, weight, targets, bias=torch.full_like(bias, -math.inf), backend=backend)
    assert lost.logp[targets != IGNORED].isnan().all() and (lost.logp[targets == IGNORED] == 0).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("variant", ["no entropy", "everything", "temperatures"])
def test_a_batch(variant, backend):
    """The result of token_logprobs for the logits; hidden states that predict no token of the mask are not read."""
    (hidden, weight, targets, a, b), keywords = head(), VARIANTS[variant]
    mask = torch.arange(COUNT) % 9 > torch.tensor([0, 3, 2, 0, 8]).repeat_interleave(9)
    mask[7] = False
    packed = hpo.PackedBatch.from_lengths([9] * 5, mask=mask)
    hidden = hidden.masked_fill(~mask.roll(-1)[:, None], math.nan)
    found = call(hidden, weight, targets, a, b, **keywords, batch=packed, backend=backend)

    logits = torch.where(hidden.isnan(), 0.0, hidden) @ weight.t() + keywords.get("bias", 0.0)
    logits, cap = keywords.get("logit_scale", 1.0) * logits, keywords.get("softcap")
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    of_logits = {name: keywords[name] for name in ("temperature", "entropy") if name in keywords}
    logp, entropy = hpo.token_logprobs(logits, targets, batch=packed, **of_logits, backend=backend)
    torch.testing.assert_close(found[0], logp)
    torch.testing.assert_close(found[1], logp if entropy is None else entropy)

    # Each token by hand: its target at the hidden state before it.
    each = {name: value.roll(-1) if variant == name + "s" else value for name, value in keywords.items()}
    moved = torch.where(mask, targets, IGNORED).roll(-1)
    alone = call(hidden, weight, moved, a.roll(-1), b.roll(-1), **each, backend=backend)
    assert all(torch.equal(mine, whole.roll(1)) for mine, whole in zip(found[:2], alone[:2], strict=True))
    assert all(torch.equal(mine, whole) for mine, whole in zip(found[2:], alone[2:], strict=True))

    folded = [each.view(5, 9, *each.shape[1:]) for each in (hidden, targets, a, b)]
    if variant == "temperatures":
        keywords = {**keywords, "temperature": keywords["temperature"].view(5, 9)}
    for batch in (packed.mask.view(5, 9), hpo.PackedBatch.from_padded(mask.view(5, 9))):
        padded = call(folded[0], weight, *folded[1:], **keywords, batch=batch, backend=backend)
        assert all(torch.equal(mine.reshape(whole.shape), whole) for mine, whole in zip(padded, found, strict=True))


@backends
@pytest.mark.parametrize("shape", [(0,), (), (3, 0), (5, 9), (3, 5, 3)])
def test_leading_shapes(shape, backend):
    hidden, weight, targets, a, b = head()
    count = math.prod(shape)
    expected = call(hidden[:count], weight, targets[:count], a[:count], b[:count], backend=backend, block=BLOCK)
    got = call(
        hidden[:count].reshape(*shape, WIDTH), weight, targets[:count].reshape(shape), a[:count].reshape(shape),
        b[:count].reshape(shape), backend=backend, block=BLOCK,
    )  # fmt: skip
    assert got[0].shape == got[1].shape == shape and got[2].shape == (*shape, WIDTH)
    for mine, flat in zip(got, expected, strict=True):
        assert torch.equal(mine.flatten(), flat.flatten())


@backends
def test_hidden_states_without_numbers(backend):
    """The logits are the bias alone."""
    _, _, targets, a, b = head()
    bias = normal(VOCABULARY, seed=4)
    for empty in (torch.zeros(COUNT, 0), torch.zeros(0, 0)):
        rows = len(empty)
        given = empty, torch.zeros(VOCABULARY, 0), targets[:rows], a[:rows], b[:rows]
        got, expected = (call(*given, bias=bias, backend=each) for each in (backend, "reference"))
        for mine, true in zip(got, expected, strict=True):
            assert mine.shape == true.shape and torch.allclose(mine, true, 1e-5, 1e-5)


@backends
def test_strides(backend):
    hidden, weight, targets, a, b = head()
    expected = call(hidden, weight, targets, a, b, backend=backend, block=BLOCK)
    wide, turned = torch.stack((hidden, hidden.new_full(hidden.shape, math.nan)), 1)[:, 0], weight.t().contiguous().t()
    got = call(wide, turned, targets, a, b, backend=backend, block=BLOCK)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.allclose(mine, theirs, 1e-5, 1e-5)


# ------------------------------------------------------------------------------------------------------------- autograd


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_frozen_costs_nothing_and_changes_nothing(dtype, backend, monkeypatch):
    hidden, weight, targets, a, b = head(dtype)
    bias = normal(VOCABULARY).to(dtype)
    whole = call(hidden, weight, targets, a, b, bias=bias, backend=backend, block=BLOCK)[2:]
    products, multiply = [], hpo.ops.linear_logprobs._multiply
    monkeypatch.setattr(
        hpo.ops.linear_logprobs, "_multiply", lambda *args, **kw: products.append(multiply(*args, **kw))
    )
    for trained, of_a_block in ((0, 2), (1, 2), (2, 1)):
        leaves = [each.detach().requires_grad_(at == trained) for at, each in enumerate((hidden, weight, bias))]
        result = hpo.linear_token_logprobs(*leaves[:2], targets, bias=leaves[2], backend=backend, block=BLOCK)
        products.clear()
        (got,) = torch.autograd.grad((result.logp, result.entropy), leaves[trained], (a, b))
        assert torch.equal(got, whole[trained]) and len(products) == of_a_block * 3 * 3


@backends
def test_autocast_changes_nothing(backend):
    given = head()
    expected = call(*given, backend=backend, block=BLOCK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = call(*given, backend=backend, block=BLOCK)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


@backends
def test_one_of_the_two_gradients(backend):
    hidden, weight, targets, a, b = head()
    leaf = hidden.requires_grad_()
    result = hpo.linear_token_logprobs(leaf, weight, targets, backend=backend, block=BLOCK)
    (of_logp,) = torch.autograd.grad(result.logp, leaf, a, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(result.entropy, leaf, b)
    whole = call(hidden, weight, targets, a, b, backend=backend, block=BLOCK)[2]
    assert torch.allclose(of_logp + of_entropy, whole, 1e-5, 1e-5)


def test_derivatives_that_are_not_supported():
    hidden, weight, targets, *_ = head()
    leaf = hidden.requires_grad_()
    logp = hpo.linear_token_logprobs(leaf, weight, targets, backend="cpu").logp
    (grad,) = torch.autograd.grad(logp.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_token_logprobs: second derivatives are not supported"):
        grad.sum().backward()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="linear_token_logprobs: forward-mode derivatives"):
        hpo.linear_token_logprobs(forward_ad.make_dual(hidden.detach(), hidden.detach()), weight, targets)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_functional_gradients(backend):
    hidden, weight, targets, *_ = head()

    def loss(h, w):
        logp, entropy = hpo.linear_token_logprobs(h, w, targets, backend=backend)
        return (logp + 0.5 * entropy).sum()

    ones = torch.ones(COUNT)
    expected = call(hidden, weight, targets, ones, 0.5 * ones, backend=backend)
    for got, wanted in zip(torch.func.grad(loss, argnums=(0, 1))(hidden, weight), expected[2:], strict=True):
        assert torch.equal(got, wanted)


def test_gradcheck():
    hidden, weight, targets, *_ = head(count=5, vocabulary=7, width=3)
    leaves = [each.double().requires_grad_() for each in (hidden, weight, normal(7))]
    run = lambda h, w, b: tuple(hpo.linear_token_logprobs(  # noqa: E731
        h, w, targets, b, 0.7, softcap=3.0, logit_scale=2.0, backend="reference"
    ))  # fmt: skip
    assert torch.autograd.gradcheck(run, leaves)


# -------------------------------------------------------------------------------------------- operators and compilation


@pytest.mark.parametrize("kept", [2, 3])
def test_opcheck(kept):
    hidden, weight, targets, a, b = head(count=9, vocabulary=30, width=4)
    for bias, temperatures, softcap in ((None, None, 5.0), (normal(30), a.abs() + 0.5, None)):
        rest = (bias, targets, temperatures, 0.7, IGNORED, softcap, 0, 30, 4, 20, "")
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        torch.library.opcheck(OPERATORS.linear_token_logprobs.default, (*leaves, *rest, kept))
        statistics = OPERATORS.linear_token_logprobs(hidden, weight, *rest, kept)[2]
        gradients = (a, b if kept > 2 else None, [True, kept > 2, bias is not None])
        given = (hidden, weight, *rest, statistics, *gradients)
        torch.library.opcheck(OPERATORS.linear_token_logprobs_backward.default, given)


class Traced(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_the_operator_has_no_entropy_where_none_is_asked_for():
    hidden, weight, targets, *_ = head()
    with Traced():
        found = hpo.linear_token_logprobs(hidden, weight, targets, entropy=False)
    expected = hpo.linear_token_logprobs(hidden, weight, targets).logp
    assert found.entropy is None and torch.equal(found.logp, expected)


@pytest.mark.parametrize(("backend", "batched"), [("reference", False), ("cpu", False), ("cpu", True)])
def test_compiled_without_a_break(backend, batched):
    """One graph, and one more with the number of tokens as a symbol."""
    hidden, weight, targets, *_ = head()

    def loss(h, w, targets):
        batch = (torch.arange(len(h)) > 0)[None] if batched else None
        h, targets = (h[None], targets[None]) if batched else (h, targets)
        logp, entropy = hpo.linear_token_logprobs(h, w, targets, None, 0.7, batch=batch, softcap=5.0, backend=backend)
        return (logp + 0.5 * entropy).square().sum()

    torch.compiler.reset()
    counter = dynamo.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for count in (len(hidden), len(hidden) - 1, len(hidden) - 3):
        leaves = [[each.clone().requires_grad_() for each in (hidden[:count], weight)] for _ in range(2)]
        loss(*leaves[0], targets[:count]).backward()
        compiled(*leaves[1], targets[:count]).backward()
        for one, other in zip(*leaves, strict=True):
            assert torch.allclose(one.grad, other.grad, 1e-6, 1e-6)
    assert counter.frame_count <= 2


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "vocabulary"), [(64, 4000), (256, 4000), (256, 16000)])
def test_extra_memory_is_that_of_a_block(count, vocabulary, dtype):
    """Nothing grows with T V, and beyond gradients nothing with V: blocks of 16-bit weights and their gradient."""
    width, (rows, columns) = 16, (64, 500)
    hidden, weight, targets, a, b = head(dtype, count, vocabulary, width)
    block = 4 * (rows * columns + 2 * columns * width * (dtype != torch.float32) + rows * width)

    def forward():
        with torch.no_grad():
            hpo.linear_token_logprobs(hidden, weight, targets, block=(rows, columns))

    def both():
        call(hidden, weight, targets, a, b, block=(rows, columns))

    def capped():
        call(hidden, weight, targets, a, b, block=(rows, columns), softcap=4.0)

    numbers = 4 * count * 100  # so many floats a row are small change
    gradients = (hidden.nbytes + weight.nbytes) + 3 * 4 * count * width
    forward()
    assert extra_bytes(forward) <= 1.1 * block + numbers
    assert extra_bytes(both) <= 1.1 * block + numbers + gradients
    assert extra_bytes(capped) <= 1.1 * (block + 4 * rows * columns) + numbers + gradients
    assert 1.1 * block + numbers + gradients < 4 * count * vocabulary


def test_the_backward_holds_the_hidden_gradient_once_in_float32():
    hidden, weight, targets, a, b = head(torch.bfloat16, 1024, 64, 128)
    extra = extra_bytes(lambda: call(hidden, weight, targets, a, b, block=(128, 64)))
    assert extra - hidden.nbytes - weight.nbytes < 2.2 * 4 * hidden.numel()


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"hidden": torch.zeros(2, 4, dtype=torch.float64)}, TypeError, "hidden: expected dtype float32 or bfloat16"),
        ({"hidden": torch.tensor(1.0)}, ValueError, "hidden: expected shape"),
        ({"weight": torch.zeros(0)}, ValueError, r"weight: expected shape .*; if FSDP or ZeRO holds the head in parts"),
        ({"weight": torch.zeros(5, 3)}, ValueError, r"weight: .* 4 columns of hidden, got \[5, 3\]; hidden is the"),
        ({"weight": torch.zeros(4, 5)}, ValueError, r"weight: .* the 4 columns of hidden, got \[4, 5\]; use weight\.T"),
        ({"weight": torch.zeros(0, 4)}, ValueError, "weight: expected a vocabulary of at least one token"),
        ({"weight": torch.zeros(5, 4, dtype=torch.int8)}, TypeError, "weight: .*; dequantise a quantised weight"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ValueError, "targets: expected shape"),
        ({"targets": torch.zeros(2)}, TypeError, "targets: expected dtype int64 or int32"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias: expected shape \[V\]"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a finite number above 0, got 0.0"),
        ({"logit_scale": -1.0}, ValueError, "logit_scale: expected a finite number above 0, got -1.0"),
        ({"logit_scale": None}, TypeError, "logit_scale: expected a number, got None"),
        ({"softcap": 1e39}, ValueError, "softcap / logit_scale: expected a number above 0 that .*, got 1e.39"),
        ({"softcap": 1.0, "logit_scale": 1e-39, "temperature": 1e-10}, ValueError, "softcap / logit_scale: expected a"),
        ({"logit_scale": 1e39}, ValueError, "temperature / logit_scale: expected finite numbers above 0 that float32"),
        ({"logit_scale": 1e10, "temperature": torch.full((2,), 1e-30)}, ValueError,
         "temperature / logit_scale: expected finite numbers above 0 that float32 holds, got "),
        ({"block": (0, 5)}, ValueError, r"block: expected two integers above 0, .*, got \(0, 5\)"),
        ({"block": 64}, TypeError, "block: expected a pair of integers, got 64"),
        ({"temperature": 0.0}, ValueError, "temperature: expected finite numbers above 0 that float32 holds"),
        ({"batch": "pack"}, TypeError, r"batch: expected a PackedBatch or a mask \[B, L\], got"),
        ({"batch": torch.ones(1, 3, dtype=torch.bool)}, ValueError, r"targets: .*; a batch takes both unshifted"),
        ({"batch": hpo.PackedBatch.from_lengths([2])}, ValueError, r"batch: its mask counts the first token of row"),
        ({"process_group": "world"}, TypeError, "process_group: expected a torch.distributed.ProcessGroup"),
    ],
)  # fmt: skip
def test_wrong_arguments(wrong, error, message):
    given = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(5, 4), "targets": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        hpo.linear_token_logprobs(**{**given, **wrong})
