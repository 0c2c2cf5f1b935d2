"""The plugin of axolotl through its own plugin manager, and its trainer against axolotl's; `make test-trainers`
installs it."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from lazily import Lazy, skip_without
from trainer_batches import integration
from trainers import Rewards, demo

import hpo_core as hpo

skip_without("axolotl")
pytestmark = pytest.mark.peers

base, dictionary = Lazy("axolotl.integrations.base"), Lazy("axolotl.utils.dict")
grpo = Lazy("axolotl.core.trainers.grpo.trainer")

ARGUMENTS = {
    "dapo": {"loss_type": "dapo"},
    "grpo and kl": {"loss_type": "grpo", "beta": 0.04, "epsilon_high": 0.28},
    "entropies": {"loss_type": "dapo", "top_entropy_quantile": 0.5},
    "sequences": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.003},
}


@pytest.fixture(scope="module")
def ours():
    return integration("axolotl")


@pytest.fixture
def plugins(ours, monkeypatch):
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    manager = base.PluginManager.get_instance()
    manager.register("hpo_core.integrations.axolotl.HPOPlugin", required=True)
    yield manager
    ours._keywords.clear()


def configuration(**fields):
    return dictionary.DictDefault({"rl": "grpo", "hpo": {"gate": "dapo(eps_high=0.3)"}, **fields})


def trained(kind, folder, arguments):
    """Losses and gradient norms of six optimiser steps on three rollouts, and the parameters after them."""
    torch.set_num_threads(1)
    args = importlib.import_module("axolotl.core.trainers.grpo.args").AxolotlGRPOConfig(
        str(folder), max_steps=6, optim="sgd", learning_rate=0.5, lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        steps_per_generation=2, gradient_accumulation_steps=2, num_iterations=3, num_generations=8, top_k=0,
        max_completion_length=12, bf16=False, gradient_checkpointing=False, use_cpu=True, logging_steps=1,
        dataloader_pin_memory=False, report_to="none", save_strategy="no", disable_tqdm=True, seed=0, **arguments,
    )  # fmt: skip
    importlib.import_module("transformers").set_seed(0)
    tokenizer = demo().build_tokenizer()
    model = demo().build_model(tokenizer, seed=0)
    if args.beta:
        model.save_pretrained(folder / "model")
        model.config._name_or_path = str(folder / "model")
    prompts = [{"prompt": text} for text in demo().make_prompts(32, random.Random(0))]
    made = kind(
        model=model, args=args, processing_class=tokenizer, reward_funcs=Rewards(),
        train_dataset=importlib.import_module("datasets").Dataset.from_list(prompts),
    )  # fmt: skip
    made.train()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    parameters = torch.cat([parameter.detach().flatten() for parameter in made.model.parameters()])
    return [(entry["loss"], entry["grad_norm"]) for entry in logs], parameters, logs, made


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_equals_axolotl(arguments, ours, tmp_path):
    expected, theirs, logs, _ = trained(grpo.AxolotlGRPOTrainer, tmp_path, ARGUMENTS[arguments])
    found, own, _, _ = trained(ours.HPOAxolotlTrainer, tmp_path, ARGUMENTS[arguments])
    assert max(entry["clip_ratio/region_mean"] for entry in logs) > 0, "nothing was clipped"
    assert len(found) == 6
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)


def test_the_yaml_chooses_gate_estimator_and_window(plugins, ours, tmp_path):
    keywords = {"gate": "dapo(eps_high=0.3)", "advantage": "rloo", "window": "forking_tokens('0.5', scope='call')"}
    cfg = configuration(hpo=keywords)
    plugins.pre_model_load(cfg)
    name = importlib.import_module("axolotl.utils.import_helper").get_cls_from_module_str(cfg.trainer_cls)
    made = trained(name, tmp_path, {"loss_type": "dapo"})[3]
    assert name is ours.HPOAxolotlTrainer and made._hpo.gate == hpo.gates.dapo(eps_high=0.3)
    assert made._hpo.window == hpo.entropy.forking_tokens("0.5", scope="call")
    assert isinstance(made, grpo.AxolotlGRPOTrainer)


def test_axolotl_validates_the_field(plugins):
    assert "hpo_core.integrations.axolotl.HPOArguments" in plugins.get_input_args()


def test_axolotl_builds_the_trainer_of_a_plugin_without_a_model():
    """Why the plugin sets trainer_cls: what its get_trainer_cls returned would get neither model nor rewards."""
    [folder] = importlib.util.find_spec("axolotl").submodule_search_locations
    builder = Path(folder, "core", "builders", "rl.py").read_text()
    of_plugins, _, others = builder.partition("trainer_cls_args = [self.model]")
    assert "trainer_cls_args = []" in of_plugins and "if self.cfg.trainer_cls:" in others


def test_without_the_field_nothing_changes(plugins):
    cfg = configuration(hpo=None, rl="dpo")
    plugins.pre_model_load(cfg)
    assert cfg.trainer_cls is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hpo": {"gaet": "dapo"}}, "hpo: expected gate, advantage, window, got gaet"),
        ({"hpo": {"gate": "dpao"}}, "did you mean 'dapo'"),
        ({"rl": "dpo"}, "rl: hpo_core's loss is one of grpo"),
        ({"trainer_cls": "other.Trainer"}, "trainer_cls"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"trl": {"async_prefetch": True}}, "trl.async_prefetch"),
    ],
)
def test_refusals(fields, said, plugins):
    with pytest.raises(ValueError, match=said):
        plugins.pre_model_load(configuration(**fields))
