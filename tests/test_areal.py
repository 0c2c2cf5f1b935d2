"""The loss of the AReaL integration against AReaL's own, packed and padded; `make test-trainers` installs it."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from lazily import skip_without
from trainer_batches import Batch, close, gradient, integration

skip_without("areal")
pytestmark = pytest.mark.peers

CLIP = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None}
FIELDS = {
    "ppo": CLIP,
    "dual clip": {**CLIP, "eps_clip_higher": 0.28, "c_clip": 1.4},
    "gspo": {**CLIP, "eps_clip": 0.05, "eps_clip_higher": 0.06, "importance_sampling_level": "sequence"},
    "gspo and dual clip": {**CLIP, "eps_clip": 0.1, "c_clip": 1.15, "importance_sampling_level": "sequence"},
    "no lower clip": {**CLIP, "eps_clip": 2.0, "eps_clip_higher": 0.1},
    "no lower clip of sequences": {
        **CLIP,
        "eps_clip": 2.0,
        "eps_clip_higher": 0.05,
        "importance_sampling_level": "sequence",
    },
    "sapo": {**CLIP, "use_sapo_loss": True},
}
REJECTIONS = {
    "tokens": {"level": "token", "action": "mask", "metric": "ratio", "upper": 1.2},
    "sequences": {"level": "sequence", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 1.03},
    "clamp": {"level": "token", "action": "clamp", "metric": "ratio", "upper": 1.1},
    "kl": {"level": "sequence", "action": "mask", "metric": "kl_k3", "agg": "mean", "upper": 0.02},
}


@pytest.fixture(scope="module")
def areal():
    """AReaL's file with its loss; the package around it imports servers and trackers."""
    [folder] = importlib.util.find_spec("areal").submodule_search_locations
    package = ModuleType("areal.trainer")
    package.__path__ = [str(Path(folder, "trainer"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "areal.trainer", package)
        yield importlib.import_module("areal.trainer.ppo.actor")


# The facts that AReaL logs of the loss of a token; ours logs the fractions hpo_clipped and hpo_dual_clipped.
NOT_LOGGED = {
    *("actor_loss", "clip_ratio", "clipped_tokens", "clipped_new_logp", "clipped_old_logp"),
    *("dual_clip_ratio", "dual_clipped_tokens"),
    *("sapo_soft_gate", "sapo_scaled_gate_pos", "sapo_scaled_gate_neg"),
}


def inputs(batch, packed):
    names = {
        "logprobs": batch.rollout, "prox_logp": batch.old, "advantages": batch.advantages, "loss_mask": batch.mask,
        "versions": torch.arange(-1, 3).repeat(batch.mask.numel())[: batch.mask.numel()].reshape(batch.mask.shape),
    }  # fmt: skip
    made = {name: batch.packed(value) if packed else value.clone() for name, value in names.items()}
    return {**made, **({"cu_seqlens": batch.cu_seqlens()} if packed else {})}


def call(loss, batch, packed, fields):
    return lambda logp: loss(logp, torch.zeros_like(logp), inputs(batch, packed), **fields)


def compared(areal, batch, packed, fields):
    ours = integration("areal").grpo_loss_fn
    logp = batch.packed(batch.logp) if packed else batch.logp
    own, peer = call(ours, batch, packed, fields), call(areal.grpo_loss_fn, batch, packed, fields)
    areal.stats_tracker.export()
    found = gradient(own, logp)
    logged = areal.stats_tracker.export()
    expected = gradient(peer, logp)
    for name, value in areal.stats_tracker.export().items():
        other = {"importance_sampling_level", "rejection_sampling"} & fields.keys() and name.startswith("importance")
        assert name in logged or name.split("/")[0] in NOT_LOGGED, name
        if name in logged and not other:  # ours is the ratio of each valid token with any gate and rejection
            assert logged[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert {"importance_weight", "approx_kl", "entropy", "hpo_clipped"} <= {name.split("/")[0] for name in logged}
    close(found, expected)
    return expected[1]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("fields", FIELDS)
def test_equals_areal(fields, packed, areal):
    stopped = 0.0
    for seed in range(4):
        batch = Batch(seed, empty_row=seed == 1, per_token=seed == 2)
        grad = compared(areal, batch, packed, FIELDS[fields])
        mask = batch.packed(batch.mask) if packed else batch.mask
        stopped += (grad[mask] == 0).float().mean()
    assert fields == "sapo" or stopped > 0.2, "nothing was clipped: the comparison says little"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("rejection", REJECTIONS)
@pytest.mark.parametrize("fields", ["dual clip", "gspo"])
def test_equals_areal_with_its_rejections(fields, rejection, packed, areal):
    made = importlib.import_module("areal.api.cli_args").RejectionSamplingConfig(**REJECTIONS[rejection])
    changed = 0
    for seed in range(3):
        grad = compared(areal, Batch(seed), packed, {**FIELDS[fields], "rejection_sampling": made})
        changed += not torch.allclose(grad, compared(areal, Batch(seed), packed, FIELDS[fields]))
    assert changed, "nothing was rejected: the comparison says little"


@pytest.mark.parametrize("method", ["recompute", "metrics", "loglinear"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_logs_proximal_policies_and_versions_as_areal(packed, method, areal):
    made = importlib.import_module("areal.api.cli_args").RejectionSamplingConfig(**REJECTIONS["tokens"])
    settings = {
        "current_version": 3,
        "prox_logp_method": method,
        "rejection_sampling": made,
        "use_decoupled_loss": True,
    }
    scope = areal.stats_tracker.scope
    with mock.patch.object(areal.stats_tracker, "scope", side_effect=scope) as scopes:
        compared(areal, Batch(), packed, {**CLIP, **settings})
    assert [each.args for each in scopes.call_args_list] == 2 * [("compute_logp",), ("version_stats",)]


@pytest.mark.parametrize("gate", ["sapo", "dapo"])
def test_rejections_act_beside_any_gate(gate, areal, monkeypatch):
    monkeypatch.setenv("HPO_GATE", gate)
    ours, batch = integration("areal").grpo_loss_fn, Batch()
    made = importlib.import_module("areal.api.cli_args").RejectionSamplingConfig(**REJECTIONS["tokens"])
    _, without = gradient(call(ours, batch, False, CLIP), batch.logp)
    _, found = gradient(call(ours, batch, False, {**CLIP, "rejection_sampling": made}), batch.logp)
    ratio = torch.exp(batch.old - batch.rollout)
    factor = torch.where(ratio < 1.2, ratio, 0.0)
    torch.testing.assert_close(found, factor * without)
    assert (factor[batch.mask] == 0).any()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_rejection_does_not_part_a_turn(packed, areal, monkeypatch):
    monkeypatch.setenv("HPO_GATE", "step_gspo(0.02, 0.03)")
    made = importlib.import_module("areal.api.cli_args").RejectionSamplingConfig(**REJECTIONS["tokens"])
    parts, module, batch = integration("micro_batch"), integration("areal"), Batch()
    steps = []

    def kept(rows):
        def make(*arguments, **keywords):
            found = rows(*arguments, **keywords)
            steps.append(found.num_steps)
            return found

        return make

    for name in ("padded_rows", "packed_rows"):
        monkeypatch.setattr(module, name, kept(getattr(parts, name)))
    for settings in (CLIP, {**CLIP, "rejection_sampling": made}):
        gradient(call(module.grpo_loss_fn, batch, packed, settings), batch.packed(batch.logp) if packed else batch.logp)
    assert steps[0] == steps[1]


def test_equals_areal_with_m2po(areal):
    assert compared(areal, Batch(), True, {**CLIP, "m2_threshold": 0.02}).abs().max() > 0


def test_the_update_of_areals_actor_takes_the_same_steps(areal):
    """Its normalisation, mini-batches and statistics; the engine is a table of logits."""
    parameters = [_update(areal, loss) for loss in (areal.grpo_loss_fn, integration("areal").grpo_loss_fn)]
    torch.testing.assert_close(parameters[1], parameters[0], rtol=1e-5, atol=1e-6)
    assert (parameters[0] - _Engine().table).abs().max() > 1e-2


class _Engine:
    """Packs rows as AReaL's engines do, and weighs two micro-batches by their tokens."""

    def __init__(self):
        self.table = torch.randn(16, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def train(self):
        pass

    def get_version(self):
        return 0

    def log_probs(self, ids):
        return torch.log_softmax(self.table[ids], -1).gather(-1, ids.roll(-1)[..., None]).squeeze(-1)

    def train_batch(self, data, loss_fn, loss_weight_fn):
        total = loss_weight_fn(data)
        for rows in torch.arange(data["input_ids"].shape[0]).chunk(2):
            present = data["attention_mask"][rows].bool()
            packed = {
                name: value[rows][present]
                for name, value in data.items()
                if torch.is_tensor(value) and value.shape == data["attention_mask"].shape and name != "attention_mask"
            }
            packed["cu_seqlens"] = torch.nn.functional.pad(present.sum(1).cumsum(0), (1, 0)).int()
            logp = self.log_probs(packed["input_ids"])
            (loss_fn(logp, torch.zeros_like(logp), packed) * loss_weight_fn(packed) / total).backward()
        with torch.no_grad():
            self.table -= 3.0 * self.table.grad
        self.table.grad = None
        return {"update_successful": 1.0}


def _update(areal, loss):
    draw = torch.Generator().manual_seed(1)
    engine, shape = _Engine(), (8, 12)
    ids = torch.randint(0, 16, shape, generator=draw)
    present = torch.arange(12) < torch.randint(6, 13, (8, 1), generator=draw)
    with torch.no_grad():
        scores = torch.stack([engine.log_probs(row) for row in ids])
    data = {
        "input_ids": ids, "attention_mask": present.long(), "loss_mask": (present & (torch.arange(12) > 2)).long(),
        "logprobs": scores + 0.1 * torch.randn(shape, generator=draw),
        "prox_logp": scores + 0.3 * torch.randn(shape, generator=draw), "rewards": torch.randn(8, generator=draw),
    }  # fmt: skip
    config = importlib.import_module("areal.api.cli_args").PPOActorConfig(
        ppo_n_minibatches=2, eps_clip=0.2, use_decoupled_loss=True, prox_logp_method="recompute"
    )
    with mock.patch.object(areal, "grpo_loss_fn", loss):
        actor = areal.PPOActor(config, engine)
        actor._ppo_update(dict(actor._compute_advantages(data)))
    return engine.table.detach()


def test_areal_calls_the_loss_as_ours_is_written(areal):
    own, peer = (inspect.signature(loss).parameters for loss in (integration("areal").grpo_loss_fn, areal.grpo_loss_fn))
    assert list(own) == list(peer)
    assert [each.default for each in own.values()] == [each.default for each in peer.values()]
    source = inspect.getsource(areal.PPOActor)
    assert "functools.partial(\n                        grpo_loss_fn," in source
