"""Ragged batches as verl packs them, its losses on them, and what the ranks of its actor compute (verl_on_cpu.py)."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from lazily import Lazy

tensordict_utils, tensordict = Lazy("verl.utils.tensordict_utils"), Lazy("tensordict")
workers, losses = Lazy("verl.workers.config"), Lazy("verl.workers.utils.losses")

ROWS = 8


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Batch:
    """Ragged prompts and responses as verl packs them; the leaf is ``logp``, of all prompts and responses."""

    def __init__(self, seed=0, per_token=False, weights=False):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.prompts = torch.randint(1, 4, (ROWS,), generator=generator).tolist()
        self.responses = torch.randint(2, 20, (ROWS,), generator=generator).tolist()
        lengths = [p + n for p, n in zip(self.prompts, self.responses, strict=True)]
        self.offsets = torch.tensor([0, *lengths]).cumsum(0)
        self.logp = (-normal(sum(lengths)).abs() - 0.1).requires_grad_()
        self.fields = {
            "old_log_probs": [logp + 0.3 * normal(len(logp)) for logp in self.response(self.logp.detach())],
            "advantages": [normal(n if per_token else 1).expand(n).clone() for n in self.responses],
            "response_mask": [normal(n) > -1 for n in self.responses],
        }
        self.fields["advantages"][1].zero_()  # a prompt whose samples were all alike
        if weights:
            self.fields["rollout_is_weights"] = [normal(n).abs() for n in self.responses]

    def response(self, packed):
        """The response part of each row: the log-probability of a token stands one place before it."""
        ends, sizes = self.offsets[1:].tolist(), self.responses
        return [packed[end - size - 1 : end - 1] for end, size in zip(ends, sizes, strict=True)]

    def data(self, rows=range(ROWS), **counts):
        sizes = {"prompts": self.prompts, "responses": self.responses}
        ids = {name: jagged([torch.ones(size[row]).long() for row in rows]) for name, size in sizes.items()}
        fields = {name: jagged([field[row] for row in rows]) for name, field in self.fields.items()}
        data = tensordict.TensorDict({**ids, **fields}, batch_size=[len(rows)])
        counts = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, **counts}
        tensordict_utils.assign_non_tensor(data, **counts)
        return data

    def log_probs(self, rows=range(ROWS)):
        parts = [self.logp[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        lengths = [0, *(len(part) for part in parts)]
        return torch.nested.nested_tensor_from_jagged(torch.cat(parts), torch.tensor(lengths).cumsum(0))


def actor(loss_mode, **fields):
    fields = {"policy_loss": workers.PolicyLossConfig(loss_mode=loss_mode), **fields}
    return workers.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **fields)


def run(batch, config, counts=None, rows=range(ROWS), **output):
    """Loss, its gradient, and the metrics as the trainer logs them."""
    loss, metrics = losses.ppo_loss(
        config, {"log_probs": batch.log_probs(rows), **output}, batch.data(rows, **(counts or {}))
    )
    (gradient,) = torch.autograd.grad(loss, batch.logp)
    logged = {name: metric.aggregate() for name, metric in metrics.items() if hasattr(metric, "aggregate")}
    return loss.detach(), gradient, logged


def close(ours, expected):
    """Loss and gradient within 1e-6 of verl's, relative to the largest term that makes an element."""
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-6, atol=1e-6 * expected[1].abs().max().item())
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-6, atol=1e-6 * expected[1].abs().sum().item())


PROGRAM = Path(__file__).with_name("verl_on_cpu.py")
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "hpo_core",
    "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


def environment(*modules):
    """The environment of a process with verl on the CPU; each of its workers imports the modules."""
    return os.environ | ENVIRONMENT | {
        "VERL_USE_EXTERNAL_MODULES": ",".join([PROGRAM.stem, *modules]),
        "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip


def actors(ranks, folder, *names, modules=()):
    """The results of the ranks of verl's actor, a dictionary for each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = environment(*modules) | {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    processes = []
    for rank in range(ranks):
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, str(PROGRAM), str(folder), *names]
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=own))
    codes = [process.wait() for process in processes]
    for rank, code in enumerate(codes):
        assert code == 0, (folder / f"{rank}.log").read_text()[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
