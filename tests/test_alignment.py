"""Each input of tokens may begin anywhere, alone: no bit changes, and Triton loads no vector from where none begins."""

import pytest
import torch
from conftest import NATIVE

import hpo_core as hpo
from hpo_core.backends import resolve
from hpo_core.specs import (
    Action,
    Boundary,
    CorrectionSpec,
    Head,
    Invalid,
    KLEstimator,
    LogitRows,
    Penalty,
    PolicyLossInputs,
    PolicyLossSpec,
    Reduction,
    Statistic,
    TermSpec,
    TokenDraw,
    WindowAggregate,
)
from hpo_core.testing import device_of, move
from hpo_core.testing.promises import shifted

TOKENS, ROWS = 150, 3
OFFSETS = torch.tensor([0, 40, 90, 150])
RULE = CorrectionSpec(Statistic.LOG_RATIO, Reduction.MEAN, Action.CLAMP, False, False, (-0.1, -0.1), (0.1, 0.1))
SHARED = {"kl": KLEstimator.K3, "kl_beta": 0.1, "correction": RULE}
TERM = TermSpec(penalty=Penalty.K2, penalty_coefficient=0.1)
NO_LEVELS = {
    "leaf_begin": OFFSETS[:-1].clone(), "leaf_end": OFFSETS[1:].clone(), "leaf_row": torch.arange(ROWS),
    "ancestors": torch.zeros(0, ROWS, dtype=torch.int64),
}  # fmt: skip
SPECS = {
    "clip": (PolicyLossSpec(**SHARED), {}),
    "term": (
        PolicyLossSpec(head=Head.TARGET, term=TERM, **SHARED),
        {"penalty_mask": torch.arange(TOKENS) % 3 > 0, "target": torch.rand(TOKENS), "target_per_token": True}
        | NO_LEVELS,
    ),
}  # fmt: skip


def all_inputs(**more):
    draw = torch.Generator().manual_seed(3)

    def normal(count=TOKENS):
        return torch.randn(count, generator=draw)

    logp = -normal().abs()
    return PolicyLossInputs(
        logp, logp + 0.2 * normal(), normal(), normal(ROWS).abs(), OFFSETS, advantage_per_token=True,
        mask=normal() > -1, ref_logp=logp + 0.1 * normal(), entropy=normal().abs(), score=normal(),
        threshold=torch.zeros(1), token_mask=normal() > -1, token_weight=normal().abs(),
        low=torch.full((TOKENS,), 0.9), high=torch.full((TOKENS,), 1.1), kl_weight=normal().abs(),
        correction_first=logp + 0.1 * normal(), correction_second=logp + 0.3 * normal(),
    )._replace(**more)  # fmt: skip


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("case", SPECS)
def test_inputs_of_a_loss(case, backend):
    spec, more = SPECS[case]
    inputs = move(all_inputs(**more), device_of(backend))
    policy_loss = resolve("gates", inputs.logp, backend).policy_loss
    expected = policy_loss(inputs, spec, True, True)
    of_tokens = [name for name, each in inputs._asdict().items() if torch.is_tensor(each) and each.numel() == TOKENS]
    assert {"score", "kl_weight", "correction_first", "correction_second"} <= set(of_tokens)
    for name in of_tokens:
        moved = policy_loss(inputs._replace(**{name: shifted(getattr(inputs, name))}), spec, True, True)
        assert all(map(torch.equal, moved, expected)), name


def some(backend, tokens=100):
    draw = torch.Generator().manual_seed(0)
    values, mask = torch.rand(tokens, generator=draw), torch.rand(tokens, generator=draw) > 0.3
    return [each.to(device_of(backend)) for each in (values, mask, torch.tensor([0, 40, tokens]))]


@pytest.mark.parametrize("backend", NATIVE)
def test_masks_of_windows_and_selections(backend):
    values, mask, offsets = some(backend)
    entropy = resolve("entropy", values, backend)
    window = (offsets, -2, 3, Boundary.SHRINK, Invalid.SKIP, WindowAggregate.MEAN)
    scores, moved = (entropy.window_score(values, each, *window) for each in (mask, shifted(mask)))
    assert torch.equal(scores, moved)
    half = torch.full_like(values[:1], 0.5)
    masks = [entropy.select(values, half, False, each, offsets) for each in (mask, shifted(mask))]
    assert torch.equal(*masks)


@pytest.mark.parametrize("backend", NATIVE)
def test_inputs_of_a_covariance(backend):
    values, mask, offsets = some(backend)
    covariance = resolve("covariance", values, backend).covariance
    expected = covariance(-values, values[:2], offsets, mask, TokenDraw())
    for logp, members in ((shifted(-values), mask), (-values, shifted(mask))):
        assert all(map(torch.equal, covariance(logp, values[:2], offsets, members, TokenDraw()), expected))


@pytest.mark.parametrize("backend", NATIVE)
def test_rows_of_logits_at_an_odd_outer_stride(backend):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=draw).to(device_of(backend)).as_strided((2, 3, 8), (25, 8, 1))
    targets = torch.arange(1, 7, device=logits.device)
    results = [
        resolve("logprobs", logits, backend).token_logprobs(LogitRows(each, targets, None, 1.0, -100, None, 0, 8), 3)
        for each in (logits, logits.contiguous())
    ]
    assert all(map(torch.equal, results[0][:2], results[1][:2]))


@pytest.mark.parametrize("backend", NATIVE)
def test_logits_of_a_loss(backend):
    draw, place = torch.Generator().manual_seed(0), device_of(backend)
    logits, targets = torch.randn(8, 8, generator=draw).to(place), torch.randint(0, 8, (8,), generator=draw).to(place)
    batch = hpo.PackedBatch.from_lengths([4, 4]).without_first_tokens().to(place)
    old_logp, advantages = torch.full((8,), -2.0, device=place), torch.tensor([1.0, -1.0], device=place)
    results = []
    for each in (logits, shifted(logits.flatten()).view(8, 8)):
        leaf = each.detach().requires_grad_()
        loss = hpo.policy_loss_from_logits(leaf, targets, old_logp, advantages, batch, backend=backend).loss
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    assert all(map(torch.equal, *results))
