"""The support of a sampler: the tokens that top-k, top-p and min-p leave, and log-probabilities over them alone."""

import math

import pytest
import torch
from adversarial import integers, normal
from conftest import NATIVE
from devices import Device, NoHostData, OnDevice, Watched
from lazily import Lazy

import hpo_core as hpo
import hpo_core.support

both = pytest.mark.parametrize("backend", ["reference", "cpu"])
each_backend = pytest.mark.parametrize("backend", ["reference", *NATIVE])
IGNORED = -100
dynamo = Lazy("torch._dynamo.testing")
SETTINGS = [
    {"top_k": 1}, {"top_k": 5}, {"top_k": 40}, {"top_k": 41}, {"top_k": 10**6}, {"top_p": 0.9}, {"top_p": 0.3},
    {"top_p": 1e-9}, {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 7, "top_p": 0.8}, {"top_k": 20, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.2}, {"top_k": 12, "top_p": 0.95, "min_p": 0.02}, {"top_k": 40, "top_p": 1.0},
]  # fmt: skip


ROWS = {
    "no two alike": normal(6, 40),
    "ties": integers(6, 6, 40).float() / 2,
    "all alike": torch.zeros(6, 40),
    "a masked vocabulary": normal(6, 40).masked_fill(integers(3, 6, 40, seed=1) > 0, -math.inf),
    "bfloat16": normal(6, 40).to(torch.bfloat16),
    "float64": normal(6, 40).double(),
}


def kept_by_hand(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that the settings leave, one after the other; equal logits stay together."""
    top = max(row)
    weight = [math.exp((x - top) / temperature) for x in row]
    kept = [at for at in range(len(row)) if weight[at] >= min_p and row[at] > -math.inf]
    if 0 < top_k < len(kept):
        least = sorted(row[at] for at in kept)[-top_k]
        kept = [at for at in kept if row[at] >= least]
    if top_p < 1:
        total = math.fsum(weight[at] for at in kept)
        before = {at: math.fsum(weight[other] for other in kept if row[other] > row[at]) for at in kept}
        kept = [at for at in kept if before[at] < top_p * total]
    return kept


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_the_support_is_that_of_a_naive_loop(rows, settings):
    logits = ROWS[rows]
    for temperature in (0.7, 1.5):
        floor = hpo.support_floor(logits, temperature, **settings)
        assert floor.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
        for row, least in zip(logits.tolist(), floor.tolist(), strict=True):
            kept = kept_by_hand(row, temperature, **settings)
            assert [at for at, x in enumerate(row) if x >= least and x > -math.inf] == kept
            assert least in row or least == -math.inf


def test_settings_for_each_row():
    """Settings per row, off in some rows, leave the same tokens as one row at a time."""
    logits = ROWS["ties"]
    temperature = torch.tensor([0.5, 1.0, 0.7, 2.0, 1.5, 1.0])
    top_k, top_p = torch.tensor([3, -1, 0, 39, 50, 9]), torch.tensor([0.5, 0.75, 1.0, 0.25, 1.0, 0.875])
    min_p = torch.tensor([0.0, 0.125, 0.25, 0.0, 1.0, 0.0625])
    for given in ({"top_k": top_k}, {"top_k": top_k, "top_p": top_p}, {"top_k": top_k, "top_p": top_p, "min_p": min_p}):
        floor = hpo.support_floor(logits, temperature, **given)
        for at in range(6):
            numbers = {name: value[at].item() for name, value in given.items()}
            kept = kept_by_hand(logits[at].tolist(), temperature[at].item(), **numbers)
            assert (logits[at] >= floor[at]).nonzero().flatten().tolist() == kept
            alone = hpo.support_floor(logits[at], temperature[at].item(), **numbers)
            assert torch.equal(logits[at] >= floor[at], logits[at] >= alone)
    wide = {"top_k": top_k.to(torch.int32), "top_p": top_p.to(torch.bfloat16), "min_p": min_p.double()}
    assert torch.equal(hpo.support_floor(logits, temperature, **wide), floor)


@pytest.mark.parametrize("few", [1, 4, 39])
@pytest.mark.parametrize("rows", ROWS)
def test_supports_within_and_beyond_the_greatest_logits(rows, few, monkeypatch):
    each = {"top_k": torch.tensor([3, -1, 0, 39, 50, 2]), "top_p": torch.tensor([0.5, 0.75, 1.0, 0.25, 1.0, 0.875])}
    beyond = {"top_k": torch.full((6,), 39), "top_p": 0.75}  # the share is of all 39, of which few are at hand
    settings = [*SETTINGS, each, {**each, "min_p": 0.1}, {"top_k": each["top_k"]}, beyond]
    expected = [hpo.support_floor(ROWS[rows], 0.7, **given) for given in settings]
    monkeypatch.setattr(hpo_core.support, "_FEW", few)
    for given, floor in zip(settings, expected, strict=True):
        assert torch.equal(hpo.support_floor(ROWS[rows], 0.7, **given), floor)


def test_layouts_and_chunks(monkeypatch):
    logits = normal(3, 5, 40)
    expected = hpo.support_floor(logits, top_k=9, top_p=0.8)
    monkeypatch.setattr(hpo_core.support, "_CHUNK", 80)
    for view in (logits, logits.transpose(0, 1).contiguous().transpose(0, 1), torch.cat((logits, logits), 1)[:, :5],
                 logits.transpose(1, 2).contiguous().transpose(1, 2)):  # fmt: skip
        assert torch.equal(hpo.support_floor(view, top_k=9, top_p=0.8), expected)
        each = torch.full((3, 5), 9)
        assert torch.equal(hpo.support_floor(view, top_k=each, top_p=0.8), expected)
    assert hpo.support_floor(logits[:, :0], top_k=2).shape == (3, 0)


def test_without_settings_every_token_is_left():
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0}, {"top_k": -1}, {"top_k": torch.tensor([0, -1])}, {}
    for settings in off:
        assert (normal(2, 9) >= hpo.support_floor(normal(2, 9), **settings)[:, None]).all()


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": torch.full((4,), 3)}])
def test_an_undefined_row_has_no_floor(settings):
    logits = normal(4, 9)
    logits[0, 3], logits[1, 4], logits[2] = math.nan, math.inf, -math.inf
    floor = hpo.support_floor(logits, **settings)
    assert floor[:3].isnan().all() and floor[3].isfinite()
    assert hpo.token_logprobs(logits, integers(9, 4), support_floor=floor).logp[:3].isnan().all()


# -------------------------------------------------------------------------------------------- log-probabilities over it


def over(logits, kept, targets, temperature):
    """logp and entropy of ``log_softmax`` over the kept tokens, in float64."""
    logps = (logits.double() / temperature).masked_fill(~kept, -math.inf).log_softmax(-1)
    entropy = -(logps.exp() * logps.masked_fill(logps.isinf(), 0.0)).sum(-1)
    return logps.gather(-1, targets[..., None]).squeeze(-1), entropy


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probabilities_over_the_support(dtype, backend):
    logits, targets = normal(2, 4, 300).to(dtype), integers(300, 2, 4)
    targets[0] = logits[0].argmax(-1)
    targets[1, 0] = IGNORED
    floor = hpo.support_floor(logits, 0.7, top_p=0.8, min_p=0.01)
    leaf = logits.requires_grad_()
    logp, entropy = hpo.token_logprobs(leaf, targets, 0.7, support_floor=floor, backend=backend)
    kept, read = leaf.detach() >= floor[..., None], targets != IGNORED
    expected = over(leaf.detach(), kept, targets.clamp(min=0), 0.7)
    assert torch.allclose(logp[read].double(), expected[0][read], 1e-5)
    assert torch.allclose(entropy[read].double(), expected[1][read], 1e-5)
    assert logp[~read].item() == entropy[~read].item() == 0 and logp[1, 1:].isinf().all() and logp[0].isfinite().all()
    (grad,) = torch.autograd.grad((logp[0].sum(), entropy.sum()), leaf)
    exact = leaf.detach().double().requires_grad_()
    logps, entropies = over(exact, kept, targets.clamp(min=0), 0.7)
    (wanted,) = torch.autograd.grad((logps[0].sum(), entropies[read].sum()), exact)
    assert torch.allclose(grad.double(), wanted, 4 * torch.finfo(dtype).eps, 1e-6) and (grad[~kept] == 0).all()


@each_backend
def test_log_probabilities_over_given_ids(backend):
    """Ids are in any order, repeated, with and without the target, and after padding of -1."""
    logits, targets = normal(5, 300), torch.tensor([7, 299, 4, IGNORED, 0])
    ids = torch.tensor([[7, 3, 7, 299, -1], [299, 298, 0, 1, 2], [5, -1, -1, -1, 6], [0, 1, 2, 3, 4], [0, 9, 9, 9, 8]])
    kept = torch.zeros(5, 301, dtype=torch.bool).scatter(1, ids % 301, True)[:, :300]
    leaf = logits.masked_fill(~kept, math.nan).requires_grad_()  # other logits are not read
    logp, entropy = hpo.token_logprobs(leaf, targets, 1.3, support_ids=ids, backend=backend)
    read = targets != IGNORED
    expected = over(logits, kept, targets.clamp(min=0), 1.3)
    assert torch.allclose(logp[read].double(), expected[0][read], 1e-5) and logp[2] == -math.inf
    assert torch.allclose(entropy[read].double(), expected[1][read], 1e-5) and logp[3] == entropy[3] == 0
    shuffled = ids[:, torch.tensor([4, 2, 0, 1, 3])].to(torch.int32)
    again = hpo.token_logprobs(leaf, targets, 1.3, support_ids=shuffled, backend=backend)
    assert torch.equal(again.logp, logp) and torch.equal(again.entropy, entropy)
    (grad,) = torch.autograd.grad((logp[[0, 1, 4]].sum(), entropy.sum()), leaf)
    dense = logits.masked_fill(~kept, -math.inf).requires_grad_()
    whole = hpo.token_logprobs(dense, targets, 1.3, backend=backend)
    (wanted,) = torch.autograd.grad((whole.logp[[0, 1, 4]].sum(), whole.entropy.sum()), dense)
    assert torch.allclose(grad, wanted, 1e-5, 1e-7) and (grad[~kept] == 0).all()


@both
def test_targets_outside_the_vocabulary_and_other_ignore_indices_among_ids(backend):
    logits, ids = normal(4, 9), torch.tensor([[0, 1, 2]] * 4)
    logp, _ = hpo.token_logprobs(logits, torch.tensor([0, 1, 9, -1]), 1.0, 0, support_ids=ids, backend=backend)
    assert logp[0] == 0 and logp[1] < 0 and logp[2:].isnan().all()
    none = hpo.token_logprobs(logits, torch.tensor([0, 1, 2, 3]), support_ids=torch.full((4, 2), -1), backend=backend)
    assert none.logp.isnan().all()
    with Watched():  # nobody could look at ids
        wrong = hpo.token_logprobs(logits, torch.tensor([0, 1, 2, 3]), support_ids=ids * 8, backend=backend)
    assert wrong.logp.isnan().all()
    one = hpo.token_logprobs(logits[0], torch.tensor(1), support_ids=torch.tensor([1, 2]), backend=backend)
    assert torch.allclose(one.logp, logits[0, 1:3].log_softmax(0)[0])


@pytest.mark.filterwarnings("error")
def test_shifted_tokens_and_transposed_ids_cause_no_warning(request):
    request.addfinalizer(lambda: torch.set_warn_always(False))
    torch.set_warn_always(True)
    ids, tokens = integers(9, 3, 5, 2), integers(9, 2, 6)
    given = normal(2, 6, 9)[:, :-1], tokens[:, 1:]
    expected = hpo.token_logprobs(*(each.contiguous() for each in given), support_ids=ids.permute(2, 1, 0).contiguous())
    assert torch.equal(hpo.token_logprobs(*given, support_ids=ids.permute(2, 1, 0)).logp, expected.logp)


@pytest.mark.parametrize("support", ["floor", "ids"])
def test_gradcheck(support):
    logits, targets = normal(4, 7).double().requires_grad_(), torch.tensor([0, 6, IGNORED, 3])
    if support == "floor":
        given = {"support_floor": hpo.support_floor(logits, top_k=torch.tensor([7, 5, 2, 6])) - 1e-3}
        targets[[0, 1, 3]] = logits[[0, 1, 3]].argmax(-1)
    else:
        given = {"support_ids": torch.tensor([[0, 1, 5], [6, -1, 2], [0, 1, 2], [3, 3, 4]])}
    run = lambda x: tuple(hpo.token_logprobs(x, targets, 0.7, **given, backend="reference"))  # noqa: E731
    assert torch.autograd.gradcheck(run, logits)


def test_compiled_without_a_break_or_a_graph_for_each_size():
    """Sizes are those of tokens, of the vocabulary and of ids: one graph, and one more with sizes as symbols."""

    def loss(logits, tokens, ids, top_k, batch):
        floor = hpo.support_floor(logits, 0.7, top_k=top_k, top_p=0.9)
        entropy = hpo.token_logprobs(logits, tokens, 0.7, batch=batch, support_floor=floor).entropy
        return entropy.sum() + hpo.token_statistics(logits, tokens, batch=batch, support_ids=ids).entropy.sum()

    torch.compiler.reset()
    counter = dynamo.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for count, vocabulary, known in ((7, 50, 3), (9, 61, 4), (12, 73, 6)):
        given = integers(50, count), integers(50, count, known, seed=1), integers(50, count, seed=2) - 1
        batch = hpo.PackedBatch.from_lengths([4, count - 4]).without_first_tokens()
        one, other = (normal(count, vocabulary).requires_grad_() for _ in range(2))
        loss(one, *given, batch).backward()
        compiled(other, *given, batch).backward()
        assert torch.allclose(one.grad, other.grad, 1e-6, 1e-7) and other.grad.any()
    assert counter.frame_count <= 2


def test_wrong_settings_that_are_not_read_make_the_floor_nan():
    logits = normal(4, 9)
    good = {"temperature": torch.ones(4), "top_k": torch.full((4,), 3), "top_p": torch.ones(4), "min_p": torch.zeros(4)}
    for name, value in {"temperature": 0.0, "top_k": -2, "top_p": 1.5, "min_p": math.nan}.items():
        wrong = {**good, name: good[name].index_fill(0, torch.tensor([2]), value)}
        with Watched():
            floor = hpo.support_floor(logits, **wrong)
        assert floor[2].isnan() and floor[[0, 1, 3]].isfinite().all()


def test_nothing_is_read_by_the_host():
    make = Device()
    with OnDevice(), NoHostData():
        logits, counts = make(3, 9).requires_grad_(), make(3, dtype=torch.int64)
        for given in ({"top_k": 3, "top_p": 0.5}, {"top_k": counts, "top_p": make(3), "min_p": make(3)}):
            floor = hpo.support_floor(logits, make(3), **given)
            hpo.token_logprobs(logits, counts, support_floor=floor, backend="reference").logp.sum().backward()
        hpo.token_logprobs(logits, counts, support_ids=make(3, 4, dtype=torch.int64), backend="reference")


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"top_k": -2}, ValueError, r"top_k: expected counts of tokens, where 0 and -1 are all of them, got -2"),
        ({"top_k": torch.tensor([3, -2])}, ValueError, r"top_k: expected counts of tokens, .* got \[-2\]"),
        ({"top_k": 2.0}, TypeError, "top_k: expected an integer or a tensor, one for each of the rows of logits"),
        ({"top_k": torch.tensor([2.0, 3.0])}, TypeError, "top_k: expected dtype int32 or int64, got float32"),
        ({"top_p": 0.0}, ValueError, "top_p: expected numbers above 0 and up to 1, which is off, got 0.0"),
        ({"top_p": 1.1}, ValueError, "top_p: expected numbers above 0 and up to 1"),
        ({"top_p": math.nan}, ValueError, "top_p: expected numbers above 0 and up to 1"),
        ({"top_p": torch.tensor([0.5, 0.0])}, ValueError, r"top_p: expected numbers above 0 .* got \[0.0\]"),
        ({"min_p": -0.1}, ValueError, "min_p: expected numbers from 0, which is off, to 1, got -0.1"),
        ({"min_p": torch.ones(3)}, ValueError, r"min_p: expected shape \[...\] \(that of rows of logits\)"),
        ({"temperature": 0.0}, ValueError, "temperature: expected finite numbers above 0 that .*, got 0.0; .*greedy"),
        ({"temperature": None}, TypeError, "temperature: expected a number or a tensor"),
        ({"logits": torch.zeros(2, 0)}, ValueError, "logits: expected a vocabulary of at least one token"),
    ],
)
def test_wrong_settings(wrong, error, message):
    with pytest.raises(error, match=message):
        hpo.support_floor(**{"logits": torch.zeros(2, 5), **wrong})


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"support_floor": torch.zeros(3)}, ValueError, "support_floor: expected shape"),
        ({"support_floor": torch.zeros(2, requires_grad=True)}, ValueError, "support_floor: it is a constant of"),
        ({"support_floor": torch.zeros(2, dtype=torch.int64)}, TypeError, "support_floor: expected floating point"),
        ({"support_ids": torch.zeros(2, dtype=torch.int64)}, ValueError, "support_ids: expected shape"),
        ({"support_ids": torch.zeros(2, 0, dtype=torch.int64)}, ValueError, r"support_ids: expected shape .*, K > 0"),
        ({"support_ids": torch.zeros(2, 3)}, TypeError, "support_ids: expected dtype int64 or int32"),
        ({"support_ids": torch.tensor([[0], [5]])}, ValueError, r"support_ids: expected ids from 0 to 4, .* got \[5\]"),
        ({"support_ids": torch.tensor([[0], [-2]])}, ValueError, r"support_ids: expected ids from 0 .* got \[-2\]"),
        (
            {"support_ids": torch.zeros(2, 1, dtype=torch.int64), "support_floor": torch.zeros(2)},
            ValueError, "support_floor, support_ids: expected one of them, got both",
        ),
    ],
)  # fmt: skip
def test_wrong_supports(wrong, error, message):
    with pytest.raises(error, match=message):
        hpo.token_logprobs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), **wrong)
