"""The operator behind the estimators: terms of every structure, alone and together, on every backend."""

import dataclasses
import importlib
import itertools
import math

import hypothesis
import pytest
import torch
from breadth import at_length, few, tried  # noqa: F401 (the first is a fixture)
from hypothesis import strategies as st

from hpo_core import ops, testing
from hpo_core.advantages import Center, EpsMode, GroupTerm, Part, Presence, Scale, Share, Term, combine
from hpo_core.specs import GroupInputs, GroupNormalisation
from hpo_core.testing.budget import UNIT

RULES = [
    *(
        GroupTerm(center, scale, ddof, eps, mode, keep)
        for center, scale, ddof, (eps, mode), keep in itertools.product(
            Center, Scale, (0, 1), [(0.0, EpsMode.ADD), *((0.3, mode) for mode in EpsMode)], (False, True)
        )
    ),
    GroupTerm(part=Part.MEAN, coefficient=-0.5),
]
# One rule of each structure, which specialises a kernel; other options are numbers.
PATHS = list({(rule.center, rule.scale, rule.eps_mode, rule.part): rule for rule in RULES}.values())


def drawn(seed, units, terms, *, masks=True):
    """Values around 5 or 0, small integers so that equal means are equal to the bit, in groups of many sizes."""
    draw = torch.Generator().manual_seed(seed)

    def below(limit, *shape):
        return torch.randint(0, limit, shape, generator=draw)

    def term():
        values = below(9, units) + (1.0 - 5.0 * int(below(2)))
        values[below(20, units) == 0] = (math.nan, math.inf, -math.inf)[int(below(3))]
        ids = None if below(6) == 0 else below(max(units // 4, 1) + 1, units) - 1
        weights = below(4, units) / 2.0 if below(2) else None
        return values, ids, weights

    found = [term() for _ in range(terms)]
    if terms > 1 and below(2):  # two terms share a grouping
        found[-1] = (found[-1][0], *found[0][1:])
    keywords = {}
    for name in ("mask", "apply_mask"):
        if masks and below(2):
            keywords[name] = below(4, units) > 0
    return found, keywords


def together(drawn_terms, rules):
    return [Term(values, ids, rule, weights) for (values, ids, weights), rule in zip(drawn_terms, rules, strict=True)]


def moved(terms, keywords, backend):
    device = testing.device_of(backend)
    terms = [Term(*(part.to(device) if isinstance(part, torch.Tensor) else part for part in term)) for term in terms]
    return terms, {name: mask.to(device) for name, mask in keywords.items()}


def assert_exact(backend, terms, keywords, **share):
    exact = [term._replace(values=term.values.double()) for term in terms]
    expected = combine(exact, **keywords, **share, backend="reference")
    size = sum(combine([term], **keywords, backend="reference").abs() for term in exact)
    terms, keywords = moved(terms, keywords, backend)
    got = combine(terms, **keywords, **share, backend=backend)
    assert got.dtype == torch.float32
    limit = 4 * UNIT * (size if share.get("share", Share.SUM) is Share.SUM else expected.abs() + size)
    error = (got.cpu().double() - expected).abs()
    assert bool((error <= limit + 1e-30).all()), (got, expected)
    assert not bool((torch.signbit(got) & (got == 0)).any())  # never -0
    return got


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize(("part", "scale"), sorted({(rule.part, rule.scale) for rule in RULES}))
def test_every_rule(backend, part, scale):
    rules = tried(backend, RULES, PATHS)
    for seed, rule in enumerate(rule for rule in rules if rule.scale is scale and rule.part is part):
        terms, keywords = drawn(seed, 24, 1)
        assert_exact(backend, together(terms, [rule]), keywords)


@pytest.mark.parametrize("share", Share)
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    seed=st.integers(0, 9999),
    units=st.integers(0, 40),
    rules=st.lists(st.sampled_from(RULES), min_size=1, max_size=8),
    presence=st.lists(st.sampled_from(list(Presence)), min_size=8, max_size=8),
    coefficients=st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0)), min_size=8, max_size=8),
    numbers=st.sampled_from(((0.0, 0.0), (1e-6, 0.0), (0.0, 1.0))),
)
def test_terms_together(backend, share, seed, units, rules, presence, coefficients, numbers):
    rules = [
        dataclasses.replace(rule, presence=present, coefficient=coefficient)
        for rule, present, coefficient in zip(rules, presence, coefficients, strict=False)
    ]
    terms, keywords = drawn(seed, units, len(rules))
    share_eps, share_least = numbers
    together_terms = together(terms, rules)
    assert_exact(backend, together_terms, keywords, share=share, share_eps=share_eps, share_least=share_least)


@pytest.mark.parametrize(
    ("share", "units"),
    [(Share.SUM, 700), (Share.COUNT, 700), (Share.SUM, 9000), pytest.param(Share.COUNT, 9000, marks=pytest.mark.long)],
)
def test_many_units(backend, units, share):
    """There are more units than one block reads, in unsorted groups of many sizes with ids of 62 bits."""
    rules = [GroupTerm(), GroupTerm(scale=Scale.ABSOLUTE, presence=Presence.SPREAD), GroupTerm(scale=Scale.BATCH)]
    draw = torch.Generator().manual_seed(units)
    values = torch.randint(1, 10, (3, units), generator=draw).float()
    ids = torch.randint(0, units // 6, (units,), generator=draw)
    far = torch.randint(1 << 62, (units,), generator=draw)[torch.randint(0, 40, (units,), generator=draw)]
    terms = [Term(values[0], ids, rules[0]), Term(values[1], far, rules[1]), Term(values[2], ids, rules[2], values[1])]
    got = combine(moved(terms, {}, backend)[0], share=share, backend=backend).cpu()
    parts = [vectorised(term) for term in terms]
    if share is Share.SUM:
        expected = sum(part for part, _ in parts)
    else:
        total = sum(part * count for part, count in parts)
        expected = total / sum(count for _, count in parts)
    assert (got.double() - expected).abs().max() <= 8 * UNIT * sum(part.abs() for part, _ in parts).max()


@pytest.mark.parametrize("scale", [Scale.GROUP, Scale.BATCH, Scale.ABSOLUTE])
def test_equal_values_over_the_least_eps_are_0(scale, backend):
    """No double holds the reciprocal of that eps."""
    terms = [Term(torch.full((4,), 3.0), torch.tensor([0, 0, 1, 1]), GroupTerm(scale=scale, eps=1e-310))]
    assert not assert_exact(backend, terms, {}).any()


@pytest.mark.parametrize(
    ("one", "expected"), [({}, 4.0), ({"part": Part.MEAN}, 5.0), ({"keep_singletons": True}, 5.0)], ids=str
)
def test_a_group_of_one_counts_with_its_mean_or_its_raw_value(backend, one, expected):
    own = Term(torch.tensor([1.0, 3, 6]), torch.tensor([0, 0, 1]), GroupTerm(scale=Scale.NONE, **one))
    other = Term(torch.tensor([1.0, 3, 8]), torch.zeros(3).long(), GroupTerm(scale=Scale.NONE))
    terms, _ = moved([own, other], {}, backend)
    assert combine(terms, share=Share.EQUAL, backend=backend)[2] == expected


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("backend", ["triton"])
def test_terms_of_many_units_add_up(backend, count, monkeypatch):
    """More units than each program reads go term by term, which the sum of the earlier terms waits for."""
    monkeypatch.setattr(importlib.import_module("hpo_core._triton.advantages"), "SCANNED", 8)
    draw = torch.Generator().manual_seed(count)
    terms = [
        Term(torch.randint(1, 10, (12,), generator=draw).float(), torch.randint(0, 4, (12,), generator=draw), rule)
        for rule in (GroupTerm(), GroupTerm(scale=Scale.ABSOLUTE), GroupTerm(scale=Scale.NONE))[:count]
    ]
    assert_exact(backend, terms, {})


def vectorised(term):
    """The three rules of test_many_units by scatters, and the members of each unit's group (0: not present)."""
    values = term.values.double()
    weights = torch.ones_like(values) if term.weights is None else term.weights.double()
    _, dense = term.ids.unique(return_inverse=True)

    def of_group(x):
        return torch.zeros(int(dense.max()) + 1, dtype=torch.float64).index_add(0, dense, x)[dense]

    weight, count = of_group(weights), of_group(torch.ones_like(values))
    centred = values - of_group(weights * values) / weight
    if term.rule.scale is Scale.GROUP:
        scale = (of_group(weights * centred.square()) / (weight - 1).clamp(min=1e-300)).sqrt()
    elif term.rule.scale is Scale.ABSOLUTE:
        scale = of_group(weights * centred.abs()) / weight
    else:
        mean = (weights * values).sum() / weights.sum()
        scale = ((weights * (values - mean).square()).sum() / (weights.sum() - 1)).sqrt()
    part = torch.where(count > 1, centred / (scale + term.rule.eps), 0.0)
    silent = count == 1
    if term.rule.presence is Presence.SPREAD:
        silent |= of_group(weights * centred.square()) < 1e-12
    return part, torch.where(silent, 0.0, count)


def test_integer_weights_are_copies(backend):
    """P10: a weight of k is the unit k times."""
    draw = torch.Generator().manual_seed(3)
    values, ids = torch.randn(30, generator=draw), torch.arange(30) % 4
    weights = torch.randint(1, 4, (30,), generator=draw)
    copies = torch.repeat_interleave(torch.arange(30), weights)
    for scale, ddof in itertools.product((Scale.NONE, Scale.GROUP, Scale.BATCH, Scale.ABSOLUTE), (0, 1)):
        rule = GroupTerm(scale=scale, ddof=ddof)
        (weighted, copied), _ = moved(
            [Term(values, ids, rule, weights.float()), Term(values[copies], ids[copies], rule)], {}, backend
        )
        weighted, copied = (combine([term], backend=backend).cpu() for term in (weighted, copied))
        assert torch.allclose(weighted[copies], copied, rtol=0, atol=4 * UNIT)


@hypothesis.given(
    constant=st.floats(-(2.0**90), 2.0**90, width=32), size=st.integers(2, 40), rule=st.sampled_from(RULES)
)
def test_equal_values_get_exactly_zero(backend, constant, size, rule):
    """P12 holds with weights, too, and in any order, for terms that are a deviation alone."""
    if rule.part is Part.MEAN:
        return
    ids, weights = torch.arange(3 * size) % 3, 0.1 + torch.rand(3 * size)
    for given in (None, weights):
        terms, _ = moved([Term(torch.full((3 * size,), constant), ids, rule, given)], {}, backend)
        assert not combine(terms, backend=backend).any()


@pytest.mark.usefixtures("at_length")
def test_same_bits_on_any_number_of_threads(backend):
    rules = [GroupTerm(), GroupTerm(scale=Scale.ABSOLUTE, part=Part.NORMALISED), GroupTerm(part=Part.MEAN)]
    for units in few(backend, (300, 3000)):
        found, _ = drawn(8, units, 3, masks=False)
        ids = torch.arange(units) % 5 * 1000 + 7
        terms, _ = moved(
            [Term(values, ids, rule, weights) for (values, _, weights), rule in zip(found, rules, strict=True)],
            {},
            backend,
        )
        outs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append(combine(terms, share=Share.EQUAL, backend=backend))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_errors_name_the_argument():
    values, ids = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="terms: expected at least one"):
        combine([])
    with pytest.raises(ValueError, match="terms: expected 1 to 8"):
        combine([Term(values, ids)] * 9)
    with pytest.raises(TypeError, match="weights: expected floating point"):
        combine([Term(values, ids, weights=ids)])
    with pytest.raises(ValueError, match="values: expected shape"):
        combine([Term(values, ids), Term(values[:2], ids[:2])])
    with pytest.raises(ValueError, match="coefficient: expected numbers >= 0"):
        combine([Term(values, ids, GroupTerm(coefficient=-1.0))], share=Share.EQUAL)
    with pytest.raises(ValueError, match="share_eps"):
        combine([Term(values, ids)], share=Share.EQUAL, share_eps=math.inf)
    with pytest.raises(ValueError, match="coefficient: expected a finite"):
        GroupTerm(coefficient=math.inf)
    with pytest.raises(TypeError, match=r"share: expected one of Share \(SUM, .*\), got 'sum'"):
        combine([Term(values, ids)], share="sum")
    wrong = {"eps": "0.1", "coefficient": None, "keep_singletons": "no", "scale": Center.MEAN}
    wrong |= dict.fromkeys(("center", "eps_mode", "part", "presence"), "mean")
    for name, value in wrong.items():
        with pytest.raises(TypeError, match=rf"^{name}: expected "):
            GroupTerm(**{name: value})


def test_specs_survive_the_operator():
    for first in range(0, len(RULES), 5):
        for share in (Share.SUM, Share.COUNT):
            rules = tuple(dataclasses.replace(rule, coefficient=2.0) for rule in RULES[first : first + 5])
            spec = GroupNormalisation(rules, share, 1e-6, 0.5)
            rebuilt = ops.advantages._groups_of(*ops.advantages._numbers_of_groups(spec))
            assert rebuilt == spec and type(rebuilt.terms[0].center) is Center


def test_opcheck():
    (terms, _), rules = drawn(1, 12, 2), [GroupTerm(), GroupTerm(scale=Scale.ABSOLUTE)]
    values, ids, weights = zip(*terms, strict=True)
    inputs = GroupInputs([*values], [*ids], [*weights], values[0] > 2, None)
    spec = ops.advantages._numbers_of_groups(GroupNormalisation(tuple(rules), Share.EQUAL))
    torch.library.opcheck(torch.ops.hpo_core.group_normalise, (*inputs, *spec, ""))
