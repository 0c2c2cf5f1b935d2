"""Gates on several levels at once, on every backend against the definition, which naive loops check."""

import collections
import functools
import itertools
import math

import pytest
import torch
from breadth import at_length, few, number, tried  # noqa: F401 (the first is a fixture)
from catalogue import Example, assert_same_metrics, bits, the_long_way
from cover import COVER
from devices import garbage_in_new_memory
from hierarchies import (
    BUDGETS,
    DOMAIN,
    GATES,
    GROUP,
    SEVERAL,
    SMALL,
    STEP,
    TRAJECTORY,
    assert_the_definition,
    exact_off_branches,
    index_inputs,
    levels,
    naive,
    raw,
)

import hpo_core as hpo
from hpo_core import gates, testing
from hpo_core.gates import Action, Channel, Correction, Drop, Head, Identity, Level, RatioGate, Rollback, Routing, Tanh

every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
several_gates = pytest.mark.parametrize("gate", SEVERAL.values(), ids=SEVERAL)


@pytest.mark.usefixtures("at_length")
@every_gate
def test_the_definition_is_the_naive_loop(gate):
    for seed in range(number("reference", at_length=6, machine_code=2, emulated=2, interpreted=2)):
        example = Example(seed)
        for advantages in (None, example.token_advantages):
            given = {} if advantages is None else {"advantages": advantages}
            out, (loss, grad) = example.run(gate, "reference", **given), naive(example, gate, advantages)
            torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(out.grad, grad, rtol=1e-11, atol=1e-12)


def spoilt(numbers):
    """The same with some that have no meaning."""
    numbers = numbers.clone()
    numbers[3::11], numbers[5::17] = torch.nan, torch.inf
    return numbers


WAYS = {  # of giving inputs
    "few": lambda example, gate: {},
    "all": lambda example, gate: example.everything(gate),
    "advantages": lambda example, gate: {"advantages": example.token_advantages},
    "selection": lambda example, gate: {"token_mask": example.token_mask, "token_weight": example.token_weight},
    "nonsense": lambda example, gate: {
        "token_weight": spoilt(example.token_weight), "entropy": spoilt(example.entropy)
    },
    "penalty": lambda example, gate: {"ref_logp": example.ref_logp, "kl": hpo.kl.k3(0.1), "entropy": example.entropy},
    "coefficients": lambda example, gate: example.paying(gate),
    "window": lambda example, gate: {
        "entropy": example.entropy, "window": hpo.entropy.forking_tokens(0.5, scope="call")
    },
}  # fmt: skip
SHORT, LONG, TINY = (5, 0, 9, 1, 7, 12, 3), (40, 1, 600), (2, 2, 2, 2, 1)
CALLS = [  # the first three for interpreted kernels, the first nine or five for emulated ones
    (SHORT, "few"), (SHORT, "all"), (TINY, "coefficients"), (LONG, "few"), (LONG, "advantages"), (TINY, "all"),
    (LONG, "selection"), (TINY, "penalty"), (SHORT, "window"), (SHORT, "advantages"), (SHORT, "selection"),
    (SHORT, "penalty"), (LONG, "penalty"), (TINY, "few"), (TINY, "window"), (TINY, "selection"),
    (LONG, "nonsense"), (LONG, "window"),
]  # fmt: skip


def clear_examples(gate, make, inputs=WAYS["few"], seeds=range(16)):
    """Examples that keep off the branches, their inputs, and what the definition makes of them."""
    found = 0
    for example in map(make, seeds):
        keywords = inputs(example, gate)
        exact = exact_off_branches(example, gate, **keywords)
        if exact is not None:
            found += 1
            yield example, keywords, exact
    assert found, "no example keeps off the branches"


IN_COVER = [gate for name, gate in GATES.items() if f"hierarchy: {name}" in COVER]


@pytest.mark.usefixtures("at_length")
@every_gate
def test_every_backend_is_the_definition(gate, native_backends):
    """Every way of giving inputs, to rows of every kind; at length to emulated kernels of other gates, too."""
    emulated = 9 if gate in IN_COVER else 5
    for place, (lengths, way) in enumerate(CALLS):
        backends = [
            each
            for each in native_backends
            if place < number(each, at_length=len(CALLS), machine_code=len(CALLS), emulated=emulated, interpreted=3)
        ]
        many = max(number(each, at_length=4, machine_code=1, emulated=1, interpreted=1) for each in native_backends)
        found = clear_examples(gate, functools.partial(Example, lengths=lengths), WAYS[way], range(place, place + 16))
        for example, keywords, exact in itertools.islice(found, many):
            for backend in backends:
                assert_the_definition(example, gate, backend, exact, **keywords)


TRAJECTORIES = RatioGate("trajectories", SMALL, levels((BUDGETS, TRAJECTORY)), split=True)
OF_LONG_LEAVES = [GATES["fiberpo"], GATES["fiberpo_domain"], TRAJECTORIES]


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("gate", [GATES["gspo"], *OF_LONG_LEAVES], ids=lambda gate: gate.name)
def test_a_long_leaf_is_shared_by_many_workers(gate, native_backends):
    for backend in native_backends:
        for length in (2_101, *tried(backend, (20_001,), ())):  # the first one in fewer launches of CUDA
            lengths = (3, length, 1, 513)
            found = clear_examples(gate, lambda seed, rows=lengths: Example(seed, rows, several=seed % 2 == 0))
            example, _, exact = next(found)
            assert_the_definition(example, gate, backend, exact)


def test_an_exception_at_the_beginning_of_a_long_leaf_leaves_its_end_as_it_is(backend="cpu"):
    """The two lie in blocks of their own, of which one goes the long way."""
    gate = RatioGate("dropped", Drop(), (Level(SMALL, gates.Routing.SELF), Level(SMALL, unit=GROUP)))
    draw, tokens = torch.Generator().manual_seed(1), 20_300
    old_logp = -torch.rand(tokens, generator=draw)
    logp = old_logp + 0.05 * torch.randn(tokens, generator=draw)
    logp[3] = old_logp[3] + 50
    batch = hpo.PackedBatch.from_lengths([20_000, 300], group_ids=torch.tensor([0, 0]))
    given = (logp, old_logp, torch.tensor([1.0, -0.5]), batch, gate)
    got, wanted = (hpo.policy_loss_and_grad(*given, backend=each).grad for each in (backend, "reference"))
    assert got[17_000] == got[0] != 0
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0.0)


def masked_alike(seed, several, scale):
    """Stretches of a long leaf that workers skip, that they need not look up and that they must, in one row."""
    example = Example(seed, (3, 9000 // scale, 40), masked=False, several=several, gaps=False)
    long_row = example.mask[3 : 3 + 9000 // scale]
    long_row[1500 // scale : 4200 // scale] = False
    mixed = long_row[4200 // scale : 4900 // scale]
    mixed[:] = torch.rand(len(mixed), generator=torch.Generator().manual_seed(seed)) < 0.5
    long_row[6141 // scale : 8189 // scale] = False
    example.logp[~example.mask] = torch.nan
    return example


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("gate", OF_LONG_LEAVES, ids=lambda gate: gate.name)
def test_stretches_of_a_long_leaf_are_masked_alike(gate, several, native_backends):
    for backend in native_backends:
        make = functools.partial(masked_alike, several=several, scale=tried(backend, 1, 3))
        example, _, exact = next(clear_examples(gate, make))
        assert_the_definition(example, gate, backend, exact)


@functools.cache
def drawn(*arguments):
    """An example that nobody changes."""
    return Example(*arguments)


@pytest.mark.parametrize("masked", [False, True])
@every_gate
def test_what_else_is_asked_for_changes_no_bit(gate, masked, backend="cpu"):
    """The call that trainers make: the CPU takes its tokens in one pass, those under open levels in another, and what
    else is asked for apart, as is what counts in the policy term. The long way rounds differently."""
    opened = 0
    for spread in (0.0, 0.01, 0.04, 0.3):  # with 0.04 levels are open that tokens are beyond the clip of
        for several in (False, True):
            example = drawn(3, (5, 0, 4500, 1, 130, 1025, 3, 16), spread, masked, several)
            plain = example.run(gate, backend)
            logp = example.logp.clone().requires_grad_()
            keywords = {"weights": example.weights, "advantage_level": "row", "report": ("tokens",), "backend": backend}
            other = hpo.policy_loss(logp, example.old_logp, example.advantages, example.batch, gate, **keywords)
            other.loss.backward()
            assert plain.grad.numpy().tobytes() == logp.grad.numpy().tobytes()
            assert plain.loss.item() == other.loss.item()
            assert torch.equal(plain.metrics.vector, other.metrics.vector)
            for way in ("few", "selection", "window"):
                given = WAYS[way](example, gate)
                fast = example.run(gate, backend, **given) if given else plain
                long_way = example.run(gate, backend, **given, **the_long_way(example.logp))
                largest = long_way.grad.abs().max().item()
                torch.testing.assert_close(fast.grad, long_way.grad, rtol=2e-6, atol=2e-6 * largest)
                assert_same_metrics(fast, long_way)
                torch.testing.assert_close(fast.loss, long_way.loss, rtol=1e-6, atol=1e-6)
            opened += bool(plain.grad.any())
    assert opened


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("routing", Routing)
def test_many_short_leaves(routing, native_backends):
    """So many segments on a few workers that each works for several, and domains that all share."""
    bent = ((Tanh(0.05), STEP), (Tanh(0.02), GROUP), (Tanh(0.01), DOMAIN))
    tried_gates = [RatioGate("short", Identity(), levels(*bent, routing=routing))]
    if routing is not Routing.STOPPED:  # without a residual of tokens: their gradient is known before the sweep
        tried_gates.append(RatioGate("dropped", Drop(), (Level(Tanh(0.05), routing, DOMAIN),)))
    for gate, backend in itertools.product(tried_gates, native_backends):
        leaves = tried(backend, 300, 100 if routing is Routing.THROUGH else 30)
        example = Example(1, lengths=(2, 3, 0, 5) * leaves)
        assert_the_definition(example, gate, backend, example.run(gate, "reference"))


def drawn_rows(lengths):
    """Log-probabilities, old ones, advantages, weights and masks, row by row."""
    draw, tokens = torch.Generator().manual_seed(3), sum(lengths)
    old_logp = -torch.rand(tokens, generator=draw)
    logp = old_logp + 0.08 * torch.randn(tokens, generator=draw) * torch.rand(tokens, generator=draw)
    of_rows = (torch.randn(len(lengths), generator=draw), torch.rand(len(lengths), generator=draw))
    kept = torch.rand(tokens, generator=draw) < 0.8
    return [(*each.split(lengths),) for each in (logp, old_logp)], of_rows, kept.split(lengths)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", ["gspo", "fiberpo", "sums", "zeroed at once"])
def test_a_short_leaf_has_the_bits_that_it_has_alone(name, masked, native_backends):
    """The CPU measures 2,048 tokens at once and settles sixteen leaves; without losses of tokens these may have been
    measured at different times. Some are clipped, bent, empty, masked as a whole or not at all, one ends a long one."""

    def run(backend, data, rows):
        of_tokens, of_rows, kept = data
        mask = torch.cat(kept[rows]) if masked else None
        batch = hpo.PackedBatch.from_lengths([len(each) for each in kept[rows]], mask=mask)
        tensors = (*(torch.cat(each[rows]) for each in of_tokens), of_rows[0][rows], batch, GATES[name])
        logp, *given = testing.move(tensors, testing.device_of(backend))
        options = {"weights": of_rows[1][rows].to(logp.device), "backend": backend}
        out = hpo.policy_loss(logp.requires_grad_(), *given, **options, report=("tokens",))
        out.loss.backward()
        bare = hpo.policy_loss_and_grad(logp.detach(), *given, **options)
        return logp.grad.cpu(), out.tokens.cpu(), bare.grad.cpu()

    for backend in native_backends:
        short = [21, 1, 0, 5, 127, 3, 64, 130, 2, 2, 40, 700, 1024, 1025, 1010] * 3
        lengths = tried(backend, [*short, 9, 9, 9, 16384 + 30, 7, 7], [21, 1, 0, 40])
        of_tokens, of_rows, kept = drawn_rows(lengths)
        kept = [each if row % 4 else each >= row % 8 for row, each in enumerate(kept)]  # of every fourth all or none
        data = of_tokens, of_rows, kept
        together = run(backend, data, slice(None))
        alone = [run(backend, data, slice(row, row + 1)) for row in range(len(lengths))]
        for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
            assert bits(whole) == bits(torch.cat(parts)), backend


@pytest.mark.parametrize("name", ["gspo", "fiberpo"])
def test_a_long_leaf_behind_thousands_of_short_ones(name, native_backends):
    """The CPU looks at so many rows in shares; a leaf of more than 16,384 tokens is in the last one alone."""
    for backend in native_backends:
        rows, length = (40, 600) if backend in ("triton", "cuda_emulated") else (17000, 20000)
        (logp, old_logp), (advantages, weights), _ = drawn_rows([2] * rows + [length])
        batch = hpo.PackedBatch.from_lengths([2] * rows + [length])
        tensors = (torch.cat(logp), torch.cat(old_logp), advantages, batch, GATES[name])
        given = testing.move(tensors, testing.device_of(backend))
        with garbage_in_new_memory():  # so that a table that no step writes holds no sums
            out = hpo.policy_loss_and_grad(*given, weights=weights.to(given[0].device), backend=backend)
        exact = (*(each.double() for each in tensors[:3]), *tensors[3:])
        wanted = hpo.policy_loss_and_grad(*exact, weights=weights.double(), backend="reference")
        torch.testing.assert_close(out.grad.cpu().double(), wanted.grad, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(out.loss.cpu().double(), wanted.loss, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("slope", [1.0, None], ids=["1", "the number of tokens"])
def test_borders_of_a_rollback(slope, native_backends):
    """Its begin, |u| = C, belongs to what is below and has slope 1; its end to what is 0, and so is the slope there."""
    gate = RatioGate("x", Drop(), (Level(Rollback((0.5, 0.5), slope)),))
    size, zone = (1.0, 0.5) if slope else (2.0, 0.25)
    borders = [(0.5, 0.5, 1.0), (0.5 + zone / 2, 0.25, -size), (0.5 + zone, 0.0, 0.0), (2.0, 0.0, 0.0)]
    for backend in ("reference", *native_backends):
        for (u, gated, slope_there), sign in itertools.product(borders, (1.0, -1.0)):
            x = torch.full((2,), sign * u, device=testing.device_of(backend))
            ones, batch = x.new_ones(1), hpo.PackedBatch.from_lengths([2]).to(x.device)
            out = hpo.policy_loss_and_grad(
                x - 3, torch.full_like(x, -3), ones, batch, gate, weights=ones, backend=backend
            )
            ratio = math.exp(sign * gated)
            assert out.loss.item() == pytest.approx(-2 * ratio), (backend, u)
            assert out.grad.tolist() == pytest.approx([-slope_there * ratio] * 2), (backend, u)


@pytest.mark.parametrize("slope", [1e29, 1e32, 1e300, math.inf])
def test_a_steep_rollback_is_0_beyond_its_budget(slope, native_backends):
    gate = RatioGate("x", Drop(), (Level(Rollback((0.01, 0.01), slope)),))
    for backend in ("reference", *native_backends):
        dtype = torch.float64 if backend == "reference" else torch.float32
        old = torch.full((2,), -1.0, dtype=dtype, device=testing.device_of(backend))
        batch = hpo.PackedBatch.from_lengths([2]).to(old.device)
        for u in (0.0100001, 0.25, -0.25):
            out = hpo.policy_loss_and_grad(old + u, old, old.new_ones(1), batch, gate, backend=backend)
            assert out.loss == -1 and not out.grad.any(), (backend, u)


def test_an_empty_step_of_no_row(native_backends):
    none = torch.zeros(0)
    ids = {f"{name}_ids": torch.zeros(0, dtype=torch.int64) for name in ("trajectory", "group", "domain")}
    batch = hpo.PackedBatch(torch.tensor([0]), steps=torch.tensor([[0, 0]]), **ids)
    for gate in (GATES["two_scale"], GATES["four levels, through, split"]):
        for backend in native_backends:
            out = hpo.policy_loss_and_grad(none, none, none, batch, gate, backend=backend, advantage_level="row")
            assert out.loss == 0, backend
            assert out.grad.shape == (0,), backend


@pytest.mark.parametrize(
    ("lengths", "sides"),
    [((5, 0, 9, 1, 7, 12, 3), "low, high"), ((40, 5, 64), "low, high"), ((40, 5, 64), "low"), ((40, 5, 64), "high")],
)
@pytest.mark.parametrize("name", ["two_scale, token", "zeroed at once"])
def test_bounds_of_tokens_replace_those_of_the_residual(name, lengths, sides, native_backends):
    gate, example = GATES[name], Example(11, lengths, masked=False)
    draw = torch.Generator().manual_seed(0)
    low, high = 0.9 + 0.09 * torch.rand(2, example.logp.numel(), generator=draw)
    own = {"bounds": (low if "low" in sides else None, high + 0.11 if "high" in sides else None)}
    exact = example.run(gate, "reference", **own)
    for backend in native_backends:
        assert_the_definition(example, gate, backend, exact, **own)
        assert not torch.equal(example.run(gate, backend, **own).grad, example.run(gate, backend).grad), backend


@pytest.mark.parametrize("gate", [gates.gspo(), gates.gspo_token(), gates.fiberpo()], ids=lambda gate: gate.name)
def test_an_advantage_that_is_not_finite_behind_other_rows(gate, native_backends):
    """The mask is a part of a larger one, all False outside, which is never read."""
    first, tokens, draw = 40, 2140, torch.Generator().manual_seed(1)
    old_logp, advantages = -torch.rand(tokens, generator=draw), torch.randn(tokens, generator=draw)
    logp = old_logp + 0.01 * torch.randn(tokens, generator=draw)
    advantages[first + 5] = math.nan
    mask = torch.zeros(3 * tokens, dtype=torch.bool)[tokens : 2 * tokens]
    mask[:] = torch.arange(tokens) % 7 != 0
    assert mask[first + 5]
    batch = hpo.PackedBatch.from_lengths([first, 2100], mask=mask)
    for backend in native_backends:
        given = testing.move((logp, old_logp, advantages, batch), testing.device_of(backend))
        options = {"advantage_level": "token", "weights": torch.ones(2).to(given[0].device)}
        got = hpo.policy_loss_and_grad(*given, gate, backend=backend, **options)
        wanted = hpo.policy_loss_and_grad(*given, gate, backend="reference", **options)
        assert got.metrics["bad_advantages"] == 1, backend
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-4, atol=1e-5, msg=backend)


# --------------------------------------------------------------------------------------------------- broken structure


def broken_leaves(gate):
    """An example, and its leaves with errors in three of them; one is of several tiles, and the last one is empty."""
    example = Example(0, lengths=(*(5, 0, 9, 1, 7, 12, 3) * 6, 1100, 0), masked=False)
    inputs = index_inputs(example, gate)
    begin, end, row = (inputs[name].clone() for name in ("leaf_begin", "leaf_end", "leaf_row"))
    ancestors = inputs["ancestors"].clone()
    end[0] = end[1] + 1 if len(end) > 1 else end[0]  # runs into the next, or leaves its row
    row[3:4], ancestors[:1, 4:5] = -1, len(end)  # tables that the gate has
    return example, {"leaf_begin": begin, "leaf_end": end, "leaf_row": row, "ancestors": ancestors}


@several_gates
def test_broken_leaves_are_left_out_and_counted(gate, native_backends):
    """The first emulated block, which lists the leaves that count, is the last one to go on behind each barrier; before
    it does, their number is -1."""
    example, broken = broken_leaves(gate)
    expected = raw(example, gate, "cpu", **broken)
    for backend in native_backends:
        with pytest.MonkeyPatch.context() as patch, garbage_in_new_memory():
            patch.setenv("HPO_EMULATION_ORDER", "reverse")
            got = raw(example, gate, backend, **broken)
        assert all(torch.allclose(*each, rtol=1e-5, atol=1e-5) for each in zip(got, expected, strict=True)), backend
        assert got[1][hpo.metrics.slot("bad_offsets")] >= 3, backend


@pytest.mark.parametrize("ancestor", [-(10**12), 10**12])
def test_a_segment_whose_first_leaf_is_broken_is_no_child(ancestor, native_backends):
    """Under balanced levels the parent of a segment is that of its first leaf, which others may give as theirs."""
    gate, example = (
        GATES["balanced, 4 levels, through, split"],
        Example(0, lengths=(5, 0, 9, 1, 7, 12, 3), masked=False),
    )
    ancestors = index_inputs(example, gate)["ancestors"].clone()
    ancestors[0, 4:6], ancestors[1, 3] = 3, ancestor
    expected = raw(example, gate, "cpu", ancestors=ancestors)
    for backend in native_backends:
        got = raw(example, gate, backend, ancestors=ancestors)
        assert all(torch.allclose(*each, rtol=1e-5, atol=1e-5) for each in zip(got, expected, strict=True)), backend
        assert got[1][hpo.metrics.slot("bad_offsets")] == 1, backend


WHOLE_ROWS = {name: GATES[name] for name in ("gspo", "sums", "fiberpo")}
NO_TABLES = dict.fromkeys(("leaf_begin", "leaf_end", "leaf_row"))


@pytest.mark.parametrize("gate", WHOLE_ROWS.values(), ids=WHOLE_ROWS)
def test_rows_need_no_tables(gate, native_backends):
    """The rows are the leaves, and without trajectories of several rows a leaf is a segment."""
    for seed in range(3):
        example = Example(seed, several=seed == 2)
        rows = torch.arange(len(example.lengths))
        tables = [NO_TABLES]
        if all((ancestors == rows).all() for ancestors in index_inputs(example, gate)["ancestors"]):
            tables.append({**NO_TABLES, "ancestors": None})
        for backend in native_backends:
            expected = raw(example, gate, backend)
            for without in tables:
                assert all(map(torch.equal, raw(example, gate, backend, **without), expected)), backend


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("gate", WHOLE_ROWS.values(), ids=WHOLE_ROWS)
def test_no_value_of_offsets_without_leaves_is_dangerous(gate, native_backends):
    example, draw = Example(0), torch.Generator().manual_seed(0)
    rows = len(example.lengths)
    without = NO_TABLES if gate.name == "fiberpo" else {**NO_TABLES, "ancestors": None}
    for size in (3, 60, 1 << 40):
        garbage = [torch.randint(-size, size, (rows + 1,), generator=draw) for _ in range(5)]
        for backend in native_backends:
            for offsets in few(backend, garbage):
                loss, metrics, grad, token_loss = raw(example, gate, backend, cu_seqlens=offsets, **without)
                assert all(bool(torch.isfinite(found).all()) for found in (loss, grad, token_loss)), backend
                # A row that lies nowhere counts as a row and as a leaf.
                assert 0 <= metrics[hpo.metrics.slot("bad_offsets")] <= 2 * rows, backend


@pytest.mark.usefixtures("at_length")
@several_gates
def test_no_value_of_offsets_and_leaves_is_dangerous(gate, native_backends):
    example, draw = Example(0), torch.Generator().manual_seed(0)
    inputs = index_inputs(example, gate)
    most = inputs["leaf_row"].numel() + len(example.lengths)
    for size in (3, 60, 1 << 40):
        garbage = [
            {name: torch.randint(-size, size, x.shape, generator=draw) for name, x in inputs.items()} for _ in range(5)
        ]
        for names in (["cu_seqlens"], ["leaf_begin", "leaf_end"], ["leaf_row"], ["ancestors"], list(inputs)):
            for backend in native_backends:
                if not tried(backend, True, gate.levels[0].unit is STEP):
                    continue
                for each in few(backend, garbage):
                    replaced = {name: each[name] for name in names}
                    loss, metrics, grad, token_loss = raw(example, gate, backend, **replaced)
                    assert all(bool(torch.isfinite(found).all()) for found in (loss, grad, token_loss)), backend
                    assert 0 <= metrics[hpo.metrics.slot("bad_offsets")] <= most, backend


# ------------------------------------------------------------------------------------------------------------ launches


def corrected(unit):
    return RatioGate(
        "corrected",
        Drop(),
        levels((SMALL, GROUP)),
        corrections=(Correction(Action.MASK, unit=unit, channel=Channel.TOTAL),),
    )


def launches_on_cuda(call):
    module = pytest.importorskip("hpo_core._cuda_emulated")
    before = module.launches()
    call()
    launched = {kernel: n - before.get(kernel, 0) for kernel, n in module.launches().items()}
    return {kernel: n for kernel, n in launched.items() if n}


PLAIN, SETTLED = ["prepare_leaves", "sweep_leaves"], ["prepare_settled", "sweep_leaves"]
COUPLED = [*PLAIN, "deliver_gradient"]
ON_CUDA = [  # a gate, its launches where the device holds few blocks at once, and where it holds all of the sweep
    (GATES["fiberpo"], COUPLED, PLAIN),
    (GATES["fiberpo_domain, stopped"], COUPLED, PLAIN),
    (GATES["score"], PLAIN, PLAIN),
    (GATES["dropped, self"], PLAIN, ["sweep_leaves"]),
    (GATES["gspo"], SETTLED, ["sweep_leaves"]),
    (GATES["step_gspo"], SETTLED, ["sweep_leaves"]),
    (GATES["mean exp, 4 levels, through, split"], COUPLED, PLAIN),
    (GATES["balanced, 4 levels, through, split"], COUPLED, PLAIN),
    (GATES["balanced, score"], PLAIN, PLAIN),
    (RatioGate("log", Identity(), head=Head.LOG, head_numbers=(0.7, 1.3)), PLAIN, ["sweep_leaves"]),
    (gates.gmpo(), COUPLED, PLAIN),
    (corrected(None), SETTLED, ["sweep_leaves"]),
    (corrected(STEP), [*SETTLED, "correct_tokens"], ["sweep_leaves", "correct_tokens"]),
]


@pytest.mark.parametrize(("gate", "apart", "together"), ON_CUDA, ids=lambda each: getattr(each, "name", None))
def test_launches_on_cuda(gate, apart, together, monkeypatch):
    """Where the device holds all blocks of the sweep at once two, and one for tokens that are under no level or drop
    their residual, with the bits of three and two. A correction over segments: one."""
    example = Example(0, lengths=SHORT * 4)
    settings = ("forward", "1", apart), ("random:1", "64", together)
    for way in ("few", "advantages", "selection", "penalty"):
        run, found = functools.partial(example.run, gate, "cuda_emulated", **WAYS[way](example, gate)), []
        for order, processors, expected in settings:
            monkeypatch.setenv("HPO_EMULATION_ORDER", order)
            monkeypatch.setenv("HPO_EMULATION_PROCESSORS", processors)
            assert launches_on_cuda(lambda run=run, found=found: found.append(run())) == dict.fromkeys(expected, 1), way
        first, second = (bits(out.loss, out.grad, out.metrics.vector) for out in found)
        assert first == second, way


@pytest.mark.parametrize(
    ("gate", "apart", "together"), [ON_CUDA[at] for at in (0, 3, 4, 9)], ids=lambda each: getattr(each, "name", None)
)
def test_broken_leaves_on_cuda_change_no_launch(gate, apart, together, monkeypatch):
    example, broken = broken_leaves(gate)
    found = []
    for processors, expected in (("4", apart), ("128", together)):
        monkeypatch.setenv("HPO_EMULATION_PROCESSORS", processors)
        launched = launches_on_cuda(lambda: found.append(raw(example, gate, "cuda_emulated", **broken)))
        assert launched == dict.fromkeys(expected, 1)
    assert bits(*found[0]) == bits(*found[1])


@pytest.fixture
def launches_together(monkeypatch):
    """Triton's kernels launch once for their steps, as on a GPU, but with one program, as the interpreter runs them."""
    launch = pytest.importorskip("hpo_core._triton.launch")
    monkeypatch.setattr(launch, "programs_together", lambda *_: (1, True))
    monkeypatch.setattr(launch, "launches", collections.Counter())
    return launch.launches


@pytest.mark.parametrize(
    "gate",
    [
        GATES["fiberpo"], GATES["score"], GATES["gspo"], GATES["fiberpo_domain, stopped"],
        GATES["balanced, 4 levels, through, split"], corrected(None), corrected(STEP),
    ],
    ids=lambda gate: f"{gate.name} {len(gate.levels)}",
)  # fmt: skip
def test_launches_of_triton(gate, launches_together):
    """Three, after one of PyTorch that clears the sums of segments, and one more where gradient flows through more than
    two levels. None delivers it on one level that drops the residual of a token. A correction over segments: one, and
    another that clears."""
    example, keywords, exact = next(clear_examples(gate, Example))
    launches_together.clear()
    assert_the_definition(example, gate, "triton", exact, **keywords)
    last = {"_deliver_gradient": 1 + (len(gate.levels) > 2)}
    known = isinstance(gate.token, Drop) and len(gate.levels) == 1
    if known or gate.head is Head.SCORE or all(level.routing is not Routing.THROUGH for level in gate.levels):
        last = {"_finalise": 1}
    corrections = {"_correct_tokens": 1} if any(each.unit is not None for each in gate.corrections) else {}
    assert launches_together == {"_prepare_leaves": 1, "_sweep_leaves": 1, **last, **corrections}


@pytest.mark.parametrize("gate", [GATES["fiberpo"], GATES["score"], corrected(STEP)], ids=lambda gate: gate.name)
def test_broken_leaves_in_one_launch_of_triton(gate, launches_together):
    example = Example(0, lengths=(5, 0, 9, 1, 7, 12, 3) * 6, masked=False)
    inputs = index_inputs(example, gate)
    end, row = inputs["leaf_end"].clone(), inputs["leaf_row"].clone()
    end[0], row[3] = end[1] + 1, -1
    got, expected = (raw(example, gate, each, leaf_end=end, leaf_row=row) for each in ("triton", "cpu"))
    assert all(torch.allclose(*each, rtol=1e-5, atol=1e-5) for each in zip(got, expected, strict=True))
    assert launches_together["_prepare_leaves"] == 1 and got[1][hpo.metrics.slot("bad_offsets")] >= 2


@pytest.mark.parametrize("of_steps", [False, True], ids=["grpo", "gigpo"])
def test_launches_of_the_single_call(of_steps):
    """Steps cost two scans more: the returns of trajectories, discounted and not."""
    example = Example(0)
    steps = torch.arange(example.batch.num_steps)
    rewards = (steps % 5).float() if of_steps else example.advantages
    estimator = functools.partial(hpo.advantages.gigpo, anchor_ids=steps % 3) if of_steps else hpo.advantages.grpo

    def call():
        logp = example.logp.clone().requires_grad_()
        hpo.hierarchical_policy_loss(
            logp, example.old_logp, rewards, example.batch, advantage=estimator, gate=gates.fiberpo(),
            window=hpo.entropy.ares(), entropy=-example.logp, weights=example.weights, backend="cuda_emulated",
        ).loss.backward()  # fmt: skip

    launched = launches_on_cuda(call)
    assert sum(launched.values()) == (9 if of_steps else 5)
