"""Every estimator called on a drawn batch, by the name of its loop in naive_estimators.py or naive_hierarchies.py."""

import naive_estimators as naive
import naive_hierarchies as hierarchies
import torch

from hpo_core import advantages, testing
from hpo_core.advantages import reconstructed


class Given:
    """A drawn batch as tensors."""

    def __init__(self, units, backend):
        dtype, device = (torch.float64 if backend == "reference" else torch.float32), testing.device_of(backend)

        def tensor(array):
            kind = dtype if array.dtype.kind == "f" else None
            return torch.tensor(array, dtype=kind, device=device)

        for name, array in units._asdict().items():
            setattr(self, name, tensor(array))
        self.units, self.backend, self.tensor = units, backend, tensor
        self.rest = {"mask": self.mask, "backend": backend}
        self.steps = (self.reward, self.group, self.trajectory, self.anchor)


def flags(g, name):
    """A second id as a bool, whatever ids are called."""
    return g.tensor(getattr(g.units, name) > 0)


def precise(values):
    """Values in float32 at least: log-probabilities in 16 bits are refused."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def prefixes(g):
    return [g.group, g.other, g.third]


def hiper(g):
    out = advantages.hiper(
        g.reward, g.trajectory, g.flag, g.number, g.length / 10, switch_values=g.number / 2,
        is_truncated=flags(g, "third"), gamma=0.9, low_lam=0.8, high_lam=0.7, normalised=False, backend=g.backend,
    )  # fmt: skip
    return torch.stack(out)


def budgets(g):
    return g.tensor(512.0 * (1 + g.units.other))


def several(g):
    return torch.stack([g.reward, g.number])


def combined(g, estimator, *groups, **options):
    of_group = g.tensor(hierarchies.group_rewards(g.units))
    return estimator(g.reward, of_group, g.group, *groups, group_weight=0.3, **options, **g.rest)


def penalised(g):
    starts = torch.arange(0.0, 9.0, 3.0, dtype=g.reward.dtype, device=g.reward.device)[:, None].expand(3, len(g.reward))
    leaves = g.tensor(hierarchies.leaves(g.units))
    segments = advantages.rose(g.reward, prefixes(g), backend=g.backend)
    return advantages.rose_length_penalty(segments, g.reward, prefixes(g), leaves, starts, alpha=2.0, backend=g.backend)


A, R = advantages, reconstructed
CASES = {
    "grpo": lambda g: A.grpo(g.reward, g.group, **g.rest),
    "dr_grpo": lambda g: A.dr_grpo(g.reward, g.group, **g.rest),
    "asymre": lambda g: A.asymre(g.reward, g.group, **g.rest),
    "a_star": lambda g: A.a_star(g.reward, g.group, beta=0.25, **g.rest),
    "rloo": lambda g: A.rloo(g.reward, g.group, **g.rest),
    "grpo_leave_one_out": lambda g: A.grpo_leave_one_out(g.reward, g.group, **g.rest),
    "lite_ppo": lambda g: A.lite_ppo(g.reward, g.group, **g.rest),
    "lite_ppo_groups": lambda g: A.lite_ppo(g.reward, g.group, about_groups=True, **g.rest),
    "opo": lambda g: A.opo(g.reward, g.group, g.length, **g.rest),
    "maxrl": lambda g: A.maxrl(g.reward, g.group, **g.rest),
    "dgpo": lambda g: A.dgpo(g.reward, g.group, accuracy=g.flag.to(g.reward.dtype), **g.rest),
    "gpg": lambda g: A.gpg(g.reward, g.group, **g.rest),
    "gpg_code": lambda g: A.gpg(g.reward, g.group, compat="code", **g.rest),
    "bnpo": lambda g: A.bnpo(g.tensor(naive.rates(g.units)), g.group, **g.rest),
    "ngrpo": lambda g: A.ngrpo(g.reward, g.group, **g.rest),
    "reinforce_pp_baseline": lambda g: A.reinforce_pp_baseline(g.reward, g.group, g.length, **g.rest),
    "v05": lambda g: A.v05(g.reward, g.group, g.number, **g.rest),
    "dvao": lambda g: A.dvao(several(g), g.group, [1.0, 2.0], **g.rest),
    "gdpo": lambda g: A.gdpo(several(g), g.group, [1.0, 2.0], **g.rest),
    "gdpo_tokens": lambda g: A.gdpo(several(g), g.group, [1.0, 2.0], lengths=g.length, **g.rest),
    "gigpo": lambda g: A.gigpo(*g.steps, step_weight=0.5, backend=g.backend),
    "gigpo_code": lambda g: A.gigpo(*g.steps, step_weight=0.5, scaled=False, compat="code", backend=g.backend),
    "hgpo": lambda g: A.hgpo(*g.steps, backend=g.backend),
    "hgpo_code": lambda g: A.hgpo(
        *g.steps, history=1, drop_zeros=False, base_group=True, compat="code", backend=g.backend
    ),
    "dr_mas": lambda g: A.dr_mas(g.reward, g.group, g.other, **g.rest),
    "peco": lambda g: A.peco(g.reward, g.group, g.flag, backend=g.backend),
    "flow_grpo": lambda g: A.flow_grpo(g.reward, g.group, g.length, backend=g.backend),
    "m_grpo": lambda g: A.m_grpo(g.reward, g.group, g.length, **g.rest),
    "hbpo": lambda g: A.hbpo(g.length * 400, g.flag, budgets(g), g.group, backend=g.backend),
    "hbpo_code": lambda g: A.hbpo(
        g.length * 400, g.flag, budgets(g), g.group, compat="code", backend=g.backend
    ),
    "stratified": lambda g: A.stratified(g.reward, g.group, g.other, alpha=0.8, **g.rest),
    "sgrpo": lambda g: combined(g, A.sgrpo, g.other),
    "sgrpo_scaled": lambda g: combined(g, A.sgrpo, g.other, scaled=True),
    "sgrpo_credits": lambda g: combined(g, A.sgrpo, g.other, scaled=True, credits=g.number, temperature=0.7),
    "sgrpo_reward_sum": lambda g: combined(g, A.sgrpo_reward_sum),
    "sgrpo_hierarchical_sum": lambda g: combined(g, A.sgrpo_hierarchical_sum, g.other, scaled=True),
    "tree_grpo": lambda g: A.tree_grpo(g.reward, g.group, g.other, **g.rest),
    "treepo": lambda g: A.treepo(g.reward, prefixes(g), backend=g.backend),
    "treepo_plain": lambda g: A.treepo(g.reward, prefixes(g), by_size=False, drop_flat=True, backend=g.backend),
    "rose": lambda g: A.rose(g.reward, prefixes(g), backend=g.backend),
    "rose_shared": lambda g: A.rose(g.reward, prefixes(g), shared=True, backend=g.backend),
    "treerl": lambda g: A.treerl(g.reward, prefixes(g), backend=g.backend),
    "treerl_code": lambda g: A.treerl(g.reward, prefixes(g), compat="code", backend=g.backend),
    "treepo_segments": lambda g: A.treepo_segments(g.reward, prefixes(g), decay=0.9, backend=g.backend),
    "rose_length_penalty": penalised,
    "mars2": lambda g: A.mars2(g.reward, g.tensor(hierarchies.parents(g.units)), g.group, backend=g.backend),
    "g2rpo": lambda g: A.g2rpo(g.reward, g.group, **g.rest),
    "unlikeliness": lambda g: A.unlikeliness(g.reward, g.group, g.number, penalty=0.5, **g.rest),
    "arena": lambda g: A.arena((g.length / 2).floor(), g.group, **g.rest),
    "pass_at_k": lambda g: A.pass_at_k(g.flag, g.group, 2, **g.rest),
    "grpo_passk": lambda g: A.grpo_passk(g.reward, g.group, **g.rest),
    "pkpo": lambda g: A.pkpo(g.reward, g.group, 3, **g.rest),
    "qae": lambda g: A.qae(g.reward, g.group, **g.rest),
    "hila": lambda g: A.hila(g.reward, flags(g, "other"), flags(g, "third"), g.group, **g.rest),
    "tool_star": lambda g: A.tool_star((4 * g.number).floor() / 4, g.flag, flags(g, "other"), g.group, **g.rest),
    "unidoc_rl": lambda g: A.unidoc_rl(
        g.number, g.reward, g.length, g.number, g.tensor(naive.forms(g.units)), g.group, **g.rest
    ),
    "icpo": lambda g: A.icpo(g.reward, g.group, flags(g, "other"), progress=0.25, bonus=2.0, threshold=0.4, **g.rest),
    "mc_grpo": lambda g: A.mc_grpo(g.reward, g.group, **g.rest),
    "adora": lambda g: A.adora(g.reward, g.group, g.length, g.flag, **g.rest),
    "real": lambda g: A.real(g.flag, g.group, g.reward, temperature=0.7, **g.rest),
    "tpo": lambda g: A.tpo(g.reward, g.group, 3 * precise(g.number), precise(g.length) / 4, temperature=0.7, **g.rest),
    "grpo_lead": lambda g: A.grpo_lead(g.reward, g.group, **g.rest),
    "grpo_lead_judged": lambda g: A.grpo_lead(g.reward, g.group, is_correct=g.flag, **g.rest),
    "copo": lambda g: A.copo(
        g.reward, g.group, g.trajectory, g.flag, g.number, variants=2, sharpness=3.0, **g.rest
    ),
    "aspo_shaping": lambda g: A.aspo_shaping(g.reward, g.group, g.number, g.length, g.flag, backend=g.backend),
    "spo_single_stream": lambda g: A.spo_single_stream(g.reward, g.number, **g.rest),
    "gae": lambda g: A.step_gae(
        g.reward, g.number, g.trajectory, gamma=0.9, lam=0.8, whitened=False, backend=g.backend
    ),
    "step_gae": lambda g: A.step_gae(g.reward, g.number, g.trajectory, gamma=0.9, lam=0.8, backend=g.backend),
    "hiper": hiper,
    "himac": lambda g: R.himac(g.reward, g.group, g.flag, g.other, backend=g.backend),
    "thor": lambda g: A.thor(g.reward, g.group, g.flag, g.other, step_weight=0.5, backend=g.backend),
    "hi_agent": lambda g: R.hi_agent(
        g.reward, (8 * g.number).floor() / 8, g.length / 16, g.group, weights=(1.0, 2.0, 1.0), backend=g.backend
    ),
    "a2fm_apo": lambda g: R.a2fm_apo(
        g.tensor(naive.rates(g.units)), flags(g, "other"), g.group, easy=0.5, alpha=2.0, **g.rest
    ),
    "craft_gui": lambda g: R.craft_gui(g.reward, (8 * g.number).floor() / 8, g.group, judge_weight=0.25, **g.rest),
    "datarus": lambda g: R.datarus(g.reward, (8 * g.number).floor() / 8, g.group, progress=0.3, **g.rest),
    "hi_grpo": lambda g: R.hi_grpo(several(g), g.group, backend=g.backend),
    "chrpo": lambda g: R.chrpo(g.reward, g.number, g.group, backend=g.backend),
    "hrpo": lambda g: R.hrpo(
        g.reward, g.tensor(hierarchies.outcomes(g.units)), g.group, g.trajectory, action_weight=0.5, backend=g.backend
    ),
    "salt": lambda g: R.salt(
        g.tensor(hierarchies.outcomes(g.units)), g.group, g.trajectory, g.anchor, backend=g.backend
    ),
    "graph_grpo": lambda g: R.graph_grpo(
        g.tensor(hierarchies.outcomes(g.units)), g.group, g.trajectory, g.anchor, backend=g.backend
    ),
    "hc_grpo": lambda g: R.hc_grpo(g.reward, torch.stack([g.number, g.length / 10]), g.group, backend=g.backend),
}  # fmt: skip

# Cases that put other estimators together, of which a few batches show a break.
COMPOSED = (
    *("sgrpo_reward_sum", "sgrpo_hierarchical_sum", "treepo_segments", "rose_length_penalty", "grpo_passk", "hila"),
    *("tool_star", "thor", "hi_agent", "a2fm_apo", "sgrpo_credits", "unidoc_rl", "icpo", "datarus", "craft_gui"),
    *("tree_grpo", "grpo_leave_one_out", "unlikeliness", "treerl_code", "tpo", "grpo_lead", "grpo_lead_judged", "copo"),
)

# Cases that together start every kernel of Triton with every structure that any case starts it with.
PATHS = (
    *("grpo", "lite_ppo", "maxrl", "dgpo", "reinforce_pp_baseline", "dvao", "gdpo", "gigpo", "gigpo_code", "hgpo"),
    *("lite_ppo_groups", "hgpo_code", "peco", "hbpo", "sgrpo", "sgrpo_scaled", "treepo", "treepo_plain", "mars2"),
    *("salt", "flow_grpo"),
)
