"""Log-probabilities, entropies and their gradients next to those of TRL, verl, Liger and PyTorch: errors against
float64, row by row."""

import os
from typing import NamedTuple

import pytest
import torch
from adversarial import ADVERSARIAL, integers, normal, upstreams
from conftest import NATIVE
from lazily import Lazy, skip_without

import hpo_core as hpo

for package in ("trl", "verl", "liger_kernel"):
    skip_without(package)
of_trl, kernel_of_trl = Lazy("trl.trainer.utils"), Lazy("trl.kernels.logprob_entropy")
chunked_of_trl, of_verl = Lazy("trl.kernels.chunked_logprob"), Lazy("verl.utils.torch_functional")
of_liger = Lazy("liger_kernel.ops.fused_linear_scaled_cross_entropy")

pytestmark = pytest.mark.peers

VOCABULARY, IGNORED = 5003, -100
TEMPERATURES = (0.1, 0.7, 1.0, 2.0)
QUANTITIES = ("logp", "entropy", "gradient")

# ------------------------------------------------------------------------------------ the peers, in float32, their best


def eager(logits, targets, temperature):
    """The formula with the care that -inf takes: its product with a probability of 0 is left out."""
    logps = torch.log_softmax(logits / temperature, -1)
    terms = torch.where(logps.isinf(), 0.0, logps.exp() * logps.masked_fill(logps.isinf(), 0.0))
    return logps.gather(-1, targets[:, None]).squeeze(-1), -terms.sum(-1)


def trl(logits, targets, temperature):
    return of_trl.selective_log_softmax_and_entropy(logits, targets, temperature=temperature)


def trl_kernel(logits, targets, temperature):
    return kernel_of_trl.selective_log_softmax_and_entropy(logits, targets, temperature=temperature)


def verl(logits, targets, temperature):
    logits = logits / temperature
    return of_verl.logprobs_from_logits(logits, targets), of_verl.entropy_from_logits(logits)


def row_by_row(function):
    """Makes a function of hidden states and a head one of logits: the head of a row is its logits, its state is 1."""

    def run(logits, targets, temperature):
        one = torch.ones(1, 1)
        rows = [
            function(one, row[:, None], target, temperature)
            for row, target in zip(logits, targets[:, None], strict=True)
        ]
        return tuple(torch.cat(results) for results in zip(*rows, strict=True))

    return run


@row_by_row
def trl_chunked(hidden, weight, targets, temperature):
    function = chunked_of_trl.ChunkedLogProbFunction
    return function.apply(hidden, weight, None, targets, temperature, 1024, None, 1.0, ("entropy",))[:2]


@row_by_row
def liger(hidden, weight, targets, temperature):
    """Liger adapted it from verl, whose own fused function has the same formulas."""
    function = of_liger.LigerFusedLinearScaledCrossEntropyFunction
    nll, entropy = function.apply(hidden, weight, targets, temperature, IGNORED, 1, True)
    return -nll, entropy


PEERS = {"eager": eager, "TRL": trl, "TRL, chunked": trl_chunked, "verl": verl, "Liger": liger}
if os.environ.get("TRITON_INTERPRET") == "1":
    PEERS["TRL, fused kernel"] = trl_kernel

# ----------------------------------------------------------------------------------------------------------- the errors


class Rows(NamedTuple):
    logits: torch.Tensor
    targets: torch.Tensor
    temperature: float
    upstreams: tuple[torch.Tensor, torch.Tensor]

    def results(self, function, logits=None):
        """logp, entropy, and the gradient for upstream gradients of both, in the dtype of the logits."""
        leaf = (self.logits if logits is None else logits).detach().requires_grad_()
        logp, entropy = function(leaf, self.targets, self.temperature)
        given = [each.to(of.dtype) for each, of in zip(self.upstreams, (logp, entropy), strict=True)]
        (grad,) = torch.autograd.grad((logp, entropy), leaf, given)
        return logp.detach(), entropy.detach(), grad

    def of_backend(self, name):
        return self.results(lambda *arguments: hpo.token_logprobs(*arguments, backend=name))

    def of_peer(self, function):
        return self.results(lambda logits, *others: function(logits.float(), *others))

    def exact(self):
        function = lambda *arguments: hpo.token_logprobs(*arguments, backend="reference")  # noqa: E731
        return self.results(function, self.logits.double())


def rows_of(name, temperature, dtype, count):
    targets = integers(VOCABULARY, count, seed=1)
    logits = ADVERSARIAL[name](normal(count, VOCABULARY), targets).to(dtype)
    return Rows(logits, targets, temperature, upstreams(targets))


def error(result, true):
    """The error of each row; that of a gradient is its largest element's. Infinity where it is not finite."""
    off = (result.double() - true).abs().nan_to_num(torch.inf, torch.inf)
    return off if off.dim() == 1 else off.amax(-1)


def ulp(values, dtype):
    """The distance to the next number of the type, as if none were subnormal; 0 at 0."""
    digits = {torch.float32: 24, torch.bfloat16: 8}[dtype]
    return torch.ldexp((values != 0).double(), torch.frexp(values).exponent - digits)


def terms_of(rows, true):
    """The number whose unit in the last place a row's errors are measured in: the result itself, the largest element of
    a gradient. The gradient of the target has two terms, of logp and of entropy, whose factors the forward keeps as
    float32 numbers: where the terms cancel but for an eighth, the number is the larger term."""
    logp, entropy, gradient = true
    largest = gradient.abs().amax(-1)
    own, rest = logp.exp(), -torch.expm1(logp)
    a, b = (each.double() for each in rows.upstreams)
    terms = torch.stack((a * rest, b * own * (logp + entropy))).nan_to_num().abs().amax(0) / rows.temperature
    of_target = gradient.gather(-1, rows.targets[:, None]).squeeze(-1).abs()
    return logp.abs(), entropy.abs(), torch.where(of_target < terms / 8, torch.maximum(largest, terms), largest)


# Probabilities below 2^-125 of the greatest count as 0: an entropy made of such alone, 1e-32 at most, is lost.
LOST = {"entropy": VOCABULARY * 88 * 2.0**-125}


def misses(rows, results, others, true):
    """The rows whose results are not finite, or are off by more than the best of the others and than four units."""
    found = []
    for quantity, mine, theirs, exact, term in zip(
        QUANTITIES, results, zip(*others, strict=True), true, terms_of(rows, true), strict=True
    ):
        off, best = error(mine, exact), torch.stack([error(each, exact) for each in theirs]).amin(0)
        allowed = torch.maximum(1.1 * best, 4 * ulp(term, mine.dtype)).clamp(min=LOST.get(quantity, 0.0))
        missed = ~((off <= allowed) & torch.isfinite(off))
        found += [
            f"{quantity} of row {row}: {off[row]:.3g}, allowed {allowed[row]:.3g}" for row in missed.nonzero()[:, 0]
        ]
    return found


TYPES = (torch.float32, torch.bfloat16)
PATHS = [
    (name, TEMPERATURES[(at + 2 * which) % len(TEMPERATURES)], dtype, 4)
    for at, name in enumerate(ADVERSARIAL)
    for which, dtype in enumerate(TYPES)
]
EVERYTHING = [
    pytest.param(name, temperature, dtype, 32, marks=pytest.mark.long)
    for name in ADVERSARIAL
    for temperature in TEMPERATURES
    for dtype in TYPES
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # those of the interpreter where TRL's kernel makes NaN
@pytest.mark.parametrize(("name", "temperature", "dtype", "count"), PATHS + EVERYTHING, ids=str)
def test_no_peer_is_more_exact(name, temperature, dtype, count, native_backends):
    """At most 1.1 times the error of the best peer, or four units in the last place, in each row; finite everywhere."""
    rows = rows_of(name, temperature, dtype, count)
    true, peers = rows.exact(), [rows.of_peer(peer) for peer in PEERS.values()]
    for backend in native_backends:
        assert not misses(rows, rows.of_backend(backend), peers, true), backend


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_peer_would_fail():
    """The criterion can fail: a confident token at an offset costs each peer its gradient and its entropy."""
    rows = rows_of("margin 20, offset 40", 0.7, torch.float32, 4)
    true, ours = rows.exact(), rows.of_backend(NATIVE[0])
    for name, peer in PEERS.items():
        missed = misses(rows, rows.of_peer(peer), [ours], true)
        assert {"entropy", "gradient"} <= {each.split()[0] for each in missed}, name
