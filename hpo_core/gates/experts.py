"""Training beside the policy's own rollouts: on rollouts that demonstrations steered, and on texts to predict."""

from __future__ import annotations

import torch

from ..arguments import check_finite, examines
from ..checks import check, check_precise
from .draws import draws_of

_BETWEEN_SEEDS = 1_000_003


@examines
def icpo_weight(logp: torch.Tensor, shaping: float = 0.1) -> torch.Tensor:
    """``token_weight`` ``[T]`` for ICPO's steered rollouts: ``c p / (p + c)^2``, p the token's probability and c
    ``shaping`` (arXiv 2510.26519 and its code, which takes it from LUFFY, arXiv 2504.14945).

    A rollout that an example in the prompt steered is trained on without it, by ``-A p / (p + c)``, with no ratio and
    no clip. The gradient of that is ``-A c p / (p + c)^2`` times that of logp, which ``reinforce()`` has with this
    weight. It is largest at ``p = c``: likely tokens hardly count, and neither do hopeless ones. The policy's own
    rollouts take ``ppo_clip(ratio_dual=3.0)``: two calls of the loss, with weights that are 0 on the rows of the other,
    whose one denominator counts the tokens of both. The advantages are :func:`hpo_core.advantages.icpo`.

    Args:
        logp: ``[T]`` or ``[B, L]`` of the prompt without the example; a constant here.
        shaping: 0.1, the code's.

    Traps: the value of the loss is not ICPO's, which would be ``-A p / (p + c)``; its gradient is.

    >>> import hpo_core as hpo
    >>> batch, steered = hpo.PackedBatch.from_lengths([2, 2]), torch.tensor([False, True])
    >>> logp, old_logp = torch.tensor([0.9, 0.5, 0.9, 0.1]).log().requires_grad_(), torch.tensor([0.8, 0.5, 1, 1]).log()
    >>> weights, advantages = hpo.aggregation.token_mean(batch), torch.tensor([-1.0, 1.0])
    >>> own = hpo.policy_loss(
    ...     logp, old_logp, advantages, batch, hpo.gates.ppo_clip(ratio_dual=3.0), weights=weights * ~steered
    ... )
    >>> others = hpo.policy_loss(
    ...     logp, None, advantages, batch, hpo.gates.reinforce(), weights=weights * steered,
    ...     token_weight=icpo_weight(logp),
    ... )
    >>> (own.loss + others.loss).backward()
    >>> logp.grad
    tensor([ 0.2812,  0.2500, -0.0225, -0.0625])
    """
    check_precise("logp", logp)
    check(shaping > 0, "shaping: expected a number above 0, got {}", shaping)
    check_finite(shaping=shaping)
    p = logp.detach().clamp(max=0).exp()  # rounding may lift a log-probability above 0
    return shaping * p / (p + shaping).square()


@examines
def ink_grpo_coefficient(step: int, *, seed: int = 0, coefficient: float = 0.1, probability: float = 0.6) -> float:
    """InK-GRPO's coefficient of the text loss in an update: ``coefficient`` with that ``probability``, else 0, when the
    text needs no forward pass (injected knowledge; repository scb-10x/typhoon-s).

    InK-GRPO is ``L_GRPO + coefficient L_text``, ``L_text`` the mean negative log-probability of the tokens of texts of
    the domain: a second call of the loss, on a batch of texts, under ``reinforce()`` with advantages of 1 and
    ``weights=coefficient * aggregation.token_mean(texts)``.

    Args:
        step: the number of the optimiser update; all ranks draw the same in it.
        seed: of the counter-based generator.
        coefficient, probability: 0.1 and 0.6, those of the authors' recipe, whose GRPO takes ``ppo_clip(0.2, 0.24)``.

    Traps: the authors' code draws on every rank by itself, so that some ranks may add the text loss and others not.

    >>> [ink_grpo_coefficient(step) for step in range(5)]
    [0.0, 0.0, 0.1, 0.1, 0.0]
    >>> import hpo_core as hpo
    >>> texts, logp = hpo.PackedBatch.from_lengths([1, 3]), torch.full((4,), -1.0, requires_grad=True)
    >>> weights = 0.1 * hpo.aggregation.token_mean(texts)
    >>> hpo.policy_loss(logp, None, torch.ones(2), texts, hpo.gates.reinforce(), weights=weights).loss.backward()
    >>> logp.grad
    tensor([-0.0250, -0.0250, -0.0250, -0.0250])
    """
    check(step >= 0, "step: expected a number of updates, got {}", step)
    check(coefficient >= 0, "coefficient: expected a factor >= 0, got {}", coefficient)
    check_finite(coefficient=coefficient)
    check(0 <= probability <= 1, "probability: expected a number in [0, 1], got {}", probability)
    draw = int(draws_of(torch.zeros(1, dtype=torch.int64, device="cpu"), seed * _BETWEEN_SEEDS + step)) / 2**53
    return coefficient if draw < probability else 0.0
