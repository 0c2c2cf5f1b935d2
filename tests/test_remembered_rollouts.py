"""The memory of estimators between steps, against plain loops."""

import functools
import io
import itertools
import math

import numpy as np
import pytest
import torch
from breadth import at_length  # noqa: F401 (a fixture)
from token_draws import agree, on_some

from hpo_core import advantages, testing
from hpo_core.entropy import skywork_coefficient


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
        prompts = np.array([0, 0, 0, 1, 1, 3, -1, 1, 1])
        rewards, scores, values = (draw.normal(size=9).astype(np.float32) * scale for scale in (4, 2, 1))
        rewards[4] = math.nan if step == 1 else rewards[4]
        got, utility = advantages.de_grpo(
            t(rewards), torch.tensor(prompts, device=utility.device), t(scores), t(values), utility, samples=4,
            backend=backend,
        )  # fmt: skip
        expected = np.zeros(9)
        for prompt in (0, 1):
            own = [i for i in range(9) if prompts[i] == prompt and math.isfinite(rewards[i])]
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
