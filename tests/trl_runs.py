"""Whole training runs of TRL and their differences."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import torch
from lazily import Lazy
from trainers import build

import hpo_core as hpo

transformers = Lazy("transformers")


def run(kind, folder, **options):
    """Train; every logged value, the sampled tokens, and the parameters."""
    logs = []

    class Record(transformers.TrainerCallback):
        def on_log(self, args, state, control, **given):
            logs.append(dict(given["logs"]))

    trainer = build(kind, folder, callbacks=[Record()], **options)
    gc.freeze()  # at its end TRL collects garbage, which would look through all that imports left behind
    trainer.train()
    gc.unfreeze()
    parameters = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).double()
    return SimpleNamespace(logs=logs, tokens=trainer.reward_funcs[0].seen, parameters=parameters)


def differences(ours, theirs):
    """Largest differences over all logged steps, relative to the run's largest loss, and to each step's norm."""

    def column(result, key):
        return torch.tensor([entry[key] for entry in result.logs if key in entry], dtype=torch.float64)

    loss, norm = column(theirs, "loss"), column(theirs, "grad_norm")
    assert len(loss) == len(norm) == 10
    return SimpleNamespace(
        loss=((column(ours, "loss") - loss).abs().max() / loss.abs().max()).item(),
        norm=((column(ours, "grad_norm") - norm).abs() / norm).max().item(),
        parameters=((ours.parameters - theirs.parameters).norm() / theirs.parameters.norm()).item(),
    )


DEEP = hpo.gates.RatioGate(
    "deep",
    hpo.gates.LogClip((-0.1, -0.1), (0.1, 0.1)),
    tuple(hpo.gates.Level(hpo.gates.Tanh(0.05), unit=unit) for unit in hpo.gates.Unit),
)
