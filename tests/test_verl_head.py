"""verl's forward passes with our log-probabilities and entropies in them; on ``long`` runs, verl's whole actor."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from lazily import Lazy, skip_without
from verl_batches import actors

skip_without("verl")
hpo_verl, transformers = Lazy("hpo_core.integrations.verl"), Lazy("transformers")
monkey_patch = Lazy("verl.models.transformers.monkey_patch")
head, kernels = Lazy("hpo_core.integrations.verl_head"), Lazy("verl.utils.experimental.torch_functional")

pytestmark = pytest.mark.peers

HEADS = ("hpo_core", "hpo_core_logits")
TEMPERATURE = 0.7
SIZES = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "initializer_range": 0.5, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def installed():
    assert callable(hpo_verl.register)  # importing it, as verl does, is all that a user does


def model_of(name, **config):
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES | config))


def with_head(model, name):
    """The model's own class keeps its forward pass, whatever verl does to it."""
    kind = type(model)
    own = kind.forward
    monkey_patch.patch_forward_with_backends(model, use_fused_kernels=name != "eager", fused_kernels_backend=name)
    model.forward, kind.forward = model.forward if name in HEADS else kind.forward.__get__(model), own
    return model


def tokens_of(rows=3):
    return torch.randint(1, 101, (rows, 9), generator=torch.Generator().manual_seed(1))


def scored(model, tokens, **given):
    """Log-probabilities and entropies of all targets, and the gradient of both."""
    outputs = model(input_ids=tokens, temperature=TEMPERATURE, return_dict=True, use_cache=False, **given)
    (outputs.log_probs.sum() - 0.3 * outputs.entropy.square().sum()).backward()
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return outputs.log_probs.detach(), outputs.entropy.detach(), torch.cat([each.flatten() for each in found])


def exact(model, tokens):
    """The same of the model's own logits, in float64."""
    logits = model.double()(input_ids=tokens, use_cache=False).logits / TEMPERATURE
    logps = logits.log_softmax(-1)
    logp = logps.gather(-1, tokens.roll(-1, 1)[..., None])[..., 0]
    entropy = -(logps.exp() * logps).sum(-1)
    (logp.sum() - 0.3 * entropy.square().sum()).backward()
    return logp.detach(), entropy.detach(), torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_scores_and_gradients_are_those_of_verl(name, tied):
    """Within rounding: at most twice the distance of verl's own kernel from the same model in float64."""
    tokens = tokens_of()
    expected = exact(model_of("Qwen2", tie_word_embeddings=tied), tokens)
    theirs, ours = (
        scored(with_head(model_of("Qwen2", tie_word_embeddings=tied), each), tokens) for each in ("torch", name)
    )
    for mine, other, truth in zip(ours, theirs, expected, strict=True):
        assert mine.dtype == torch.float32
        error, allowed = (mine - truth).abs().max(), (other - truth).abs().max()
        assert error <= 2 * allowed + 1e-7 * truth.abs().max()
        assert allowed <= 1e-4 * truth.abs().max()


HEADS_THAT_DO_MORE = {
    "softcap": ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16}),
    "scale": ("Cohere", {"logit_scale": 0.25}),
    "divided": ("Granite", {"logits_scaling": 3.0}),
    "bias": ("Phi", {}),
}


@pytest.mark.parametrize("what", HEADS_THAT_DO_MORE)
def test_what_a_model_does_to_its_logits_counts(what):
    """verl's kernels leave it out."""
    name, config = HEADS_THAT_DO_MORE[what]
    tokens, results = tokens_of(), {}

    def model():
        found = model_of(name, **config)
        if what == "bias":
            torch.nn.init.normal_(found.lm_head.bias)
        return found

    expected = exact(model(), tokens)
    for each in ("torch", *HEADS):
        results[each] = scored(with_head(model(), each), tokens)
    for each in HEADS:
        for mine, truth in zip(results[each], expected, strict=True):
            torch.testing.assert_close(mine, truth.float(), rtol=1e-4, atol=1e-4 * truth.abs().max().item())
    assert (results["torch"][0] - expected[0]).abs().max() > 0.1


@pytest.mark.parametrize("name", HEADS)
def test_labels_that_are_shifted_already_are_taken_as_they_are(name):
    """verl packs rows and, under Ulysses, cuts them: only its engine knows the token after the last one of a part."""
    tokens, labels = tokens_of(), tokens_of(4)[1:]
    logp = scored(with_head(model_of("Llama"), name), tokens, shift_labels=labels)[0]
    logits = model_of("Llama")(input_ids=tokens).logits / TEMPERATURE
    torch.testing.assert_close(logp, logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0], rtol=1e-5, atol=1e-5)


def test_a_model_without_a_linear_head_is_refused():
    config = transformers.Qwen2Config(**SIZES)
    with pytest.raises(ValueError, match=r"^impl_backend: 'hpo_core' .* got NoneType; "):
        with_head(transformers.Qwen2ForTokenClassification(config), "hpo_core")


def test_an_adapter_on_the_head_is_refused_and_its_logits_are_not():
    """verl patches a model before it adds adapters; its own kernels leave one on the head out."""
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "target_modules": ["lm_head", "q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    adapted = {
        name: peft.get_peft_model(with_head(model_of("Llama"), name), peft.LoraConfig(**settings)) for name in HEADS
    }
    with pytest.raises(ValueError, match=r"^impl_backend: .* got Linear; take adapters off the head"):
        adapted["hpo_core"](input_ids=tokens_of(), temperature=TEMPERATURE, return_dict=True)
    model = adapted["hpo_core_logits"]
    outputs = model(input_ids=tokens_of(), temperature=TEMPERATURE, return_dict=True)
    logits = model.get_base_model().lm_head(model.get_base_model().model(tokens_of())[0]) / TEMPERATURE
    logp = logits.log_softmax(-1).gather(-1, tokens_of().roll(-1, 1)[..., None])[..., 0]
    torch.testing.assert_close(outputs.log_probs, logp, rtol=1e-5, atol=1e-5)


def test_a_temperature_that_is_none_is_an_error():
    for name in HEADS:
        with pytest.raises(ValueError, match=r"^temperature: "):
            with_head(model_of("Llama"), name)(input_ids=tokens_of(), temperature=0.0, return_dict=True)


def test_other_models_and_verl_s_own_names_stay_verl_s(capsys):
    model, kernel = model_of("Llama"), kernels.FusedLinearForPPO
    own = type(model).forward
    monkey_patch.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="hpo_core")
    assert capsys.readouterr().out == "Using hpo_core for log-probabilities and entropies of LlamaForCausalLM\n"
    scored(model, tokens_of())
    assert type(model).forward is own and kernels.FusedLinearForPPO is kernel
    for used, name in ((False, "hpo_core"), (True, None), (True, "abacus")):
        other = model_of("Llama")
        monkey_patch.patch_forward_with_backends(other, use_fused_kernels=used, fused_kernels_backend=name)
        assert "Skipping" in capsys.readouterr().out and "forward" not in vars(other)


# ----------------------------------------------------------------------------------------------- the contract with verl


def source(module):
    return (Path(importlib.util.find_spec("verl").origin).parent / module).read_text()


def test_the_contract_of_the_name_that_is_replaced():
    """The engine gets to it through one function, which looks it up when called, with the model and two keywords."""
    assert [*inspect.signature(monkey_patch.patch_forward_with_backends).parameters] == [
        "model", "use_fused_kernels", "fused_kernels_backend",
    ]  # fmt: skip
    assert (
        inspect.getsource(monkey_patch.apply_monkey_patch)
        .rstrip()
        .endswith(
            "patch_forward_with_backends(model, use_fused_kernels=use_fused_kernels, "
            "fused_kernels_backend=fused_kernels_backend)"
        )
    )
    assert monkey_patch.apply_monkey_patch.__globals__ is vars(monkey_patch.module())
    engine = source("workers/engine/fsdp/transformer_impl.py")
    assert 'fused_kernel_options.get("impl_backend", None)' in engine
    for given in ('extra_args["temperature"] = temperature_item', 'extra_args["return_dict"] = True',
                  'extra_args["shift_labels"] = output_args["input_ids_rmpad_rolled"].unsqueeze(0)',
                  "log_probs = output.log_probs.squeeze(0)", "log_probs = output.log_probs[mask]",
                  "output.entropy.squeeze(0) if calculate_entropy", "entropy = output.entropy[mask]"):  # fmt: skip
        assert engine.count(given) == 1, given


@pytest.mark.parametrize("kind", ["dense_common", "qwen2_vl", "qwen3_vl", "glm4v", "qwen3_5"])
def test_the_contract_of_the_kernel(kind):
    """Every forward pass imports the kernel when it runs, and calls it with what ours takes."""
    tree = ast.parse(source(f"models/transformers/{kind}.py"))
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    body = functions["forward_with_torch_backend"]
    imports = [ast.unparse(each) for each in ast.walk(body) if isinstance(each, ast.ImportFrom)]
    assert "from verl.utils.experimental.torch_functional import FusedLinearForPPO" in imports
    calls = [each for each in ast.walk(body) if isinstance(each, ast.Call)]
    (made,) = [each for each in calls if ast.unparse(each.func) == "FusedLinearForPPO"]
    assert not made.args
    (called,) = [each for each in calls if ast.unparse(each.func) == "fused_linear_for_ppo.forward"]
    ours = [*inspect.signature(head.module()._Head.forward).parameters][1:]
    assert [each.arg for each in called.keywords] == ours and not called.args
    assert [*inspect.signature(kernels.FusedLinearForPPO.forward).parameters][1:] == ours


# -------------------------------------------------------------------------------------------------- verl's whole actor


@pytest.mark.long  # one minute on two cores
@pytest.mark.parametrize("ranks", [1, 2])
def test_verl_s_actor(ranks, tmp_path):
    """Scores, gradients, what it logs and the parameters after three optimiser steps: those of verl's own paths."""
    for results in actors(ranks, tmp_path, "eager", "torch", *HEADS):
        check_actor(results)


def check_actor(results):
    """In float32 to rounding, which Adam makes greater; in bfloat16 verl's own paths differ as much."""
    for (name, packed, dtype), found in results.items():
        expected = results["eager", packed, dtype]

        def apart(of, other, what):
            return ((of[what] - other[what]).abs().max() / other[what].abs().max()).item()

        for what, allowed in {"log_probs": 1e-6, "entropy": 1e-6, "gradient": 1e-6, "parameters": 1e-5}.items():
            if dtype == "bf16":
                allowed = 2 * apart(results["torch", packed, dtype], expected, what)
            assert apart(found, expected, what) <= allowed, (name, packed, dtype, what)
        if dtype == "fp32":
            torch.testing.assert_close(found["logged"], expected["logged"], rtol=1e-5, atol=1e-6)
    assert not torch.equal(results["eager", False, "fp32"]["gradient"], results["eager", False, "bf16"]["gradient"])


PARTS = sorted((Path(__file__).parents[1] / "hpo_core/integrations").glob("verl_*.py"))


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_no_part_of_the_integration_imports_verl_with_itself(path):
    """verl would import ``hpo_core.integrations.verl``, which would find this part unfinished; verl hides the error."""
    imported = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    assert imported and not [node for node in imported if not node.level and node.module.startswith("verl")]
