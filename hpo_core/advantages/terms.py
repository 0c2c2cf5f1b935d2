"""The operator behind every estimator: terms, each over values and a grouping of its own, put together per unit."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .. import ops
from ..arguments import as_float, check_all_finite, check_choice, constant, constants, examines, parameter_names
from ..batch import takes_padded
from ..checks import check, check_floating, check_shape, check_units, keeps_doubles, require_type
from ..distributed import ranks, sum_in_order, sum_of_ranks
from ..reference.advantages import group_normalise
from ..segments import GroupStatistics, statistics
from ..specs import MOST_TERMS, GroupInputs, GroupNormalisation, GroupTerm, Provenance, Scale, Share

Estimator = TypeVar("Estimator", bound=Callable[..., Any])


class Term(NamedTuple):
    """Values ``[U]`` of units, the ids ``[U]`` that group them (negative: in no group; None: all are one group), the
    rule by which the statistics of a group reach its units, and the weights ``[U]`` of units in the statistics."""

    values: torch.Tensor
    ids: torch.Tensor | None
    rule: GroupTerm = GroupTerm()
    weights: torch.Tensor | None = None


@examines
def combine(
    terms: Sequence[Term],
    *,
    mask: torch.Tensor | None = None,
    apply_mask: torch.Tensor | None = None,
    share: Share = Share.SUM,
    share_eps: float = 0.0,
    share_least: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """``A_u = sum_m k_m(u) a_m(u)``, up to 8 terms ``a_m = lambda (x - center) / scale``. Returns ``[U]`` float32.

    lambda is that of :class:`GroupTerm`. With ``Share.SUM`` k is the term's coefficient c. Otherwise terms share:
    ``k_m = c_m s_m / (sum_j c_j s_j + share_eps)`` over the terms that are present at the unit (see :class:`Presence`),
    s being 1, the number of members of the group or its standard deviation; 0 where that sum does not exceed
    ``share_least``.

    Args:
        mask: ``[U]`` bool, the units that enter the statistics of all terms. Default: all.
        apply_mask: ``[U]`` bool, the units that receive an advantage. Default: the same as ``mask``.

    A value that is not finite enters no statistic, and its term says nothing of that unit. Computed in float64 relative
    to a member of each group: members with equal values get exactly 0.

    >>> rewards, ids = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([3, 3, 3, 3])
    >>> combine([Term(rewards, ids, GroupTerm(ddof=0, eps=0.0))])
    tensor([ 1., -1., -1.,  1.])
    """
    check(len(terms) > 0, "terms: expected at least one Term, got none")
    for term in terms:
        require_type(isinstance(term, Term), "terms: expected Term(values, ids, ...), got {}", type(term))
    first = terms[0].values
    for term in terms:
        check_units(values=term.values, ids=term.ids, weights=term.weights)
        check_shape("values", term.values, first.shape, "[U] (that of the first term)")
    check_units(values=first, mask=mask, apply_mask=apply_mask)
    number = functools.partial(constant, backend=backend)
    inputs = GroupInputs(
        tuple(number(term.values) for term in terms),
        _once([term.ids for term in terms], lambda ids: ids.to(torch.int64).contiguous()),
        _once([term.weights for term in terms], number),
        None if mask is None else mask.contiguous(),
        None if apply_mask is None else apply_mask.contiguous(),
    )
    spec = GroupNormalisation(tuple(term.rule for term in terms), share, share_eps, share_least)
    if ranks() is not None:  # the statistics are those of all ranks, the rest is a unit's own
        return group_normalise(inputs, spec, functools.partial(statistics, backend=backend))
    if keeps_doubles(backend):
        return group_normalise(inputs, spec)
    return ops.group_normalise(inputs, spec, backend)


def _once(
    tensors: list[torch.Tensor | None], convert: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Each converted; one tensor given to several terms stays one, by which kernels know that they share a grouping."""
    converted: list[torch.Tensor | None] = []
    for index, tensor in enumerate(tensors):
        earlier = [converted[other] for other in range(index) if tensors[other] is tensor]
        converted.append(None if tensor is None else earlier[0] if earlier else convert(tensor))
    return tuple(converted)


def estimator(
    provenance: Provenance, *, level: str = "row", multi_reward: bool = False, tables: bool = False
) -> Callable[[Estimator], Estimator]:
    """Marks a function as a published estimator.

    Args:
        provenance: where its formula comes from.
        level: the units of its advantages, ``"row"``: ``[S]``, ``"step"``: ``[N]``, ``"token"``: ``[T]``;
            ``"selection"``: it returns a mask of rows.
        multi_reward: whether it takes several rewards ``[C, S]``.
        tables: whether statistics of groups are all that it needs to know of the units of other ranks.
    """

    def mark(function: Estimator) -> Estimator:
        marked: Any = examines(constants(function))
        parameters = parameter_names(function)  # once: it is read in every call
        if level == "token":
            marked = takes_padded(marked, parameters)
        marked.provenance, marked.level, marked.multi_reward, marked.tables = provenance, level, multi_reward, tables
        marked.parameters = parameters
        return marked  # type: ignore[no-any-return]

    return mark


def _mark(estimator: Callable[..., Any], name: str, default: object) -> Any:
    """An attribute of an estimator, or of the one that ``functools.partial`` hides."""
    return getattr(estimator, name, getattr(getattr(estimator, "func", None), name, default))


def is_published(estimator: Callable[..., Any]) -> bool:
    """Whether an estimator is one of hpo_core, or a partial of one."""
    return _mark(estimator, "provenance", None) is not None


def level_of(estimator: Callable[..., Any]) -> str:
    """The level of an estimator's advantages."""
    return str(_mark(estimator, "level", "row"))


def name_of(estimator: Callable[..., Any]) -> str:
    """The name of an estimator in errors."""
    return str(_mark(estimator, "__name__", "estimator"))


def is_multi_reward(estimator: Callable[..., Any]) -> bool:
    """Whether an estimator takes several rewards ``[C, S]`` and their ``weights``."""
    return bool(_mark(estimator, "multi_reward", False))


def takes_tables(estimator: Callable[..., Any]) -> bool:
    """Whether tables of groups suffice for an estimator, without the units of other ranks."""
    return bool(_mark(estimator, "tables", False))


def gathers_units(estimator: Callable[..., Any]) -> bool:
    """Whether an estimator of :func:`over_ranks` gathers the units of all ranks, by whose ids they are told apart."""
    return bool(_mark(estimator, "gathers", False))


def accepted_keywords(estimator: Callable[..., Any], *positional: Any, **given: Any) -> dict[str, Any]:
    """The arguments among these that an estimator takes, and that neither ``positional`` ones nor a partial fix."""
    taken, fixed = _mark(estimator, "parameters", None), getattr(estimator, "keywords", {})
    if not isinstance(taken, tuple):  # a module has another attribute of that name
        taken = tuple(inspect.signature(estimator).parameters)
    taken = taken[len(positional) :]
    return {name: value for name, value in given.items() if name in taken and name not in fixed}


def check_estimator(name: str, estimator: Callable[..., Any], known: Sequence[str], source: str) -> None:
    """Check that rewards and the ``known`` keywords, all that ``source`` has, suffice to call an estimator."""
    first = next(iter(inspect.signature(estimator).parameters))
    check(
        not is_published(estimator) or first in ("rewards", "token_rewards", "step_rewards"),
        "{}: {} takes {} where {} has rewards; wrap it in a function of rewards and group_ids",
        name,
        name_of(estimator),
        first,
        source,
    )
    check_keywords(name, estimator, known, source)


def check_keywords(name: str, estimator: Callable[..., Any], known: Sequence[str], source: str) -> None:
    """Check that the ``known`` keywords suffice to call an estimator, besides the rewards."""
    missing = missing_keywords([*inspect.signature(estimator).parameters.values()][1:], known)
    check(
        not missing,
        "{}: {} needs {}, of which {} says nothing; fix it with functools.partial, or wrap it",
        name,
        name_of(estimator),
        ", ".join(missing),
        source,
    )


def missing_keywords(parameters: Iterable[inspect.Parameter], known: Collection[str]) -> list[str]:
    """The names of the parameters that have no default and are not known."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needs = [each.name for each in parameters if each.default is each.empty and each.kind in named]
    return [need for need in needs if need not in known]


def keeps_singletons(singleton: str) -> bool:
    """Whether a group of one keeps its raw value."""
    check_choice("singleton", singleton, ("zero", "raw"))
    return singleton == "raw"


def scale_of(scaled: bool) -> Scale:
    return Scale.GROUP if scaled else Scale.NONE


def check_eps(eps: float) -> None:
    """Check the epsilon of a formula outside the operator, which checks its own."""
    check(0 <= eps < math.inf, "eps: expected a finite number >= 0, got {}", eps)


def check_channels(rewards: torch.Tensor, weights: Sequence[float] | None, **units: torch.Tensor | None) -> list[float]:
    """The weights of several rewards ``[C, U]``; 1 each by default. ``units``: the other tensors of units."""
    check_floating("rewards", rewards)
    check(
        rewards.dim() == 2 and len(rewards) > 0,
        "rewards: expected shape [C, U] (one row per reward), got {}",
        list(rewards.shape),
    )
    check(len(rewards) <= MOST_TERMS, "rewards: expected at most {} rewards, got {}", MOST_TERMS, len(rewards))
    check_units(rewards=rewards[0], **units)
    weights = [1.0] * rewards.shape[0] if weights is None else [as_float("weights", weight) for weight in weights]
    check(
        len(weights) == rewards.shape[0],
        "weights: expected {} numbers (one per reward), got {}",
        rewards.shape[0],
        len(weights),
    )
    check_all_finite("weights", weights)
    return weights


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum of all units, in a fixed order."""
    own, group = sum_in_order(values), ranks()
    return own if group is None else sum_of_ranks(own, group)


def as_advantages(exact: torch.Tensor, rewards: torch.Tensor, backend: str | None) -> torch.Tensor:
    """Numbers of float64 in the precision of the result: float32, or that of the rewards of the reference."""
    return exact.to(rewards.dtype if keeps_doubles(backend) else torch.float32)


def about_group(
    exact: torch.Tensor,
    rewards: torch.Tensor,
    ids: torch.Tensor | None,
    *,
    weights: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    backend: str | None,
) -> torch.Tensor:
    """Numbers of float64, minus the least of their group: float32 keeps the differences of members, whatever
    offset they share. A group of one keeps its value."""
    group = statistics(exact, ids, weights=weights, mask=mask, backend=backend)
    return as_advantages(exact - torch.where(group.members > 1, group.least, 0.0), rewards, backend)


def known(values: torch.Tensor) -> torch.Tensor:
    """Values, and 0 where one is NaN or infinite: it says nothing."""
    return torch.where(torch.isfinite(values), values, 0.0)


def scorable(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The units ``[U]`` of the mask whose value is finite."""
    return torch.isfinite(values) if mask is None else torch.isfinite(values) & mask


def among(ids: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
    """Ids ``[U]`` of some units ``[U]`` bool; -1, which belongs to no group, for the others."""
    return torch.where(units, ids, -1)


def grouped(units: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The members ``[U]`` bool of these units that are in a group."""
    return units if ids is None else units & (ids >= 0)


def members_of(values: torch.Tensor, group: GroupStatistics, mask: torch.Tensor | None) -> torch.Tensor:
    """The units ``[U]`` that entered the statistics of these values."""
    return scorable(values, mask) & (group.members > 0)
