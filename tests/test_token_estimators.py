"""Estimators of tokens, each against plain loops."""

import functools
import math

import numpy as np
import pytest
import torch
from breadth import at_length  # noqa: F401 (a fixture)
from token_draws import agree, drawn, on_all, on_some

from hpo_core import PackedBatch, advantages, testing
from hpo_core.advantages import reconstructed


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
def test_prime(backend, seed):
    """Rows in no prompt, alone in it, without tokens or an outcome; a process reward that is none."""
    batch, rows, (process, _, _), draw, tensor = drawn(seed, backend)
    n = len(rows)
    rewards, group = draw.integers(0, 3, n).astype(float), draw.integers(-1, 2, n)
    rewards[draw.random(n) < 0.1] = math.nan
    process[draw.random(batch.total_tokens) < 0.03] = math.inf
    means = [process[places].mean() if places else math.nan for _, places in rows]
    expected = np.zeros(batch.total_tokens)
    for row, (_, places) in enumerate(rows):
        together = [other for other in range(n) if group[other] == group[row] >= 0]
        baselines = [means[other] for other in together if math.isfinite(means[other])]
        gain = 0.5 * len(baselines) / (len(baselines) - 1) if len(baselines) > 1 else 0.0
        others = [rewards[other] for other in together if other != row and math.isfinite(rewards[other])]
        outcome = 2.0 * (rewards[row] - np.mean(others)) if others and math.isfinite(rewards[row]) else 0.0
        following = 0.0
        for t in reversed(places):
            following += process[t] - (np.mean(baselines) if gain else 0.0)
            expected[t] = gain * following + outcome
    given = (tensor(process), tensor(rewards), tensor(group), batch)
    options = {"process_weight": 0.5, "outcome_weight": 2.0, "backend": backend}
    scored = np.where(np.isfinite(expected), expected, 0.0)
    agree(backend, advantages.prime(*given, whitened=False, **options), scored)
    known = [t for _, places in rows for t in places if math.isfinite(expected[t])]
    if len(known) > 1:
        chosen = expected[known]
        scored[known] = (chosen - chosen.mean()) / math.sqrt(chosen.var(ddof=1) + 1e-8)
        agree(backend, advantages.prime(*given, **options), scored)


def test_prime_is_the_recipe_of_verl(backend):
    """Its compute_rloo_advantage_return with both weights 5, two prompts of two responses."""
    device = testing.device_of(backend)
    batch = PackedBatch.from_lengths([3, 1, 2, 2]).to(device)
    process = torch.tensor([0.5, -0.25, 0.125, 1.0, 0.0, 0.75, -0.5, 0.25], device=device)
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0], device=device), torch.tensor([0, 0, 1, 1], device=device)
    returns = advantages.prime(process, rewards, ids, batch, whitened=False, backend=backend)
    assert returns.tolist() == pytest.approx([-8.125, -7.5, 0.625, -0.625, 5.0, 6.25, -5.0, 1.25], abs=1e-5)
    whitened = advantages.prime(process, rewards, ids, batch, backend=backend)
    assert whitened.tolist() == pytest.approx(
        [-1.312379, -1.197005, 0.302857, 0.072109, 1.110474, 1.341222, -0.735509, 0.418231], abs=1e-5
    )


def test_prime_of_long_responses_whose_process_rewards_share_an_offset(backend):
    """The baseline is subtracted at each of a thousand tokens, and so is its rounding."""
    device = testing.device_of(backend)
    lengths, process = [700, 1000], np.random.default_rng(3).normal(5, 0.1, 1700).astype(np.float32).astype(float)
    batch, rows = PackedBatch.from_lengths(lengths).to(device), (process[:700], process[700:])
    middle = (rows[0].mean() + rows[1].mean()) / 2
    expected = np.concatenate([2 * (row - middle)[::-1].cumsum()[::-1] for row in rows])
    given = torch.tensor(process, dtype=torch.float32, device=device), torch.zeros(2, device=device)
    found = advantages.prime(*given, None, batch, process_weight=1.0, whitened=False, backend=backend)
    np.testing.assert_allclose(found.cpu().double().numpy(), expected, rtol=0, atol=2e-7 * abs(expected).max())


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
