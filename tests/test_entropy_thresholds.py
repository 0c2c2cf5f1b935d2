"""Tokens by order statistics of their response or group, ARES in full, penalties and controllers."""

import functools
import io
import math
import statistics
from fractions import Fraction

import pytest
import torch
from naive_entropy import BATCH, SHARED, close, linear, on_random_batches, places

import hpo_core as hpo
from hpo_core import PackedBatch, testing
from hpo_core import entropy as E
from hpo_core.entropy import Window

ADVANTAGES = torch.tensor([1.2, -0.8, 0.0])
TRIGGERS = torch.zeros(19, dtype=torch.bool)
TRIGGERS[[1, 2, 5, 10, 11, 16]] = True


# ------------------------------------------------------------------------------------------------------ worked numbers


def test_archer_of_the_source():
    entropy, batch = torch.tensor([0.05, 0.1, 1.2, 0.9, 0.8]), hpo.PackedBatch.from_lengths([5])
    selection = E.archer(entropy, batch)
    close(selection.bounds[0], [0.8, 0.8, 0.5, 0.8, 0.8])
    close(selection.bounds[1], [1.2, 1.2, 1.5, 1.2, 1.2])
    close(selection.kl_weight * 0.001, [0.001, 0.001, 0, 0.001, 0.001], 1e-9)
    logp = torch.tensor([1.3, 0.7, 1.3, 1.6, 1.0]).log()
    out = hpo.policy_loss(
        logp, torch.zeros(5), torch.ones(1), batch, hpo.gates.archer_clip(), selection=selection, report=("tokens",),
        kl=hpo.kl.k3(0.0), ref_logp=logp,
    )  # fmt: skip
    close(-out.tokens, [1.2, 0.7, 1.3, 1.2, 1])
    code, paper = (E.archer(SHARED, BATCH, compat=compat).bounds[1] > 1.3 for compat in ("code", "paper"))
    assert places(code) == [2, 3, 13, 18] and places(paper) == [2, 3, 10, 13, 18]
    alone = torch.ones(1), hpo.PackedBatch.from_lengths([1])
    assert E.archer(*alone).kl_weight.item() == 0 and E.archer(*alone, compat="code").kl_weight.item() == 1
    assert places(E.siren_tokens(SHARED, BATCH)) == [2, 3, 13, 18]


def test_d3s_of_the_source():
    rows = torch.tensor([True, True, False])
    mask = E.d3s_tokens(SHARED, ADVANTAGES, BATCH, share="0.3", rows_mask=rows).mask
    assert places(mask) == [2, 3, 4, 5, 13]
    zero = torch.zeros(3)
    assert not E.d3s_tokens(SHARED, zero, BATCH).mask.any()
    ties = functools.partial(E.d3s_tokens, SHARED, zero, BATCH, keeps_zeros=True)
    assert places(ties().mask) == [0, 1, 2, 3]
    assert places(ties(uid=torch.tensor([2, 1, 0])).mask) == [10, 16, 17, 18]
    assert E.d3s_schedule(0.25, (4, "0.1"), (8, "0.5")) == (5, Fraction(1, 5))


def test_ares_of_the_source():
    means = E.window_aggregate(SHARED, BATCH, Window.forward(4))
    close(means[:7], [0.5625, 0.75, 0.9, 0.605, 0.3875, 0.19, 0.025])
    assert not E.ares_windows(SHARED, BATCH).any()  # as printed, with the quantile of tokens
    assert places(E.ares_windows(SHARED, BATCH, quantile="0.5")) == [0, 1, 2, 3, 4, 10, 11, 12]
    assert places(E.ares_windows(SHARED, BATCH, of_windows=True)) == [1, 2]  # of windows, tau = .664125
    whole = E.forking_tokens("0.05")
    assert places(whole.apply(SHARED, BATCH, whole.fit(SHARED, BATCH))) == [13]  # appendix H
    close(E.ares_threshold(SHARED, BATCH), 0.6)
    close(E.ares_threshold(SHARED, BATCH, torch.tensor(0.5)), 0.501)
    counted = E.ares_next_windows(SHARED, TRIGGERS, BATCH, torch.tensor(0.5))
    assert E.count_of_rows(counted, BATCH).tolist() == [2, 0, 0]
    assert places(E.ares_next_windows(SHARED, TRIGGERS, BATCH, torch.tensor(-1.0))) == [1, 2, 5, 10, 11]
    assert places(E.ares_next_windows(SHARED, TRIGGERS, BATCH, torch.tensor(0.61))) == [1]  # whose own window has .75
    state = E.ares_threshold(SHARED, hpo.PackedBatch(torch.tensor([0]), total_tokens=19), torch.tensor(0.5))
    assert state.item() == 0.5  # a batch without responses
    for constant in (0.3, 0.7):
        flat = torch.full((6,), constant)
        assert places(E.ares_windows(flat, hpo.PackedBatch.from_lengths([6]))) == [0, 1, 2]


def test_ares_rewards_of_the_source():
    cases = [
        (1, 0, 20, 10, 0.5), (1, 0, 10, 10, 1), (0, 0, 10, 10, 0.15), (1, 1, 2, 10, 0.636364),
        (0, 1, 20, 10, 0.38103), (1, 2, 20, 10, 1.593408), (1, 2, 2, 10, 0.9), (0, 2, 5, 10, 0.3),
    ]  # fmt: skip
    for right, difficulty, count, target, expected in cases:
        state = E.AresTargets(torch.full((3,), float(target)), torch.full((3,), 0.5))
        given = torch.tensor([bool(right)]), torch.tensor([float(count)]), torch.tensor([difficulty])
        close(E.ares_entropy_reward(*given, state), [expected])
    counts, target = torch.tensor([4.0, 6.0, 8.0, 10.0]), torch.full((3,), 5.0)
    for difficulty, (count, expected) in enumerate([(8.0, -1.2), (4.0, -0.4), (4.0, -0.4)]):
        levels = torch.full((4,), difficulty)
        scale = E.ares_scales(counts, levels, target)
        assert scale[difficulty].item() == pytest.approx(0.4)
        given = torch.tensor([False]), torch.tensor([count]), levels[:1]
        close(E.ares_rewards(*given, target, scale), [expected])
        same = E.ares_targets(counts, levels, E.AresTargets.start()).target
        assert E.ares_scales(counts, levels, same).tolist() == [0, 0, 0]  # as printed


def test_difficulty_and_targets():
    right = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0] + [1, 1, 1, 0, 0, 0, 0, 0] + [1, 1] + [0] * 6).bool()
    groups = torch.arange(3).repeat_interleave(8)
    assert E.ares_difficulty(right, groups)[::8].tolist() == [0, 1, 2]
    assert E.ares_difficulty(right, groups, compat="code")[::8].tolist() == [0, 1, 2]
    third = torch.tensor([True, True, False, True, False, False])
    assert E.ares_difficulty(third, torch.tensor([0, 0, 0, 1, 1, 1]), compat="code").tolist() == [0, 0, 0, 1, 1, 1]
    assert E.ares_difficulty(third, torch.full((6,), -1)).tolist() == [-1] * 6
    # Prompts of 2 and 1 responses: 4 and 7, whose mean 5.5 rounds to 6; a hard prompt of 2.4.
    counts, ids = torch.tensor([3.0, 5.0, 7.0, 2.4]), torch.tensor([0, 0, 1, 2])
    levels = torch.tensor([0, 0, 0, 2])
    state = E.ares_targets(counts, levels, E.AresTargets.start(), ids, compat="code")
    close(state.target[[0, 2]], [6, 2])
    close(state.alpha, [0.475, 0.5, 0.48])
    # A response without a number is none of its prompt's, which weighs what any other does.
    missing, prompts = torch.tensor([4.0, math.nan, 10.0]), torch.tensor([0, 0, 1])
    given = missing, torch.zeros(3, dtype=torch.int64), E.AresTargets.start()
    assert E.ares_targets(*given, prompts, compat="code").target[0] == 7
    # A response of no prompt has a difficulty, but no say.
    given = torch.tensor([5.0, 10.0]), torch.tensor([0, 0]), E.AresTargets.start(), torch.tensor([-1, 0])
    assert E.ares_targets(*given, compat="code").target[0] == 10
    moved = E.ares_targets(counts, levels, E.AresTargets(torch.tensor([1.0, 9, 2.4]), state.alpha), memory=0.75)
    close(moved.target, [2, 9, 2.4])


def test_epo_of_the_source():
    entropy = torch.tensor([0.2, 0.5, 0.9, 1.4], requires_grad=True)
    batch, weights, history = hpo.PackedBatch.from_lengths([4]), torch.tensor([0.25]), torch.tensor([0.8, 0.6])
    beta = E.epo_phase(1, 120)
    close(E.epo(entropy, batch, weights, history, kappa=(0.5, 1.5), beta=beta), -0.00072521, 1e-8)
    E.epo(entropy, batch, weights, history, coefficient=1.0, kappa=(0.5, 1.5)).backward()
    close(entropy.grad, [-0.25 - 0.025, -0.25, -0.25, -0.25 + 0.025])  # -(1 - 0.1 P') / 4
    code = E.epo(entropy, batch, weights, history, coefficient=1.0, kappa=(0.5, 1.5), compat="code")
    close(code, -0.7)
    assert E.epo(entropy, batch, weights, history[:0], coefficient=1.0).item() == pytest.approx(-0.75)
    assert [round(E.epo_phase(k, 120), 6) for k in (0, 1, 60, 120)] == [2, 1.983471, 1.367879, 1.135335]
    assert [round(E.epo_phase(e, 150, compat="code"), 6) for e in (0, 75, 76, 150)] == [1, 0.827067, 0.768632, 0.03983]
    low, high = torch.tensor([0.35]), torch.tensor([1.05])
    band = E.entropy_band(entropy, batch, torch.ones(1), low=low, high=high)
    close(band, 0.5)


def test_siren_has_the_gradient_of_its_source():
    entropy = torch.tensor([0.5, 9.0, 1.5, 2.5], requires_grad=True)
    batch, mask = hpo.PackedBatch.from_lengths([2, 2, 0]), torch.tensor([True, False, True, True])
    mean = E.siren_mean(entropy, batch, mask)
    assert mean.item() == 1.25
    loss = E.siren(entropy, batch, mask, torch.tensor(1.0))
    loss.backward()
    slope = 2 * 0.005 * 0.25
    assert loss.item() == pytest.approx(0.005 / 16)
    close(entropy.grad, [slope / 2, 0, slope / 4, slope / 4])


def test_penalties_do_not_read_masked_tokens():
    entropy = torch.tensor([0.5, math.nan, 1.5, math.inf, math.nan], requires_grad=True)
    batch = hpo.PackedBatch(torch.tensor([0, 4]), torch.tensor([True, False, True, True, True]))
    weights, ends = torch.tensor([0.5]), {"low": torch.tensor([0.75]), "high": torch.tensor([1.0])}
    total = E.mean_entropy(entropy, batch, weights) + E.entropy_band(entropy, batch, weights, **ends)
    total = total + E.epo(entropy, batch, weights, torch.tensor([1.0])) + E.siren_mean(entropy, batch, batch.mask)
    total.backward()
    assert total.dtype is torch.float32 and total.isfinite() and entropy.grad[[1, 3, 4]].tolist() == [0, 0, 0]


def test_gradcheck_of_penalties():
    entropy = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.2
    batch, weights = hpo.PackedBatch.from_lengths([4, 2]), torch.tensor([0.25, 0.5])
    mask, history = torch.tensor([True, True, False, True, False, True]), torch.tensor([0.6])

    def total(entropy):
        return torch.stack(
            [E.epo(entropy, batch, weights, history), E.siren(entropy, batch, mask, torch.tensor(0.3))]
        ).double()

    assert torch.autograd.gradcheck(total, entropy.requires_grad_(), eps=1e-3, atol=1e-3, rtol=1e-3)


def test_controllers():
    state, bonus = torch.tensor(0.0), None
    for entropy, expected in ((0.1, 1e-4), (0.1, 2e-4), (0.3, 1e-4), (0.2, 0.0), (0.2, 0.0)):
        state, bonus = E.skywork_coefficient(state, torch.tensor(entropy))
        assert state.item() == pytest.approx(expected) and bonus.item() == pytest.approx(expected * (entropy < 0.2))
    trl = E.trl_coefficient(torch.tensor(0.01), torch.tensor(0.25), target=0.25)
    assert trl.state.item() == pytest.approx(0.015) == trl.coefficient.item()
    assert E.skywork_coefficient(torch.tensor(0.005), torch.tensor(0.0)).state.item() == pytest.approx(0.005)
    assert E.trl_coefficient(torch.tensor(0.25), torch.tensor(1.0), delta=0.125, least=0.25).state.item() == 0.25
    pi = functools.partial(E.entropic, target=1.0, proportional=0.25, integral_gain=0.125)
    for (total, entropy), expected in {(1.0, 1.5): (1.5, 0.25), (-1.0, 0.5): (-1.5, -0.25), (8.0, 2.0): (9, 1)}.items():
        found = pi(torch.tensor(total), torch.tensor(entropy))
        assert (found.state.item(), found.coefficient.item()) == expected
    assert pi(torch.tensor(-9.0), torch.tensor(1.0)).coefficient.item() == -1


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_a_step_without_an_entropy_leaves_the_controllers_as_they_are(nothing):
    nothing, state = torch.tensor(nothing), torch.tensor(0.01)
    for controller in (E.skywork_coefficient, E.trl_coefficient):
        assert [each.item() for each in controller(state, nothing, most=0.005)] == [state.item(), 0]
    total, alpha = E.entropic(torch.tensor(1.5), nothing, target=1.0, proportional=2.0, integral_gain=0.5)
    assert (total.item(), alpha.item()) == (1.5, 0.75)
    assert E.target_temperature(torch.tensor(math.nan), low=0.75, high=1.25).item() == 0.75  # it has no state
    assert E.ares_kappa(torch.ones(1), nothing[None], budget=0.01, rate=5.0, least=0.1, most=3.0).item() == 1
    penalty = E.AresPenalty.start(1)
    assert [each.item() for each in E.ares_penalty(penalty, nothing[None], period=1)[::2]] == [1, 0]


def test_the_penalty_of_ares_moves_once_a_period():
    state, log_beta, error = E.AresPenalty.start(3), 0.0, 0.0
    for call in range(1, 201):
        state = E.ares_penalty(state, torch.tensor([0.02, 0.0101, math.nan if call % 100 == 0 else 0.02]))
        if call % 100 == 0:
            error = 0.97 * error + 0.03  # of a distance of 1
            log_beta += 0.05 * error
        assert state.beta[0].item() == pytest.approx(math.exp(log_beta), rel=1e-5)
    assert state.beta[1:].tolist() == [1, 1] and state.calls.item() == 200
    assert E.ares_penalty(state, torch.full((3,), 99.0), period=1).beta[2].item() == pytest.approx(math.exp(0.01))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True).calls.item() == 200
    kappa = E.ares_kappa(torch.ones(2), torch.tensor([0.02, math.nan]), budget=0.01, rate=5.0, least=0.1, most=3.0)
    assert kappa.tolist() == [3.0, 1.0]


def test_the_states_of_ares_go_to_a_device():
    for state in (E.AresPenalty.start(3), E.AresTargets.start()):
        elsewhere = state.to("meta")
        assert type(elsewhere) is type(state) and {each.device.type for each in elsewhere} == {"meta"}


def test_the_dynamic_penalty_of_ares():
    mask = E.cover(E.ares_windows(SHARED, BATCH, of_windows=True), BATCH, Window.forward(4))
    assert places(mask) == [1, 2, 3, 4, 5]
    beta, levels = torch.tensor([0.1, 0.2, 0.4]), torch.tensor([1, 2, -1])
    weight = E.ares_penalty_weights(mask, levels, beta, BATCH, relief=0.25).kl_weight
    close(weight, [0.2] + [0.05] * 5 + [0.2] * 4 + [0.4] * 6 + [0.0] * 3)


def test_ares_over_ranks(three_ranks):
    """The numbers of one process, from groups, medians and difficulties that span ranks."""
    rows, ends = torch.tensor([10, 6, 3]), [0, 10, 16, 19]
    groups, counts, levels = torch.tensor([4, 7, 4]), torch.tensor([5.0, 2.0, 8.0]), torch.tensor([0, 2, 0])
    target, start = torch.full((3,), 2.0), E.AresTargets.start()

    def run(rank):
        world, tokens, own = torch.distributed.group.WORLD, slice(ends[rank], ends[rank + 1]), slice(rank, rank + 1)
        batch = hpo.PackedBatch.from_lengths(rows[own], group_ids=groups[own])
        chosen = E.ares_windows(SHARED[tokens], batch, quantile="0.5", process_group=world)
        tau = E.ares_threshold(SHARED[tokens], batch, process_group=world)
        code = E.ares_targets(counts[own], levels[own], start, groups[own], compat="code", process_group=world)
        return chosen, tau, code, E.ares_scales(counts[own], levels[own], target, process_group=world)

    whole = hpo.PackedBatch.from_lengths(rows, group_ids=groups)
    chosen, taus, codes, scales = zip(*three_ranks(run), strict=True)
    assert torch.equal(torch.cat(chosen), E.ares_windows(SHARED, whole, quantile="0.5"))
    code, scale = E.ares_targets(counts, levels, start, groups, compat="code"), E.ares_scales(counts, levels, target)
    for rank in range(3):
        close(taus[rank], 0.6)
        assert torch.equal(codes[rank].alpha, code.alpha) and torch.equal(scales[rank], scale)
        assert torch.equal(codes[rank].target.nan_to_num(), code.target.nan_to_num())


# --------------------------------------------------------------------------------------------------------- plain loops


def threshold(numbers, q, up):
    at = q * (len(numbers) - 1)
    return sorted(numbers)[math.ceil(at) if up else math.floor(at)]


@on_random_batches
def test_archer_and_siren(drawn):
    entropy = drawn.tensor(drawn.entropy)
    q = Fraction(7, 10)
    for compat, up in (("paper", True), ("code", False)):
        tau = [threshold([drawn.entropy[t] for t in row], q, up) if row else None for row in drawn.rows]

        def reasons(t, tau=tau, up=up):
            x = drawn.entropy[t]
            return x >= tau[drawn.row_of[t]] if up else x > tau[drawn.row_of[t]]

        got = E.archer(entropy, drawn.batch, quantile="0.7", compat=compat, backend=drawn.backend)
        drawn.agrees(got.bounds[0], drawn.of_tokens(lambda t: 0.5 if reasons(t) else 0.8, 1.0))
        drawn.agrees(got.bounds[1], drawn.of_tokens(lambda t: 1.5 if reasons(t) else 1.2, 1.0))
        drawn.agrees(got.kl_weight, drawn.of_tokens(lambda t: 0.0 if reasons(t) else 1.0, 1.0))
        if compat == "code":
            mask = E.siren_tokens(entropy, drawn.batch, quantile="0.7", backend=drawn.backend)
            assert places(mask.cpu()) == [t for t in sorted(drawn.usable) if reasons(t)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_threshold_is_compared_in_its_own_precision(backend, dtype):
    """Thresholds of kernels are float32, which 0.1 is not."""
    place = testing.device_of(backend)
    batch, equal = PackedBatch.from_lengths([5]).to(place), torch.full((5,), 0.1, dtype=dtype, device=place)
    assert E.archer(equal, batch, backend=backend).bounds[1].tolist() == pytest.approx([1.5] * 5)
    assert not E.siren_tokens(equal, batch, backend=backend).any()
    two = PackedBatch.from_lengths([5, 1]).to(place)
    given = torch.cat([equal, equal[:1]]), torch.ones(2, device=place)
    assert not E.hicra_tokens(*given, two, backend=backend).any()


def test_shares_of_tokens_are_short_fractions(backend):
    place = testing.device_of(backend)
    _, share = E.d3s_schedule(1 / 3, (4, "0.1"), (8, "0.5"))
    assert share == Fraction(7, 30)
    batch = PackedBatch.from_lengths([1600]).to(place)
    entropy, advantages = torch.linspace(0.1, 2, 1600, device=place), torch.ones(1, device=place)
    assert E.d3s_tokens(entropy, advantages, batch, share=share, backend=backend).mask.sum().item() == 374
    for call in (E.d3s_tokens, E.hicra_tokens):
        with pytest.raises(
            ValueError,
            match=r"share: expected a short decimal or a Fraction, got 0.3333.*'1/3', or round the value of a schedule",
        ):
            call(entropy, advantages, batch, share=1 / 3, backend=backend)


@on_random_batches
def test_hicra_tokens(drawn):
    own = drawn.normal(len(drawn.rows))
    given = drawn.tensor(drawn.entropy), drawn.tensor(own), drawn.batch
    got = places(E.hicra_tokens(*given, share="0.4", backend=drawn.backend).cpu())
    expected = []
    for row, each in enumerate(drawn.rows):
        same = [len(r) for r, group in zip(drawn.rows, drawn.group, strict=True) if group == drawn.group[row] and r]
        if each and own[row] > 0 and len(each) > (statistics.fmean(same) if drawn.group[row] >= 0 else 0):
            tau = sorted(drawn.entropy[t] for t in each)[Fraction(6, 10) * len(each) // 1]
            expected += [t for t in each if drawn.entropy[t] > tau]
    assert got == expected


def test_hicra_takes_the_share_of_the_tokens_with_an_entropy(backend):
    """The statistic of the largest 30 % of three entropies is the largest, and above it is none; of four it is not."""
    batch, place = PackedBatch.from_lengths([4, 1]), testing.device_of(backend)
    for last, expected in ((math.nan, []), (0.2, [1])):
        entropy = torch.tensor([0.1, 0.9, 0.5, last, 0.3], device=place)
        got = E.hicra_tokens(entropy, torch.ones(2, device=place), batch.to(place), backend=backend)
        assert got.nonzero().flatten().tolist() == expected


@on_random_batches
def test_d3s_tokens(drawn):
    own, kept = drawn.normal(len(drawn.rows)), drawn.draw.random(len(drawn.rows)) < 0.7
    uid = drawn.draw.permutation(len(drawn.rows))
    tokens = [t for row, each in enumerate(drawn.rows) for t in each if kept[row]]
    dtype = torch.float64 if drawn.backend == "reference" else torch.float32
    score = {t: torch.tensor(abs(own[drawn.row_of[t]]) * drawn.entropy[t], dtype=dtype).item() for t in tokens}
    k = math.ceil(Fraction(3, 10) * len(tokens))
    order = sorted(tokens, key=lambda t: (-score[t], uid[drawn.row_of[t]], t))[:k]
    for keeps, expected in ((True, order), (False, [t for t in order if score[t] > 0])):
        got = E.d3s_tokens(
            drawn.tensor(drawn.entropy), drawn.tensor(own), drawn.batch, share="0.3", keeps_zeros=keeps,
            rows_mask=drawn.tensor(kept), uid=drawn.tensor(uid), backend=drawn.backend,
        )  # fmt: skip
        assert places(got.mask.cpu()) == sorted(expected)


def windows_of(drawn, first, last):
    """Means of windows inside the span of a row, from its first unmasked token to its last; a masked or broken token
    is left out."""
    means = {}
    for valid, row in zip(drawn.valid, drawn.rows, strict=True):
        for t in row:
            inside = [u for u in range(t + first, t + last + 1) if u in row]
            if valid[0] <= t + first and t + last <= valid[-1] and inside:
                means[t] = sum(drawn.entropy[u] for u in inside) / len(inside)
    return means


@on_random_batches
def test_ares(drawn):
    entropy, q = drawn.tensor(drawn.entropy), Fraction(3, 4)
    width = 2 if drawn.draw.random() < 0.5 else 4
    means = windows_of(drawn, 0, width - 1)
    for of_windows in (False, True):
        of_rows = []
        for row in drawn.rows:
            numbers = [means[t] for t in row if t in means] if of_windows else [drawn.entropy[t] for t in row]
            of_rows.append(linear(numbers, q) if numbers else None)
        got = E.ares_windows(
            entropy, drawn.batch, width=width, quantile="0.75", of_windows=of_windows, backend=drawn.backend
        ).tolist()
        for row, each in enumerate(drawn.rows):
            same = [x for x, group in zip(of_rows, drawn.group, strict=True) if group == drawn.group[row]]
            same = [x for x in same if x is not None]
            tau = statistics.fmean(same) if same and drawn.group[row] >= 0 else math.inf
            for t in each:
                assert got[t] == (t in means and means[t] >= tau) or abs(means[t] - tau) < 1e-5
    assert not any(got[t] for t in range(drawn.tokens) if t not in drawn.usable)


@on_random_batches
def test_the_code_of_ares(drawn):
    entropy, means = drawn.tensor(drawn.entropy), windows_of(drawn, 1, 2)
    of_rows = []
    for row in drawn.rows:
        full = [means[t] for t in row if t in means]
        if row:
            middle = statistics.fmean(full) if full else drawn.entropy[row[0]]
            of_rows.append(linear([means.get(t, middle) for t in row], Fraction(19, 20)))
    median = statistics.median(of_rows) if of_rows else math.nan
    got = E.ares_threshold(entropy, drawn.batch, width=2, backend=drawn.backend)
    drawn.agrees(got, median, 1e-5)
    chosen = drawn.draw.random(drawn.tokens) < 0.7
    counted = E.ares_next_windows(
        entropy, drawn.tensor(chosen), drawn.batch, drawn.tensor(0.6), width=2, backend=drawn.backend
    )
    assert places(counted.cpu()) == [t for t in sorted(means) if chosen[t] and means[t] >= 0.6]
    expected = [sum(t in means and bool(chosen[t]) and means[t] >= 0.6 for t in row) for row in drawn.rows]
    assert E.count_of_rows(counted, drawn.batch).tolist() == expected


@on_random_batches
def test_means_of_penalties(drawn):
    weights = [abs(x) for x in drawn.normal(len(drawn.rows))]
    ends = [sorted(abs(x) for x in pair) for pair in zip(*(drawn.normal(len(drawn.rows)) for _ in "ab"), strict=True)]
    low, high = ([pair[at] for pair in ends] for at in (0, 1))
    given = drawn.tensor(drawn.entropy), drawn.batch, drawn.tensor(weights)
    of = {t: weights[drawn.row_of[t]] for t in drawn.usable}
    drawn.agrees(E.mean_entropy(*given), sum(of[t] * drawn.entropy[t] for t in of), 1e-5)
    distance = {
        t: max(low[drawn.row_of[t]] - drawn.entropy[t], drawn.entropy[t] - high[drawn.row_of[t]], 0.0) for t in of
    }
    band = E.entropy_band(*given, low=drawn.tensor(low), high=drawn.tensor(high))
    drawn.agrees(band, sum(of[t] * distance[t] for t in of), 1e-5)
    chosen = drawn.draw.random(drawn.tokens) < 0.5
    kept = [[drawn.entropy[t] for t in row if chosen[t]] for row in drawn.rows]
    means = [statistics.fmean(row) for row in kept if row]
    got = E.siren_mean(drawn.tensor(drawn.entropy), drawn.batch, drawn.tensor(chosen))
    drawn.agrees(got, statistics.fmean(means) if means else 0.0, 1e-5)
