"""The options of token_logprobs: another entropy, statistics, gradients in place, and batches as models return them."""

import math

import pytest
import torch
from adversarial import integers, normal
from conftest import NATIVE
from devices import Device, NoHostData, OnDevice, Watched
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import hpo_core as hpo
from hpo_core import ops

both = pytest.mark.parametrize("backend", ["reference", "cpu"])
each_backend = pytest.mark.parametrize("backend", ["reference", *NATIVE])
functions = pytest.mark.parametrize("function", [hpo.token_logprobs, hpo.token_statistics])
IGNORED = -100


# -------------------------------------------------------------------------------------------------- another temperature


@both
@functions
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_an_entropy_at_another_temperature(kind, function, backend):
    logits, targets = normal(4, 60), integers(60, 4)
    targets[2] = IGNORED
    other = 1.0 if kind == "number" else torch.tensor([1.0, 0.5, math.nan, 2.0])
    leaf, first, second = (logits.clone().requires_grad_() for _ in range(3))
    found = function(leaf, targets, 0.7, entropy_temperature=other, backend=backend)
    logp = hpo.token_logprobs(first, targets, 0.7, entropy=False, backend=backend).logp
    entropy = hpo.token_logprobs(second, targets, other, backend=backend).entropy
    assert torch.equal(found.logp, logp) and torch.equal(found.entropy, entropy)
    (found.logp.sum() + 0.5 * found.entropy.sum()).backward()
    (logp.sum() + 0.5 * entropy.sum()).backward()
    assert torch.allclose(leaf.grad, first.grad + second.grad, 1e-6, 1e-7)


@pytest.mark.parametrize(
    ("temperature", "other", "passes"),
    [(0.7, None, [3]), (0.7, 0.7, [3]), ("same", "same", [3]), (0.7, 1.0, [2, 3]), (0.7, "other", [2, 3])],
)
def test_the_logits_are_read_twice_only_where_temperatures_differ(temperature, other, passes, monkeypatch):
    kept, run = [], ops.token_logprobs
    monkeypatch.setattr(ops, "token_logprobs", lambda rows, *rest: kept.append(rest[0]) or run(rows, *rest))
    tensors = {"same": torch.full((4,), 0.5), "other": torch.full((4,), 0.5)}
    temperature, other = (tensors.get(each, each) for each in (temperature, other))
    hpo.token_logprobs(normal(4, 9), integers(9, 4), temperature, entropy_temperature=other)
    assert kept == passes


# ----------------------------------------------------------------------------------------------------------- statistics


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [0.7, "tensor"])
def test_statistics(temperature, dtype, backend):
    """Against their formulas in float64, with ties for the greatest logit, a masked vocabulary and a floor."""
    logits, targets = normal(2, 4, 300).to(dtype), integers(300, 2, 4)
    targets[0, :3] = logits[0, :3].argmax(-1)
    logits[0, 1, 7] = logits[0, 1].max()
    logits[1, 1, ::2] = -math.inf
    targets[1, 2] = IGNORED
    logits[1, 2] = math.nan
    floors = torch.full((2, 4), -math.inf)
    floors[1, 3] = logits[1, 3].float().quantile(0.9)
    each = torch.tensor([[0.5, 1.0, 2.0, 1.5], [1.0, 0.25, math.nan, 1.0]]) if temperature == "tensor" else temperature
    found = hpo.token_statistics(logits, targets, each, support_floor=floors, backend=backend)
    plain = hpo.token_logprobs(logits, targets, each, support_floor=floors, backend=backend)
    assert torch.equal(found.logp, plain.logp) and torch.equal(found.entropy, plain.entropy)
    x = logits.double().masked_fill(logits < floors[..., None], -math.inf)
    z = x / (each if isinstance(each, float) else each.double()[..., None])
    read, column = targets != IGNORED, targets.clamp(min=0)[..., None]
    p = z.softmax(-1)
    true = {
        "probability": p.gather(-1, column).squeeze(-1),
        "log_sum_exp": z.logsumexp(-1),
        "sum_squares": p.square().sum(-1),
    }
    for name, expected in true.items():
        mine = getattr(found, name)
        assert mine.dtype == torch.float32 and mine.shape == targets.shape
        assert torch.allclose(mine[read].double(), expected[read], 4e-6, 0) and mine[~read].item() == 0
    is_top = (x.gather(-1, column).squeeze(-1) == x.amax(-1)) & read
    assert torch.equal(found.is_top, is_top) and is_top[0, :3].all() and not is_top.all()


@both
def test_statistics_are_constants(backend):
    logits = normal(3, 40).requires_grad_()
    found = hpo.token_statistics(logits, torch.tensor([4, 99, IGNORED]), backend=backend)
    assert [each.requires_grad for each in found] == [True, True, False, False, False, False]
    assert found.probability[1].isnan() and found.log_sum_exp[1].isnan() and not found.is_top[1:].any()
    (found.logp[0] + found.entropy[0]).backward()
    expected = logits.detach().requires_grad_()
    plain = hpo.token_logprobs(expected, torch.tensor([4, 99, IGNORED]), backend=backend)
    (plain.logp[0] + plain.entropy[0]).backward()
    assert torch.equal(logits.grad[::2], expected.grad[::2])


def test_statistics_of_float64():
    logits, targets = normal(3, 40).double(), integers(40, 3)
    found = hpo.token_statistics(logits, targets, 0.7, backend="reference")
    assert all(each.dtype == torch.float64 for each in found[:5])
    assert torch.allclose(found.log_sum_exp, (logits / 0.7).logsumexp(-1), 1e-14, 0)


# ------------------------------------------------------------------------------------------------------------- in place


def model(vocabulary=60):
    """Hidden states and a head, whose product keeps nothing of its result."""
    hidden, head = normal(6, 4, seed=1, scale=1.0), normal(4, vocabulary, seed=2, scale=1.0)
    return hidden.requires_grad_(), head.requires_grad_(), integers(vocabulary, 6)


def gradients(function, **keywords):
    hidden, head, targets = model()
    logits = hidden @ head
    found, seen = function(logits, targets, 0.7, **keywords), []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr() == logits.data_ptr()))
    grads = torch.autograd.grad(found.logp.sum() + 0.3 * found.entropy.sum(), (hidden, head))
    return *grads, seen == [True]


@pytest.mark.parametrize("backend", NATIVE)
def test_the_gradient_lies_where_the_logits_did(backend):
    *expected, is_there = gradients(hpo.token_logprobs, backend=backend)
    assert not is_there
    *grads, is_there = gradients(hpo.token_statistics, inplace_gradient=True, backend=backend)
    assert is_there and all(torch.equal(x, y) for x, y in zip(grads, expected, strict=True))


@pytest.mark.parametrize(
    "view", [lambda x: x.view(2, 3, 60), lambda x: x.view(3, 2, 60)[:, :1], lambda x: x.view(1, 6, 1, 60)], ids=range(3)
)
def test_views_whose_rows_lie_apart(view):
    grads = []
    for in_place in (False, True):
        hidden, head, _ = model()
        logits = view(hidden @ head)
        found = hpo.token_logprobs(logits, integers(60, *logits.shape[:-1]), inplace_gradient=in_place)
        grads.append(torch.autograd.grad((found.logp + found.entropy).sum(), (hidden, head)))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


class Allocations(TorchDispatchMode):
    """The largest result of an operation, in bytes, but for those that lie in given memory."""

    def __init__(self, *known):
        super().__init__()
        self.known, self.largest = [tensor.data_ptr() for tensor in known], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.nbytes)
        return result


def test_there_is_no_second_tensor_of_the_size_of_the_logits():
    hidden, head, targets = model(vocabulary=5000)
    size, largest, batch = 6 * 5000 * 4, {}, hpo.PackedBatch.from_lengths([4, 2]).without_first_tokens()
    for in_place in (False, True):
        logits = hidden @ head
        found = hpo.token_logprobs(logits, targets, batch=batch, inplace_gradient=in_place)
        with Allocations(logits, head) as seen:
            torch.autograd.grad(found.logp.sum() + found.entropy.sum(), hidden)
        largest[in_place] = seen.largest
    assert largest[False] == size and largest[True] < size / 10


def test_logits_that_something_else_has_kept_are_missed():
    """A second backward misses them, and so does another operation, whichever of the two graphs runs first."""
    changed = "modified by an inplace operation"
    hidden, head, targets = model()
    logp = hpo.token_logprobs(hidden @ head, targets, inplace_gradient=True).logp.sum()
    logp.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=changed):
        logp.backward()
    logits = hidden @ head
    squares = logits.square().sum()
    logp = hpo.token_logprobs(logits, targets, inplace_gradient=True).logp.sum()
    logp.backward()
    with pytest.raises(RuntimeError, match=changed):
        squares.backward()
    logits = hidden @ head
    logits = logits.tanh()  # keeps its result
    with pytest.raises(RuntimeError, match=changed):
        hpo.token_logprobs(logits, targets, inplace_gradient=True).logp.sum().backward()


def test_an_operation_whose_backward_has_run_misses_nothing():
    hidden, head, targets = model()
    grads = []
    for in_place in (False, True):
        logits = hidden @ head
        logp = hpo.token_logprobs(logits, targets, inplace_gradient=in_place).logp.sum()
        grads.append(torch.autograd.grad(logp + logits.square().sum(), hidden)[0])
    assert torch.allclose(*grads, 1e-6)


def test_without_a_gradient_nothing_is_written():
    hidden, head, targets = model()
    logits = (hidden @ head).detach()
    before, expected = logits.clone(), hpo.token_logprobs(logits, targets)
    found = hpo.token_logprobs(logits, targets, inplace_gradient=True)
    with torch.no_grad():
        hpo.token_logprobs(hidden @ head, targets, inplace_gradient=True, backend="reference")
    with Watched():
        hpo.token_logprobs(logits, targets, inplace_gradient=True)
    call = lambda: torch.func.grad(  # noqa: E731
        lambda x: (x * hpo.token_logprobs(logits, targets, inplace_gradient=True).logp).sum()
    )(torch.ones(len(targets)))
    assert torch.equal(call(), expected.logp)
    assert torch.equal(found.logp, expected.logp) and torch.equal(logits, before)


@pytest.mark.parametrize(
    ("logits_of", "keywords", "message"),
    [
        (lambda x: x.detach().requires_grad_(), {}, "expected logits that a model has computed, got a leaf"),
        (lambda x: x.detach().requires_grad_()[:], {}, "expected logits that a model has computed, got a leaf, or a"),
        (lambda x: x[:1].expand(6, 60), {}, r"expected rows with memory of their own, got strides \(0, 1\)"),
        (lambda x: x.as_strided((6, 60), (30, 1)), {}, r"expected rows with memory of their own, got strides \(30"),
        (lambda x: x.expand(2, 6, 60).clone().view(2, 3, 2, 60).transpose(1, 2), {}, "expected rows at two strides"),
        (lambda x: x, {"backend": "reference"}, "the reference has a graph of its own"),
        (lambda x: x, {"entropy_temperature": 1.0}, "the gradient of an entropy_temperature of its own"),
        (lambda x: x, {"support_ids": torch.zeros(6, 2, dtype=torch.int64)}, "with support_ids the gradient is that"),
    ],
)  # fmt: skip
def test_logits_that_no_gradient_may_be_written_over(logits_of, keywords, message):
    hidden, head, _ = model()
    logits = logits_of(hidden @ head)
    targets = integers(60, *logits.shape[:-1])
    with pytest.raises(ValueError, match=f"^inplace_gradient: {message}.*; leave inplace_gradient=False"):
        hpo.token_logprobs(logits, targets, 0.7, inplace_gradient=True, **keywords)


@pytest.mark.parametrize("hooks", ["checkpoint", "save_on_cpu"])
def test_hooks_for_what_a_graph_keeps_are_not_in_place(hooks):
    """Under them autograd tells nobody: an operation that reads the same logits would read their gradient."""
    hidden, head, targets = model()

    def run(hidden):
        logits = hidden @ head
        return logits.square().sum() + hpo.token_logprobs(logits, targets, inplace_gradient=True).logp.sum()

    with pytest.raises(ValueError, match=r"^inplace_gradient: expected a graph that .*; leave inplace_gradient=F"):
        if hooks == "checkpoint":
            checkpoint(run, hidden, use_reentrant=False)
        else:
            with torch.autograd.graph.save_on_cpu():
                run(hidden)


TRACES = {
    "a transform of torch.func": lambda run, x: torch.func.grad(run)(x),
    "a graph that is traced": lambda run, x: under_watch(run, x.requires_grad_()),
}


def under_watch(run, *arguments):
    with Watched():
        return run(*arguments)


@pytest.mark.parametrize("trace", TRACES)
def test_a_traced_backward_is_not_in_place(trace):
    _, _, targets = model()
    run = lambda x: hpo.token_logprobs(x * 1, targets, inplace_gradient=True).logp.sum()  # noqa: E731
    with pytest.raises(ValueError, match=f"inplace_gradient: expected an eager backward, got {trace}"):
        TRACES[trace](run, normal(6, 60))


@pytest.mark.long
def test_a_compiled_backward_is_not_in_place():
    _, _, targets = model()
    run = lambda x: hpo.token_logprobs(x * 1, targets, inplace_gradient=True).logp.sum()  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"inplace_gradient: expected an eager backward"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(normal(6, 60).requires_grad_())


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_of_compiled_code_are_written_over(softcap):
    """Nothing of a linear head and a softcap reads its result."""
    hidden, head, targets = model()

    def logits_of(hidden):
        logits = hidden @ head
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    torch.compiler.reset()
    compiled = torch.compile(logits_of, fullgraph=True, backend="aot_eager")
    grads = []
    for in_place in (False, True):
        logp = hpo.token_logprobs(compiled(hidden), targets, inplace_gradient=in_place).logp.sum()
        grads.append(torch.autograd.grad(logp, hidden)[0])
    assert torch.equal(*grads)


# -------------------------------------------------------------------------------------------------------------- batches

LENGTHS = [4, 0, 1, 5]
MASK = torch.tensor([0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1], dtype=torch.bool)  # of 10 tokens in rows, and two behind them


def packed():
    return hpo.PackedBatch.from_lengths(LENGTHS, mask=MASK)


def row_by_row(function, logits, tokens, batch, of_token, of_logits, **keywords):
    """The results of each row that is computed alone, from logits and tokens that are moved by hand."""
    found = [torch.zeros(len(tokens)) for _ in range(2)]
    for begin, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        if end - begin > 1:
            after, before = slice(begin + 1, end), slice(begin, end - 1)
            targets = torch.where(batch.mask[after], tokens[after], IGNORED)
            given = {name: value[after] for name, value in of_token.items()}
            given |= {name: value[before] for name, value in of_logits.items()}
            alone = function(logits[before], targets, **given, **keywords)
            for whole, part in zip(found, alone, strict=False):
                whole[after] = part
    return found


@both
@functions
@pytest.mark.parametrize("given", ["nothing", "temperature", "floors", "ids"])
def test_a_packed_batch(given, function, backend):
    """The results of a token come from the logits before it; nothing else is read."""
    batch, logits, tokens = packed(), normal(12, 30), integers(30, 12)
    read = torch.zeros(12, dtype=torch.bool)
    read[[0, 1, 2, 6, 8]] = True
    poisoned = logits.masked_fill(~read[:, None], math.nan)
    of_token = {
        "temperature": {"temperature": torch.linspace(0.5, 1.6, 12), "entropy_temperature": torch.ones(12)},
        "ids": {"support_ids": torch.cat((tokens[:, None], integers(30, 12, 4)), 1)},
    }.get(given, {})
    of_logits = {"support_floor": logits.amax(-1) - 4} if given == "floors" else {}
    leaf, by_hand = poisoned.requires_grad_(), logits.clone().requires_grad_()
    found = function(leaf, tokens, batch=batch, **of_token, **of_logits, backend=backend)
    logp, entropy = row_by_row(function, by_hand, tokens, batch, of_token, of_logits, backend=backend)
    assert torch.equal(found.logp, logp) and torch.equal(found.entropy, entropy)
    assert all((each[~MASK] == 0).all() and not each[10:].any() for each in found)
    weights = torch.linspace(-1, 1, 12)
    wanted = torch.isfinite(logp)
    (weights * torch.where(wanted, found.logp, 0.0) + found.entropy).sum().backward()
    (weights * torch.where(wanted, logp, 0.0) + entropy).sum().backward()
    assert torch.allclose(leaf.grad, by_hand.grad, 1e-6, 1e-7) and (leaf.grad[~read] == 0).all()


@both
@functions
def test_a_padded_batch(function, backend):
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    logits, tokens = normal(3, 4, 30), integers(30, 3, 4)
    batch, each = hpo.PackedBatch.from_padded(mask), torch.linspace(0.5, 1.6, 12).view(3, 4)
    expected = function(logits[:, :-1], torch.where(mask, tokens, IGNORED)[:, 1:], each[:, 1:], backend=backend)
    for given in (batch, mask):
        found = function(logits, tokens, each, batch=given, backend=backend)
        for mine, alone in zip(found, expected, strict=True):
            assert torch.equal(mine[:, 1:], alone) and not mine[:, 0].any() and mine.shape == mask.shape
    packed = function(logits.flatten(0, 1), tokens.flatten(), each.flatten(), batch=batch, backend=backend)
    assert all(torch.equal(mine, whole.flatten()) for mine, whole in zip(packed, found, strict=True))


def test_ignored_tokens_of_a_batch():
    tokens = integers(30, 12).index_fill(0, torch.tensor([2]), 7)
    found = hpo.token_logprobs(normal(12, 30), tokens, 1.0, 7, batch=packed())
    whole = hpo.token_logprobs(normal(12, 30), tokens, batch=packed())
    assert found.logp[2] == 0 != whole.logp[2] and torch.equal(found.logp, whole.logp.masked_fill(tokens == 7, 0))


def test_from_logits_to_a_loss():
    """In two lines, with the gradient in place, against log_softmax by hand."""
    hidden, head, _ = model()
    hidden = hidden.repeat(2, 1).detach().requires_grad_()
    tokens, batch, advantages = integers(60, 12), packed(), torch.tensor([1.0, 0.0, 0.0, -0.5])
    logp, _ = hpo.token_logprobs(hidden @ head, tokens, batch=batch, inplace_gradient=True)
    hpo.policy_loss(logp, None, advantages, batch).loss.backward()
    mine = hidden.grad.clone(), head.grad.clone()
    hidden.grad = head.grad = None
    logps = (hidden @ head).log_softmax(-1)[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
    kept = MASK[1:] & (torch.arange(1, 12) < 10)
    each = torch.repeat_interleave(advantages, torch.tensor(LENGTHS))
    (-(each[1:] * logps[:9])[kept[:9]].sum() / kept.sum()).backward()
    assert torch.allclose(mine[0], hidden.grad, 1e-4, 1e-6) and torch.allclose(mine[1], head.grad, 1e-4, 1e-6)


def test_first_tokens_must_not_count():
    logits, tokens = normal(12, 30), integers(30, 12)
    every = hpo.PackedBatch.from_lengths(LENGTHS, total_tokens=12)
    message = r"batch: its mask counts the first token of row {}, .* without batch; .*: batch\.without_first_tokens\(\)"
    with pytest.raises(ValueError, match=message.format(r"\[0\]")):
        hpo.token_logprobs(logits, tokens, batch=every)
    wrong = every.replace(mask=MASK.index_fill(0, torch.tensor([5]), True))
    with pytest.raises(ValueError, match=message.format(r"\[3\]")):
        hpo.token_logprobs(logits, tokens, batch=wrong)
    right = every.without_first_tokens()
    assert right.mask[:10].nonzero().flatten().tolist() == [1, 2, 3, 6, 7, 8, 9]
    assert right.without_first_tokens().mask.equal(right.mask) and wrong.without_first_tokens().mask.equal(MASK)
    assert hpo.token_logprobs(logits, tokens, batch=right).logp.count_nonzero() == 7
    padded = hpo.PackedBatch.from_padded(torch.ones(2, 3, dtype=torch.bool)).without_first_tokens()
    assert padded.padded_shape == (2, 3) and padded.mask.tolist() == [False, True, True] * 2
    for empty in (hpo.PackedBatch.from_lengths([]), hpo.PackedBatch.from_lengths([0, 0])):
        assert hpo.token_logprobs(logits[:0], tokens[:0], batch=empty).logp.shape == (0,)
        of_no_stride = logits[:0, :1].expand(0, logits.shape[-1])  # contiguous() returns it as it is
        assert hpo.token_logprobs(of_no_stride, tokens[:0], batch=empty).logp.shape == (0,)


def test_first_tokens_that_nobody_could_look_for_are_nan():
    """Where reading the mask would synchronise, or is not possible."""
    logits, tokens = normal(12, 30), integers(30, 12)
    mask = MASK.index_fill(0, torch.tensor([0, 5]), True)
    offsets = torch.tensor([0, 4, 4, 5, 10])

    def logp(mask):
        batch = hpo.PackedBatch(offsets, mask, validate=False)
        return hpo.token_logprobs(logits, tokens, batch=batch)

    found, whole = under_watch(logp, mask), logp(MASK)
    for mine, expected in zip(found, whole, strict=True):
        assert mine[[0, 5]].isnan().all() and torch.equal(mine.nan_to_num(0.0), expected)


def test_nothing_is_read_by_the_host():
    make = Device()
    with OnDevice(), NoHostData():
        logits, tokens = make(64, 9).requires_grad_(), make(64, dtype=torch.int64)
        found = hpo.token_statistics(logits, tokens, make(64), batch=make.batch(), entropy_temperature=1.0,
                                     backend="reference")  # fmt: skip
        (found.logp + found.entropy).sum().backward()
        offsets = make(9, dtype=torch.int64)
        everything = hpo.PackedBatch(offsets, total_tokens=64, validate=False)
        with pytest.raises(ValueError, match="batch: its mask counts the first token of row 0, as all others do"):
            hpo.token_logprobs(logits, tokens, batch=everything, backend="reference")
        hpo.token_logprobs(logits, tokens, batch=everything.without_first_tokens(), backend="reference")


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"batch": "pack"}, TypeError, r"batch: expected a PackedBatch or a mask \[B, L\], got <class 'str'>"),
        ({"logits": torch.zeros(11, 5), "targets": torch.zeros(11, dtype=torch.int64)}, ValueError,
         r"targets: expected shape \[T\] \(one per token of the batch\) = \[12\], got \[11\]"),
        ({"logits": torch.zeros(1, 12, 5), "targets": torch.zeros(1, 12, dtype=torch.int64)}, ValueError,
         r"targets: expected shape \[T\] .* of a model's form \[1, T, V\] pass logits\[0\] and targets\[0\]"),
        ({"logits": torch.zeros(1, 3, 5), "targets": torch.ones(1, 3).long(), "batch": torch.ones(1, 4).bool()},
         ValueError,
         r"targets: expected shape \[B, L\] .* = \[1, 4\], got \[1, 3\]; a batch takes both unshifted"),
        ({"entropy_temperature": 0.0}, ValueError, "entropy_temperature: expected finite numbers .* got 0.0"),
        ({"entropy_temperature": 1.0, "entropy": False}, ValueError, "entropy_temperature: expected None without an"),
        ({"entropy_temperature": torch.ones(3)}, ValueError, "entropy_temperature: expected shape"),
    ],
)  # fmt: skip
def test_wrong_arguments(wrong, error, message):
    given = {"logits": torch.zeros(12, 5), "targets": torch.zeros(12, dtype=torch.int64), "batch": packed()}
    with pytest.raises(error, match=message):
        hpo.token_logprobs(**{**given, **wrong})
