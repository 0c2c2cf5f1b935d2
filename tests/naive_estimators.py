"""Every estimator as a loop over Python dictionaries, from its paper's formula; nothing here knows hpo_core.

Each function takes a :class:`Units` and returns numpy float64. ``None`` as an id stands for none.
"""

import itertools
import math
from collections import defaultdict
from statistics import NormalDist
from typing import NamedTuple

import numpy as np


class Units(NamedTuple):
    """A drawn batch: fields are arrays over units, in no order."""

    reward: np.ndarray
    group: np.ndarray  # negative: none
    mask: np.ndarray  # bool
    other: np.ndarray  # a second id: agent, stratum, group inside a supergroup, ...
    third: np.ndarray
    length: np.ndarray  # 1, 2, ...
    number: np.ndarray  # a second float
    flag: np.ndarray  # bool
    trajectory: np.ndarray
    anchor: np.ndarray


def draw(seed: int) -> Units:
    random = np.random.default_rng(seed)
    n = int(random.integers(1, 15))
    kind = seed % 4
    reward = (
        random.integers(0, 2, n).astype(float),
        random.integers(0, 5, n) / 4,
        random.normal(size=n).astype(np.float32).astype(float),
        np.full(n, 0.3),
    )[kind]
    group = random.integers(0, 4, n)
    if seed % 3 == 0:
        group = np.where(random.random(n) < 0.15, -1, group * 1_000_003)
    trajectory = group.clip(0) * 5 + random.integers(0, 3, n)  # a trajectory lies in one group
    trajectory = np.where(group < 0, -1, trajectory)
    return Units(
        reward.astype(np.float32).astype(float),
        group,
        random.random(n) < (0.8 if seed % 2 else 2.0),
        random.integers(0, 2, n),
        random.integers(0, 2, n),
        random.integers(1, 9, n).astype(float),
        (random.random(n).round(3)).astype(np.float32).astype(float),
        random.random(n) < 0.6,
        trajectory,
        random.integers(0, 3, n),
    )


def groups_of(keys, keep=None):
    """Key -> places of its units, None and what is not kept left out."""
    found = defaultdict(list)
    for place, key in enumerate(keys):
        if key is not None and (keep is None or keep[place]):
            found[key].append(place)
    return found


def ids(array):
    return [None if value < 0 else int(value) for value in array]


def pairs(*arrays):
    """Tuples of ids; None where any of them is."""
    return [None if None in key else key for key in zip(*arrays, strict=True)]


def weighted(x, w):
    w = np.asarray(w, dtype=float)
    mean = float((w * x).sum() / w.sum())
    return mean, w.sum(), float((w * (x - mean) ** 2).sum())


def z(x, keys, keep=None, w=None, ddof=1, eps=1e-6, scale="std", raw=False, lend=None):
    """The family of GRPO; ``lend``: places that receive besides the members."""
    out, w = np.zeros(len(x)), np.ones(len(x)) if w is None else w
    receivers = groups_of(keys, keep if lend is None else lend)
    for key, places in groups_of(keys, keep).items():
        members = [place for place in places if w[place] > 0]
        if not members:
            continue
        values = x[members]
        mean, weight, squares = weighted(values, w[members])
        flat = values.min() == values.max()
        std = 0.0 if flat or weight <= ddof else math.sqrt(squares / (weight - ddof))
        for place in receivers[key]:
            if len(members) == 1:
                out[place] = (x[place] / (1 + eps) if scale == "std" else x[place]) if raw else 0.0
                continue
            centred = 0.0 if flat and x[place] == values[0] else x[place] - mean
            if scale == "std":
                out[place] = 0.0 if std + eps == 0 else centred / (std + eps)
            elif scale == "none":
                out[place] = centred
            else:
                out[place] = scale(centred, values, mean, w[members])
    return out


# -------------------------------------------------------------------------------------------------------------- flat


def grpo(u):
    return z(u.reward, ids(u.group), u.mask)


def dr_grpo(u):
    return z(u.reward, ids(u.group), u.mask, scale="none")


def asymre(u):
    shift = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        shift[places] = -0.1 if len(places) > 1 else 0.0
    return dr_grpo(u) - shift


def a_star(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        best = max(u.reward[places])
        mean = sum(math.exp((u.reward[place] - best) / 0.25) for place in places) / len(places)
        out[places] = u.reward[places] - best - 0.25 * math.log(mean)
    return out


def rloo(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        for place in places:
            others = [u.reward[other] for other in places if other != place]
            out[place] = u.reward[place] - np.mean(others) if others else 0.0
    return out


def grpo_leave_one_out(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        for place in places:
            others = [u.reward[other] for other in places if other != place]
            differ = others and min(others) < max(others)
            centred = u.reward[place] - np.mean(others) if others else 0.0
            out[place] = centred / (np.std(others, ddof=1) + 1e-6) if differ else centred
    return out


def lite_ppo(u):
    keep = u.mask & (u.group >= 0)
    batch = u.reward[keep]
    std = batch.std(ddof=1) if len(batch) > 1 and batch.min() < batch.max() else 0.0
    return z(u.reward, ids(u.group), u.mask, scale=lambda c, *_: 0.0 if c == 0 else c / (std + 1e-6))


def lite_ppo_groups(u):
    centred, keep = z(u.reward, ids(u.group), u.mask, scale="none"), u.mask & (u.group >= 0)
    std = centred[keep].std(ddof=1) if keep.sum() > 1 else 0.0
    return np.where(centred == 0, 0.0, centred / (std + 1e-6))


def opo(u):
    return z(u.reward, ids(u.group), u.mask, w=u.length, scale="none")


def maxrl(u):
    def scale(centred, values, mean, _):
        return 0.0 if mean <= 0 or centred == 0 else centred / (mean + 1e-6)

    return z(u.reward, ids(u.group), u.mask, scale=scale)


def dgpo(u):
    accuracy = u.flag.astype(float)

    def scale(centred, values, mean, _):
        return 0.0 if centred == 0 else len(values) * centred / (np.abs(values - mean).sum() + 1e-4)

    out = z(u.reward, ids(u.group), u.mask, scale=scale)
    hard = {}
    for key, places in groups_of(ids(u.group), u.mask).items():
        if u.reward[places].min() < u.reward[places].max():
            mean = accuracy[places].mean()
            hard[key] = math.exp(-(1.0 if mean == 0 else mean) / 2)
    for place, key in enumerate(ids(u.group)):
        if key in hard:
            out[place] *= len(hard) * hard[key] / sum(hard.values())
    return out


def gpg(u):
    centred = z(u.reward, ids(u.group), u.mask, scale="none")
    groups = groups_of(ids(u.group), u.mask)
    units = sum(map(len, groups.values()))
    informative = sum(len(p) for p in groups.values() if u.reward[p].min() < u.reward[p].max())
    return centred * units / max(informative, 1)


def gpg_code(u):
    centred = z(u.reward, ids(u.group), u.mask, scale="none", raw=True)
    keep = u.mask & (u.group >= 0)
    return centred * keep.sum() / max((keep & (u.reward != 0)).sum(), 1)


def rates(u):
    """Rewards in [0, 1]; NaN where the reward is."""
    return np.where(u.flag, 1.0, np.floor(4 * u.number) / 4) + 0 * u.reward


def bnpo(u):
    u = u._replace(reward=rates(u))
    groups = groups_of(ids(u.group), u.mask)
    p = {key: u.reward[places].mean() if len(places) > 1 else 0.0 for key, places in groups.items()}
    out = np.zeros(len(u.reward))
    if not p:
        return out
    means = np.array(list(p.values()))
    center = means.mean()
    spread = means.var(ddof=1) if len(means) > 1 else 1.0
    spread = spread if spread > 1e-30 else 1.0
    room = center * (1 - center) / spread - 1
    a, b = max(1 + room * center / 3, 1), max(1 + room * (1 - center) / 3, 1)
    for key, places in groups.items():
        norm = math.gamma(a) * math.gamma(b) / math.gamma(a + b)
        density = p[key] ** (a - 1) * (1 - p[key]) ** (b - 1) / norm
        for place in places:
            if len(places) > 1 and u.reward[places].min() < u.reward[places].max():
                out[place] = min(1 / density, 1e6) * (u.reward[place] - p[key])
    return out


def ngrpo(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        values = np.append(u.reward[places], 1.0)
        std = values.std(ddof=1) if values.min() < values.max() else 0.0
        for place in places:
            out[place] = 0.0 if std == 0 else (u.reward[place] - values.mean()) / (std + 1e-6)
    return out


def reinforce_pp_baseline(u):
    centred = z(u.reward, ids(u.group), u.mask, scale="none", raw=True)
    return whiten_tokens(centred, u.length, u.mask & (u.group >= 0))


def whiten_tokens(x, length, mask):
    out = np.zeros(len(x))
    if mask.sum() < 2 or x[mask].min() == x[mask].max():
        return out
    tokens = np.repeat(x[mask], length[mask].astype(int))
    out[mask] = (x[mask] - tokens.mean()) / math.sqrt(tokens.var(ddof=1) + 1e-8)
    return out


def v05(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        mean, k = u.reward[places].mean(), len(places)
        for place in places:
            conflict = max(0.0, (mean - u.number[place]) ** 2 - 1 / k)
            w = conflict / (conflict + 1 / k)
            out[place] = u.reward[place] - (w * mean + (1 - w) * u.number[place])
    return out


# ----------------------------------------------------------------------------------------------------------- several


def dvao(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        channels = [u.reward[places], u.number[places]]
        std = [x.std() if x.min() < x.max() else 0.0 for x in channels]
        total = 1.0 * std[0] + 2.0 * std[1]
        if len(places) < 2 or total <= 1e-6:
            continue
        for i, place in enumerate(places):
            for b, x, s in zip((1.0, 2.0), channels, std, strict=True):
                out[place] += b * s / total * (x[i] - x.mean()) / (s + 1e-6)
    return out


def gdpo(u):
    together = z(u.reward, ids(u.group), u.mask, eps=1e-4) + 2 * z(u.number, ids(u.group), u.mask, eps=1e-4)
    return z(together, [0] * len(together), u.mask & (u.group >= 0), eps=1e-4)


def gdpo_tokens(u):
    together = z(u.reward, ids(u.group), u.mask, raw=True) + 2 * z(u.number, ids(u.group), u.mask, raw=True)
    return whiten_tokens(together, u.length, u.mask & (u.group >= 0))


def hila(u):
    cost = [0.3 if defers else 0.1 if creates else 0.0 for defers, creates in zip(u.other, u.third, strict=True)]
    return z(u.reward - cost, ids(u.group), u.mask, ddof=0)


def tool_star(u):
    worth = [
        -1.0 if not formatted else accuracy + (0.1 if tools and accuracy > 0 else 0.0)
        for accuracy, formatted, tools in zip(np.floor(4 * u.number) / 4, u.flag, u.other, strict=True)
    ]
    return z(np.array(worth) + 0 * u.number, ids(u.group), u.mask)


def unidoc_rl(u):
    worth = []
    for answer, search, chosen, seen, form in zip(u.number, u.reward, u.length, u.number, forms(u), strict=True):
        steps = 0.1 * search + 0.1 * chosen + 0.1 * seen + 0.1 * form
        worth.append(0.6 * answer + steps if form > 0.5 else steps if form > 0 else 0.0)
    return z(np.array(worth), ids(u.group), u.mask)


def forms(u):
    return (np.abs(u.other) % 3) / 2


def icpo(u):
    right = u.reward > 0.4
    worth = [r + (1.5 if r > 0.4 and steered else 0.0) for r, steered in zip(u.reward, u.other > 0, strict=True)]
    return z(np.array(worth), ids(u.group), u.mask & (right | (u.other <= 0)))


def craft_gui(u):
    return z(u.reward + 0.25 * np.floor(8 * u.number) / 8, ids(u.group), u.mask)


def datarus(u):
    share = (1 + math.cos(math.pi * 0.3)) / 2
    return z(share * u.reward + (1 - share) * np.floor(8 * u.number) / 8, ids(u.group), u.mask)


# -------------------------------------------------------------------------------------------------------------- ranks


def g2rpo(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        order = sorted(places, key=lambda place: u.reward[place])
        quantiles = [NormalDist().inv_cdf((k + 0.5) / len(order)) for k in range(len(order))]
        for place in places:
            ties = [k for k, other in enumerate(order) if u.reward[other] == u.reward[place]]
            out[place] = np.mean([quantiles[k] for k in ties])
    return out


def unlikeliness(u):
    worth = u.reward.copy()
    for places in groups_of(ids(u.group), u.mask).values():
        for place in places:
            less = sum(u.number[other] < u.number[place] for other in places)
            equal = sum(u.number[other] == u.number[place] for other in places)
            worth[place] *= 1 - 0.5 * (less + (equal - 1) / 2) / len(places)
    return z(worth, ids(u.group), u.mask)


def arena(u):
    ranks = np.floor(u.length / 2)
    worth = np.zeros(len(ranks))
    for places in groups_of(ids(u.group), u.mask).values():
        worth[places] = 1 - ranks[places] / max(len(places) - 1, 1)
    return z(worth, ids(u.group), u.mask)


def pass_at_k(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        n, c, k = len(places), int(u.flag[places].sum()), 2
        if n < k or c == 0:
            continue
        rho = 1 - math.comb(n - c, k) / math.comb(n, k)
        if rho == 1:
            continue
        sigma = math.sqrt(rho * (1 - rho)) + 1e-6
        for place in places:
            missed = math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)
            out[place] = (1 - rho) / sigma if u.flag[place] else (1 - rho - missed) / sigma
    return out


def grpo_passk(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        values = sorted(u.reward[places])
        if len(values) > 1 and values[-1] > values[-2]:
            best = next(place for place in places if u.reward[place] == values[-1])
            out[best] = (values[-1] - values[-2]) / (np.std(values, ddof=1) + 1e-6)
    return out


def pkpo(u):
    """Over all sets of three: what each of them adds to the best of the two others."""
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        for chosen in itertools.combinations(places, 3):
            for place in chosen:
                others = max(u.reward[other] for other in chosen if other != place)
                out[place] += max(u.reward[place] - others, 0.0) / math.comb(len(places), 3)
    return out


def qae(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        values = sorted(u.reward[places])
        border = next(r for r in values if 10 * sum(v <= r for v in values) >= 4 * len(values))
        for place in places:
            out[place] = (u.reward[place] - border) / (np.std(values) + 1e-6) if values[0] < values[-1] else 0.0
    return out


def mc_grpo(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        values = u.reward[places]
        median = sorted(values)[(len(values) - 1) // 2]
        spread = sorted(abs(values - median))[(len(values) - 1) // 2]
        for place in places:
            out[place] = (u.reward[place] - median) / (spread + 1e-3)
    return out


# ----------------------------------------------------------------------------------------------------------- shaping


def adora(u):
    out = z(u.reward, ids(u.group), u.mask)
    for places in groups_of(ids(u.group), u.mask).values():
        right = [u.length[p] for p in places if u.flag[p]]
        wrong = [u.length[p] for p in places if not u.flag[p]]
        if not right or max(right) <= (np.mean(wrong) if wrong else 0.0):
            out[places] *= 0.1
    return out


def real(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        sides = [[p for p in places if bool(u.flag[p]) is side] for side in (True, False)]
        for side, sign in zip(sides, (1, -1), strict=True):
            powers = [math.exp(-sign * u.reward[p] / 0.7) for p in side]
            for place, power in zip(side, powers, strict=True):
                out[place] = sign * len(places) * power / (1 + sum(powers)) / 0.7 * all(map(len, sides))
    return out


def tpo(u):
    out = np.zeros(len(u.reward))
    tilt = z(u.reward, ids(u.group), u.mask, ddof=0, eps=0)
    for places in groups_of(ids(u.group), u.mask).values():
        old = [math.exp(u.length[p] / 4 + tilt[p] / 0.7) for p in places]
        new = [math.exp(3 * u.number[p]) for p in places]
        for place, before, now in zip(places, old, new, strict=True):
            out[place] = len(places) * (before / sum(old) - now / sum(new))
    return out


def lead(u, right):
    out = z(u.reward, ids(u.group), u.mask)
    for places in groups_of(ids(u.group), u.mask).values():
        share = sum(right[places]) / len(places)
        for place in places:
            difficulty = share if out[place] > 0 else 1 - share
            out[place] *= 0.4 + 1.1 / (1 + math.exp(10 * (difficulty - 0.75)))
    return out


def grpo_lead(u):
    return lead(u, u.reward > 0)


def grpo_lead_judged(u):
    return lead(u, u.flag)


def copo(u):
    member = u.mask & (u.group >= 0)
    played = member & u.flag
    own = z(np.where(u.flag, u.reward, 0.0), ids(u.group), played)
    out = np.where(played, own, 0.0)
    for places in groups_of(ids(u.trajectory), member).values():
        originals = [place for place in places if u.flag[place]]
        confidence = np.clip(u.number[places], 1e-6, 1)
        spread = confidence.max() - confidence.min()
        weight = np.exp(3 * (confidence - confidence.min()) / spread) if spread > 1e-6 else np.ones(len(places))
        weight = weight / weight.mean() if len(places) == 2 else np.ones(len(places))
        for place, factor in zip(places, weight, strict=True):
            copied = np.mean(own[originals]) if originals else 0.0
            out[place] = factor * (own[place] if u.flag[place] else copied)
    return out


def aspo_shaping(u):
    out = np.where(u.group < 0, 0.0, u.reward)
    for places in groups_of(ids(u.group)).values():
        shaped = [p for p in places if u.flag[p]]
        for place in shaped:
            shift = -2 * (u.number[place] - u.number[shaped].mean()) / u.length[places].mean()
            bound = 0.7 * abs(u.reward[place])
            out[place] += min(max(shift, -bound), bound)
    return out


def spo_single_stream(u):
    return z(u.reward - u.number, [0] * len(u.reward), u.mask, eps=1e-8)
