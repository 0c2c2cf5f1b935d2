"""Entropy presets: the worked numbers of their sources, and plain loops over random packed batches."""

import math
import re
import statistics
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from naive_entropy import clamp, close, nearest, on_random_batches, std

import hpo_core as hpo
from hpo_core import entropy as E

ONE_ROW = hpo.PackedBatch.from_lengths([3])
H7 = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
SEVEN = hpo.PackedBatch.from_lengths([7])


# ------------------------------------------------------------------------------------------------------ worked numbers


def test_entropy_advantage_of_the_source():
    for advantage, expected in ((1.0, [1.02, 1.2, 1.5]), (-1.0, [-0.98, -0.8, -0.5]), (0.1, [0.12, 0.15, 0.15])):
        given = torch.tensor([advantage]), torch.tensor([0.05, 0.5, 2.0])
        close(E.entropy_advantage(*given, ONE_ROW).advantage_addend + advantage, expected)


def test_what_other_families_take_from_the_sources():
    """D3S' samples, DCPO's bounds, the clip of AEPO, and RL-ZVP."""
    advantages = torch.tensor([1.5, 0.5, 0.5, -0.5, -1, -1])
    kept = hpo.advantages.d3s_samples(advantages, None, 3)
    assert kept.nonzero().flatten().tolist() == [0, 4, 5]
    assert advantages[kept].var(correction=0).item() == pytest.approx(1.388889, abs=1e-6)

    low, high = hpo.gates.dcpo_bounds(torch.tensor([0.9, 0.01]).log()).bounds
    close(low, [0.768742, 0.5])
    close(high, [1.187184, 5])

    logp = torch.tensor([0.5, -0.5, 0.1], requires_grad=True)
    batch, gate = hpo.PackedBatch.from_lengths([1, 1, 1]), hpo.gates.ce_gppo(0.2, 0.28, 0.0, 1.0)
    hpo.policy_loss(
        logp, torch.zeros(3), torch.tensor([1.0, -1, 1]), batch, gate, weights=torch.ones(3)
    ).loss.backward()
    close(-logp.grad, [1.28, 0, 1.105171])

    entropy = torch.tensor([0.2, 0.4, 0.9])
    for reward, expected in ((1.0, [0.02, 0.04, 0.09]), (0.0, [-0.07, -0.05, 0])):
        given = torch.tensor([reward]), None, entropy, ONE_ROW, torch.ones(1)
        close(hpo.advantages.rl_zvp(*given), expected)


def test_hapo_of_the_source():
    low, high = E.hapo(H7, SEVEN).bounds
    close(1 - low, [0.4, 0.36, 0.32, 0.28, 0.24, 0.2, 0.2])
    close(high - 1, [0.28] * 6 + [0.56])
    low, high = E.hapo(H7, SEVEN, compat="code").bounds
    close(1 - low, [0.2] * 7)
    close((high - 1) / 0.28 - 1, [1, 0.8, 0.6, 0.4, 0.2, 0, 1])
    ratio = torch.tensor([1, 1.12, 0.95, 1, 1.05, 1, 1.2])
    given = H7, ratio.log(), torch.zeros(7), SEVEN
    close(-E.hapo_redistribution(*given).advantage_factor, [0, -0.2, -0.4, -0.6, -0.8, -1, -2])
    adapted = E.hapo_redistribution(*given, bounds=E.hapo(H7, SEVEN).bounds)
    close(-adapted.advantage_factor, [0, -0.2, -0.4, -0.6, -0.8, -1, -1])
    state = E.fit_pivot(H7, SEVEN)
    code = E.hapo_temperature(H7, SEVEN, state, tau=0.05, compat="code")
    close(code, [1.05, 1.04, 1.03, 1.02, 1.01, 1, 1.05])
    paper = [0.823223, 0.858579, 0.893934, 0.929289, 0.964645, 1, 1.035355]
    close(E.hapo_temperature(H7, SEVEN, state), paper)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hapo_s_temperatures_after_equal_entropies(backend, dtype):
    """They are the base: a logarithm of float32 beside one of float64 is no deviation."""
    for own in (backend, "reference"):
        state = E.fit_pivot(torch.full((7,), 0.7, dtype=dtype), SEVEN, backend=own)
        assert E.hapo_temperature(H7.to(dtype), SEVEN, state).tolist() == [1.0] * 7


def test_hapo_s_deviation_of_entropies_that_hardly_differ(backend):
    place, entropy = hpo.testing.device_of(backend), 100 + 1e-3 * torch.linspace(-1, 1, 9)
    batch = hpo.PackedBatch.from_lengths([9])
    state = E.fit_pivot(entropy.to(place), batch.to(place), backend=backend).to("cpu")
    logs = (entropy.double() / state.pivot).log()
    deviation = logs.square().mean().sqrt()
    assert state.deviation.item() == pytest.approx(deviation.item(), rel=1e-6)
    close(E.hapo_temperature(entropy, batch, state), (1 + 0.1 * logs / deviation).tolist())


def test_hapo_clamps_as_fit_pivot_does():
    """The pivot is 1e-8 in float32, and the greatest entropy the next number."""
    least = torch.tensor(1e-8)
    entropy = torch.cat((torch.zeros(6), torch.nextafter(least, torch.ones(()))[None]))
    close(E.hapo(entropy, SEVEN).bounds[1], [1.28] * 6 + [1.56])


def test_aepo_ruc_of_the_source():
    factor = E.aepo_ruc(torch.tensor([0.2, 0.4, 0.9]), ONE_ROW).advantage_factor
    close(factor, [0.83359, 0.94453, 1.22188], 5e-6)
    assert E.aepo_ruc(torch.tensor([0.5]), hpo.PackedBatch.from_lengths([1])).advantage_factor.tolist() == [1.0]
    assert E.aepo_ruc(torch.tensor([0.2, 0.4, 0.9]), ONE_ROW, least=0.9).advantage_factor.min() == 0.9


def test_steer_of_the_source():
    logp, entropy = torch.tensor([0.9, 0.5, 0.1]).log(), torch.tensor([0.3, 0.7, 2.3])
    change = E.entropy_change(logp, logp, entropy, torch.ones(1), ONE_ROW)
    close(change, [0.019464, 0.003426, -0.002327])
    close(E.steer(change, ONE_ROW).weight, [0.804799, 0.962492, 0.974376])
    close(E.steer_linear(change, ONE_ROW).weight, [0.8, 1.174329, 1.2])
    assert E.steer_linear(torch.ones(3), ONE_ROW).weight.tolist() == pytest.approx([1.2] * 3)


def test_the_change_of_an_entropy_is_finite_and_of_a_sure_token_0():
    """A log-ratio of 999 saturates at 60; a probability that rounding has lifted above 1 is 1."""
    logp, old_logp, entropy = torch.tensor([-0.5, 1e-6]), torch.tensor([-999.5, 0.0]), torch.tensor([0.75, 0.5])
    far, sure = E.entropy_change(logp, old_logp, entropy, torch.ones(1), hpo.PackedBatch.from_lengths([2])).tolist()
    assert far == pytest.approx(math.exp(60) * (1 - math.exp(-0.5)) * 0.25) and sure == 0


# --------------------------------------------------------------------------------------------------------- plain loops


@on_random_batches
def test_entropy_advantage(drawn):
    own = drawn.normal(len(drawn.rows))
    selection = E.entropy_advantage(drawn.tensor(own), drawn.tensor(drawn.entropy), drawn.batch, alpha=0.3, kappa=1.5)
    expected = drawn.of_tokens(lambda t: min(0.3 * drawn.entropy[t], abs(own[drawn.row_of[t]]) / 1.5), 0.0)
    drawn.agrees(selection.advantage_addend, expected)
    shaped = torch.tensor([own[drawn.row_of[t]] + expected[t] for t in drawn.usable])
    assert all(a * own[drawn.row_of[t]] >= 0 for a, t in zip(shaped.tolist(), drawn.usable, strict=True))


def relative(drawn, below=1.0):
    """h of every usable token, by its definition with logarithms."""
    logs = {t: math.log(max(drawn.entropy[t], 1e-8)) for t in drawn.usable}
    if not logs:
        return {}
    pivot, least, most = nearest(logs.values(), Fraction(4, 5)), min(logs.values()), max(logs.values())
    return {
        t: (x - pivot) / (most - pivot) if x > pivot else below * (x - pivot) / (pivot - least) if x < pivot else 0.0
        for t, x in logs.items()
    }


@on_random_batches
def test_hapo(drawn):
    entropy = drawn.tensor(drawn.entropy)
    for compat, below in (("paper", 1.0), ("code", -1.0)):
        h = relative(drawn, below)
        low, high = E.hapo(entropy, drawn.batch, compat=compat, backend=drawn.backend).bounds
        drawn.agrees(low, drawn.of_tokens(lambda t, h=h: 1 - 0.2 * (1 - min(h[t], 0)), 1.0))
        drawn.agrees(high, drawn.of_tokens(lambda t, h=h: 1 + 0.28 * (1 + max(h[t], 0)), 1.0))
    h = relative(drawn)
    assert all(-1 <= x <= 1 for x in h.values())
    new, old = drawn.poisoned(drawn.normal()), drawn.poisoned(drawn.normal())
    new = [b + 0.2 * a for a, b in zip(new, old, strict=True)]
    new = drawn.poisoned(new)
    ratio = {t: math.exp(new[t] - old[t]) for t in drawn.usable}
    zones = {
        None: lambda t: 0.9 <= ratio[t] <= 1.14,
        (low, high): lambda t: 1 - 0.1 * (1 - min(h[t], 0)) < ratio[t] < 1 + 0.14 * (1 + max(h[t], 0)),
    }
    low, high = E.hapo(entropy, drawn.batch, backend=drawn.backend).bounds
    for bounds, zone in zip((None, (low, high)), zones.values(), strict=True):
        far = all(abs(ratio[t] - edge) > 1e-4 for t in drawn.usable for edge in (0.9, 1.14)) or bounds is not None
        got = E.hapo_redistribution(
            entropy, drawn.tensor(new), drawn.tensor(old), drawn.batch, bounds=bounds, backend=drawn.backend
        )
        expected = drawn.of_tokens(lambda t, zone=zone: 1 + h[t] if (h[t] > 0) != zone(t) else 1.0, 1.0)
        if far:
            drawn.agrees(got.advantage_factor, expected)


@on_random_batches
def test_hapo_is_free_of_the_unit_and_fitted_once(drawn):
    """The state of a whole batch gives the bounds of each micro-batch."""
    entropy = drawn.tensor(drawn.entropy)
    low, high = E.hapo(entropy, drawn.batch, backend=drawn.backend).bounds
    if min((drawn.entropy[t] for t in drawn.usable), default=1) > 1e-6:
        scaled = E.hapo(entropy * 4, drawn.batch, backend=drawn.backend).bounds
        for bound, other in zip((low, high), scaled, strict=True):
            drawn.agrees(other, bound.tolist())
    state = E.fit_pivot(entropy, drawn.batch, backend=drawn.backend)
    scopes = E.fit_scopes(entropy, mask=drawn.tensor([t in drawn.usable for t in range(drawn.tokens)]).bool(),
                          backend=drawn.backend)  # fmt: skip
    factor = E.aepo_ruc(entropy, drawn.batch, backend=drawn.backend).advantage_factor
    for rows in ([0], range(1, drawn.batch.rows)):
        if not rows or drawn.batch.rows < 2:
            continue
        part, tokens = drawn.batch.select(list(rows))
        of_part = E.hapo(entropy[tokens], part, state=state, backend=drawn.backend).bounds
        assert torch.equal(of_part[0].nan_to_num(), low[tokens].nan_to_num())
        assert torch.equal(of_part[1].nan_to_num(), high[tokens].nan_to_num())
        parts = E.aepo_ruc(entropy[tokens], part, state=scopes, backend=drawn.backend).advantage_factor
        assert torch.equal(parts.nan_to_num(), factor[tokens].nan_to_num())


@on_random_batches
def test_aepo_ruc(drawn):
    got = E.aepo_ruc(drawn.tensor(drawn.entropy), drawn.batch, alpha=0.3, least=0.8, backend=drawn.backend)
    numbers = [drawn.entropy[t] for t in drawn.usable]
    spread = std(numbers) if len(set(numbers)) > 1 else 0.0
    mean = statistics.fmean(numbers) if numbers else 0.0

    def factor(t):
        return max(0.8, 1 + (0.3 * (drawn.entropy[t] - mean) / spread if spread else 0.0))

    drawn.agrees(got.advantage_factor, drawn.of_tokens(factor, 1.0))


@on_random_batches
def test_steer(drawn):
    own, logp = drawn.normal(len(drawn.rows)), drawn.poisoned([-abs(x) for x in drawn.normal()])
    old = drawn.poisoned([x - 0.1 for x in logp])
    given = (drawn.tensor(each) for each in (logp, old, drawn.entropy, own))
    change = E.entropy_change(*given, drawn.batch)
    omega = {}
    for t in drawn.usable:
        p = math.exp(logp[t])
        omega[t] = own[drawn.row_of[t]] * math.exp(logp[t] - old[t]) * (1 - p) * (logp[t] + drawn.entropy[t])
    drawn.agrees(change, drawn.of_tokens(omega.__getitem__, 0.0))
    sizes = {t: abs(x) for t, x in omega.items()}
    k = -math.log(0.7) / max(max(sizes.values(), default=0.0), 0.02)
    got = E.steer(change, drawn.batch, least=0.7, backend=drawn.backend).weight
    drawn.agrees(got, drawn.of_tokens(lambda t: clamp(math.exp(-k * sizes[t]), 0.7, 1.0), 1.0))
    got = E.steer_linear(change, drawn.batch, backend=drawn.backend).weight
    least, most = min(sizes.values(), default=0.0), max(sizes.values(), default=0.0)
    span = most - least
    drawn.agrees(got, drawn.of_tokens(lambda t: 1.2 - (0.4 * (sizes[t] - least) / span if span else 0), 1.0), 1e-5)


# ------------------------------------------------------------------------------------------------- statistics and maps


def test_a_state_is_that_of_the_step():
    """Micro-batches have the factors of the whole, not of their own statistics."""
    entropy, whole = torch.tensor([0.2, 0.4, 0.9, 2.0]), hpo.PackedBatch.from_lengths([3, 1])
    expected, state = E.aepo_ruc(entropy, whole).advantage_factor, E.fit_scopes(entropy)
    for rows in ([0], [1]):
        part, tokens = whole.select(rows)
        assert torch.equal(E.aepo_ruc(entropy[tokens], part, state=state).advantage_factor, expected[tokens])


@on_random_batches
def test_fit_scopes(drawn):
    """A table of some units answers for others with the same ids."""
    ids = drawn.draw.integers(-1, 3, drawn.tokens)
    members = [t for t in drawn.usable if ids[t] >= 0]
    mask = drawn.tensor([t in drawn.usable for t in range(drawn.tokens)]).bool()
    table = E.fit_scopes(drawn.tensor(drawn.entropy), drawn.tensor(ids), mask=mask, backend=drawn.backend)
    got = table.at(drawn.tensor([0, 7, 2, -1, 1]).long())
    for at, scope in enumerate((0, 7, 2, -1, 1)):
        of = [drawn.entropy[t] for t in members if ids[t] == scope]
        mean = statistics.fmean(of) if of else 0.0
        expected = (len(of), mean, sum((x - mean) ** 2 for x in of), min(of, default=0.0), max(of, default=0.0))
        found = (got.members[at], got.mean[at], got.squares[at], got.least[at], got.greatest[at])
        assert [x.item() for x in found] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    named = E.fit_scopes(drawn.tensor(drawn.entropy), drawn.tensor(ids), scopes=5, mask=mask, backend=drawn.backend)
    assert named.ids.tolist() == [0, 1, 2, 3, 4]
    assert all(map(torch.equal, named[1:], table.at(named.ids)[1:]))


def test_two_knot_has_one_slope_on_each_side():
    x = torch.tensor([-2.0, 0.0, 0.5, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    value = E.two_knot(x, 0.25, low=(0.0, -1.0), high=(1.0, 2.0), most=3.0)
    assert value.tolist() == [2.25, 0.25, 0.25, 0.25, 3.0]
    value.sum().backward()
    assert x.grad.tolist() == [-1.0, 0.0, 0.0, 0.0, 0.0]


def test_windows_and_their_page_say_where_they_come_from():
    page = (Path(__file__).parents[1] / "docs/entropy.md").read_text()
    rows = re.findall(r"^\| `(\w+)\(.*\| (\w+) \|$", page, re.MULTILINE)
    assert dict(rows) == {each.name: each.provenance.name.lower() for each in (E.forking_tokens(), E.ares())}
    assert E.EntropyWindow("of the caller", E.ares().quantile).provenance is None


def test_the_pages_say_where_presets_come_from():
    docs = Path(__file__).parents[1] / "docs"
    tables, rest = ((docs / name).read_text() for name in ("entropy_presets.md", "entropy_evidence.md"))
    said = {}
    for line in tables.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            said |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[-1])
    known = [getattr(module, name) for module in (E, E.reconstructed) for name in module.__all__]
    presets = {each.__name__: each.provenance.name.lower() for each in known if getattr(each, "provenance", None)}
    assert said == presets
    ran = {name for line in rest.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)", line)}
    assert ran >= {name for name, label in said.items() if label == "verified"}, "a label without evidence"
    assert {said[name] for name in ran & said.keys()} <= {"verified"}, "evidence for another label"


ERRORS = [
    (lambda: E.hapo(H7, SEVEN, compat="official"), ValueError, "compat: expected one of paper, code, got 'official'"),
    (lambda: E.hapo(H7.bfloat16(), SEVEN), TypeError, "entropy: expected dtype float32 or float64, got bfloat16; 16"),
    (lambda: E.hapo(H7[:3], SEVEN), ValueError, r"entropy: expected shape \[T\]"),
    (lambda: E.entropy_advantage(torch.ones(1), H7, SEVEN, kappa=0.5), ValueError, "kappa: expected a number >= 1"),
    (
        lambda: E.entropy_advantage(torch.ones(1), H7, SEVEN, alpha=-0.4),
        ValueError,
        "alpha: expected a number >= 0, got -0.4; below, the entropy would turn signs",
    ),
    (
        lambda: E.epo(H7, SEVEN, torch.ones(1), H7, kappa=(1.2, 0.8)),
        ValueError,
        r"kappa: expected low <= high, got \(1.2, 0.8\)",
    ),
    (
        lambda: E.aepo_ruc(H7, SEVEN, state=E.fit_scopes(H7, torch.arange(7) // 4)),
        ValueError,
        "state: expected the table of one scope, from fit_scopes without ids, got 8 entries",
    ),
    (lambda: E.steer(H7, SEVEN, least=0.0), ValueError, r"least: expected a weight in \(0, 1\], got 0.0"),
    (
        lambda: E.ares_kappa(H7, H7, budget=1.0, rate=0.1, least=2.0, most=1.0),
        ValueError,
        r"least: expected a coefficient <= 1.0 \(most\), got 2.0",
    ),
    (lambda: E.fit_scopes(H7, scopes=3), ValueError, "scopes: it is the number of scopes that ids name"),
    (lambda: E.fit_scopes(H7, H7.long(), scopes=0), ValueError, "scopes: expected a count of at least 1, got 0"),
    (lambda: E.ares_penalty(E.AresPenalty.start(7), H7, least=1e3), ValueError, "least: expected a coefficient <= 100"),
    (lambda: E.target_temperature(H7[0], low=-1, high=1), ValueError, "low: expected a temperature above 0, got -1"),
    (lambda: E.target_temperature(H7[0], low=0, high=1), ValueError, "low: expected a temperature above 0, got 0"),
    (
        lambda: E.target_temperature(H7[0], low=1, high=math.inf),
        ValueError,
        "high: expected a temperature above 0, got",
    ),
    (
        lambda: E.skywork_coefficient(H7[0], H7[0], delta=-0.001),
        ValueError,
        "delta: expected a number >= 0, got -0.001",
    ),
    (lambda: E.trl_coefficient(H7[0], H7[0], most=-1.0), ValueError, "most: expected a number >= 0, got -1.0"),
    (
        lambda: E.skywork_coefficient(H7[0], H7[0], least=0.01),
        ValueError,
        r"least: expected a coefficient from 0 to 0.005 \(most\), got 0.01",
    ),
    (lambda: E.fit_pivot(H7, SEVEN, "80%"), TypeError, "quantile: expected a number, .*; write 0.8"),
    (lambda: E.epo_phase(-1, 120), ValueError, "step: expected a finite number >= 0, got -1"),
    (lambda: E.epo_phase(120, 120, gamma=-50), ValueError, r"gamma: .* weight e\^100.0 that float32 holds, got -50"),
    (lambda: E.ares_penalty(E.AresPenalty.start(7), H7, memory=1.5), ValueError, r"memory: .* in \[0, 1\], got 1.5"),
    (
        lambda: E.ares_penalty(E.AresPenalty.start(7), H7, most=1e39),
        ValueError,
        r"most: expected a number that float32 holds, or inf for no limit, got 1e\+39",
    ),
    (
        lambda: E.ares_penalty(E.AresPenalty.start(7), H7, least=1e39, most=math.inf),
        ValueError,
        r"least: expected a number that float32 holds, or -inf for no limit, got 1e\+39",
    ),
]
STEPS = hpo.PackedBatch(torch.tensor([0, 7]), cu_steps=torch.arange(8))
SINGLES = hpo.PackedBatch.from_lengths([1] * 7)
# With these all results were 0, or NaN at the next step, or at their limit.
COEFFICIENTS = [
    ("k", lambda number: E.empg(torch.ones(1), H7, STEPS, k=number)),
    ("k_next", lambda number: E.empg(torch.ones(1), H7, STEPS, k_next=number)),
    ("right", lambda number: E.ucas(H7, H7, H7, SINGLES, right=number)),
    ("wrong", lambda number: E.ucas(H7, H7, H7, SINGLES, wrong=number)),
    ("rate", lambda number: E.ares_penalty(E.AresPenalty.start(7), H7, rate=number)),
    ("rate", lambda number: E.ares_targets(H7, H7.long(), E.AresTargets.start(), rate=number)),
    ("integral_gain", lambda number: E.entropic(H7[0], H7[0], target=0.1, integral_gain=number)),
    ("delta", lambda number: E.trl_coefficient(H7[0], H7[0], delta=number)),
    (r"alpha\[1\]", lambda number: E.gtpo(torch.tensor([True]), H7, SEVEN, alpha=(1.0, number))),
]


@pytest.mark.parametrize("number", [math.inf, 1e39])
@pytest.mark.parametrize(("name", "call"), COEFFICIENTS, ids=[name for name, _ in COEFFICIENTS])
def test_a_coefficient_that_float32_does_not_hold_is_refused(name, call, number):
    expected = rf"^{name}: expected a finite number that float32 holds, got {re.escape(str(number))}"
    with pytest.raises(ValueError, match=expected):
        call(number)


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors(call, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        call()
