"""Random packed batches with entropies, and plain loops over them: what the entropy presets are held to."""

import functools
import itertools
import math
import statistics

import numpy as np
import pytest
import torch

import hpo_core as hpo
from hpo_core import testing

# The entropies of a seed: distinct, with ties, all equal, some of them 0.
KINDS = ("distinct", "ties", "equal", "zeros")


class Drawn:
    """A ragged batch with poison at masked tokens and, in a third of the batches, a valid token without an entropy."""

    def __init__(self, seed, backend="cpu", rows=5, longest=9):
        self.backend, self.draw = backend, np.random.default_rng(seed)
        self.device = testing.device_of(backend)
        self.dtype = torch.float64 if backend == "reference" else torch.float32
        batch = testing.random_batch(seed, rows=rows, longest=longest)
        groups = torch.tensor(self.draw.integers(-1, 2, batch.rows))
        self.batch = hpo.PackedBatch(
            batch.cu_seqlens, batch.mask, total_tokens=batch.total_tokens, cu_steps=batch.cu_steps, steps=batch.steps,
            group_ids=groups,
        ).to(self.device)  # fmt: skip
        self.tokens, self.group = batch.total_tokens, groups.tolist()
        ends = batch.cu_seqlens.tolist()
        self.spans = list(itertools.pairwise(ends))
        valid = [True] * self.tokens if batch.mask is None else batch.mask.tolist()
        self.valid = [[t for t in range(begin, end) if valid[t]] for begin, end in self.spans]
        given = {
            "distinct": self.draw.random(self.tokens) * 3,
            "ties": self.draw.integers(0, 4, self.tokens) / 4 + 0.25,
            "equal": np.full(self.tokens, 0.75),
            "zeros": self.draw.integers(0, 2, self.tokens) * self.draw.random(self.tokens),
        }[KINDS[seed % len(KINDS)]]
        self.entropy = self.poisoned(given)
        self.broken = []
        if seed % 3 == 0 and any(self.valid):
            t = int(self.draw.choice([t for row in self.valid for t in row]))
            self.entropy[t], self.broken = math.nan if seed % 2 else math.inf, [t]
        self.rows = [[t for t in row if t not in self.broken] for row in self.valid]  # usable tokens
        self.usable = [t for row in self.rows for t in row]
        self.row_of = {t: row for row, places in enumerate(self.valid) for t in places}

    def poisoned(self, numbers):
        """Numbers of tokens as float32 holds them, NaN at masked ones."""
        numbers = np.asarray(numbers, dtype=np.float32).astype(float)
        return [numbers[t] if any(t in row for row in self.valid) else math.nan for t in range(self.tokens)]

    def normal(self, count=None):
        count = self.tokens if count is None else count
        return self.draw.normal(size=count).astype(np.float32).astype(float).tolist()

    def tensor(self, numbers):
        array = np.asarray(numbers)
        kind = self.dtype if array.dtype.kind == "f" else None
        return torch.tensor(array, dtype=kind, device=self.device)

    def of_tokens(self, values, neutral):
        """A value for each usable token, ``neutral`` at masked ones and NaN at broken ones."""
        expected = [neutral] * self.tokens
        for t in self.broken:
            expected[t] = math.nan
        for t in self.usable:
            expected[t] = values(t)
        return expected

    def agrees(self, got, expected, tolerance=2e-6):
        if expected is None:
            assert got is None
            return
        got, expected = got.detach().cpu().double(), torch.tensor(expected, dtype=torch.float64)
        limit = 1e-9 if self.dtype is torch.float64 else tolerance
        torch.testing.assert_close(got, expected, rtol=limit, atol=limit, equal_nan=True)


SEEDS = [*range(6), *(pytest.param(range(at, at + 100), marks=pytest.mark.long) for at in range(6, 2006, 100))]


def on_random_batches(test):
    """A few batches by default, 2,000 in a long run; the first on every backend, some on the reference in float64."""

    @pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: str(seeds if isinstance(seeds, int) else seeds[0]))
    @functools.wraps(test)
    def run(seeds, native_backends):
        for seed in (seeds,) if isinstance(seeds, int) else seeds:
            some = ("reference", *native_backends) if seed == 0 else ("reference", "cpu") if seed < 100 else ("cpu",)
            for backend in some:
                test(Drawn(seed, backend))

    del run.__wrapped__  # whose signature pytest would take
    return run


# The batch that the sources' worked numbers share: three responses, the last of which is shorter than a window.
SHARED = torch.tensor(
    [.05, .10, 1.20, .90, .80, .70, .02, .03, .01, .04, .40, .02, .01, 1.50, .03, .02, .60, .30, .90]
)  # fmt: skip
BATCH = hpo.PackedBatch.from_lengths([10, 6, 3])


def places(mask):
    return mask.nonzero().flatten().tolist()


def close(got, expected, tolerance=1e-6):
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got.detach().cpu().double(), expected, rtol=tolerance, atol=tolerance)


def clamp(x, least, most):
    return min(max(x, least), most)


def std(numbers):
    """The deviation with ddof 1; 0 for fewer than two numbers."""
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def nearest(numbers, share):
    """The order statistic at ``share (n - 1)``, half to even."""
    return sorted(numbers)[round(share * (len(numbers) - 1))]


def linear(numbers, share):
    """The quantile between two order statistics, as NumPy interpolates."""
    ordered, at = sorted(numbers), share * (len(numbers) - 1)
    low = math.floor(at)
    high = min(low + 1, len(numbers) - 1)
    return ordered[low] + float(at - low) * (ordered[high] - ordered[low])
