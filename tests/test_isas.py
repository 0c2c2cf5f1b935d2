"""The CPU backend gives the same bits on every instruction set. Each has its own process, which chooses once."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpo_core as hpo

NAMES = {"avx512": "AVX-512", "avx2": "AVX2", "generic": "generic"}  # the best first

# Everything the backend computes on a few hundred examples, short and long, as one digest for each instruction set.
DIGESTS = """
import hashlib, os, sys, torch
import hpo_core as hpo
from catalogue import CATALOGUE, Example
from hierarchies import GATES as HIERARCHIES, raw
from hpo_core import advantages, entropy, gates, ops, testing
from hpo_core.specs import OrderRule, TokenDraw

def results():
    long = testing.Layout((0, 1, 2500, 130, 1, 0, 1025, 3), tail=5, shared=True, seed=3)
    presets = [gates.dapo(), gates.ppo_clip(ratio_dual=1.5), gates.cispo(1.3, 0.8), gates.reinforce()]
    presets += [gates.gspo(0.1, 0.2), gates.gspo_token()]
    for number, gate in enumerate(presets):
        features = set(testing.FEATURES) - {"on_policy"} - (set() if gate.takes_bounds else {"bounds"})
        for seed in range(12):
            penalty = [hpo.kl.k1, hpo.kl.k2, hpo.kl.k3][seed % 3](0.2, ("value", "importance")[seed % 2])
            layout = long if seed == 0 else None
            given = (sorted(features), ["weights"], sorted(features - {"window"}))[(seed + seed // 3) % 3]
            example = testing.random_policy_loss(seed, gate, given, penalty=penalty, layout=layout)
            out = testing.run_policy_loss(hpo.policy_loss, example, report=("tokens",))
            yield out.loss, out.grad, out.tokens, out.metrics.vector
    examples = Example(3, spread=0.3), Example(3, (0, 1, 2500, 130, 1, 0, 1025, 3))
    # A vector beside a short row, after a longer row that left its own masks there.
    for several in (True, False):
        example = Example(3, (120, 5, 0, 9, 1, 70, 7, 12, 3), 0.02, several=several)
        for gate in HIERARCHIES.values():
            for want_grad in (True, False):
                yield raw(example, gate, "cpu", want_grad=want_grad)
    for gate in CATALOGUE.values():
        for example in examples:
            for given in (example.needed(gate), example.paying(gate), example.everything(gate)):
                out = example.run(gate, "cpu", **given)
                yield out.loss, out.grad, out.metrics.vector
    for seed in range(60):
        rewards = testing.random_rewards(seed, (12, 3000)[seed % 10 == 0])
        for op in ("grpo", "lite_ppo", "rloo"):
            yield (getattr(advantages, op)(rewards.rewards, rewards.group_ids, **rewards.keywords),)
        window = testing.random_window(seed, layout=long if seed % 20 == 0 else None)
        yield (entropy.window_mean(*window[:-1], **window.keywords),)
        aggregate = ("sum", "max", "min")[seed % 3]
        spread = entropy.Window(window.first, window.last, aggregate, ("carry", "shrink")[seed % 2])
        yield (entropy.window_aggregate(window.values, window.batch, spread),)
        yield entropy.quantiles(window.values, window.batch, "0.7"), entropy.top_k(window.values, window.batch, 3)
        yield (entropy.top_k(window.values, window.batch, 30, scope="call"),)
        tokens = (window.values, 4, 5, OrderRule.CEIL, window.batch.mask, window.batch.cu_seqlens, None)
        threshold, counts = ops.order_statistic(*tokens)
        yield threshold, counts, ops.select(window.values, threshold, seed % 2 == 0, *tokens[4:])
        of_rows, bounds = torch.arange(window.batch.rows) % 13 - 5.5, (0.1, 5.0, -0.2, 0.2)
        for draw in (TokenDraw(), TokenDraw(window.values + 0.1, bounds, 2654435761, seed)):
            yield ops.covariance(window.values, of_rows, *tokens[-2:-4:-1], *draw, "cpu")
        score, *quantile = testing.random_scores(seed, (40, 50000)[seed % 10 == 0])
        yield ops.select_top(score, *quantile, seed % 2 == 0, None, None, None)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for vocabulary in (1, 63, 1003, 4500):
            draw = torch.Generator().manual_seed(vocabulary)
            logits = (5 * torch.randn(6, vocabulary, generator=draw)).to(dtype)
            logits[1], logits[2, ::3] = logits[1].sort().values, -torch.inf
            logits.requires_grad_()
            targets = torch.randint(0, vocabulary, (6,), generator=draw)
            out = hpo.token_logprobs(logits, targets, 0.7)
            grad = torch.autograd.grad(out, logits, (out.logp.detach(), out.entropy.detach()))[0]
            yield out.logp, out.entropy, grad.view(torch.int16)

def digest():
    found = hashlib.sha256()
    for tensors in results():
        for tensor in filter(torch.is_tensor, tensors):
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()

for isa in sys.argv[1:]:
    if os.fork() == 0:  # before the backend is loaded, and before any thread is started
        try:
            os.environ["HPO_CORE_ISA"] = isa
            cpu = hpo.backends()["cpu"]
            print(isa, digest() if cpu else cpu.reason, sep="|", flush=True)
        finally:
            os._exit(0)
    os.wait()
"""


def test_same_bits_on_every_instruction_set():
    """An unknown instruction set is refused, and so is one that this machine lacks. No name is the best one here."""
    if not hpo.backends()["cpu"]:
        pytest.skip("the cpu backend is not built")
    isas = ("generic", "avx2", "avx512", "sse1", "")
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    program = [sys.executable, "-c", DIGESTS, *isas]
    done = subprocess.run(program, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    found = dict(line.split("|", 1) for line in done.stdout.splitlines())
    assert tuple(found) == isas, done.stderr
    assert "HPO_CORE_ISA=sse1 cannot run" in found.pop("sse1")
    refused = {isa for isa, said in found.items() if f"HPO_CORE_ISA={isa} cannot run on this machine" in said}
    digests = {said for isa, said in found.items() if isa not in refused}
    assert not refused & {"generic", ""} and len(digests) == 1, found
    best = next(name for isa, name in NAMES.items() if isa not in refused)
    assert os.environ.get("HPO_CORE_ISA") or importlib.import_module("hpo_core._cpu").description() == best
