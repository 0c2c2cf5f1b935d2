"""The default numbers of published methods, by function and in the order of its parameters. They are those of papers
and of their code, and a change of one character in a signature would change a method in silence."""

import inspect
import math

import pytest

from hpo_core import advantages, entropy, gates

INF = math.inf

GATES = {
    "a_lol": (0.9,),
    "archer_bounds": ((0.2, 0.2), (0.4, 0.4)),
    "archer_clip": (0.2, 0.2, 10.0),
    "aspo": (0.2, 0.2, 3.0),
    "bapo": (3.0,),
    "bapo_bounds": (1.0, (0.6, 0.8), (1.2, 2.0), 0.05),
    "bpo_target": (0.2, 0.0),
    "capo": (0.2, 0.2),
    "ce_gppo": (0.2, 0.2, 0.25, 1.0, 3.0),
    "cispo": (5.0, 0.0),
    "clip_cov": (0.2, 0.2),
    "clip_cov_mask": (0.0002, 1.0, 5.0, 0.2, 0.2),
    "dapo": (0.2, 0.28),
    "dcpo_bounds": (0.16, 0.2, 10.0),
    "dcpo_clip": (10.0,),
    "decoupled": (0.2, 0.2),
    "dppo_kl": (0.05, 20.0),
    "dppo_tv": (0.15, 0.15, 20.0),
    "dro": (0.1,),
    "fiberpo": (0.2, (0.2, 0.2)),
    "fipo": (0.2, 0.28, 10.0),
    "fipo_weight": (32.0, 0.0, 0.2, 10.0, 10.0, 1),
    "gbpo_target": (0.2, 0.2, 1.0),
    "gmpo": (0.4, 0.4),
    "gspo": (0.0003, 0.0004),
    "gspo_token": (0.0003, 0.0004),
    "hapo_bounds": (0.2, 0.2, 1.0, (4, 5)),
    "hapo_clip": (0.2, 0.2, 10.0),
    "hispo": (0.1, 0.5, 0.2, 3.0, 0.28),
    "icepop": (0.5, 5.0),
    "icpo_weight": (0.1,),
    "ink_grpo_coefficient": (0, 0.1, 0.6),
    "kimi": (0.1,),
    "kl_cov": (1.0,),
    "kl_cov_mask": (0.0002,),
    "luspo": (0.002, 0.0025),
    "m2po_bounds": (0.04,),
    "m2po_mask": (0.04,),
    "mis": (0.0, 3.0),
    "nft": (1.0,),
    "opmd": (1.0,),
    "opsm": (0.5,),
    "ppo_clip": (0.2, 0.2),
    "ppo_penalty": (0.1,),
    "rec": (0.2, 0.2),
    "rec_ring_mask": ((0.2, 0.2), (0.6, 2.0)),
    "sapo": (1.0, 1.05),
    "spo": (0.2,),
    "step_gspo": (0.0003, 0.0004),
    "tis": (2.0,),
    "triplet_clip": (0.2, 3.0, 0.28),
    "vespo": ((2.0, 3.0), (3.0, 2.0)),
}

GATES_RECONSTRUCTED = {
    "apc": (0.1,),
    "fiberpo_domain": (0.2, 0.2, 0.1, 0.1, 1.0),
    "mdpo": (0.1,),
    "p3o": (0.2,),
    "two_scale": ((0.2, 0.2), (0.1, 0.1)),
}

ADVANTAGES = {
    "a_star": (0.5,),
    "adora": (0.1, INF, 1, 1e-06),
    "arena": (1e-06,),
    "aspo_shaping": (-2.0, 0.7),
    "asymre": (-0.1,),
    "bnpo": (1000000.0,),
    "combine": (0.0, 0.0),
    "copo": (4, 2.0, 1, 1e-06),
    "dcpo": (1,),
    "de_grpo": (0.8, 0.2, 0.8, 0.5, 0.0001),
    "dgpo": (2.0, 0.0001),
    "discounted_returns": (1.0,),
    "dr_mas": (1, 1e-06),
    "dvao": (1e-06,),
    "flow_grpo": (1e-06,),
    "gigpo": (0.95, 1.0, 1e-06),
    "grpo": (1, 1e-06),
    "grpo_lead": (0.4, 1.5, 0.75, 10.0, 1, 1e-06),
    "grpo_leave_one_out": (1e-06,),
    "grpo_passk": (1e-06,),
    "hbpo": (4096.0, 4.0, 0.000244140625, 1e-06),
    "hgpo": (0.95, 2, 1.0, 1e-06, 1e-06),
    "hicra": (0.2,),
    "hila": (0.3, 0.1, 0, 1e-06),
    "hiper": (0.95, 0.95, 0.95, 1e-08),
    "hiper_rewards": (-0.3, -0.3),
    "icpo": (1.0, 0.0, 1, 1e-06),
    "iw_opd": (0.5,),
    "lite_ppo": (1, 1e-06),
    "mars2": (0.3, 0.5, 1e-09),
    "maxrl": (1e-06,),
    "mc_grpo": (0.001,),
    "negative_sample": (0.0,),
    "ngrpo": (1.0, 1, 1, 1e-06),
    "pass_at_k": (1e-06,),
    "peco": (1, 1e-06),
    "pf_ppo": (1, 1),
    "prime": (5.0, 5.0),
    "qae": (0.4, 1e-06),
    "rae": (0.95,),
    "real": (0.5,),
    "reinforce_pp": (1.0,),
    "rl_zvp": (0.1, 0.5),
    "rose_length_penalty": (1.0,),
    "sgrpo": (0.5, 1.0, 0.0001),
    "sgrpo_hierarchical_sum": (0.5, 0.0001),
    "sgrpo_reward_sum": (0.5, 0.0001),
    "spo_single_stream": (1e-08,),
    "step_gae": (1.0, 1.0, 1e-08),
    "stratified": (1.0, 1, 1e-06),
    "swarm_samples": (2,),
    "t_ppo": (1.0, 1.0),
    "thor": (1.0, 1e-06),
    "token_gae": (1.0, 1.0),
    "tool_star": (0.1, 1, 1e-06),
    "tpo": (1.0,),
    "tree_grpo": (1, 1e-06),
    "treepo_segments": (1.0,),
    "unidoc_rl": (0.6, 0.1, 1, 1e-06),
    "unlikeliness": (0.25, 1e-06),
    "vapo": (1.0, 0.05),
    "vpo": (1, 1e-06),
    "whiten": (1e-08,),
}

ADVANTAGES_RECONSTRUCTED = {
    "a2fm_apo": (0.75, 2.0, 1e-06),
    "chrpo": (1e-06,),
    "craft_gui": (1, 1e-06),
    "datarus": (1, 1e-06),
    "graph_grpo": (1e-06,),
    "hc_grpo": (1e-06,),
    "hi_agent": ((1.0, 1.0, 1.0), 1e-06),
    "hi_grpo": (1.0, 1e-06),
    "himac": (1e-06,),
    "hrpo": (1.0, 1e-06),
    "ib_tpo": (5.0, 0.1),
    "salt": (1e-06,),
    "v05_samples": (0.00390625, 16),
}

ENTROPY = {
    "aepo_ruc": (0.2, -INF),
    "archer": (0.2, 0.5, 0.0),
    "ares": (4,),
    "ares_next_windows": (4,),
    "ares_penalty": (0.01, 0.97, 0.02, 100, 0.05, 0.2, 0.0001, 100.0),
    "ares_targets": (0.0, 0.05, 2.0),
    "ares_threshold": (4, 0.99),
    "ares_windows": (4,),
    "edge_grpo": (INF,),
    "empg": (1.0, 1.0, 0.05),
    "entropic": (1.0, 0.01),
    "entropy_advantage": (0.4, 2.0),
    "epo": (0.001, (0.8, 1.2), 0.1, 1.0),
    "epo_phase": (1.0,),
    "erc": (0.05, 0.05),
    "ettrl": (-INF,),
    "group_confidence": (2048,),
    "grpo_s": ((1.0, 0.1),),
    "gtpo": ((1.0, 0.1),),
    "hapo": (0.2, 0.28, 1.0),
    "hapo_redistribution": ((0.2, 0.28), 1.0),
    "hapo_temperature": (1.0, 0.1),
    "less_tokens": (5,),
    "siren": (0.005,),
    "skywork_coefficient": (0.2, 0.0001, 0.0, 0.005),
    "steer": (0.8, 0.02),
    "steer_linear": (0.8, 1.2),
    "target_temperature": (0.5, 0.8, 1.2),
    "trl_coefficient": (0.2, 0.005, 0.0, 1.0),
    "two_knot": (0.0, (0.0, 0.0), (0.0, 0.0)),
    "ucas": (0.25, 0.35, 0.05),
    "ulorl": (0.99, 0.2),
}

ENTROPY_RECONSTRUCTED = {"dcpo_regulariser": (INF,), "funrl": (0.4, 2.0), "seed_grpo": (0.02,)}

SPACES = [
    (gates, GATES), (gates.reconstructed, GATES_RECONSTRUCTED), (advantages, ADVANTAGES),
    (advantages.reconstructed, ADVANTAGES_RECONSTRUCTED), (entropy, ENTROPY),
    (entropy.reconstructed, ENTROPY_RECONSTRUCTED),
]  # fmt: skip


def is_number(value):
    return type(value) in (int, float) or (type(value) is tuple and value != () and all(map(is_number, value)))


@pytest.mark.parametrize(("space", "numbers"), SPACES, ids=[space.__name__ for space, _ in SPACES])
def test_default_numbers(space, numbers):
    found = {}
    for name in space.__all__:
        function = getattr(space, name)
        if inspect.isfunction(function):
            defaults = [each.default for each in inspect.signature(function).parameters.values()]
            found[name] = tuple(filter(is_number, defaults))
    assert {name: each for name, each in found.items() if each} == numbers
