"""Four rows with everything that a call of the loss can take."""

import torch

import hpo_core as hpo
from hpo_core import gates, testing

TOKENS, ROWS = 12, 4
GATE = gates.ppo_clip(0.1, 0.2)


class Example:
    """Four rows, one empty and one partly masked, with everything a call can take."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        self.mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
        self.batch = hpo.PackedBatch.from_lengths([4, 3, 0, 5], mask=self.mask, group_ids=torch.tensor([0, 0, 1, 1]))
        self.logp = -normal(TOKENS).abs()
        self.old_logp = self.logp + 0.3 * normal(TOKENS)
        self.ref_logp = self.logp + 0.3 * normal(TOKENS)
        self.advantages = normal(ROWS)
        self.entropy = normal(TOKENS).abs()
        self.token_mask = normal(TOKENS) > -0.5
        self.token_weight = normal(TOKENS).abs()
        self.low, self.high = 1 - normal(TOKENS).abs() / 9, 1 + normal(TOKENS).abs() / 9

    def to(self, device):
        for name, value in vars(self).items():
            setattr(self, name, value.to(device))
        return self

    def arguments(self, **keywords):
        given = {"logp": self.logp, "old_logp": self.old_logp, "advantages": self.advantages, "batch": self.batch}
        return {**given, **keywords}

    def loss(self, **keywords):
        return hpo.policy_loss(**self.arguments(**keywords))

    def grad(self, **keywords):
        return hpo.policy_loss_and_grad(**self.arguments(**keywords))


def example_of(request):
    """A fixture: the example on the device of the test's backend."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    return Example().to(testing.device_of(parameters.get("backend", "cpu")))


def same(one, other):
    assert torch.equal(one.loss, other.loss) and torch.equal(one.metrics.vector, other.metrics.vector)
    assert not (hasattr(one, "grad") and hasattr(other, "grad")) or torch.equal(one.grad, other.grad)
