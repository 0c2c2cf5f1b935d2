"""Ratio methods as their papers and official codes state them: the objective J of one sequence, token by token, to be
maximised, differentiable by autograd. Nothing here knows hpo_core.

``s``: a sequence with ``l``, ``old``, ``roll``, ``A`` ``[n]`` and whatever else a method needs, valid tokens only;
``s.other``: the sequence it makes a pair with, or None.
"""

import torch

INF = float("inf")


def sg(x):
    return x.detach()


def ratio(s):
    return torch.exp(s.l - s.old)


def product(s):
    return torch.exp((s.l - s.old).sum())


def geometric(x):
    return torch.exp(x.mean())


def clip(r, low, high):
    return torch.clamp(r, 1 - low, 1 + high)


def surrogate(r, A, low, high, dual=INF):
    """PPO's minimum, and the dual clip for A < 0."""
    objective = torch.minimum(r * A, clip(r, low, high) * A)
    return torch.where(A < 0, torch.maximum(objective, dual * A), objective) if dual < INF else objective


def reinforce(s):
    return s.A * s.l


def ppo_clip(s, low=0.2, high=0.2, dual=INF):
    return surrogate(ratio(s), s.A, low, high, dual)


def ppo_with_bounds(s, dual=INF):
    r, A = ratio(s), s.A
    objective = torch.minimum(r * A, torch.minimum(torch.maximum(r, s.low), s.high) * A)
    return torch.where(A < 0, torch.maximum(objective, dual * A), objective) if dual < INF else objective


def influence(s, half_life=3.0, low=0.1, high=0.15, dual=1.25, unsafe=1.15, most=1):
    """FIPO's weights of a sequence, a sum for each token; ``s.here``: its tokens' places."""
    x = sg(s.l - s.old)
    negative, weights = s.A < 0, []
    for t in range(len(x)):
        future = sum(
            2.0 ** (-(s.here[k] - s.here[t]).item() / half_life) * x[k].item()
            for k in range(t, len(x))
            if x[k].exp() <= dual
        )
        weight = min(max(2.718281828459045**future, 1 - low), 1 + high)
        unlikely_before = negative[t] and x[t].exp() > unsafe
        weights.append(min(max(weight, 0.8), 1.0) if unlikely_before else weight)
    dropped = (negative & (x.exp() > dual)).sum() > most
    return torch.tensor(weights, dtype=x.dtype) * ~dropped


def fipo(s, dual=1.25):
    return influence(s, dual=dual) * surrogate(ratio(s), s.A, 0.2, 0.28, dual)


def ce_gppo(s, low=0.2, high=0.2, b1=0.25, b2=1.0, c=3.0):
    r, A = ratio(s), s.A
    straight = r / sg(r)
    objective = torch.where(
        (r < 1 - low) & (A < 0),
        b1 * (1 - low) * straight * A,
        torch.where((r > 1 + high) & (A > 0), b2 * (1 + high) * straight * A, r * A),
    )
    return torch.where((A < 0) & (r > c), c * A, objective)


def cispo(s, cap=5.0, low=0.0, unified=False):
    r = ratio(s)
    weight = sg(r).clamp(low, cap)
    if unified:
        dropped = ((s.A > 0) & (r > cap)) | ((s.A < 0) & (r < low))
        weight = torch.where(dropped, torch.zeros_like(weight), weight)
    return weight * s.A * s.l


def aspo(s, low=0.2, high=0.2, c=3.0):
    r, A = ratio(s), s.A
    flipped = 1 / sg(r).clamp(max=1 + high)
    inside = (r <= 1 + high).to(r)
    positive = A * flipped * (1 + inside * (s.l - sg(s.l)))
    positive = torch.where(flipped > c, c * A * s.l, positive)
    negative = torch.where(r > c, c * A * s.l, A * torch.clamp(r, min=1 - low))
    return torch.where(A < 0, negative, positive)


def sapo(s, positive=1.0, negative=1.05):
    tau = torch.where(s.A > 0, torch.full_like(s.A, positive), torch.full_like(s.A, negative))
    return s.A * 4 / tau * torch.sigmoid(tau * (ratio(s) - 1))


def spo(s, e=0.2):
    r = ratio(s)
    return r * s.A - s.A.abs() * (r - 1) ** 2 / (2 * e)


def bpo(s):
    return -s.A.abs() * (ratio(s) - s.target).abs()


def nft(s, floor=1.0):
    """A = +-w by correctness; max_v clamps the value and passes the gradient."""
    r, q = ratio(s), s.target
    R = (1 - q * r) / (1 - q)
    bounded = R + sg(R.clamp(min=floor) - R)
    return torch.where(s.A < 0, s.A.abs() * bounded.log(), s.A.abs() * r.log())


def quadratic(s, beta=0.1):
    """DRO, and Kimi k1.5 token by token."""
    return s.A * s.l - beta / 2 * (s.l - s.old) ** 2


def opmd(s, tau=1.0):
    return s.A * s.l / (1 + tau)


def mdpo(s, tau=0.1):
    r, x = ratio(s), s.l - s.old
    return r * s.A - tau * (r * x - r + 1)


def ppo_penalty(s, beta=0.1, k=3):
    x = s.l - s.old
    estimator = {1: -x, 2: x**2 / 2, 3: torch.exp(x) - 1 - x}[k]
    return ratio(s) * s.A - beta * estimator


def kl_cov(s, coefficient=1.0):
    return ratio(s) * s.A - coefficient * (s.l - s.old).abs() * s.pays


def unclipped(s):
    return ratio(s) * s.A


def gspo(s, low=3e-4, high=4e-4):
    return surrogate(geometric(s.l - s.old).expand_as(s.A), s.A, low, high)


def gspo_token(s, low=3e-4, high=4e-4):
    return surrogate(sg(geometric(s.l - s.old)) * torch.exp(s.l - sg(s.l)), s.A, low, high)


def gmpo(s, low=0.4, high=0.4):
    x = s.l - s.old
    bounded = torch.where(s.A < 0, torch.clamp(x, min=-low), torch.clamp(x, max=high))
    return s.A * geometric(bounded)


def topr(s, mean=False):
    w = geometric(s.l - s.old) if mean else product(s)
    return torch.where(s.A < 0, sg(w).clamp(0, 1), torch.ones_like(s.A)) * s.A * s.l


def vespo(s, k=(2.0, 3.0), lam=(3.0, 2.0)):
    w = sg(product(s))
    positive, negative = (torch.exp(b + a * w.log() - b * w) for a, b in zip(k, lam, strict=True))
    return torch.where(s.A < 0, negative, positive) * s.A * s.l


def a_lol(s, c=0.9):
    return sg(product(s)).clamp(1 - c, 1 + c) * s.A.clamp(min=0) * s.l


def rec(s, low=0.2, high=0.2, one_sided=True, importance=False):
    r = sg(ratio(s))
    above, below = r > 1 + high, r < 1 - low
    out = torch.where(s.A < 0, below, above) if one_sided else above | below
    return torch.where(out, torch.zeros_like(r), r if importance else torch.ones_like(r)) * s.A * s.l


def rec_ring(s, low=0.2, high=0.2, far_low=0.6, far_high=2.0, importance=False):
    r = sg(ratio(s))
    inside = (1 - low <= r) & (r <= 1 + high)
    strayed = ((s.A >= 0) & (r <= 1 - far_low)) | ((s.A <= 0) & (r >= 1 + far_high))
    return torch.where(inside | strayed, r if importance else torch.ones_like(r), torch.zeros_like(r)) * s.A * s.l


def fiberpo(s, epsilon=0.2, plus=0.2, minus=0.2, slope=None):
    """Equations 1 to 5 of arXiv 2604.03044, literally; the sign of a log-ratio of 0 is +1."""
    x, T = s.l - s.old, s.l.numel()
    rate = T if slope is None else slope

    def g(a, C):
        rolled = torch.sign(a) * (rate + 1) * C - rate * a
        return torch.where(a.abs() <= C, a, torch.where(a.abs() < (1 + 1 / rate) * C, rolled, torch.zeros_like(a)))

    label = torch.where(x >= 0, 1.0, -1.0).to(x)
    log_plus, log_minus = torch.where(x >= 0, x, 0 * x).sum() / T, torch.where(x >= 0, 0 * x, -x).sum() / T
    base = torch.exp(g(log_plus, plus) - g(log_minus, minus))

    def log_clip(log):
        return torch.exp(log.clamp(-epsilon, epsilon))

    same = torch.where(label > 0, log_plus, log_minus)
    opposite = torch.where(label > 0, log_minus, log_plus)
    fiber = log_clip(-label * same + x) / log_clip(-label * opposite)
    return base * fiber * s.A


def apc(s, delta=0.1):
    """Definition 3.2: what a token may deviate is what the others leave of the budget."""
    deviation = ratio(s) - 1
    others = deviation.abs().sum() - deviation.abs()
    budget = (deviation.numel() * delta - others).clamp(min=0)
    return (torch.minimum(torch.maximum(deviation, -budget), budget) + 1) * s.A


def p3o(s, epsilon=0.2):
    """The log-probability of a sequence is the sum over its tokens, so each of them has the weight of the pair."""
    joint = product(s) if s.other is None else product(s) * product(s.other)
    return sg(clip(joint, epsilon, epsilon)) * s.A * s.l


def chord_expert(s):
    p = sg(torch.exp(s.l))
    return p * (1 - p) * s.A * s.l


def hispo(s, sequence=0.1, token=0.5, triplet=(0.2, 3.0, 0.28)):
    low, high, up = triplet
    discrepancy = torch.exp(s.old - s.roll)
    kept = ((geometric(s.old - s.roll) - 1).abs() < sequence) & ((discrepancy - 1).abs() < token)
    return kept * surrogate(torch.exp(s.l - s.roll), s.A, low, up, high)


def opsm(s, delta=0.5):
    dropped = (s.A < 0) & ((s.roll - sg(s.l)).mean() > delta)
    return torch.where(dropped, torch.zeros_like(s.A), torch.ones_like(s.A)) * ppo_clip(s)


def decoupled(s, cap=INF):
    return torch.exp(s.old - s.roll).clamp(max=cap) * ppo_clip(s)


def sequence_tis(s, cap=2.0):
    return torch.exp((s.old - s.roll).sum()).clamp(max=cap) * ppo_clip(s)


def icepop(s, low=0.5, high=5.0):
    w = torch.exp(s.old - s.roll)
    return torch.where((w >= low) & (w <= high), w, torch.zeros_like(w)) * ppo_clip(s)


def mis(s, low=0.0, high=3.0, mean=False, veto=0.0):
    d = s.old - s.roll
    w = geometric(d) if mean else torch.exp(d.sum())
    kept = (w >= low) & (w <= high) & bool((torch.exp(d) >= veto).all())
    return w * kept * ppo_clip(s)


def dppo_tv(s, low=0.15, high=0.15, cap=20.0, anchor="old"):
    q = getattr(s, anchor)
    moved = torch.exp(sg(s.l)) - torch.exp(q)
    kept = torch.where(s.A < 0, moved >= -low, moved <= high)
    return kept * torch.exp(sg(s.l) - q).clamp(max=cap) * s.A * s.l


def dppo_kl(s, delta=0.05, cap=20.0):
    p, q = torch.exp(sg(s.l)), torch.exp(s.old)
    kl = q * torch.log(q / p) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    back = torch.where(s.A < 0, p >= q, p <= q)
    return ((kl <= delta) | back) * sg(ratio(s)).clamp(max=cap) * s.A * s.l
