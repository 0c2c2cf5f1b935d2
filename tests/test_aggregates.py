"""Aggregates of segments from elsewhere: given in place of what the tokens of the call add up to."""

import pytest
import torch
from hierarchies import LENGTHS, STEP, TRAJECTORY, Step, levels, stopped_group

import hpo_core as hpo
from hpo_core.gates import Aggregate, Clip, Drop, GateInputs, Head, Identity, Level, RatioGate, Routing, Tanh

KNOWN = [aggregate for aggregate in Aggregate if aggregate is not Aggregate.BALANCED]


def given_loss(step, aggregate, split, given):
    """The loss under ``stopped_group`` in float64, written out; given: by channel and group id."""
    logp = step.logp.double().requires_grad_()
    row = torch.repeat_interleave(step.batch.cu_seqlens.diff())
    valid = step.batch.mask.double()
    trajectory, group = step.batch.trajectory_ids[row], step.batch.group_ids[row]
    trajectory = trajectory - trajectory.min()
    group = torch.where(group < 0, 10 + trajectory, group)  # each in no group by itself
    x = logp - step.old_logp.double()

    def total(of, ids):
        return torch.zeros(40, dtype=torch.float64).index_add(0, ids, of * valid)[ids]

    z = torch.zeros_like(x)
    for channel, sign in enumerate((1, -1) if split else (1,)):
        own = (sign * x).clamp(min=0) if split else x
        entering = own.exp() if aggregate is Aggregate.LOG_MEAN_EXP else own
        mean = total(entering, trajectory) / total(torch.ones_like(x), trajectory).clamp(min=1)
        of_group = total(entering, group)
        if aggregate is not Aggregate.SUM:
            of_group = of_group / total(torch.ones_like(x), group).clamp(min=1)
        if aggregate is Aggregate.LOG_MEAN_EXP:
            mean, of_group = (torch.where(a > 0, a, 1.0).log() for a in (mean, of_group))
        table = torch.full((40,), torch.nan, dtype=torch.float64)
        table[: given.shape[-1]] = given[channel] if split else given
        of_group = torch.where(table[group].isnan(), of_group, table[group]).detach()
        gated = (
            (own - mean).clamp(-0.1, 0.15) + 0.05 * ((mean - of_group) / 0.05).tanh() + 0.03 * (of_group / 0.03).tanh()
        )
        z = z + sign * gated
    loss = -(valid * (step.weights.double() * step.advantages.double())[row] * z.exp()).sum()
    return loss.detach(), torch.autograd.grad(loss, logp)[0]


@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize("aggregate", KNOWN)
def test_given_aggregates_stand_in_place_of_those_of_tokens(aggregate, split):
    step, gate = Step.make(), stopped_group(aggregate, split)
    nan = torch.nan
    for given in ([0.5, 0.02, -0.1], [0.0] * 9, [0.3, nan, 0.0, 0.0, -0.04], []):
        given = torch.tensor(given, dtype=torch.float64)
        given = torch.stack((given.abs(), 2 * given.abs())) if split else given
        loss, grad = given_loss(step, aggregate, split, given)
        exact = step.run(gate, "reference", aggregates={"group": given})
        torch.testing.assert_close(exact.loss, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(exact.grad, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", [False, True], ids=["", "split"])
@pytest.mark.parametrize("aggregate", KNOWN)
def test_given_aggregates_on_every_backend(aggregate, split, native_backends):
    step, gate = Step.make(), stopped_group(aggregate, split)
    nothing = {"group": torch.empty(2, 0) if split else torch.empty(0)}
    own = {backend: step.run(gate, backend).grad for backend in native_backends}
    for given in ([0.5, 0.02, -0.1], [0.3, torch.nan, 0.0, 0.0, -0.04], [torch.inf] * 5):
        given = torch.tensor(given)
        given = {"group": torch.stack((given.abs(), 2 * given.abs())) if split else given}
        exact = step.run(gate, "reference", aggregates=given)
        for backend in native_backends:
            out = step.run(gate, backend, aggregates=given)
            assert torch.allclose(out.grad.double(), exact.grad, rtol=1e-5, atol=1e-6), backend
            assert torch.allclose(out.loss.double(), exact.loss, rtol=1e-5, atol=1e-6), backend
            assert not torch.equal(out.grad, own[backend]), backend
    for backend in native_backends:
        assert torch.equal(step.run(gate, backend, aggregates=nothing).grad, own[backend]), backend


def test_micro_batches_under_aggregates_of_the_whole_step(native_backends):
    """Groups that micro-batches tear: with the means of all tokens each part has its share of the gradient."""
    step, gate = Step.make(), stopped_group()
    row = torch.repeat_interleave(step.batch.cu_seqlens.diff())
    group = step.batch.group_ids[row]
    counted = step.batch.mask & (group >= 0)
    x = (step.logp - step.old_logp).double()[counted]
    means = torch.zeros(5, dtype=torch.float64).index_add(0, group[counted], x)
    means = means / torch.zeros_like(means).index_add(0, group[counted], torch.ones_like(x)).clamp(min=1)
    for backend in native_backends:
        whole = step.run(gate, backend).grad
        for rows in ([0, 1, 3, 4], [2], [5, 6, 7]):
            part, tokens = step.whole_rows(rows)
            grad = part.run(gate, backend, aggregates={"group": means}).grad
            torch.testing.assert_close(grad, whole[tokens], msg=backend)
            assert 5 in rows or not torch.allclose(part.run(gate, backend).grad, whole[tokens]), backend


def test_a_level_of_its_own_kernels_takes_given_aggregates(native_backends):
    """A trajectory's mean with its residual dropped has quick kernels, which take no given mean; the call
    takes the way of all levels."""
    gate = RatioGate("quick", Drop(), (Level(Identity(), Routing.STOPPED),), Head.SCORE)
    assert gate.level is not None
    step = Step.make()
    given = {"trajectory": torch.linspace(-0.2, 0.2, 10)}
    exact = step.run(gate, "reference", aggregates=given)
    row = torch.repeat_interleave(step.batch.cu_seqlens.diff())
    own = exact.grad / -(step.weights * step.advantages).double()[row]
    ids = step.batch.trajectory_ids[row]
    known = step.batch.mask & (ids >= 0)
    torch.testing.assert_close(own[known].log(), given["trajectory"].double()[ids[known]], rtol=1e-6, atol=1e-6)
    for backend in native_backends:
        out = step.run(gate, backend, aggregates=given)
        assert torch.allclose(out.grad.double(), exact.grad, rtol=1e-5, atol=1e-6), backend


def test_errors():
    step = Step.make()
    bare = hpo.PackedBatch.from_lengths(LENGTHS, group_ids=step.batch.group_ids)
    one = torch.zeros(3)

    def refused(message, gate=None, error=ValueError, batch=step.batch, *, aggregates):
        arguments, given = (step.logp, step.old_logp, step.advantages, batch, gate), GateInputs(aggregates=aggregates)
        with pytest.raises(error, match=f"^{message}"):
            hpo.policy_loss(*arguments, advantage_level="row", gate_inputs=given)

    refused(
        r"aggregates: the gate 'stopped' has no level 'domain'; its levels: 'trajectory', 'group'",
        stopped_group(), aggregates={"domain": one},
    )  # fmt: skip
    refused("aggregates: the gate 'ppo_clip' has no level 'group'; its levels: none", aggregates={"group": one})
    refused(
        "aggregates: the level 'trajectory' of the gate 'stopped' carries gradient",
        stopped_group(), aggregates={"trajectory": one},
    )  # fmt: skip
    stopped = RatioGate(
        "steps", Identity(), levels((Tanh(0.1), STEP), (Tanh(0.1), TRAJECTORY), routing=Routing.STOPPED)
    )
    refused(
        "aggregates: the level 'group' of the gate 'stopped' counts segments",
        stopped_group(Aggregate.BALANCED), aggregates={"group": one},
    )  # fmt: skip
    nameless = hpo.PackedBatch.from_lengths(LENGTHS, steps=step.batch.steps)
    refused("aggregates: 'step' needs step_ids", stopped, batch=nameless, aggregates={"step": one})
    rows = RatioGate("rows", Identity(), levels((Tanh(0.1), TRAJECTORY), routing=Routing.STOPPED))
    refused("aggregates: 'trajectory' needs trajectory_ids", rows, batch=bare, aggregates={"trajectory": one})
    refused("aggregates: expected a dict", stopped_group(), TypeError, aggregates=one)
    for values in ([0.1], one.long()):
        refused(r"aggregates\['group'\]: expected a tensor", stopped_group(), TypeError, aggregates={"group": values})
    refused(
        r"aggregates\['group'\]: expected shape \[G\], got \[2, 3\]",
        stopped_group(), aggregates={"group": torch.zeros(2, 3)},
    )  # fmt: skip
    refused(
        r"aggregates\['group'\]: expected shape \[2, G\], of positive and negative log-ratios \(the gate has a split\)"
        r", got \[3\]",
        stopped_group(split=True), aggregates={"group": one},
    )  # fmt: skip
    refused(
        r"aggregates\['group'\]: expected device cpu .*; use batch.to\('meta'\)",
        stopped_group(),
        aggregates={"group": one.to("meta")},
    )
    asked = one.clone().requires_grad_()
    refused(r"aggregates\['group'\]: they are constants", stopped_group(), aggregates={"group": asked})


def test_only_eager_calls_know_it():
    step, gate = Step.make(), stopped_group()

    def loss(logp):
        out = hpo.policy_loss(
            logp, step.old_logp, step.advantages, step.batch, gate, advantage_level="row",
            gate_inputs=GateInputs(aggregates={"group": torch.zeros(3)}),
        )  # fmt: skip
        return out.loss

    with pytest.raises(ValueError, match="aggregates: only eager calls know it; call the loss"):
        torch.func.grad(loss)(step.logp)
    with pytest.raises(Exception, match="aggregates: only eager calls know it"):
        torch.compile(loss, fullgraph=True, backend="eager")(step.logp)
    assert loss(step.logp).isfinite()


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize(
    ("token", "x"),
    [(Clip((0.999, 0.999), (1.001, 1.001)), [60.0, 30.0, -30.0]), (Drop(), [60.0, 30.0, -30.0, 20.0, -20.0])],
    ids=["own and aggregated", "known"],
)
def test_gradients_that_are_summed_saturate(token, x, backend):
    gate = RatioGate("summed", token, (Level(Identity(), aggregate=Aggregate.SUM),))
    old, batch = torch.full((len(x),), -100.0), hpo.PackedBatch.from_lengths([len(x)])
    for sign in (1, -1):
        given = {"weights": torch.ones(1), "backend": backend}
        out = hpo.policy_loss_and_grad(old + torch.tensor(x), old, torch.tensor([sign * 1e12]), batch, gate, **given)
        assert out.loss == out.grad[0] == -sign * torch.finfo(torch.float32).max
