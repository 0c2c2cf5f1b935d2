"""Every estimator as a loop over Python dictionaries, from its paper's formula; nothing here knows hpo_core.

Each function takes a :class:`Units` and returns numpy float64. ``None`` as an id stands for none.
"""

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


def rloo(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        for place in places:
            others = [u.reward[other] for other in places if other != place]
            out[place] = u.reward[place] - np.mean(others) if others else 0.0
    return out


def lite_ppo(u):
    keep = u.mask & (u.group >= 0)
    batch = u.reward[keep]
    std = batch.std(ddof=1) if len(batch) > 1 and batch.min() < batch.max() else 0.0
    return z(u.reward, ids(u.group), u.mask, scale=lambda c, *_: 0.0 if c == 0 else c / (std + 1e-6))


def opo(u):
    return z(u.reward, ids(u.group), u.mask, w=u.length, scale="none")


def maxrl(u):
    def scale(centred, values, mean, _):
        return 0.0 if mean + 1e-6 <= 0 or centred == 0 else centred / (mean + 1e-6)

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
    """Rewards in [0, 1]."""
    return np.where(u.flag, 1.0, np.floor(4 * u.number) / 4)


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
    return whiten_tokens(centred, u.length, u.mask)


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
    return z(together, [0] * len(together), u.mask, eps=1e-4)


def gdpo_tokens(u):
    together = z(u.reward, ids(u.group), u.mask, raw=True) + 2 * z(u.number, ids(u.group), u.mask, raw=True)
    return whiten_tokens(together, u.length, u.mask)


# ------------------------------------------------------------------------------------------------------ hierarchical


def chains(u):
    return groups_of(ids(u.trajectory)).values()


def returns(u, gamma=0.95):
    out = np.zeros(len(u.reward))
    for places in chains(u):
        following = 0.0
        for place in reversed(places):
            following = u.reward[place] + gamma * following
            out[place] = following
    return out


def episodes(u):
    out, once = np.zeros(len(u.reward)), np.zeros(len(u.reward))
    for places in chains(u):
        out[places] = sum(reversed([u.reward[p] for p in places]))
        once[places[0]] = 1.0
    return out, once


def gigpo(u, rows=False, scale="std"):
    sums, once = episodes(u)
    of_episode = z(sums, ids(u.group), w=None if rows else once, scale=scale)
    of_step = z(returns(u), pairs(ids(u.group), ids(u.anchor)), scale=scale)
    return of_episode + 0.5 * of_step


def gigpo_code(u):
    return gigpo(u, rows=True, scale="none")


def hgpo(u, offset=1, drop=True, history=2, base=False):
    contexts = [[None] * len(u.reward) for _ in range(history + 1)]
    for places in chains(u):
        for t, place in enumerate(places):
            for k in range(min(t, history) + 1):
                contexts[k][place] = (int(u.group[place]), *(int(u.anchor[places[t - j]]) for j in range(k + 1)))
    levels = []
    for k, keys in enumerate(contexts):
        size = {key: len(places) for key, places in groups_of(keys).items()}
        a = z(returns(u), keys, ddof=0)
        levels.append((float(k + offset), a, [key is not None and size[key] > 1 for key in keys]))
    if base:
        sums, _ = episodes(u)
        size = {key: len(places) for key, places in groups_of(ids(u.group)).items()}
        a = z(sums, ids(u.group))
        levels.append((1.0, a, [key is not None and size[key] > 1 for key in ids(u.group)]))
    out = np.zeros(len(u.reward))
    for place in range(len(out)):
        known = [(w, a[place]) for w, a, there in levels if there[place] and not (drop and a[place] == 0)]
        total = sum(w for w, _ in known)
        out[place] = sum(w / (total + 1e-6) * a for w, a in known)
    return out


def hgpo_code(u):
    return hgpo(u, offset=2, drop=False, history=1, base=True)


def dr_mas(u):
    return z(u.reward, pairs(ids(u.group), ids(u.other)), u.mask)


def peco(u):
    return z(u.reward, ids(u.group), u.flag, lend=np.ones(len(u.reward), dtype=bool))


def flow_grpo(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group)).values():
        rows = np.repeat(u.reward[places], u.length[places].astype(int))
        if rows.min() < rows.max():
            out[places] = (u.reward[places] - rows.mean()) / (rows.std(ddof=1) + 1e-6)
    return out


def m_grpo(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        copies = np.repeat(u.reward[places], u.length[places].astype(int))
        if copies.min() < copies.max():
            out[places] = (u.reward[places] - copies.mean()) / copies.std()
    return out


def hbpo(u, code=False):
    n, b = u.length * 400, np.where(u.other > 0, 1024.0, 512.0)
    pi, intra = (3.1416, 2.0) if code else (math.pi, 1.0)
    f1 = 4 * np.cos(pi * n / 8192) - np.abs(n - b) / 4096
    f2 = 4 * np.cos(pi * b / 8192)
    reward = np.minimum(f1, f2) if code else np.where(n <= b, f2, f1)
    reward = np.where(u.flag & (n <= 4096), reward, 0.0)
    out = z(reward, ids(u.group))
    for places in groups_of(pairs(ids(u.group), ids(u.other))).values():
        for place in places:
            out[place] += intra * (reward[places].mean() - f2[place])
    return out


def hbpo_code(u):
    return hbpo(u, code=True)


def stratified(u):
    inside = z(u.reward, pairs(ids(u.group), ids(u.other)), u.mask)
    return 0.8 * inside + (1 - 0.8) * z(u.reward, ids(u.group), u.mask)


def sgrpo(u, scaled=False):
    """The group reward is a function of supergroup and group."""
    of_group = group_rewards(u)
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        values = u.reward[places]
        groups = groups_of([int(g) for g in u.other], [i in places for i in range(len(out))])
        rewards = np.array([of_group[own[0]] for own in groups.values()])
        std = [x.std(ddof=1) if len(x) > 1 and x.min() < x.max() else 0.0 for x in (values, rewards)]
        for place in places:
            own, among = u.reward[place], of_group[place]
            rollout = own - (values.sum() - own) / (len(values) - 1) if len(values) > 1 else 0.0
            group = among - (rewards.sum() - among) / (len(rewards) - 1) if len(rewards) > 1 else 0.0
            if scaled:
                rollout, group = rollout / (std[0] + 1e-4), group / (std[1] + 1e-4)
                rollout, group = (0.0 if s == 0 else a for a, s in zip((rollout, group), std, strict=True))
            out[place] = 0.7 * rollout + 0.3 * group
    return out


def group_rewards(u):
    return (u.group % 7) / 8 + u.other / 4


def sgrpo_scaled(u):
    return sgrpo(u, scaled=True)


# -------------------------------------------------------------------------------------------------------------- trees


def prefixes(u):
    return [pairs(*columns) for columns in ([ids(u.group)], [ids(u.group), ids(u.other)],
                                            [ids(u.group), ids(u.other), ids(u.third)])]  # fmt: skip


def treepo(u, by_size=True, drop_flat=False):
    out, total = np.zeros(len(u.reward)), np.zeros(len(u.reward))
    for depth, keys in enumerate(prefixes(u)):
        for places in groups_of(keys).values():
            flat = u.reward[places].min() == u.reward[places].max()
            if depth > 0 and (len(places) == 1 or (drop_flat and flat)):
                continue
            mean = u.reward[places].mean() if len(places) > 1 else 0.0
            size = len(places) if by_size else 1
            for place in places:
                out[place] += size * (0.0 if flat and len(places) > 1 else u.reward[place] - mean)
                total[place] += size
    return np.divide(out, total, out=np.zeros(len(out)), where=total > 0)


def treepo_plain(u):
    return treepo(u, by_size=False, drop_flat=True)


def rose(u, shared=False):
    values, sizes = [], []
    for keys in prefixes(u):
        mean, size = np.zeros(len(u.reward)), np.ones(len(u.reward))
        for places in groups_of(keys).values():
            mean[places], size[places] = u.reward[places].mean(), len(places)
        values.append(mean), sizes.append(size)
    values.append(u.reward), sizes.append(np.ones(len(u.reward)))
    known = np.array([key is not None for key in prefixes(u)[-1]])
    steps = [(b - a) / (n if shared else 1) for a, b, n in zip(values[:-1], values[1:], sizes[1:], strict=True)]
    return np.stack([np.where(known, step, 0.0) for step in steps])


def rose_shared(u):
    return rose(u, shared=True)


def parents(u):
    """Each unit's parent stands before it in its group, or is the root."""
    found = np.full(len(u.reward), -1)
    for places in groups_of(ids(u.group)).values():
        for at, place in enumerate(places):
            earlier = int(u.length[place]) % (at + 1)
            found[place] = places[earlier] if at > 0 and earlier < at else -1
    return found


def mars2(u):
    parent, shaped = parents(u), u.reward.copy()
    siblings = groups_of(pairs(ids(u.group), [int(p) for p in parent]))
    for places in siblings.values():
        for place in places:
            others = [u.reward[p] for p in places if p != place]
            above = u.reward[parent[place]] if parent[place] >= 0 else None
            if above is not None and others:
                baseline = 0.5 * above + 0.5 * np.mean(others)
            elif above is not None or others:
                baseline = above if above is not None else np.mean(others)
            else:
                baseline = u.reward[place]
            shaped[place] = u.reward[place] + 0.3 * (u.reward[place] - baseline)
    return z(shaped, ids(u.group), eps=1e-9)


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


def mc_grpo(u):
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        values = u.reward[places]
        median = sorted(values)[(len(values) - 1) // 2]
        spread = sorted(abs(values - median))[(len(values) - 1) // 2]
        left = sum(values != median)
        for place in places:
            if u.reward[place] != median:
                out[place] = (u.reward[place] - median) / (spread + 1e-3) * len(values) / left
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


def aspo_shaping(u):
    out = u.reward.copy()
    for places in groups_of(ids(u.group)).values():
        shaped = [p for p in places if u.flag[p]]
        for place in shaped:
            shift = -2 * (u.number[place] - u.number[shaped].mean()) / u.length[places].mean()
            bound = 0.7 * abs(u.reward[place])
            out[place] += min(max(shift, -bound), bound)
    return out


def spo_single_stream(u):
    return z(u.reward - u.number, [0] * len(u.reward), u.mask, eps=1e-8)


# ----------------------------------------------------------------------------------------------------------- critics


def gae(u, gamma=0.9, lam=0.8):
    out = np.zeros(len(u.reward))
    for places in chains(u):
        advantage, following = 0.0, 0.0
        for place in reversed(places):
            advantage = u.reward[place] + gamma * following - u.number[place] + gamma * lam * advantage
            following = u.number[place]
            out[place] = advantage
    return out


def step_gae(u):
    return z(gae(u), [0] * len(u.reward), u.trajectory >= 0, eps=1e-8)


def hiper(u, gamma=0.9, low_lam=0.8, high_lam=0.7):
    """Low, high and switch streams, not normalised."""
    low_value, high_value, switch_value = u.number, u.length / 10, u.number / 2
    low, high, switch = (np.zeros(len(u.reward)) for _ in range(3))
    for places in chains(u):
        begins = [0] + [t for t in range(1, len(places)) if u.flag[places[t]]]
        segments = [places[a:b] for a, b in zip(begins, [*begins[1:], len(places)], strict=True)]
        later, after = 0.0, 0.0
        for segment in reversed(segments):
            follows = after  # V_high of the next segment
            advantage, value, worth = 0.0, follows, follows
            for place in reversed(segment):
                advantage = u.reward[place] + gamma * value - low_value[place] + gamma * low_lam * advantage
                low[place], value = advantage, low_value[place]
                worth = u.reward[place] + gamma * worth
                switch[place] = worth - switch_value[place]
            n = len(segment)
            summed = sum(gamma**i * u.reward[place] for i, place in enumerate(segment))
            later = summed + gamma**n * follows - high_value[segment[0]] + gamma**n * high_lam * later
            high[segment[0]], after = later, high_value[segment[0]]
    return np.stack([low, high, switch])


# -------------------------------------------------------------------------------------------------- reconstructed


def himac(u):
    keys = [
        None if g is None else (g, "macro") if macro else (g, b)
        for g, macro, b in zip(ids(u.group), u.flag, ids(u.other), strict=True)
    ]
    return z(u.reward, keys)


def hi_grpo(u):
    return np.stack([z(u.reward + u.number, ids(u.group)), z(u.number, ids(u.group))])


def chrpo(u):
    return np.stack([z(u.reward, ids(u.group)), z(u.number, ids(u.group))])


def outcomes(u):
    """One number per trajectory."""
    return (u.trajectory % 5) / 4


def of_trajectories(u):
    _, once = episodes(u)
    return z(outcomes(u), ids(u.group), w=once)


def hrpo(u):
    return of_trajectories(u) + 0.5 * u.reward


def salt(u):
    out, own = np.zeros(len(u.reward)), of_trajectories(u)
    for places in groups_of(pairs(ids(u.group), ids(u.anchor))).values():
        out[places] = own[places].mean()
    return out


def graph_grpo(u):
    out, (_, once) = np.zeros(len(u.reward)), episodes(u)
    worth = outcomes(u)
    for places in groups_of(ids(u.group)).values():
        graphs = np.array([worth[p] for p in places if once[p]])
        std = graphs.std(ddof=1) if len(graphs) > 1 and graphs.min() < graphs.max() else 0.0
        for place in places:
            having = [worth[p] for p in places if u.anchor[p] == u.anchor[place]]
            out[place] = (np.mean(having) - graphs.mean()) / (std + 1e-6) if std else 0.0
    return out


def hc_grpo(u):
    return z(u.reward - (u.number + u.length / 10), ids(u.group))
