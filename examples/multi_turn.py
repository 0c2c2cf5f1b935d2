"""Credit for the turns of an agent: a turn is a step, and turns from the same observation are compared.

python examples/multi_turn.py
"""

import torch

import hpo_core as hpo

torch.manual_seed(0)
CELLS, TURNS, PROMPTS, SAMPLES = 7, 8, 16, 8
GO, TAKE, LEFT, RIGHT, IT, BEGIN = range(6)


class Policy(torch.nn.Module):  # yours: here logits of the next word [N, 5], from an observation and the last word
    def __init__(self):
        super().__init__()
        self.seen, self.word = torch.nn.Embedding(CELLS**2, 64), torch.nn.Embedding(6, 64)
        self.head = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(64, 5))

    def forward(self, seen, word):
        return self.head(self.seen(seen) + self.word(word))


model = Policy()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@torch.no_grad()
def rollout():
    """Yours: episodes. Here an agent says "go left", "go right" or "take it", which pays where the key lies."""
    places = torch.randint(CELLS, (2, PROMPTS)).repeat_interleave(SAMPLES, 1)
    (place, key), playing, turns = places, torch.ones(PROMPTS * SAMPLES).bool(), []
    for _ in range(TURNS):
        seen, last, said = place * CELLS + key, torch.full_like(place, BEGIN), []
        for _ in range(2):  # words of a turn
            last = torch.multinomial(model(seen, last).softmax(-1), 1).squeeze(1)
            said.append(last)
        verb, what = said
        taken = playing & (verb == TAKE) & (what == IT) & (place == key)
        turns.append((seen, verb, what, taken.float(), playing))
        moved = (verb == GO) * ((what == RIGHT).long() - (what == LEFT).long())
        place, playing = (place + moved).clamp(0, CELLS - 1), playing & ~taken
    return (torch.stack(each, 1) for each in zip(*turns, strict=True))  # all [episodes, turns]


for update in range(1, 41):
    seen, verb, what, rewards, played = rollout()
    words = torch.stack((verb, what), 2)[played].flatten()  # [T]: the words of all turns that were played
    before = torch.stack((torch.full_like(verb, BEGIN), verb), 2)[played].flatten()
    context = seen[played].repeat_interleave(2)
    batch = hpo.PackedBatch.from_lengths(
        2 * played.sum(1),
        cu_steps=torch.arange(0, len(words) + 1, 2),  # where turns begin
        group_ids=torch.arange(PROMPTS).repeat_interleave(SAMPLES),
    )
    turns = {**batch.ids_of_steps(), "anchor_ids": seen[played]}  # equal where the agent saw the same
    advantages = hpo.advantages.gigpo(rewards[played], **turns)  # [N], one of each turn
    with torch.no_grad():
        old_logp, _ = hpo.token_logprobs(model(context, before), words, entropy=False)
    for _ in range(4):
        logp, _ = hpo.token_logprobs(model(context, before), words, entropy=False)
        gate = hpo.gates.step_gspo(0.1, 0.2)  # clips a turn as a whole
        out = hpo.policy_loss(logp, old_logp, advantages, batch, gate, advantage_level="step")
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if update % 10 == 0:
        solved, length = rewards.sum(1).mean(), played.sum(1).float().mean()
        print(f"{update} solved {solved:.2f} turns {length:.1f} clipped {out.metrics.compute()['clip_fraction']:.2f}")
