"""Advantages of responses, steps and positions that follow entropies, and masks of spans, against plain loops."""

import math
import statistics
from collections import defaultdict

import pytest
import torch
from naive_entropy import close, on_random_batches
from ranks import on_ranks

import hpo_core as hpo
from hpo_core import PackedBatch, testing
from hpo_core import entropy as E
from hpo_core.entropy import Window


def rows_of(*lengths, **more):
    return hpo.PackedBatch.from_lengths(lengths, **more)


# ------------------------------------------------------------------------------------------------------ worked numbers


def test_gtpo_of_the_source():
    batch, right = rows_of(3, 2, 2, 1), torch.tensor([True, True, False, False])
    entropy = torch.tensor([0.2, 0.6, 0.4, 0.6, 0.2, 0.5, 0.1, 1.0])
    raw = E.gtpo(right, entropy, batch, normalised=False)
    close(raw, [1.05, 1.15, 1.1, 1.15, 1.05, -1.133333, -1.1, -1.066667])
    sums = [raw[0] + raw[3], raw[1] + raw[4], raw[2]]
    close(torch.stack(sums), [2.2, 2.2, 1.1])
    advantages = [-1.118034, 1.118034, 0, 1.118034, -1.118034, -1.224745, 0, 1.224745]
    close(E.gtpo(right, entropy, batch), advantages, 2e-6)
    rows = E.grpo_s(right, entropy, batch, normalised=False)
    close(rows, [1.1, 1.1, -1.153846, -1.046154])


def test_gtpo_where_entropies_are_zero():
    assert E.gtpo(
        torch.tensor([True, True]), torch.zeros(2), rows_of(1, 1), normalised=False
    ).tolist() == pytest.approx([1.1, 1.1])
    assert E.gtpo(torch.tensor([True]), torch.ones(1), rows_of(1)).tolist() == [0.0]


def test_empg_of_the_source():
    batch = hpo.PackedBatch(torch.tensor([0, 3]), cu_steps=torch.tensor([0, 1, 2, 3]))
    entropy = torch.tensor([0.1, 0.5, 0.9])
    gains = E.empg(torch.ones(1), entropy, batch, zeta=0.0)
    close(gains + 1, [1.519441, 0.921588, 0.558971])
    with_next = E.empg(torch.ones(1), entropy, batch, zeta=1.0)
    raw = torch.tensor([1.519441 + 0.606531, 0.921588 + 0.367879, 0.558971])
    close(with_next, (raw - raw.mean()).tolist())
    assert E.empg(torch.ones(1), torch.full((3,), 0.5), batch, zeta=0.0).tolist() == pytest.approx([0, 0, 0], abs=1e-7)


def test_empg_counts_a_step_of_several_ranges_once():
    """The same three steps, of which the second goes on in the next row, and a range without a name."""
    named = {"trajectory_ids": torch.tensor([4, 4, 2]), "step_ids": torch.tensor([5, 7, 7, 9, -1])}
    batch = hpo.PackedBatch(torch.tensor([0, 3, 6, 7]), cu_steps=torch.tensor([0, 1, 3, 4, 6, 7]), **named)
    entropy, own = torch.tensor([0.1, 0.25, 0.25, 1.0, 0.9, 0.9, 0.5]), torch.tensor([1.0, 1.0, 0.0])
    g = torch.tensor([0.0, -0.5, -1.0, -0.5]).exp()
    g = g / g.mean()
    f = torch.tensor([-0.5, -1.0]).exp()
    raw = torch.tensor([g[0] + f[0], g[1] + f[1], g[2], 0.0])
    close(E.empg(own, entropy, batch, zeta=1.0), (raw - raw.mean())[[0, 1, 1, 2, 3]].tolist())


def test_means_of_responses_of_the_sources():
    batch = rows_of(1, 1, 1)
    entropy = torch.tensor([0.2, 0.4, 0.6])
    close(E.edge_grpo(torch.ones(3), entropy, batch), [2, 1, 0.4 / 0.6])
    close(E.edge_grpo(torch.ones(3), entropy, batch, most=1.5), [1.5, 1, 0.4 / 0.6])
    close(E.ettrl(torch.ones(3), entropy, batch), [1.5, 1, 0.5])
    unequal = rows_of(1, 3)  # sums .3 and .6: their mean is .45
    spread = torch.tensor([0.3, 0.2, 0.2, 0.2])
    close(E.edge_grpo(torch.ones(2), spread, unequal, compat="code"), [1.5, 0.75])
    close(E.ucas(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([1.0, -1, 0]), torch.zeros(3), batch), [0.778801, 0, -1])
    close(E.ucas(torch.tensor([0.0, -1.0, 1]), torch.tensor([-1.0, 1, 0]), torch.zeros(3), batch), [0, -1.419068, 1])


def test_a_row_without_a_number_gets_nan():
    """The loss counts NaN; a row gets 0 only where it has no valid token."""
    batch = hpo.PackedBatch.from_lengths([2, 2, 1], mask=torch.tensor([True, True, True, True, False]))
    confidence = torch.tensor([math.nan, 1.0, math.inf])
    assert E.ucas(torch.ones(3), confidence, torch.ones(5), batch).isnan().tolist() == [True, True, False, False, False]
    entropy, right = torch.tensor([math.nan, math.inf, 0.3, math.nan, math.nan]), torch.ones(3, dtype=torch.bool)
    close(E.grpo_s(right, entropy, batch, normalised=False).nan_to_num(99.0), [99.0, 1.1, 0])


def test_token_group_average_of_the_source():
    lengths = torch.tensor([4.0, 2.0, 6.0])
    got = E.hapo_advantages(torch.tensor([1.0, 0.0, 0.0]), None, lengths)
    close(got, [1.414214, -0.707107, -0.707107])
    assert (got * lengths).sum().item() == pytest.approx(0, abs=1e-6)
    rare = torch.tensor([1.0, *[0.0] * 39])
    usual, own = hpo.advantages.grpo(rare, None), E.hapo_advantages(rare, None, torch.ones(40))
    assert own.max() > 5 and not torch.equal(own, usual)
    assert torch.equal(E.hapo_advantages(rare, None, torch.ones(40), compat="code"), usual)


def test_clip_cov_of_the_source():
    logp, advantages = torch.tensor([-0.1, -2, -0.1, -3]), torch.tensor([1.0, 1, -1, -1])
    close(E.covariance(logp, advantages, rows_of(4), advantage_level="token"), [1.2, -0.7, -1.2, 1.7])


# --------------------------------------------------------------------------------------------------------- plain loops


def mean(numbers):
    numbers = list(numbers)
    return statistics.fmean(numbers) if numbers else math.nan


def test_gtpo_of_a_response_alone_is_zero(backend):
    """Each u is its own mean, to the bit."""
    place = testing.device_of(backend)
    batch, entropy = PackedBatch.from_lengths([20]).to(place), torch.linspace(0.013, 3, 20, device=place)
    for right in (True, False):
        got = E.gtpo(torch.tensor([right], device=place), entropy, batch, alpha=(0.0, 1.0), backend=backend)
        assert got.tolist() == [0.0] * 20


@pytest.mark.parametrize("method", [E.gtpo, E.grpo_s])
def test_rewards_that_hardly_differ_are_told_apart(backend, method):
    """Rewards differ from 1.1 by a millionth, which is ten steps of float32."""
    place = testing.device_of(backend)
    batch = PackedBatch.from_lengths([1] * 4, group_ids=torch.zeros(4, dtype=torch.int64)).to(place)
    entropy = torch.tensor([0.3, 0.300004, 0.300009, 0.29999], device=place)
    exact = entropy.cpu().double()
    expected = (exact - exact.mean()) / exact.std(correction=0)
    got = method(torch.ones(4, dtype=torch.bool, device=place), entropy, batch, backend=backend)
    close(got, expected.tolist(), 5e-7)


def _nearby(count, size, width):
    return size + width * torch.rand(count, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("method", [E.gtpo, E.grpo_s])
def test_entropies_that_hardly_differ_are_told_apart(backend, method, right):
    """Neither means nor inverses are float32 numbers, whose steps are a hundredth of these differences."""
    place, entropy = testing.device_of(backend), _nearby(12, 0.3, 1e-5)
    exact = entropy.double().view(4, 3)
    u = exact if method is E.gtpo else exact.mean(1, keepdim=True)
    u = u if right else 1 / u
    rewards = (u / u.mean(0) - 1) * (1 if right else -1)
    expected = ((rewards - rewards.mean()) / rewards.std(correction=0)).flatten()
    batch, is_right = rows_of(3, 3, 3, 3).to(place), torch.full((4,), right, device=place)
    close(method(is_right, entropy.to(place), batch, backend=backend), expected.tolist(), 5e-7)


def test_empg_of_steps_that_hardly_differ(backend):
    place, entropy = testing.device_of(backend), _nearby(24, 2.0, 1e-4)
    mean = entropy.double().view(8, 3).mean(1)
    g = (-(mean - mean.min()) / (mean.max() - mean.min())).exp()
    f = torch.cat((g[1:], torch.zeros(1)))
    raw = g / g.mean() + f
    batch = hpo.PackedBatch(torch.tensor([0, 24]), cu_steps=torch.arange(0, 25, 3)).to(place)
    got = E.empg(torch.ones(1, device=place), entropy.to(place), batch, zeta=1.0, backend=backend)
    close(got, (raw - raw.mean()).tolist(), 5e-7)


def test_means_that_differ_by_their_rounding_are_equal(backend):
    """The same entropies in another order: a sum of float64 depends on it."""
    place = testing.device_of(backend)
    first = 10 ** (7 * torch.rand(40, generator=torch.Generator().manual_seed(0)) - 6)
    entropy = torch.cat([first[torch.randperm(40, generator=torch.Generator().manual_seed(k))] for k in range(8)])
    offsets = torch.arange(0, 321, 40)
    steps = hpo.PackedBatch(torch.tensor([0, 320]), cu_steps=offsets).to(place)
    given = torch.ones(1, device=place), entropy.to(place), steps
    assert E.empg(*given, zeta=0.0, backend=backend).abs().max() < 1e-7
    for right in (True, False):
        given = torch.full((8,), right, device=place), entropy.to(place), hpo.PackedBatch(offsets).to(place)
        assert E.grpo_s(*given, backend=backend).tolist() == [0.0] * 8


@on_random_batches
def test_gtpo_and_grpo_s(drawn):
    right = drawn.draw.random(len(drawn.rows)) < 0.5
    given = drawn.tensor(right), drawn.tensor(drawn.entropy), drawn.batch
    at, expected, groups = defaultdict(list), drawn.of_tokens(lambda t: 0.0, 0.0), defaultdict(list)
    for row, places in enumerate(drawn.rows):
        for position, t in enumerate(places):
            u = drawn.entropy[t] if right[row] else 1 / max(drawn.entropy[t], 1e-8)
            if drawn.group[row] >= 0:
                at[drawn.group[row], right[row], position].append((t, u))
    for (group, good, _), members in at.items():
        middle = mean(u for _, u in members)
        for t, u in members:
            expected[t] = (1 if good else -1) * (1 + 0.1 * (u / middle if middle > 0 else 1.0))
            groups[group, good].append(t)
    drawn.agrees(E.gtpo(*given, normalised=False, backend=drawn.backend), expected)
    for members in groups.values():
        numbers = [expected[t] for t in members]
        spread = statistics.pstdev(numbers)
        if spread > 1e-3:
            got = E.gtpo(*given, backend=drawn.backend).cpu()
            for t in members:
                assert got[t].item() == pytest.approx((expected[t] - mean(numbers)) / spread, abs=2e-5)
    rows, of = [0.0] * len(drawn.rows), defaultdict(list)
    for t in drawn.broken:
        if not drawn.rows[drawn.row_of[t]]:
            rows[drawn.row_of[t]] = math.nan
    for row, places in enumerate(drawn.rows):
        if places and drawn.group[row] >= 0:
            own = mean(drawn.entropy[t] for t in places)
            of[drawn.group[row], right[row]].append((row, own if right[row] else 1 / max(own, 1e-8)))
    for (_, good), members in of.items():
        middle = mean(u for _, u in members)
        for row, u in members:
            rows[row] = (1 if good else -1) * (1 + 0.1 * (u / middle if middle > 0 else 1.0))
    drawn.agrees(E.grpo_s(*given, normalised=False, backend=drawn.backend), rows)


@on_random_batches
def test_edge_grpo_and_ettrl(drawn):
    own = drawn.normal(len(drawn.rows))
    given = drawn.tensor(own), drawn.tensor(drawn.entropy), drawn.batch
    of = [mean(drawn.entropy[t] for t in places) for places in drawn.rows]
    sums = [sum(drawn.entropy[t] for t in places) if places else math.nan for places in drawn.rows]

    def shaped(of, factor):
        found = []
        for row, each in enumerate(of):
            usual = mean(x for x, group in zip(of, drawn.group, strict=True) if group == drawn.group[row] and x == x)
            known = each == each and drawn.group[row] >= 0 and usual > 0
            found.append(own[row] * (factor(each, usual) if known else 1.0))
        return found

    most = 3.0
    for compat, numbers in (("paper", of), ("code", sums)):
        got = E.edge_grpo(*given, most=most, compat=compat, backend=drawn.backend)
        drawn.agrees(got, shaped(numbers, lambda x, usual: min(usual / x, most) if x > 0 else most), 1e-5)
    drawn.agrees(E.ettrl(*given, backend=drawn.backend), shaped(of, lambda x, usual: 2 - x / usual), 1e-5)


@on_random_batches
def test_empg(drawn):
    if drawn.batch.num_steps is None:
        return
    own = drawn.normal(len(drawn.rows))
    step_of, row_of = drawn.batch.step_of_token().tolist(), drawn.batch.row_of_step().tolist()
    count = drawn.batch.num_steps
    of = [mean(drawn.entropy[t] for t in drawn.usable if step_of[t] == step) for step in range(count)]
    usable = [step for step in range(count) if of[step] == of[step]]
    least, most = (edge([of[step] for step in usable], default=0.0) for edge in (min, max))
    h = {step: (of[step] - least) / (most - least) if most > least else 0.0 for step in usable}
    middle = mean(math.exp(-h[step]) for step in usable)
    shaped = {}
    for step in usable:
        later = [other for other in range(step + 1, count) if row_of[other] == row_of[step]]
        f = math.exp(-2 * h[later[0]]) if later and later[0] in h else 0.0
        shaped[step] = own[row_of[step]] * math.exp(-h[step]) / middle + 0.5 * f
    centre = mean(shaped.values())
    expected = [shaped[step] - centre if step in shaped else 0.0 for step in range(count)]
    given = drawn.tensor(own), drawn.tensor(drawn.entropy), drawn.batch
    drawn.agrees(E.empg(*given, k_next=2.0, zeta=0.5, backend=drawn.backend), expected, 1e-5)


@on_random_batches
def test_ucas(drawn):
    own, confidence = drawn.normal(len(drawn.rows)), drawn.normal(len(drawn.rows))
    logits = drawn.entropy
    numbers = [logits[t] for t in drawn.usable]
    least, span = min(numbers, default=0), max(numbers, default=0) - min(numbers, default=0)

    def shaped(t):
        row = drawn.row_of[t]
        same = [c for c, group in zip(confidence, drawn.group, strict=True) if group == drawn.group[row]]
        spread = statistics.stdev(same) if len(same) > 1 and drawn.group[row] >= 0 else 0
        c = (confidence[row] - mean(same)) / spread if spread else 0.0
        a = own[row] * math.exp(-0.25 * c if own[row] > 0 else 0.35 * c)
        final = a - 0.05 * ((logits[t] - least) / span if span else 0.0)
        return max(final, 0.0) if a > 0 else final

    given = drawn.tensor(own), drawn.tensor(confidence), drawn.tensor(logits), drawn.batch
    drawn.agrees(E.ucas(*given, backend=drawn.backend), drawn.of_tokens(shaped, 0.0), 1e-5)


@on_random_batches
def test_covariance(drawn):
    own = drawn.normal(len(drawn.rows))
    logp = [-x for x in drawn.entropy]
    middle = mean(own[drawn.row_of[t]] for t in drawn.usable), mean(logp[t] for t in drawn.usable)
    expected = drawn.of_tokens(lambda t: (own[drawn.row_of[t]] - middle[0]) * (logp[t] - middle[1]), 0.0)
    drawn.agrees(E.covariance(drawn.tensor(logp), drawn.tensor(own), drawn.batch, backend=drawn.backend), expected)


@on_random_batches
def test_erc(drawn):
    """Some entropies are near 0: the 1e-8 beside both decides their ratio."""
    factors = [0.7, 0.74, 0.76, 1.0, 1.24, 1.26, 1.3]
    entropy = drawn.poisoned([h * 10.0 ** drawn.draw.choice([0, -8]) for h in drawn.entropy])
    old = drawn.poisoned([h / factors[drawn.draw.integers(7)] for h in entropy])
    ratio = {t: (entropy[t] + 1e-8) / (old[t] + 1e-8) for t in drawn.usable}
    kept = [t for t in drawn.usable if 0.75 < ratio[t] < 1.25]
    got = E.erc(drawn.tensor(entropy), drawn.tensor(old), drawn.batch, eps_low=0.25, eps_high=0.25)
    assert got.mask.nonzero().flatten().tolist() == sorted(kept)


def test_erc_by_hand():
    entropy = torch.tensor([0.74, 1.26, 0.5, 0.0, 0.0, 1.0, 0.76, 1.24, 2e-9])
    old = torch.tensor([1.0, 1.0, 0.5, 0.0, 0.1, 0.0, 1.0, 1.0, 0.0])
    mask = E.erc(entropy, old, rows_of(9), eps_low=0.25, eps_high=0.25).mask
    assert mask.tolist() == [False, False, True, True, False, False, True, True, True]
    asymmetric = E.erc(entropy, old, rows_of(9), eps_low=0.1, eps_high=0.3).mask
    assert asymmetric.tolist() == [False, True, True, True, False, False, False, True, True]
    assert E.erc(*(torch.tensor(x) for x in ([0.94, 0.96, 1.04, 1.06], [1.0] * 4)), rows_of(4)).mask.tolist() == [
        False, True, True, False,
    ]  # fmt: skip
    out = hpo.policy_loss_and_grad(
        old, old, torch.ones(1), rows_of(9), hpo.gates.dapo(), selection=E.Selection(mask=mask), weights=torch.ones(1)
    )
    assert out.grad.tolist() == [-1.0 if kept else 0.0 for kept in mask]


@on_random_batches
def test_ulorl(drawn):
    right = drawn.draw.random(len(drawn.rows)) < 0.7
    probability = drawn.draw.random(drawn.tokens)
    logp = drawn.poisoned([math.log(p) for p in probability])
    given = drawn.tensor(logp), drawn.tensor(drawn.entropy), drawn.tensor(right), drawn.batch
    got = E.ulorl(*given, probability=0.5, sigma=0.8, backend=drawn.backend).mask.tolist()
    for row, places in enumerate(drawn.rows):
        for t in places:
            settled = right[row] and mean(drawn.entropy[t] for t in places) < 0.8
            assert got[t] == (not (settled and logp[t] >= math.log(0.5)))
    assert not any(got[t] for t in range(drawn.tokens) if t not in drawn.usable)


def test_of_a_token_without_a_log_probability_ulorl_reads_no_entropy():
    """It is as good as masked, so the mean of its row is that of the others."""
    logp, entropy = torch.tensor([-0.001, math.nan]), torch.tensor([0.1, 0.9])
    assert E.ulorl(logp, entropy, torch.tensor([True]), rows_of(2)).mask.tolist() == [False, False]


def test_covariance_keeps_doubles_on_the_reference():
    """Log-probabilities that are equal in float32 are not taken for equal."""
    logp, own = torch.tensor([-1, -1 - 2**-40], dtype=torch.float64), torch.tensor([1.0, -1.0])
    assert E.covariance(logp, own, rows_of(1, 1), backend="reference").tolist() == [2**-41, 2**-41]


@on_random_batches
def test_spans(drawn):
    chosen = drawn.draw.random(drawn.tokens) < 0.6
    inside = [t for places in drawn.valid for t in places]
    first, last = sorted(drawn.draw.integers(-2, 3, 2).tolist())
    got = E.cover(drawn.tensor(chosen), drawn.batch, Window(first, last), backend=drawn.backend).tolist()
    length = int(drawn.draw.integers(1, 4))
    runs = E.opened(drawn.tensor(chosen), drawn.batch, length, backend=drawn.backend)
    again = E.opened(runs, drawn.batch, length, backend=drawn.backend)
    assert torch.equal(again, runs)  # idempotent
    runs = runs.tolist()
    for t in range(drawn.tokens):
        same = [u for u in inside if t in inside and drawn.row_of[u] == drawn.row_of[t]]
        assert got[t] == any(chosen[u] and u + first <= t <= u + last for u in same)
        begins = [b for b in range(t - length + 1, t + 1) if all(u in same and chosen[u] for u in range(b, b + length))]
        assert runs[t] == bool(begins)


def test_padded_batches_keep_their_shape():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    batch, flat = hpo.PackedBatch.from_padded(mask), hpo.PackedBatch(torch.tensor([0, 3, 6]), mask.reshape(-1))
    entropy, right = torch.rand(2, 3), torch.tensor([True, False])
    got = E.gtpo(right, entropy, batch)
    assert got.shape == (2, 3) and torch.equal(got.reshape(-1), E.gtpo(right, entropy.reshape(-1), flat))
    assert E.grpo_s(right, entropy, batch).shape == (2,)
    assert E.cover(mask, batch, Window(0, 1)).shape == (2, 3)


def test_means_of_rows_stay_on_their_rank():
    """Rows are places in a batch: the first of one rank is not the first of another."""
    entropy = torch.tensor([0.25, 1.0, 3.0])

    def compute(rank):
        batch = rows_of(1) if rank == 0 else rows_of(2)
        own = entropy[:1] if rank == 0 else entropy[1:]
        world = torch.distributed.group.WORLD
        return hpo.advantages.over_ranks(E.ettrl, world, tables=True)(torch.ones(1), own, batch)

    expected = E.ettrl(torch.ones(2), entropy, rows_of(1, 2))
    assert torch.equal(torch.cat(on_ranks(2, compute)), expected)


def test_advantages_over_ranks(three_ranks):
    """Ranks share groups, but no rows, whose numbers are places in a batch."""
    draw = torch.Generator().manual_seed(0)
    lengths, entropy = [2, 1, 3, 2, 2, 1], torch.rand(11, generator=draw)
    groups, right = torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([True, False, True, True, True, False])
    own, ends = torch.randn(6, generator=draw), torch.tensor([0, *lengths]).cumsum(0).tolist()
    scopes_of_rows = torch.tensor([0, 2, 0, 1, 0, -1])  # no rank has rows of all, and none has rows of 3

    def run(rank):
        rows = slice(2 * rank, 2 * rank + 2)
        tokens = slice(ends[2 * rank], ends[2 * rank + 2])
        batch = rows_of(*lengths[rows], group_ids=groups[rows])
        world = torch.distributed.group.WORLD
        spread = hpo.advantages.over_ranks(E.edge_grpo, world, tables=True)(own[rows], entropy[tokens], batch)
        shared = hpo.advantages.over_ranks(E.gtpo, world, tables=True)(right[rows], entropy[tokens], batch)
        table = E.fit_scopes(entropy[tokens], process_group=world)
        pivot = E.fit_pivot(entropy[tokens], batch, process_group=world)
        named = E.fit_scopes(own[rows], scopes_of_rows[rows], scopes=4, process_group=world)
        factor = E.aepo_ruc(entropy[tokens], batch, state=table).advantage_factor
        return spread, shared, factor, torch.cat(pivot), torch.stack(named)

    spread, shared, factor, pivots, named = zip(*three_ranks(run), strict=True)
    whole = rows_of(*lengths, group_ids=groups)
    torch.testing.assert_close(torch.cat(spread), E.edge_grpo(own, entropy, whole))
    torch.testing.assert_close(torch.cat(shared), E.gtpo(right, entropy, whole))
    torch.testing.assert_close(torch.cat(factor), E.aepo_ruc(entropy, whole).advantage_factor)
    assert torch.equal(named[0], named[1]) and torch.equal(named[0], named[2])
    torch.testing.assert_close(named[0], torch.stack(E.fit_scopes(own, scopes_of_rows, scopes=4)))
    for pivot in pivots:
        torch.testing.assert_close(pivot, torch.cat(E.fit_pivot(entropy, whole)))
