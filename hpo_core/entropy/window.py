"""Token selection by entropy: a windowed score, an exact order statistic of it, and the comparison between them.

Entropies are aligned with log-probabilities: ``entropy[t]`` is the entropy of the distribution from which token t was
drawn. No result has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed

from .. import ops
from ..arguments import Short, check_choice, check_flag, check_member, examines
from ..backends import choice, is_reference
from ..batch import PackedBatch, as_batch
from ..checks import REFERENCE, check, check_precise, check_shape, is_compiling, keeps_doubles, require_type
from ..distributed import check_is_step
from ..specs import INDEX_RULES, OrderRule, Provenance, WindowAggregate
from .aggregates import BOUNDARIES, INVALID, Window, flat_values
from .ranks import quantiles_over_ranks
from .scopes import exact_fraction
from .selection import Selection

_SCOPES = ("batch", "call")


class WindowState(NamedTuple):
    """The result of :meth:`EntropyWindow.fit`. It pickles, and loads with ``weights_only=True``."""

    threshold: torch.Tensor  # [1] float32; NaN without any score, and then no token is selected
    population: torch.Tensor  # [1] int64: the number of scores, one of which is the threshold
    errors: torch.Tensor  # [1] int64: the number of valid tokens with a value that is not finite
    scored_by: str = ""  # the backend that summed the scores; "": scores are no sums, or it is unknown
    fitted_by: str = ""  # the windows and the quantile of their scores; "": unknown

    def to(self, device: torch.device | str) -> WindowState:
        moved = {name: getattr(self, name).to(device) for name in ("threshold", "population", "errors")}
        return self._replace(**moved)


torch.serialization.add_safe_globals([WindowState])


_Compared = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # values, mask, cu_seqlens


@dataclass(frozen=True, repr=False)
class EntropyWindow(Short):
    """``mask_t = score_t >= threshold``: a windowed mean, and an exact quantile of it over the whole batch.

    Frozen, hashable, picklable. ``fit`` on the entropies of the whole optimiser step (those of the old policy are known
    before the first backward), ``apply`` per micro-batch: the mask is then the same for every way of cutting the step.

    Args:
        first, last, boundary, invalid: the window, see :class:`Window`.
        quantile: exact rational q; the threshold is the order statistic ``rule(q (n - 1))`` of the n defined scores.
        strict: select ``score > threshold`` instead of ``>=``.
        scope: ``"batch"``: the threshold comes from :meth:`fit`; ``"call"``: each loss call fits its own tokens.
        source, provenance: the origin of a published window; None: of no source.
    """

    name: str
    quantile: Fraction
    first: int = 0
    last: int = 0
    boundary: str = "full"
    invalid: str = "skip"
    rule: OrderRule = OrderRule.CEIL
    strict: bool = False
    scope: str = "batch"
    source: str = field(default="", repr=False, compare=False)
    provenance: Provenance | None = field(default=None, repr=False, compare=False)
    if TYPE_CHECKING:  # no field at run time, see RatioGate
        _fits: str = field(init=False)  # WindowState.fitted_by

    def __post_init__(self) -> None:
        window = Window(self.first, self.last, "mean", self.boundary, self.invalid)  # which checks them
        for name in ("first", "last"):  # kernels take no integer of NumPy
            object.__setattr__(self, name, getattr(window, name))
        check_member("rule", self.rule, OrderRule)
        check_flag("strict", self.strict)
        is_exact = isinstance(self.quantile, Fraction)
        require_type(is_exact, "quantile: expected a Fraction such as Fraction('0.8'), got {!r}", self.quantile)
        exact_fraction("quantile", self.quantile)
        check(self.rule in INDEX_RULES, "rule: expected one of an index, got {!r}; see quantiles for LINEAR", self.rule)
        check_choice("scope", self.scope, _SCOPES)
        rules = f"boundary {self.boundary}, invalid {self.invalid}, rule {self.rule.name}"
        fits = f"quantile {self.quantile} of windows {self.first} to {self.last} ({rules})"
        object.__setattr__(self, "_fits", fits)  # once: a call under Dynamo formats nothing

    @examines
    def score(
        self, entropy: torch.Tensor, batch: PackedBatch | torch.Tensor, *, backend: str | None = None
    ) -> torch.Tensor:
        """The windowed means ``[T]`` (of a padded batch ``[B, L]``) that are compared, -inf where undefined."""
        batch = as_batch(batch)
        flat = flat_values("entropy", entropy, batch, backend)
        rows = batch.cu_seqlens if self.first == self.last == 0 else batch.once(PackedBatch.spans)
        rules = (BOUNDARIES[self.boundary], INVALID[self.invalid], WindowAggregate.MEAN)
        score = ops.window_score(flat, batch.mask, rows, self.first, self.last, *rules, backend)
        return score.reshape(entropy.shape)

    @examines
    def fit(
        self,
        entropy: torch.Tensor,
        batch: PackedBatch | torch.Tensor,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
        backend: str | None = None,
    ) -> WindowState:
        """The exact threshold over all tokens of ``batch`` and, with ``process_group``, of all its ranks.

        Raises:
            ValueError: without ``process_group``, where the batch is known to be less than the optimiser step: a part
                of a larger one, or the share of one of several ranks. A window with ``scope="call"`` fits it alone.

        >>> window = forking_tokens("0.5")
        >>> window.fit(torch.tensor([0.1, 0.9, 0.5, 0.7]), PackedBatch.from_lengths([4])).threshold
        tensor([0.7000])
        """
        batch = as_batch(batch)
        if process_group is not None:
            score = self.score(entropy, batch, backend=backend)
            return self.fit_score(score, process_group=process_group, backend=backend)
        self._check_is_step(batch, "entropy and batch", "process_group=torch.distributed.group.WORLD")
        values, mask, cu_seqlens = self._compared(entropy, batch, backend)
        found = ops.order_statistic(values, *self.quantile.as_integer_ratio(), self.rule, mask, cu_seqlens, backend)
        return self._state(*found, values, backend)

    @examines
    def fit_score(
        self,
        score: torch.Tensor,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
        backend: str | None = None,
    ) -> WindowState:
        """:meth:`fit` from scores already computed by :meth:`score` of the same ``backend``, of any shape. All scores
        of all ranks are one scope: three all-reduces of at most 16 KiB."""
        check_precise("score", score)
        score = score.detach().flatten()
        if not keeps_doubles(backend):
            score = score.float().contiguous()
        quantile = self.quantile.as_integer_ratio()
        if process_group is None:
            return self._state(*ops.order_statistic(score, *quantile, self.rule, None, None, backend), score, backend)
        scope = torch.zeros_like(score, dtype=torch.int64)
        threshold, counts = quantiles_over_ranks(score, scope, 1, quantile, self.rule, process_group)
        return self._state(threshold, counts[0], score, backend)

    @examines
    def apply(
        self,
        entropy: torch.Tensor,
        batch: PackedBatch | torch.Tensor,
        state: WindowState,
        *,
        backend: str | None = None,
    ) -> torch.Tensor:
        """The bool mask, in the shape of ``entropy``.

        Raises:
            ValueError: ``state`` was fitted on the scores of another backend, whose sums may differ in the last bit.

        >>> window, batch = forking_tokens("0.5"), PackedBatch.from_lengths([4])
        >>> entropy = torch.tensor([0.1, 0.9, 0.5, 0.7])
        >>> window.apply(entropy, batch, window.fit(entropy, batch))
        tensor([False,  True, False,  True])
        """
        batch = as_batch(batch)
        values, mask, cu_seqlens = self._compared(entropy, batch, backend)
        values, threshold = self._comparable(values, state, backend)
        return ops.select(values, threshold, self.strict, mask, cu_seqlens, backend).reshape(entropy.shape)

    @examines
    def selection(
        self,
        entropy: torch.Tensor,
        batch: PackedBatch | torch.Tensor,
        state: WindowState | None = None,
        *,
        backend: str | None = None,
    ) -> Selection:
        """The same tokens as one value for ``selection=`` of the loss, which compares score and threshold itself.

        ``state=None`` fits on this batch, which is then the whole optimiser step, unless the window has
        ``scope="call"``. It equals ``window=`` and ``threshold=`` of the loss, and merges with others.

        Traps: its ``mask`` is None, because the loss compares score and threshold. For denominators take
        ``token_mean(batch, selected=selection.as_mask().mask)``: ``selected=None`` counts all tokens.

        Raises:
            ValueError: as :meth:`apply`; and without ``state`` where the batch is known to be less than the step: a
                part of a larger batch, or the share of one of several ranks.

        >>> window, batch = forking_tokens("0.5"), PackedBatch.from_lengths([4])
        >>> window.selection(torch.tensor([0.1, 0.9, 0.5, 0.7]), batch).as_mask().mask
        tensor([False,  True, False,  True])
        """
        batch = as_batch(batch)
        score = self.score(entropy, batch, backend=backend)
        if state is None:
            over_ranks = "state=window.fit(entropy, batch, process_group=torch.distributed.group.WORLD)"
            self._check_is_step(batch, "state=window.fit(entropy, batch)", over_ranks)
            state = self.fit_score(score, backend=backend)
        score, threshold = self._comparable(score, state, backend)
        return Selection(score=score, threshold=threshold, strict=self.strict)

    @examines
    def fit_apply(
        self, entropy: torch.Tensor, batch: PackedBatch | torch.Tensor, *, backend: str | None = None
    ) -> tuple[WindowState, torch.Tensor]:
        """:meth:`fit` and :meth:`apply` on one batch, with the same results and errors and in less time than the two
        calls.

        >>> window, batch = forking_tokens("0.5", scope="call"), PackedBatch.from_lengths([4])
        >>> window.fit_apply(torch.tensor([0.1, 0.9, 0.5, 0.7]), batch)[1]
        tensor([False,  True, False,  True])
        """
        batch = as_batch(batch)
        over_ranks = "its tokens to fit with process_group=torch.distributed.group.WORLD and to apply"
        self._check_is_step(batch, "entropy and batch", over_ranks)
        values, mask, cu_seqlens = self._compared(entropy, batch, backend)
        quantile = (*self.quantile.as_integer_ratio(), self.rule)
        threshold, counts, selected = ops.select_top(values, *quantile, self.strict, mask, cu_seqlens, backend)
        if selected.shape != entropy.shape:  # a view takes two microseconds, 1 % of a call with 10^6 tokens
            selected = selected.reshape(entropy.shape)
        return self._state(threshold, counts, values, backend), selected

    def _check_is_step(self, batch: PackedBatch, whole: str, over_ranks: str) -> None:
        """Check that a threshold from this batch alone is that of the optimiser step, or of the call if these count."""
        if self.scope == "batch":
            call = "a window with scope='call'"
            check_is_step("batch", "fit", batch, f"{call}, or {whole}", f"{over_ranks}, or {call}")

    def _compared(self, entropy: torch.Tensor, batch: PackedBatch, backend: str | None) -> _Compared:
        """The values compared with the threshold: scores, or entropies themselves for windows of one token."""
        if self.first == self.last == 0:
            flat = flat_values("entropy", entropy, batch, backend)
            return flat, batch.mask, batch.cu_seqlens
        return self.score(entropy, batch, backend=backend).flatten(), None, None

    def _comparable(
        self, values: torch.Tensor, state: WindowState, backend: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and the threshold ``[1]``, checked and of one precision."""
        check_state(self, state, values, backend)
        check_precise("state.threshold", state.threshold, "take the state as fit returned it")
        check_shape("state.threshold", state.threshold, (1,), "[1] (as fit returned it)")
        check(
            state.threshold.device == values.device,
            "state: expected device {} (that of entropy), got {}; use state.to(entropy.device)",
            values.device,
            state.threshold.device,
        )
        values = rounded_as(values, state.threshold)
        return values, state.threshold.detach().to(values.dtype)

    def _state(
        self, threshold: torch.Tensor, counts: torch.Tensor, values: torch.Tensor, backend: str | None
    ) -> WindowState:
        population, errors = counts.narrow(0, 0, 1), counts.narrow(0, 1, 1)  # split takes half as long again
        return WindowState(threshold, population, errors, _scorer(self, values, backend), self._fits)


def forking_tokens(share: str | Fraction | float = "0.2", *, scope: str = "batch") -> EntropyWindow:
    """The top ``share`` of tokens by entropy, ``H_t >= x_(ceil((1 - share)(n - 1)))`` (80/20 rule, arXiv 2506.01939).

    The mask keeps ``1 + floor(share (n - 1))`` tokens without ties; ties with the threshold are kept. ``share``: 0.2 in
    the paper; a decimal (string or float) means the exact fraction that its digits spell.

    Traps: the paper divides the loss by the number of *selected* tokens
    (``aggregation.token_mean(batch, selected=mask)``), TRL by all valid ones (the default here), a factor of about
    ``share``. The paper takes the threshold per (micro-)batch (``scope="call"``).

    >>> forking_tokens().quantile
    Fraction(4, 5)
    """
    keep = exact_fraction("share", share)
    return EntropyWindow(
        "forking_tokens", 1 - keep, scope=scope, source="arXiv 2506.01939", provenance=Provenance.VERIFIED
    )


@examines
def ares(width: int = 4, quantile: str | Fraction | float = "0.95", *, scope: str = "batch") -> EntropyWindow:
    """High-entropy windows of ARES: forward means at or above their batch quantile (arXiv 2510.08457).

    ``Hbar_t = mean of H over {t, ..., t + width - 1}``, full windows only: those inside the response. The mask is
    ``Hbar_t >= tau`` with tau the exact batch quantile of the same window means. With ``width=1`` it is
    ``forking_tokens("0.05")``.

    Args:
        width: 4 (the paper finds 4 to 8 best).
        quantile: 0.95.

    Traps: the paper defines tau three ways, one of them a quantile of *token* entropies against which few windows pass;
    its code uses ``{t + 1, ..., t + width}`` and a median of per-sequence quantiles. This is the batch-scope threshold
    of appendix H, taken on the compared signal itself.

    >>> ares().last
    3
    """
    check(width >= 1, "width: expected a number >= 1, got {}", width)
    return EntropyWindow(
        "ares", exact_fraction("quantile", quantile), 0, width - 1, scope=scope, source="arXiv 2510.08457",
        provenance=Provenance.PAPER,
    )  # fmt: skip


def check_state(window: EntropyWindow, state: WindowState, values: torch.Tensor, backend: str | None) -> None:
    """Check that the window fitted this threshold, and that threshold and scores have sums of the same backend: a
    difference in the last bit could lose the token at the threshold."""
    check(
        is_compiling() or state.fitted_by in ("", window._fits),  # Dynamo compares no string that it has formatted
        "threshold: expected the {} of {!r}, got the {}; take it from fit of the window that selects",
        window._fits,
        window.name,
        state.fitted_by,
    )
    scorer = _scorer(window, values, backend)
    check(
        not state.scored_by or not scorer or state.scored_by == scorer,
        "state: expected one fitted on scores of {!r}, got {!r}: their sums differ in the last bit, which could lose "
        "the token at the threshold; fit and apply on one backend (backend=)",
        scorer,
        state.scored_by,
    )


def _scorer(window: EntropyWindow, values: torch.Tensor, backend: str | None) -> str:
    """The backend that sums the scores. One token is no sum; full windows have the same bits on the CPU and in CUDA."""
    if window.first == window.last:
        return ""
    name = backend or (REFERENCE if is_reference(values, None) else "cpu" if values.is_cpu else "")
    if not name and not ops.is_traced(values):
        name = choice("entropy", str(values.device))
    name = "cuda" if name == "cuda_emulated" else name
    return "cpu or cuda" if window.boundary == "full" and name in ("cpu", "cuda") else name


def rounded_as(values: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """The values in the precision of the threshold, which is one of them: over ranks, float32 in the reference, too."""
    return values.float() if threshold.dtype is torch.float32 else values
