"""Every entropy preset: masked tokens are not read, the order of rows does not matter, nothing breaks without data."""

import functools

import pytest
import torch
from valid_calls import calls, tensors_of

import hpo_core as hpo
from hpo_core import entropy as E

TOKENS, ROWS, MASKED = 11, 3, 4  # of the valid calls: their sizes, and the token that their batch masks
OF_ROWS = {
    "advantages", "confidence", "is_correct", "weights", "low", "high", "rows_mask", "uid", "difficulty", "exploration",
    "counts", "rewards", "lengths", "group_ids", "cluster_ids", "mean_logp",
}  # fmt: skip
DIFFERENTIABLE = {"mean_entropy", "entropy_band", "epo", "siren", "siren_mean", "openvl_band"}
CONTROLLERS = {
    "skywork_coefficient", "trl_coefficient", "entropic", "target_temperature", "ares_kappa", "ares_penalty",
}  # fmt: skip
PRESETS = [
    call
    for call in calls()
    if call.name.startswith("hpo_core.entropy.") and hasattr(call.function, "provenance")
    if call.function.__name__ not in CONTROLLERS
]
every_preset = pytest.mark.parametrize("call", PRESETS, ids=lambda call: call.name.rpartition(".")[2])


def mapped(arguments, of_tokens, of_rows, batch=None):
    """The arguments with a change of everything that belongs to tokens, to rows, and of the batch."""

    def change(name, value):
        if isinstance(value, hpo.PackedBatch):
            return value if batch is None else batch
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(change(name, each) for each in value)
        if not isinstance(value, torch.Tensor) or value.dim() != 1:
            return value
        if len(value) == TOKENS:
            return of_tokens(value)
        return of_rows(value) if len(value) == ROWS and name in OF_ROWS else value

    return {name: change(name, value) for name, value in arguments.items()}


def test_there_are_many_presets():
    assert len(PRESETS) > 40


@every_preset
def test_masked_tokens_are_not_read(call):
    for poison in (99.0, torch.nan, torch.inf):

        def poisoned(values, poison=poison):
            changed = values.clone()
            changed[MASKED] = poison if values.is_floating_point() else not values[MASKED]
            return changed

        got = tensors_of(call.run(mapped(call.arguments, poisoned, lambda values: values)))
        for one, other in zip(got, tensors_of(call.run()), strict=True):
            assert torch.equal(one, other)


@every_preset
def test_the_order_of_rows_does_not_matter(call):
    if "batch" not in call.arguments:
        return
    order = torch.tensor([2, 0, 1])
    part, tokens = call.arguments["batch"].select(order)
    got = tensors_of(
        call.run(mapped(call.arguments, lambda values: values[tokens], lambda values: values[order], part))
    )
    for one, other in zip(got, tensors_of(call.run()), strict=True):
        if other.shape == (TOKENS,):
            other = other[tokens]
        elif other.shape == (ROWS,) and call.function.__name__ not in ("fit_pivot", "ares_scales", "ares_targets"):
            other = other[order]
        elif call.function.__name__ == "empg":
            other = torch.cat((other[3:], other[:3]))  # its rows have 2, 1 and 2 steps
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


LOCAL = {
    "aepo_ruc", "archer", "ares_next_windows", "ares_penalty_weights", "checked_mask", "count_of_rows", "cover",
    "dcpo_regulariser", "entropy_advantage", "entropy_change", "erc", "funrl", "group_confidence", "hapo",
    "hapo_redistribution", "hapo_temperature", "less_tokens", "opened", "siren_tokens", "steer", "steer_linear",
    "ulorl",
}  # fmt: skip


@pytest.mark.parametrize(
    "call", [each for each in PRESETS if each.function.__name__ in LOCAL], ids=lambda call: call.name.rpartition(".")[2]
)
def test_micro_batches_have_the_bits_of_the_whole(call):
    """Given the state of the step, what a row gets depends on nothing outside it."""
    whole = tensors_of(call.run())
    for rows in ([0], [1, 2]):
        order = torch.tensor(rows)
        part, tokens = call.arguments["batch"].select(order)
        given = mapped(call.arguments, lambda values, at=tokens: values[at], lambda values, at=order: values[at], part)
        for one, other in zip(tensors_of(call.run(given)), whole, strict=True):
            assert torch.equal(one, other[tokens if len(other) == TOKENS else order])


def test_every_local_preset_is_tested():
    assert {each.function.__name__ for each in PRESETS} >= LOCAL


def test_results_of_rows_keep_their_shape_where_every_row_has_one_token():
    batch = hpo.PackedBatch.from_padded(torch.ones(3, 1, dtype=torch.bool), cu_steps=torch.tensor([0, 1, 2, 3]))
    entropy, own = torch.tensor([[0.25], [0.5], [0.75]]), torch.tensor([1.0, -1.0, 2.0])
    for got in (
        E.edge_grpo(own, entropy, batch),
        E.empg(own, entropy, batch),
        E.count_of_rows(entropy > 0.3, batch),
        E.siren_tokens(entropy, batch)[:, 0],
    ):
        assert got.shape == (3,)
    one = hpo.PackedBatch.from_padded(torch.ones(1, 1, dtype=torch.bool))
    assert E.fit_pivot(entropy[:1], one).pivot.shape == (1,)


@every_preset
def test_padded_tensors_give_padded_results(call):
    """Rows of four tokens, as one row after the other or as a matrix."""
    if "batch" not in call.arguments:
        return
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]).bool()
    ids = {"group_ids": torch.tensor([0, 0, 1]), "cu_steps": torch.tensor([0, 2, 4, 8, 10, 12])}
    packed = hpo.PackedBatch(torch.tensor([0, 4, 8, 12]), mask, **ids)
    padded = hpo.PackedBatch.from_padded(mask.reshape(3, 4), **ids)
    results = []
    for batch, shape in ((packed, (12,)), (padded, (3, 4))):

        def of_tokens(values, shape=shape):
            return torch.cat((values, values[-1:])).reshape(shape)

        results.append(tensors_of(call.run(mapped(call.arguments, of_tokens, lambda values: values, batch))))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.reshape(3, 4) if one.shape == (12,) else one, other)


@every_preset
def test_only_penalties_have_a_gradient(call):
    def differentiable(values):
        return values.clone().requires_grad_() if values.is_floating_point() else values

    result = call.run(mapped(call.arguments, differentiable, differentiable))
    found = [each.requires_grad for each in _tensors(result)]
    assert found == [call.function.__name__ in DIFFERENTIABLE] * len(found)


def _tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [each for part in result if part is not None for each in _tensors(part)] if isinstance(result, tuple) else []


NOTHING = {
    "no rows": (functools.partial(torch.narrow, dim=0, start=0, length=0), torch.zeros(1, dtype=torch.int64), 0),
    "empty rows": (functools.partial(torch.narrow, dim=0, start=0, length=0), torch.zeros(4, dtype=torch.int64), 3),
    "masked rows": (lambda values: values, torch.tensor([0, 4, 7, 11]), 3),
}


@every_preset
@pytest.mark.parametrize("kind", NOTHING)
def test_nothing_breaks_without_data(call, kind):
    """Slots are neutral, masks False, advantages and losses 0; only a statistic of nothing is NaN."""
    of_tokens, offsets, rows = NOTHING[kind]
    count = 11 if kind == "masked rows" else 0
    ends = torch.tensor([0, 2, 4, 7, 9, 11]) if count else torch.zeros(1 if rows == 0 else 6, dtype=torch.int64)
    batch = hpo.PackedBatch(
        offsets, torch.zeros(count, dtype=torch.bool), cu_steps=ends, group_ids=torch.tensor([0, 0, 1])[:rows]
    )
    given = mapped(call.arguments, of_tokens, lambda values: values[:rows], batch)
    if "state" in given and call.function.__name__ not in ("hapo_temperature", "ares_targets", "ares_entropy_reward"):
        given["state"] = None  # fitted on nothing, too
    result = call.run(given)
    name = call.function.__name__
    if name in ("fit_pivot", "ares_threshold"):
        assert all(each.isnan().all() for each in tensors_of(result))
    elif name in DIFFERENTIABLE:
        assert result.item() == pytest.approx(0.005 * 0.25**2 if name == "siren" else 0.0)  # an anchor stays
    elif name not in ("ares_targets",):
        for each in _tensors(result):
            neutral = each.isneginf() if name == "group_confidence" else torch.isfinite(each)
            assert neutral.all() or each.dtype is torch.bool
            assert each.dtype is not torch.bool or not each.any()


def test_kinds_of_nothing_are_neutral():
    batch = hpo.PackedBatch(torch.tensor([0, 3]), torch.zeros(3, dtype=torch.bool))
    entropy = torch.full((3,), torch.nan)
    low, high = E.hapo(entropy, batch).bounds
    assert low.tolist() == high.tolist() == [1.0] * 3 == E.aepo_ruc(entropy, batch).advantage_factor.tolist()
    assert E.entropy_advantage(torch.ones(1), entropy, batch).advantage_addend.tolist() == [0.0] * 3
    loss = hpo.policy_loss(entropy, entropy, torch.ones(1), batch, selection=E.hapo(entropy, batch)).loss
    assert loss.item() == 0
    state, now, seen = E.fit_pivot(entropy, batch), torch.tensor([0.1, 0.5, 2.0]), hpo.PackedBatch.from_lengths([3])
    low, high = E.hapo(now, seen, state=state).bounds
    assert torch.equal(low, torch.full((3,), 0.8)) and torch.equal(high, torch.full((3,), 1.28))
    assert E.hapo_redistribution(now, now, now, seen, state=state).advantage_factor.tolist() == [1.0] * 3
    for compat in ("paper", "code"):
        assert E.hapo_temperature(now, seen, state, compat=compat).tolist() == [1.0] * 3


SIGNALS = {
    "entropy", "logp", "old_logp", "old_entropy", "target_logp", "change", "confidence", "logits",
}  # fmt: skip
BROKEN = 5
OF_SIGNALS = [
    pytest.param(call, name, id=f"{call.name.rpartition('.')[2]}-{name}")
    for call in PRESETS
    for name, value in call.arguments.items()
    if name in SIGNALS and value.shape == (TOKENS,)
]


@pytest.mark.parametrize("offsets", [[0, -3, 20, 11], [0, 5, 2, 2**40], [-(2**62), 3, 2**62, 5]], ids=str)
def test_broken_offsets_are_harmless(offsets):
    """No preset reads beyond the tensors of a batch that nobody has examined."""
    for call in PRESETS:
        given = call.arguments.get("batch")
        if given is not None:
            names = ("group_ids", "cu_steps", "trajectory_ids")
            more = {name: getattr(given, name) for name in names}
            broken = hpo.PackedBatch(torch.tensor(offsets), given.mask, total_tokens=TOKENS, validate=False, **more)
            call.run({**call.arguments, "batch": broken})


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(("call", "name"), OF_SIGNALS)
def test_a_token_without_a_number_is_as_good_as_masked(call, name, number):
    """It changes no other token. Its own slots and advantages are NaN, which the loss counts; in a mask it is False."""
    signal = call.arguments[name].clone()
    signal[BROKEN] = number
    whole = call.arguments["batch"]
    mask = whole.mask.clone()
    mask[BROKEN] = False
    got = call.run({**call.arguments, name: signal})
    expected = call.run({**call.arguments, "batch": whole.replace(mask=mask)})
    own = [each[BROKEN] for each in tensors_of(got) if each.shape == (TOKENS,)]
    if isinstance(got, E.Selection) or getattr(call.function, "level", None) == "token":
        floats = [each for each in own if each.is_floating_point()]
        assert floats and all(each.isnan() for each in floats)
    assert not any(each.item() for each in own if each.dtype is torch.bool)
    others = torch.arange(TOKENS) != BROKEN
    for one, other in zip(tensors_of(got), tensors_of(expected), strict=True):
        if other.shape == (TOKENS,):
            one, other = one[others], other[others]
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(("call", "name"), OF_SIGNALS)
def test_a_step_without_numbers_is_neutral_and_loud(call, name, number):
    """No mask is full, an empty one is counted by the loss."""
    signal = torch.full((TOKENS,), number)
    given = {**call.arguments, name: signal}
    if "state" in given and call.function.__name__ != "hapo_temperature":
        given["state"] = None
    got, batch = call.run(given), call.arguments["batch"]
    for each in tensors_of(got):
        assert each.dtype is not torch.bool or not each.any()
    if isinstance(got, E.Selection):
        logp = torch.zeros(TOKENS)
        penalty = {"kl": hpo.kl.k3(0.1), "ref_logp": logp} if got.kl_weight is not None else {}
        bounds = {"gate": hpo.gates.hapo_clip()} if got.bounds is not None else {}
        out = hpo.policy_loss(logp, logp, torch.ones(ROWS), batch, selection=got, **penalty, **bounds)
        assert out.loss.item() == 0 and out.metrics["bad_advantages"].item() == batch.mask.sum()


def test_a_token_without_an_entropy_is_left_out_and_counted():
    entropy, batch = torch.tensor([0.5, torch.nan, 1.5, 0.25]), hpo.PackedBatch.from_lengths([4])
    for selection in (E.hapo(entropy, batch), E.aepo_ruc(entropy, batch), E.archer(entropy, batch)):
        given = {"kl": hpo.kl.k3(0.1), "ref_logp": torch.zeros(4)} if selection.kl_weight is not None else {}
        logp = torch.zeros(4, requires_grad=True)
        out = hpo.policy_loss(logp, torch.zeros(4), torch.ones(1), batch, selection=selection, **given)
        out.loss.backward()
        assert out.metrics["bad_advantages"].item() == 1 and logp.grad[1].item() == 0 and logp.grad[0].item() != 0
