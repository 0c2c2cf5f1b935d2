"""The metrics vector: its order, its reductions, and the numbers computed from it."""

import functools
import itertools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import hpo_core as hpo
from hpo_core import gates, kl, testing
from hpo_core.metrics import FLAGS, SLOTS, Metrics, empty_metrics
from hpo_core.testing import Layout, PolicyLossExample

HEADER = Path(__file__).resolve().parents[1] / "csrc/include/hpo/metrics.h"


def metrics_of(backend, example):
    example = testing.move(example, testing.device_of(backend))
    keywords = example.keywords | {"gate": example.gate, "backend": backend}
    return hpo.policy_loss(example.logp, example.old_logp, example.advantages, example.batch, **keywords).metrics


@pytest.mark.skipif(not HEADER.exists(), reason="needs the source")
def test_slots_are_those_of_the_header():
    body = re.search(r"enum Metric : int \{(.*?)kMetrics", HEADER.read_text(), re.DOTALL).group(1)
    names = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in re.findall(r"\bk([A-Z]\w*)", body)]
    assert names == list(SLOTS)


def test_every_number_by_hand(backend):
    """Five tokens with known ratios; one bound crossed on each side by each sign."""
    ratios = torch.tensor([0.5, 1.0, 2.0, 0.5, 4.0])
    old = torch.full((5,), -1.0)
    batch = hpo.PackedBatch.from_lengths([3, 2])
    gate = gates.RatioGate("four", gates.Clip((0.8, 0.9), (1.5, 3.0)))
    reference = old + ratios.log() - torch.tensor([0.1, 0.0, -0.1, 0.2, 0.0])
    example = PolicyLossExample(
        old + ratios.log(), old, torch.tensor([1.0, -1.0]), batch, gate,
        {
            "weights": torch.tensor([0.5, 0.25]), "advantage_level": "row", "kl": kl.k1(2.0), "ref_logp": reference,
            "entropy": torch.tensor([0.5, 1.0, 1.5, 2.0, math.nan]),
            "token_mask": torch.tensor([True, True, True, True, True]),
        },
    )  # fmt: skip
    out = metrics_of(backend, example)
    raw = {name: out[name].item() for name in SLOTS}
    log2 = math.log(2)
    penalty = 2.0 * (0.5 * (0.1 + 0.0 - 0.1) + 0.25 * 0.2)
    loss = 0.5 * -(0.8 + 1.0 + 1.5) + 0.25 * (0.9 + 3.0) + penalty
    s = torch.tensor([0.1, 0.0, -0.1, 0.2, 0.0], dtype=torch.float64)
    expected = {
        "tokens": 5, "selected": 5, "rows": 2, "loss": loss, "penalty": penalty,
        "log_ratio_sum": log2 * (-1 + 0 + 1 - 1 + 2), "log_ratio_square": log2**2 * (1 + 0 + 1 + 1 + 4),
        "ratio_deviation": -0.5 + 0 + 1 - 0.5 + 3, "ratio_deviation_square": 0.25 + 0 + 1 + 0.25 + 9,
        "log_ratio_min": -log2, "log_ratio_max": 2 * log2,
        "clipped_high_positive": 1, "clipped_low_positive": 1, "clipped_low_negative": 1, "clipped_high_negative": 1,
        "reference_log_ratio": s.sum().item(), "reference_log_ratio_square": s.square().sum().item(),
        "reference_k3": (torch.exp(-s) - 1 + s).sum().item(), "entropy": 5.0, "entropy_tokens": 4,
        "nan_tokens": 0, "infinite_tokens": 0, "bad_offsets": 0, "bad_advantages": 0,
    }  # fmt: skip
    assert raw == pytest.approx(expected, abs=2e-6)

    computed = out.compute()
    assert computed["ratio_mean"] == pytest.approx(1.6, abs=1e-6)
    assert (computed["ratio_min"], computed["ratio_max"]) == pytest.approx((0.5, 4.0), abs=1e-6)
    assert computed["effective_sample_size"] == pytest.approx(8.0**2 / (5 * (0.25 + 1 + 4 + 0.25 + 16)), abs=1e-6)
    assert computed["clip_fraction"] == pytest.approx(0.8)
    assert computed["entropy"] == 1.25 and computed["selected_fraction"] == 1.0
    assert computed["kl_reference_k1"] == pytest.approx(0.04, abs=1e-6)


@pytest.mark.parametrize(
    "log_ratios",
    [(-8.5, -8.73), (-9.0, -9.6), (-10.0, -10.2, -10.1, -10.05), (-6.0, -6.12, -6.05, -6.02), (-17.0, -17.1), (9.0,)],
)
def test_the_effective_sample_size_of_ratios_far_from_1(log_ratios, backend):
    """The kernels' sums of r - 1 have no digits of ratios below e^-6; extrema tell that these are alike."""
    x = torch.tensor(log_ratios)
    out = hpo.policy_loss(x, 0 * x, torch.ones(1), hpo.PackedBatch.from_lengths([len(x)]), backend=backend)
    r, computed = x.double().exp(), out.metrics.compute()
    size = (r.sum() ** 2 / (len(x) * r.square().sum())).item()
    assert abs(computed["effective_sample_size"] - size) <= 0.1 and computed["effective_sample_size"] <= 1.0
    assert r.min() <= computed["ratio_mean"] * (1 + 1e-6) and computed["ratio_mean"] <= r.max() * (1 + 1e-6)


def test_the_effective_sample_size_is_nan_where_no_digit_is_known(backend):
    x = torch.tensor([-8.0, -12.0, -20.0])
    batch = hpo.PackedBatch.from_lengths([3])
    out = hpo.policy_loss(x, 0 * x, torch.ones(1), batch, backend=backend).metrics.compute()
    assert math.isnan(out["effective_sample_size"]) and out["ratio_min"] <= out["ratio_mean"] <= out["ratio_max"]
    x = x + torch.tensor([7.0, 0.0, 0.0])  # one ratio has digits
    out = hpo.policy_loss(x, 0 * x, torch.ones(1), batch, backend=backend).metrics.compute()
    assert out["effective_sample_size"] == pytest.approx(1 / 3, rel=1e-3)


@pytest.mark.parametrize("drift", [1e-2, 1e-4, 1e-6])
def test_k3_of_small_drifts_is_not_the_rounding_of_ratios(drift, backend):
    """The k3 of ratios in float32 would be some 1e-8."""
    draw = torch.Generator().manual_seed(0)
    old_logp = -0.1 - torch.rand(4096, generator=draw)
    logp = old_logp + drift * torch.randn(4096, generator=draw)
    x = logp.double() - old_logp.double()
    out = hpo.policy_loss(logp, old_logp, torch.ones(1), hpo.PackedBatch.from_lengths([4096]), backend=backend)
    k3 = (torch.expm1(x) - x).mean().item()
    assert out.metrics.compute()["kl_old_k3"] == pytest.approx(k3, rel=2 * x.abs().max().item() + 1e-4)


@pytest.mark.parametrize("drift", [-1.4, -1.6])
def test_k3_is_that_of_ratios_that_are_rounded_up_or_down(drift, backend):
    """In units of the last place below 1."""
    old_logp = torch.full((64,), -0.001)
    logp = old_logp + drift * 2**-24
    out = hpo.policy_loss(logp, old_logp, torch.ones(1), hpo.PackedBatch.from_lengths([64]), backend=backend)
    x = logp.double() - old_logp.double()
    assert out.metrics.compute()["kl_old_k3"] == pytest.approx((x * x).mean().item() / 2, rel=1e-3)


def test_clip_counts_are_of_selected_tokens(backend):
    example = testing.random_policy_loss(1, gates.dapo(), {"weights"}, layout=Layout((8,), masked="none", seed=1))
    example = example._replace(logp=example.old_logp + 1, advantages=torch.ones(1))
    chosen = torch.arange(8) < 3
    out = metrics_of(backend, example.given(token_mask=chosen))
    assert (out["tokens"].item(), out["selected"].item(), out["clipped_high_positive"].item()) == (8, 3, 3)
    assert out.compute()["clip_fraction_high_positive"] == 1.0 and out.compute()["selected_fraction"] == 0.375


def test_each_flag(backend):
    example = testing.random_policy_loss(
        1, gates.gspo(), {"weights", "window"}, layout=Layout((3, 3), masked="none", seed=1)
    )
    old, entropy = example.old_logp.clone(), example.keywords["entropy"].clone()
    assert not metrics_of(backend, example).flags.any()
    old[0], old[1], entropy[4] = math.nan, math.inf, math.nan
    advantages = torch.tensor([1.0, math.nan])
    offsets = torch.tensor([0, 3, 6, 99])
    broken = hpo.PackedBatch(offsets, total_tokens=6, validate=False)
    example = example._replace(old_logp=old, advantages=torch.cat((advantages, advantages[:1])), batch=broken)
    example = example.given(entropy=entropy, weights=torch.ones(3))
    out = metrics_of(backend, example)
    assert dict(zip(FLAGS, out.flags.tolist(), strict=True)) == {
        "nan_tokens": 2, "infinite_tokens": 1, "bad_offsets": 1, "bad_advantages": 3,
    }  # fmt: skip
    assert set(out.compute()) >= set(FLAGS)


@pytest.mark.parametrize(
    ("gate", "given", "named"),
    [
        (gates.dapo(), {"gate_inputs": gates.GateInputs(bounds=(torch.full((2,), 0.2),) * 2)}, "0 <= low <= 1 <= high"),
        (gates.nft(), {"gate_inputs": gates.GateInputs(target=torch.tensor([50.0]))}, r"success rate \(target\)"),
        (gates.tis(), {"rollout_logp": torch.full((2,), math.nan)}, r"correction \(by rollout_logp\)"),
    ],
)
def test_the_flag_of_bad_advantages_names_what_else_it_counts(gate, given, named):
    batch, logp = hpo.PackedBatch.from_lengths([2]), torch.zeros(2)
    out = hpo.policy_loss(logp, logp, -torch.ones(1), batch, gate, **given)
    with pytest.raises(FloatingPointError, match=f"bad_advantages = 2: .*{named}"):
        out.metrics.raise_for_flags()


@pytest.mark.parametrize("gate", [gates.ppo_clip(), gates.gspo(), gates.fiberpo()], ids=lambda gate: gate.name)
@pytest.mark.parametrize("lengths", [(40, 8, 32), (1, 3, 2), (1068, 1, 3)])
def test_an_entropy_that_is_not_finite_counts_nowhere(gate, lengths, backend):
    tokens = sum(lengths)
    batch = hpo.PackedBatch.from_lengths(lengths, group_ids=torch.tensor([0, 0, 1]))
    logp, entropy = torch.linspace(-3.0, -2.0, tokens), torch.ones(tokens)
    entropy[0], entropy[2], entropy[-1] = math.nan, math.inf, -math.inf
    out = hpo.policy_loss(logp, logp - 0.01, torch.ones(3), batch, gate, entropy=entropy, backend=backend).metrics
    assert (out["entropy"].item(), out["entropy_tokens"].item()) == (tokens - 3, tokens - 3)


@pytest.mark.parametrize("gate", [gates.ppo_clip(), gates.gspo()], ids=lambda gate: gate.name)
@pytest.mark.parametrize("tail", [33, 48])
def test_the_last_tile_adds_up_its_own_tokens_alone(gate, tail, backend):
    """The tile before it is full, of larger numbers. An entropy of NaN in each sends the CPU the long way."""
    tokens, draw = 1024 + tail, torch.Generator().manual_seed(tail)
    logp = -torch.rand(tokens, generator=draw)
    old_logp, ref_logp, entropy = logp - 0.01, logp - 2, torch.rand(tokens, generator=draw)
    ref_logp[1024:], entropy[1024:] = logp[1024:] - 0.01, 0.01
    entropy[[0, 1024]] = math.nan
    given = (logp, old_logp, torch.ones(1), hpo.PackedBatch.from_lengths([tokens]), gate)
    options = {"kl": hpo.kl.k3(0.1), "ref_logp": ref_logp, "entropy": entropy, "weights": torch.ones(1)}
    given, options = testing.move((given, options), testing.device_of(backend))
    got, wanted = (hpo.policy_loss(*given, **options, backend=each).metrics for each in (backend, "reference"))
    for slot in ("entropy", "penalty", "reference_k3"):
        assert got[slot].item() == pytest.approx(wanted[slot].item(), rel=1e-5), slot


@pytest.mark.parametrize("gate", [gates.ppo_clip(), gates.gspo()], ids=lambda gate: gate.name)
@pytest.mark.parametrize("of", ["old_logp", "ref_logp"])
def test_rows_that_begin_with_long_prompts_are_counted(gate, of, backend):
    """A row counts if some token is unmasked and its log-ratios are numbers; where it stands does not matter."""
    valid, nan = ((2500,), (1599,), (1200,), (), (3,)), ((), (), (600, 1000), (700,), ())
    lengths = (2600, 1600, 1600, 1600, 1600)
    tokens, starts = sum(lengths), (0, *itertools.accumulate(lengths))
    mask, logp = torch.zeros(tokens, dtype=torch.bool), torch.full((tokens,), -1.0)
    inputs = {"old_logp": logp.clone(), "ref_logp": logp.clone()}
    for start, numbers, others in zip(starts, valid, nan, strict=False):
        mask[[start + place for place in (*numbers, *others)]] = True
        inputs[of][[start + place for place in others]] = math.nan
    given = (logp, inputs["old_logp"], torch.ones(5), hpo.PackedBatch.from_lengths(lengths, mask=mask), gate)
    options = {"ref_logp": inputs["ref_logp"], "weights": torch.ones(5)}
    given, options = testing.move((given, options), testing.device_of(backend))
    out = hpo.policy_loss(*given, **options, kl=hpo.kl.k3(0.1), backend=backend).metrics
    assert (out["rows"].item(), out["tokens"].item(), out["nan_tokens"].item()) == (4, 4, 3)


def test_nothing_valid(backend):
    example = testing.random_policy_loss(1, gates.dapo(), {"weights"}, layout=Layout((3, 2), masked="all"))
    out = metrics_of(backend, example)
    assert torch.equal(out.vector.cpu(), empty_metrics("cpu"))
    computed = out.compute()
    assert computed["loss"] == 0.0 and computed["tokens"] == 0.0 and math.isnan(computed["ratio_max"])


def test_parts_add_up_to_the_whole(backend):
    """Extrema add up, too, and so do the slots of a part without tokens."""
    layout = Layout((4, 0, 3, 6, 1), 0, "row", False, 3)
    features = {"weights", "kl", "kl_weight", "entropy", "token_mask"}
    example = testing.random_policy_loss(0, gates.ppo_clip(0.05, 0.05, ratio_dual=1.2), features, layout=layout)
    total = Metrics(empty_metrics(testing.device_of(backend)))
    for rows in ([0, 1], [2], [1], [3, 4]):
        total = total + metrics_of(backend, example.select(torch.tensor(rows))[0])
    testing.assert_within_budget("sum of parts", total.vector, testing.expect_policy_loss(example)["metrics"])


def test_addition_follows_the_reductions():
    a, b = (Metrics(torch.arange(len(SLOTS), dtype=torch.float64) * sign + 1.0) for sign in (1, -1))
    for (name, reduction), x, y in zip(SLOTS.items(), a.vector.tolist(), b.vector.tolist(), strict=True):
        assert (a + b)[name].item() == {"sum": x + y, "min": min(x, y), "max": max(x, y)}[reduction]
    assert torch.equal(sum([a, b, a]).vector, (a + b + a).vector)
    with pytest.raises(TypeError, match="unsupported operand"):
        1 + a
    neutral = Metrics(empty_metrics("cpu"))
    assert torch.equal((a + neutral).vector, a.vector) and torch.equal((neutral + a).vector, a.vector)


DEBUG = """
import math, torch, hpo_core as hpo
batch, old_logp, advantages = hpo.PackedBatch.from_lengths([2]), torch.zeros(2), torch.ones(1)
for call in (hpo.policy_loss, hpo.policy_loss_and_grad):
    call(torch.zeros(2), old_logp, advantages, batch)
    try:
        call(torch.tensor([math.nan, math.inf]), old_logp, advantages, batch)
    except FloatingPointError as error:
        print(error)
"""


def test_debug_mode_turns_a_flag_into_an_error(capsys):
    """A process that starts in debug mode raises, and this one does not."""
    assert os.environ.get("HPO_CORE_DEBUG", "0") == "0"
    exec(DEBUG, {})
    assert capsys.readouterr().out == ""
    environment = os.environ | {"HPO_CORE_DEBUG": "1"}
    said = subprocess.run([sys.executable, "-c", DEBUG], env=environment, capture_output=True, text=True, check=True)
    lines = said.stdout.splitlines()
    assert len(lines) == 2
    assert all(re.search("nan_tokens = 1: a log-ratio.*; infinite_tokens = 1: a log-ratio", line) for line in lines)


LOG_PROBABILITIES = torch.tensor([-0.1, -2.0, -0.5, -3.0])
NO_LOG_PROBABILITIES = [-LOG_PROBABILITIES, LOG_PROBABILITIES.exp(), torch.full((4,), 0.3)]


@pytest.mark.parametrize("wrong", NO_LOG_PROBABILITIES, ids=["cross-entropies", "probabilities", "entropies"])
@pytest.mark.parametrize("name", ["logp", "old_logp", "ref_logp", "rollout_logp"])
def test_debug_mode_refuses_what_is_no_log_probability(monkeypatch, name, wrong):
    """The loss of any of them looks like a loss."""
    given = dict.fromkeys(("logp", "old_logp", "ref_logp", "rollout_logp"), LOG_PROBABILITIES) | {name: wrong}
    rest = {
        "advantages": torch.tensor([1.0, -1.0]),
        "batch": hpo.PackedBatch.from_lengths([3, 1]),
        "kl": hpo.kl.k3(0.1),
    }
    calls = [
        functools.partial(call, **given, **rest, gate=hpo.gates.tis(), backend=backend)
        for call in (hpo.policy_loss, hpo.policy_loss_and_grad)
        for backend in (None, "reference")
    ]
    assert all(torch.isfinite(call().loss) for call in calls)
    monkeypatch.setattr(hpo.metrics, "_DEBUG", True)
    for call in calls:
        with pytest.raises(ValueError, match=f"^{name}: expected log-probabilities.*, got 4 valid tokens above 0"):
            call()


def test_debug_mode_asks_no_token_that_does_not_count(monkeypatch):
    """Padding may hold anything, and a log-probability of 0 may be rounded upwards."""
    monkeypatch.setattr(hpo.metrics, "_DEBUG", True)
    mask = torch.tensor([True, False, True, True, True, True])
    steps = torch.tensor([[0, 3], [4, 5]])
    batch = hpo.PackedBatch(torch.tensor([0, 3, 5]), mask, steps=steps)  # tokens 1, 3 and 5 count nowhere
    logp = torch.tensor([1e-6, 7.0, -1.0, 7.0, 0.0, 7.0])
    out = hpo.policy_loss(logp, logp, torch.tensor([1.0, -1.0]), batch, hpo.gates.step_gspo(), weights=torch.ones(2))
    assert out.metrics["tokens"] == 3
    # A gate on tokens reads what lies between steps.
    with pytest.raises(ValueError, match=r"^logp, old_logp: .* got 1, 1 valid tokens"):
        hpo.policy_loss(logp, logp, torch.tensor([1.0, -1.0]), batch)


def test_debug_mode_asks_fake_tensors_for_no_number(monkeypatch):
    monkeypatch.setattr(hpo.metrics, "_DEBUG", True)
    with FakeTensorMode():
        batch = hpo.PackedBatch(torch.zeros(3, dtype=torch.int64), total_tokens=5, validate=False)
        values = torch.zeros(5)
        assert hpo.policy_loss(values, None, torch.ones(2), batch).loss.shape == ()
        assert hpo.value_loss(values, torch.zeros(5), batch).loss.shape == ()
    with FlopCounterMode(display=False), pytest.raises(FloatingPointError):  # other modes have numbers
        hpo.policy_loss(torch.full((2,), math.nan), torch.zeros(2), torch.ones(1), hpo.PackedBatch.from_lengths([2]))


def test_debug_mode_leaves_errors_their_names(monkeypatch):
    monkeypatch.setattr(hpo.metrics, "_DEBUG", True)
    given = (LOG_PROBABILITIES, LOG_PROBABILITIES, torch.ones(1), hpo.PackedBatch.from_lengths([4]), hpo.gates.tis())
    with pytest.raises(ValueError, match=r"^rollout_logp: expected shape \[T\]"):
        hpo.policy_loss(*given, rollout_logp=LOG_PROBABILITIES[:3])
    with pytest.raises(TypeError, match=r"^rollout_logp: expected a tensor"):
        hpo.policy_loss(*given, rollout_logp=LOG_PROBABILITIES.tolist())


def test_debug_mode_reads_the_policies_beside_logits(monkeypatch):
    monkeypatch.setattr(hpo.metrics, "_DEBUG", True)
    logits, targets = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
    batch = hpo.PackedBatch.from_lengths([4]).without_first_tokens()
    hpo.policy_loss_from_logits(logits, targets, LOG_PROBABILITIES, torch.ones(1), batch)
    with pytest.raises(ValueError, match=r"^old_logp: .* got 3 valid tokens"):
        hpo.policy_loss_from_logits(logits, targets, -LOG_PROBABILITIES, torch.ones(1), batch)


def test_only_the_same_metrics_are_equal():
    vector = empty_metrics("cpu")
    for one, other in (
        (Metrics(vector), Metrics(vector.clone())),
        (hpo.LevelMetrics(vector[None], (), False), hpo.LevelMetrics(vector[None].clone(), (), False)),
    ):
        assert one == one and one != other and one in [other, one] and len({one, other}) == 2


def test_what_is_printed_is_not_copied_to_the_host():
    assert repr(Metrics(empty_metrics("meta"))) == "Metrics(on meta; read it by compute())"
    assert repr(hpo.LevelMetrics(empty_metrics("meta")[None], (), False)) == "LevelMetrics(units=(), split=False)"


def test_one_process_has_no_ranks_to_combine_over():
    for metrics in (Metrics(empty_metrics("cpu")), hpo.LevelMetrics(empty_metrics("cpu")[None], (), False)):
        with pytest.raises(ValueError, match=r"^group: .* not initialised; call init_process_group first, or drop"):
            metrics.all_reduce()


def test_unknown_slot():
    with pytest.raises(ValueError, match="no slot named 'ratio'"):
        Metrics(empty_metrics("cpu"))["ratio"]


def reduced(rank):
    vector = empty_metrics("cpu")
    if rank != 1:  # a rank without tokens
        vector = torch.arange(len(SLOTS), dtype=torch.float64) / 3 * (rank + 1)
    return Metrics(vector).all_reduce().vector.tolist()


def test_ranks_agree_to_the_bit(three_ranks):
    vectors = three_ranks(reduced)
    assert vectors[0] == vectors[1] == vectors[2]
    for slot, (reduction, got) in enumerate(zip(SLOTS.values(), vectors[0], strict=True)):
        a, b = slot / 3, slot / 3 * 3
        assert got == {"sum": a + b, "min": min(a, b), "max": max(a, b)}[reduction]


def corrected_call(backend, report, **given):
    """Two corrections on the discrepancy and one on the staleness; one token masked, with NaN in every tensor."""
    device = testing.device_of(backend)
    discrepancy = torch.tensor([0.1, -0.3, 0.2, math.nan, 0.0, 1.0])
    staleness = torch.tensor([0.0, 0.5, -0.2, math.nan, 0.1, 0.0])
    rollout = torch.full((6,), -2.0)
    old = rollout + discrepancy
    token = gates.Correction(gates.Action.MASK, (-0.25, -0.25), (0.25, 0.25))
    row = gates.Correction(gates.Action.BAND, (-9.0, -9.0), (0.2, 0.2), unit=hpo.specs.Unit.TRAJECTORY)
    stale = gates.Correction(gates.Action.MASK, (-0.3, -0.3), (0.3, 0.3), channel=gates.Channel.STALENESS)
    gate = gates.RatioGate("three", gates.Clip((0.8, 0.8), (1.2, 1.2)), corrections=(token, row, stale))
    tensors = [tensor.to(device) for tensor in (old + staleness, old, torch.tensor([1.0, -1.0]), rollout)]
    mask = torch.tensor([True, True, True, False, True, True])
    batch = hpo.PackedBatch(torch.tensor([0, 4, 6]), mask).to(device)
    keywords = {"gate": gate, "rollout_logp": tensors[3], "backend": backend} | given
    return hpo.policy_loss(*tensors[:3], batch, report=report, **keywords)


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_a_correction_does_not_keep_an_infinite_log_ratio(bad, backend):
    logp, batch = torch.full((4,), -1.0), hpo.PackedBatch.from_lengths([4])
    rollout = torch.tensor([-1.0, -1.0, bad, -1.0])
    tensors = [each.to(testing.device_of(backend)) for each in (logp, logp, torch.ones(1), rollout)]
    for gate in (gates.icepop(0.5, 2.0), gates.tis(), gates.mis(), gates.opsm()):
        out = hpo.policy_loss(
            *tensors[:3], batch.to(tensors[0].device), gate, rollout_logp=tensors[3], backend=backend,
            report=("corrections", "tokens"),
        )  # fmt: skip
        seen = out.corrections[0].compute()
        assert out.tokens[2] == 0 and (seen["tokens"], seen["selected_fraction"]) == (4.0, 0.75)


@pytest.mark.parametrize("reference", [False, True])
def test_metrics_of_each_correction(reference, backend):
    out = corrected_call("reference" if reference else backend, ("corrections",))
    token, row, stale = (metrics.compute() for metrics in out.corrections)
    assert [seen["tokens"] for seen in (token, row, stale)] == [5.0] * 3
    assert token["selected_fraction"] == pytest.approx(3 / 5)  # -0.3 and 1.0 are outside
    assert row["selected_fraction"] == pytest.approx(3 / 5)  # means 0 and 0.5
    assert stale["selected_fraction"] == pytest.approx(4 / 5)
    d = torch.tensor([0.1, -0.3, 0.2, 0.0, 1.0], dtype=torch.float64)
    s = torch.tensor([0.0, 0.5, -0.2, 0.1, 0.0], dtype=torch.float64)
    for seen, x in ((token, d), (row, d), (stale, s)):
        ratios = x.exp()
        assert seen["kl_old_k1"] == pytest.approx(-x.mean().item(), abs=1e-6)
        assert seen["kl_old_k2"] == pytest.approx(0.5 * x.square().mean().item(), abs=1e-6)
        assert seen["kl_old_k3"] == pytest.approx((ratios - 1 - x).mean().item(), abs=1e-6)
        assert seen["effective_sample_size"] == pytest.approx((ratios.sum() ** 2 / (5 * (ratios**2).sum())).item())
        assert seen["loss"] == seen["penalty"] == seen["nan_tokens"] == 0.0


@pytest.mark.parametrize("given", [{}, {"token_weight": torch.tensor([1.0, 0.0, 3.0, math.nan, 0.5, 1.0])}])
def test_metrics_of_corrections_change_no_bit(given, backend):
    given = {name: tensor.to(testing.device_of(backend)) for name, tensor in given.items()}
    asked, plain = (corrected_call(backend, report, **given) for report in (("corrections",), ()))
    assert asked.loss.equal(plain.loss) and asked.metrics.vector.equal(plain.metrics.vector)
    assert plain.corrections == ()


def test_metrics_of_corrections_need_a_gate_with_corrections():
    batch = hpo.PackedBatch.from_lengths([1])
    with pytest.raises(ValueError, match=r"report: 'corrections' is for a gate with corrections, got 'ppo_clip'"):
        hpo.policy_loss(torch.zeros(1), None, torch.ones(1), batch, report=("corrections",))
