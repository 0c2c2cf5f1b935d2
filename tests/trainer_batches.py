"""Random micro-batches as trainers hand them to their losses, and a comparison of two losses on them."""

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

ROWS, LENGTH = 6, 17


class Batch:
    """Padded rows with a tool's tokens inside, log-ratios up to 1.5, a row whose advantages are 0, and an empty row if
    asked for; all ``[B, L]``."""

    def __init__(self, seed=0, *, empty_row=False, per_token=False, width=0.4):
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=draw)

        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=draw)
        lengths[0] = LENGTH
        places = torch.arange(LENGTH)
        self.present = places < lengths
        self.mask = self.present & ((places % 6 != 3) | (places == lengths - 1))
        if empty_row:
            self.mask[2] = False
        self.old = -3 * torch.rand(ROWS, LENGTH, generator=draw) - 0.05
        self.logp = (self.old + width * normal(ROWS, LENGTH)).clamp(max=-1e-3)
        self.rollout = (self.old + 0.2 * normal(ROWS, LENGTH)).clamp(max=-1e-3)
        self.ref = (self.old + 0.3 * normal(ROWS, LENGTH)).clamp(max=-1e-3)
        self.advantages = normal(ROWS, LENGTH) if per_token else normal(ROWS, 1).expand(ROWS, LENGTH).contiguous()
        self.advantages[3] = 0.0  # an answer to a prompt whose answers score alike
        self.tokens, self.lengths = self.mask.sum().item(), lengths.flatten().tolist()

    def packed(self, values):
        """The present tokens of all rows in one line."""
        return values[self.present]

    def cu_seqlens(self):
        return torch.tensor([0, *self.lengths], device="cpu").cumsum(0).int()

    def poisoned(self, values):
        """The values with NaN wherever nothing may be read."""
        return torch.where(self.mask, values, torch.nan)


def gradient(loss, logp):
    """Loss and dL/dlogp of a function of log-probabilities that returns the loss, or a tuple that begins with it. What
    it logs beside the loss is on its device and keeps no graph alive."""
    leaf = logp.clone().requires_grad_()
    found = loss(leaf)
    found, *logged = found if isinstance(found, tuple) else (found,)
    values = [value for each in logged for value in (each.values() if isinstance(each, dict) else (each,))]
    values = [value for value in values if torch.is_tensor(value)]
    assert all(value.device == leaf.device and not value.requires_grad for value in values), "not for a log"
    (grad,) = torch.autograd.grad(found, leaf)
    return found.detach(), grad


def equal(ours, theirs, logp):
    """Loss and gradient of ours are those of theirs, also on one of two ranks, and where another device is the default
    of tensors."""
    with two_ranks(), torch.device("meta"):
        found = gradient(ours, logp)
    close(found, gradient(theirs, logp))


def close(ours, theirs):
    """Loss and gradient of ours within 1e-6 of theirs, relative to the largest term that makes an element."""
    (loss, grad), (expected, expected_grad) = ours, theirs
    size = expected_grad.abs()
    assert size.max() > 0, "the comparison says nothing"
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-6 * size.max().item())
    torch.testing.assert_close(loss.float(), expected.float(), rtol=2e-6, atol=1e-6 * size.sum().item())


def differ(ours, theirs, logp):
    """Check that the comparison discriminates."""
    (_, grad), (_, expected) = gradient(ours, logp), gradient(theirs, logp)
    assert not torch.allclose(grad, expected, rtol=1e-2, atol=1e-3 * expected.abs().max().item())


@contextmanager
def modules(**contents):
    """Modules with these names and contents for the time of a test; dots are written as two underscores, and parents
    are packages."""
    stubs = {}
    for spelled, names in contents.items():
        path = spelled.replace("__", ".")
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in stubs:
                stubs[name] = ModuleType(name)
                stubs[name].__path__ = []
                if end > 1:
                    setattr(stubs[".".join(parts[: end - 1])], parts[end - 1], stubs[name])
        for name, value in names.items():
            setattr(stubs[path], name, value)
    before = {name: sys.modules[name] for name in stubs if name in sys.modules}
    sys.modules.update(stubs)
    try:
        yield stubs
    finally:  # no more than these: what torch imports for itself at its first use cannot be imported twice
        for name in stubs:
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def two_ranks():
    """This process as one of two ranks; what it exchanges with the other stays as it is."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def integration(name):
    """A fresh import of an integration: what it was imported with before is another test's."""
    sys.modules.pop(f"hpo_core.integrations.{name}", None)
    return importlib.import_module(f"hpo_core.integrations.{name}")


def clipped(logp, old, advantages, low=0.2, high=0.2, dual=None):
    """The terms of PPO's loss, negated objectives, as every trainer has them."""
    ratio = torch.exp(logp - old)
    loss = torch.max(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    return loss if dual is None else torch.where(advantages < 0, torch.min(loss, -dual * advantages), loss)


def parts(values, batch):
    """The tokens of each row, for trainers that hand over lists."""
    return [values[row, :length] for row, length in enumerate(batch.lengths)]


def masked(terms, mask):
    return torch.where(mask, terms, 0.0)


def k3(logp, ref, kl_loss_type, importance_ratio=None):
    assert kl_loss_type == "k3"
    difference = ref - logp
    return torch.exp(difference) - 1 - difference


def clamped_k3(logp, ref, factor=1.0):
    """NeMo-RL's k3, and ROLL's, which does not clamp the log-ratio: beyond 20 the value is at its bound anyway."""
    return (factor * k3(logp, ref.clamp(logp.detach() - 20, logp.detach() + 20), "k3")).clamp(-10, 10)


def with_a_far_reference(batch):
    """The batch with tokens whose k3 is at the bound, and one beyond what exp of float32 holds."""
    batch.ref[0, :3] = batch.logp[0, :3] + torch.tensor([4.0, 120.0, -12.0])
    return batch
