"""The steps of two ranks that every recipe of docs/distributed.md is tried on."""

import functools

import torch
import torch.distributed as dist

import hpo_core as hpo
from hpo_core import aggregation

MODES = {
    "token_mean": aggregation.token_mean,
    "seq_mean_token_mean": aggregation.seq_mean_token_mean,
    "seq_mean_token_sum": aggregation.seq_mean_token_sum,
    "fixed_length": functools.partial(aggregation.fixed_length, length=9),
    "prompt_mean": aggregation.prompt_mean,
    "vl_norm": functools.partial(aggregation.vl_norm, length=9, alpha=0.5),
}
# The lengths of each rank: prompts of two answers. No two fit into ten tokens: there are three micro-batches, or one.
LENGTHS = ([4, 3, 1, 5, 6, 2], [5, 5, 3, 4, 2, 7])
MOST_TOKENS = {1: 1000, 3: 10}


class Policy(torch.nn.Module):
    """Log-probabilities ``[T]`` of tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 1)

    def forward(self, tokens):
        return -torch.nn.functional.softplus(self.head(self.embedding(tokens).tanh())).squeeze(-1)


def policy():
    torch.manual_seed(0)
    return Policy()


def data(*ranks):
    """The data of these ranks: a batch, token ids, old log-probabilities and advantages."""
    tokens = [sum(lengths) for lengths in LENGTHS]
    draw = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(8, (sum(tokens),), generator=draw), torch.rand(sum(tokens), generator=draw) < 0.8
    old = -torch.rand(sum(tokens), generator=draw) - 0.3
    advantages = torch.randn(12, generator=draw)
    groups = torch.arange(12) // 2
    kept = [slice(0, tokens[0]), slice(tokens[0], None)]
    mask, ids, old = (torch.cat([each[kept[rank]] for rank in ranks]) for each in (mask, ids, old))
    groups, advantages = (torch.cat([each[6 * rank : 6 * rank + 6] for rank in ranks]) for each in (groups, advantages))
    lengths = [length for rank in ranks for length in LENGTHS[rank]]
    return hpo.PackedBatch.from_lengths(lengths, mask=mask, group_ids=groups), ids, old, advantages


def losses(model, rank, weights, steps):
    """The loss of each micro-batch, and whether it is the last; the forward runs as the loss is asked for."""
    batch, ids, old, advantages = data(rank)
    parts = list(batch.micro_batches(MOST_TOKENS[steps]))
    assert len(parts) == steps
    for number, part in enumerate(parts, 1):
        yield (
            number == steps,
            lambda part=part: (
                hpo.policy_loss(
                    model(ids[part.tokens]),
                    old[part.tokens],
                    advantages[part.rows],
                    part.batch,
                    weights=weights[part.rows],
                ).loss
            ),
        )


def weights_of(mode, rank, reduction="mean"):
    return MODES[mode](data(rank)[0], process_group=dist.group.WORLD, gradient_reduction=reduction)


CASES = [(mode, steps) for mode in MODES for steps in MOST_TOKENS]


def judge(mode, ranks):
    """Each rank has found the gradient of one process."""
    model, (batch, ids, old, advantages) = policy(), data(0, 1)
    hpo.policy_loss(model(ids), old, advantages, batch, weights=MODES[mode](batch)).loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    assert all(grad.abs().max() > 1e-3 for grad in expected)
    for found in ranks:
        for got, grad in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(got), grad, rtol=2e-6, atol=2e-7)
