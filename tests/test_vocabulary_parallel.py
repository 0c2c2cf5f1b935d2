"""Parts of a vocabulary: states that are merged, and ranks that each hold a part, are what one process with all is.

"To two units": within 2 * 2^-23 of the larger of 1 and the number that one process finds.
"""

import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import hpo_core as hpo
from hpo_core import logprob_states, testing, vocabulary_parallel

ROWS, VOCABULARY, WIDTH = 11, 44, 6
IGNORED = -100
SIZES = {1: [44], 2: [13, 31], 4: [20, 1, 0, 23]}
WORLDS = pytest.mark.parametrize("world", [1, 2, 4])


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def data(dtype=torch.float32):
    """Logits with ties, a confident row, a masked part, target and rows; targets; the gradients of logp and entropy."""
    logits = normal(ROWS, VOCABULARY, scale=3.0)
    logits[1, 20], logits[2, :25], logits[3, [2, 40]], logits[3, 12] = 50.0, -math.inf, 9.0, -math.inf
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(1))
    targets[1:6] = torch.tensor([20, 30, 12, IGNORED, VOCABULARY])
    logits[4], logits[6, 5], logits[7] = math.nan, math.nan, -math.inf
    return logits.to(dtype), targets, *normal(2, ROWS, seed=2)


def head():
    _, targets, a, b = data()
    return normal(ROWS, WIDTH, seed=4), normal(VOCABULARY, WIDTH, seed=5), normal(VOCABULARY, seed=6), targets, a, b


def packed():
    return hpo.PackedBatch.from_lengths([ROWS - 5, 5]).without_first_tokens()


def with_gradients(function, leaves, a, b):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    logp, entropy = function(*leaves)
    outputs, upstream = ([logp], [a]) if entropy is None else ([logp, entropy], [a, b])
    gradients = torch.autograd.grad(outputs, leaves, [each.to(logp.dtype) for each in upstream])
    return [logp.detach(), logp.detach() if entropy is None else entropy.detach(), *gradients]


def to_two_units(got, expected):
    got, expected = got.double(), expected.double()
    assert torch.equal(got.isnan(), expected.isnan())
    error = torch.where(got == expected, 0.0, got - expected).nan_to_num(0.0).abs()
    assert (error <= 2 * 2.0**-23 * expected.abs().nan_to_num(1.0).clamp(min=1.0)).all(), error.max()


# -------------------------------------------------------------------------------------------------------------- states


def states(logits, targets, cuts, temperature=1.0, **keywords):
    return [
        logprob_states.part(logits[:, low:high], targets, temperature, first=low, vocabulary=VOCABULARY, **keywords)
        for low, high in itertools.pairwise([0, *cuts, VOCABULARY])
    ]


CUTS = ([], [1], [20], [7, 8, 30], [11, 22, 33], list(range(1, VOCABULARY)))


@pytest.mark.parametrize("temperature", [1.0, 0.3, "each"])
@pytest.mark.parametrize("cuts", CUTS, ids=len)
def test_merged_parts_are_the_whole(cuts, temperature):
    logits, targets, a, b = data()
    if temperature == "each":
        temperature = torch.linspace(0.5, 2.0, ROWS)
    whole = logprob_states.merge(states(logits, targets, cuts, temperature), temperature)
    for got, expected in zip(
        logprob_states.finish(whole, targets, temperature),
        hpo.token_logprobs(logits, targets, temperature),
        strict=True,
    ):
        to_two_units(got, expected)
    expected = with_gradients(lambda x: hpo.token_logprobs(x, targets, temperature), [logits], a, b)[2]
    parts = [
        logprob_states.part_gradient(
            logits[:, low:high], targets, whole, a, b, temperature, first=low, vocabulary=VOCABULARY
        )
        for low, high in itertools.pairwise([0, *cuts, VOCABULARY])
    ]
    to_two_units(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_states_are_their_definition(temperature):
    logits, targets, a, b = data()
    cuts = [9, 20]
    exact = states(logits.double(), targets, cuts, temperature, backend="reference")
    counted = targets != IGNORED
    for got, expected in zip(states(logits, targets, cuts, temperature), exact, strict=True):
        for mine, true in zip(got, expected, strict=True):
            assert mine.dtype == torch.float32 and true.dtype == torch.float64
            to_two_units(mine[counted], true[counted])
    whole = logprob_states.merge(exact, temperature)
    for got, true in zip(
        logprob_states.finish(whole, targets, temperature),
        hpo.token_logprobs(logits.double(), targets, temperature, backend="reference"),
        strict=True,
    ):
        to_two_units(got, true)
    keywords = {"first": 9, "vocabulary": VOCABULARY}
    true = with_gradients(
        lambda x: hpo.token_logprobs(x, targets, temperature, backend="reference"), [logits.double()], a, b
    )[2]
    for backend, x in (("reference", logits.double()), ("cpu", logits)):
        got = logprob_states.part_gradient(x[:, 9:20], targets, whole, a, b, temperature, backend=backend, **keywords)
        to_two_units(got, true[:, 9:20])


def test_merging_is_associative_and_has_an_identity():
    logits, targets, *_ = data()
    one, two, three = states(logits, targets, [13, 30])
    grouped = logprob_states.merge([one, logprob_states.merge([two, three])])
    for got, expected in zip(grouped, logprob_states.merge([one, two, three]), strict=True):
        to_two_units(got, expected)
    nothing = states(torch.full_like(logits, -math.inf), targets, [13])[0]
    defined = (targets != IGNORED) & (targets < VOCABULARY)
    for got, expected in zip(logprob_states.merge([nothing, two, nothing]), two, strict=True):
        assert torch.equal(got[defined].nan_to_num(7.0), expected[defined].nan_to_num(7.0))


def test_states_without_an_entropy():
    logits, targets, a, b = data()
    merged = logprob_states.merge(states(logits, targets, [13], entropy=False))
    logp, entropy = logprob_states.finish(merged, targets)
    assert merged.distance is None and entropy is None
    assert torch.equal(logp.nan_to_num(7.0), logprob_states.finish(
        logprob_states.merge(states(logits, targets, [13])), targets
    ).logp.nan_to_num(7.0))  # fmt: skip
    with pytest.raises(ValueError, match="state: expected a distance for an entropy_gradient, got None"):
        logprob_states.part_gradient(logits, targets, merged, a, b, first=0, vocabulary=VOCABULARY)


def test_wrong_states():
    logits, targets, *_ = data()
    one, two = states(logits, targets, [13])
    with pytest.raises(ValueError, match="first, vocabulary: expected that 44 columns from `first` on lie in the voc"):
        logprob_states.part(logits, targets, first=1, vocabulary=VOCABULARY)
    with pytest.raises(TypeError, match="states: expected a list of at least one LogprobState, got"):
        logprob_states.merge(one)
    with pytest.raises(ValueError, match=r"states\[1\]: expected a distance in every state or in none"):
        logprob_states.merge([one, two._replace(distance=None)])
    with pytest.raises(ValueError, match="state: expected shape"):
        logprob_states.finish(one, targets[:3])


# --------------------------------------------------------------------------------------------------------------- ranks


class Counted:
    """The collectives of torch.distributed that are called, and how many bytes a rank gives to each."""

    NAMES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "all_to_all", "reduce_scatter_tensor")

    def __enter__(self):
        self.calls, self.kept = [], {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, self.counting(name))
        return self.calls

    def counting(self, name):
        def run(*arguments, **keywords):
            own = arguments[1] if "gather" in name else arguments[0]
            self.calls.append((name, own.nbytes))
            return self.kept[name](*arguments, **keywords)

        return run

    def __exit__(self, *_):
        for name, function in self.kept.items():
            setattr(dist, name, function)


def together(logits, targets, **over):
    """The options that go with ranks: a support, an entropy at a temperature of its own, a batch."""
    mask = targets != IGNORED
    mask[0], mask[6] = False, False
    batch = hpo.PackedBatch(torch.tensor([0, 6, ROWS]), mask)
    whole, target = data()[0], targets.roll(-1).clamp(0, VOCABULARY - 1)  # that a row of logits predicts
    floors = torch.where(torch.arange(ROWS) % 3 == 0, whole.gather(1, target[:, None])[:, 0], -2.5)
    floors[-2] = 4.0  # above the target
    return hpo.token_logprobs(logits, targets, 0.7, batch=batch, support_floor=floors, entropy_temperature=1.5, **over)


def in_place(logits, targets, a, b, **over):
    """The gradient that takes the place of the logits."""
    computed = logits.clone().requires_grad_() * 1.0
    logp, entropy = hpo.token_logprobs(computed, targets, inplace_gradient=True, **over)
    torch.autograd.backward((logp, entropy), (a, b))
    return computed.detach()


def part_of(rank):
    """The columns of a rank, and what says so."""
    sizes = SIZES[dist.get_world_size()]
    first = sum(sizes[:rank])
    return slice(first, first + sizes[rank]), {"process_group": dist.group.WORLD, "vocabulary_sizes": sizes}


def compute_the_reference(rank):
    (mine, over), (logits, targets, a, b) = part_of(rank), data()
    function = lambda x: hpo.token_logprobs(x, targets, 0.7, backend="reference", **over)  # noqa: E731
    return {"reference": with_gradients(function, [logits[:, mine].double()], a, b)}


def compute_a_head(rank):
    (mine, over), found = part_of(rank), {}
    hidden, weight, bias, targets, a, b = head()
    for backend in ("cpu", "reference"):
        with Counted() as found["calls", "linear", backend]:
            found["linear", backend] = with_gradients(
                lambda h, w, c, backend=backend: hpo.linear_token_logprobs(
                    h, w, targets, c, 0.7, softcap=4.0, backend=backend, **over
                ),
                [hidden, weight[mine], bias[mine]], a, b,
            )  # fmt: skip
    return found


def compute(rank):
    """The results of one rank, for the tests to look at."""
    group, world = dist.group.WORLD, dist.get_world_size()
    found = {**compute_the_reference(rank), **compute_a_head(rank)}
    mine, over = part_of(rank)
    even = slice(rank * VOCABULARY // world, (rank + 1) * VOCABULARY // world)
    logits, targets, a, b = data()
    for dtype in (torch.float32, torch.bfloat16):
        with Counted() as found["calls", dtype]:
            found["logits", dtype] = with_gradients(
                lambda x: hpo.token_logprobs(x, targets, 0.7, **over), [logits[:, mine].to(dtype)], a, b
            )
    found["even"] = with_gradients(
        lambda x: hpo.token_logprobs(x, targets, 0.7, process_group=group), [logits[:, even]], a, b
    )
    with Counted() as found["calls", "no entropy"]:
        found["no entropy"] = hpo.token_logprobs(logits[:, mine], targets, entropy=False, **over).logp
    temperatures = torch.linspace(0.5, 2.0, ROWS)
    found["temperatures"] = hpo.token_logprobs(logits[:, mine], targets, temperatures, **over)
    found["together"] = with_gradients(lambda x: together(x, targets, **over), [logits[:, mine]], a, b)
    found["in place"] = in_place(logits[:, mine], targets, a, b, **over)

    def loss(x, **options):
        logp, entropy = hpo.token_logprobs(x, targets, 0.7, **over, **options)
        return (a * logp + b * entropy).sum()

    found["functional"] = torch.func.grad(loss)(logits[:, mine])

    hidden, weight, *_ = head()
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)  # sequence or context parallel
    found["rows"] = hpo.token_logprobs(logits[rows], targets[rows])
    found["batch"] = with_gradients(
        lambda h, w: hpo.linear_token_logprobs(h, w, targets, batch=packed(), **over), [hidden, weight[mine]], a, b
    )
    found["hidden rows"] = hpo.linear_token_logprobs(hidden[rows], weight, targets[rows])

    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    chunks = [len(each) for each in torch.arange(VOCABULARY).chunk(world)]
    own = slice(sum(chunks[:rank]), sum(chunks[: rank + 1]))
    columns = sharded = DTensor.from_local(logits[:, own], mesh, [Shard(1)])
    found["distributed logits"] = with_gradients(lambda x: hpo.token_logprobs(x, targets, 0.7), [sharded], a, b)
    found["distributed logits"][2] = found["distributed logits"][2].to_local()
    sharded = DTensor.from_local(weight[own], mesh, [Shard(0)])
    found["distributed weight"] = hpo.linear_token_logprobs(
        hidden, sharded, targets, temperature=0.7, process_group=mesh.get_group()
    )
    uneven = torch.distributed.tensor.distribute_tensor(weight[:-1], mesh, [Shard(0)])
    found["uneven weight"] = hpo.linear_token_logprobs(hidden, uneven, targets, process_group=mesh.get_group())
    few = torch.distributed.tensor.distribute_tensor(
        logits[:, : world + 1], mesh, [Shard(1)]
    )  # of 4 ranks one has none
    found["few columns"] = hpo.token_logprobs(few, targets % (world + 1))
    wrong = {
        "float sizes": lambda: hpo.token_logprobs(
            logits[:, mine], targets, **{**over, "vocabulary_sizes": [float(size) for size in SIZES[world]]}
        ),
        "no group": lambda: hpo.linear_token_logprobs(hidden, sharded, targets),
        "replicated": lambda: hpo.token_logprobs(DTensor.from_local(logits, mesh, [Replicate()]), targets),
        "sizes": lambda: hpo.token_logprobs(logits[:, mine], targets, process_group=group),
        "sizes alone": lambda: hpo.token_logprobs(logits[:, mine], targets, vocabulary_sizes=over["vocabulary_sizes"]),
        "sizes of a weight alone": lambda: hpo.linear_token_logprobs(hidden, weight, targets, vocabulary_sizes=[7]),
        "another group": lambda: hpo.token_logprobs(columns, targets, process_group=dist.new_group([0])),
        "other sizes": lambda: hpo.token_logprobs(columns, targets, vocabulary_sizes=[1] * world),
        "support_ids": lambda: hpo.token_logprobs(
            logits[:, mine], targets, support_ids=torch.zeros(ROWS, 1, dtype=torch.int64), **over
        ),
        "nothing": lambda: hpo.token_logprobs(logits[:, :0], targets, process_group=group),
        "own size": lambda: hpo.token_logprobs(logits[:, mine], targets, **{**over, "vocabulary_sizes": [99] * world}),
        "number of sizes": lambda: hpo.token_logprobs(
            logits[:, mine], targets, **{**over, "vocabulary_sizes": [44] * 9}
        ),
    }
    wrong["written over in a transform"] = lambda: torch.func.grad(
        lambda x: loss(x * 1, inplace_gradient=True)
    )(logits[:, mine])  # fmt: skip
    wrong["vmap"] = lambda: torch.vmap(lambda x, y: hpo.token_logprobs(x, y, **over).logp)(logits[:, mine], targets)
    for name, run in wrong.items():
        found["error", name] = message_of(run)
    return found


def message_of(run):
    try:
        run()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def found():
    """The results of each rank of each world; modules of distributed tensors are imported before processes fork."""

    return {world: on_ranks(world, compute) for world in SIZES}


def expected(dtype=torch.float32):
    logits, targets, a, b = data(dtype)
    return with_gradients(lambda x: hpo.token_logprobs(x, targets, 0.7), [logits], a, b)


def test_a_row_of_minus_infinity_alone_has_no_gradient(backend):
    device = testing.device_of(backend)
    logits, targets = torch.full((2, 2), -math.inf, device=device), torch.tensor([3, 3], device=device)
    keywords = {"vocabulary": 4, "backend": backend}
    whole = logprob_states.merge([logprob_states.part(logits, targets, first=first, **keywords) for first in (0, 2)])
    for first in (0, 2):
        upstream = torch.tensor([1.0, 0.0], device=device)
        grad = logprob_states.part_gradient(logits, targets, whole, upstream, first=first, **keywords)
        assert grad.isnan().all()


@WORLDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_with_a_part_each_are_one_process(found, world, dtype):
    ranks = [rank["logits", dtype] for rank in found[world]]
    whole = expected(dtype)
    for rank in ranks:
        for got, first, true in zip(rank[:2], ranks[0][:2], whole[:2], strict=True):
            assert torch.equal(got.nan_to_num(7.0), first.nan_to_num(7.0)), "all ranks have the same bits"
            to_two_units(got, true)
    gradient = torch.cat([rank[2] for rank in ranks], 1)
    assert gradient.dtype == dtype
    to_two_units(gradient, whole[2]) if dtype == torch.float32 else torch.testing.assert_close(
        gradient, whole[2], rtol=2**-7, atol=1e-6, equal_nan=True
    )


@WORLDS
def test_one_small_all_gather_forward_and_none_backward(found, world):
    for rank in found[world]:
        assert rank["calls", torch.float32] == [("all_gather", 4 * (4 * ROWS + 1))]
        assert rank["calls", torch.bfloat16] == [("all_gather", 4 * (4 * ROWS + 1))]
        assert rank["calls", "no entropy"] == [("all_gather", 4 * (3 * ROWS + 1))]
        assert rank["calls", "linear", "cpu"] == [
            ("all_gather", 4 * (4 * ROWS + 1)), ("all_reduce", 4 * ROWS * WIDTH),
        ]  # fmt: skip


@WORLDS
def test_shards_of_one_size_temperatures_and_no_entropy(found, world):
    logits, targets, *_ = data()
    for rank in found[world]:
        for got, true in zip(rank["even"][:2], expected()[:2], strict=True):
            to_two_units(got, true)
        to_two_units(rank["no entropy"], hpo.token_logprobs(logits, targets).logp)
        each = hpo.token_logprobs(logits, targets, torch.linspace(0.5, 2.0, ROWS))
        for got, true in zip(rank["temperatures"], each, strict=True):
            to_two_units(got, true)
    to_two_units(torch.cat([rank["even"][2] for rank in found[world]], 1), expected()[2])


@WORLDS
def test_what_goes_with_ranks(found, world):
    logits, targets, a, b = data()
    whole = with_gradients(lambda x: together(x, targets), [logits], a, b)
    for rank in found[world]:
        for got, true in zip(rank["together"][:2], whole[:2], strict=True):
            to_two_units(got, true)
    to_two_units(torch.cat([rank["together"][2] for rank in found[world]], 1), whole[2])
    to_two_units(torch.cat([rank["in place"] for rank in found[world]], 1), in_place(logits, targets, a, b))
    for rank in found[world]:
        assert torch.equal(rank["functional"].nan_to_num(7.0), rank["logits", torch.float32][2].nan_to_num(7.0))


@WORLDS
def test_the_reference_over_ranks(found, world):
    logits, targets, a, b = data()
    whole = with_gradients(lambda x: hpo.token_logprobs(x, targets, 0.7, backend="reference"), [logits.double()], a, b)
    for rank in found[world]:
        for got, true in zip(rank["reference"][:2], whole[:2], strict=True):
            assert torch.equal(got.nan_to_num(7.0), true.nan_to_num(7.0))
    gradient = torch.cat([rank["reference"][2] for rank in found[world]], 1)
    assert torch.equal(gradient.nan_to_num(7.0), whole[2].nan_to_num(7.0))


@WORLDS
def test_a_batch_over_a_head_that_ranks_share(found, world):
    hidden, weight, _, targets, a, b = head()
    whole = with_gradients(
        lambda h, w: hpo.linear_token_logprobs(h, w, targets, batch=packed()), [hidden, weight], a, b
    )
    ranks = [rank["batch"] for rank in found[world]]
    for got in (*(rank[:3] for rank in ranks), [*ranks[0][:3], torch.cat([rank[3] for rank in ranks])]):
        torch.testing.assert_close(got, whole[: len(got)], rtol=2e-6, atol=2e-6, equal_nan=True)


@WORLDS
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_head_that_ranks_share(found, world, backend):
    hidden, weight, bias, targets, a, b = head()
    whole = with_gradients(
        lambda h, w, c: hpo.linear_token_logprobs(h, w, targets, temperature=0.7, bias=c, softcap=4.0, backend=backend),
        [hidden, weight, bias], a, b,
    )  # fmt: skip
    ranks = [rank["linear", backend] for rank in found[world]]
    for rank in ranks:
        for got, true in zip(rank[:3], whole[:3], strict=True):
            torch.testing.assert_close(got, true, rtol=2e-6, atol=2e-6, equal_nan=True)
    for which in (3, 4):
        got = torch.cat([rank[which] for rank in ranks])
        torch.testing.assert_close(got, whole[which], rtol=2e-6, atol=2e-6, equal_nan=True)


@WORLDS
def test_ranks_that_share_rows_need_nothing(found, world):
    """Sequence and context parallel: results are those of one process, to the bit."""
    logits, targets, *_ = data()
    hidden, weight, *_ = head()
    for name, whole in (
        ("rows", hpo.token_logprobs(logits, targets)),
        ("hidden rows", hpo.linear_token_logprobs(hidden, weight, targets)),
    ):
        for got, true in zip(zip(*(rank[name] for rank in found[world]), strict=True), whole, strict=True):
            assert torch.equal(torch.cat(got).nan_to_num(7.0), true.nan_to_num(7.0))


def few_columns(world):
    logits, targets, *_ = data()
    return hpo.token_logprobs(logits[:, : world + 1], targets % (world + 1))


@WORLDS
def test_distributed_tensors_are_recognised(found, world):
    hidden, weight, _, targets, *_ = head()
    ranks = [rank["distributed logits"] for rank in found[world]]
    for got, true in zip(ranks[0][:2], expected()[:2], strict=True):
        to_two_units(got, true)
    to_two_units(torch.cat([rank[2] for rank in ranks], 1), expected()[2])
    for name, whole in (
        ("distributed weight", hpo.linear_token_logprobs(hidden, weight, targets, temperature=0.7)),
        ("uneven weight", hpo.linear_token_logprobs(hidden, weight[:-1], targets)),
        ("few columns", few_columns(world)),
    ):
        for got, true in zip(found[world][0][name], whole, strict=True):
            torch.testing.assert_close(got, true, rtol=2e-6, atol=2e-6, equal_nan=True)


ERRORS = {
    "float sizes": "vocabulary_sizes: expected the columns of each of",
    "support_ids": "support_ids: expected None with a process_group",
    "sizes alone": "vocabulary_sizes: expected None without a process_group",
    "sizes of a weight alone": "vocabulary_sizes: expected None without a process_group",
    "another group": "process_group: expected None or the mesh's of logits",
    "other sizes": "vocabulary_sizes: expected None or .* those of the shards of logits",
    "no group": "weight: sharded by rows over .* process_group=weight.device_mesh.*full_tensor.grad_placements",
    "replicated": "logits: expected a tensor of this rank, got a DTensor; pass logits.to_local",
    "own size": r"vocabulary_sizes: expected the columns of every rank, \[.*\], at least one, got \[9",
    "nothing": r"vocabulary_sizes: expected the columns of every rank, \[0.*\], at least one, got \[0",
    "number of sizes": "vocabulary_sizes: expected the columns of each of",
    "written over in a transform": "inplace_gradient: expected an eager backward, got a transform of torch.func",
    "vmap": "hpo_core.token_logprobs: torch.func.vmap is not supported; pass logits",
}


@WORLDS
@pytest.mark.parametrize("name", ERRORS)
def test_what_is_wrong_is_named(found, world, name):
    for rank in found[world]:
        assert re.match(ERRORS[name], rank["error", name]), rank["error", name]


@pytest.mark.parametrize("world", [2, 4])
def test_sizes_that_ranks_do_not_have_are_an_error_on_all(found, world):
    for rank in found[world]:
        assert "vocabulary_sizes: expected" in rank["error", "sizes"]


def test_compiled_code_does_not_gather(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=r"^process_group: only eager calls gather"):
        vocabulary_parallel.shards(4, None, None)
