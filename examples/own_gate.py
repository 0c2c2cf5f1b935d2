import math, torch, hpo_core as hpo
from hpo_core.gates import Action, Correction, Level, LogClip, RatioGate, Rollback, Routing, Tanh, Unit

def soft_turn_budget():
    inside = Correction(Action.MASK, low=(math.log(0.9),) * 2, high=(math.log(1.1),) * 2, unit=Unit.TRAJECTORY)
    step = Level(Tanh(0.1), routing=Routing.SELF, unit=Unit.STEP)
    trajectory = Level(Rollback((0.05, 0.05), slope=0.0))
    return RatioGate("soft_turn_budget", LogClip(low=(-0.1, -0.1), high=(0.2, 0.2)), levels=(step, trajectory), corrections=(inside,))

batch = hpo.PackedBatch.from_lengths([4, 3], steps=torch.tensor([[0, 2], [2, 4], [4, 6], [6, 7]]))
old = torch.full((7,), -1.0)
logp = (old + torch.tensor([0.3, 0.1, -0.2, 0.05, 0.02, -0.1, 0.04])).requires_grad_()
loss = hpo.policy_loss(logp, old, torch.tensor([1.0, -1.0]), batch, soft_turn_budget(), rollout_logp=old - 0.02).loss
loss.backward()
logp.grad
