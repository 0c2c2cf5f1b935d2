"""TRL's fused head with our log-probabilities in it: the same numbers, for labelled positions only."""

import copy
import inspect

import pytest
import torch
from lazily import Lazy, skip_without
from trainers import build

skip_without("trl")
hpo_trl, trl = Lazy("hpo_core.integrations.trl"), Lazy("trl")
head, utils = Lazy("hpo_core.integrations.trl_head"), Lazy("trl.trainer.utils")
transformers = Lazy("transformers")

pytestmark = pytest.mark.peers

OUTPUTS = ("log_probs", "entropy")


def model_of(tied, biased=False, **config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = transformers.LlamaConfig(vocab_size=301, **sizes, tie_word_embeddings=tied, initializer_range=0.5)
    for name, value in config.items():
        setattr(settings, name, value)
    model = transformers.LlamaForCausalLM(settings)
    if biased:
        model.lm_head.bias = torch.nn.Parameter(torch.randn(301))
    return model


def scored(model, tokens, labels):
    model.zero_grad()
    outputs = model(input_ids=tokens, labels=labels, fused_lm_head=True)
    (outputs.log_probs.sum() - 0.3 * outputs.entropy.square().sum()).backward()
    grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return outputs.log_probs.detach(), outputs.entropy.detach(), grads


CONFIGS = {
    "plain": {},
    "softcap": {"final_logit_softcapping": 3.0},
    "scale": {"logit_scale": 0.25},
    "bias": {"biased": True},
    "softcap and scale": {"final_logit_softcapping": 3.0, "logit_scale": 2.0},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_scores_and_gradients_are_those_of_trl(name, tied):
    """Within rounding: at most twice TRL's own distance from the same model in float64."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 301, (3, 11), generator=draw)
    labels = tokens.masked_fill(torch.rand(3, 11, generator=draw) < 0.4, -100)
    results = {}
    for kind in ("exact", "trl", "ours"):
        model = model_of(tied, **CONFIGS[name])
        utils.add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
        if kind == "ours":
            head.give_head(model, "cpu")
        elif kind == "exact":
            model.double()
        if kind == "exact":  # TRL's head computes in float32: the reference serves float64
            head.give_head(model, "reference")
        results[kind] = scored(model, tokens, labels)
    for ours, theirs, exact in zip(results["ours"], results["trl"], results["exact"], strict=True):
        assert ours.dtype == torch.float32
        error, allowed = (ours - exact).abs().max(), (theirs - exact).abs().max()
        assert error <= 2 * allowed + 1e-7 * exact.abs().max()
        assert allowed <= 1e-4 * exact.abs().max()
    ignored = labels[:, 1:] == -100
    assert (results["ours"][0][ignored] == 0).all() and (results["ours"][1][ignored] == 0).all()


def test_a_plain_forward_pass_and_generation_stay_the_model_s_own():
    model = model_of(True)
    tokens = torch.arange(12).view(2, 6)
    expected = model(input_ids=tokens).logits, model.generate(tokens, max_new_tokens=3, do_sample=False)
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    head.give_head(model, None)
    got = model(input_ids=tokens).logits, model.generate(tokens, max_new_tokens=3, do_sample=False)
    assert all(torch.equal(mine, own) for mine, own in zip(got, expected, strict=True))


def test_a_copy_scores_with_its_own_weights():
    model, tokens = model_of(True), torch.arange(12).view(2, 6)
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    head.give_head(model, "cpu")
    frozen = copy.deepcopy(model)
    expected = scored(frozen, tokens, tokens)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    assert torch.equal(scored(frozen, tokens, tokens)[0], expected[0])
    assert not torch.equal(scored(model, tokens, tokens)[0], expected[0])


def test_a_forward_of_another_object_keeps_its_weights():
    """A wrapper may have put it there, which hands its calls on."""
    other, model, tokens = model_of(True), model_of(True), torch.arange(12).view(2, 6)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    model.forward = other.forward
    expected = model(input_ids=tokens).logits
    head.give_head(model, "cpu")
    assert torch.equal(model(input_ids=tokens).logits, expected)


def test_the_names_of_trl_are_ours_for_the_time_of_a_forward_pass():
    before = utils.module()._ChunkedLogProbFunction, utils.module()._use_triton
    model = model_of(True)
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    head.give_head(model, None)
    with pytest.raises(TypeError):
        model(input_ids=torch.arange(4)[None], labels=None, fused_lm_head=True)
    assert (utils.module()._ChunkedLogProbFunction, utils.module()._use_triton) == before


def test_the_contract_with_trl():
    """The names that are replaced, where they are used, and what the function is called with."""
    source = inspect.getsource(utils.add_fused_lm_head)
    assert source.count("_ChunkedLogProbFunction.apply(") == source.count("_use_triton(") == 1
    theirs = [*inspect.signature(utils.module()._ChunkedLogProbFunction.forward).parameters][1:]
    ours = [*inspect.signature(head.module()._Head.apply).parameters][1:]
    assert ours == theirs


def test_every_score_of_a_trainer_goes_through_it(monkeypatch, tmp_path):
    """Old, current and reference log-probabilities; of completions only."""
    calls = []
    inner = head.linear_token_logprobs

    def counted(hidden, weight, targets, *given, **keywords):
        calls.append((targets.numel(), (targets == -100).any().item(), hidden.requires_grad))
        return inner(hidden, weight, targets, *given, **keywords)

    monkeypatch.setattr(head.module(), "linear_token_logprobs", counted)
    trainer = build(hpo_trl.HPOTrainer, tmp_path, beta=0.1, max_steps=2, num_iterations=2, steps_per_generation=1)
    trainer.train()
    assert [differentiable for _, _, differentiable in calls] == [False, False, True, True]
    assert len({size for size, _, _ in calls}) == 1 and calls[0][0] <= 16 * 12
    assert not any(ignored for _, ignored, _ in calls)
