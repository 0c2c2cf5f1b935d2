"""A ``[B, L]`` mask stands for its batch in every public function that takes one."""

import inspect

import pytest
import torch
from valid_calls import calls, public_functions, tensors_of

import hpo_core as hpo

TOKENS, SHAPE = 11, (3, 4)  # of the valid calls; padded, with one token more
MASK = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]).bool().view(SHAPE)
CALLS = [
    call
    for call in calls()
    if isinstance(call.arguments.get("batch"), hpo.PackedBatch) and not {"logits", "hidden"} & call.arguments.keys()
]


def padded(value):
    if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == TOKENS:
        return torch.cat((value, value[-1:])).view(*SHAPE, *value.shape[1:])
    if isinstance(value, tuple):
        parts = [padded(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return {name: padded(part) for name, part in value.items()} if isinstance(value, dict) else value


def outcome(call, batch):
    """The tensors of the result, or the error."""
    try:
        return tensors_of(call.run(padded(call.arguments) | {"batch": batch}))
    except (ValueError, TypeError) as error:
        return str(error)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name.removeprefix("hpo_core."))
def test_a_mask_stands_for_its_batch(call):
    of_mask, of_batch = outcome(call, MASK), outcome(call, hpo.PackedBatch.from_padded(MASK))
    if isinstance(of_batch, str):
        assert of_mask == of_batch
    else:
        assert len(of_mask) == len(of_batch) > 0
        assert all(one.shape == other.shape and one.equal(other) for one, other in zip(of_mask, of_batch, strict=True))


def test_only_functions_of_steps_and_groups_refuse_a_mask():
    """Their errors name what a mask has not."""
    errors = {call.name: outcome(call, MASK) for call in CALLS}
    refused = {name: error for name, error in errors.items() if isinstance(error, str)}
    assert all("group_ids" in error or "steps" in error for error in refused.values()), refused
    assert len(errors) - len(refused) > 70


def test_a_nested_mask_is_refused():
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])
    for call in (lambda: hpo.entropy.less_tokens(torch.ones(2, 3), nested), lambda: hpo.aggregation.token_mean(nested)):
        with pytest.raises((TypeError, ValueError), match=r"^batch: "):
            call()


def test_every_function_with_a_batch_takes_a_mask():
    for name, function in public_functions():
        kind = inspect.signature(function).parameters.get("batch") if inspect.isfunction(function) else None
        if kind is not None:
            assert "PackedBatch | torch.Tensor" in kind.annotation, name
