"""A whole run of HPOTrainer on agents that call tools: TRL's own environments, parsing and loop, and gigpo's turns."""

import functools
import json
from itertools import pairwise

import pytest
import torch
from lazily import Lazy, skip_without
from trainers import demo

import hpo_core as hpo
from hpo_core.integrations.turns import Step

skip_without("trl")
skip_without("jmespath")  # TRL parses tool calls with it
hpo_trl, transformers, trl = Lazy("hpo_core.integrations.trl"), Lazy("transformers"), Lazy("trl")
datasets, tokenizers, templates = Lazy("datasets"), Lazy("tokenizers"), Lazy("trl.chat_template_utils")

pytestmark = pytest.mark.peers

GROUP, GENERATED = 4, 8
MARKS = ("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
GIGPO = functools.partial(hpo.advantages.gigpo, gamma=0.9)


class Corridor:
    """Rooms in a row; the third is worth 1. Notes what the policy saw before each turn, and what the turn got."""

    def reset(self, **_):
        self.room, self.seen, self.paid = 0, ["room 0"], []

    def go(self, direction: str) -> str:
        """Go to another room.

        Args:
            direction: "left" or "right".

        Returns:
            Where you are.
        """
        self.room += 1 if direction == "right" else -1
        self.paid.append(0.125 if direction == "right" else -0.25)
        self.seen.append(f"room {self.room}")
        return self.seen[-1]

    def get_reward(self) -> float:
        return float(self.room == 2)


def build_tokenizer():
    """One token per character, and a chat template with tools that TRL knows."""
    characters = [chr(at) for at in (10, *range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([*MARKS, *characters])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>", padding_side="left",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    found.add_tokens(["<tool_call>", "</tool_call>"])
    found.chat_template = templates.qwen3_chat_template
    return found


def call(direction):
    return f"<tool_call>\n{json.dumps({'name': 'go', 'arguments': {'direction': direction}})}\n</tool_call><|im_end|>"


PLANS = (("right", "right"), ("right", "left"), ("left",), ())  # of the rows of a group


class Scripted:
    """The text that the policy writes, turn by turn: an untrained model calls no tool."""

    def __init__(self, tokenizer):
        self.tokenizer, self.rows, self.turn = tokenizer, [], 0

    def __call__(self, prompt_ids, *_, **__):
        if not self.rows:
            self.rows, self.turn = [*range(len(prompt_ids))], 0
        assert len(prompt_ids) == len(self.rows)  # those that called a tool in the turn before
        calls = [PLANS[row % GROUP][self.turn :][:1] for row in self.rows]
        texts = [call(*each) if each else "done<|im_end|>" for each in calls]
        self.rows = [row for row, each in zip(self.rows, calls, strict=True) if each]
        self.turn += 1
        return [self.tokenizer(text)["input_ids"] for text in texts], None


def test_turns_of_tools_train(tmp_path, monkeypatch):
    tokenizer, outputs = build_tokenizer(), []
    config = demo().build_model(tokenizer, seed=0).config
    config.update({"max_position_embeddings": 4096})
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)

    def steps(environments, **_):
        return [[*map(Step, each.seen, [*each.paid, 0.0])] for each in environments]

    trainer = hpo_trl.HPOTrainer(
        model=model, processing_class=tokenizer, environment_factory=Corridor, reward_funcs=[],
        train_dataset=datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "go"}]] * 8}),
        args=trl.GRPOConfig(
            str(tmp_path), max_steps=2, per_device_train_batch_size=GENERATED, num_generations=GROUP,
            max_completion_length=600, bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True, learning_rate=1e-3, dataloader_pin_memory=False,
        ),
        advantage=GIGPO, steps=steps,
    )  # fmt: skip
    scripted = Scripted(tokenizer)
    monkeypatch.setattr(trainer, "_generate_single_turn", scripted)
    generate = trainer._generate_and_score_completions

    def noted(inputs):
        output = generate(inputs)
        outputs.append((output, [list(each.seen) for each in trainer.environments]))
        return output

    monkeypatch.setattr(trainer, "_generate_and_score_completions", noted)
    before = torch.cat([each.detach().flatten().clone() for each in model.parameters()])
    trainer.train()
    (output, seen), *_ = outputs
    ways = [(0, 1, 2), (0, 1, 0), (0, -1), (0,)]
    assert seen == [[f"room {at}" for at in way] for way in ways] * 2

    # Advantages by hand: the reward of a run at its last turn, anchors the rooms, groups of four.
    mask = (output["completion_mask"] * output["tool_mask"]) != 0
    rooms = [room for run in seen for room in run]
    run = torch.tensor([at for at, each in enumerate(seen) for _ in each])
    last = torch.tensor([at == len(each) - 1 for each in seen for at in range(len(each))])
    reward = torch.tensor([float(each[-1] == "room 2") for each in seen])
    anchors = torch.tensor([int(room.split()[1]) + 1 for room in rooms])
    paid = {(0, 1): 0.125, (1, 2): 0.125, (1, 0): -0.25, (0, -1): -0.25}
    of_turns = torch.tensor([paid[step] for way in ways for step in pairwise(way)])
    rewards = torch.where(last, reward[run], 0.0)
    rewards[~last] = of_turns.repeat(2)
    expected = GIGPO(rewards, run // GROUP, run, anchors)
    begins = mask & ~torch.nn.functional.pad(mask, (1, -1))
    assert int(begins.sum()) == len(rooms)
    torch.testing.assert_close(output["advantages"][begins], expected)
    assert not output["advantages"][~mask].any() and expected.unique().numel() > 4
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs[0]["tools/call_frequency"] == 1.25 and logs[0]["tools/failure_frequency"] == 0
    assert len(logs) == 2 and all(entry["grad_norm"] > 0 for entry in logs)
    after = torch.cat([each.detach().flatten() for each in model.parameters()])
    assert not torch.equal(before, after)
