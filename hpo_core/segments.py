"""Statistics of units over integer ids, and scans along rows: the parts of estimators besides their operator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from difflib import SequenceMatcher
from numbers import Integral
from typing import NamedTuple

import torch

from . import ops
from .arguments import check_number, constant, constants, examines
from .checks import (
    INTEGERS,
    check,
    check_device,
    check_dtype,
    check_ids,
    check_real,
    check_row_offsets,
    check_shape,
    check_units,
    examined,
    is_compiling,
    is_traced,
    require_type,
)
from .distributed import common_ids, merged, ranks
from .specs import GroupStatistics

__all__ = ["Chains", "GroupStatistics", "chains", "dense_ids", "ids_of", "recurrence", "similar_ids_of", "statistics"]


@examines
@constants
def statistics(
    values: torch.Tensor,
    ids: torch.Tensor | None,
    *,
    weights: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> GroupStatistics:
    """Statistics of the group of every unit, without a gradient.

    Kernels take values and weights in float32: statistics, in float64, are those of the rounded numbers, and a unit
    whose value is beyond float32, or whose weight rounds to 0, is no member. ``backend="reference"`` keeps float64.

    Args:
        values: ``[U]`` floating point; a unit with a value that is not finite is no member.
        ids: ``[U]`` int32 or int64 in any order; a negative id means no group. None: one group.
        weights: ``[U]`` floating point; a unit without a finite weight above 0 is no member. Default: 1 each.
        mask: ``[U]`` bool, whether a unit is a member. Default: every unit is.

    >>> statistics(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([4, 7, 4])).mean
    tensor([2., 5., 2.], dtype=torch.float64)
    """
    check_units(values=values, ids=ids, weights=weights, mask=mask)
    ids = None if ids is None else ids.to(torch.int64).contiguous()
    mask = None if mask is None else mask.contiguous()
    table = ops.group_statistics(values, ids, weights, mask, backend)
    group = ranks()
    return GroupStatistics(*(table if group is None else merged(table, ids, group)))


@examines
def recurrence(
    values: torch.Tensor,
    gains: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    forward: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """``y_i = x_i + g_i y_{i+1}`` from the end of every row to its start, ``[U]`` float32; after a row y is 0.

    Discounted returns are the recurrence of rewards with the gain gamma, GAE advantages the recurrence of temporal
    differences with the gain ``gamma lambda``. A gain of 0 ends a segment, but NaN and infinity pass it and spread to
    the start of their row. The result has no gradient.

    Args:
        values, gains: ``[U]`` floating point; gains in float64 are not rounded.
        cu_seqlens: ``[R + 1]`` int32 or int64, the rows. Units behind the last one get 0. Impossible offsets are an
            error on a CPU; elsewhere a check would wait for the device, and their results mean nothing.
        forward: ``y_i = x_i + g_i y_{i-1}`` instead, from the start of every row to its end.

    >>> recurrence(torch.tensor([0.0, 0.0, 1.0]), torch.full((3,), 0.5), torch.tensor([0, 3]))
    tensor([0.2500, 0.5000, 1.0000])
    """
    check_units(values=values, gains=gains)
    values, gains = constant(values, backend), gains.detach()
    check_dtype("cu_seqlens", cu_seqlens, INTEGERS, "offsets are integers")
    check(
        cu_seqlens.dim() == 1 and cu_seqlens.numel() > 0,
        "cu_seqlens: expected shape [R + 1] with a leading 0, got {}",
        list(cu_seqlens.shape),
    )
    check_device("cu_seqlens", cu_seqlens, values.device, "values")
    if values.device.type == "cpu" and not is_compiling() and not is_traced():
        check_row_offsets(cu_seqlens, values.numel())
    return scan(values, gains, cu_seqlens, backend, forward).to(values.dtype) + 0.0  # never -0


def scan(
    values: torch.Tensor, gains: torch.Tensor, cu_seqlens: torch.Tensor, backend: str | None, forward: bool = False
) -> torch.Tensor:
    """:func:`recurrence` in float64, for estimators, which compare its results."""
    rows = cu_seqlens.to(torch.int64)
    if forward:
        return scan(values.flip(0), gains.flip(0), values.numel() - rows.flip(0), backend).flip(0)
    values, gains = (each.double().contiguous() for each in (values, gains))
    return ops.recurrence(values, gains, rows.contiguous(), backend)


def ids_of(names: Iterable[str | bytes | int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Ids ``[U]`` int64 from names of units: observations to compare, prompts, datasets.

    Integers stay as they are. Strings (as UTF-8, lone surrogates included) and bytes become 63 bits of BLAKE2b, never
    negative and the same in every process; among a million names two collide with a probability of 5e-8. For an array
    pass its ``tobytes()``. The ids lie on ``device``.

    >>> first, second, third = ids_of(["door closed", "door open", "door closed"])
    >>> bool(first == third), bool(first == second)
    (True, False)
    """
    several = isinstance(names, Iterable) and not isinstance(names, str | bytes | torch.Tensor)
    fix = "pass the tensor itself, in int64" if isinstance(names, torch.Tensor) else "pass a list"
    require_type(several, "names: expected several names, got {!r}; {}", names, fix)
    return torch.tensor([_id_of(name) for name in names], dtype=torch.int64, device=device)


def _id_of(name: str | bytes | int) -> int:
    if isinstance(name, str | bytes):
        content = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else name
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
    message = "names: expected strings, bytes or integers, got {!r}; pass str(name), or tobytes() of an array"
    require_type(isinstance(name, Integral) and not isinstance(name, bool), message, name)  # NumPy's, too
    check(-(2**63) <= name < 2**63, "names: expected integers of 64 bits with a sign, got {}; pass str(name)", name)
    return int(name)


def similar_ids_of(
    texts: Iterable[str],
    threshold: float = 0.95,
    *,
    prompts: Iterable[str | bytes | int] | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Ids ``[U]`` int64 of texts, equal where texts are similar: anchors of GiGPO for observations that never recur
    word for word (arXiv 2505.10978; verl-agent's code).

    One text after the other joins the first cluster of its prompt whose first text is similar, or begins one. Two texts
    are similar if ``difflib.SequenceMatcher(None, text, first).ratio() >= threshold``, twice the matching characters
    over those of both texts. The id is that of :func:`ids_of` of the cluster's first text.

    Args:
        threshold: above 0 and up to 1; .95 as in the code's function, whose recipes take .9.
        prompts: the prompt of each text, within which texts are compared. None: all texts are of one.
        device: that of the ids.

    Traps: the order of texts decides, because only the first text of a cluster is compared with others. It runs in
    Python on the host and compares each different text with the first text of every cluster of its prompt; the time of
    a comparison may grow with the square of the length.

    >>> door, closed, hall = similar_ids_of(["The door is open.", "The door is open!", "A hall."], 0.9)
    >>> bool(door == closed), bool(door == hall)
    (True, False)
    """
    check_number("threshold", threshold)
    check(0 < threshold <= 1, "threshold: expected a ratio in (0, 1], got {}", threshold)
    require_type(
        isinstance(texts, Iterable) and not isinstance(texts, str | bytes | torch.Tensor),
        "texts: expected several strings, got {!r}; pass a list",
        texts,
    )
    texts = list(texts)
    for text in texts:
        require_type(isinstance(text, str), "texts: expected strings, got {!r}; ids_of takes other names", text)
    require_type(not isinstance(prompts, torch.Tensor), "prompts: expected names, got a tensor; use prompts.tolist()")
    named = [0] * len(texts) if prompts is None else ids_of(prompts).tolist()
    check(len(named) == len(texts), "prompts: expected {} names (one per text), got {}", len(texts), len(named))
    clusters: dict[int, dict[str, SequenceMatcher[str]]] = {}
    found: dict[tuple[int, str], str] = {}
    for prompt, text in zip(named, texts, strict=True):
        if (prompt, text) not in found:  # another text like it would compare the same
            found[prompt, text] = _first_similar(text, clusters.setdefault(prompt, {}), threshold)
    return ids_of([found[key] for key in zip(named, texts, strict=True)], device)


def _first_similar(text: str, clusters: dict[str, SequenceMatcher[str]], threshold: float) -> str:
    """The first text of the cluster that a text joins. A matcher prepares its second sequence once."""
    for first, matcher in clusters.items():
        matcher.set_seq1(text)
        # The first two are bounds of the third from above, which takes far longer.
        if all(ratio() >= threshold for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
            return first
    clusters[text] = SequenceMatcher(None, "", text)
    return text


def dense_ids(*keys: torch.Tensor) -> torch.Tensor:
    """One id per distinct combination of keys, ``[U]`` int64: groups of groups, such as (prompt, observation).

    A unit with a negative key gets -1. The ids mean nothing but equality.

    >>> dense_ids(torch.tensor([0, 0, 1, 0]), torch.tensor([5, 7, 5, 5]))
    tensor([0, 1, 2, 0])
    """
    check(len(keys) > 0, "keys: expected at least one tensor of ids")
    keys = tuple(examined(f"keys[{at}]", key) for at, key in enumerate(keys))
    for at, key in enumerate(keys):
        check_ids(f"keys[{at}]", key)
        check(key.dim() == 1, "keys[{}]: expected shape [U] (one per unit), got {}", at, list(key.shape))
        check_shape(f"keys[{at}]", key, keys[0].shape, "[U] (that of keys[0])")
        check_device(f"keys[{at}]", key, keys[0].device, "keys[0]")
    valid = torch.stack([key >= 0 for key in keys]).all(dim=0)
    group = ranks()
    if group is not None:
        return torch.where(valid, common_ids(torch.stack(keys, dim=1), group), -1)
    order = torch.sort(keys[-1], stable=True).indices
    for key in reversed(keys[:-1]):  # stable sorts from the last key to the first; unique() would synchronise
        order = order[torch.sort(key[order], stable=True).indices]
    begins = torch.zeros_like(valid)
    for key in keys:
        begins[1:] |= key[order][1:] != key[order][:-1]
    ids = torch.empty_like(order)
    ids[order] = begins.cumsum(0)
    return torch.where(valid, ids, -1)


class Chains(NamedTuple):
    """Units in the order of their chains, one chain after the other."""

    order: torch.Tensor  # [U] int64, the unit at each place; units in no chain come first
    cu_seqlens: torch.Tensor  # [U + 1] int64, the first place of each chain; chains after the last are empty
    chain: torch.Tensor  # [U] int64, the chain at each place, -1: none

    @examines
    def sorted(self, values: torch.Tensor) -> torch.Tensor:
        """Values ``[U]`` of units, in the order of places."""
        self._check(values)
        return values[self.order]

    @examines
    def unsorted(self, values: torch.Tensor) -> torch.Tensor:
        """Values ``[U]`` at places, in the order of units."""
        self._check(values)
        back = torch.empty_like(values)
        back[self.order] = values
        return back

    def begins(self) -> torch.Tensor:
        """Whether a chain begins at each place ``[U]`` bool."""
        begins = self.chain >= 0
        begins[1:] &= self.chain[1:] != self.chain[:-1]
        return begins

    def ends(self) -> torch.Tensor:
        """Whether a chain ends at each place ``[U]`` bool; undefined outside chains."""
        ends = torch.ones_like(self.chain, dtype=torch.bool)
        ends[:-1] = self.chain[1:] != self.chain[:-1]
        return ends

    @examines
    def first(self, values: torch.Tensor) -> torch.Tensor:
        """The first value of the chain of every place ``[U]``, from values at places; undefined outside chains."""
        self._check(values)
        return values[self.cu_seqlens[self.chain.clamp(min=0)].clamp(max=max(values.numel() - 1, 0))]

    @examines
    def following(self, values: torch.Tensor) -> torch.Tensor:
        """The next value in the chain of every place ``[U]``, from values at places; 0 after the last."""
        self._check(values)
        following = torch.zeros_like(values)
        following[:-1] = values[1:].masked_fill(self.ends()[:-1], 0)
        return following

    def ranks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank of each place in its chain, from 0, and the length of the chain, ``[U]`` int64 each; undefined
        outside chains."""
        begin, end = self.cu_seqlens[self.chain.clamp(min=0)], self.cu_seqlens[(self.chain + 1).clamp(min=0)]
        return torch.arange(self.chain.numel(), device=begin.device) - begin, end - begin

    def _check(self, values: torch.Tensor) -> None:
        check_shape("values", values, self.order.shape, "[U] (one per unit of the chains)")
        check_device("values", values, self.order.device, "the chains")
        check_real("values", values)


@examines
def chains(ids: torch.Tensor, positions: torch.Tensor | None = None) -> Chains:
    """Units with equal ids form a chain, such as the steps of a trajectory. The call never waits for a device.

    Args:
        ids: ``[U]`` int32 or int64, in any order; a negative id means no chain.
        positions: ``[U]``, the order inside a chain. Default: the order of the units. The position NaN of a unit with
            an id >= 0 is an error on a CPU. Elsewhere, where a check would wait for the device, the unit stands last.

    >>> chains(torch.tensor([5, 2, 5])).order
    tensor([1, 0, 2])
    """
    check_units(ids=ids)
    if positions is None:
        sorted_ids, order = torch.sort(ids.clamp(min=-1), stable=True)
    else:
        check_shape("positions", positions, ids.shape, "[U] (that of ids)")
        check_device("positions", positions, ids.device, "ids")
        check_real("positions", positions)
        if positions.is_floating_point() and ids.device.type == "cpu" and not is_compiling() and not is_traced():
            unknown = positions.isnan() & (ids >= 0)
            check(not bool(unknown.any()), "positions: expected numbers, got nan for a unit with an id >= 0")
        by_position = torch.sort(positions, stable=True).indices
        sorted_ids, places = torch.sort(ids[by_position].clamp(min=-1), stable=True)
        order = by_position[places]
    begins = sorted_ids >= 0
    begins[1:] = sorted_ids[1:] != sorted_ids[:-1]
    chain = begins.cumsum(0) - 1
    units = ids.numel()
    # Places where no chain begins write to an extra element, which the result leaves out.
    offset = torch.where(begins, chain, units + 1)
    cu_seqlens = torch.full((units + 2,), units, dtype=torch.int64, device=ids.device)
    cu_seqlens.scatter_(0, offset, torch.arange(units, device=ids.device))
    return Chains(order, cu_seqlens[: units + 1], chain)
