"""hpo_core.plot: the numbers of what is drawn, against formulas and sums written here; and pictures of pages."""

import inspect
import math
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from lazily import script

import hpo_core as hpo
from hpo_core import gates, plot
from hpo_core.gates import Channel, Drop, Identity, Level, LogClip, RatioGate, Rollback, Routing, Tanh, Unit
from hpo_core.plot.canvas import BLUE, GREY

pytest.importorskip("matplotlib").use("agg")
colors, pyplot = (pytest.importorskip(f"matplotlib.{name}") for name in ("colors", "pyplot"))

ROOT = Path(__file__).parents[1]
TWO_ROWS = hpo.PackedBatch.from_lengths([4, 3])
BUDGETS = RatioGate("budgets", LogClip((-0.2, -0.2), (0.2, 0.2)), (Level(LogClip((-0.1, -0.1), (0.1, 0.1))),))
X = torch.tensor([0.3, 0.1, -0.1, 0.5, -0.4, 0.2, 0.0])
OLD = torch.full((7,), -1.0)
A = torch.tensor([1.0, -1.0])


@pytest.fixture(autouse=True)
def _closed():
    yield
    pyplot.close("all")


def heights(axes, label):
    """The heights of the bars with a label, by place."""
    (container,) = [each for each in axes.containers if each.get_label() == label]
    return {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in container}


def close(found, expected):
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-6)


def levels_of(axes):
    """The heights of horizontal lines, without the one at 0."""
    return sorted(line.get_ydata()[0] for line in axes.lines if line.get_ydata()[0] != 0)


def lines_of(axes):
    """The ends of each dashed line, and its height."""
    return [(list(line.get_xdata()), line.get_ydata()[0]) for line in axes.lines if line.get_linestyle() == "--"]


# ----------------------------------------------------------------------------------------------------------- gate_curve


def curves(axes):
    lines = {line.get_label(): line for line in axes.lines}
    return torch.tensor(lines["A = 1"].get_xdata()), *(torch.tensor(lines[f"A = {a}"].get_ydata()) for a in (1, -1))


def clipped(r, a, low, high):
    passes = (r <= high) if a > 0 else (r >= low)
    return torch.where(passes, a * r, 0.0)


@pytest.mark.parametrize(
    ("gate", "slope"),
    [
        (gates.ppo_clip(0.3, 0.25), lambda r, a: clipped(r, a, 0.7, 1.25)),
        (gates.reinforce(), lambda r, a: torch.full_like(r, a)),
        (gates.cispo(1.1), lambda r, a: a * r.clamp(max=1.1)),
        (gates.spo(0.4), lambda r, a: r * (a - abs(a) * (r - 1) / 0.4)),
        (gates.sapo(1.0, 2.0), lambda r, a: a * 4 * r * sigmoid_slope((1.0 if a > 0 else 2.0) * (r - 1))),
        (gates.gspo(0.3, 0.25), lambda r, a: clipped(r, a, 0.7, 1.25)),
        (gates.step_gspo(0.3, 0.25), lambda r, a: clipped(r, a, 0.7, 1.25)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_curve_is_the_slope_of_the_objective(gate, slope):
    for options in ({}, {"tokens": 5}):
        r, rising, falling = curves(plot.gate_curve(gate, points=301, **options))
        assert (r[0], r[-1], len(r)) == (0.5, 1.6, 301)
        torch.testing.assert_close(rising, slope(r, 1.0), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(falling, slope(r, -1.0), rtol=1e-6, atol=1e-9)


def sigmoid_slope(u):
    return torch.sigmoid(u) * (1 - torch.sigmoid(u))


def test_a_token_alone_meets_its_own_gate_and_hardly_that_of_the_level():
    gate = RatioGate("two", LogClip((-9, -9), (0.3, 0.3)), (Level(LogClip((-9, -9), (0.01, 0.01)), Routing.STOPPED),))
    r, rising, _ = curves(plot.gate_curve(gate, tokens=100, alone=True, ratios=(0.8, 1.6), points=301))
    x = r.log()
    z = (x - x / 100).clamp(max=0.3) + (x / 100).clamp(max=0.01)
    expected = torch.where(x - x / 100 <= 0.3, z.exp(), 0.0)
    torch.testing.assert_close(rising, expected)
    _, together, _ = curves(plot.gate_curve(gate, tokens=100, ratios=(0.8, 1.6), points=301))
    torch.testing.assert_close(together, x.clamp(max=0.01).exp())


def test_a_gate_on_groups_and_domains_has_a_curve():
    levels = (Level(LogClip((-9, -9), (0.1, 0.1)), unit=Unit.GROUP), Level(Identity(), unit=Unit.DOMAIN))
    gate = RatioGate("wide", Drop(), levels)
    _, rising, _ = curves(plot.gate_curve(gate, points=11))
    assert rising.isfinite().all()


def test_curves_are_drawn_on_the_axes_that_are_given():
    axes = pyplot.figure().subplots()
    assert plot.gate_curve(gates.dapo(), axes=axes) is axes and axes.get_title(loc="left") == "dapo"
    assert "ratio" in axes.get_xlabel() and "logp" in axes.get_ylabel()


# ----------------------------------------------------------------------------------------------------------- trajectory


def test_the_worked_example_of_the_page():
    figure = plot.trajectory(OLD[:4] + X[:4], OLD[:4], A[:1], hpo.PackedBatch.from_lengths([4]), BUDGETS)
    ratios, answer, token, z = figure.axes
    close(heights(ratios, "log-ratio x"), {0: 0.3, 1: 0.1, 2: -0.1, 3: 0.5})
    (mean,) = ratios.collections
    assert mean.get_label() == "aggregate, trajectory"
    assert mean.get_segments()[0].flatten().tolist() == pytest.approx([-0.5, 0.2, 3.5, 0.2])
    close(heights(answer, "residual"), dict.fromkeys(range(4), 0.2))
    close(heights(answer, "gated"), dict.fromkeys(range(4), 0.1))
    assert levels_of(answer) == pytest.approx([-0.1, 0.1])
    close(heights(token, "residual"), {0: 0.1, 1: -0.1, 2: -0.3, 3: 0.3})
    close(heights(token, "gated"), {0: 0.1, 1: -0.1, 2: -0.2, 3: 0.2})
    assert levels_of(token) == pytest.approx([-0.2, 0.2])
    close(heights(z, "gated z"), {0: 0.2, 1: 0.0, 2: -0.1, 3: 0.3})
    close(heights(z, "log-ratio x"), {0: 0.3, 1: 0.1, 2: -0.1, 3: 0.5})


MASK = torch.tensor([1, 1, 1, 1, 0, 1, 1])
STEPS = torch.tensor([[0, 2], [2, 4], [4, 6], [6, 7]])


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize(
    "gate",
    [
        BUDGETS,
        gates.fiberpo(0.2, (0.1, 0.05)),
        gates.gspo(0.1, 0.1),
        gates.ppo_clip(),
        RatioGate(
            "three",
            LogClip((-0.2, -0.1), (0.2, 0.1)),
            (
                Level(Tanh(0.1), unit=Unit.STEP),
                Level(Rollback((0.05, 0.05), slope=1.0)),
                Level(Identity(), unit=Unit.GROUP),
            ),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_is_drawn_adds_up_to_the_loss(gate, row):
    """z is the logarithm of the objective of the kernels, and x the sum of all residuals."""
    batch = hpo.PackedBatch.from_lengths([4, 3], steps=STEPS, group_ids=torch.tensor([0, 0]), mask=MASK)
    figure = plot.trajectory(OLD + X, OLD, A, batch, gate, row=row)
    panels = figure.axes[1:-1]
    begin, end = batch.cu_seqlens[row : row + 2].tolist()
    valid = [at for at in range(end - begin) if MASK[begin + at]]
    residuals = [heights(panel, "residual") for panel in panels]
    close({at: sum(each[at] for each in residuals) for at in valid}, {at: float(X[begin + at]) for at in valid})
    gated = [heights(panel, "gated") for panel in panels]
    z = heights(figure.axes[-1], "gated z")
    close({at: sum(each[at] for each in gated) for at in valid}, z)
    if gate.name != "ppo_clip":  # of PPO's surrogate the minimum is taken
        out = hpo.policy_loss(OLD + X, OLD, A, batch, gate, report=("tokens",))
        objective = (-out.tokens / A.repeat_interleave(torch.tensor([4, 3])))[begin:end].log()
        close(z, {at: float(objective[at]) for at in valid})


def test_a_budget_is_that_of_the_sign_of_the_advantage():
    gate = RatioGate(
        "signs", LogClip((-0.2, -0.3), (0.4, 0.5)), (Level(Rollback((0.06, 0.07), slope=1.0)),), split=True
    )
    batch = hpo.PackedBatch.from_lengths([4, 3])
    for row, (low, high) in enumerate([(-0.2, 0.4), (-0.3, 0.5)]):
        panels = plot.trajectory(OLD + X, OLD, A, batch, gate, row=row).axes[1:-1]
        found = {panel.get_title(loc="left").split(",")[0]: levels_of(panel) for panel in panels}
        assert found["token (rising)"] == pytest.approx([low, high])
        assert found["token (falling)"] == pytest.approx([-high, -low])
        assert found["trajectory (rising)"] == pytest.approx([-0.06, 0.06])
        assert found["trajectory (falling)"] == pytest.approx([-0.07, 0.07])
    ppo = plot.trajectory(OLD + X, OLD, A, batch, gates.ppo_clip(0.2, 0.3)).axes[1]
    assert levels_of(ppo) == pytest.approx([math.log(1.3)])


def test_each_token_has_the_budget_that_its_gate_knows():
    """Bounds that the call gives take the place of the gate's, and advantages of tokens differ in sign."""
    batch, bounds = hpo.PackedBatch.from_lengths([4]), (None, torch.tensor([1.05, 1.05, 1.1, 1.1]))
    inputs = {"gate_inputs": gates.GateInputs(bounds=bounds)}
    drawn = plot.trajectory(OLD[:4] + X[:4], OLD[:4], A[:1], batch, gates.ppo_clip(0.2, 0.3), **inputs)
    assert lines_of(drawn.axes[1]) == [
        ([-0.5, 1.5], pytest.approx(math.log(1.05))), ([1.5, 3.5], pytest.approx(math.log(1.1))),
    ]  # fmt: skip
    signs = torch.tensor([1.0, 1.0, -1.0, 1.0])
    drawn = plot.trajectory(OLD[:4] + X[:4], OLD[:4], signs, batch, gates.ppo_clip(0.2, 0.3), advantage_level="token")
    lower, upper = math.log(0.8), math.log(1.3)
    assert lines_of(drawn.axes[1]) == [
        ([1.5, 2.5], pytest.approx(lower)), ([-0.5, 1.5], pytest.approx(upper)), ([2.5, 3.5], pytest.approx(upper)),
    ]  # fmt: skip
    masked = hpo.PackedBatch.from_lengths([4], mask=torch.tensor([True, False, True, True]))
    drawn = plot.trajectory(OLD[:4] + X[:4], OLD[:4], A[:1], masked, gates.ppo_clip(0.2, 0.3))
    assert lines_of(drawn.axes[1]) == [
        ([-0.5, 0.5], pytest.approx(upper)), ([1.5, 3.5], pytest.approx(upper)),
    ]  # fmt: skip


def test_a_padded_batch_with_labels_and_a_graph():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    logp = (OLD[:6] + X[:6]).reshape(2, 3).requires_grad_()
    figure = plot.trajectory(logp, OLD[:6].reshape(2, 3), A, mask, BUDGETS, row=1, labels=["a", "b", "c"])
    close(heights(figure.axes[0], "log-ratio x"), {0: 0.5, 1: -0.4, 2: 0.2})
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == ["a", "b", "c"]
    assert logp.grad is None


def test_the_options_of_a_loss_are_taken_and_change_nothing():
    options = {"report": ("tokens", "levels"), "backend": "cpu", "weights": None, "token_mask": None}
    drawn = [plot.trajectory(OLD + X, OLD, A, TWO_ROWS, BUDGETS, **each) for each in ({}, options)]
    assert [heights(figure.axes[-1], "gated z") for figure in drawn][1:] == [heights(drawn[0].axes[-1], "gated z")]


@pytest.mark.parametrize(
    ("gate", "options", "title"),
    [
        (gates.decoupled(), {"rollout_logp": OLD - 0.5}, "logp - old_logp"),
        (gates.dppo_tv(channel=Channel.TOTAL), {"rollout_logp": OLD - 0.5}, "logp - rollout_logp"),
        (gates.hispo(), {"rollout_logp": OLD - 0.5}, "logp - rollout_logp"),
        (RatioGate("total", Identity(), channel=Channel.TOTAL), {}, "logp - old_logp"),
        (None, {}, "logp - old_logp"),
    ],
)
def test_the_title_names_the_log_probabilities_that_are_subtracted(gate, options, title):
    axes = plot.trajectory(OLD + X, OLD, A, TWO_ROWS, gate, **options).axes[0]
    assert axes.get_title(loc="left") == f"log-ratios, {title}"
    subtracted = {"old_logp": OLD, **options}[title.removeprefix("logp - ")]
    close(heights(axes, "log-ratio x"), dict(enumerate((OLD + X - subtracted)[:4].tolist())))


def test_of_censored_deviations_these_and_the_budget_of_their_sum_are_drawn():
    gate, mask = gates.reconstructed.apc(0.1), torch.tensor([1, 1, 0, 1, 1, 1, 1])
    batch = hpo.PackedBatch.from_lengths([4, 3], mask=mask)
    figure = plot.trajectory(OLD + X, OLD, A, batch, gate)
    deviations = {at: abs(math.expm1(float(X[at]))) for at in (0, 1, 3)}
    total = sum(deviations.values())
    first, answer, token, last = figure.axes
    close(heights(first, "deviation |e^x - 1|"), deviations)
    close(heights(answer, "residual"), dict.fromkeys(deviations, total))
    close(heights(answer, "gated"), dict.fromkeys(deviations, 3 * 0.1 - total))
    assert lines_of(answer) == [([-0.5, 1.5], pytest.approx(0.3)), ([2.5, 3.5], pytest.approx(0.3))]
    assert lines_of(token) == []
    close(heights(last, "deviation |e^x - 1|"), deviations)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[0] == "deviations |e^x - 1|, x = logp - old_logp"
    assert titles[-1] == "z, the sum of the gated residuals"
    assert "log-ratio" not in " ".join([*titles, figure.get_supylabel()])


# --------------------------------------------------------------------------------------------------------- batch_layout


def areas(axes, level):
    """Left, right and whether hatched, of the rectangles of a level."""
    (height,) = [at for at, label in enumerate(axes.get_yticklabels()) if label.get_text() == level]
    found = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == height]
    return [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_hatch() is not None) for bar in found]


def test_the_levels_of_a_batch_lie_over_its_tokens():
    batch = hpo.PackedBatch(
        torch.tensor([0, 4, 4, 7]),
        mask=torch.tensor([1, 1, 0, 1, 1, 1, 1, 0]),
        steps=torch.tensor([[0, 2], [3, 4], [4, 7]]),
        trajectory_ids=torch.tensor([5, 6, 6]),
        group_ids=torch.tensor([8, 8, 8]),
        domain_ids=torch.tensor([-1, -1, -1]),
    )
    axes = plot.batch_layout(batch)
    names = ["token", "step", "row", "trajectory", "group", "domain"]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert areas(axes, "token") == [(at, at + 1, at == 2) for at in range(7)]
    assert areas(axes, "step") == [(0, 2, False), (3, 4, False), (4, 7, False)]
    assert areas(axes, "row") == [(0, 4, False), (4, 7, False)]
    assert areas(axes, "trajectory") == [(0, 4, False), (4, 7, False)]
    assert areas(axes, "group") == [(0, 7, False)]
    assert areas(axes, "domain") == []
    assert axes.get_xlim() == (0, 8)
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2", "0", "2", "5", "6", "8"]


def test_rows_of_a_batch_and_segments_in_several_places():
    ids = torch.tensor([3, 4, 3, 4])
    batch = hpo.PackedBatch.from_lengths([2, 2, 2, 2], group_ids=ids)
    axes = plot.batch_layout(batch, rows=(1, 4))
    assert areas(axes, "group") == [(2, 4, False), (4, 6, False), (6, 8, False)]
    faces = [bar.get_facecolor() for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == 2]
    assert faces[0] == faces[2] != faces[1]
    assert areas(plot.batch_layout(torch.ones(2, 3, dtype=torch.bool)), "row") == [(0, 3, False), (3, 6, False)]


def test_tokens_too_narrow_to_tell_apart_are_drawn_as_runs():
    mask = torch.ones(8000, dtype=torch.bool)
    mask[3000:5000] = False
    axes = plot.batch_layout(hpo.PackedBatch.from_lengths([4000, 4000], mask=mask))
    assert areas(axes, "token") == [(0, 3000, False), (3000, 5000, True), (5000, 8000, False)]


# ------------------------------------------------------------------------------------------------------- entropy_window

H = torch.tensor([0.1, 0.9, 0.2, 0.0, 0.3, 2.0, 0.4, 0.8, 0.5, 0.6])


def filled(axes, colour):
    return {
        round(bar.get_x() + bar.get_width() / 2): bar.get_height()
        for bar in axes.patches
        if bar.get_facecolor()[:3] == colors.to_rgb(colour) and bar.get_alpha() is None
    }


def test_selected_tokens_are_filled_and_the_threshold_is_that_of_the_step():
    batch = hpo.PackedBatch.from_lengths([4, 6], mask=torch.tensor([1] * 9 + [0]))
    window = hpo.entropy.forking_tokens("0.4")
    axes = plot.entropy_window(H, batch, window, row=1)
    threshold = sorted(H[:9].tolist())[math.ceil(0.6 * 8)]
    assert levels_of(axes) == pytest.approx([threshold])
    expected = {at: float(H[4 + at]) for at in range(5)}
    close(filled(axes, BLUE), {at: h for at, h in expected.items() if h >= threshold})
    close(filled(axes, GREY), {at: h for at, h in expected.items() if h < threshold})
    labelled = plot.entropy_window(H, batch, window, row=1, labels="abcdef").get_xticklabels()
    assert [label.get_text() for label in labelled] == list("abcdef")
    fitted = window.fit(H, batch)._replace(threshold=torch.tensor([1.5]))
    assert filled(plot.entropy_window(H, batch, window, fitted, row=1), BLUE).keys() == {1}


def test_window_means_are_dots_and_what_selected_windows_hold_is_shaded():
    batch = hpo.PackedBatch.from_lengths([4, 6])
    axes = plot.entropy_window(H, batch, hpo.entropy.ares(3, "0.8"), row=1)
    means = {at: float(H[4 + at : 7 + at].mean()) for at in range(4)}
    everywhere = sorted([*means.values(), *(float(H[at : at + 3].mean()) for at in range(2))])
    threshold = everywhere[math.ceil(0.8 * 5)]
    dots = {line.get_label(): line for line in axes.lines if "mean" in line.get_label()}
    for label, keep in (("selected", lambda mean: mean >= threshold), ("not selected", lambda mean: mean < threshold)):
        x, y = dots[f"window mean, {label}"].get_data()
        close(dict(zip(x, y, strict=True)), {at: mean for at, mean in means.items() if keep(mean)})
    shaded = {round(patch.get_x() + 0.5) for patch in axes.patches if patch.get_alpha() == 0.25}
    assert shaded == {at + k for at, mean in means.items() if mean >= threshold for k in range(3)}


def test_what_a_window_of_any_width_holds_is_shaded_but_no_masked_token():
    batch = hpo.PackedBatch.from_lengths([4], mask=torch.tensor([True, False, True, False]))
    window = hpo.entropy.EntropyWindow("row", Fraction(1, 2), -(2**62), 2**62, boundary="shrink")
    axes = plot.entropy_window(H[:4], batch, window)
    assert {round(patch.get_x() + 0.5) for patch in axes.patches if patch.get_alpha() == 0.25} == {0, 2}


# ----------------------------------------------------------------------------------------------------- names and labels

DOLLARS = ["$$", "$\\frac$", "$x$", "a"]


@pytest.mark.parametrize("name", ["trajectory", "entropy_window"])
def test_dollars_in_labels_are_drawn_as_they_are(name):
    batch = hpo.PackedBatch.from_lengths([4])
    if name == "trajectory":
        axes = plot.trajectory(OLD[:4] + X[:4], OLD[:4], A[:1], batch, BUDGETS, labels=DOLLARS).axes[-1]
    else:
        axes = plot.entropy_window(H[:4], batch, hpo.entropy.forking_tokens("0.4"), labels=DOLLARS)
    drawn = drawn_texts(axes.figure)
    assert [drawn.count(label) for label in DOLLARS] == [1, 1, 1, 1]


def test_dollars_in_names_are_drawn_as_they_are():
    gate = RatioGate("$\\frac$", Identity())
    assert gate.name in drawn_texts(plot.gate_curve(gate, points=3).figure)
    window = hpo.entropy.EntropyWindow("$\\frac$", Fraction(1, 2))
    axes = plot.entropy_window(H[:4], hpo.PackedBatch.from_lengths([4]), window)
    assert window.name in drawn_texts(axes.figure)
    own = plot.gate_curve(gates.dapo(), points=3)
    own.set_title("$x^2$", loc="left")
    assert "$x^2$" not in drawn_texts(own.figure)  # of a plain name the caller may make a formula


def drawn_texts(figure):
    """The texts that are drawn as they are; formulas are drawn as parts."""
    figure.canvas.draw()
    renderer, found = figure.canvas.get_renderer(), []
    draw_text = renderer.draw_text
    renderer.draw_text = lambda gc, x, y, text, *rest, ismath=False, **others: (
        found.append(text) if not ismath else None,
        draw_text(gc, x, y, text, *rest, ismath=ismath, **others),
    )
    figure.draw(renderer)
    return found


# ----------------------------------------------------------------------------------------------------------- what fails

TEN, NO_ROWS = (hpo.PackedBatch.from_lengths(lengths) for lengths in ([10], []))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.gate_curve("dapo"), "gate: expected a RatioGate"),
        (lambda: plot.gate_curve(gates.dapo(), old_logp="-2"), "old_logp: expected a number"),
        (lambda: plot.trajectory(OLD, OLD, A, TWO_ROWS, row="0"), "row: expected an integer"),
        (lambda: plot.trajectory(OLD.to_sparse(), OLD, A, TWO_ROWS), "logp: expected a dense tensor"),
        (lambda: plot.trajectory(OLD.to("meta"), OLD, A, TWO_ROWS), "logp: expected"),
        (lambda: plot.entropy_window(H[:9], TEN, hpo.entropy.ares()), "entropy: expected"),
        (lambda: plot.gate_curve(gates.dapo(), ratios=(0.0, 2.0)), "ratios: expected 0 < least"),
        (
            lambda: plot.gate_curve(gates.dapo(), ratios=(1.0, math.inf)),
            "ratios: expected 0 < least < greatest < inf, g",
        ),
        (lambda: plot.gate_curve(gates.dapo(), old_logp=math.inf), "old_logp: expected a finite number"),
        (lambda: plot.gate_curve(gates.dapo(), old_logp=-math.inf), "old_logp: expected a finite number"),
        (lambda: plot.gate_curve(gates.dapo(), alone=True), "tokens: expected at least 1"),
        (lambda: plot.gate_curve(gates.dapo(), points=1), "points: expected at least 2"),
        (lambda: plot.gate_curve(gates.hapo_clip()), "gate_inputs: the gate 'hapo_clip' needs bounds"),
        (lambda: plot.trajectory(OLD, OLD, A, TWO_ROWS, row=2), "row: expected 0 to 1"),
        (lambda: plot.trajectory(OLD, OLD, A, TWO_ROWS, labels=["a"]), "labels: expected one"),
        (
            lambda: plot.trajectory(OLD, OLD, A, TWO_ROWS, labels=7),
            "labels: expected one for each of 4 tokens, got 7; p",
        ),
        (
            lambda: plot.trajectory(OLD[:0], None, A[:0], NO_ROWS),
            "batch: expected one with a row to draw, got one without rows",
        ),
        (lambda: plot.trajectory(OLD, OLD[:4], A, TWO_ROWS), "old_logp: expected"),
        (lambda: plot.trajectory("x", OLD, A, TWO_ROWS), "logp: expected"),
        (lambda: plot.trajectory(OLD.half(), OLD, A, TWO_ROWS), "logp: expected dtype float32 or float64, got float16"),
        (lambda: plot.trajectory(OLD.bfloat16(), OLD, A, TWO_ROWS), "logp: expected dtype float32 or float64, got bf"),
        (lambda: plot.trajectory(OLD.long(), OLD, A, TWO_ROWS), "logp: expected dtype float32 or float64, got int64"),
        (lambda: plot.trajectory(OLD, OLD, A, TWO_ROWS, backend="no"), "backend: expected one of"),
        (lambda: plot.trajectory(OLD, OLD, A, TWO_ROWS, report=("no",)), "report: expected some of"),
        (lambda: plot.trajectory(OLD, OLD, A, TWO_ROWS, report=("levels",)), "report: 'levels' is for a gate with"),
        (lambda: plot.trajectory(OLD, OLD, A, TWO_ROWS, token_masks=1), "token_masks: trajectory has no such argument"),
        (lambda: plot.trajectory(OLD, OLD, A, TWO_ROWS, axes=1), "axes: trajectory has no such argument"),
        (lambda: plot.batch_layout(TWO_ROWS, rows=(1, 3)), "rows: expected 0 <= first"),
        (lambda: plot.batch_layout("x"), "batch: expected a PackedBatch"),
        (lambda: plot.batch_layout(hpo.PackedBatch.from_lengths([])), "batch: expected a row with tokens"),
        (lambda: plot.batch_layout(hpo.PackedBatch.from_lengths([0])), "batch: expected a row with tokens"),
        (lambda: plot.batch_layout(hpo.PackedBatch.from_lengths([1, 0, 1]), rows=(1, 2)), "rows: expected rows with"),
        (lambda: plot.batch_layout(TWO_ROWS, rows=0), "rows: expected a pair of integers, got 0"),
        (lambda: plot.batch_layout(TWO_ROWS, rows=(0.0, 1.0)), "rows[0]: expected an integer, got 0.0"),
        (lambda: plot.entropy_window(H, TEN, "ares"), "window: expected one of"),
        (lambda: plot.entropy_window(H, TEN, hpo.entropy.ares(), row=1), "row: expected 0 to 0"),
        (
            lambda: plot.entropy_window(H[:0], NO_ROWS, hpo.entropy.ares()),
            "batch: expected one with a row to draw, got one without rows",
        ),
        (
            lambda: plot.entropy_window(H, TEN, hpo.entropy.ares(), labels=7),
            "labels: expected one for each of 10 tokens",
        ),
        (lambda: plot.entropy_window(H, TEN, hpo.entropy.ares(), labels="ab"), "labels: expected one for each of 10"),
        (lambda: plot.gate_curve(gates.dapo(), axes=3), "axes: expected one matplotlib Axes or None, got 3; pass"),
        (lambda: plot.batch_layout(TWO_ROWS, axes=[3]), "axes: expected one matplotlib Axes or None, got [3]; pass"),
        (lambda: plot.entropy_window(H, TEN, hpo.entropy.ares(), axes="x"), "axes: expected one matplotlib Axes"),
    ],
)
def test_errors_name_the_argument(draw, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        draw()
    assert pyplot.get_fignums() == []  # no figure stays behind


@pytest.mark.parametrize("name", plot.__all__)
def test_without_matplotlib_the_error_says_what_to_install(name, monkeypatch):
    for module in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = {
        "gate_curve": (gates.dapo(),), "trajectory": (OLD, OLD, A, TWO_ROWS), "batch_layout": (TWO_ROWS,),
        "entropy_window": (OLD, TWO_ROWS, hpo.entropy.ares()),
    }[name]  # fmt: skip
    with pytest.raises(ImportError, match=rf"^plot\.{name}: drawing needs matplotlib: pip install matplotlib"):
        getattr(plot, name)(*arguments)


# --------------------------------------------------------------------------------------------- the pictures of the page

SCRIPT = ROOT / "examples/gate_pictures.py"
NAMES = ("gates.png", "trajectory.png", "batch.png", "every_gate.png")


def test_the_pages_show_pictures_that_are_small():
    pages = [(ROOT / f"docs/{name}.md").read_text() for name in ("gating_explained", "gates")]
    for name in NAMES:
        path = ROOT / "docs/pictures" / name
        assert any(f"(pictures/{name})" in page for page in pages)
        size = path.stat().st_size
        assert path.read_bytes().startswith(b"\x89PNG")
        assert size < 120_000, f"{name} has {size} bytes: draw it with fewer dots per inch"


def test_every_gate_that_reads_the_batch_alone_has_a_panel():
    made = {name: getattr(gates, name) for name in gates.__all__ if name.islower() and name != "compose"}
    made = {name: make for name, make in made.items() if inspect.isfunction(make) and is_constructor(make)}
    alone = {name for name, make in made.items() if not make().required and not make().needs_rollout}
    shown = {gate.name for found in script(SCRIPT).EVERY.values() for gate in found}
    assert len(shown) > 20 and alone - shown == {"opsm"} and shown <= made.keys()


def is_constructor(make):
    return inspect.signature(make).return_annotation == "RatioGate"


def test_the_script_draws_them(tmp_path, capsys):
    script(SCRIPT).main(["--output", str(tmp_path)])
    assert capsys.readouterr().out.count("written") == len(NAMES)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in NAMES)
