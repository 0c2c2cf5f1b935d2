"""The loss of the OpenRLHF integration against OpenRLHF's own PolicyLoss; `make test-trainers` installs it."""

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from lazily import skip_without
from trainer_batches import Batch, differ, equal, integration, modules

skip_without("openrlhf")
pytestmark = pytest.mark.peers

PPO, GSPO = {}, {"policy_loss_type": "gspo", "clip_eps_low": 0.05, "clip_eps_high": 0.06}
TOKEN, SEQUENCE = {"is_correction_level": "token"}, {"is_correction_level": "seq"}
FLAGS = {
    "ppo": PPO,
    "clip higher": {"clip_eps_high": 0.28},
    "dual clip": {"dual_clip": 1.3},
    "rows": {"token_level_loss": False},
    "no lower clip": {"clip_eps_low": 2.0},
    "gspo": GSPO,
    "gspo without a lower clip": {**GSPO, "clip_eps_low": 2.0},
    "gspo with a dual clip": {**GSPO, "dual_clip": 1.2},
    "gspo from the sampler": {**GSPO, **TOKEN},
    "icepop": {**TOKEN, "is_correction_threshold": [0.8, 1.25]},
    "tis": {**TOKEN, "is_correction_mode": "clip", "is_correction_threshold": [0.9, 1.1]},
    "geometric mask": {**SEQUENCE, "is_correction_threshold": [0.95, 1.05]},
    "total variation": {**TOKEN, "is_correction_gating": "tv", "is_correction_threshold": [0, 0.1]},
    "binary kl": {**SEQUENCE, "is_correction_gating": "binary_kl", "is_correction_threshold": [0, 0.02]},
}
COUNTS = {"local": {}, "global": {"dp_size": 4, "batch_num_tokens": 230.0, "global_batch_size": 37.0}}


@pytest.fixture(scope="module")
def theirs():
    """OpenRLHF's file alone: its package imports flash-attn, which no CPU has, and DeepSpeed."""
    [folder] = importlib.util.find_spec("openrlhf").submodule_search_locations
    with modules(deepspeed={}, openrlhf_models={}) as stubs:
        stubs["openrlhf_models"].__path__ = [str(Path(folder, "models"))]
        yield importlib.import_module("openrlhf_models.loss").PolicyLoss


@pytest.fixture(scope="module")
def ours():
    return integration("openrlhf").HPOPolicyLoss


def call(loss, batch, mask, counts):
    return lambda logp: loss(
        logp, batch.old, batch.advantages, action_mask=mask, rollout_log_probs=batch.rollout, **counts
    )


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("flags", FLAGS)
def test_equals_openrlhf(flags, counts, ours, theirs):
    clipped = 0.0
    for seed in range(3):
        empty_row = seed == 1 and counts == "global"
        batch = Batch(seed, empty_row=empty_row, per_token=seed == 2)
        one, other = ours(**FLAGS[flags]), theirs(**FLAGS[flags])
        masks = batch.mask.long(), batch.mask.float()
        own, peer = (call(loss, batch, mask, COUNTS[counts]) for loss, mask in zip((one, other), masks, strict=True))
        equal(own, peer, batch.logp)
        found, expected = own(batch.logp), peer(batch.logp)
        clipped += expected[1].item()
        compared = 3 if empty_row else 4  # OpenRLHF counts a row without tokens among those that a correction drops
        for mine, value in zip(found[1 : 1 + compared], expected[1 : 1 + compared], strict=True):
            assert (mine is None) == (value is None) and (value is None or torch.allclose(mine, value, atol=1e-6))
    assert clipped > 0.05, "nothing was clipped: the comparison says little"


def test_a_divergence_that_rounds_below_0_drops_no_token(ours):
    """OpenRLHF makes [0, HIGH] of one number, and drops such tokens of a sampler that is nearly the policy."""
    batch = Batch()
    batch.rollout = batch.old + 1e-4 * torch.randn(batch.old.shape, generator=torch.Generator().manual_seed(1))
    loss = ours(**TOKEN, is_correction_gating="binary_kl", is_correction_threshold=[0.0, 0.5])
    assert call(loss, batch, batch.mask.long(), {})(batch.logp)[-1] == 0


@pytest.mark.parametrize("flags", ["icepop", "geometric mask", "total variation", "binary kl"])
def test_what_the_sampler_does_not_tell_is_dropped_as_in_openrlhf(flags, ours, theirs):
    batch = Batch()
    batch.rollout[0, 0] = torch.nan
    own, peer = (call(kind(**FLAGS[flags]), batch, batch.mask.float(), {}) for kind in (ours, theirs))
    equal(own, peer, batch.logp)
    torch.testing.assert_close(own(batch.logp)[4], peer(batch.logp)[4])


def test_the_comparison_discriminates(ours, theirs):
    batch = Batch()
    differ(
        call(ours(clip_eps_high=0.5), batch, batch.mask, {}), call(theirs(), batch, batch.mask.float(), {}), batch.logp
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"is_correction_level": "tokens"},
        {"is_correction_mode": "drop"},
        {"is_correction_gating": "kl"},
        {**SEQUENCE, "is_correction_mode": "clip"},
        {"is_correction_gating": "tv", "is_correction_mode": "clip"},
        {**TOKEN, "is_correction_gating": "tv"},
    ],
)
def test_what_openrlhf_refuses_is_refused(flags, ours, theirs):
    for kind in (ours, theirs):
        with pytest.raises(ValueError, match="is_correction_"):
            kind(**flags)


def test_openrlhf_builds_the_class_by_the_arguments_that_it_takes(ours, theirs):
    for name in ("__init__", "forward"):
        own, peer = (inspect.signature(getattr(kind, name)).parameters for kind in (ours, theirs))
        assert list(own) == list(peer)


def test_openrlhf_names_the_class_where_install_replaces_it():
    [folder] = importlib.util.find_spec("openrlhf").submodule_search_locations
    actor = Path(folder, "trainer", "ray", "ppo_actor.py").read_text()
    assert "from openrlhf.models import Actor, PolicyLoss, aggregate_loss" in actor
    assert "self.actor_loss_fn = PolicyLoss(" in actor
    assert "if not ray.is_initialized():" in Path(folder, "cli", "train_ppo_ray.py").read_text()
