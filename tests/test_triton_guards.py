"""No Triton kernel writes outside the tensors that its host code allocates: each lies between two guards."""

import functools
import math

import pytest
import torch
from conftest import NATIVE
from op_inputs import GATES, inputs

import hpo_core as hpo
from hpo_core import ops
from hpo_core.specs import Boundary, Invalid, OrderRule, TokenDraw, WindowAggregate

GUARD, BYTE = 65_536, 0xA5
ON_CPU = [name for name in NATIVE if name == "triton" and hpo.testing.device_of(name) == "cpu"]


class Guards:
    """Takes the place of the functions that allocate."""

    def __init__(self, patch):
        self.stores, self.empty = [], torch.empty
        for name, cleared in (("empty", False), ("zeros", True)):
            patch.setattr(torch, name, functools.partial(self.of_size, torch.float32, cleared))
            patch.setattr(torch, f"{name}_like", functools.partial(self.like, cleared))
            patch.setattr(torch.Tensor, f"new_{name}", self.new(cleared))

    def of_size(self, default, cleared, *size, dtype=None, device=None):
        shape = torch.Size(size if isinstance(size[0], int) else size[0])
        dtype = dtype or default
        store = self.empty(2 * GUARD + math.prod(shape) * dtype.itemsize, dtype=torch.uint8).fill_(BYTE)
        self.stores.append(store)
        inside = store[GUARD:-GUARD]
        return (inside.zero_() if cleared else inside).view(dtype).view(shape)

    def like(self, cleared, tensor, dtype=None):
        return self.of_size(tensor.dtype, cleared, tensor.shape, dtype=dtype)

    def new(self, cleared):
        return lambda tensor, *size, dtype=None: self.of_size(tensor.dtype, cleared, *size, dtype=dtype)

    def check(self):
        for store in self.stores:
            for guard in (store[:GUARD], store[-GUARD:]):
                assert bool((guard == BYTE).all()), f"a write outside a tensor of {store.numel() - 2 * GUARD} bytes"


def losses(tokens, backend):
    gates = (*GATES.values(), hpo.gates.fiberpo(), hpo.gates.mis(), hpo.gates.gmpo(0.2, 0.2))
    for gate in gates:
        rollout = {"rollout_logp": tokens.old_logp - 0.1} if gate.corrections else {}
        for entropy in (None, tokens.entropy):
            loss = functools.partial(hpo.policy_loss_and_grad, gate=gate, entropy=entropy, backend=backend, **rollout)
            yield functools.partial(loss, tokens.logp, tokens.old_logp, tokens.advantages, tokens.batch)


def windows_and_scopes(tokens, backend):
    batch, scores, rows = tokens.batch, tokens.entropy, tokens.batch.rows
    for first, last, boundary in ((-3, 4, Boundary.ZERO), (-100, 100, Boundary.ZERO), (-3, 4, Boundary.CARRY)):
        window = (first, last, boundary, Invalid.SKIP, WindowAggregate.MEAN)
        yield functools.partial(ops.window_score, scores, batch.mask, batch.cu_seqlens, *window, backend)
    quantile = (3, 4, OrderRule.CEIL)
    yield functools.partial(ops.select_top, scores, *quantile, True, batch.mask, batch.cu_seqlens, backend)
    for scope_of_row, count in ((batch.group_ids, rows // 2), (torch.zeros_like(batch.group_ids), 1)):
        scopes, kept = (batch.cu_seqlens, scope_of_row), torch.full((count,), 20)
        yield functools.partial(ops.order_statistics, scores, *scopes, count, *quantile, batch.mask, backend)
        yield functools.partial(ops.select_exact, scores, *scopes, kept, None, batch.mask, backend)
    yield functools.partial(
        ops.covariance, scores, tokens.advantages, batch.cu_seqlens, batch.mask, *TokenDraw(), backend
    )


def groups(tokens, backend):
    for units in (torch.arange(300), torch.arange(9_000)):
        values = units.sin()
        for ids in (units // 3, None):
            yield functools.partial(ops.group_statistics, values, ids, None, None, backend)
        for estimator in (hpo.advantages.grpo, hpo.advantages.lite_ppo):
            yield functools.partial(estimator, values, units // 3, backend=backend)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("calls", [losses, windows_and_scopes, groups])
def test_no_kernel_writes_outside_of_its_tensors(calls, backend):
    for call in calls(inputs(40, 70, backend), backend):
        with pytest.MonkeyPatch.context() as patch:
            guards = Guards(patch)
            call()
        assert guards.stores, "the tensors of this call come from elsewhere"
        guards.check()
