"""Order statistics, exact top-k and aggregates inside scopes, on every backend, held to loops over lists of values."""

import functools
import itertools
import math
from fractions import Fraction

import pytest
import torch
from breadth import at_length, at_most, number  # noqa: F401 (the first is a fixture)
from conftest import NATIVE

import hpo_core as hpo
from hpo_core import ops, testing
from hpo_core.entropy import Window, forking_tokens, quantiles, segment_aggregate, top_k, window_aggregate
from hpo_core.specs import INDEX_RULES, OrderRule
from hpo_core.testing import Layout

QUANTILES = ("0.7", "0.95", "0.5", "0", "1", "0.2", "1/3")
KINDS = ("ties", "distinct", "equal", "signed")


def values_of(kind, count, seed):
    draw = torch.Generator().manual_seed(seed)
    values = {
        "ties": lambda: torch.randint(0, 3, (count,), generator=draw) / 4,
        "distinct": lambda: torch.rand(count, generator=draw),
        "equal": lambda: torch.full((count,), 0.7),
        "signed": lambda: torch.randn(count, generator=draw),
    }[kind]()
    left_out = torch.rand(count, generator=draw)
    values = torch.where(left_out < 0.1, -math.inf, values)
    values = torch.where(left_out > 0.96, math.nan, values)
    return torch.where((left_out > 0.93) & (left_out < 0.96), math.inf, values)


def expected_index(rule, q, n):
    position = q * (n - 1)
    if rule is OrderRule.NEAREST:
        return round(position)  # Python rounds fractions half to even
    return math.ceil(position) if rule is OrderRule.CEIL else math.floor(position)


def naive_quantile(members, q, rule):
    population = sorted(each for each in members if math.isfinite(each))
    if not population:
        return math.nan
    if rule is not OrderRule.LINEAR:
        return population[expected_index(rule, q, len(population))]
    position = q * (len(population) - 1)
    low, high = population[math.floor(position)], population[math.ceil(position)]
    return low + (high - low) * float(position - math.floor(position))


def naive_top(members, k):
    """``members``: (value, uid, position, token); the tokens of the k largest."""
    finite = [each for each in members if math.isfinite(each[0])]
    return {token for _, _, _, token in sorted(finite, key=lambda each: (-each[0], *each[1:3]))[: max(k, 0)]}


def members_of(values, mask, segments, scope_of_segment, scopes, uids=None):
    """The valid values of each scope with the uid of their segment, their position in it, and their token."""
    found = [[] for _ in range(scopes)]
    for segment, (begin, end) in enumerate(itertools.pairwise(segments)):
        scope = segment if scope_of_segment is None else scope_of_segment[segment]
        for token in range(begin, end):
            if 0 <= scope < scopes and (mask is None or mask[token]):
                uid = segment if uids is None else uids[segment]
                found[scope].append((values[token], uid, (segment, token), token))
    return found


def random_case(seed, longest=9):
    """Segments of a pack with holes, some of them in no scope, and scopes of which some are empty."""
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(0, 8, (), generator=draw))
    lengths = torch.randint(0, longest, (count,), generator=draw)
    segments = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    tokens = int(segments[-1]) + 2
    scopes = int(torch.randint(1, 5, (), generator=draw))
    scope_of_segment = torch.randint(-1, scopes + 1, (count,), generator=draw)
    if seed % 4 == 0:
        scopes, scope_of_segment = count, None
    mask = torch.rand(tokens, generator=draw) < 0.8 if seed % 3 else None
    uids = torch.randint(0, 4, (count,), generator=draw) if seed % 2 else None
    values = values_of(KINDS[seed % 4], tokens, seed)
    return values, segments, scope_of_segment, scopes, mask, uids


def some(backend, cases, simulated=2):
    """All cases, or the first few where kernels are simulated."""
    every = len(cases)
    count = number(backend, at_length=every, machine_code=every, emulated=simulated, interpreted=simulated)
    return cases[:count]


def listed(tensor):
    return None if tensor is None else tensor.tolist()


def moved(backend, *tensors):
    device = testing.device_of(backend)
    return [None if each is None else each.to(device) for each in tensors]


def check_quantile(backend, case, q, rule):
    values, segments, scope_of_segment, scopes, mask, _ = case
    given = moved(backend, values, segments, scope_of_segment, mask)
    thresholds, counts = ops.order_statistics(
        *given[:3], scopes, q.numerator, q.denominator, rule, given[3], backend
    )  # fmt: skip
    found = members_of(values.tolist(), listed(mask), segments.tolist(), listed(scope_of_segment), scopes)
    expected = [naive_quantile([each[0] for each in members], q, rule) for members in found]
    assert thresholds.shape == (scopes,) and counts.shape == (scopes, 2)
    torch.testing.assert_close(thresholds.cpu(), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    population = [sum(math.isfinite(each[0]) for each in members) for members in found]
    errors = [sum(math.isnan(each[0]) or each[0] == math.inf for each in members) for members in found]
    assert counts.tolist() == [list(pair) for pair in zip(population, errors, strict=True)]


def check_top(backend, case, k):
    values, segments, scope_of_segment, scopes, mask, uids = case
    given = moved(backend, values, segments, scope_of_segment, k, uids, mask)
    selected = ops.select_exact(*given, backend).cpu()
    scope_list, uid_list = listed(scope_of_segment), listed(uids)
    found = members_of(values.tolist(), listed(mask), segments.tolist(), scope_list, scopes, uid_list)
    expected = set().union(*(naive_top(members, n) for members, n in zip(found, k.tolist(), strict=True)))
    assert set(selected.nonzero().flatten().tolist()) == expected


# ------------------------------------------------------------------------------------------------- order statistics


@pytest.mark.parametrize("rule", OrderRule)
def test_quantiles_are_those_of_a_loop(backend, rule):
    for seed in some(backend, range(40), 4):
        check_quantile(backend, random_case(seed), Fraction(QUANTILES[seed % 7]), rule)


def test_top_k_is_that_of_a_loop(backend):
    for seed in some(backend, range(60), 6):
        case = random_case(seed)
        k = torch.randint(-1, 6, (case[3],), generator=torch.Generator().manual_seed(seed))
        check_top(backend, case, k)


@pytest.mark.long
def test_two_thousand_batches(backend):
    for seed in range(2000):
        case = random_case(seed, longest=30)
        check_quantile(backend, case, Fraction(QUANTILES[seed % 7]), list(OrderRule)[seed % 4])
        check_top(backend, case, torch.full((case[3],), seed % 9))


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("kind", ["distinct", "ties", "equal"])
def test_long_segments(backend, kind):
    """Several steps of a program, and on the CPU several threads that share the only scope."""
    torch.set_num_threads(2)
    length = at_most(backend, 20_000)
    segments = torch.tensor([0, length // 2, length // 2 + 3, length])
    for scope_of_segment in some(backend, [torch.zeros(3, dtype=torch.int64), torch.tensor([1, 0, 1])], 1):
        scopes = int(scope_of_segment.max()) + 1
        case = (values_of(kind, length, 1), segments, scope_of_segment, scopes, None, torch.tensor([2, 1, 0]))
        check_quantile(backend, case, Fraction("0.95"), OrderRule.CEIL)
        check_top(backend, case, torch.full((scopes,), length // 3))


@pytest.mark.parametrize("kind", ["ties", "equal"])
def test_programs_share_the_only_scope(backend, kind):
    """The share of the last is short, the segments behind it are in no scope, and ties are cut in any share."""
    lengths = torch.tensor([150, 130, 0, 170, 160, 140, 180, 150])
    segments = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    scope_of_segment = torch.tensor([0, 0, 0, 0, 0, 0, 0, -1])
    case = (values_of(kind, int(segments[-1]), 3), segments, scope_of_segment, 1, None, torch.arange(8).flip(0))
    check_quantile(backend, case, Fraction("0.95"), OrderRule.CEIL)
    for k in some(backend, (100, 400, 700, 3), 3):
        check_top(backend, case, torch.tensor([k]))


@pytest.mark.parametrize("length", [1, 7, 4096])
def test_the_segments_of_the_call_do_not_matter(length, backend, monkeypatch):
    monkeypatch.setattr("hpo_core.ops.scopes._TOKENS_OF_SEGMENT", length)
    values = values_of("ties", 40, 5)
    for offsets in ([0, 40], [0, 0, 10, 37, 40], [0, 1, 2, 40]):
        batch = hpo.PackedBatch(torch.tensor(offsets)).to(testing.device_of(backend))
        inside = [(value, 0, i, i) for i, value in enumerate(values.tolist())]
        for k in (0, 3, 9, 100):
            chosen = top_k(values.to(batch.device), batch, k, scope="call", backend=backend)
            assert set(chosen.nonzero().flatten().tolist()) == naive_top(inside, k)


@pytest.mark.parametrize("kind", KINDS)
def test_short_scopes_beside_long_ones(kind, backend):
    """Rows around what a warp of the CUDA kernel holds, 256 tokens, among many that are far below."""
    step = number(backend, at_length=1, machine_code=1, emulated=1, interpreted=8)
    lengths = [0, 255, 256, 257, 300, 1, 31, 32, 33, *range(2, 50, step)]
    tokens = sum(lengths)
    values, batch = values_of(kind, tokens, 3), hpo.PackedBatch.from_lengths(lengths).to(testing.device_of(backend))
    there = values.to(testing.device_of(backend))
    rows = [row.tolist() for row in values.split(lengths)]
    for q in ("0.8", "0", "1"):
        found = quantiles(there, batch, q, rule=OrderRule.CEIL, backend=backend).cpu()
        expected = torch.tensor([naive_quantile(row, Fraction(q), OrderRule.CEIL) for row in rows])
        assert torch.equal(found.nan_to_num(9.0), expected.nan_to_num(9.0))
    for k in (1, 5, 250):
        chosen = top_k(there, batch, k, backend=backend).cpu().split(lengths)
        for row, of_row in zip(rows, chosen, strict=True):
            members = [(value, 0, place, place) for place, value in enumerate(row)]
            assert set(of_row.nonzero().flatten().tolist()) == naive_top(members, k)


def test_the_index_is_exact_where_floats_fail(backend):
    """``(1 - r)(n - 1)`` in doubles is above 3 for r = .7, n = 11, and above 1 for r = .95, n = 21."""
    cases = (11, "0.7", 3), (21, "0.95", 1), (6, "0.8", 1), (11, "0.2", 8), (12, "0.7", 4), (22, "0.95", 2)
    for n, r, index in cases:
        batch = hpo.PackedBatch.from_lengths([n]).to(testing.device_of(backend))
        values = torch.arange(float(n), device=batch.device)
        assert quantiles(values, batch, 1 - Fraction(r), backend=backend).tolist() == [index]
        below = quantiles(values, batch, float(r), rule=OrderRule.FLOOR, backend=backend)  # .7 is a double below 7 / 10
        assert below.tolist() == [math.floor(Fraction(r) * (n - 1))]


def test_minus_zero_is_zero(backend):
    batch = hpo.PackedBatch.from_lengths([4]).to(testing.device_of(backend))
    values = torch.tensor([-0.0, 0.0, -0.0, -1.0], device=batch.device)
    threshold = quantiles(values, batch, 1, backend=backend)
    assert threshold.tolist() == [0.0] and not threshold.signbit().any()
    assert top_k(values, batch, 2, backend=backend).tolist() == [True, True, False, False]


def test_degenerate_scopes(backend):
    """No token, no row, empty rows, and rows without a valid or a finite value."""
    device = testing.device_of(backend)
    for lengths, tail, scopes in (([], 0, 0), ([], 3, 0), ([0, 0], 0, 2), ([0, 1, 0], 1, 3)):
        batch = hpo.PackedBatch.from_lengths(lengths, sum(lengths) + tail).to(device)
        values = torch.full((sum(lengths) + tail,), math.nan, device=device)
        thresholds = quantiles(values, batch, "0.5", backend=backend)
        assert thresholds.shape == (scopes,) and thresholds.isnan().all()
        assert quantiles(values, batch, "0.5", scope="call", backend=backend).isnan().tolist() == [True]
        assert not top_k(values, batch, 2, backend=backend).any()
        assert not top_k(values, batch, 2, scope="call", backend=backend).any()


@pytest.mark.parametrize(
    "offsets", [[0, 5, 2, 4, 6], [0, -3, 2, 6, 6], [-(2**62), 2**62, 3, -1], [6, 5, 4], [2, 9, 3]], ids=str
)
@pytest.mark.parametrize("backend", ["reference", *NATIVE])
def test_broken_offsets_are_harmless(backend, offsets):
    device = testing.device_of(backend)
    segments, values = torch.tensor(offsets, device=device), torch.arange(6.0, device=device)
    for scopes, scope_of_segment in ((len(offsets) - 1, None), (1, torch.zeros_like(segments[1:]))):
        ops.order_statistics(values, segments, scope_of_segment, scopes, 1, 2, OrderRule.CEIL, None, backend)
        k = torch.full((scopes,), 4, device=device)
        ops.select_exact(values, segments, scope_of_segment, k, None, None, backend)


# ------------------------------------------------------------------------------------------------------ the hierarchy


def hierarchy(backend):
    """Five rows of two prompt groups and one without, in three trajectories; steps with gaps."""
    batch = hpo.PackedBatch(
        torch.tensor([0, 4, 4, 9, 12, 15]),
        torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1]),
        steps=torch.tensor([[0, 2], [2, 4], [5, 7], [7, 9], [9, 12], [13, 13]]),
        trajectory_ids=torch.tensor([8, 8, 3, 8, 5]),
        group_ids=torch.tensor([7, 7, 2, 7, -1]),
    )
    values = torch.tensor([4, 1, 99, 2, 7, 3, 3, 5, 99, 6, 6, 0, 9, 8, 1]) / 8
    return values.to(testing.device_of(backend)), batch.to(testing.device_of(backend))


MEMBERS = {
    "step": [[0, 1], [3], [5, 6], [7], [9, 10, 11], []],
    "row": [[0, 1, 3], [], [4, 5, 6, 7], [9, 10, 11], [12, 13, 14]],
    "trajectory": [[4, 5, 6, 7], [12, 13, 14], [0, 1, 3, 9, 10, 11], [], []],
    "group": [[4, 5, 6, 7], [0, 1, 3, 9, 10, 11], [], [], []],
    "call": [[0, 1, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14]],
}


@pytest.mark.parametrize("scope", MEMBERS)
def test_every_scope_of_the_hierarchy(backend, scope):
    values, batch = hierarchy(backend)
    numbers = values.tolist()
    for rule, q in some(backend, [(OrderRule.CEIL, "0.4"), (OrderRule.LINEAR, "0.4"), (OrderRule.LINEAR, "1")], 1):
        out = quantiles(values, batch, q, scope=scope, rule=rule, backend=backend)
        expected = [naive_quantile([numbers[t] for t in tokens], Fraction(q), rule) for tokens in MEMBERS[scope]]
        torch.testing.assert_close(out.cpu(), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
        spread = quantiles(values, batch, q, scope=scope, rule=rule, expand=True, backend=backend).tolist()
        for tokens, threshold in zip(MEMBERS[scope], expected, strict=True):
            assert [spread[t] for t in tokens] == [pytest.approx(threshold, rel=1e-6)] * len(tokens)
    selected = top_k(values, batch, 2, scope=scope, backend=backend).nonzero().flatten().tolist()
    row_of = batch.row_of_token().tolist()
    expected = [naive_top([(numbers[t], row_of[t], t, t) for t in tokens], 2) for tokens in MEMBERS[scope]]
    assert set(selected) == set().union(*expected)


@pytest.mark.parametrize("scope", ["step", "ids"])
def test_a_token_in_no_scope_has_no_threshold(backend, scope):
    offsets, steps = torch.tensor([0, 2, 4]), torch.tensor([[0, 1], [2, 4]])
    values, batch = moved(backend, torch.tensor([0.5, 0.25, 1.0, 0.75]), hpo.PackedBatch(offsets, steps=steps))
    ids = torch.tensor([-1, 0], device=values.device)
    scope, lacking = ("step", [1]) if scope == "step" else (ids, [0, 1])
    found = quantiles(values, batch, "1", scope=scope, expand=True, backend=backend)
    assert found.isnan().nonzero().flatten().tolist() == lacking and found[2:].tolist() == [1, 1]


@pytest.mark.parametrize("level", ["step", "row", "trajectory", "group"])
@pytest.mark.parametrize("aggregate", ["mean", "sum", "max", "min"])
def test_segments_aggregate(backend, level, aggregate):
    values, batch = hierarchy(backend)
    numbers = values.tolist()
    fold = {"mean": lambda each: sum(each) / len(each), "sum": sum, "max": max, "min": min}[aggregate]
    expected = [fold([numbers[t] for t in tokens]) if tokens else -math.inf for tokens in MEMBERS[level]]
    whole = segment_aggregate(values, batch, level, aggregate=aggregate, expand=False, backend=backend).cpu()
    torch.testing.assert_close(whole, torch.tensor(expected), rtol=2e-7, atol=0)
    per_token = torch.full((15,), -math.inf)
    for tokens, value in zip(MEMBERS[level], whole, strict=True):
        per_token[tokens] = value
    out = segment_aggregate(values, batch, level, aggregate=aggregate, backend=backend).cpu()
    assert torch.equal(out, per_token)


def test_segments_of_ids(backend):
    values, batch = hierarchy(backend)
    values = values.clone()
    values[[4, 6]] = math.nan  # that of no segment gives what the other tokens of none get
    ids = torch.tensor([9, 9, 9, 9, 2, 2, -1, -1, -1, 9, 9, 9, 2, 2, 2], device=values.device)
    out = segment_aggregate(values * 8, batch, ids, aggregate="sum", backend=backend)
    none, first, second = -math.inf, 21.0, 19.0
    assert out[4].isnan()
    assert out.nan_to_num(0.0, neginf=none).tolist() == [
        *(second, second, none, second, 0.0, first, none, none, none, second, second, second, first, first, first)
    ]
    assert segment_aggregate(values.double(), batch, ids, backend=backend).dtype == torch.float32
    of_segments = segment_aggregate(values * 8, batch, ids, aggregate="sum", expand=False, backend=backend)
    assert of_segments.tolist() == [first, second, *[none] * 13]


def test_steps_with_ids_and_tiles(backend):
    """Ranges with equal ids are one step, a range with a negative id is its own; tiles need no ids."""
    device = testing.device_of(backend)
    values = torch.arange(12.0, device=device)
    offsets, tiles = torch.tensor([0, 6, 12], device=device), torch.tensor([0, 2, 6, 6, 12], device=device)
    batch = hpo.PackedBatch(offsets, cu_steps=tiles)
    assert quantiles(values, batch, 1, scope="step", backend=backend).nan_to_num(-1).tolist() == [1, 5, -1, 11]
    tiles, ids = torch.tensor([0, 2, 4, 6, 12], device=device), torch.tensor([5, -1, 5, 2], device=device)
    named = hpo.PackedBatch(offsets, cu_steps=tiles, step_ids=ids)
    assert quantiles(values, named, 0, scope="step", backend=backend).nan_to_num(-1).tolist() == [2, 6, 0, -1]
    chosen = top_k(values, named, 3, scope="step", backend=backend).nonzero().flatten().tolist()
    assert chosen == [1, 2, 3, 4, 5, 9, 10, 11]


def test_buckets(backend):
    """Ids are numbers of scopes where their number is given, and an empty bucket has no threshold."""
    values, batch = hierarchy(backend)
    buckets = torch.tensor([2, 0, 0, 2, -1], device=values.device)
    out = quantiles(values * 8, batch, 1, scope=buckets, scopes=4, backend=backend)
    assert out.nan_to_num(-1).tolist() == [7.0, -1.0, 6.0, -1.0]
    out = quantiles(values * 8, batch, 1, scope=buckets, backend=backend)
    assert out.nan_to_num(-1).tolist() == [7.0, 6.0, -1.0, -1.0, -1.0]
    k = torch.tensor([1, 5, 0, 2], device=values.device)
    assert top_k(values, batch, k, scope=buckets, scopes=4, backend=backend).nonzero().flatten().tolist() == [4]


# ------------------------------------------------------------------------------------------------------- properties


def pack(seed, backend):
    layout = Layout((7, 0, 12, 3, 9), 2, "some", seed=seed)
    batch = layout.batch().replace(group_ids=torch.tensor([0, 1, 1, 0, 1]))
    return values_of("ties", layout.tokens, seed), batch


def test_the_order_of_rows_does_not_matter(backend):
    """Thresholds and, with uids, exact selections move with their rows, ties included."""
    uid, order = torch.tensor([30, 10, 50, 20, 40]), torch.tensor([4, 1, 3, 0, 2])
    device = testing.device_of(backend)
    for seed in some(backend, range(20), 1):
        values, batch = pack(seed, backend)
        there, tokens = batch.select(order)
        whole, part = (values.to(device), batch.to(device)), (values[tokens].to(device), there.to(device))
        for scope in some(backend, ["group", "call", "row"], 1):
            k = functools.partial(top_k, k=3, scope=scope, backend=backend)
            selected = k(*whole, uid=uid.to(device)).cpu()
            assert torch.equal(k(*part, uid=uid[order].to(device)).cpu(), selected[tokens])
            fit = functools.partial(quantiles, quantile="0.7", scope=scope, expand=True, backend=backend)
            assert fit(*part).cpu().nan_to_num(-1).tolist() == fit(*whole).cpu()[tokens].nan_to_num(-1).tolist()


@pytest.mark.parametrize("poison", [99.0, math.nan, math.inf])
def test_masked_values_are_never_read(backend, poison):
    values, batch = pack(4, backend)
    device = testing.device_of(backend)
    poisoned = values.clone()
    poisoned[: len(batch.mask)][~batch.mask] = poison
    poisoned[31:] = poison
    for scope in some(backend, ("group", "row"), 1):
        given = {"scope": scope, "backend": backend}
        for q in some(backend, (1, 0), 1):
            out = quantiles(poisoned.to(device), batch.to(device), q, **given)
            assert out.nan_to_num(-1).equal(quantiles(values.to(device), batch.to(device), q, **given).nan_to_num(-1))
        assert top_k(poisoned.to(device), batch.to(device), 4, **given).equal(
            top_k(values.to(device), batch.to(device), 4, **given)
        )


def test_count_laws(backend):
    """Without ties a ratio keeps 1 + floor(ratio (n - 1)) of each row; exactly min(k, population) in any case."""
    device = testing.device_of(backend)
    batch = hpo.PackedBatch.from_lengths([11, 1, 21]).to(device)
    distinct = torch.randperm(33, generator=torch.Generator().manual_seed(0)).float().to(device)
    for ratio in some(backend, ["0.7", "0.95", "0.2", "0.3"], 1):
        threshold = quantiles(distinct, batch, 1 - Fraction(ratio), expand=True, backend=backend)
        kept = segment_aggregate((distinct >= threshold).float(), batch, "row", aggregate="sum", expand=False)
        assert kept.tolist() == [1 + math.floor(Fraction(ratio) * (n - 1)) for n in (11, 1, 21)]
    flat = torch.full_like(distinct, 0.7)
    for k in some(backend, [12, 0, 1]):
        selected = top_k(flat, batch, k, backend=backend)
        counts = segment_aggregate(selected.float(), batch, "row", aggregate="sum", expand=False)
        assert counts.tolist() == [min(k, n) for n in (11, 1, 21)]
        assert selected.nonzero().flatten().tolist() == [
            *range(min(k, 11)), *range(11, 11 + min(k, 1)), *range(12, 12 + min(k, 21))
        ]  # fmt: skip


def test_the_call_is_the_window_of_the_call(backend):
    values, batch = pack(2, backend)
    values, batch = values.to(testing.device_of(backend)), batch.to(testing.device_of(backend))
    state = forking_tokens("0.3").fit(values, batch, backend=backend)
    assert torch.equal(quantiles(values, batch, "0.7", scope="call", backend=backend), state.threshold)


def test_worked_thresholds_of_ares(backend):
    """The shared worked batch of the methods' notes: windows that carry, and interpolated quantiles of tokens."""
    device = testing.device_of(backend)
    entropy = torch.tensor([
        *(0.05, 0.10, 1.20, 0.90, 0.80, 0.70, 0.02, 0.03, 0.01, 0.04),
        *(0.40, 0.02, 0.01, 1.50, 0.03, 0.02), *(0.60, 0.30, 0.90),
    ], device=device)  # fmt: skip
    batch = hpo.PackedBatch.from_lengths([10, 6, 3]).to(device)
    carried = window_aggregate(entropy, batch, Window.forward_exclusive(4, boundary="carry"), backend=backend)
    thresholds = functools.partial(quantiles, batch=batch, rule=OrderRule.LINEAR, backend=backend)
    assert thresholds(carried, quantile="0.95").tolist() == pytest.approx([0.8325, 0.39, 0.6], abs=1e-6)
    assert thresholds(entropy, quantile="0.95").tolist() == pytest.approx([1.065, 1.225, 0.87], abs=1e-6)
    assert thresholds(entropy, quantile="0.5").tolist() == pytest.approx([0.075, 0.025, 0.6], abs=1e-6)
    assert thresholds(entropy, quantile="0.8").tolist() == pytest.approx([0.82, 0.4, 0.78], abs=1e-6)
    score = torch.tensor([
        *(0.06, 0.12, 1.44, 1.08, 0.96, 0.84, 0.024, 0.036, 0.012, 0.048),
        *(0.32, 0.016, 0.008, 1.2, 0.024, 0.016),
    ], device=device)  # fmt: skip
    pair = hpo.PackedBatch.from_lengths([10, 6]).to(device)
    assert top_k(score, pair, 5, scope="call", backend=backend).nonzero().flatten().tolist() == [2, 3, 4, 5, 13]


def test_padded_values_keep_their_shape(backend):
    device = testing.device_of(backend)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], device=device)
    values = torch.tensor([[3.0, 1.0, 2.0, 9.0], [5.0, 9.0, 9.0, 9.0]], device=device)
    assert quantiles(values, mask, 1, backend=backend).tolist() == [3.0, 5.0]
    assert quantiles(values, mask, 1, expand=True, backend=backend).tolist() == [[3.0] * 4, [5.0] * 4]
    assert top_k(values, mask, 2, backend=backend).tolist() == [[True, False, True, False], [True, False, False, False]]
    out = segment_aggregate(values, mask, "row", backend=backend)
    assert out.tolist() == [[2.0, 2.0, 2.0, -math.inf], [5.0, *[-math.inf] * 3]]


@pytest.mark.parametrize("rule", INDEX_RULES)
def test_float64_keeps_its_digits_in_the_reference(rule):
    values = torch.tensor([1.0, 1.0 + 2**-40, 1.0 + 2**-39], dtype=torch.float64)
    out = quantiles(values, hpo.PackedBatch.from_lengths([3]), "0.5", rule=rule, backend="reference")
    assert out.dtype == torch.float64 and out.item() == 1.0 + 2**-40


@pytest.mark.parametrize("scope", ["row", "call"])
def test_of_fewer_values_than_k_all_are_taken(backend, scope):
    values, batch = moved(backend, torch.rand(5), hpo.PackedBatch.from_lengths([3, 2]))
    for k in (6, 2**63 - 1, 2**70):
        assert top_k(values, batch, k, scope=scope, backend=backend).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda v, b: quantiles(v, b, "0.5", scope="rows"), "scope: expected one of step, row, .*, got 'rows'"),
        (lambda v, b: quantiles(v, b, "20%"), "quantile: expected a number.*write 0.2"),
        (lambda v, b: quantiles(v, b, 2), r"quantile: expected a fraction in \[0, 1\], got 2"),
        (lambda v, b: quantiles(v, b, "0.5", rule=1), "rule: expected an OrderRule, got 1"),
        (lambda v, b: quantiles(v, b, "0.5", scope="group"), "scope: 'group' needs group_ids in the batch"),
        (lambda v, b: quantiles(v, b, "0.5", scope="step"), "scope: 'step' needs steps in the batch"),
        (lambda v, b: quantiles(v, b, "0.5", scopes=3), "scopes: it is the number of scopes that ids name"),
        (
            lambda v, b: quantiles(v, b, "0.5", scope="call", scopes=3),
            "scopes: it is the number of scopes that ids name",
        ),
        (lambda v, b: quantiles(v[:4], b, "0.5"), r"values: expected shape \[T\]"),
        (lambda v, b: quantiles(v.half(), b, "0.5"), "values: expected dtype float32"),
        (lambda v, b: top_k(v, b, -1), "k: expected a count >= 0, got -1"),
        (lambda v, b: top_k(v, b, 1.5), r"k: expected an integer or a tensor \[C\], got 1.5"),
        (lambda v, b: top_k(v, b, torch.tensor([1])), r"k: expected shape \[C\] \(one per scope\) = \[2\], got \[1\]"),
        (lambda v, b: top_k(v, b, 1, uid=torch.tensor([1])), r"uid: expected shape \[S\]"),
        (lambda v, b: segment_aggregate(v, b, "call"), "level: expected one of step, row, trajectory, group or ids"),
        (lambda v, b: segment_aggregate(v, b, "row", aggregate="median"), "aggregate: expected one of mean, sum"),
        (lambda v, b: forking_tokens().__class__("w", Fraction(1, 2), rule=OrderRule.LINEAR), "rule: expected one of"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(torch.rand(5), hpo.PackedBatch.from_lengths([3, 2]))


@pytest.mark.parametrize(
    ("scope_of_segment", "scopes", "message"),
    [
        (None, 3, r"scopes: expected 2 \(one per segment, as scope_of_segment is None\), got 3"),
        (torch.tensor([0, 0]), -1, "scopes: expected a count of at least 0, got -1"),
    ],
)
def test_a_wrong_number_of_scopes_is_refused_by_its_reason(scope_of_segment, scopes, message):
    values, segments = torch.rand(5), torch.tensor([0, 3, 5])
    with pytest.raises(ValueError, match=f"^{message}$"):
        torch.ops.hpo_core.order_statistics(values, segments, scope_of_segment, scopes, 1, 2, 0, None, "")


def test_more_values_than_kernels_can_count_are_refused():
    values, offsets = torch.empty(2**31, device="meta"), torch.tensor([0, 2**31], device="meta")
    one = torch.ones(1, dtype=torch.int64, device="meta")
    calls = (
        lambda: ops.order_statistics(values, offsets, None, 1, 1, 2, OrderRule.FLOOR, None, None),
        lambda: ops.select_exact(values, offsets, None, one, None, None, None),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"^values: expected fewer than 2\^31 tokens, .*, got 2147483648; make"):
            call()
