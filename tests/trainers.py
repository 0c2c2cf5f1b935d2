"""TRL's trainers of the demo's model, and one micro-batch for their losses."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from lazily import Lazy, script

datasets, transformers, trl = Lazy("datasets"), Lazy("transformers"), Lazy("trl")


def demo():
    return script("examples/demo.py")


class Rewards:
    """How many different characters an answer has: varies for untrained models. Remembers what was sampled."""

    __name__ = "distinct"

    def __init__(self):
        self.seen = []

    def __call__(self, prompts, completions, completion_ids, **_):
        self.seen += completion_ids
        return [len(set(completion)) / 12 for completion in completions]


def build(kind, folder, *, extra=None, callbacks=None, eval_dataset=None, **config):
    """A trainer of the demo's model; ``extra`` are HPOTrainer's own arguments."""
    torch.set_num_threads(1)  # of a model this small, others would only wait
    settings = {
        "max_steps": 10,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 16,
        "steps_per_generation": 4,
        "num_generations": 8,
        "max_completion_length": 12,
        "top_k": 0,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
    } | config
    tokenizer = demo().build_tokenizer()
    texts = demo().make_prompts(64, random.Random(0))
    prompts = datasets.Dataset.from_dict({"prompt": texts, "kind": [text[0] for text in texts]})
    model = demo().build_model(tokenizer, seed=0)
    if config.get("beta"):  # TRL loads the reference model from where the model says it came from
        model.save_pretrained(folder / "model")
        model.config._name_or_path = str(folder / "model")
    trainer = kind(
        model=model,
        args=trl.GRPOConfig(str(folder), **settings),
        processing_class=tokenizer,
        reward_funcs=Rewards(),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(4)) if eval_dataset else None,
        callbacks=callbacks,
        **(extra or {}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


# ---------------------------------------------------------------------------------------------------- one micro-batch

ROWS, LENGTH = 6, 9


def micro_batch(seed=7, per_token_advantages=False):
    """Scored completions with an empty row, a tool's tokens, ratios far from 1 and equal rewards; NaN where masked."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    lengths = torch.tensor([LENGTH, 5, 1, 0, 7, LENGTH])
    completion_mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    tool_mask = torch.ones_like(completion_mask)
    tool_mask[0, 3:5] = 0
    valid = completion_mask * tool_mask != 0
    logps = -1 + 0.3 * normal(ROWS, LENGTH)
    old = logps + 0.3 * normal(ROWS, LENGTH)
    ref = logps + 0.3 * normal(ROWS, LENGTH)
    advantages = torch.tensor([1.3, -0.7, -1.1, 0.4, 0.0, -0.2])
    if per_token_advantages:
        advantages = advantages[:, None] + 0.1 * normal(ROWS, LENGTH)
    return {
        "prompt_ids": torch.ones(ROWS, 2, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
        "completion_ids": torch.ones(ROWS, LENGTH, dtype=torch.long),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(4 * int(valid.sum())),
    }, SimpleNamespace(logps=logps, entropies=normal(ROWS, LENGTH).abs(), valid=valid)


def loss_of(compute_loss, trainer, inputs, scored, poison=None):
    """Loss, dL/dlogps and logged metrics of one micro-batch whose scores are given. ``poison`` goes where masked."""
    inputs, logps = dict(inputs), scored.logps.clone()
    if poison is not None:
        logps[~scored.valid] = poison
        for key in ("old_per_token_logps", "ref_per_token_logps"):
            if key in inputs:
                inputs[key] = torch.where(scored.valid, inputs[key], poison)
    logps.requires_grad_()
    entropies = scored.entropies + (logps - logps.detach()) / 2  # some gradient, which an entropy bonus has
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, entropies, None)
    for values in trainer._metrics.values():
        values.clear()
    loss = compute_loss(trainer, None, inputs)
    loss.backward()
    mode = "train" if trainer.model.training else "eval"
    return loss.detach(), logps.grad, {key: value[-1] for key, value in trainer._metrics[mode].items()}
