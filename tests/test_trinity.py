"""The policy loss of Trinity-RFT's integration against Trinity-RFT's own; `make test-trainers` installs it."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from lazily import Lazy, skip_without
from trainer_batches import Batch, equal, integration

skip_without("trinity")
pytestmark = pytest.mark.peers

losses = Lazy("trinity.algorithm.policy_loss_fn")

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# Trinity-RFT's name, its arguments, and the gate
LOSSES = {
    "ppo": ({"clip_range_low": 0.2, "clip_range_high": 0.28, "clip_ratio_c": 1.5}, "ppo_clip(0.2, 0.28, 1.5)"),
    "gspo": ({"clip_range_low": 0.05, "clip_range_high": 0.06}, "gspo_token(0.05, 0.06)"),
    "cispo": ({"clip_range_low": 0.3, "clip_range_high": 0.28}, "cispo(1.28, 0.7)"),
}


@pytest.fixture(scope="module")
def ours():
    return integration("trinity").HPOPolicyLossFn


def call(loss, batch):
    return lambda logp: loss(
        logprob=logp, old_logprob=batch.old, action_mask=batch.mask.float(), advantages=batch.advantages
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_equals_trinity(name, mode, ours):
    arguments, gate = LOSSES[name]
    clipped = 0.0
    for seed in range(3):
        batch = Batch(seed, empty_row=seed == 1, per_token=seed == 2)
        peer = call(losses.POLICY_LOSS_FN.get(name)(backend="tinker", loss_agg_mode=mode, **arguments), batch)
        own = call(ours(backend="tinker", gate=gate, loss_agg_mode=mode), batch)
        equal(own, peer, batch.logp)
        expected, found = peer(batch.logp)[1], own(batch.logp)[1]
        for metric in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "pg_loss"):
            if metric in expected and (name, metric) != ("cispo", "pg_clipfrac"):
                assert found[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-6), metric
        clipped += expected.get("pg_clipfrac", 0.0)
    assert clipped > 0.05 or name == "cispo", "nothing was clipped: the comparison says little"


@pytest.mark.parametrize("mode", MODES)
def test_one_row_as_its_trainer_for_tinker_has_it(mode, ours):
    batch, loss = Batch(), ours(backend="tinker", gate="ppo_clip", loss_agg_mode=mode)
    one, alone = (
        loss(logprob=logp, old_logprob=old, action_mask=mask.float(), advantages=advantages)
        for logp, old, mask, advantages in (
            [each[at] for each in (batch.logp, batch.old, batch.mask, batch.mask * batch.advantages[..., :1])]
            for at in (slice(0, 1), 0)
        )
    )
    assert torch.equal(one[0], alone[0]) and one[1] == alone[1]


def test_trinity_finds_the_loss_by_its_path_and_asks_for_what_it_reads(ours):
    kind = losses.POLICY_LOSS_FN.get("hpo_core.integrations.trinity.HPOPolicyLossFn")
    made = kind(backend="verl", **kind.default_args())
    assert kind is ours and sorted(made.select_keys) == sorted(
        importlib.import_module("trinity.algorithm.policy_loss_fn.ppo_policy_loss")
        .PPOPolicyLossFn(clip_range=0.2)
        .select_keys
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gate": "icepop"}, "no log-probabilities of the sampler"),
        ({"gate": "kl_cov"}, "needs"),
        ({"gate": "reconstructed.p3o"}, "level of groups"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode"),
    ],
)
def test_refusals(arguments, said, ours):
    with pytest.raises(ValueError, match=said):
        ours(**arguments)


def validated(**algorithm):
    """The loss that Trinity-RFT makes of these fields of its yaml."""
    config = importlib.import_module("trinity.common.config").Config()
    config.algorithm.algorithm_type = "grpo"
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    importlib.import_module("trinity.common.config_validator").AlgorithmConfigValidator().validate(config)
    kind = losses.POLICY_LOSS_FN.get(config.algorithm.policy_loss_fn)
    return kind(backend="verl", **config.algorithm.policy_loss_fn_args)


def test_trinity_trains_with_what_the_manual_and_the_docstring_say():
    yaml = pytest.importorskip("yaml")
    page = Path(__file__).parent.parent.joinpath("docs", "trainer_setup.md").read_text()
    of_page = re.search(r"```yaml\n(algorithm:\n.*?)```", page, re.DOTALL)[1]
    of_module = re.search(r"\n    (algorithm:\n.*?)\n\n", integration("trinity").__doc__, re.DOTALL)[1]
    for text in (of_page, of_module):
        made = validated(**yaml.safe_load(text)["algorithm"])
        assert (made.gate.name, made.loss_agg_mode) == ("gspo", "seq-mean-token-mean")


def test_arguments_to_which_trinitys_mode_would_say_nothing_are_refused():
    path = "hpo_core.integrations.trinity.HPOPolicyLossFn"
    with pytest.raises(ValueError, match="loss_agg_mode: expected one in policy_loss_fn_args"):
        validated(policy_loss_fn=path, policy_loss_fn_args={"gate": "gspo"}, loss_agg_mode="seq-mean-token-mean")
    assert validated(policy_loss_fn=path, loss_agg_mode="seq-mean-token-sum").loss_agg_mode == "seq-mean-token-sum"
