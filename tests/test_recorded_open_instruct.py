"""open-instruct, which no package index has, on packs as it hands them over, against formulas of its own losses."""

from types import SimpleNamespace

import pytest
import torch
from trainer_batches import LENGTH, ROWS, Batch, clipped, equal, gradient, integration, masked, modules, parts

import hpo_core as hpo
from hpo_core.integrations.micro_batch import padded_rows
from hpo_core.integrations.named import named_gate

# forward_for_logprobs, compute_rho_correction and compute_grpo_loss of open_instruct/grpo_utils.py, masked_mean of
# rl_utils.py, and the step of grpo_fast.py at e6c3044.

DENOMINATOR = 37.0


class Packs:
    """A batch as two packs of three sequences, each of which begins with a token of its query."""

    def __init__(self, seed=0):
        self.batch = Batch(seed)
        self.batch.mask[:, 0] = False
        self.mask, self.positions = self.of(self.batch.mask), self.of(torch.arange(LENGTH).expand(ROWS, LENGTH))

    def of(self, values):
        rows = parts(values, self.batch)
        packs = [torch.cat(rows[:3]), torch.cat(rows[3:])]
        return torch.nn.utils.rnn.pad_sequence(packs, batch_first=True)[:, 1:]

    def masked(self, values):
        """The values with open-instruct's mark where there is no log-probability."""
        return torch.where(self.mask, self.of(values), 1.0)


def of_open_instruct(packs, logp, *, weights=1.0, **fields):
    """The calls of a step for one pack, and the loss that it makes of their results."""
    config = SimpleNamespace(**{
        "clip_lower": 0.2, "clip_higher": 0.272, "loss_fn": "dapo", "use_rho_correction": True,
        "use_vllm_logprobs": False, "sequence_parallel_size": 1, **fields,
    })  # fmt: skip
    own = {
        "forward_for_logprobs": lambda model, ids, attention_mask, positions, **_: model(ids, attention_mask),
        "compute_rho_correction": lambda old, *_: SimpleNamespace(weights=weights * torch.ones_like(old)),
        "compute_grpo_loss": lambda new, ratio, advantages, ref, config, rho: (None, None, new - ref),
    }
    batch = packs.batch
    with modules(open_instruct__grpo_utils=own) as stubs:
        integration("open_instruct").install()
        theirs = stubs["open_instruct.grpo_utils"]
        new = theirs.forward_for_logprobs(
            lambda *given: packs.masked(logp) if given == ("ids", "mask") else None, "ids", "mask",
            torch.nn.functional.pad(packs.positions, (1, 0)), temperature=1.0,
        )  # fmt: skip
        old, sampler, ref = (packs.masked(each) for each in (batch.old, batch.rollout, batch.ref))
        advantages = packs.of(batch.advantages)
        rho = theirs.compute_rho_correction(old, sampler, packs.mask, advantages, config)
        policy, fraction, kl = theirs.compute_grpo_loss(
            new_logprobs=new, ratio=torch.exp(new - old), advantages=advantages, ref_logprobs=ref, config=config,
            rho_weights=rho.weights,
        )  # fmt: skip
    return ((policy + 0.1 * kl) * packs.mask).sum() / DENOMINATOR, fraction


@pytest.mark.parametrize("weights", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("kind", ["dapo", "cispo"])
def test_open_instruct(kind, weights):
    packs = Packs()
    batch = packs.batch
    ratio = torch.exp(batch.logp - batch.old)

    def theirs(logp):
        terms = {
            "dapo": lambda: clipped(logp, batch.old, batch.advantages, 0.2, 0.3),
            "cispo": lambda: -batch.advantages * ratio.clamp(max=1.3) * logp,
        }[kind]()
        return masked(weights * terms + 0.1 * (logp - batch.ref), batch.mask).sum() / DENOMINATOR

    fields = {"loss_fn": kind, "clip_higher": 0.3, "weights": weights}
    equal(lambda logp: of_open_instruct(packs, logp, **fields), theirs, batch.logp)
    low, high = ((ratio < 0.8) & (batch.advantages < 0), (ratio > 1.3) & (batch.advantages > 0))
    outside = ratio > 1.3 if kind == "cispo" else low | high
    expected = outside[batch.mask].float().mean() if weights else torch.zeros(())
    fraction = of_open_instruct(packs, batch.logp, **fields)[1]
    torch.testing.assert_close(fraction[packs.mask], expected.expand(batch.mask.sum()))
    assert (fraction[~packs.mask] == 0).all()


@pytest.mark.parametrize("gate", ["gspo(0.05, 0.06)", "step_gspo(0.05, 0.06)", "icepop(0.8, 1.2)"])
def test_open_instructs_sequences_follow_from_positions(gate, monkeypatch):
    monkeypatch.setenv("HPO_GATE", gate)
    packs = Packs()
    batch, named = packs.batch, named_gate(gate)
    rows = padded_rows(batch.mask, named)

    def expected(logp):
        loss = hpo.policy_loss(
            logp, batch.old, batch.advantages, rows, named, weights=torch.ones(ROWS), advantage_level="token",
            rollout_logp=batch.rollout if named.needs_rollout else None,
        ).loss  # fmt: skip
        return (loss + 0.1 * masked(logp - batch.ref, batch.mask).sum()) / DENOMINATOR

    equal(lambda logp: of_open_instruct(packs, logp, use_rho_correction=False), expected, batch.logp)


def test_open_instructs_pack_without_valid_tokens_adds_nothing():
    packs = Packs()
    packs.mask = torch.zeros_like(packs.mask)
    loss, grad = gradient(lambda logp: of_open_instruct(packs, logp)[0], packs.batch.logp)
    assert loss == 0 and (grad == 0).all()


def test_open_instructs_sequence_parallelism_takes_gates_of_tokens():
    packs = Packs()
    logp = packs.batch.logp
    assert of_open_instruct(packs, logp, sequence_parallel_size=2)[0] == of_open_instruct(packs, logp)[0]


def test_open_instruct_warns_of_log_probabilities_that_vllm_lacks(monkeypatch):
    monkeypatch.setenv("HPO_GATE", "icepop")
    packs = Packs()
    packs.batch.rollout[0, 1] = 1.0
    with pytest.warns(UserWarning, match="by rollout_logp"):
        of_open_instruct(packs, packs.batch.logp, use_rho_correction=False)


@pytest.mark.parametrize("policy", ["logp", "old"])
def test_open_instruct_leaves_out_what_it_writes_over_nan(policy):
    """With ``use_vllm_logprobs`` the old policy is vLLM's, whose missing log-probabilities would be ratios to 1."""
    packs = Packs()
    batch = packs.batch
    getattr(batch, policy)[0, 1] = 1.0
    known = torch.ones_like(batch.mask)
    known[0, 1] = False

    def theirs(logp):
        terms = clipped(logp, batch.old, batch.advantages, 0.2, 0.272)
        return masked(known * terms + 0.1 * (logp - batch.ref), batch.mask).sum() / DENOMINATOR

    fields = {"use_vllm_logprobs": True, "use_rho_correction": False}
    with pytest.warns(UserWarning, match="nan_tokens"):
        equal(lambda logp: of_open_instruct(packs, logp, **fields), theirs, batch.logp)


@pytest.mark.parametrize(
    ("gate", "fields", "said"),
    [
        ("icepop", {}, "use_rho_correction: it and the gate 'icepop' correct the same difference"),
        ("icepop", {"use_vllm_logprobs": True, "use_rho_correction": False}, "there is one old policy"),
        ("dapo", {"clip_higher": 0.3}, "clip_higher: the gate 'dapo' does not read it; got 0.3"),
        ("dapo", {"loss_fn": "cispo"}, "loss_fn: the gate 'dapo' does not read it; got cispo"),
        ("gspo", {"sequence_parallel_size": 2}, "sequence_parallel_size: the gate 'gspo' takes whole sequences"),
        ("", {"loss_fn": "ppo"}, "loss_fn"),
    ],
)
def test_open_instruct_refuses_by_name(gate, fields, said, monkeypatch):
    monkeypatch.setenv("HPO_GATE", gate)
    packs = Packs()
    with pytest.raises(ValueError, match=said):
        of_open_instruct(packs, packs.batch.logp, **fields)
