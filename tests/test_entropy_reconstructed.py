"""Entropy methods that are reconstructed, against plain loops, and D3S' tokens over ranks."""

import functools
import math
import statistics
from collections import Counter

import pytest
import torch
from naive_entropy import close, on_random_batches

import hpo_core as hpo
from hpo_core import entropy as E
from hpo_core import testing
from hpo_core.entropy import reconstructed as R


def test_every_function_says_that_it_is_reconstructed():
    for name in R.__all__:
        assert getattr(R, name).provenance is hpo.gates.Provenance.RECONSTRUCTED


@on_random_batches
def test_funrl(drawn):
    """An advantage that is not finite becomes 0, without a bonus."""
    own, thought = drawn.normal(len(drawn.rows)), drawn.draw.random(drawn.tokens) < 0.6
    own[:1] = [math.inf if drawn.broken else math.nan][: len(own)]
    expected = []
    for row, places in enumerate(drawn.rows):
        numbers = [drawn.entropy[t] for t in places if thought[t]]
        bonus = 0.3 * min(statistics.fmean(numbers), abs(own[row]) / 1.5) if numbers else 0.0
        expected.append(own[row] + bonus if row > 0 else 0.0)
    given = drawn.tensor(own), drawn.tensor(drawn.entropy), drawn.tensor(thought), drawn.batch
    drawn.agrees(R.funrl(*given, alpha=0.3, kappa=1.5, backend=drawn.backend), expected)


@on_random_batches
def test_semantic_entropy(drawn):
    """Its two factors are tried, too: answers count the same, or by log-probabilities, one of which is unknown."""
    count = int(drawn.draw.integers(0, 9))
    groups, clusters = drawn.draw.integers(-1, 2, count), drawn.draw.integers(-1, 3, count)
    own, mean_logp = drawn.normal(count), [3 * x for x in drawn.normal(count)]
    mean_logp[:1] = [math.nan][:count]
    masses = {"even": [1.0] * count, "weighed": [math.exp(x) for x in mean_logp]}
    entropies, mean_surprises, sizes = ({kind: [] for kind in masses} for _ in range(3))
    for kind, mass in masses.items():
        for unit in range(count):
            same = [other for other in range(count) if groups[other] == groups[unit] >= 0 <= clusters[other]]
            same = [other for other in same if not math.isnan(mass[other])]
            share = Counter()
            for other in same:
                share[clusters[other]] += mass[other] / sum(mass[each] for each in same)
            entropies[kind].append(-sum(p * math.log(p) for p in share.values()))
            mean_surprises[kind].append(-statistics.fmean(map(math.log, share.values())) if share else 0.0)
            sizes[kind].append(math.log(len(same)) if len(same) > 1 else math.inf)
    ids = torch.tensor(clusters, device=drawn.device), torch.tensor(groups, device=drawn.device)
    close(R.semantic_entropy(*ids, backend=drawn.backend), entropies["even"], 1e-5)
    for kind, given in (("even", None), ("weighed", drawn.tensor(mean_logp))):
        run = functools.partial(R.seed_grpo, drawn.tensor(own), *ids, alpha=0.5, mean_logp=given, backend=drawn.backend)
        paper = [a * (1 - 0.5 * se / log) for a, se, log in zip(own, mean_surprises[kind], sizes[kind], strict=True)]
        code = [a / (1 + 0.5 * se / log) for a, se, log in zip(own, entropies[kind], sizes[kind], strict=True)]
        close(run(), paper, 2e-5)
        close(run(compat="code"), code, 2e-5)


@pytest.mark.parametrize("answers", [2, 3, 7, 12])
def test_answers_that_all_differ_teach_seed_grpo_nothing(answers, backend):
    """Their surprise is the logarithm of their number to the bit: what rounding leaves would be an advantage."""
    ids = torch.arange(answers, device=testing.device_of(backend))
    given = torch.ones(answers, device=ids.device), ids, None
    assert not R.seed_grpo(*given, alpha=1.0, backend=backend).any()


def test_seed_grpo_of_one_meaning_is_the_advantage_to_the_bit(backend):
    logp = torch.tensor([-0.3, -1.7, -0.9], device=testing.device_of(backend))
    advantages, ids = logp + 1, torch.zeros_like(logp, dtype=torch.int64)
    for compat in ("paper", "code"):
        got = R.seed_grpo(advantages, ids, None, alpha=0.5, mean_logp=logp, compat=compat, backend=backend)
        assert got.equal(advantages)


@on_random_batches
def test_dcpo_and_rlsp(drawn):
    old = drawn.poisoned([-abs(x) for x in drawn.normal()])
    target = drawn.poisoned([x + 0.5 * y for x, y in zip(old, drawn.normal(), strict=True)])
    weight = R.dcpo_regulariser(drawn.tensor(target), drawn.tensor(old), drawn.batch, ratio_cap=1.5).weight
    inside = {t for row in drawn.valid for t in row}
    expected = [min(math.exp(target[t] - old[t]), 1.5) if t in inside else 1.0 for t in range(drawn.tokens)]
    drawn.agrees(weight, expected)
    right, explored = drawn.draw.random(4) < 0.5, [0.25, math.nan, 1.0, 0.5]
    got = R.rlsp_rewards(drawn.tensor(right), drawn.tensor(explored), share=0.25)
    close(got, [0.75 * r + 0.25 * (0.0 if math.isnan(e) else e) for r, e in zip(right, explored, strict=True)])


def test_the_band_is_that_of_entropies():
    entropy = torch.tensor([0.2, 0.9, 1.4], requires_grad=True)
    ends = {"low": torch.tensor([0.3]), "high": torch.tensor([1.2])}
    R.openvl_band(entropy, hpo.PackedBatch.from_lengths([3]), torch.tensor([0.5]), coefficient=4.0, **ends).backward()
    assert entropy.grad.tolist() == [-2, 0, 2]
    assert E.target_temperature(torch.tensor(0.5), low=0.75, high=1.25).item() == 1.25
    assert E.target_temperature(torch.tensor(0.75), low=0.75, high=1.25).item() == 0.75


def test_d3s_tokens_over_ranks(three_ranks):
    draw = torch.Generator().manual_seed(3)
    lengths, entropy = [2, 0, 3, 2, 1, 4], torch.rand(12, generator=draw).round(decimals=1)
    own, ends = torch.tensor([1.0, 1, 0.5, 1, 0, 0.5]), torch.tensor([0, *lengths]).cumsum(0).tolist()

    def run(rank):
        rows, tokens = slice(2 * rank, 2 * rank + 2), slice(ends[2 * rank], ends[2 * rank + 2])
        batch, world = hpo.PackedBatch.from_lengths(lengths[rows]), torch.distributed.group.WORLD
        return E.d3s_tokens(entropy[tokens], own[rows], batch, share="0.4", process_group=world).mask

    whole = E.d3s_tokens(entropy, own, hpo.PackedBatch.from_lengths(lengths), share="0.4").mask
    assert torch.equal(torch.cat(three_ranks(run)), whole) and whole.sum() == 5


ERRORS = [
    (lambda: R.rlsp_rewards(torch.ones(1).bool(), torch.ones(1), share=2.0), r"share: expected a number in \[0, 1\]"),
    (
        lambda: R.dcpo_regulariser(torch.ones(1), torch.ones(1), hpo.PackedBatch.from_lengths([1]), ratio_cap=0.5),
        "ratio_cap: expected a ratio >= 1, got 0.5",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_an_answer_without_a_likelihood_has_no_meaning_for_seed_grpo():
    advantages, meanings = torch.ones(3), torch.tensor([0, 1, 1])
    logp = torch.tensor([-1.0, -1.0, math.nan])
    found = R.seed_grpo(advantages, meanings, None, alpha=0.5, mean_logp=logp)
    expected = R.seed_grpo(advantages, torch.tensor([0, 1, -1]), None, alpha=0.5, mean_logp=logp)
    assert torch.equal(found, expected)
