"""The fields of TRL's configuration that HPOTrainer honours and refuses, read from TRL's own source: a new field is
noticed."""

import ast
import doctest
import functools
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from lazily import Lazy, skip_without
from trainers import build, loss_of, micro_batch

import hpo_core as hpo

skip_without("trl")
hpo_trl, trl = Lazy("hpo_core.integrations.trl"), Lazy("trl")
trl_config = Lazy("hpo_core.integrations.trl_config")

pytestmark = pytest.mark.peers

# The fields that TRL's loss reads of the trainer and of its config, and the functions that honour them here.
HONOURED = {
    *("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "args.delta"),  # gate_from_config
    *("off_policy_mask_threshold", "args.sapo_temperature_pos", "args.sapo_temperature_neg"),
    *("args.vespo_k_pos", "args.vespo_lambda_pos", "args.vespo_k_neg", "args.vespo_lambda_neg"),
    *("beta", "args.use_bias_correction_kl"),  # kl
    "top_entropy_quantile",  # window
    *("use_vllm", "vllm_importance_sampling_correction"),  # decide whether a batch has importance_sampling_ratio
    *("current_gradient_accumulation_steps", "args.steps_per_generation", "max_completion_length"),  # weights
    *("aux_loss_enabled", "router_aux_loss_coef"),
    *("entropy_coef", "use_adaptive_entropy", "args.entropy_target", "args.entropy_coef_min", "args.entropy_coef_max"),
    *("args.entropy_coef_delta", "_entropy_bonus_enabled", "_last_world_entropy", "_entropy_window_stats"),
    *("model", "accelerator", "_metrics", "_get_per_token_logps_and_entropies"),  # the machinery, used the same way
    *("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"),  # their fields are walked too
}


def reads_of_the_loss():
    """Names X of ``self.X`` and ``self.args.X`` in the source of TRL's loss and of the methods it calls."""
    names = set()
    for function in ("_compute_loss", "get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights"):
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(trl.GRPOTrainer, function))))
        for node in ast.walk(ast.parse(source)):
            name = ast.unparse(node).removeprefix("self.") if isinstance(node, ast.Attribute) else ""
            if name != ast.unparse(node) and name != "args" and name.removeprefix("args.").isidentifier():
                names.add(name)
    return names


def test_every_field_the_loss_reads_is_honoured_or_refused(tmp_path):
    reads = reads_of_the_loss()
    assert len(reads) > 30, reads
    refused = {name.removeprefix("args.") for name in reads - HONOURED}
    for name in sorted(refused):
        assert name in trl.GRPOConfig.__dataclass_fields__, f"TRL's loss reads {name}, which HPOTrainer does not know"
        with pytest.raises(ValueError, match=f"^{name}: "):
            build(hpo_trl.HPOTrainer, tmp_path, **{name: 0.123})


def test_neutral_values_are_the_defaults():
    fields = trl.GRPOConfig.__dataclass_fields__
    assert fields["off_policy_mask_threshold"].default is None


def test_every_key_the_loss_reads_is_known():
    """``inputs["X"]`` and ``inputs.get("X")`` in TRL's loss: what a new release might add to a micro-batch."""
    source = textwrap.dedent(inspect.getsource(trl.GRPOTrainer._compute_loss))
    keys = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "inputs":
            keys.add(ast.literal_eval(node.slice))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "inputs.get":
            keys.add(ast.literal_eval(node.args[0]))
    scoring = set(inspect.signature(trl.GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert keys - scoring <= hpo_trl.module().OF_THE_LOSS
    assert "pixel_values" in scoring


def test_images_reach_a_scoring_that_names_nothing(tmp_path):
    """Unsloth's scoring is one, and TRL's was: what is for the model goes there, what is for the loss does not."""
    inputs, scored = micro_batch()
    trainer, seen = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": hpo.gates.ppo_clip()}), {}
    trainer.current_gradient_accumulation_steps = 1

    def gathers(*arguments, **kwargs):
        seen.update(kwargs)
        return scored.logps.clone().requires_grad_(), scored.entropies, None

    def names(model, input_ids, attention_mask, logits_to_keep, compute_entropy, compute_aux_loss, pixel_values=None):
        return gathers(pixel_values=pixel_values)

    inputs |= {"pixel_values": torch.ones(3), "group_ids": torch.zeros(6).long(), "token_mask": scored.valid}
    for scoring in (gathers, names):
        seen.clear()
        trainer._get_per_token_logps_and_entropies = scoring
        trainer._compute_loss(None, inputs | ({} if scoring is names else {"of_a_later_release": torch.ones(2)}))
        assert torch.equal(seen.pop("pixel_values"), torch.ones(3))
        assert set(seen) == (
            {"of_a_later_release", "compute_entropy", "compute_aux_loss"} if scoring is gathers else set()
        )


@pytest.mark.parametrize(
    ("message", "extra", "config"),
    [
        ("importance_sampling_level: ", {}, {"importance_sampling_level": "sequence", "loss_type": "sapo"}),
        ("off_policy_mask_threshold: .*gate= ", {"gate": hpo.gates.dapo()}, {"off_policy_mask_threshold": 0.5}),
        ("loss_type: ", {"gate": hpo.gates.dapo()}, {"loss_type": "unheard of"}),
        ("epsilon_high: ", {}, {"loss_type": "cispo"}),
        ("delta: ", {}, {"delta": 1.1}),
        ("importance_sampling_level: ", {}, {"importance_sampling_level": "word"}),
        ("use_bias_correction_kl: ", {}, {"importance_sampling_level": "sequence", "beta": 0.1}),
        ("epsilon: .*gate= replaces it", {"gate": hpo.gates.dapo()}, {"epsilon": 0.1}),
        ("delta: .*gate= replaces it", {"gate": hpo.gates.dapo()}, {"delta": 3.0}),
        ("scale_rewards: .*advantage= ", {"advantage": hpo.advantages.grpo}, {"scale_rewards": "none"}),
        ("top_entropy_quantile: .*window= ", {"window": hpo.entropy.ares()}, {"top_entropy_quantile": 0.5}),
        ("backend: ", {"backend": "abacus"}, {}),
        ("gate: 'hapo_clip' needs bounds, as from gates.hapo_bounds", {"gate": hpo.gates.hapo_clip()}, {}),
        ("gate: 'clip_cov' needs token_mask, as from gates.clip_cov_mask", {"gate": hpo.gates.clip_cov()}, {}),
        ("gate: 'icepop' corrects .* use_vllm=True", {"gate": hpo.gates.icepop()}, {}),
        ("gate: 'tis' corrects ", {"gate": hpo.gates.tis()}, {}),
        (
            "gate_inputs: expected a function of logp, .* got one that needs scores too",
            {"gate": hpo.gates.gbpo(), "gate_inputs": hpo.gates.gbpo_target},
            {},
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(message, extra, config, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}"):
        build(hpo_trl.HPOTrainer, tmp_path, extra=extra, **config)


# ------------------------------------------------------------------------------------------ what the pages say of it

PAGE, LOSS_PAGE = ((Path(__file__).parents[1] / "docs" / name).read_text() for name in ("trl.md", "trl_loss.md"))
GATE, SEQUENCE = {"gate": hpo.gates.dapo()}, {"importance_sampling_level": "sequence"}


def refused_by_row():
    """The form of each row of the table of refused fields: arguments of the trainer, and fields of the config."""
    of_gates = [
        (GATE, {name: 0.123}) for name in trl_config.module().REPLACED["gate"] if name[:5] in ("sapo_", "vespo")
    ]
    ppo = ("epsilon", "epsilon_high", "delta", "off_policy_mask_threshold")
    grpo = {"advantage": hpo.advantages.grpo}
    of_groups = {"gate": hpo.gates.reconstructed.fiberpo_domain(), "domain": "kind"}
    return {
        "steps_per_generation": [(of_groups, {"steps_per_generation": 2})],
        "importance_sampling_level": [({}, {**SEQUENCE, "loss_type": kind}) for kind in ("sapo", "vespo")],
        "vllm_importance_sampling_correction": [({}, {"loss_type": "vespo", "use_vllm": True})],
        "use_bias_correction_kl": [({}, {**SEQUENCE, "beta": 0.1})],
        "epsilon_high": [({}, {"loss_type": "cispo"}), ({}, {"loss_type": "cispo", "epsilon_high": 0.28})],
        "delta": [({}, {"delta": 1.1})],
        "epsilon": [*((GATE, {name: 0.5}) for name in ppo), (GATE, SEQUENCE)],
        "sapo_temperature_neg": of_gates,
        "scale_rewards": [(grpo, {"scale_rewards": "none"}), (grpo, {"multi_objective_aggregation": "other"})],
        "top_entropy_quantile": [({"window": hpo.entropy.ares()}, {"top_entropy_quantile": 0.5})],
    }


def rows_of(page, section):
    """The first cells of the table of a section, each as the names in backticks."""
    table = page.split(f"## {section}")[1].split("\n## ")[0].split("|---|")[1]
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return [re.findall(r"`([^`]*)`", cell) for cell in cells]


def test_the_table_of_refused_fields_is_what_is_refused(tmp_path):
    rows = {re.match(r"\w+", names[0])[0]: names for names in rows_of(PAGE, "Errors instead of silence")}
    examples = refused_by_row()
    assert list(rows) == list(examples)
    for row, names in rows.items():
        named = {match for name in names for match in re.findall(r"^\w+", name)} - {"gate", "advantage", "window"}
        for extra, config in examples[row]:
            with pytest.raises(ValueError, match=rf"^({'|'.join(named)}): "):
                trl_refuses(extra, config, tmp_path)
    said = {match for names in rows.values() for name in names for match in re.findall(r"^\w+", name)}
    assert said >= {*(field for fields in trl_config.module().REPLACED.values() for field in fields)}


def trl_refuses(extra, config, tmp_path):
    """vLLM cannot be started here: its fields are asked about without a trainer."""
    if "use_vllm" in config:
        trl_config.module().check_config(trl.GRPOConfig(tmp_path, bf16=False, **config), [])
    else:
        build(hpo_trl.HPOTrainer, tmp_path, extra=extra, **config)


def test_the_table_of_denominators_has_every_loss_type_and_each_is_accepted(tmp_path):
    kinds = [kind for names in rows_of(LOSS_PAGE, "The loss") for kind in names]
    assert sorted(kinds) == sorted(trl_config.module().KNOWN)
    for kind in kinds:
        build(hpo_trl.HPOTrainer, tmp_path, loss_type=kind, **({"epsilon_high": 5.0} if kind == "cispo" else {}))
    build(hpo_trl.HPOTrainer, tmp_path, off_policy_mask_threshold=0.5)


def test_the_list_of_estimators_is_what_is_accepted(tmp_path):
    (said,) = re.findall(r"^\w+, .*, rloo$", PAGE, re.MULTILINE)
    accepted, refused = set(), {}
    for name in hpo.advantages.__all__:
        estimator = getattr(hpo.advantages, name)
        if hasattr(estimator, "provenance"):
            try:
                build(hpo_trl.HPOTrainer, tmp_path, extra={"advantage": estimator})
                accepted.add(name)
            except ValueError as error:
                refused[name] = str(error)
    assert set(said.split(", ")) == accepted
    assert all(message.startswith("advantage: ") and "\n" not in message for message in refused.values())
    assert "needs lengths, of which TRL says nothing; fix it with functools.partial" in refused["opo"]
    build(hpo_trl.HPOTrainer, tmp_path, extra={"advantage": functools.partial(hpo.advantages.sgrpo, group_rewards=None,
                                                                      supergroup_ids=None)})  # fmt: skip


def test_a_loss_of_the_base_is_replaced_by_a_named_one_only(tmp_path):
    class Own(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            raise AssertionError

    mine = type("Mine", (hpo_trl.HPOMixin, Own), {})
    with pytest.raises(ValueError, match=r"^gate: .*Own\b.* computes a loss of its own, which this one replaces"):
        build(mine, tmp_path)
    trainer = build(mine, tmp_path, extra={"gate": hpo.gates.dapo()})
    trainer.current_gradient_accumulation_steps = 1
    loss_of(mine._compute_loss, trainer, *micro_batch())
    with pytest.raises(TypeError, match=r"^HPOMixin: expected trl\.GRPOTrainer or a subclass"):
        type("Other", (hpo_trl.HPOMixin, trl.RLOOTrainer), {})()


@pytest.mark.parametrize(
    "extra", [{"gate": "dapo"}, {"advantage": "grpo"}, {"window": 0.2}, {"gate_inputs": hpo.gates.GateInputs()}]
)
def test_wrong_types_are_refused(extra, tmp_path):
    (name,) = extra
    with pytest.raises(TypeError, match=f"^{name}: "):
        build(hpo_trl.HPOTrainer, tmp_path, extra=extra)


def test_other_denominators_are_usable_with_a_gate(tmp_path):
    for loss_type in ("sapo", "vespo"):
        trainer = build(hpo_trl.HPOTrainer, tmp_path, extra={"gate": hpo.gates.ppo_clip()}, loss_type=loss_type)
        trainer.current_gradient_accumulation_steps = 1
        inputs, scored = micro_batch()
        same = build(hpo_trl.HPOTrainer, tmp_path, loss_type={"sapo": "grpo", "vespo": "dapo"}[loss_type])
        same.current_gradient_accumulation_steps = 1
        results = [loss_of(hpo_trl.HPOTrainer._compute_loss, one, inputs, scored)[0] for one in (trainer, same)]
        assert torch.equal(*results)


def test_docstrings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tried = doctest.testmod(trl_config.module())
    assert tried.attempted > 0
    assert tried.failed == 0


def test_vespo_beside_a_sampler_whose_weight_is_off_is_accepted(tmp_path):
    settings = {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_correction": False}
    trl_config.check_config(trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **settings), ())
