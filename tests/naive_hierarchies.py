"""Estimators of steps, trees and critics as loops, from their papers' formulas; the batch is naive_estimators.Units."""

import itertools
import math

import numpy as np
from naive_estimators import groups_of, ids, pairs, rates, rloo, z

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
    reward = np.where(u.flag & (n <= (4096 if code else np.maximum(b, 4096))), reward, 0.0)
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


def tree_grpo(u):
    return z(u.reward, pairs(ids(u.group), ids(u.other)), u.mask) + z(u.reward, ids(u.group), u.mask)


def sgrpo(u, scaled=False, temperature=None):
    """The group reward is a function of supergroup and group; with a temperature rollouts earn their part of it."""
    of_group = group_rewards(u)
    out = np.zeros(len(u.reward))
    for places in groups_of(ids(u.group), u.mask).values():
        values = u.reward[places]
        groups = groups_of([int(g) for g in u.other], [i in places for i in range(len(out))])
        rewards = np.array([of_group[own[0]] for own in groups.values()])
        std = [x.std(ddof=1) if len(x) > 1 and x.min() < x.max() else 0.0 for x in (values, rewards)]
        earned = dict.fromkeys(places, (1.0, 1.0))
        for members in groups.values() if temperature else ():
            standing = z(u.number, [0] * len(out), np.isin(np.arange(len(out)), members), eps=1e-4)[members]
            parts = [np.exp(way * standing / temperature) for way in (1, -1)]
            earned |= zip(members, zip(*(part / part.mean() for part in parts), strict=True), strict=True)
        for place in places:
            own, among = u.reward[place], of_group[place]
            rollout = own - (values.sum() - own) / (len(values) - 1) if len(values) > 1 else 0.0
            group = among - (rewards.sum() - among) / (len(rewards) - 1) if len(rewards) > 1 else 0.0
            if scaled:
                rollout, group = rollout / (std[0] + 1e-4), group / (std[1] + 1e-4)
                rollout, group = (0.0 if s == 0 else a for a, s in zip((rollout, group), std, strict=True))
            out[place] = 0.7 * rollout + 0.3 * group * earned[place][0 if group > 0 else 1]
    return out


def group_rewards(u):
    return (u.group % 7) / 8 + u.other / 4


def sgrpo_scaled(u):
    return sgrpo(u, scaled=True)


def sgrpo_credits(u):
    return sgrpo(u, scaled=True, temperature=0.7)


def sgrpo_reward_sum(u):
    return rloo(u._replace(reward=0.7 * u.reward + 0.3 * group_rewards(u)))


def sgrpo_hierarchical_sum(u):
    of_group, out = group_rewards(u), np.zeros(len(u.reward))
    together = 0.7 * u.reward + 0.3 * of_group
    for places in groups_of(ids(u.group), u.mask).values():
        groups = groups_of([int(g) for g in u.other], [i in places for i in range(len(out))])
        rewards = {group: of_group[own[0]] for group, own in groups.items()}
        flat = together[places].min() == together[places].max()
        std = together[places].std(ddof=1) if len(places) > 1 and not flat else 0.0
        for group, own in groups.items():
            rivals = [reward for other, reward in rewards.items() if other != group]
            for place in own:
                mates = [u.reward[other] for other in own if other != place]
                lead = 0.7 * (u.reward[place] - np.mean(mates)) if mates else 0.0
                lead += 0.3 * (rewards[group] - np.mean(rivals)) if rivals else 0.0
                out[place] = lead / (std + 1e-4)
    return out


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


def of_leaves(u):
    """Values of the nodes above each leaf and of the leaf, how many leaves share each, and which leaves have all."""
    values, sizes = [], []
    for keys in prefixes(u):
        mean, size = np.zeros(len(u.reward)), np.ones(len(u.reward))
        for places in groups_of(keys).values():
            mean[places], size[places] = u.reward[places].mean(), len(places)
        values.append(mean), sizes.append(size)
    known = np.array([key is not None for key in prefixes(u)[-1]])
    return [*values, u.reward], [*sizes, np.ones(len(u.reward))], known


def rose(u, shared=False):
    values, sizes, known = of_leaves(u)
    steps = [(b - a) / (n if shared else 1) for a, b, n in zip(values[:-1], values[1:], sizes[1:], strict=True)]
    return np.stack([np.where(known, step, 0.0) for step in steps])


def rose_shared(u):
    return rose(u, shared=True)


def treerl(u):
    values, sizes, known = of_leaves(u)
    steps = [((values[d] - values[0]) + (values[d] - values[d - 1])) / np.sqrt(sizes[d]) for d in range(1, len(values))]
    return np.stack([np.where(known, step, 0.0) for step in steps])


def treerl_code(u):
    """The rewards of leaves are made relative to the others first; then nodes are divided, and then subtracted."""
    u = u._replace(reward=rloo(u._replace(mask=np.ones(len(u.reward), bool))))
    values, sizes, known = of_leaves(u)
    nodes = [value / np.sqrt(size) for value, size in zip(values, sizes, strict=True)]
    steps = [(below - above) + below for above, below in itertools.pairwise(nodes)]
    return np.stack([np.where(known, step, 0.0) for step in steps])


def treepo_segments(u, decay=0.9):
    keys = prefixes(u)
    known = [place for place, key in enumerate(keys[-1]) if key is not None]
    worth, number = np.zeros(len(u.reward)), np.ones(len(u.reward))
    for at_depth in keys:
        for places in groups_of(at_depth).values():
            worth[places] += len(places) * (u.reward[places] - u.reward[places].mean())
            number[places] += len(places)
    values = {(place,): worth[place] / number[place] for place in known}  # a leaf is named by its place
    path = {place: [keys[0][place], keys[1][place], keys[2][place], (place,)] for place in known}
    for depth in (2, 1):
        children = {}
        for place in known:
            children.setdefault(path[place][depth], {})[path[place][depth + 1]] = values[path[place][depth + 1]]
        values |= {node: np.mean(list(below.values())) for node, below in children.items()}
    out = np.zeros((3, len(u.reward)))
    for place in known:
        worths = [0.0, *(values[node] for node in path[place][1:])]
        for depth in range(3):
            out[depth, place] = worths[depth + 1] - decay ** (3 - depth) * worths[depth]
    return out


def leaves(u):
    """Lengths of leaves, behind all starts; no two are alike."""
    return (9 + u.length + u.number).astype(np.float32).astype(float)


def rose_length_penalty(u, alpha=2.0):
    out, keys, length = rose(u), prefixes(u), leaves(u)
    for places in groups_of(keys[0]).values():
        right = [place for place in places if u.reward[place] != 0]
        if len(right) < 2:
            continue
        shortest = min(right, key=lambda place: length[place])
        for place in right:
            depth = max(d for d in range(3) if keys[d][place] is not None and keys[d][place] == keys[d][shortest])
            factor = 1 - ((length[shortest] - 3 * depth) / (length[place] - 3 * depth)) ** alpha
            out[depth:, place] -= abs(out[depth:, place]) * factor
    return out


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
            value = follows
            if segment[-1] == places[-1] and u.third[places[-1]]:  # cut off
                follows, value = high_value[segment[0]], low_value[places[-1]]
            advantage, worth = 0.0, follows
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


def thor(u):
    keys = [
        None if g is None else (g, "step", b) if step else (g, "trajectory")
        for g, step, b in zip(ids(u.group), u.flag, ids(u.other), strict=True)
    ]
    return z(u.reward, keys) * np.where(u.flag, 0.5, 1.0)


def hi_agent(u):
    return z(u.reward + 2 * np.floor(8 * u.number) / 8 + u.length / 16, ids(u.group))


def a2fm_apo(u):
    accuracy, worth = rates(u), rates(u)
    for places in groups_of(ids(u.group), u.mask).values():
        instant = [accuracy[place] for place in places if u.other[place]]
        if instant and np.mean(instant) >= 0.5:
            slow = [place for place in places if not u.other[place]]
            worth[slow] *= 1 - np.mean(instant) ** 2
    return z(worth, ids(u.group), u.mask)


def hi_grpo(u):
    return np.stack([z(u.reward + u.number, ids(u.group)), z(u.number, ids(u.group))])


def chrpo(u):
    return np.stack([z(u.reward, ids(u.group)), z(u.number, ids(u.group))])


def outcomes(u):
    """One number per trajectory; NaN where the reward is."""
    return (u.trajectory % 5) / 4 + 0 * u.reward


def of_trajectories(u):
    _, once = episodes(u)
    return z(outcomes(u), ids(u.group), w=once)


def hrpo(u):
    return np.where(u.group < 0, 0.0, of_trajectories(u) + 0.5 * u.reward)


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
