"""Every gate that tests know, examples that all of them take, and which backend runs which gate.

A gate's optional inputs are drawn with the example, so that what holds for every gate is one test: test_promises.py.
"""

import copy
import enum
import functools
import itertools
import math

import hierarchies
import paper_formulas as paper
import torch
from breadth import number, tried
from hierarchies import DOMAIN, GROUP, SMALL, STEP, TRAJECTORY

import hpo_core as hpo
from hpo_core import gates, kl, testing
from hpo_core.entropy import Selection
from hpo_core.gates import (
    Aggregate,
    Channel,
    Clip,
    Drop,
    Excess,
    Gamma,
    Head,
    Identity,
    Level,
    LogClip,
    Penalty,
    RatioGate,
    Reduction,
    Rollback,
    Routing,
    Tanh,
    Unit,
)
from hpo_core.metrics import SLOTS
from hpo_core.specs import TermSpec
from hpo_core.testing import PolicyLossExample

# -------------------------------------------------------------------------------------------------------------- kinds

LOW, HIGH = (0.0, 0.8), (1.2, math.inf)  # PPO's one-sided pair: (advantage >= 0, advantage < 0)

# One gate of every structure that kernels may specialise on, and clips of every shape.
KINDS = {
    "identity": RatioGate("identity", Identity()),
    "identity, score": RatioGate("identity, score", Identity(), head=Head.SCORE),
    "drop, score": gates.reinforce(),
    "pessimistic clip": gates.dapo(),
    "dual clip": gates.ppo_clip(0.2, 0.2, ratio_dual=1.5),
    "two-sided clip": RatioGate("two-sided clip", Clip((0.7, 0.8), (1.3, 1.2))),
    "clip, score": gates.cispo(1.3, 0.8),
    **{
        f"level {name}, {routing.name.lower()}{', score' * (head is Head.SCORE)}": RatioGate(
            name, Drop(), (Level(gate, routing),), head
        )
        for name, gate in {"identity": Identity(), "clip": Clip(LOW, HIGH)}.items()
        for routing, head in itertools.product(Routing, (Head.LINEAR, Head.SCORE))
        if not (routing is Routing.STOPPED and head is Head.LINEAR)  # no gradient at all: RatioGate refuses it
    },
    "gspo": gates.gspo(),
    "level two-sided clip": RatioGate("two-sided", Drop(), (Level(Clip((0.95, 0.9), (1.1, 1.05))),)),
}
PENALTIES = [None] + [
    make(0.3, gradient)
    for make, gradient in itertools.product((kl.k1, kl.k2, kl.k3), ("value", "straight_through", "importance"))
]

# ---------------------------------------------------------------------------------------------------------- presets

# name: (gate, the objective of a sequence, the input that it needs beside the batch). Numbers are such that every
# branch fires.
PRESETS = {
    "reinforce": (gates.reinforce(), paper.reinforce, ""),
    "ppo_clip": (gates.ppo_clip(), paper.ppo_clip, ""),
    "ppo_clip, dual": (gates.ppo_clip(ratio_dual=1.3), functools.partial(paper.ppo_clip, dual=1.3), ""),
    "dapo": (gates.dapo(), functools.partial(paper.ppo_clip, high=0.28), ""),
    "triplet_clip": (
        gates.triplet_clip(0.1, 1.4, 0.3), functools.partial(paper.ppo_clip, low=0.1, high=0.3, dual=1.4), ""
    ),
    "ce_gppo": (gates.ce_gppo(ratio_dual=1.4), functools.partial(paper.ce_gppo, c=1.4), ""),
    "cispo": (gates.cispo(1.2, 0.9), functools.partial(paper.cispo, cap=1.2, low=0.9), ""),
    "cispo, unified": (
        gates.cispo(1.2, 0.9, unified=True), functools.partial(paper.cispo, cap=1.2, low=0.9, unified=True), ""
    ),
    "aspo": (gates.aspo(ratio_dual=1.3), functools.partial(paper.aspo, c=1.3), ""),
    "hapo_clip": (gates.hapo_clip(ratio_dual=1.4), functools.partial(paper.ppo_with_bounds, dual=1.4), "bounds"),
    "archer_clip": (gates.archer_clip(ratio_dual=None), paper.ppo_with_bounds, "bounds"),
    "bapo": (gates.bapo(1.3), functools.partial(paper.ppo_with_bounds, dual=1.3), "bounds"),
    "m2po_clip": (gates.m2po_clip(1.4), functools.partial(paper.ppo_with_bounds, dual=1.4), "bounds"),
    "dcpo_clip": (gates.dcpo_clip(1.5), functools.partial(paper.ppo_with_bounds, dual=1.5), "bounds"),
    "fipo": (gates.fipo(ratio_dual=1.25), paper.fipo, "future"),
    "clip_cov": (gates.clip_cov(), paper.ppo_clip, "token_mask"),
    "capo": (gates.capo(), paper.ppo_clip, "token_mask"),
    "m2po": (gates.m2po(), paper.unclipped, "token_mask"),
    "kl_cov": (gates.kl_cov(0.5), functools.partial(paper.kl_cov, coefficient=0.5), "penalty_mask"),
    "sapo": (gates.sapo(), paper.sapo, ""),
    "spo": (gates.spo(), paper.spo, ""),
    "bpo": (gates.bpo(), paper.bpo, "target"),
    "gbpo": (gates.gbpo(), paper.bpo, "target"),
    "nft": (gates.nft(), paper.nft, "target"),
    "dro": (gates.dro(0.7), functools.partial(paper.quadratic, beta=0.7), ""),
    "kimi": (gates.kimi(), paper.quadratic, ""),
    "opmd": (gates.opmd(), paper.opmd, ""),
    "mdpo": (gates.reconstructed.mdpo(0.5), functools.partial(paper.mdpo, tau=0.5), ""),
    **{
        f"ppo_penalty, {penalty.name}": (
            gates.ppo_penalty(0.5, penalty), functools.partial(paper.ppo_penalty, beta=0.5, k=int(penalty)), ""
        )
        for penalty in (Penalty.K1, Penalty.K2, Penalty.K3)
    },
    "gspo": (gates.gspo(0.02, 0.03), functools.partial(paper.gspo, low=0.02, high=0.03), ""),
    "gspo_token": (gates.gspo_token(0.02, 0.03), functools.partial(paper.gspo_token, low=0.02, high=0.03), ""),
    "luspo": (gates.luspo(0.02, 0.03), functools.partial(paper.gspo, low=0.02, high=0.03), ""),
    "gmpo": (gates.gmpo(0.1, 0.1), functools.partial(paper.gmpo, low=0.1, high=0.1), ""),
    "topr": (gates.topr(), paper.topr, ""),
    "topr, mean": (gates.topr(Aggregate.MEAN), functools.partial(paper.topr, mean=True), ""),
    "vespo": (gates.vespo(), paper.vespo, ""),
    "a_lol": (gates.a_lol(0.3), functools.partial(paper.a_lol, c=0.3), ""),
    "rec": (gates.rec(), paper.rec, ""),
    "rec, two sides": (
        gates.rec(0.1, 0.2, one_sided=False, importance=True),
        functools.partial(paper.rec, low=0.1, one_sided=False, importance=True),
        "",
    ),
    "rec_ring": (
        gates.rec_ring(),
        functools.partial(paper.rec_ring, low=0.08, high=0.1, far_low=0.13, far_high=0.16),
        "ring",
    ),
    "rec_ring, importance": (
        gates.rec_ring(importance=True),
        functools.partial(paper.rec_ring, low=0.08, high=0.1, far_low=0.13, far_high=0.16, importance=True),
        "ring",
    ),
    "fiberpo": (
        gates.fiberpo(0.1, (0.08, 0.05)), functools.partial(paper.fiberpo, epsilon=0.1, plus=0.08, minus=0.05), ""
    ),
    "fiberpo, slope 2": (
        gates.fiberpo(0.1, (0.06, 0.05), 2.0),
        functools.partial(paper.fiberpo, epsilon=0.1, plus=0.06, minus=0.05, slope=2.0),
        "",
    ),
    "apc": (gates.reconstructed.apc(0.12), functools.partial(paper.apc, delta=0.12), ""),
    "apc, censored": (gates.reconstructed.apc(0.02), functools.partial(paper.apc, delta=0.02), ""),
    "p3o": (gates.reconstructed.p3o(), paper.p3o, "pairs"),
    "chord, rows of an expert": (gates.reinforce(), paper.chord_expert, "chord_weight"),
    "hispo": (gates.hispo(0.05, 0.2), functools.partial(paper.hispo, sequence=0.05, token=0.2), "roll"),
    "opsm": (gates.opsm(0.01), functools.partial(paper.opsm, delta=0.01), "roll"),
    "decoupled": (gates.decoupled(), paper.decoupled, "roll"),
    "decoupled, capped": (gates.decoupled(ratio_cap=1.1), functools.partial(paper.decoupled, cap=1.1), "roll"),
    "tis": (gates.tis(1.1), functools.partial(paper.decoupled, cap=1.1), "roll"),
    "tis, sequence": (
        gates.tis(1.1, Unit.TRAJECTORY), functools.partial(paper.sequence_tis, cap=1.1), "roll"
    ),
    "icepop": (gates.icepop(0.9, 1.2), functools.partial(paper.icepop, low=0.9, high=1.2), "roll"),
    "mis": (gates.mis(ratio_high=1.2), functools.partial(paper.mis, high=1.2), "roll"),
    "mis, geometric, veto": (
        gates.mis(0.98, 1.02, reduction=Reduction.MEAN, ratio_veto=0.8),
        functools.partial(paper.mis, low=0.98, high=1.02, mean=True, veto=0.8),
        "roll",
    ),
    "dppo_tv": (gates.dppo_tv(0.03, 0.02, 1.1), functools.partial(paper.dppo_tv, low=0.03, high=0.02, cap=1.1), ""),
    "dppo_tv, total": (
        gates.dppo_tv(0.03, 0.02, 1.1, Channel.TOTAL),
        functools.partial(paper.dppo_tv, low=0.03, high=0.02, cap=1.1, anchor="roll"),
        "roll",
    ),
    "dppo_kl": (gates.dppo_kl(0.003), functools.partial(paper.dppo_kl, delta=0.003), ""),
}  # fmt: skip

# -------------------------------------------------------------------------------- heads, slopes, weights, penalties

NUMBERS = {Head.FLIPPED: (1.05, 1.06)}
# Both bounds of both signs, each with a slope and a weight of its own.
BEYOND = Clip((0.93, 0.9), (1.08, 1.05), (0.5, 0.25), (0.3, 1.0), (1.1, 0.75), (0.6, 1.2))
SLOPES = Clip((0.93, 0.9), (1.08, 1.05), (0.5, 0.25), (0.3, 1.0))
CENSORED = {
    "token": (Unit.TRAJECTORY, Routing.THROUGH),
    "split": (Unit.GROUP, Routing.THROUGH),
    "pre-gated": (Unit.STEP, Routing.STOPPED),
}
ROLLED = Level(Rollback((0.03, 0.02), most=3.0))


def gate_of(head, kind):
    numbers = NUMBERS.get(head, (0.7, 1.3))
    shared = {"head": head, "head_numbers": numbers, "penalty": Penalty.K3, "penalty_coefficient": 0.1}
    if head is Head.CENSORED:  # it knows no other levels
        unit, routing = CENSORED[kind]
        return RatioGate(kind, Drop(), (Level(Excess(0.07), routing, unit, Aggregate.SUM),), **shared)
    if kind == "token":
        return RatioGate("token", BEYOND, **shared)
    if kind == "split":
        levels = (ROLLED, Level(Tanh(0.02), unit=Unit.GROUP))
        return RatioGate("split", SMALL, levels, split=True, **(shared | {"penalty": Penalty.ABSOLUTE}))
    pre = LogClip((-0.05, -0.1), (0.06, 0.04))
    levels = (Level(Identity(), Routing.SELF, Unit.STEP), ROLLED)
    return RatioGate("pre-gated", SLOPES, levels, pre=pre, **(shared | {"penalty": Penalty.K2}))


TERMS = {
    **{
        f"{head.name}, {kind}": gate_of(head, kind)
        for head, kind in itertools.product(Head, ("token", "split", "pre-gated"))
    },
    "GAMMA": RatioGate("gamma", Drop(), (Level(Gamma((2.0, 3.0), (3.0, 2.0)), aggregate=Aggregate.SUM),), Head.SCORE),
}

# ------------------------------------------------------------------------------------------------------- the catalogue

FAMILIES = {
    "preset": {name: gate for name, (gate, _, _) in PRESETS.items()},
    "hierarchy": hierarchies.GATES,
    "kind": KINDS,
    "term": TERMS,
}
CATALOGUE = {f"{family}: {name}": gate for family, members in FAMILIES.items() for name, gate in members.items()}


def structure(gate):
    """The structure that kernels are made for: the gate's spec and its corrections without their numbers."""
    return _structure(gate.spec()), tuple(
        (_structure(each.spec()), each.unit, each.channel) for each in gate.corrections
    )


def _structure(spec):
    if isinstance(spec, TermSpec):  # kernels know which of its numbers are given at all
        numbers = [name for name in spec._fields if name not in ("head_numbers", "penalty_coefficient", "penalty")]
        given = tuple(getattr(spec, name) != getattr(TermSpec(), name) for name in numbers)
        return spec.penalty, given
    if isinstance(spec, tuple):
        return tuple(map(_structure, spec))
    return spec if isinstance(spec, bool | enum.Enum) else None


def _firsts():
    found = {}
    for name, gate in CATALOGUE.items():
        found.setdefault(structure(gate), name)
    return {name for name in found.values() if not name.startswith("term: ")}


FIRSTS = _firsts()  # of every structure


def paths_of(backend):
    """The gates that a backend runs in a test: breadth where it is cheap, paths elsewhere.

    Numbers are run-time arguments of kernels, so that gates of one structure are one path. For a call that C++ computes
    in a fraction of a millisecond the emulated CUDA takes ten and Triton's interpreter a hundred: these run the first
    gate of every structure, and at length (breadth.py) the others as well. Gates that no method is are paths of
    test_terms.py alone.
    """
    every = set(CATALOGUE)
    return number(backend, at_length=every, machine_code=every, emulated=FIRSTS, interpreted=FIRSTS)


def running(name, backends):
    """The backends among these of which the gate is a path."""
    return [backend for backend in backends if name in paths_of(backend)]


def judging(name, backends):
    """The backends among these that try the gate's own numbers: all that are not interpreted."""
    return [backend for backend in backends if name in tried(backend, CATALOGUE, FIRSTS)]


# ------------------------------------------------------------------------------------------------------------ examples


@functools.cache
def drawn_steps(seed, lengths, gaps):
    """Steps of rows, and the state of the generator behind them, which goes on: draws of one number each take long."""
    draw = torch.Generator().manual_seed(seed)
    steps, end = [], 0
    for length in lengths:
        begin, end = end, end + length
        while begin < end:
            begin += int(torch.randint(0, 2, (), generator=draw)) if gaps else 0
            size = int(torch.randint(1, 5, (), generator=draw))
            if begin < end:
                steps.append((begin, min(begin + size, end)))
            begin += size
    return torch.tensor(steps).reshape(-1, 2), draw.get_state()


class Example:
    """A ragged batch with every level, rows of several steps, trajectories of several rows, groups and domains; and
    whatever a gate may take. Tests change what they like."""

    TOKENS = (
        "logp", "old_logp", "rollout_logp", "ref_logp", "token_advantages", "token_target", "token_weight", "entropy",
        "low", "high", "mask", "token_mask", "penalty_mask", "kl_weight",
    )  # fmt: skip
    ROWS = ("advantages", "weights", "target", "trajectory")

    def __init__(self, seed=0, lengths=(5, 0, 9, 1, 7, 12, 3), spread=0.1, masked=True, several=True, gaps=True):
        steps, state = drawn_steps(seed, tuple(lengths), gaps)
        draw = torch.Generator().set_state(state)
        self.lengths = torch.tensor(lengths)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        tokens, rows = int(offsets[-1]) + 3, len(lengths)
        ids = torch.randint(0, max(1, rows // 2), (rows,), generator=draw) if several else torch.arange(rows)

        def uniform(count, low=0.0, high=1.0):
            return low + (high - low) * torch.rand(count, generator=draw)

        def normal(count):
            return torch.randn(count, generator=draw)

        self.trajectory = ids
        self.mask = uniform(tokens) < (0.8 if masked else 2.0)
        self.batch = hpo.PackedBatch(
            offsets, self.mask, steps=steps.clone(), trajectory_ids=ids if several else None,
            group_ids=ids // 2, domain_ids=ids // 4,
        )  # fmt: skip
        self.old_logp = uniform(tokens, -0.8, -3.8)
        self.logp = self.old_logp + spread * normal(tokens)
        self.advantages, self.token_advantages = normal(rows), normal(tokens)
        if rows:  # the tokens of every second row have one
            alike = self.advantages.flip(0)[self.row()]
            self.token_advantages = torch.where(self.row() % 2 == 0, alike, self.token_advantages)
        self.weights = uniform(rows, 0.1, 1.1)
        self.rollout_logp = self.old_logp + spread / 3 * normal(tokens)
        self.ref_logp = self.old_logp + spread * normal(tokens)
        self.low, self.high = uniform(tokens, 0.7, 0.95), uniform(tokens, 1.05, 1.3)
        self.token_mask, self.penalty_mask = uniform(tokens) < 0.7, uniform(tokens) < 0.5
        self.token_weight = uniform(tokens, 0.2, 2.0)
        self.target, self.token_target = uniform(rows, 0.2, 0.8), uniform(tokens, 0.2, 0.8)
        # Sixty-fourths, whose means are exact: a tie with the threshold is one on every backend.
        self.entropy = torch.randint(0, 128, (tokens,), generator=draw) / 64
        self.kl_weight = torch.where(uniform(tokens) < 0.3, 0.0, uniform(tokens, -0.5, 2.0))

    def row(self):
        """The row of each token; the last one's for tokens beyond it."""
        row = torch.searchsorted(self.batch.cu_seqlens[1:], torch.arange(self.logp.numel()), right=True)
        return row.clamp(max=self.lengths.numel() - 1)

    def segment(self, unit):
        """The segment of this kind in which each token lies."""
        if unit is STEP:
            return self.batch.step_of_token()
        ids = {TRAJECTORY: self.trajectory, GROUP: self.batch.group_ids, DOMAIN: self.batch.domain_ids}
        return ids[unit][self.row()]

    def covered(self, gate):
        """Valid tokens: in a row, not masked, and in a step where steps are a level."""
        rows = torch.arange(self.logp.numel()) < self.batch.cu_seqlens[-1]
        inside = self.batch.step_of_token() >= 0 if any(level.unit is STEP for level in gate.levels) else rows
        return rows & self.mask & inside

    def needed(self, gate):
        """Inputs without which the gate is none, or another one."""
        named = {
            "target": self.target, "bounds": (self.low, self.high), "token_mask": self.token_mask,
            "penalty_mask": self.penalty_mask, "token_weight": torch.ones_like(self.token_weight),
        }  # fmt: skip
        given = {name: value for name, value in named.items() if name in gate.required}
        return given | ({"rollout_logp": self.rollout_logp} if gate.reads_rollout else {})

    def everything(self, gate):
        """All inputs that the gate takes, per token where there is a choice."""
        given = self.needed(gate) | {
            "advantages": self.token_advantages, "ref_logp": self.ref_logp, "kl": kl.k3(0.1), "entropy": self.entropy,
            "window": hpo.entropy.forking_tokens("0.6"), "threshold": torch.tensor([0.7]),
            "token_mask": self.token_mask, "token_weight": self.token_weight,
        }  # fmt: skip
        given |= {"target": self.token_target} if gate.takes_target else {}
        given |= {"bounds": (self.low, self.high)} if gate.takes_bounds else {}
        return given | ({"penalty_mask": self.penalty_mask} if gate.penalty_coefficient else {})

    def paying(self, gate):
        """Few inputs, and a penalty with a coefficient of each token, beside which a call takes no window."""
        penalty = {"ref_logp": self.ref_logp, "kl": kl.k3(0.1), "kl_weight": self.kl_weight}
        return self.needed(gate) | penalty

    def select(self, rows):
        """The example of these rows in this order, and the tokens it takes."""
        part = copy.copy(self)
        part.batch, tokens = self.batch.select(rows)
        for name in self.TOKENS:
            setattr(part, name, getattr(self, name)[tokens])
        for name in (*self.ROWS, "lengths"):
            setattr(part, name, getattr(self, name)[rows])
        return part, tokens

    def call(self, gate, dtype=torch.float32, **keywords):
        """The arguments of a call, of which ``keywords`` replace or add some; what is a gate's input goes there."""
        given = {name: getattr(self, name) for name in ("logp", "old_logp", "advantages", "weights")} | keywords
        given = {name: _cast(value, dtype) for name, value in given.items()}
        arguments = [given.pop(name) for name in ("logp", "old_logp", "advantages")]
        given.setdefault("advantage_level", "token" if arguments[2].shape == self.logp.shape else "row")
        of_gate = [name for name in gates.GateInputs._fields if name[:6] != "token_" or name in gate.required]
        inputs = {name: given.pop(name) for name in of_gate if name in given}
        if any(value is not None for value in inputs.values()):
            given["gate_inputs"] = gates.GateInputs(**inputs)
        if "kl_weight" in given:
            given["selection"] = Selection(kl_weight=given.pop("kl_weight"))
        return PolicyLossExample(*arguments, self.batch, gate, given)

    def run(self, gate, backend, **keywords):
        """The result of the call without autograd; the reference in float64."""
        example = self.call(gate, torch.float64 if backend == "reference" else torch.float32, **keywords)
        if (device := testing.device_of(backend)) != "cpu":
            example = testing.move(example, device)  # a copy, without what the batch has computed
        arguments = (example.logp, example.old_logp, example.advantages, example.batch, gate)
        out = hpo.policy_loss_and_grad(*arguments, backend=backend, **example.keywords)
        return out._replace(loss=out.loss.cpu(), grad=out.grad.cpu(), metrics=hpo.Metrics(out.metrics.vector.cpu()))


def _cast(value, dtype):
    if type(value) is tuple:
        return tuple(_cast(each, dtype) for each in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


# ------------------------------------------------------------------------------------------------------- what is judged


def the_long_way(logp):
    """So far a reference policy that the fast path of the CPU under levels does not take it; its penalty is 0."""
    return {"ref_logp": logp - 11, "kl": hpo.kl.k1(0.0)}


def assert_same_metrics(one, other):
    """But for the distance from a reference policy."""
    kept = [not name.startswith("reference") for name in SLOTS]
    torch.testing.assert_close(one.metrics.vector[kept], other.metrics.vector[kept], rtol=1e-6, atol=1e-6)


def bits(*tensors):
    """The bytes of tensors: +0 and -0 differ, a NaN equals itself."""
    return [tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in tensors]


def run(backend, example, **keywords):
    """Loss, gradient, loss_t and metrics of an example of ``hpo_core.testing`` on a backend."""
    fn = functools.partial(hpo.policy_loss, backend=backend, report=("tokens",), **keywords)
    return testing.run_policy_loss(fn, testing.move(example, testing.device_of(backend)))


def assert_exact(backend, example, expected=None):
    """Within the budget of what the reference expects, which is computed here where it is not given."""
    out, expected = run(backend, example), expected or testing.expect_policy_loss(example)
    for name in ("loss", "grad", "tokens"):
        testing.assert_within_budget(f"{backend} {name}", getattr(out, name), expected[name])
    testing.assert_within_budget(f"{backend} metrics", out.metrics.vector, expected["metrics"])
    return out
