"""Estimators of tokens, selections of rollouts and what is remembered between steps, each against plain loops."""

import functools
import io
import itertools
import math

import numpy as np
import pytest
import torch
from breadth import at_length, number  # noqa: F401 (the first is a fixture)

from hpo_core import PackedBatch, advantages, segments, testing
from hpo_core.advantages import reconstructed
from hpo_core.entropy import skywork_coefficient
from hpo_core.testing.budget import UNIT


def drawn(seed, backend):
    """Rows with masks, tail tokens and poison where nobody may look; dtype and device of the backend."""
    batch = testing.random_batch(seed, rows=4)
    draw = np.random.default_rng(seed)
    dtype = torch.float64 if backend == "reference" else torch.float32
    valid = np.zeros(batch.total_tokens, dtype=bool)
    rows = []
    for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        places = [t for t in range(begin, end) if batch.mask is None or bool(batch.mask[t])]
        rows.append((begin, places))
        valid[places] = True
    given = draw.random((3, batch.total_tokens)).astype(np.float32).astype(float)
    given[:, ~valid] = math.nan

    def tensor(array):
        kind = dtype if array.dtype.kind == "f" else None
        return torch.tensor(array, dtype=kind, device=testing.device_of(backend))

    return batch.to(testing.device_of(backend)), rows, given, draw, tensor


def agree(backend, got, expected):
    got, expected = got.cpu().double(), torch.tensor(np.asarray(expected, dtype=float))
    assert got.shape == expected.shape
    limit = (
        (1e-9 if backend == "reference" else 64 * UNIT) * max(1.0, float(expected.abs().max())) if got.numel() else 0
    )
    assert bool(((got - expected).abs() <= limit).all()), (backend, got, expected)


def on_all(test, batches=(60, 8, 4)):
    """The reference and machine code on many batches, the other kernels on some."""
    machine_code, emulated, interpreted = batches

    @pytest.mark.usefixtures("at_length")
    def run(native_backends):
        for backend in ("reference", *native_backends):
            some = {"machine_code": machine_code, "emulated": emulated, "interpreted": interpreted}
            for seed in range(number(backend, at_length=60, **some)):
                test(backend, seed)

    run.__name__ = test.__name__
    return run


# Where another test takes the same paths of the same kernels on more of them.
on_some = functools.partial(on_all, batches=(16, 2, 1))


@on_all
def test_reinforce_pp(backend, seed):
    batch, rows, (rewards, _, _), _, tensor = drawn(seed, backend)
    expected = np.zeros(batch.total_tokens)
    for _, places in rows:
        following = 0.0
        for t in reversed(places):
            following = rewards[t] + 0.9 * following
            expected[t] = following
    agree(
        backend, advantages.reinforce_pp(tensor(rewards), batch, gamma=0.9, whitened=False, backend=backend), expected
    )
    valid = [t for _, places in rows for t in places]
    if len(valid) > 1:
        chosen = expected[valid]
        expected[valid] = (chosen - chosen.mean()) / math.sqrt(chosen.var(ddof=1) + 1e-8)
    else:
        expected[:] = 0
    agree(backend, advantages.reinforce_pp(tensor(rewards), batch, gamma=0.9, backend=backend), expected)


@on_all
def test_remax(backend, seed):
    batch, rows, (rewards, _, _), draw, tensor = drawn(seed, backend)
    greedy = draw.random(len(rows)).astype(np.float32).astype(float)
    expected = np.zeros(batch.total_tokens)
    for row, (_, places) in enumerate(rows):
        for at, t in enumerate(places):
            expected[t] = rewards[places[at:]].sum() - greedy[row]
    agree(backend, advantages.remax(tensor(rewards), tensor(greedy), batch, backend=backend), expected)


@on_all
def test_iw_opd(backend, seed):
    """Through all rows of a trajectory; a token without a finite gap is as if it were masked."""
    batch, rows, (teacher, old, _), draw, tensor = drawn(seed, backend)
    lost = draw.random(batch.total_tokens) < 0.2
    teacher[lost] = draw.choice([math.nan, -math.inf])
    trajectories = {}
    for row, (_, places) in enumerate(rows):
        of = row if batch.trajectories is None else int(batch.trajectories[0][row])
        trajectories.setdefault(of, []).extend(t for t in places if not lost[t])
    expected = np.zeros(batch.total_tokens)
    for places in trajectories.values():
        sizes = [abs(teacher[t] - old[t]) for t in places]
        for at, t in enumerate(places):
            expected[t] = (1.75 - 0.75 * sum(sizes[:at]) / sum(sizes)) * (teacher[t] - old[t]) if sizes[at] else 0.0
    got = advantages.iw_opd(tensor(teacher), tensor(old), batch, gamma=0.75, backend=backend)
    agree(backend, got, expected)


def test_iw_opd_where_teacher_and_policy_agree_is_0(backend):
    logp = torch.tensor([-1.0, -2.0, -0.5], device=testing.device_of(backend))
    batch = PackedBatch.from_lengths([2, 1]).to(logp.device)
    assert not advantages.iw_opd(logp, logp, batch, backend=backend).any()


@on_all
def test_hicra(backend, seed):
    batch, rows, _, draw, tensor = drawn(seed, backend)
    own, planning = draw.normal(size=len(rows)).astype(np.float32).astype(float), draw.random(batch.total_tokens) < 0.5
    expected = np.zeros(batch.total_tokens)
    for row, (_, places) in enumerate(rows):
        for t in places:
            expected[t] = own[row] + (0.2 * abs(own[row]) if planning[t] else 0.0)
    got = advantages.hicra(tensor(own), tensor(planning), batch)  # without a backend, in float32
    agree("cpu", got, expected)


@on_all
def test_rl_zvp(backend, seed):
    batch, rows, (entropy, _, _), draw, tensor = drawn(seed, backend)
    n = len(rows)
    rewards, group, own = draw.integers(0, 2, n).astype(float), draw.integers(-1, 2, n), draw.random(n).round(2)
    own = own.astype(np.float32).astype(float)
    rewards[draw.random(n) < 0.1] = math.nan
    expected = np.zeros(batch.total_tokens)
    for row, (_, places) in enumerate(rows):
        same = rewards[(group == group[row]) & np.isfinite(rewards)]
        if group[row] < 0 or math.isnan(rewards[row]):
            continue
        for t in places:
            flat = same.min() == same.max()
            shaped = 0.1 * entropy[t] if rewards[row] > 0.5 else 0.1 * (entropy[t] - entropy[places].max())
            expected[t] = shaped if flat else own[row]
    got = advantages.rl_zvp(tensor(rewards), tensor(group), tensor(entropy), batch, tensor(own), backend=backend)
    agree(backend, got, expected)


@on_all
def test_otb(backend, seed):
    batch, rows, (rewards, chosen, squared), draw, tensor = drawn(seed, backend)
    group = draw.integers(-1, 2, len(rows))
    chosen = chosen / 2
    returns, weight = np.zeros(batch.total_tokens), np.zeros(batch.total_tokens)
    found = {}
    for row, (_, places) in enumerate(rows):
        for at, t in enumerate(places):
            returns[t] = rewards[places[at:]].sum()
            weight[t] = (1 - 2 * chosen[places[: at + 1]] + squared[places[: at + 1]]).sum()
            if group[row] >= 0:
                found.setdefault((group[row], t - places[0]), []).append(t)
    given = tensor(rewards), tensor(group), batch, tensor(chosen), tensor(squared)
    agree(backend, advantages.otb(*given, backend=backend), against(found, returns, weight))


@on_some
def test_tir_otb_counts_valid_tokens_alone(backend, seed):
    batch, rows, (rewards, chosen, squared), draw, tensor = drawn(seed, backend)
    group, importance = draw.integers(-1, 2, len(rows)), draw.uniform(0.5, 2, batch.total_tokens).astype(np.float32)
    chosen, importance = chosen / 2, importance.astype(float)
    returns, weight = np.zeros(batch.total_tokens), np.zeros(batch.total_tokens)
    found = {}
    for row, (_, places) in enumerate(rows):
        for at, t in enumerate(places):
            returns[t] = rewards[places[at:]].sum()
            own = places[: at + 1]
            weight[t] = (importance[own] ** 2 * (1 - 2 * chosen[own] + squared[own])).sum()
            if group[row] >= 0:
                found.setdefault((group[row], at), []).append(t)
    given = tensor(rewards), tensor(group), batch, tensor(chosen), tensor(squared)
    got = advantages.tir_otb(*given, importance=tensor(importance), backend=backend)
    agree(backend, got, against(found, returns, weight))


def against(found, returns, weight):
    """Returns minus the weighted mean of those at the same position, where there are others."""
    expected = np.zeros(len(returns))
    for places in found.values():
        w = weight[places]
        baseline = (w * returns[places]).sum() / w.sum() if len(places) > 1 else 0.0
        expected[places] = returns[places] - baseline
    return expected


@on_some
def test_token_gae_goes_through_the_rows_of_a_trajectory(backend, seed):
    batch, rows, given, draw, tensor = drawn(seed, backend)
    rewards, values = given[:2]
    names = draw.integers(-5, 5, 2)  # any integers are names
    trajectory = names[draw.integers(0, 2, len(rows))]
    expected, adaptive = np.zeros((2, batch.total_tokens))
    for name in set(trajectory):
        own = [t for row, (_, places) in enumerate(rows) if trajectory[row] == name for t in places]
        for out, lam in ((expected, 0.8), (adaptive, max(1 - 1 / (0.3 * max(len(own), 1)), 0))):
            advantage = following = 0.0
            for t in reversed(own):
                advantage = rewards[t] + 0.9 * following - values[t] + 0.9 * lam * advantage
                out[t], following = advantage, values[t]
    whole = PackedBatch(
        batch.cu_seqlens, batch.mask, trajectory_ids=tensor(trajectory), total_tokens=batch.total_tokens
    )
    call = functools.partial(advantages.token_gae, tensor(rewards), tensor(values), whole, gamma=0.9, lam=0.8)
    agree(backend, call(whitened=False, backend=backend), expected)
    given = tensor(rewards), tensor(values), whole
    got = advantages.vapo(*given, gamma=0.9, alpha=0.3, whitened=False, backend=backend)
    agree(backend, got, adaptive)
    valid = [t for _, places in rows for t in places]
    if len(valid) > 1:
        chosen = expected[valid]
        whitened = np.zeros_like(expected)
        whitened[valid] = (chosen - chosen.mean()) / math.sqrt(chosen.var(ddof=1) + 1e-8)
        agree(backend, call(backend=backend), whitened)


def test_otb_a_certain_token_has_no_weight_but_is_a_response(backend):
    """verl's optimal_token_baseline says the same."""
    device = testing.device_of(backend)
    for rewards, certain, expected in (
        ([1.0, 2, 0], [True, False, False], [0.0, 1.0, -1.0]),
        ([1.0, 2], [True, False], [-1.0, 0.0]),
        ([1.0, 2], [True, True], [1.0, 2.0]),
        ([1.0], [True], [1.0]),
    ):
        batch = PackedBatch.from_lengths([1] * len(rewards)).to(device)
        p = torch.where(torch.tensor(certain, device=device), 1.0, 0.5)  # W = 1 - 2 p + p
        out = advantages.otb(torch.tensor(rewards, device=device), None, batch, p, p, backend=backend)
        assert out.tolist() == expected


@on_all
def test_t_ppo(backend, seed):
    batch, rows, given, draw, tensor = drawn(seed, backend)
    rewards, values = given[:2]
    truncated = draw.random(len(rows)) < 0.5
    expected = np.zeros(batch.total_tokens)
    for row, (_, places) in enumerate(rows):
        advantage = 0.0
        following = values[places[-1]] if truncated[row] and places else 0.0
        for t in reversed(places):
            advantage = rewards[t] + 0.9 * following - values[t] + 0.9 * 0.8 * advantage
            following = values[t]
            expected[t] = advantage
    got = advantages.t_ppo(
        tensor(rewards), tensor(values), batch, tensor(truncated), gamma=0.9, lam=0.8, backend=backend
    )
    agree(backend, got, expected)


A = advantages
# Calls of tokens (one number each) and rows, which of the two holds the NaN, and what it makes unknown: token 1 is the
# second of three in the first row.
UNKNOWN = {
    "reinforce_pp": (lambda b, t, r, o: A.reinforce_pp(t, b, whitened=False, **o), "token", [0, 1]),
    "remax": (lambda b, t, r, o: A.remax(t, r, b, **o), "token", [0, 1]),
    "remax, greedy": (lambda b, t, r, o: A.remax(t, r, b, **o), "row", [0, 1, 2]),
    "hicra": (lambda b, t, r, o: A.hicra(r, t > 0.5, b), "row", [0, 1, 2]),
    "rl_zvp": (lambda b, t, r, o: A.rl_zvp(r * 0 + 1, None, t, b, r, **o), "token", [1]),
    "rl_zvp, advantage": (lambda b, t, r, o: A.rl_zvp(r.nan_to_num(2), None, t, b, r, **o), "row", [0, 1, 2]),
    "otb": (lambda b, t, r, o: A.otb(t, torch.arange(2, device=t.device), b, t * 0, t * 0, **o), "token", [0, 1]),
    "tir_otb": (
        lambda b, t, r, o: A.tir_otb(t, torch.arange(2, device=t.device), b, t * 0, t * 0, **o),
        "token",
        [0, 1],
    ),
    "token_gae": (lambda b, t, r, o: A.token_gae(t, t / 2, b, whitened=False, **o), "token", [0, 1]),
    "vapo": (lambda b, t, r, o: A.vapo(t, t / 2, b, alpha=0.5, whitened=False, **o), "token", [0, 1]),
    "t_ppo": (lambda b, t, r, o: A.t_ppo(t, t.nan_to_num(0) / 2, b, r > 1, **o), "token", [0, 1]),
    "t_ppo, value": (lambda b, t, r, o: A.t_ppo(t.nan_to_num(0), t / 2, b, r > 1, **o), "token", [0, 1]),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_what_an_unknown_number_makes_unknown_is_0(backend, name, unknown):
    """But an unknown entropy is an error, which NaN tells the loss."""
    device = testing.device_of(backend)
    estimator, where, zeros = UNKNOWN[name]
    batch, options = PackedBatch.from_lengths([3, 2]).to(device), {"backend": backend}
    tokens, rows = torch.tensor([0.25, 0.5, 1, 0.75, 0.125], device=device), torch.tensor([1.25, 0.5], device=device)
    expected = estimator(batch, tokens, rows, options)
    assert expected.all()
    if where == "token":
        tokens[1] = unknown
    else:
        rows[0] = unknown
    expected[zeros] = math.nan if name == "rl_zvp" else 0
    torch.testing.assert_close(estimator(batch, tokens, rows, options), expected, rtol=0, atol=0, equal_nan=True)


PADDED = {**UNKNOWN, "iw_opd": (lambda b, t, r, o: A.iw_opd(t, t / 2, b, **o),)}


@pytest.mark.parametrize("name", PADDED)
def test_padded_tensors_give_padded_advantages(name):
    mask, rows = torch.tensor([[True, True, False, True], [False, True, True, False]]), torch.tensor([1.25, 0.5])
    tokens = torch.where(mask, torch.arange(8.0).view(2, 4) / 8, torch.nan)
    packed, padded = PackedBatch.from_lengths([4, 4], mask=mask.flatten()), PackedBatch.from_padded(mask)
    expected = PADDED[name][0](packed, tokens.flatten(), rows, {})
    assert expected.any()
    for given in (tokens, tokens.flatten()):
        assert torch.equal(PADDED[name][0](padded, given, rows, {}), expected.view(given.shape))
    wrong = r"expected shape \[B, L\] \(that of the padded batch\) = \[2, 4\], got \[4, 2\]"
    with pytest.raises(ValueError, match=wrong):
        PADDED[name][0](padded, tokens.view(4, 2), rows, {})
    with pytest.raises(ValueError, match=r"expected shape \[T\] .*; a batch of tensors \[B, L\] is PackedBatch.from_p"):
        PADDED[name][0](packed, tokens, rows, {})


def test_a_unit_of_which_something_is_unknown_gets_0():
    ones = torch.ones(2)
    lacking = torch.tensor([1.0, math.nan])
    assert A.archer_td(lacking, ones * 3, ones * 0.25).tolist() == [0.75, 0]
    assert A.archer_td(ones, ones, lacking - 1).tolist() == [1, 0]
    assert A.v05(ones, None, lacking * 0).tolist() == [0.5, 0]
    several = torch.tensor([[1.0, 0.0, math.nan], [0.25, 0.5, 9.0]])
    assert A.dvao(several, None).tolist() == [*A.dvao(several[:, :2], None).tolist(), 0]
    given = [torch.full((2,), each) for each in (0.5, 0.25, 0.6, 0.5, 0.5, 0.3)]
    for at in range(6):
        each = [column * lacking if place == at else column for place, column in enumerate(given)]
        assert reconstructed.ib_tpo(*each).tolist() == pytest.approx([0.224, 0])


# ---------------------------------------------------------------------------------------------------------- selection


def groups(seed):
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 14))
    return draw.integers(0, 5, n) / 4, draw.integers(-1, 3, n), draw.integers(1, 4, n).astype(float)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_d3s_samples(k):
    for seed in range(120):
        values, group, _ = groups(seed)
        got = advantages.d3s_samples(torch.tensor(values), torch.tensor(group), k).numpy()
        assert not got[group < 0].any()
        for key in set(group[group >= 0]):
            own = np.flatnonzero(group == key)
            assert got[own].sum() == min(k, len(own))
            if len(own) > k:
                most = max(values[list(some)].var() for some in itertools.combinations(own, k))
                assert values[own[got[own]]].var() == pytest.approx(most, abs=1e-12)


def test_pf_ppo_and_dynamic_contrastive():
    for seed in range(120):
        values, group, length = groups(seed)
        tensors = torch.tensor(values), torch.tensor(group)
        expected, contrast = np.zeros(len(values), bool), np.zeros(len(values), bool)
        for key in set(group[group >= 0]):
            own = np.flatnonzero(group == key)
            ordered = sorted(own, key=lambda place: values[place])
            expected[ordered[:1]] = expected[ordered[-2:]] = True
            ordered = sorted(own, key=lambda place: (values[place], -length[place]))
            contrast[ordered[:1]] = contrast[ordered[-2:]] = True
        assert (advantages.pf_ppo(*tensors, best=2, worst=1).numpy() == expected).all()
        got = reconstructed.dynamic_contrastive(*tensors, torch.tensor(length), best=2, worst=1)
        assert (got.numpy() == contrast).all()


def test_gfpo_is_grpo_of_the_shortest():
    """Mean and deviation are those of the responses that are kept (arXiv 2508.09726)."""
    rewards, ids = torch.tensor([1.0, 0, 1, 0, 0.5, 3, 1, 2]), torch.tensor([0, 0, 0, 0, 0, 7, 7, 7])
    lengths = torch.tensor([90, 20, 30, 80, 10, 5, 6, 7])
    kept = advantages.pf_ppo(-lengths.float(), ids, best=3, worst=0)
    assert kept.tolist() == [False, True, True, False, True, True, True, True]
    found = advantages.grpo(rewards, ids, eps=1e-4, mask=kept)
    expected = [0, -0.5 / 0.5001, 0.5 / 0.5001, 0, 0, 1 / 1.0001, -1 / 1.0001, 0]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e9, 1e30])
def test_d3s_samples_of_one_group_do_not_depend_on_the_numbers_of_another(scale):
    """Of equal variance those with the fewest low ones, whatever stands before."""
    own, other = torch.tensor([0.0, 1, 5, 9, 8.75, 0.25]), torch.tensor([0.1, 0.2, 0.7]) * scale
    ids = torch.tensor([1] * 3 + [2] * 6)
    for k in (1, 2, 3, 4):
        together = advantages.d3s_samples(torch.cat([other, own]), ids, k)
        assert together[3:].tolist() == advantages.d3s_samples(own, None, k).tolist()
        assert together[:3].tolist() == advantages.d3s_samples(other / scale, None, k).tolist()


def test_d3s_samples_of_a_group_are_the_same_among_many_others():
    rewards = torch.randint(0, 5, (20_000, 10), generator=torch.Generator().manual_seed(7)).float()
    ids = torch.arange(20_000).repeat_interleave(10)
    together = advantages.d3s_samples(rewards.flatten(), ids, 5).view_as(rewards)
    alone = [
        advantages.d3s_samples(some.flatten(), ids[: some.numel()], 5).view_as(some) for some in rewards.split(100)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_a_selection_leaves_masked_and_unscorable_units_out():
    values, keep = torch.tensor([0.0, 1.0, math.nan, 2.0]), torch.tensor([True, True, True, False])
    assert advantages.d3s_samples(values, None, 2, mask=keep).tolist() == [True, True, False, False]
    assert advantages.pf_ppo(values, None, mask=keep).tolist() == [True, True, False, False]


# ------------------------------------------------------------------------------------------------- memory and others


def test_dcpo_over_steps(backend):
    draw = np.random.default_rng(0)
    device = testing.device_of(backend)
    history = advantages.GroupHistory.start(3, device)
    seen = {0: [], 1: [], 2: []}
    for _ in range(5):
        prompts, rewards = draw.permutation([0, 0, 0, 0, 2, 2, 2, 2]), draw.integers(0, 2, 8).astype(float)
        got, history = advantages.dcpo(
            torch.tensor(rewards, dtype=torch.float32, device=device), torch.tensor(prompts, device=device), history,
            ddof=0, backend=backend,
        )  # fmt: skip
        for prompt in (0, 2):
            own = rewards[prompts == prompt]
            seen[prompt].append(own)
            everything, i = np.concatenate(seen[prompt]), len(seen[prompt])
            new = (own - own.mean()) / own.std() if own.std() else 0 * own
            overall = (own - everything.mean()) / everything.std() if everything.std() else 0 * own
            mixes = (new / i + (1 - 1 / i) * overall, (1 - 1 / i) * new + overall / i)
            smaller = np.where(abs(mixes[0]) <= abs(mixes[1]) + 1e-12, *mixes)
            mine = got.cpu().numpy()[prompts == prompt]
            assert np.abs(np.abs(mine) - np.abs(smaller)).max() < 1e-6
        assert history.steps.tolist()[1] == 0


def test_a_prompt_without_a_score_leaves_the_history_as_it_is(backend):
    """Nor do units of negative places; a place beyond the history is an error that the loss counts."""
    device = testing.device_of(backend)
    old = advantages.GroupHistory(
        *(torch.tensor(x, dtype=torch.float64, device=device) for x in ((1, 2), (3, 4), (5, 6)))
    )
    rewards = torch.tensor([1.0, 0, math.nan, math.nan, 7, 8, math.nan, 5], device=device)
    prompts = torch.tensor([0, 0, 1, 1, -1, -(2**63), 9, 2**63 - 1], device=device)
    out, history = advantages.dcpo(rewards, prompts, old, backend=backend)
    alone, expected = advantages.dcpo(rewards[:2], prompts[:2], old, backend=backend)
    assert torch.equal(out[:2], alone) and alone.any()
    assert out[2:7].tolist() == [0.0] * 5 and out[7].isnan()
    assert all(map(torch.equal, history, expected)) and history.steps.tolist() == [2, 2]
    mask = torch.tensor([True, True, False, False], device=device)
    masked, history = advantages.dcpo(torch.ones_like(rewards)[:4], prompts[:4], old, mask=mask, backend=backend)
    assert not masked[2:].any() and history.steps.tolist() == [2, 2]


def test_de_grpo_over_steps(backend):
    draw = np.random.default_rng(0)
    t = functools.partial(torch.tensor, dtype=torch.float32, device=testing.device_of(backend))
    utility, seen = t([0.0, 0.0, 0.0, 0.0]), np.zeros(4)
    for step in range(4):
        prompts = np.array([0, 0, 0, 1, 1, 3, -1, 1])
        rewards, scores, values = (draw.normal(size=8).astype(np.float32) * scale for scale in (4, 2, 1))
        rewards[4] = math.nan if step == 1 else rewards[4]
        got, utility = advantages.de_grpo(
            t(rewards), torch.tensor(prompts, device=utility.device), t(scores), t(values), utility, samples=4,
            backend=backend,
        )  # fmt: skip
        expected = np.zeros(8)
        for prompt in (0, 1):
            own = [i for i in range(8) if prompts[i] == prompt and math.isfinite(rewards[i])]
            gaps = [[abs(x[i] - x[j]) for i, j in itertools.combinations(own, 2)] for x in (rewards, scores)]
            useful = math.prod(math.exp(np.mean(np.log(np.array(gap, float) + 1e-6))) for gap in gaps)
            seen[prompt] = 0.8 * seen[prompt] + 0.2 * useful
            stage = 0.0 if seen[prompt] < 0.2 else 0.5 if seen[prompt] > 0.8 else 1.0
            r = rewards[own].astype(float)
            plain = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
            expected[own] = plain * np.tanh(stage * (np.mean(gaps[0]) - values[own]))
        agree(backend, got, expected)
        agree(backend, utility, seen)
    assert (seen > 0.8).any() and (seen == 0).sum() == 2


def test_de_grpo_pairs_that_are_not_visited_and_prompts_that_are_not_there_are_errors_that_the_loss_counts():
    ones = torch.ones(5)
    given = torch.arange(5.0), torch.tensor([0, 0, 0, 1, 9]), ones, ones, torch.zeros(2)
    out = advantages.de_grpo(*given, samples=2)
    assert out.advantages.isnan().tolist() == [True, True, True, False, True] and not out.utility.any()
    assert not advantages.de_grpo(*given, samples=3).advantages[:4].isnan().any()
    values = torch.tensor([math.inf, math.nan, 1.0, 1.0, 1.0])  # a value that says nothing turns no advantage round
    some = advantages.de_grpo(*given[:3], values, torch.ones(2), samples=3).advantages.tolist()
    assert some[:2] == [0.0, 0.0] and some[2] != 0.0
    binary = torch.tensor([1.0, 0.0, 1.0, 0.0])
    out, utility = advantages.de_grpo(
        binary, torch.zeros(4, dtype=torch.int64), torch.tensor([-1.0, -2, -3, -4]), torch.zeros(4), torch.zeros(1),
        samples=4,
    )  # fmt: skip
    assert not out.any() and 0 < float(utility) < 0.01


@on_some
def test_rae_is_one_game_after_the_other(backend, seed):
    """Baselines of roles move with every reward that is one, in the order of positions, through several calls."""
    draw, device = np.random.default_rng(seed), testing.device_of(backend)
    dtype = torch.float64 if backend == "reference" else torch.float32
    baselines, seen = torch.zeros(3, dtype=dtype, device=device), [0.0, 0.0, 0.0]
    for _ in range(2):
        units = int(draw.integers(0, 12))
        rewards = np.where(draw.random(units) < 0.2, math.nan, draw.integers(-4, 5, units) / 4)
        roles, order, mask = draw.integers(-1, 4, units), draw.permutation(units), draw.random(units) < 0.8
        expected = np.zeros(units)
        for unit in np.argsort(order):
            if mask[unit] and roles[unit] >= 0 and not math.isnan(rewards[unit]):
                if roles[unit] == 3:
                    expected[unit] = math.nan
                    continue
                expected[unit] = rewards[unit] - seen[roles[unit]]
                seen[roles[unit]] = 0.75 * seen[roles[unit]] + 0.25 * rewards[unit]
        given = torch.tensor(rewards, dtype=dtype, device=device), torch.tensor(roles, device=device)
        options = {name: torch.tensor(each, device=device) for name, each in (("positions", order), ("mask", mask))}
        got, baselines = advantages.rae(*given, baselines, decay=0.75, **options, backend=backend)
        assert got.isnan().tolist() == np.isnan(expected).tolist()
        agree(backend, got.nan_to_num(), np.nan_to_num(expected))
        agree(backend, baselines, seen)


def test_what_is_remembered_goes_to_a_checkpoint_and_to_a_device():
    """The histories of estimators; those of entropy methods are in tests/test_entropy_thresholds.py."""
    for memory in (advantages.BetaTracker.start(torch.tensor([3.0, 2.0]), 8), advantages.GroupHistory.start(2)):
        file = io.BytesIO()
        torch.save(memory, file)
        file.seek(0)
        again, elsewhere = torch.load(file, weights_only=True), memory.to("meta")
        assert type(again) is type(elsewhere) is type(memory) and all(map(torch.equal, again, memory))
        assert {each.device.type for each in elsewhere} == {"meta"}
    assert {each.device.type for each in advantages.GroupHistory.start(2, device="meta")} == {"meta"}


def test_what_methods_with_a_memory_return_goes_to_a_checkpoint():
    history = advantages.dcpo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), advantages.GroupHistory.start(1))
    utility = advantages.DeGrpoAdvantages(torch.zeros(2), torch.ones(1))
    roles = advantages.RoleAdvantages(torch.zeros(2), torch.ones(1))
    coefficient = skywork_coefficient(torch.tensor(0.0), torch.tensor(0.1))
    for each in (history, utility, roles, coefficient):
        file = io.BytesIO()
        torch.save(each, file)
        file.seek(0)
        again = torch.load(file, weights_only=True)
        assert type(again) is type(each) and again[1] == each[1]


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_none_leaves_the_tracker_as_it_is(nothing):
    tracker = advantages.BetaTracker.start(torch.tensor([3.0, 2.0, nothing]), 8)
    assert [float(each[2]) for each in tracker] == [0.5, 0.5]
    assert [each.tolist() for each in advantages.BetaTracker.start(torch.tensor([3.0, 0.0]), 0)] == [[0.5, 0.5]] * 2
    places = torch.tensor([0, 1, -1, 5])
    new = tracker.updated(torch.tensor([nothing, 1, 1, 1]), places, torch.full((4,), 0.01))
    other = tracker.updated(torch.tensor([1.0]), places[1:2], torch.tensor([0.01]))
    assert all(map(torch.equal, new, other)) and float(new.alpha[0]) == float(tracker.alpha[0])
    drift = tracker.updated(torch.tensor([1.0, 1.0]), places[:2], torch.tensor([math.nan, 0.01]))
    assert all(map(torch.equal, drift, other))


def test_poise_refuses_a_rollout_s_own_prediction():
    rewards, predictions = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.2, 0.4, 0.6])
    out = advantages.poise(rewards, predictions, torch.tensor([1, 0, 2]))
    assert out[:2].tolist() == pytest.approx([0.6, -0.2]) and out[2].isnan()
    assert advantages.poise(rewards, predictions, torch.tensor([-1, 3, 2**63 - 1])).isnan().all()
    predictions[0] = math.nan
    assert advantages.poise(rewards, predictions, torch.tensor([1, 0, 0])).tolist() == pytest.approx([0.6, 0, 0])


def test_positive_and_negative_samples():
    right, mask = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    assert advantages.negative_sample(right, mask=mask).tolist() == [0.0, -1.0, 0.0]
    assert advantages.positive_sample(right, mask=mask).tolist() == [1.0, 0.0, 0.0]


def test_a_dominated_candidate_changes_nothing(backend):
    draw = torch.Generator().manual_seed(0)
    device = testing.device_of(backend)
    sets, directions = torch.rand(4, 3, 2, generator=draw), torch.rand(5, 2, generator=draw)
    more = torch.cat([sets, sets[:, :1] - 0.1], dim=1)
    nobody = torch.cat([sets, torch.tensor([math.nan, 9.0]).expand(4, 1, 2)], dim=1)
    outs = [advantages.vpo(x.to(device), None, directions.to(device), backend=backend) for x in (sets, more, nobody)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


# ----------------------------------------------------------------------------------------------------------- keys


def test_dense_ids_are_tuples():
    for seed in range(60):
        draw = np.random.default_rng(seed)
        keys = [draw.integers(-1, 3, 20) * scale for scale in (1, 10**12, 7)]
        got = segments.dense_ids(*(torch.tensor(key) for key in keys)).tolist()
        tuples = [None if min(key) < 0 else key for key in zip(*(k.tolist() for k in keys), strict=True)]
        for i, j in itertools.combinations(range(20), 2):
            if tuples[i] is None:
                assert got[i] == -1
            else:
                assert (got[i] == got[j]) == (tuples[i] == tuples[j])


def test_chains_bring_units_together():
    ids, positions = torch.tensor([7, -1, 7, 2, 7]), torch.tensor([3, 0, 1, 5, 2])
    chains = segments.chains(ids, positions)
    assert chains.order.tolist() == [1, 3, 2, 4, 0]
    assert chains.chain.tolist() == [-1, 0, 1, 1, 1]
    assert chains.cu_seqlens.tolist() == [1, 2, 5, 5, 5, 5]
    values = torch.arange(5.0)
    assert torch.equal(chains.unsorted(chains.sorted(values)), values)
    assert chains.first(chains.sorted(values)).tolist()[1:] == [3.0, 2.0, 2.0, 2.0]
    assert chains.ends().tolist() == [True, True, False, False, True]
    assert chains.following(torch.tensor([1, 2, 3, 2**53 + 1, 2**53 + 3])).tolist() == [0, 0, 2**53 + 1, 2**53 + 3, 0]


def test_padded_calls_are_bound_as_others():
    rewards = torch.zeros(2, 3)
    for batch in (PackedBatch.from_padded(torch.ones(2, 3) > 0), PackedBatch.from_lengths([3, 3])):
        with pytest.raises(TypeError, match="multiple values"):
            advantages.reinforce_pp(rewards, batch, token_rewards=rewards)
        with pytest.raises(TypeError, match="positional arguments"):
            advantages.reinforce_pp(rewards, batch, 0.5, False)


def test_a_step_in_no_row():
    batch = PackedBatch.from_padded(torch.ones(2, 3) > 0, steps=torch.tensor([[1, 3], [3, 3], [6, 8]]), validate=False)
    assert batch.row_of_step().tolist() == [0, -1, -1]
    assert batch.ids_of_steps()["trajectory_ids"].tolist() == [0, -1, -1]


def test_rows_of_tokens():
    batch = PackedBatch.from_lengths([0, 2, 0, 1], total_tokens=5)
    assert batch.row_of_token().tolist() == [1, 1, 3, -1, -1]
