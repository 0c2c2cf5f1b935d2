"""The losses of ART and torchforge, which train on GPUs, and of Tinker, a service: on what they hand over, against
formulas of their own."""

import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from trainer_batches import LENGTH, ROWS, Batch, clipped, differ, equal, integration, masked, modules, parts, two_ranks

import hpo_core as hpo
from hpo_core import gates
from hpo_core.integrations.micro_batch import padded_rows
from hpo_core.integrations.turns import turns

# ----------------------------------------------------------------------------------------------------------------- ART
# AlignedLossInputs, Loss and loss_fn of art/loss.py, called in art/unsloth/train.py and art/tinker/service.py, of
# openpipe-art 0.5.23.


class Packed:
    """Two packs of completions with ids of their own, a completion without old log-probabilities, weights of tokens."""

    def __init__(self, seed=0):
        draw = torch.Generator().manual_seed(seed)
        shape = (2, 40)
        self.group_ids = torch.arange(1, 9).repeat_interleave(10).reshape(shape)
        self.mask = torch.rand(shape, generator=draw) < 0.7
        self.logp = -3 * torch.rand(shape, generator=draw) - 0.05
        self.old = self.logp + 0.4 * torch.randn(shape, generator=draw)
        self.advantages = torch.randn(8, generator=draw).repeat_interleave(10).reshape(shape)
        self.weights = torch.rand(shape, generator=draw) + 0.5
        self.entropies = torch.rand(shape, generator=draw)
        self.unknown = self.group_ids == 3
        self.is_given = self.mask & ~self.unknown

    def align_inputs(self):
        return SimpleNamespace(
            assistant_mask=self.mask, old_logprobs=torch.where(self.is_given, self.old, torch.nan),
            advantages=self.advantages, weights=self.weights, group_ids=self.group_ids, original_logprobs=None,
            denominator=lambda mask, reduction: 1.0 if reduction == "sum" else mask.sum() + 1e-18,
            aligned_entropies=lambda entropies: entropies,
        )  # fmt: skip

    def reference(self, logp, policy, reduction="mean"):
        old = torch.where(self.unknown, logp.detach(), self.old)
        total = masked(policy(logp, old) * self.weights, self.mask).sum()
        return total if reduction == "sum" else total / self.mask.sum()

    def sequences(self, logp, old):
        """ART's ``importance_sampling_level="sequence"`` under PPO's clip."""
        mean = torch.zeros(9).index_add(0, self.group_ids[self.mask], (logp - old)[self.mask])
        mean = mean / torch.bincount(self.group_ids[self.mask], minlength=9).clamp(min=1)
        return clipped(mean[self.group_ids], torch.zeros(()), self.advantages)


def of_art(packed, logp, gate, reduction="mean", **settings):
    seen = {}

    def correlation(old, new):
        seen["compared"] = torch.isfinite(old)
        return torch.zeros(())

    with modules(
        art__loss={"Loss": SimpleNamespace, "compute_probs_corr": correlation}, art__unsloth__train={}
    ) as stubs:
        art, trainer = integration("art"), stubs["art.unsloth.train"]
        art.use(SimpleNamespace(_in_process=True), gate)
        found = trainer.loss_fn(packed, logp, None, packed.entropies, settings, reduction)
    assert torch.equal(seen["compared"], packed.is_given)
    expected = masked(packed.entropies * packed.weights, packed.mask).sum()
    torch.testing.assert_close(found.entropy, expected if reduction == "sum" else expected / packed.mask.sum())
    assert found.reduction == reduction
    return found.policy_loss


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_art(reduction):
    packed = Packed()
    equal(
        lambda logp: of_art(packed, logp, "ppo_clip", reduction, epsilon_high=None, importance_sampling_level="token"),
        lambda logp: packed.reference(logp, lambda new, old: clipped(new, old, packed.advantages), reduction),
        packed.logp,
    )


def test_a_trajectory_of_art_is_its_group_id():
    packed = Packed(1)
    ours = lambda logp: of_art(packed, logp, gates.gspo(0.2, 0.2))  # noqa: E731
    equal(ours, lambda logp: packed.reference(logp, packed.sequences), packed.logp)
    packed.group_ids = packed.group_ids // 2
    differ(
        ours, lambda logp: packed.reference(logp, lambda new, old: clipped(new, old, packed.advantages)), packed.logp
    )


@pytest.mark.parametrize(
    ("gate", "settings", "said"),
    [
        ("icepop", {}, "ART passes its loss one old policy"),
        ("kl_cov", {}, "needs"),
        ("ppo_clip", {"epsilon": 0.1}, "epsilon: no effect"),
        ("ppo_clip", {"ppo": True, "importance_sampling_level": "sequence"}, "ppo, importance_sampling_level: no"),
    ],
)
def test_art_refuses_by_name(gate, settings, said):
    with pytest.raises(ValueError, match=said):
        of_art(Packed(), Packed().logp, gate, **settings)


def test_art_is_told_of_tokens_that_are_left_out():
    packed = Packed()
    logp = torch.where(packed.mask & (packed.mask.long().cumsum(-1) == 1), torch.nan, packed.logp)
    with pytest.warns(UserWarning, match="policy_loss: nan_tokens"):
        of_art(packed, logp, "ppo_clip")


def test_art_in_another_process_is_refused():
    with pytest.raises(ValueError, match="expected in_process=True, got LocalBackend"):
        integration("art").use(type("LocalBackend", (), {"_in_process": False})(), "dapo")


# ---------------------------------------------------------------------------------------------------------- torchforge
# forward_backward of src/forge/actors/trainer/titan.py, collate and simple_grpo_loss of apps/grpo/main.py at 6e77f0b3.

VOCABULARY, PROMPT = 11, 3


def of_torchforge(batch, logits, response, old=None, made=None, **keywords):
    told = {
        "response": response, "ref_logprobs": batch.poisoned(batch.ref), "advantages": batch.advantages[:, :1],
        "padding_mask": batch.mask,
    }  # fmt: skip
    told |= {} if old is None else {"old_logprobs": batch.poisoned(old)}
    return (made or integration("torchforge").HPOLoss(**keywords))(logits, **told)


def logits_and_tokens():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, PROMPT + LENGTH, VOCABULARY, generator=draw)
    return logits, torch.randint(VOCABULARY, (ROWS, LENGTH), generator=draw)


def forge_logp(logits, response):
    return logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, response[..., None]).squeeze(-1)


def forge_loss(batch, logits, response, policy, beta=0.1):
    logp = forge_logp(logits, response)
    difference = batch.ref - logp
    terms = policy(logp) + beta * (torch.exp(difference) - difference - 1)
    return (masked(terms, batch.mask).sum(1) / batch.mask.sum(1).clamp(min=1)).mean()


def test_torchforge():
    batch, (logits, response) = Batch(empty_row=True), logits_and_tokens()
    equal(
        lambda logits: of_torchforge(batch, logits, response),
        lambda logits: forge_loss(
            batch, logits, response, lambda logp: -torch.exp(logp - logp.detach()) * batch.advantages
        ),
        logits,
    )
    alone = of_torchforge(batch, logits, response)
    with two_ranks():  # each has its own mean, and FSDP theirs
        assert torch.equal(of_torchforge(batch, logits, response), alone)


@pytest.mark.parametrize(("rows", "length"), [(1, LENGTH), (ROWS, 1), (1, 1)])
def test_torchforge_squeezes_what_it_collates(rows, length):
    _, (logits, response) = Batch(), logits_and_tokens()
    logits, response = logits[:rows, : PROMPT + length], response[:rows, :length]
    draw = torch.Generator().manual_seed(3)
    told = {"advantages": torch.randn(rows, 1, generator=draw), "padding_mask": torch.ones(rows, length).bool()}
    ref, old = torch.randn(2, rows, length, generator=draw) - 2
    loss = integration("torchforge").HPOLoss("dapo")
    expected = loss(logits, response, ref, old_logprobs=old, **told)
    found = loss(logits, response, ref.squeeze(), old_logprobs=old.squeeze(), **told)
    assert torch.equal(found, expected)


def test_torchforge_warns_of_tokens_that_are_left_out():
    batch, (logits, response) = Batch(), logits_and_tokens()
    batch.ref[0, 0] = torch.nan
    with pytest.warns(UserWarning, match="nan_tokens"):
        of_torchforge(batch, logits, response)


def test_torchforge_with_old_log_probabilities():
    batch, (logits, response) = Batch(), logits_and_tokens()
    old = forge_logp(logits, response) + 0.4 * torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(2))

    def expected(logits, high=0.28):
        clips = lambda logp: clipped(logp, old, batch.advantages, 0.2, high)  # noqa: E731
        return forge_loss(batch, logits, response, clips, beta=0.0)

    ours = lambda logits: of_torchforge(batch, logits, response, old, gate="dapo(eps_high=0.28)", beta=0.0)  # noqa: E731
    equal(ours, expected, logits)
    differ(ours, lambda logits: expected(logits, 0.2), logits)


def test_steps_of_torchforge_are_the_runs_of_valid_tokens():
    batch, (logits, response), gate = Batch(), logits_and_tokens(), gates.step_gspo(0.02, 0.03)
    rows = padded_rows(batch.mask, gate)
    weights = hpo.aggregation.seq_mean_token_mean(rows, total=ROWS)

    def expected(logits):
        logp = forge_logp(logits, response)
        return hpo.policy_loss(logp, batch.old, batch.advantages[:, 0], rows, gate, weights=weights).loss

    equal(lambda logits: of_torchforge(batch, logits, response, batch.old, gate=gate, beta=0.0), expected, logits)


def test_torchforge_compiles_its_loss_and_sends_it_to_actors():
    batch, (logits, response) = Batch(), logits_and_tokens()
    made = pickle.loads(pickle.dumps(integration("torchforge").HPOLoss("gspo(eps_low=0.02, eps_high=0.03)")))
    compiled = torch.compile(made, backend="eager")
    for old in (None, batch.old):
        equal(
            lambda logits, old=old: of_torchforge(batch, logits, response, old, compiled),
            lambda logits, old=old: of_torchforge(batch, logits, response, old, made),
            logits,
        )


@pytest.mark.parametrize(
    ("gate", "said"), [("icepop", "one old policy"), ("kl_cov", "needs"), ("reconstructed_gate", "no function")]
)
def test_torchforge_refuses_by_name(gate, said):
    with pytest.raises(ValueError, match=said):
        integration("torchforge").HPOLoss(gate)


# -------------------------------------------------------------------------------------------------------------- Tinker
# forward_backward_custom of tinker 0.38 calls the loss with its datums and a list of log-probabilities.


def datums(batch, mask=True):
    fields = {
        "logprobs": batch.rollout,
        "advantages": batch.advantages,
        **({"mask": batch.mask.float()} if mask else {}),
    }
    rows = {name: parts(value, batch) for name, value in fields.items()}
    tensors = [{name: mock.Mock(to_torch=lambda x=x[row]: x) for name, x in rows.items()} for row in range(ROWS)]
    return [SimpleNamespace(loss_fn_inputs=inputs) for inputs in tensors]


def test_tinker():
    batch, custom_loss = Batch(), integration("tinker").custom_loss
    loss = custom_loss("ppo_clip(0.2, 0.28)")

    def theirs(logp, mask):
        return masked(clipped(logp, batch.rollout, batch.advantages, 0.2, 0.28), mask).sum()

    equal(lambda logp: loss(datums(batch), parts(logp, batch)), lambda logp: theirs(logp, batch.mask), batch.logp)
    equal(
        lambda logp: loss(datums(batch, mask=False), parts(logp, batch)),
        lambda logp: theirs(logp, batch.present),
        batch.logp,
    )
    one_without, mask = datums(batch), batch.mask.clone()
    del one_without[1].loss_fn_inputs["mask"]
    mask[1] = batch.present[1]
    equal(lambda logp: loss(one_without, parts(logp, batch)), lambda logp: theirs(logp, mask), batch.logp)
    with two_ranks():  # of the client, of which Tinker knows nothing
        mean, metrics = custom_loss(gates.ppo_clip(0.2, 0.28), reduction="mean")(
            datums(batch), parts(batch.logp, batch)
        )
    torch.testing.assert_close(mean, theirs(batch.logp, batch.mask) / batch.tokens)
    assert metrics["hpo/tokens:sum"] == batch.tokens and metrics["hpo/clipped:mean"] > 0.1


def test_tinker_knows_the_prompts_that_it_is_told():
    batch, custom_loss = Batch(), integration("tinker").custom_loss
    gate, prompts = gates.reconstructed.p3o(), ["a", "a", ("b", 1), ("b", 1), 3, 3]
    found, _ = custom_loss(gate, prompts=prompts)(datums(batch), parts(batch.logp, batch))
    packed = hpo.PackedBatch.from_padded(batch.mask, group_ids=torch.tensor([0, 0, 1, 1, 2, 2]))
    expected = hpo.policy_loss(
        batch.logp, batch.rollout, batch.advantages, packed, gate, weights=torch.ones(ROWS), advantage_level="token"
    )
    torch.testing.assert_close(found, expected.loss)
    levels = tuple(gates.Level(gates.Tanh(0.1), unit=unit) for unit in (gates.Unit.STEP, gates.Unit.GROUP))
    deep = gates.RatioGate("deep", gates.LogClip((-0.2, -0.2), (0.2, 0.2)), levels)
    packed = hpo.PackedBatch.from_padded(batch.mask, steps=turns(batch.mask), group_ids=torch.arange(ROWS) // 2)
    expected = hpo.policy_loss(
        batch.logp, batch.rollout, batch.advantages, packed, deep, weights=torch.ones(ROWS), advantage_level="token"
    )
    found, _ = custom_loss(deep, prompts=prompts)(datums(batch), parts(batch.logp, batch))
    torch.testing.assert_close(found, expected.loss)
    with pytest.raises(ValueError, match="expected one of each of 6 datums, got 2"):
        custom_loss(gate, prompts=["a", "b"])(datums(batch), parts(batch.logp, batch))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gate": gates.reconstructed.p3o()}, "level of groups"),
        ({"gate": "reconstructed.fiberpo_domain", "prompts": ["a"]}, "level of domains"),
        ({"gate": "icepop"}, "one old policy"),
        ({"gate": "dapo", "reduction": "rows"}, "reduction"),
    ],
)
def test_tinker_refuses_by_name(arguments, said):
    with pytest.raises(ValueError, match=said):
        integration("tinker").custom_loss(**arguments)


def test_tinker_names_the_datum_whose_field_has_another_length():
    loss, three = integration("tinker").custom_loss("dapo"), torch.zeros(3)
    data = [SimpleNamespace(loss_fn_inputs={"logprobs": torch.zeros(n), "advantages": three}) for n in (3, 2)]
    with pytest.raises(ValueError, match="expected 'logprobs' of datum 1 for its 3 tokens, got 2"):
        loss(data, [three, three])
    with pytest.raises(ValueError, match="data: expected datums"):
        loss([], [])


def test_tinker_names_the_field_that_a_datum_lacks():
    loss = integration("tinker").custom_loss("dapo")
    with pytest.raises(ValueError, match="expected 'logprobs' in each datum"):
        loss([SimpleNamespace(loss_fn_inputs={})], [torch.zeros(2)])
