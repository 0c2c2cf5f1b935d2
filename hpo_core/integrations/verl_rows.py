"""The rows behind a policy loss of verl: prompts, entropies, log-probabilities of the sampler and of the reference, and
the selection of an entropy method, which the actor's workers make of all rows of an update.

verl hands a policy loss log-probabilities, advantages and a mask. The rest of a micro-batch lies one call above it, in
``ppo_loss``. :func:`install` lets the losses of this package see it, for the time of that call.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed

from ..batch import PackedBatch
from ..checks import check
from ..entropy import EntropyWindow, Selection, checked_mask
from ..segments import ids_of
from .entropy_methods import SELECTED, MakesSelection, selection_of, selection_tensors

# The entropy method of each loss that has one, by the name of the loss.
METHODS: dict[str, MakesSelection] = {}
# The losses whose gate has a level of prompt groups.
GROUPED: set[str] = set()
# The losses whose gate corrects by the sampler's log-probabilities.
CORRECTING: set[str] = set()

_REFERENCE, _SAMPLER = "ref_log_prob", "rollout_log_probs"
_GROUP_ROWS = "hpo_group_rows"
_MASK = "selection_mask"  # the other fields of a selection lie under the keys of entropy_methods
_NEEDED = ("entropy", "old_log_probs", "advantages", "response_mask")


class MicroBatch(NamedTuple):
    """The facts about the rows of a micro-batch that verl does not tell a policy loss."""

    entropy: torch.Tensor | None = None  # [B, L] of the policy that is trained, with its gradient if verl computes it
    fields: Mapping[str, torch.Tensor] = MappingProxyType({})  # of a selection, [B, L] each
    ref_logp: torch.Tensor | None = None  # [B, L]
    rollout_logp: torch.Tensor | None = None  # [B, L], as the sampler gave them
    prompts: Sequence[str] | None = None  # verl's uid of each row
    # How many rows with valid tokens the update has of each row's prompt; 0 where the row has none itself.
    group_rows: Sequence[int] | None = None
    seed: int = 0  # another for each call and data-parallel rank, the same in every run

    def selection(self) -> Selection | None:
        stored = selection_of(self.fields)
        mask = self.fields.get(_MASK)
        return stored if mask is None else (stored or Selection())._replace(mask=mask)

    def group_ids(self, loss: str, device: torch.device) -> torch.Tensor:
        """``[B]`` int64, the prompts as groups, of which each has all its rows with valid tokens here."""
        check(
            self.prompts is not None and self.group_rows is not None,
            "loss_mode: the gate of {!r} has a level of prompt groups, and verl gives no uid, or no update of its "
            "TrainingWorker has counted them; take verl.trainer.main_ppo with trainer.use_v1=True",
            loss,
        )
        assert self.prompts is not None and self.group_rows is not None
        answers = [pair for pair in zip(self.prompts, self.group_rows, strict=True) if pair[1] != 0]
        here = collections.Counter(prompt for prompt, _ in answers)
        parted = [(here[prompt], rows, prompt) for prompt, rows in answers if here[prompt] != rows]
        check(
            not parted,
            "loss_mode: the gate of {!r} has a level of prompt groups, and a micro-batch has {} of the {} answers to "
            "prompt {}; set actor.shuffle=False, actor.use_dynamic_bsz=False, actor.ppo_micro_batch_size_per_gpu to a "
            "multiple of rollout.n (a larger one where prompts differ in rows), with trainer.use_v1=False "
            "trainer.balance_batch=False; with trainer.use_v1=True register it in a module of "
            "VERL_USE_EXTERNAL_MODULES, which the driver imports, too",
            loss,
            *(parted[0] if parted else ()),
        )
        return ids_of(map(str, self.prompts), device)


_NONE = MicroBatch()
_current: ContextVar[MicroBatch] = ContextVar("micro-batch of the loss that verl computes", default=_NONE)


def current() -> MicroBatch:
    """The micro-batch of the loss that verl computes now; an empty one outside of its ``ppo_loss``."""
    return _current.get()


@functools.cache
def install() -> None:
    """Shows micro-batches to losses and makes selections before an update, in this process.

    Not at import: verl's workers take seconds to import, and only losses that look at rows need them.
    """
    from verl.trainer.distillation import losses as of_distillation  # type: ignore[import-not-found,unused-ignore]
    from verl.workers import engine_workers  # type: ignore[import-not-found,unused-ignore]
    from verl.workers.utils import losses  # type: ignore[import-not-found,unused-ignore]

    shown = _shown(losses.ppo_loss)
    for module in (losses, engine_workers, of_distillation):
        setattr(module, "ppo_loss", shown)  # noqa: B010 (an attribute of modules in general)
    worker: Any = engine_workers.TrainingWorker
    worker.train_mini_batch = _selected(worker.train_mini_batch)


def _shown(ppo_loss: Callable[..., Any]) -> Callable[..., Any]:
    from verl.workers.utils.padding import no_padding_2_padding  # type: ignore[import-not-found,unused-ignore]

    losses = itertools.count()

    @functools.wraps(ppo_loss)
    def shown(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        rank, ranks = 0, 1
        if dp_group is not None:
            rank, ranks = torch.distributed.get_rank(dp_group), torch.distributed.get_world_size(dp_group)
        entropy = model_output.get("entropy")
        names = [name for name in (_MASK, *SELECTED, _REFERENCE, _SAMPLER) if name in data]
        fields = data.select(*names).to_padded_tensor() if names else {}
        micro_batch = MicroBatch(
            entropy=None if entropy is None else no_padding_2_padding(entropy, data),
            fields={name: fields[name] for name in names if name not in (_REFERENCE, _SAMPLER)},
            ref_logp=fields.get(_REFERENCE),
            rollout_logp=fields.get(_SAMPLER),
            prompts=[*data["uid"]] if "uid" in data else None,
            group_rows=[*data[_GROUP_ROWS]] if _GROUP_ROWS in data else None,
            seed=next(losses) * ranks + rank,
        )
        token = _current.set(micro_batch)
        try:
            return ppo_loss(config, model_output, data, dp_group)
        finally:
            _current.reset(token)

    return shown


def _selected(train_mini_batch: Callable[..., Any]) -> Callable[..., Any]:
    """``TrainingWorker.train_mini_batch``, which gets all rows of an update that fall to this rank."""

    @functools.wraps(train_mini_batch)  # verl's worker groups find the method by its attributes
    def selected(self: Any, data: Any) -> Any:
        config = getattr(self.loss_fn, "keywords", {}).get("config")
        policy = getattr(config, "policy_loss", None)
        if policy is None:  # a critic, or a loss of the user's own
            return train_mini_batch(self, data)
        mode = policy.get("loss_mode", "vanilla")
        update = self.hpo_updates = getattr(self, "hpo_updates", -1) + 1
        ranks = self.engine.get_data_parallel_group()
        if mode in METHODS:
            _add_selection(METHODS[mode], mode, data, ranks, update)
        if mode in GROUPED and "uid" in data:
            _count_groups(data, ranks)
        return train_mini_batch(self, data)

    return selected


def _add_selection(method: MakesSelection, mode: str, data: Any, ranks: Any, seed: int) -> None:
    missing = [name for name in _NEEDED if name not in data]
    check(
        not missing,
        "loss_mode: {!r} selects by the entropies of the policy that sampled, and verl gives no {}; set "
        "trainer.use_v1=True and algorithm.rollout_correction.bypass_mode=False",
        mode,
        ", ".join(missing),
    )
    given = data.select(*_NEEDED).to_padded_tensor()
    mask = given["response_mask"] != 0
    group_ids = ids_of(map(str, data["uid"]), mask.device) if "uid" in data else None
    # Without prompts all rows are one group.
    prompts = [*data["uid"]] if "uid" in data else [""] * len(mask)
    spans = any(len(each) > 1 for each in ranks_of_groups(prompts, mask.any(1).tolist(), ranks).values())
    found = selection_tensors(
        method, mask, given["advantages"], group_ids, spans, entropy=given["entropy"].float(),
        logp=given["old_log_probs"], process_group=ranks, seed=seed,
    )  # fmt: skip
    for name, each in found.items():
        data[_MASK if name == "token_mask" else name] = _like(each, data["response_mask"])


def selected_by(
    window: EntropyWindow,
    entropy: torch.Tensor,
    batch: PackedBatch,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: str | None = None,
) -> Selection:
    """The tokens of an update that the window selects, with a threshold over all ranks."""
    state = window.fit(entropy, batch, process_group=process_group, backend=backend)
    return checked_mask(window.apply(entropy, batch, state, backend=backend), entropy, batch)


def check_bypass(config: Any) -> None:
    """Check that the sampler is not the old policy, too, where the loss corrects their difference. ``config``: that of
    a V1 trainer; the others replace the loss in that mode."""
    correction = config.algorithm.get("rollout_correction", None)
    if not correction or not correction.get("bypass_mode", False):
        return
    mode = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    check(
        mode not in CORRECTING,
        "algorithm.rollout_correction.bypass_mode: expected False with loss_mode={!r}, got True; verl then takes the "
        "sampler's log-probabilities for those of the old policy, and the gate has no difference to correct",
        mode,
    )


def _count_groups(data: Any, ranks: Any) -> None:
    """How many rows all ranks have of each row's prompt; a list of numbers beside the rows, so that no device waits.

    Rows without valid tokens are in no aggregate and may lie anywhere: verl fills batches up with such rows, which all
    have one uid.
    """
    from verl.utils import tensordict_utils  # type: ignore[import-not-found,unused-ignore]

    mask = data.select("response_mask").to_padded_tensor()["response_mask"]
    filled = (mask != 0).any(1).tolist()
    rows = {name: sum(counts) for name, counts in ranks_of_groups(data["uid"], filled, ranks).items()}
    numbers = [rows[each] if has_tokens else 0 for each, has_tokens in zip(data["uid"], filled, strict=True)]
    tensordict_utils.assign_non_tensor_stack(data, _GROUP_ROWS, numbers)


def ranks_of_groups(prompts: Iterable[str], filled: Iterable[bool], ranks: Any) -> dict[str, list[int]]:
    """The filled rows of each prompt of all ranks: how many each rank has that has some."""
    counts = [collections.Counter(itertools.compress(prompts, filled))]
    if ranks is not None:
        counts *= torch.distributed.get_world_size(ranks)
        torch.distributed.all_gather_object(counts, counts[0], group=ranks)
    found: dict[str, list[int]] = {}
    for of_rank in counts:
        for name, rows in of_rank.items():
            found.setdefault(name, []).append(rows)
    return found


def _like(values: torch.Tensor, response_mask: Any) -> torch.Tensor:
    """``[B, L]`` values in the layout of the mask: padded, or the rows without their padding."""
    if not response_mask.is_nested:
        return values
    offsets = response_mask.offsets()
    within = torch.arange(values.shape[1], device=values.device) < offsets.diff()[:, None]
    return torch.nested.nested_tensor_from_jagged(values[within], offsets)
