"""The CPU backend gives the same bits on every instruction set: one process for each, since it chooses once."""

import os
import subprocess
import sys

import pytest

import hpo_core as hpo

# Everything the backend computes on a few hundred examples, short and long, as one digest.
DIGEST = """
import hashlib, torch
import hpo_core as hpo
from hpo_core import advantages, entropy, gates, ops, testing
from hpo_core.specs import OrderRule

digest = hashlib.sha256()
def add(*tensors):
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())

long = testing.Layout((0, 1, 2500, 130, 1, 0, 1025, 3), tail=5, shared=True, seed=3)
presets = [gates.dapo(), gates.ppo_clip(dual=1.5), gates.cispo(1.3, 0.8), gates.reinforce()]
presets += [gates.gspo(0.1, 0.2), gates.gspo_token()]
for number, gate in enumerate(presets):
    features = set(testing.FEATURES) - {"on_policy"} - (set() if gate.takes_bounds else {"bounds"})
    for seed in range(12):
        penalty = [hpo.kl.k1, hpo.kl.k2, hpo.kl.k3][seed % 3](0.2, ("value", "importance")[seed % 2])
        layout = long if seed == 0 else None
        given = features if seed % 2 == 0 else {"weights"}
        example = testing.random_policy_loss(seed, gate, given, penalty=penalty, layout=layout)
        out = testing.run_policy_loss(hpo.policy_loss, example, return_tokens=True)
        add(out.loss, out.grad, out.tokens, out.metrics.vector)
for seed in range(60):
    rewards = testing.random_rewards(seed, (12, 3000)[seed % 10 == 0])
    for op in ("grpo", "lite_ppo", "rloo"):
        add(getattr(advantages, op)(rewards.rewards, rewards.group_ids, **rewards.keywords))
    window = testing.random_window(seed, layout=long if seed % 20 == 0 else None)
    add(entropy.window_mean(*window[:-1], **window.keywords))
    tokens = (window.values, 4, 5, OrderRule.CEIL, None, window.batch.mask, window.batch.cu_seqlens)
    threshold, counts = ops.order_statistic(*tokens)
    add(threshold, counts, ops.select(window.values, threshold, seed % 2 == 0, *tokens[4:]))
    score, *quantile = testing.random_scores(seed, (40, 50000)[seed % 10 == 0])
    add(*ops.select_top(score, *quantile, seed % 2 == 0, None))
print(digest.hexdigest())
"""


def run(isa, program):
    environment = {**os.environ, "HPO_CORE_ISA": isa}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_same_bits_on_every_instruction_set():
    if not hpo.backends()["cpu"]:
        pytest.skip("the cpu backend is not built")
    digests = {}
    for isa in ("generic", "avx2", "avx512"):
        done = run(isa, DIGEST)
        if done.returncode:
            assert isa != "generic" and "cannot run on this machine" in done.stderr, done.stderr
            print(f"{isa}: not on this machine")
            continue
        digests[isa] = done.stdout.strip()
    assert len(digests) >= 1 and len(set(digests.values())) == 1, digests


def test_unknown_instruction_set_is_refused():
    if not hpo.backends()["cpu"]:
        pytest.skip("the cpu backend is not built")
    done = run("sse1", "import hpo_core as hpo; print(bool(hpo.backends()['cpu']), hpo.backends()['cpu'].reason)")
    assert done.stdout.startswith("False") and "HPO_CORE_ISA=sse1 cannot run" in done.stdout
