"""Valid calls of every public function that takes tensors, in which tests change one argument.

All numbers are short in binary, so that every floating-point type holds them, and no two of the sizes U, S, T, N differ
by one.
"""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from valid_operators import operator_calls
from valid_values import BY_NAME, LOGITS, TARGETS, TEMPERATURES, WEIGHT, S, T, U, batch, bools, floats, integers

import hpo_core as hpo
from hpo_core import gates
from hpo_core.advantages import BetaTracker, GroupHistory, GroupTerm, Term
from hpo_core.batch import PackedBatch
from hpo_core.entropy import EntropyWindow, PivotState, ScopeStatistics, Selection, WindowState
from hpo_core.level_metrics import LevelMetrics
from hpo_core.metrics import Metrics, Observations
from hpo_core.segments import Chains, GroupStatistics
from hpo_core.value_loss import ValueMetrics

MODULES = (
    "hpo_core", "hpo_core.advantages", "hpo_core.advantages.reconstructed", "hpo_core.aggregation", "hpo_core.entropy",
    "hpo_core.entropy.reconstructed", "hpo_core.gates", "hpo_core.kl", "hpo_core.logprob_states", "hpo_core.segments",
    "hpo_core.testing",
)  # fmt: skip
CLASSES = (
    PackedBatch,
    EntropyWindow,
    WindowState,
    ScopeStatistics,
    PivotState,
    Selection,
    BetaTracker,
    GroupHistory,
    GroupStatistics,
    Chains,
    Metrics,
    LevelMetrics,
    ValueMetrics,
)
OPERATORS = sorted(
    name.removeprefix("hpo_core::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("hpo_core::")
)


class Call(NamedTuple):
    """``free``: the arguments whose shape depends on no other argument."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    free: frozenset[str] = frozenset()

    def kind_of(self, name: str) -> str:
        """The annotation of an argument in the signature."""
        if isinstance(self.function, torch._ops.OpOverloadPacket):
            arguments = self.function.default._schema.arguments
            kind = next(str(argument.type) for argument in arguments if argument.name == name)
            return kind.replace("Optional", "None")
        return next((str(each.annotation) for each in _parameters(self.function) if each.name == name), "")

    def is_optional(self, name: str) -> bool:
        kind = self.kind_of(name)
        return "None" in kind or kind in ("", "Total")  # gathered keywords have no annotation

    def names(self) -> set[str]:
        """The names of all that it takes, given or not."""
        return {*self.arguments, *(each.name for each in _parameters(self.function))}

    def takes_backend(self) -> bool:
        return "backend" in self.names()

    def run(self, arguments: dict[str, Any] | None = None) -> Any:
        arguments = self.arguments if arguments is None else arguments
        positional, named = [], dict(arguments)
        for parameter in _parameters(self.function):  # gathered positional arguments have no names
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional = list(named.pop(parameter.name))
        return self.function(*positional, **named)

    def moved(self, device: str) -> "Call":
        """The call on a device, by its default backend; a method is that of a moved object."""
        given, function = moved(self.arguments, device), self.function
        if "backend" in given:
            given["backend"] = "" if self.name.startswith("torch.ops") else None
        if inspect.ismethod(function) and not isinstance(function.__self__, type):
            function = getattr(moved(function.__self__, device), function.__name__)
        return self._replace(function=function, arguments=given)

    def is_of_testing(self) -> bool:
        return "testing" in getattr(self.function, "__module__", "")


def moved(value: Any, device: str) -> Any:
    """The arguments of a call on a device, whatever holds the tensors."""
    if isinstance(value, torch.Tensor | PackedBatch):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    if any(isinstance(item, torch.Tensor) for item in getattr(value, "__dict__", {}).values()):
        other = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(other, name, moved(item, device))
        return other
    return value


def takes_tensors(function: Callable[..., Any]) -> bool:
    """Whether an argument of the function may hold a tensor, as its annotations say."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        return True
    holders = ("Tensor", "PackedBatch", "Term", "History", "State", "GateInputs", "Total", "Metrics")
    return any(holder in str(parameter.annotation) for parameter in _parameters(function) for holder in holders)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function and method, by its name, and every operator."""
    for name in MODULES:
        module = importlib.import_module(name)
        for member in module.__all__:
            value = getattr(module, member)
            if inspect.isfunction(value):
                yield f"{value.__module__}.{member}", value
    for kind in CLASSES:
        for member in vars(kind):
            value = getattr(kind, member)
            if not member.startswith("_") and callable(value):
                yield f"{kind.__name__}.{member}", value
    yield "PackedBatch", PackedBatch
    for name in OPERATORS:
        yield f"torch.ops.hpo_core.{name}", getattr(torch.ops.hpo_core, name)


@functools.lru_cache
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    if isinstance(function, torch._ops.OpOverloadPacket):
        return []
    return list(inspect.signature(function).parameters.values())


def _of_units(function: Callable[..., Any], **more: Any) -> dict[str, Any]:
    """The arguments of a function of units, by their names; ``more`` replaces some of them."""
    given = {}
    for parameter in _parameters(function):
        if parameter.name in more:
            given[parameter.name] = more[parameter.name]
        elif parameter.name in BY_NAME and "Tensor" in str(parameter.annotation):
            given[parameter.name] = BY_NAME[parameter.name]
    return given


def calls() -> list[Call]:
    return [*_estimators(), *_segments(), *_inputs(), *_windows(), *_aggregations(), *_batches(), *_losses(),
            *_logprobs(), *_metrics(), *_operators()]  # fmt: skip


def _call(function: Callable[..., Any], free: str = "", /, **arguments: Any) -> Call:
    return Call(f"{function.__module__}.{function.__name__}", function, arguments, frozenset(free.split()))


def _method(kind: type, name: str, free: str = "", /, **arguments: Any) -> Call:
    return Call(f"{kind.__name__}.{name}", getattr(kind, name), arguments, frozenset(free.split()))


def _estimators() -> Iterator[Call]:
    several = floats(1, 0, 0.5, 2, 0.25, 1.5, 0.75, -1, 0, 1, 1, 0.5, 2, 0.25, 0, 1).reshape(2, 8)
    prefixes = [U["group_ids"], U["anchor_ids"]]
    parents = integers(-1, -1, 0, 2, 1, 2, 4, 0)
    history = GroupHistory(*(floats(*x).double() for x in ((1, 2), (0.5, 0.25), (0.25, 0.5))))
    tokens = {"batch": batch(), "token_rewards": T["reward"], "entropy": T["entropy"], "values": T["weight"]}
    positioned = {
        **tokens, "group_ids": integers(0, 0, 1), "chosen_probability": T["entropy"] / 4,
        "squared_probabilities": T["entropy"] / 8, "importance": T["weight"],
    }  # fmt: skip
    special: dict[str, dict[str, Any]] = {
        "dvao": {"rewards": several, "weights": None},
        "gdpo": {"rewards": several, "weights": None},
        "vpo": {
            "rewards": floats(*range(24)).reshape(4, 3, 2) / 8,
            "directions": floats(1, 0, 0, 1, 0.5, 0.5).reshape(3, 2),
            "group_ids": integers(0, 0, 1, 1), "mask": bools(1, 1, 1, 1),
        },
        "dcpo": {"prompts": U["group_ids"], "history": history},
        "de_grpo": {"prompts": U["group_ids"], "utility": floats(0.25, 0.5), "samples": 6},
        "rae": {"roles": U["group_ids"], "baselines": floats(0.25, 0.5)},
        "poise": {"sources": integers(1, 0, 3, 2, 5, 4, 7, 6)},
        "mars2": {"parents": parents, "group_ids": integers(0, 0, 0, 0, 0, 0, 0, 0)},
        "hiper": {"is_truncated": U["is_correct"]},
        "treepo": {"prefix_ids": prefixes},
        "treepo_segments": {"prefix_ids": prefixes, "lengths": several},
        "rose": {"prefix_ids": prefixes},
        "treerl": {"prefix_ids": prefixes},
        "rose_length_penalty": {"prefix_ids": prefixes, "segments": several, "starts": several},
        "pass_at_k": {"k": 2},
        "pkpo": {"k": 2},
        "d3s_samples": {"k": 2},
        "craft_gui": {"judge_weight": 0.25},
        "datarus": {"progress": 0.25},
        "icpo": {"progress": 0.25},
        "swarm_samples": {"seed": 1},
        "dynamic_contrastive": {"best": 1, "worst": 1},
        "hi_grpo": {"stage_rewards": several},
        "hc_grpo": {"costs": several},
        "combine": {"terms": [Term(U["rewards"], U["group_ids"], GroupTerm(), U["lengths"])]},
        "hicra": {"batch": batch(), "advantages": S["advantages"], "is_planning": T["bools"]},
        "otb": positioned,
        "tir_otb": positioned,
        "iw_opd": {"batch": batch(), "teacher_logp": T["weight"] - 2, "old_logp": T["reward"] - 2},
        "token_gae": tokens,
        "vapo": tokens,
        "reinforce_pp": tokens,
        "remax": {**tokens, "greedy_rewards": S["advantages"]},
        "prime": {**tokens, "rewards": floats(1, 1, 0), "group_ids": integers(0, 0, 1)},
        "rl_zvp": {
            **tokens, "rewards": floats(1, 1, 0), "group_ids": integers(0, 0, 1), "advantages": S["advantages"],
        },
        "t_ppo": {**tokens, "is_truncated": S["bools"]},
    }  # fmt: skip
    free = {
        "positive_sample": "is_correct", "negative_sample": "is_correct", "vpo": "directions", "dvao": "rewards",
        "gdpo": "rewards", "hc_grpo": "costs", "de_grpo": "utility", "rae": "baselines",
    }  # fmt: skip
    for module in (hpo.advantages, hpo.advantages.reconstructed):
        for name in module.__all__:
            function = getattr(module, name)
            if hasattr(function, "provenance") or name in ("combine", "discounted_returns", "hiper_rewards", "whiten"):
                more = special.get(name, {})
                given = _of_units(function, **more)
                # A function of one tensor takes every shape of it.
                yield _call(function, free.get(name, ""), **given)
    tracker = BetaTracker(floats(1, 2, 3), floats(0.5, 1, 2))
    yield _method(BetaTracker, "start", "successes", successes=floats(3, 4), samples=8)
    yield _method(
        BetaTracker, "updated", self=tracker, rewards=floats(1, 0), prompts=integers(2, 0), divergence=floats(0.25, 0.5)
    )
    history = GroupHistory(*(floats(*x).double() for x in ((1, 2, 0), (0.5, 0.25, 0), (0.25, 0.5, 0))))
    yield _method(
        GroupHistory, "merged", self=history, prompts=integers(2, 0), mean=floats(0.5, 0.25), variance=floats(0.25, 1)
    )


def _segments() -> Iterator[Call]:
    segments = hpo.segments if hasattr(hpo, "segments") else importlib.import_module("hpo_core.segments")
    yield _call(segments.statistics, **_of_units(segments.statistics))
    yield _call(segments.recurrence, "cu_seqlens", **_of_units(segments.recurrence), cu_seqlens=integers(0, 3, 8))
    yield _call(
        segments.recurrence, "cu_seqlens", **_of_units(segments.recurrence), cu_seqlens=integers(0, 3, 8), forward=True
    )
    yield _call(segments.dense_ids, keys=[U["group_ids"], U["anchor_ids"]])
    yield _call(segments.chains, **_of_units(segments.chains))
    steps = segments.chains(U["trajectory_ids"])
    for name in ("sorted", "unsorted", "first", "following"):
        yield Call(f"Chains.{name}", getattr(steps, name), {"values": U["rewards"]})


def _inputs() -> Iterator[Call]:
    of_loss = {"logp": T["logp"], "old_logp": T["old_logp"], "batch": batch()}
    yield _call(gates.archer_bounds, "wide", wide=T["bools"])
    yield _call(gates.dcpo_bounds, "old_logp", old_logp=T["old_logp"])
    yield _call(gates.hapo_bounds, entropy=T["entropy"], batch=batch())
    yield _call(gates.gepo_old_logp, old_logp=T["old_logp"], batch=batch())
    yield _call(gates.gbpo_onerec_old_logp, **of_loss, advantages=S["advantages"], advantage_level="row")
    yield _call(gates.chord_weight, "logp", logp=T["logp"])
    yield _call(gates.icpo_weight, "logp", logp=T["logp"])
    yield _call(gates.ink_grpo_coefficient, step=3)
    for advantages, level in ((S["advantages"], "row"), (T["weight"], "token")):
        given = {"advantages": advantages, "advantage_level": level}
        yield _call(gates.bapo_bounds, **of_loss, **given)
        yield _call(gates.m2po_bounds, **of_loss, **given)
        yield _call(gates.clip_cov_mask, **of_loss, **given, seed=1, low=0.0)
        yield _call(gates.kl_cov_mask, logp=T["logp"], batch=batch(), **given, share=0.25)
        yield _call(gates.rec_ring_mask, **of_loss, **given)
        yield _call(gates.vaco_mask, **of_loss, **given, delta=0.25)
        yield _call(gates.fipo_weight, **of_loss, **given)
    yield _call(gates.m2po_mask, **of_loss)
    yield _call(gates.bpo_target, "advantages", advantages=S["advantages"])
    yield _call(gates.gbpo_target, **_of_units(gates.gbpo_target))


def _windows() -> Iterator[Call]:
    given = {"entropy": T["entropy"], "batch": batch()}
    for window in (hpo.entropy.forking_tokens("0.5"), hpo.entropy.ares(2, "0.5")):
        state = window.fit(**given)
        yield _method(EntropyWindow, "score", self=window, **given)
        yield _method(EntropyWindow, "fit", self=window, **given)
        yield _method(EntropyWindow, "fit_score", "score", self=window, score=T["entropy"])
        yield _method(EntropyWindow, "fit_apply", self=window, **given)
        yield _method(EntropyWindow, "apply", self=window, **given, state=state)
        yield _method(EntropyWindow, "selection", self=window, **given, state=state)
    yield from _presets()
    yield _call(hpo.entropy.window_mean, values=T["entropy"], batch=batch(), first=-1, last=1)
    for aggregate, boundary in (("max", "carry"), ("sum", "zero")):
        span = hpo.entropy.Window(-1, 1, aggregate, boundary)
        yield _call(hpo.entropy.window_aggregate, values=T["entropy"], batch=batch(), window=span)
    scopes = {"values": T["entropy"], "batch": batch()}
    for level in ("row", "group", "call"):
        yield _call(hpo.entropy.quantiles, **scopes, quantile="0.5", scope=level)
        yield _call(hpo.entropy.top_k, **scopes, k=2, scope=level)
    yield _call(hpo.entropy.top_k, **scopes, k=integers(1, 2), scope=integers(1, 0, 1), scopes=2, uid=integers(7, 5, 6))
    yield _call(hpo.entropy.quantiles, **scopes, quantile="0.5", scope=integers(1, 0, 1), expand=True)
    yield _call(hpo.entropy.segment_aggregate, **scopes, level="group", aggregate="sum")
    padded = {"entropy": T["entropy"][:8].reshape(2, 4), "batch": bools(1, 1, 1, 0, 1, 1, 0, 0).reshape(2, 4)}
    yield _method(EntropyWindow, "fit", self=window, **padded)
    yield _method(EntropyWindow, "score", self=window, **padded)


def _presets() -> Iterator[Call]:
    presets, packed = hpo.entropy, batch()
    table = presets.fit_scopes(T["entropy"])
    pivot = presets.fit_pivot(T["entropy"], packed)
    given: dict[str, Any] = {
        "entropy": T["entropy"], "logp": T["logp"], "old_logp": T["old_logp"], "advantages": S["advantages"],
        "old_entropy": T["weight"],
        "batch": packed, "change": T["logp"], "state": table, "mask": T["bools"], "length": 2,
        "window": presets.Window(0, 1), "confidence": T["weight"], "is_correct": S["bools"], "logits": T["logp"],
        "weights": S["weights"], "history": floats(0.5, 0.25), "low": S["weights"], "high": S["weights"] * 4,
        "rows_mask": S["bools"], "uid": integers(2, 0, 1), "threshold": floats(0.5)[0], "counts": floats(3, 1, 2),
        "difficulty": integers(0, 2, 1), "target": floats(1, 2, 4), "scale": floats(0.5, 0.25, 1), "relief": 0.5,
        "beta": floats(0.5, 0.25, 1), "anchor": floats(0.25)[0], "coefficient": floats(0.25)[0], "least": 0.25,
        "integral": floats(0.25)[0], "kappa": floats(0.5, 1), "divergence": floats(0.25, 0.5), "budget": 0.5,
        "rate": 0.5, "most": 4.0, "proportional": 0.5, "integral_gain": 0.25, "group_ids": integers(0, 0, 1),
    }  # fmt: skip
    targets = presets.AresTargets(floats(1, 2, 4), floats(0.5, 0.25, 1))
    scalar = {"entropy": floats(0.5)[0], "target": 0.5}
    special: dict[str, dict[str, Any]] = {
        "hapo": {"state": pivot},
        "hapo_redistribution": {"state": pivot, "bounds": (T["weight"] / 4, T["weight"] + 1)},
        "hapo_temperature": {"state": pivot},
        "hapo_advantages": {"rewards": S["advantages"], "group_ids": integers(0, 0, 1), "lengths": S["advantages"] + 1},
        "ucas": {"confidence": S["advantages"]},
        "ares_threshold": {"state": floats(0.5)[0]},
        "ares_targets": {"state": targets},
        "ares_entropy_reward": {"state": targets},
        "ares_penalty": {
            "state": presets.AresPenalty(
                floats(0.5, 1), floats(0.25, 0.5), floats(0, 0.1), torch.tensor(7, device="cpu")
            )
        },
        "epo": {"kappa": (0.5, 1.5)},
        "skywork_coefficient": scalar,
        "trl_coefficient": scalar,
        "entropic": scalar,
    }
    rows = {"advantages": S["advantages"], "group_ids": integers(0, 0, 1), "cluster_ids": integers(0, 1, 0)}
    special |= {
        "openvl_band": {"coefficient": 0.5},
        "less": {"segment_ids": integers(0, 0, 1, -1, 2, 2, 0, 1, -1, 1, 1)},
        "dcpo_regulariser": {"target_logp": T["logp"]},
        "rlsp_rewards": {"exploration": S["weights"], "share": 0.5},
        "semantic_entropy": rows,
        "seed_grpo": {**rows, "mean_logp": floats(-0.5, -1, -0.25)},
        "target_temperature": {**scalar, "low": 0.5, "high": 1.5},
    }
    functions = [
        (name, getattr(module, name)) for module in (presets, presets.reconstructed) for name in module.__all__
    ]
    for name, function in functions:
        if getattr(function, "provenance", None):
            known = {**given, **special.get(name, {})}
            # A name may be a tensor of one function and a number of another.
            names = [
                each.name
                for each in _parameters(function)
                if each.name in known and (each.default is each.empty or str(each.annotation) not in ("float", "int"))
            ]
            yield _call(function, "history" if name == "epo" else "", **{each: known[each] for each in names})
    yield _call(presets.two_knot, "x", x=T["entropy"])
    yield _call(presets.fit_scopes, values=T["entropy"], ids=integers(0, 0, 1, 1, 2, 0, 2, 1, 0, 2, 1), mask=T["bools"])
    yield _method(ScopeStatistics, "at", "ids", self=table, ids=integers(0, 1))


def _aggregations() -> Iterator[Call]:
    modes = hpo.aggregation
    for function in (modes.prompt_mean, modes.seq_mean_token_mean, modes.seq_mean_token_sum, modes.token_mean):
        yield _call(function, batch=batch(), selected=T["bools"])
        yield _call(function, batch=batch(), total=integers(16)[0])
    for function in (modes.fixed_length, modes.vl_norm):
        yield _call(function, batch=batch(), length=8.0, total=integers(16)[0])


def _batches() -> Iterator[Call]:
    whole = {
        "cu_seqlens": integers(0, 4, 7, 11),
        "mask": bools(1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1),
        "trajectory_ids": integers(0, 0, 0),
        "group_ids": integers(0, 0, 0),
        "domain_ids": integers(0, 0, 0),
    }
    yield Call(
        "PackedBatch", PackedBatch, {**whole, "cu_steps": integers(0, 2, 4, 7, 9, 11)}, frozenset(("mask", "cu_steps"))
    )
    steps = integers(0, 2, 2, 4, 4, 6, 7, 9, 9, 11).reshape(5, 2)
    yield Call(
        "PackedBatch", PackedBatch, {**whole, "steps": steps, "step_ids": integers(0, 1, 2, 3, 3)}, frozenset(("mask",))
    )
    yield _method(
        PackedBatch, "from_padded", "mask", mask=bools(1, 1, 0, 1, 0, 0).reshape(2, 3), group_ids=integers(0, 1)
    )
    yield _method(PackedBatch, "from_lengths", "lengths", lengths=integers(3, 0, 2))
    yield _method(PackedBatch, "select", "rows", self=batch(), rows=integers(2, 0))
    yield _method(PackedBatch, "spread_steps", self=batch(), values=floats(1, 2, 3, 4, 5))
    rows = {"name": "values", "values": floats(1, -1, 0.5), "level": "row", "tokens": (11,)}
    yield _method(PackedBatch, "of_level", self=batch(), **rows)
    yield _method(PackedBatch, "replace", "mask", self=batch(), mask=bools(1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1))


def _selection() -> Selection:
    bounds = (T["weight"] / 4, T["weight"] + 1)
    return Selection(T["bools"], T["weight"], bounds, T["weight"] / 2, T["entropy"], T["entropy"] / 2)


def _losses() -> Iterator[Call]:
    pairs = gates.reconstructed.p3o()
    levels = batch(trajectory_ids=integers(0, 0, 1))
    base = {"logp": T["logp"], "old_logp": T["old_logp"], "batch": levels}
    window, scope = hpo.entropy.ares(2, "0.5"), {"entropy": T["entropy"]}
    optional: list[dict[str, Any]] = [
        {"weights": S["weights"], "ref_logp": T["old_logp"] - 0.25, "kl": hpo.kl.k3(0.125), **scope},
        {"token_mask": T["bools"], "token_weight": T["weight"]},
        {"gate_inputs": gates.GateInputs(bounds=(T["weight"] / 4, T["weight"] + 1))},
        {"window": window, "threshold": floats(0.75), **scope},
        {"window": window, "threshold": window.fit(T["entropy"], levels), **scope},
        {"selection": _selection(), "kl": hpo.kl.k3(0.125), "ref_logp": T["old_logp"] - 0.25},
        {"gate": gates.tis(), "rollout_logp": T["old_logp"] + 0.125},
        {"gate": gates.kl_cov(), "gate_inputs": gates.GateInputs(penalty_mask=T["bools"])},
        {"gate": gates.m2po(), "gate_inputs": gates.GateInputs(token_mask=T["bools"])},
        {"gate": gates.fipo(), "gate_inputs": gates.GateInputs(token_weight=T["weight"])},
        {"gate": gates.bpo(), "gate_inputs": gates.GateInputs(target=floats(1.25, 0.75, 1.5))},
        {"gate": gates.gspo(), "report": ("levels",)},
    ]
    from_elsewhere = {"gate": pairs, "gate_inputs": gates.GateInputs(aggregates={"group": floats(0.25, -0.5)})}
    for function in (hpo.policy_loss, hpo.policy_loss_and_grad):
        yield _call(function, **base, advantages=S["advantages"])
        yield _call(function, **base, advantages=floats(1, -1, 0.5, 2, 0.25), advantage_level="step")
        yield _call(function, **base, advantages=T["weight"], advantage_level="token")
        yield _call(function, "advantages", **base, advantages=floats(1, -1), advantage_level="group")
        for more in optional:
            yield _call(function, **base, advantages=S["advantages"], **more)
        yield _call(function, "gate_inputs", **base, advantages=S["advantages"], **from_elsewhere)
    yield _call(hpo.hierarchical_policy_loss, **base, rewards=floats(1, 0, 0.5))
    yield _call(hpo.hierarchical_policy_loss, **base, rewards=floats(1, 0, 0.5), window=window, entropy=T["entropy"])
    padded = bools(1, 1, 1, 0, 1, 1, 0, 0).reshape(2, 4)
    yield _call(
        hpo.policy_loss, logp=T["logp"][:8].reshape(2, 4), old_logp=T["old_logp"][:8].reshape(2, 4), batch=padded,
        advantages=floats(1, -1),
    )  # fmt: skip
    of_critic = {"values": T["weight"] / 2, "returns": T["weight"], "batch": batch()}
    yield _call(hpo.value_loss, **of_critic, weights=S["weights"])
    yield _call(hpo.value_loss, **of_critic, old_values=T["weight"] / 4, clip=0.25)


def _logprobs() -> Iterator[Call]:
    given = {"logits": LOGITS, "targets": TARGETS}
    yield _call(hpo.token_logprobs, **given)
    # A number for all targets is a temperature, too.
    yield _call(hpo.token_logprobs, "temperature", **given, temperature=TEMPERATURES)
    head = {"hidden": LOGITS, "weight": WEIGHT, "targets": TARGETS, "bias": WEIGHT[:, 0], "backend": "cpu"}
    yield _call(hpo.linear_token_logprobs, **head)
    batch = PackedBatch(integers(0, 3, 5), bools(0, 1, 1, 0, 1))
    yield _call(hpo.linear_token_logprobs, "temperature", **head, temperature=TEMPERATURES, batch=batch)
    part = {**given, "temperature": TEMPERATURES, "first": 8, "vocabulary": 16}
    state = hpo.logprob_states.LogprobState(TEMPERATURES, LOGITS[:, 0] + 1, LOGITS[:, 1], TEMPERATURES - 1)
    yield _call(hpo.logprob_states.part, "temperature", **part)
    yield _call(hpo.logprob_states.merge, "temperature", states=[state, state], temperature=TEMPERATURES)
    # A state without a distance has no entropy.
    yield _call(hpo.logprob_states.finish, "state temperature", state=state, targets=TARGETS, temperature=TEMPERATURES)
    gradients = {"logp_gradient": TEMPERATURES, "entropy_gradient": TEMPERATURES}
    yield _call(hpo.logprob_states.part_gradient, "temperature", **part, state=state, **gradients)
    packed = PackedBatch(integers(0, 3, 5), bools(0, 1, 1, 0, 1))
    loss = {**given, "old_logp": TEMPERATURES - 2, "advantages": floats(1, -1), "batch": packed}
    yield _call(hpo.policy_loss_from_logits, **loss)
    yield _call(hpo.policy_loss_from_logits, "temperature", **loss, temperature=TEMPERATURES, token_weight=TEMPERATURES)
    ids = integers(3, 0, 7, 1, -1, 5, 2, 2, 6, 4, 7, 0, 1, 2, 3).reshape(5, 3)
    for function in (hpo.token_logprobs, hpo.token_statistics):
        yield _call(function, **given, batch=packed, support_floor=floats(0.25, -1, 0.5, 1, 0))
        yield _call(function, "temperature entropy_temperature", **given, temperature=TEMPERATURES,
                    entropy_temperature=TEMPERATURES * 2, support_ids=ids)  # fmt: skip
    each = {"top_k": integers(3, 0, 8, 2, 5), "top_p": floats(0.5, 1, 0.75, 0.25, 0.875)}
    each |= {"temperature": TEMPERATURES, "min_p": floats(0, 0.125, 0.5, 0.25, 0.0625)}
    yield _call(hpo.support_floor, "logits", logits=LOGITS, top_k=3, top_p=0.75)
    yield _call(hpo.support_floor, " ".join(each), logits=LOGITS, **each)


def _metrics() -> Iterator[Call]:
    expected = hpo.testing.Expected(floats(1, 2).double(), floats(1, 2).double(), floats(1, 2))
    yield _call(hpo.testing.budget, expected=expected)
    yield _call(hpo.testing.assert_within_budget, op="loss", got=floats(1, 2), expected=expected)


def _operators() -> Iterator[Call]:
    for name, arguments, free in operator_calls():
        yield Call(f"torch.ops.hpo_core.{name}", getattr(torch.ops.hpo_core, name), arguments, frozenset(free.split()))


def tensors_of(given: Any) -> list[torch.Tensor]:
    """All tensors in the result of a call."""
    if isinstance(given, torch.Tensor):
        return [given.detach()]
    if isinstance(given, PackedBatch):
        return [tensor for tensor in given.__getstate__().values() if isinstance(tensor, torch.Tensor)]
    if isinstance(given, float):
        return [torch.tensor(given, dtype=torch.float64, device="cpu")]
    if isinstance(given, list | tuple):
        return [tensor for each in given for tensor in tensors_of(each)]
    if isinstance(given, Observations | LevelMetrics):
        return [tensor for each in vars(given).values() for tensor in tensors_of(each)]
    return []
