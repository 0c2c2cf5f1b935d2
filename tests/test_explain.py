"""The explanation of a token at which two kernels differ."""

import math

import pytest
import torch
from breadth import is_interpreted

import hpo_core as hpo
from hpo_core import entropy, gates, testing

LAYOUT = testing.Layout((5, 0, 9, 1), tail=2, masked="some", seed=4)


def example_of(gate):
    return testing.random_policy_loss(7, gate, ["weights"], layout=LAYOUT)


def off_by_one_percent_at(*tokens):
    def kernel(logp, old_logp, advantages, batch, gate, weights, backend="reference", **given):
        out = hpo.policy_loss(logp, old_logp, advantages, batch, gate, weights=weights, backend=backend, **given)
        grad = torch.autograd.grad(out.loss, logp)[0]
        grad[list(tokens)] *= 1.01
        return type("Out", (), {"loss": out.loss, "grad": grad})

    return kernel


@pytest.mark.parametrize(
    "gate",
    [gates.dapo(), gates.gspo(), gates.fiberpo(), gates.reconstructed.fiberpo_domain(), gates.step_gspo()],
    ids=lambda gate: gate.name,
)
def test_kernels_that_agree_have_nothing_to_explain(gate, backend):
    found = testing.explain(example_of(gate), backend)
    assert found.token is None and found.differing == 0 and str(found) == "no token differs"


def test_the_first_token_is_explained():
    """A trajectory gate, whose numbers a loop finds too."""
    example = example_of(gates.gspo(0.05, 0.05))
    valid, row, x = example.valid(), example.row(), example.log_ratio()
    touched = [t for t in valid.nonzero().flatten().tolist() if row[t] == 2][1:4]
    found = testing.explain(example, off_by_one_percent_at(*touched), "reference")
    mean = sum(float(x[t]) for t in range(len(x)) if valid[t] and row[t] == 2) / int((valid & (row == 2)).sum())
    low, high = torch.tensor([0.95, 1.05]).double().log().tolist()
    passes = low <= mean <= high
    assert (found.token, found.row, found.position) == ((touched[0], 2, touched[0] - 5) if passes else (None, -1, -1))
    assert passes, "the seed of the example is meant to leave the row inside its bounds"
    assert found.differing == 3 and found.state == "selected"
    token, trajectory = found.levels
    assert [level.name for level in found.levels] == ["token", "trajectory"]
    assert token.aggregate == pytest.approx(float(x[touched[0]])) and token.value == 0 and token.branch == "inside"
    assert trajectory.aggregate == pytest.approx(mean) == found.facts["z"] and trajectory.branch == "inside"
    mine, theirs = found.results["kernel"][1], found.results["reference"][1]
    assert mine == pytest.approx(1.01 * theirs) and found.results["definition"][1] == pytest.approx(theirs)


def test_a_token_that_the_selection_leaves_out_says_so():
    example = testing.random_policy_loss(7, gates.gspo(), ["weights"], layout=testing.Layout((5, 5), seed=4))
    example = example.given(selection=entropy.Selection(mask=torch.arange(10) != 3))

    def kernel(*given, **keywords):
        out = hpo.policy_loss_and_grad(*given, **keywords)
        out.grad[3] += 1
        return out

    found = testing.explain(example, kernel, "cpu")
    assert (found.token, found.state) == (3, "valid, not selected")


def test_branches_and_channels_have_names():
    example = example_of(gates.fiberpo(0.01))
    found = testing.explain(example, off_by_one_percent_at(*range(17)))
    names = {level.name for level in found.levels}
    assert names == {f"{part} {unit}" for part in ("rising", "falling") for unit in ("token", "trajectory")}
    assert {level.branch for level in found.levels} <= {"inside", "below", "above"}
    for level in found.levels:
        assert (level.value == level.residual) == (level.branch == "inside"), level
    z = sum((1 if level.name.startswith("rising") else -1) * level.value for level in found.levels)
    assert z == pytest.approx(found.facts["z"], abs=1e-12)


def test_a_difference_in_the_last_bit_counts_on_request():
    example = example_of(gates.dapo())

    def one_bit_off(logp, old_logp, advantages, batch, gate, weights, **given):
        out = hpo.policy_loss(logp, old_logp, advantages, batch, gate, weights=weights, backend="reference", **given)
        grad = torch.autograd.grad(out.loss, logp)[0]
        return type("Out", (), {"loss": out.loss, "grad": torch.nextafter(grad, torch.tensor(9.0))})

    assert testing.explain(example, one_bit_off).token is None
    found = testing.explain(example, one_bit_off, bitwise=True)
    assert found.token is not None and "one_bit_off" in str(found) and "definition" in str(found)


def test_a_kernel_without_losses_of_tokens_is_compared_by_its_gradient():
    """policy_loss_and_grad, which takes a report but not that of tokens, alone and in a function of one's own."""
    example = example_of(gates.dapo())
    assert testing.explain(example, hpo.policy_loss_and_grad).token is None

    def kernel(*given, **keywords):
        out = hpo.policy_loss_and_grad(*given, **keywords)
        return out._replace(grad=1.01 * out.grad)

    found = testing.explain(example, kernel)
    loss, grad = found.results["kernel"]
    assert math.isnan(loss) and grad == pytest.approx(1.01 * found.results["definition"][1]) != 0
    with pytest.raises(ValueError, match="rollout_logp: the gate"):
        testing.explain(example.given(rollout_logp=example.logp), kernel)


def test_a_gradient_of_another_shape_is_named():
    def kernel(*given, **keywords):
        out = hpo.policy_loss_and_grad(*given, **keywords)
        return out._replace(grad=out.grad[1:])

    with pytest.raises(AssertionError, match=r"expected \.grad of shape \[17\], that of logp; .* one of shape \[16\]"):
        testing.explain(example_of(gates.dapo()), kernel)


@pytest.mark.parametrize("window", [entropy.ares(3, "0.5"), entropy.forking_tokens("0.5")], ids=lambda w: w.name)
def test_a_threshold_that_fit_returned_differs_nowhere(window, backend):
    """The token at the threshold is selected by the scores that it was fitted on; in float64 a sum may lie below it."""
    device, draw = testing.device_of(backend), torch.Generator().manual_seed(0)
    for seed in range(4 if is_interpreted(backend) else 20):
        example = testing.random_policy_loss(seed, gates.dapo(), ["weights", "kl"])
        values = 3 * torch.rand(example.logp.shape, generator=draw)
        state = window.fit(values.to(device), example.batch.to(device), backend=backend)
        example = example.given(entropy=values, window=window, threshold=state.to("cpu"))
        example = testing.move(example, device)
        assert example.keywords["threshold"].threshold.device.type == device
        found = testing.explain(example, backend)
        assert found.token is None, (seed, str(found))


def test_the_token_at_a_threshold_is_explained():
    """A function gets the threshold as the caller gave it."""
    example, window = example_of(gates.dapo()), entropy.ares(3, "0.5")
    values = 3 * torch.rand(example.logp.shape, generator=torch.Generator().manual_seed(0))
    state = window.fit(values, example.batch)
    (at,) = (window.score(values, example.batch) == state.threshold).nonzero().flatten().tolist()

    def kernel(*given, threshold, **keywords):
        assert threshold == state
        out = hpo.policy_loss_and_grad(*given, threshold=threshold, **keywords)
        out.grad[at] += 1
        return out

    found = testing.explain(example.given(entropy=values, window=window, threshold=state), kernel, "cpu")
    assert (found.token, found.differing, found.state) == (at, 1, "selected")


def test_what_cannot_be_explained_is_refused():
    with pytest.raises(ValueError, match=r"a: expected a function or one of reference, .*, got 'tritn'"):
        testing.explain(example_of(gates.dapo()), "tritn")
    with pytest.raises(ValueError, match="a: expected the name of a backend or a function, got 3"):
        testing.explain(example_of(gates.dapo()), 3)
    with pytest.raises(TypeError, match="example: expected a PolicyLossExample"):
        testing.explain("dapo", "cpu")


@pytest.mark.skipif(bool(hpo.backends()["cuda"]), reason="cuda is available")
def test_a_backend_that_is_not_available_says_why():
    with pytest.raises(ValueError, match="b: 'cuda' is not available: "):
        testing.explain(example_of(gates.dapo()), "cpu", "cuda")


def test_an_example_that_is_no_packed_call_is_refused():
    mask = torch.tensor([[True, False], [True, True]])
    logp, batch = torch.tensor([[-1.0, -2.0], [-0.5, -0.25]]), hpo.PackedBatch.from_padded(mask)
    example = testing.PolicyLossExample(logp.flatten(), None, torch.ones(2), batch, gates.dapo(), {})
    assert testing.explain(example, "cpu").token is None
    for wrong, message in (
        ({"gate": None}, r"example.gate: expected a RatioGate, got .*NoneType.*; .*gates.ppo_clip\(\)"),
        ({"batch": mask}, r"example.batch: expected a PackedBatch, got .*; take PackedBatch.from_padded\(mask\)"),
        ({"logp": logp}, r"example.logp: expected shape \[T\] .*, got \[2, 2\]; flatten"),
        ({"keywords": {"weight": torch.ones(2)}}, "example.keywords: expected arguments of policy_loss, got weight"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            testing.explain(example._replace(**wrong), "cpu")


def test_padded_kernels_are_given_rectangles():
    def kernel(logp, old_logp, advantages, mask, **given):
        assert logp.shape == mask.shape == given["selection"].mask.shape == (2, 5)
        return hpo.policy_loss_and_grad(logp, old_logp, advantages, mask, **given)

    def wrong(*given, **keywords):
        out = kernel(*given, **keywords)
        return out._replace(grad=1.01 * out.grad)

    rows = testing.random_policy_loss(7, gates.gspo(), ["weights", "kl"], layout=testing.Layout((5, 5), seed=4))
    rows = rows.given(selection=entropy.Selection(mask=torch.arange(10) != 3, weight=torch.arange(10.0)))
    assert testing.explain(rows, kernel, "cpu", padded=True).token is None
    assert "wrong" in testing.explain(rows, wrong, padded=True).results
    for example, message in (
        (example_of(gates.gspo()), r"expected rows of equal length, .* got lengths \[5, 0, 9, 1\] of 17 tokens; take "),
        (example_of(gates.step_gspo()), "a mask .* has no steps"),
        (
            rows._replace(batch=rows.batch.replace(trajectory_ids=torch.tensor([0, 0]))),
            "expected rows .*, each a trajectory, .* got",
        ),
    ):
        with pytest.raises(ValueError, match=f"^padded: {message}"):
            testing.explain(example, kernel, padded=True)


def test_errors_of_a_caller_s_kernel_pass_as_they_are():
    class ShapeError(ValueError):
        def __init__(self, code, text):
            super().__init__(code, text)

    def kernel(*_, **__):
        raise ShapeError(7, "bad tile")

    with pytest.raises(ShapeError) as raised:
        testing.explain(example_of(gates.dapo()), kernel)
    assert raised.value.args == (7, "bad tile")


def test_a_backend_among_the_keywords():
    example = example_of(gates.dapo()).given(backend="cpu")
    assert testing.explain(example, off_by_one_percent_at(0)) is not None
