"""Terms of the covariance of advantages and log-probabilities, and draws by them, on every backend."""

import functools
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


def example(tokens, units=7, seed=0, of_tokens=False, masked=True):
    """Log-probabilities and advantages, some not finite, units, some out of range, a mask, and a draw."""
    draw = torch.Generator().manual_seed(seed)
    logp, shift = torch.randn(2, tokens, generator=draw)
    old_logp, advantages = logp + 0.3 * shift, torch.randn(tokens if of_tokens else units, generator=draw)
    for values in (logp, old_logp, advantages):
        for bad in (math.nan, math.inf, -math.inf):
            values[torch.rand(values.shape, generator=draw) < 0.02] = bad
    unit = None if of_tokens else torch.randint(-2, units + 2, (tokens,), generator=draw, dtype=torch.int32)
    mask = torch.rand(tokens, generator=draw) < 0.8 if masked else None
    return logp, advantages, unit, mask, TokenDraw(old_logp, BOUNDS, *key_of_places(seed))


def run(backend, logp, advantages, unit, mask, draw=NO_DRAW):
    device = testing.device_of(backend)
    *given, draw = testing.move((logp, advantages, unit, mask, draw), device)
    keys, members = ops.covariance(*given, *draw, backend)
    assert keys.dtype == logp.dtype and keys.shape == logp.shape and members.shape == (1,)
    return keys.cpu(), members.item()


def loop(logp, advantages, unit, mask):
    """The terms of the members, in float64, token by token, and their advantages."""
    given, x = advantages.tolist(), logp.tolist()
    unit = list(range(len(given))) if unit is None else unit.tolist()
    known = [t for t in range(len(x)) if 0 <= unit[t] < len(given) and (mask is None or mask[t])]
    own = {t: (given[unit[t]], x[t]) for t in known if math.isfinite(given[unit[t]]) and math.isfinite(x[t])}
    means = [math.fsum(each[k] for each in own.values()) / max(len(own), 1) for k in (0, 1)]
    return {t: (a - means[0]) * (x - means[1]) for t, (a, x) in own.items()}, {t: a for t, (a, _) in own.items()}


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("of_tokens", [True, False])
def test_terms_are_those_of_a_loop(of_tokens, masked, native_backends):
    for count in SIZES:
        for tokens in {at_most(backend, count) for backend in native_backends}:
            given = example(tokens, seed=count, of_tokens=of_tokens, masked=masked)[:4]
            terms, _ = loop(*given)
            expected = torch.full((tokens,), -math.inf, dtype=torch.float64)
            expected[list(terms)] = torch.tensor(list(terms.values()), dtype=torch.float64)
            for backend in ("reference", *(each for each in native_backends if at_most(each, count) == tokens)):
                keys, members = run(backend, *given)
                assert members == len(terms)
                torch.testing.assert_close(keys.double(), expected, rtol=2**-23, atol=1e-12)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("of_tokens", [True, False])
def test_draws_are_of_tokens_in_the_bands(of_tokens, native_backends):
    """Terms and log-ratios keep away from the bounds here."""
    for count in SIZES:
        for tokens in {at_most(backend, count) for backend in native_backends}:
            *given, draw = example(tokens, seed=count, of_tokens=of_tokens)
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
    advantages = torch.tensor([-1.0, 0.0, 1.0])
    unit = torch.tensor([2, 2, 2, 2, 0, 0, 0, 0, 1, 1], dtype=torch.int32)
    logp = torch.tensor([1.0, 1.5, 2.0, 4.0, -1.0, -1.5, -2.0, -4.0, 3.0, -3.0])
    drawn = functools.partial(_drawn, backend, logp, advantages, unit)
    assert drawn(torch.zeros(10), 1.0, 4.0, -math.inf, math.inf) == [1, 2, 5, 6]
    assert drawn(torch.zeros(10), -1.0, 9.0, -1.5, 1.5) == [0, 1, 4, 5, 8, 9]
    assert drawn(torch.full((10,), math.nan), -1.0, 9.0, -1.5, 1.5) == []
    assert drawn(torch.full((10,), math.inf), -1.0, 9.0, -1.5, 1.5) == [0, 1, 2, 3, 8, 9]
    assert drawn(torch.full((10,), -math.inf), -1.0, 9.0, -1.5, 1.5) == [4, 5, 6, 7, 8, 9]


def _drawn(backend, logp, advantages, unit, old_logp, *bounds):
    keys, _ = run(backend, logp, advantages, unit, None, TokenDraw(old_logp, bounds, *key_of_places(3)))
    return keys.isfinite().nonzero()[:, 0].tolist()


def test_without_members(backend):
    """No units, no tokens, or nothing that counts."""
    nothing, none = torch.zeros(0), torch.zeros(5, dtype=torch.int32)
    for given in ((torch.zeros(5), nothing, none, None), (nothing, torch.ones(2), none[:0], None)):
        keys, members = run(backend, *given)
        assert members == 0 and (keys == -math.inf).all()
    keys, members = run(backend, torch.zeros(5), torch.ones(1), none, torch.zeros(5, dtype=torch.bool))
    assert members == 0 and (keys == -math.inf).all()


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
    """The numbers at masked tokens and at tokens in no unit are never used."""
    tokens = at_most(backend, 100_000)
    logp, advantages, unit, mask, draw = example(tokens, seed=4)
    member = torch.zeros(tokens, dtype=torch.bool)
    member[list(loop(logp, advantages, unit, mask)[0])] = True
    garbage = logp.where(member, 1e30), advantages, unit, member
    garbage_draw = draw._replace(old_logp=draw.old_logp.where(member, -7.0))
    threads = torch.get_num_threads()
    for draws in (False, True):
        first, members = run(backend, logp, advantages, unit, mask, draw if draws else NO_DRAW)
        try:
            torch.set_num_threads(1 if threads > 1 else 2)
            second, same = run(backend, *garbage, garbage_draw if draws else NO_DRAW)
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(first, second) and members == same


def test_views_that_begin_anywhere(backend):
    """Triton reads 128 bits at once where it may."""
    logp, advantages, unit, mask, draw = example(3001, seed=5)
    given = logp, unit, mask, draw.old_logp
    terms, _ = run(backend, logp, advantages, unit, mask)
    drawn, _ = run(backend, logp, advantages, unit, mask, draw)
    for start in (1, 2, 3):
        x, own, valid, old_logp = (torch.cat((each[:start], each))[start:] for each in given)
        assert torch.equal(run(backend, x, advantages, own, valid)[0], terms)
        moved = draw._replace(old_logp=old_logp)
        assert torch.equal(run(backend, logp, advantages, unit, mask, moved)[0], drawn)
