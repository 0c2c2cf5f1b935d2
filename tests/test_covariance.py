"""Terms of the covariance of advantages and log-probabilities, and draws by them, on every backend."""

import functools
import itertools
import math

import pytest
import torch
from breadth import at_length, at_most  # noqa: F401 (the first is a fixture)

from hpo_core import ops, testing
from hpo_core.gates.draws import key_of_places
from hpo_core.reference.covariance import draws_of_places
from hpo_core.specs import TokenDraw

NO_DRAW = TokenDraw()
BOUNDS = (0.1, 1.5, math.log1p(-0.2), math.log1p(0.2))
SIZES = [0, 1, 15, 16, 17, 1023, 1025, 5000, 17_000, 140_000]


def example(tokens, rows=7, seed=0, masked=True):
    """Log-probabilities and advantages, some not finite, offsets of rows, with tokens before the first and behind the
    last, a mask, and a draw. Without rows the advantages are those of tokens."""
    draw = torch.Generator().manual_seed(seed)
    logp, shift = torch.randn(2, tokens, generator=draw)
    old_logp, advantages = logp + 0.3 * shift, torch.randn(tokens if rows is None else rows, generator=draw)
    for values in (logp, old_logp, advantages):
        for bad in (math.nan, math.inf, -math.inf):
            values[torch.rand(values.shape, generator=draw) < 0.02] = bad
    cuts = None if rows is None else torch.randint(0, tokens + 1, (rows + 1,), generator=draw).sort().values
    mask = torch.rand(tokens, generator=draw) < 0.8 if masked else None
    return logp, advantages, cuts, mask, TokenDraw(old_logp, BOUNDS, *key_of_places(seed))


def run(backend, logp, advantages, cu_seqlens, mask, draw=NO_DRAW):
    device = testing.device_of(backend)
    *given, draw = testing.move((logp, advantages, cu_seqlens, mask, draw), device)
    keys, members = ops.covariance(*given, *draw, backend)
    assert keys.dtype == logp.dtype and keys.shape == logp.shape and members.shape == (1,)
    return keys.cpu(), members.item()


def owners(cu_seqlens, tokens):
    """The last row that claims each token; a broken row claims none."""
    row_of = [-1] * tokens
    for row, (begin, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        if 0 <= begin <= end <= tokens:
            row_of[begin:end] = [row] * (end - begin)
    return row_of


def loop(logp, advantages, cu_seqlens, mask):
    """The terms of the members, in float64, token by token, and their advantages."""
    given, x = advantages.tolist(), logp.tolist()
    unit = range(len(x)) if cu_seqlens is None else owners(cu_seqlens, len(x))
    known = [t for t in range(len(x)) if unit[t] >= 0 and (mask is None or mask[t])]
    own = {t: (given[unit[t]], x[t]) for t in known if math.isfinite(given[unit[t]]) and math.isfinite(x[t])}
    means = [math.fsum(each[k] for each in own.values()) / max(len(own), 1) for k in (0, 1)]
    return {t: (a - means[0]) * (x - means[1]) for t, (a, x) in own.items()}, {t: a for t, (a, _) in own.items()}


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("rows", [None, 7, 900])
def test_terms_are_those_of_a_loop(rows, masked, native_backends):
    for count in SIZES:
        for tokens in {at_most(backend, count) for backend in native_backends}:
            given = example(tokens, rows, seed=count, masked=masked)[:4]
            terms, _ = loop(*given)
            expected = torch.full((tokens,), -math.inf, dtype=torch.float64)
            expected[list(terms)] = torch.tensor(list(terms.values()), dtype=torch.float64)
            for backend in ("reference", *(each for each in native_backends if at_most(each, count) == tokens)):
                keys, members = run(backend, *given)
                assert members == len(terms)
                torch.testing.assert_close(keys.double(), expected, rtol=2**-23, atol=1e-12)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("rows", [None, 7, 900])
def test_draws_are_of_tokens_in_the_bands(rows, native_backends):
    """Terms and log-ratios keep away from the bounds here."""
    for count in SIZES:
        for tokens in {at_most(backend, count) for backend in native_backends}:
            *given, draw = example(tokens, rows, seed=count)
            terms, advantages = loop(*given)
            x, old_logp = given[0].tolist(), draw.old_logp.tolist()
            low, high, least, most = BOUNDS
            passes = {
                t: x[t] - old_logp[t] >= (least if a < 0 else -math.inf)
                and x[t] - old_logp[t] <= (most if a > 0 else math.inf)
                for t, a in advantages.items()
            }
            drawn = torch.tensor([t for t, term in terms.items() if low < term < high and passes[t]], dtype=torch.int64)
            expected = torch.full((tokens,), -math.inf)
            expected[drawn] = draws_of_places(drawn, draw.factor, draw.offset).float()
            for backend in ("reference", *(each for each in native_backends if at_most(each, count) == tokens)):
                keys, members = run(backend, *given, draw)
                assert torch.equal(keys, expected) and members == len(terms)


def test_bounds_by_hand(backend):
    """Means are 0. Terms on a bound are not drawn, log-ratios on a bound are; A = 0 has no bound of log-ratios."""
    advantages, offsets = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([0, 4, 8, 10])
    logp = torch.tensor([1.0, 1.5, 2.0, 4.0, -1.0, -1.5, -2.0, -4.0, 3.0, -3.0])
    drawn = functools.partial(_drawn, backend, logp, advantages, offsets)
    assert drawn(torch.zeros(10), 1.0, 4.0, -math.inf, math.inf) == [1, 2, 5, 6]
    assert drawn(torch.zeros(10), -1.0, 9.0, -1.5, 1.5) == [0, 1, 4, 5, 8, 9]
    assert drawn(torch.full((10,), math.nan), -1.0, 9.0, -1.5, 1.5) == []
    assert drawn(torch.full((10,), math.inf), -1.0, 9.0, -1.5, 1.5) == [0, 1, 2, 3, 8, 9]
    assert drawn(torch.full((10,), -math.inf), -1.0, 9.0, -1.5, 1.5) == [4, 5, 6, 7, 8, 9]


def _drawn(backend, logp, advantages, cu_seqlens, old_logp, *bounds):
    keys, _ = run(backend, logp, advantages, cu_seqlens, None, TokenDraw(old_logp, bounds, *key_of_places(3)))
    return keys.isfinite().nonzero()[:, 0].tolist()


def test_without_members(backend):
    """No rows, no tokens, or nothing that counts."""
    nothing, none = torch.zeros(0), torch.tensor([0, 0, 0])
    for given in ((torch.zeros(5), nothing, none[:1], None), (nothing, torch.ones(2), none, None)):
        keys, members = run(backend, *given)
        assert members == 0 and (keys == -math.inf).all()
    keys, members = run(backend, torch.zeros(5), torch.ones(1), torch.tensor([0, 5]), torch.zeros(5, dtype=torch.bool))
    assert members == 0 and (keys == -math.inf).all()


@pytest.mark.parametrize(
    "offsets",
    [[0, 5, 2, 4, 6], [0, -3, 2, 6, 6], [0, 2, 99, 4, 6], [-(2**62), 2**62, 3, -1, 2**63 - 1], [6, 5, 4, 3, 2]],
    ids=str,
)
def test_broken_offsets_are_harmless(backend, offsets):
    logp, advantages = torch.arange(6) ** 2 - 9.0, torch.tensor([1.0, -2.0, 3.0, 5.0])
    assert_terms(backend, logp, advantages, torch.tensor(offsets), None)


@pytest.mark.usefixtures("at_length")
def test_of_rows_that_overlap_the_last_one_owns_a_token(backend):
    """Any offsets, one row over a hundred others, and one broken row, in more rows than a search looks at."""
    tokens = at_most(backend, 20_000)
    for rows in (7, 150):
        logp, advantages, _, mask, _ = example(tokens, rows, seed=rows)
        random = torch.randint(-5, tokens + 10, (rows + 1,), generator=torch.Generator().manual_seed(rows))
        over, broken = (torch.arange(rows + 1) * (tokens // rows) for _ in range(2))
        over[rows // 4], broken[rows // 3] = tokens, -1
        for offsets in (random, over, broken):
            assert_terms(backend, logp, advantages, offsets, mask)


def assert_terms(backend, *given):
    """Those of the definition and of the loop."""
    terms, _ = loop(*given)
    (keys, members), (expected, _) = run(backend, *given), run("reference", *given)
    assert members == len(terms) and keys.isfinite().nonzero()[:, 0].tolist() == [*terms]
    torch.testing.assert_close(keys, expected, rtol=2**-22, atol=1e-12)


def test_terms_beyond_all_floats_are_the_largest(backend):
    keys, members = run(backend, torch.tensor([3e38, -3e38]), torch.tensor([3e38, -3e38]), None, None)
    largest = torch.finfo(torch.float32).max
    assert keys.tolist() == [largest, largest] and members == 2
    keys, _ = run(backend, torch.tensor([3e38, -3e38]), torch.tensor([-3e38, 3e38]), None, None)
    assert keys.tolist() == [-largest, -largest]


def test_sums_are_exact_at_an_offset(backend):
    """Sums in float32 would lose the differences."""
    tokens = at_most(backend, 20_000)
    values = torch.arange(tokens) % 3 - 1.0
    logp, advantages = values + 2**20, values + 2**21
    keys, _ = run(backend, logp, advantages, None, None)
    mean = values.double().mean()
    torch.testing.assert_close(keys.double(), (values.double() - mean).square(), rtol=2**-23, atol=1e-8)


def test_bits_do_not_depend_on_threads_or_garbage(backend):
    """The numbers at masked tokens and at tokens in no row are never used."""
    tokens = at_most(backend, 100_000)
    logp, advantages, offsets, mask, draw = example(tokens, seed=4)
    member = torch.zeros(tokens, dtype=torch.bool)
    member[list(loop(logp, advantages, offsets, mask)[0])] = True
    garbage = logp.where(member, 1e30), advantages, offsets, member
    garbage_draw = draw._replace(old_logp=draw.old_logp.where(member, -7.0))
    threads = torch.get_num_threads()
    for draws in (False, True):
        first, members = run(backend, logp, advantages, offsets, mask, draw if draws else NO_DRAW)
        try:
            torch.set_num_threads(1 if threads > 1 else 2)
            second, same = run(backend, *garbage, garbage_draw if draws else NO_DRAW)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(first, second) and members == same


def test_views_that_begin_anywhere(backend):
    """Triton reads 128 bits at once where it may."""
    logp, advantages, offsets, mask, draw = example(3001, seed=5)
    given = logp, mask, draw.old_logp
    terms, _ = run(backend, logp, advantages, offsets, mask)
    drawn, _ = run(backend, logp, advantages, offsets, mask, draw)
    for start in (1, 2, 3):
        x, valid, old_logp = (torch.cat((each[:start], each))[start:] for each in given)
        assert torch.equal(run(backend, x, advantages, offsets, valid)[0], terms)
        moved = draw._replace(old_logp=old_logp)
        assert torch.equal(run(backend, logp, advantages, offsets, mask, moved)[0], drawn)
