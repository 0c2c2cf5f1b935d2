"""Estimators over one flat grouping: rewards of a prompt's samples against each other.

Common arguments:
    rewards: ``[S]`` floating point, one per unit (row, trajectory, ...). NaN and infinite rewards are unscorable: they
        enter no statistic and get advantage 0. Computed in float64 relative to a member of the group, returned as
        float32.
    group_ids: ``[S]`` int32 or int64, any integers in any order; a negative id belongs to no group (advantage 0). None:
    one group.
    mask: ``[S]`` bool, who enters the statistics. Default: everybody.
    apply_mask: ``[S]`` bool, who receives an advantage. Default: the same as ``mask``.
    singleton: a group of one: ``"zero"`` (its advantage is 0), or ``"raw"`` (its reward is kept: what verl's loops do).
    backend: see :func:`hpo_core.backends`.

Advantages are constants: no gradient flows to the rewards. Members whose rewards are all equal get exactly 0 in every
precision.
"""

from __future__ import annotations

import torch

from .. import ops
from ..backends import resolve
from ..checks import check, check_dtype, check_shape, check_type
from ..specs import Center, EpsMode, GroupNormalisation, Scale

__all__ = ["dr_grpo", "grpo", "lite_ppo", "rloo"]

_EPS_MODES = {"add": EpsMode.ADD, "sqrt": EpsMode.SQRT, "floor": EpsMode.FLOOR}


def grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    eps_mode: str = "add",
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """GRPO: ``A = (r - mean_g) / (std_g + eps)`` (arXiv 2402.03300). Returns ``[S]`` float32.

    Args:
        ddof: 1 (torch.std; verl, TRL, OpenRLHF) or 0 (numpy.std). The paper does not say.
        eps: 1e-6 as in verl; TRL uses 1e-4, OpenRLHF 1e-9.
        eps_mode: ``"add"`` sigma + eps, ``"sqrt"`` sqrt(sigma^2 + eps), ``"floor"`` max(sigma, eps).

    Traps: frameworks differ in ddof, eps and singletons; verl's loop returns the raw reward for a group of one.

    >>> grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([3, 3, 3, 3]), ddof=0, eps=0.0)
    tensor([ 1., -1., -1.,  1.])
    """
    check(eps_mode in _EPS_MODES, "eps_mode: expected one of {}, got {!r}", ", ".join(_EPS_MODES), eps_mode)
    spec = GroupNormalisation(Center.MEAN, Scale.GROUP, ddof, eps, _EPS_MODES[eps_mode], _keeps(singleton))
    return _normalise(rewards, group_ids, mask, apply_mask, spec, backend)


def dr_grpo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """Dr.GRPO: ``A = r - mean_g``, no scale (arXiv 2503.20783). Returns ``[S]`` float32.

    The paper also divides the loss by a constant length: use ``aggregation.fixed_length``.

    >>> dr_grpo(torch.tensor([2.0, 4.0, 6.0]), torch.tensor([1, 1, 1]))
    tensor([-2.,  0.,  2.])
    """
    spec = GroupNormalisation(Center.MEAN, Scale.NONE, eps=0.0, keep_singletons=_keeps(singleton))
    return _normalise(rewards, group_ids, mask, apply_mask, spec, backend)


def rloo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """RLOO: ``A = r - mean of the others = n / (n - 1) (r - mean_g)`` (arXiv 2402.14740). Returns ``[S]`` float32.

    Traps: for a group of one verl's loop keeps the raw reward (``singleton="raw"``), its vectorised form gives 0.

    >>> rloo(torch.tensor([2.0, 4.0, 6.0]), torch.tensor([1, 1, 1]))
    tensor([-3.,  0.,  3.])
    """
    spec = GroupNormalisation(Center.LEAVE_ONE_OUT, Scale.NONE, eps=0.0, keep_singletons=_keeps(singleton))
    return _normalise(rewards, group_ids, mask, apply_mask, spec, backend)


def lite_ppo(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    backend: str | None = None,
) -> torch.Tensor:
    """Lite PPO: ``A = (r - mean_g) / (std_batch + eps)`` (arXiv 2508.08221, "Tricks or Traps"). Returns ``[S]``
    float32.

    The batch's standard deviation is that of the *raw* rewards, not of the centred ones. A single group gives GRPO.

    >>> lite_ppo(torch.tensor([1.0, 0.0, 2.0, 6.0]), torch.tensor([0, 0, 1, 1]), eps=0.0)
    tensor([ 0.1901, -0.1901, -0.7605,  0.7605])
    """
    spec = GroupNormalisation(Center.MEAN, Scale.BATCH, ddof, eps, EpsMode.ADD, _keeps(singleton))
    return _normalise(rewards, group_ids, mask, apply_mask, spec, backend)


def _keeps(singleton: str) -> bool:
    check(singleton in ("zero", "raw"), "singleton: expected 'zero' or 'raw', got {!r}", singleton)
    return singleton == "raw"


def _normalise(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    apply_mask: torch.Tensor | None,
    spec: GroupNormalisation,
    backend: str | None,
) -> torch.Tensor:
    check_type(isinstance(rewards, torch.Tensor), "rewards: expected a tensor [S], got {}", type(rewards))
    check(rewards.dim() == 1, "rewards: expected shape [S] (one per unit), got {}", list(rewards.shape))
    check_type(rewards.is_floating_point(), "rewards: expected floating point, got {}; use .float()", rewards.dtype)
    for name, tensor, allowed, fix in (
        ("group_ids", group_ids, (torch.int32, torch.int64), "renumber or hash them to int64 first"),
        ("mask", mask, (torch.bool,), "use mask.bool()"),
        ("apply_mask", apply_mask, (torch.bool,), "use apply_mask.bool()"),
    ):
        if tensor is not None:
            check_type(isinstance(tensor, torch.Tensor), "{}: expected a tensor [S], got {}", name, type(tensor))
            check_dtype(name, tensor, allowed, fix)
            check_shape(name, tensor, rewards.shape, "[S] (that of rewards)")
            check(
                tensor.device == rewards.device, "{}: expected device {}, got {}", name, rewards.device, tensor.device
            )
    ids = None if group_ids is None else group_ids.to(torch.int64).contiguous()
    enters, receives = (None if tensor is None else tensor.contiguous() for tensor in (mask, apply_mask))
    values = rewards.detach()
    if backend == "reference":
        reference = resolve("advantages", values, backend)
        return reference.group_normalise(values, ids, enters, receives, spec)  # type: ignore[no-any-return]
    return ops.group_normalise(values.float().contiguous(), ids, enters, receives, spec, backend)
