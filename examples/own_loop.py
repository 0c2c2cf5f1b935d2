import torch
import hpo_core as hpo

torch.manual_seed(0)
WORDS, LONGEST = 50, 12
embedding, head = torch.nn.Embedding(WORDS, 64), torch.nn.Linear(64, WORDS)
model = torch.nn.Sequential(embedding, head)  # yours: from ids [T] to logits [T, V]
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

@torch.no_grad()
def rollout(prompts=8, samples=8):
    """Yours: answers of a sampler with rewards. Here prompts are words; even words pay."""
    words = torch.randint(WORDS, (prompts, 1)).repeat_interleave(samples, 0)
    for _ in range(LONGEST):
        following = torch.multinomial(model(words[:, -1]).softmax(-1), 1)
        words = torch.cat((words, following), 1)
    lengths = torch.randint(4, LONGEST + 2, (prompts * samples,))
    inside = torch.arange(LONGEST + 1) < lengths[:, None]
    rewards = ((words % 2 == 0) & inside)[:, 1:].sum(1) / (lengths - 1)
    return words, inside, rewards, torch.arange(prompts).repeat_interleave(samples)

for update in range(1, 41):
    words, inside, rewards, prompts = rollout()
    tokens = words[inside]  # packed: [T], one answer behind the other
    batch = hpo.PackedBatch.from_lengths(inside.sum(1), group_ids=prompts)
    batch = batch.without_first_tokens()  # the prompts, which nobody predicts
    with torch.no_grad():
        old_logp, entropy = hpo.token_logprobs(model(tokens), tokens, batch=batch)
    advantages = hpo.advantages.grpo(rewards, prompts)
    weights = hpo.aggregation.token_mean(batch)  # of the whole optimiser step
    for _ in range(4):  # optimiser steps for each rollout
        seen = []
        for part in batch.micro_batches(max_tokens=256):
            ids = tokens[part.tokens]
            logp, _ = hpo.token_logprobs(model(ids), ids, batch=part.batch)
            out = hpo.policy_loss(
                logp, old_logp[part.tokens], advantages[part.rows], part.batch,
                hpo.gates.dapo(), weights=weights[part.rows], entropy=entropy[part.tokens],
            )
            out.loss.backward()
            seen.append(out.metrics)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if update % 10 == 0:
        report = sum(seen).compute()  # the only copy to the host
        clipped, unsure, reward = report["clip_fraction"], report["entropy"], rewards.mean()
        print(f"{update} reward {reward:.2f} clipped {clipped:.2f} entropy {unsure:.2f}")
