"""Data parallel: the answers to a prompt lie on all processes, which train as one process would.

torchrun --nproc-per-node 2 examples/ddp.py
"""

import os
import time

import torch
import torch.distributed as dist

import hpo_core as hpo
from hpo_core.gates import Level, LogClip, RatioGate, Tanh, Unit

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.set_default_device(device)
torch.manual_seed(0)
WORDS, LONGEST = 50, 12
model = torch.nn.Sequential(torch.nn.Embedding(WORDS, 64), torch.nn.Linear(64, WORDS))  # yours
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
# A clip for each token, and budgets: for the mean log-ratio of an answer, and for that of all answers to a prompt.
levels = (Level(Tanh(0.05)), Level(Tanh(0.03), unit=Unit.GROUP))
gate = RatioGate("prompt_budget", LogClip((-0.2, -0.2), (0.2, 0.2)), levels=levels)


@torch.no_grad()
def rollout(prompts=8, samples=8):
    """Yours. Here all processes draw the same answers, and each keeps its share; even words pay."""
    words = torch.randint(WORDS, (prompts, 1)).repeat_interleave(samples, 0)
    for _ in range(LONGEST):
        words = torch.cat((words, torch.multinomial(model(words[:, -1]).softmax(-1), 1)), 1)
    lengths = torch.randint(4, LONGEST + 2, (prompts * samples,))
    inside = torch.arange(LONGEST + 1) < lengths[:, None]
    rewards = ((words % 2 == 0) & inside)[:, 1:].sum(1) / (lengths - 1)
    prompt_of = torch.arange(prompts).repeat_interleave(samples)
    return (each[rank::ranks] for each in (words, inside, rewards, prompt_of))


for update in range(1, int(os.environ.get("UPDATES", "30")) + 1):
    words, inside, rewards, prompts = rollout()
    tokens = words[inside]
    batch = hpo.PackedBatch.from_lengths(inside.sum(1), group_ids=prompts).without_first_tokens()
    with torch.no_grad():
        old_logp, _ = hpo.token_logprobs(model(tokens), tokens, batch=batch, entropy=False)
    advantages = hpo.advantages.over_ranks(hpo.advantages.grpo)(rewards, prompts)  # among all answers to a prompt
    # All processes' tokens are counted, and DDP's mean of gradients is made a sum.
    weights = hpo.aggregation.token_mean(batch, process_group=world, gradient_reduction="mean")
    for _ in range(4):
        logp, _ = hpo.token_logprobs(parallel(tokens), tokens, batch=batch, entropy=False)
        out = hpo.policy_loss(logp, old_logp, advantages, batch, gate, weights=weights, process_group=world)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    reward = rewards.mean() / ranks
    dist.all_reduce(reward)
    report = out.metrics.all_reduce(world).compute()
    if update % 10 == 0 and rank == 0:
        print(f"{update} reward {reward:.2f} clipped {report['clip_fraction']:.2f} processes {ranks}")
dist.destroy_process_group()
time.sleep(1)  # gloo's threads free their last tensors, and torch 2.13 may abort where a process ends at that moment
