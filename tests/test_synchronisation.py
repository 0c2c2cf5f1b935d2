"""No synchronisation anywhere: the whole path runs on tensors that hold no data, where reading a value raises."""

import functools
import importlib

import pytest
import torch
from devices import Device, NoHostData, OnDevice
from estimators import CASES, Given
from naive_estimators import draw
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from valid_calls import calls

import hpo_core as hpo
from hpo_core.specs import OrderRule

GATES = {
    "token": hpo.gates.ppo_clip(0.1, 0.2, ratio_dual=2.0),
    "trajectory": hpo.gates.gspo(0.05, 0.05),
    "score": hpo.gates.cispo(1.2),
}


def test_meta_tensors_raise_where_a_value_is_read():
    """The tests below rely on it."""
    empty = Device()(3)
    for read in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, bool):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(empty[0] if read in (torch.Tensor.item, bool) else empty)
    with pytest.raises((RuntimeError, NotImplementedError)):
        empty[empty > 0]


def test_nothing_synchronises():
    make = Device()
    with OnDevice(ordered=True), NoHostData():
        batch = make.batch(group_ids=make.ids(), trajectory_ids=make.ids(), domain_ids=make.ids())
        logp, old_logp, entropy = (make(64).requires_grad_(), make(64), make(64))
        mask = make(64, dtype=torch.bool)
        for mode in (
            hpo.aggregation.token_mean,
            hpo.aggregation.seq_mean_token_mean,
            hpo.aggregation.seq_mean_token_sum,
            hpo.aggregation.prompt_mean,
            functools.partial(hpo.aggregation.fixed_length, length=10),
        ):
            for total in (None, 7, make((), dtype=torch.int64)):
                mode(batch, total=total)
        hpo.aggregation.token_mean(batch, selected=mask)
        for window in (hpo.entropy.forking_tokens(), hpo.entropy.ares()):
            state = window.fit(entropy, batch)
            window.apply(entropy, batch, state)
        stepped = make.batch(steps=make(5, 2, dtype=torch.int64), step_ids=make(5, dtype=torch.int64))
        for scope, scoped in (
            ("step", stepped),
            ("row", batch),
            ("trajectory", batch),
            ("group", batch),
            ("call", batch),
        ):
            hpo.entropy.quantiles(entropy, scoped, "0.95", scope=scope, rule=OrderRule.LINEAR, expand=True)
            hpo.entropy.top_k(entropy, scoped, 3, scope=scope, uid=make.ids())
            if scope != "call":
                hpo.entropy.segment_aggregate(entropy, scoped, scope, expand=False)
        hpo.entropy.window_aggregate(entropy, batch, hpo.entropy.Window.causal(3, aggregate="max", boundary="carry"))
        for gate in GATES.values():
            result = hpo.policy_loss(
                logp,
                old_logp,
                make(8),
                batch,
                gate,
                kl=hpo.kl.k3(0.1),
                ref_logp=old_logp,
                entropy=entropy,
                window=window,
                threshold=state,
                token_mask=mask,
                token_weight=make(64),
                gate_inputs=hpo.gates.GateInputs(bounds=(make(64), None)) if gate.takes_bounds else None,
                report=("tokens",),
            )
            result.loss.backward()
            _ = result.metrics + result.metrics, result.metrics.flags, result.metrics["tokens"]
        for gate in (hpo.gates.fiberpo(), hpo.gates.reconstructed.fiberpo_domain()):
            hpo.policy_loss(logp, old_logp, make(8), batch, gate).loss.backward()
        gates = hpo.gates
        for gate in (gates.sapo(), gates.ce_gppo(), gates.gmpo(), gates.vespo(), gates.opmd()):
            hpo.policy_loss(logp, old_logp, make(8), batch, gate).loss.backward()
        pays = gates.kl_cov_mask(logp, make(8), batch)
        for gate, given in ((gates.bpo(), gates.bpo_target(make(8))), (gates.kl_cov(), pays)):
            hpo.policy_loss(logp, old_logp, make(8), batch, gate, gate_inputs=given).loss.backward()
        for gate in (gates.hispo(), gates.opsm(), gates.mis(ratio_veto=1e-4), gates.dppo_kl(), gates.tis()):
            rollout = make(64) if gate.reads_rollout else None
            hpo.policy_loss(logp, old_logp, make(8), batch, gate, rollout_logp=rollout).loss.backward()
        entropies = hpo.entropy
        state, table = entropies.fit_pivot(entropy, batch), entropies.fit_scopes(entropy)
        selection = entropies.hapo(entropy, batch, state=state)
        selection = selection.merged(entropies.aepo_ruc(entropy, batch, state=table))
        selection = selection.merged(entropies.entropy_advantage(make(8), entropy, batch))
        selection = selection.merged(entropies.steer(make(64), batch))._replace(kl_weight=make(64))
        levels, targets = make(8, dtype=torch.int64), entropies.AresTargets(make(3), make(3))
        entropies.ares_targets(make(8), levels, targets, batch.group_ids, compat="code")
        differentiable = make(64).requires_grad_()
        total = entropies.mean_entropy(differentiable, batch, make(8))
        total = total + entropies.epo(differentiable, batch, make(8), make(2))
        (total + entropies.siren(differentiable, batch, mask, make(()))).backward()
        given = {"kl": hpo.kl.k3(0.1), "ref_logp": old_logp, "selection": selection}
        hpo.policy_loss(logp, old_logp, make(8), batch, gates.hapo_clip(), **given).loss.backward()
        hpo.policy_loss_and_grad(logp, old_logp, make(8), batch, gates.hapo_clip(), **given)
        critic = hpo.value_loss(differentiable, make(64), batch, old_values=make(64), clip=0.2)
        critic.loss.backward()
        _ = critic.metrics + critic.metrics
        for level, count in (("trajectory", 5), ("group", 3), ("domain", 2)):
            hpo.policy_loss(logp, None, make(count), batch, advantage_level=level)
        hpo.policy_loss_and_grad(logp, old_logp, make(64), batch, advantage_level="token")
        stepped = make.batch(steps=make(5, 2, dtype=torch.int64))
        hpo.policy_loss(logp, old_logp, make(5), stepped, advantage_level="step")
        estimator = functools.partial(hpo.advantages.hgpo, anchor_ids=make(5, dtype=torch.int64))
        grouped = make.batch(steps=make(5, 2, dtype=torch.int64), group_ids=make.ids())
        hpo.hierarchical_policy_loss(logp, None, make(5), grouped, advantage=estimator)
        for gate in (hpo.gates.step_gspo(), hpo.gates.reconstructed.two_scale()):
            hpo.policy_loss(logp, old_logp, make(5), stepped, gate, advantage_level="step").loss.backward()
        hpo.policy_loss(make(8, 8).requires_grad_(), None, make(8), make(8, 8, dtype=torch.bool)).loss.backward()


def test_default_weights_are_one_kernel():
    """A new batch needs them at once, and its loss waits for each of them."""
    make = Device()
    aggregation = hpo.aggregation
    for mode in (aggregation.token_mean, aggregation.seq_mean_token_mean, aggregation.seq_mean_token_sum):
        with OnDevice(ordered=True) as device, NoHostData():
            mode(make.batch())
        assert device.kernels == ["hpo_core::row_weights"]
    with OnDevice(ordered=True) as device, NoHostData():
        hpo.policy_loss(make(64).requires_grad_(), make(64), make(8), make.batch()).loss.backward()
    assert device.kernels == ["hpo_core::row_weights", "hpo_core::policy_loss", "aten::ones_like", "aten::mul"]


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_the_gradient_of_a_new_batch_without_a_seed(gate):
    make = Device()
    hidden, old_logp, advantages, batch = make(64).requires_grad_(), make(64), make(8), make.batch(group_ids=make.ids())
    with OnDevice(ordered=True) as device, NoHostData():
        logp = hidden.view(8, 8)
        out = hpo.policy_loss_and_grad(logp.view(-1), old_logp, advantages, batch, gate)
        logp.view(-1).backward(out.grad)
    assert device.kernels == ["hpo_core::row_weights", "hpo_core::policy_loss"]


def test_a_factor_on_negative_advantages_is_one_kernel():
    make = Device()
    with OnDevice(ordered=True) as device, NoHostData():
        hpo.policy_loss_and_grad(make(64), make(64), make(8), make.batch(), hpo.gates.a_lol(), weights=make(8))
    assert device.kernels == ["aten::leaky_relu", "hpo_core::policy_loss"]


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_kernels_of_the_single_call(gate):
    """Five ops and no kernel of torch's forward; the seed and the product backward."""
    make = Device()
    batch = make.batch(group_ids=make.ids())
    logp, old_logp, entropy = make(64).requires_grad_(), make(64), make(64)
    weights = make(8)
    with OnDevice(ordered=True) as device, NoHostData():
        result = hpo.hierarchical_policy_loss(
            logp, old_logp, make(8), batch, gate=gate, window=hpo.entropy.ares(), entropy=entropy, weights=weights
        )
        forward, device.kernels = device.kernels, []
        result.loss.backward()
    assert forward == [
        f"hpo_core::{op}" for op in ("group_normalise", "row_spans", "window_score", "order_statistic", "policy_loss")
    ]
    assert device.kernels == ["aten::ones_like", "aten::mul"]


def test_single_call_on_fake_cuda_tensors():
    """The same for a simulated CUDA device, traced as by a compiler.

    Without autograd: torch builds for CPUs abort when a tensor of a CUDA device, fake or not, requires a gradient.
    """
    with FakeTensorMode(), NoHostData():
        make = functools.partial(torch.empty, device="cuda")
        ids, offsets = (make(8 + more, dtype=torch.int64) for more in (0, 1))
        batch = hpo.PackedBatch(offsets, make(64, dtype=torch.bool), group_ids=ids, validate=False)
        for gate in GATES.values():
            result = hpo.hierarchical_policy_loss(
                make(64), make(64), make(8), batch, gate=gate, window=hpo.entropy.ares(), entropy=make(64)
            )
            computed = hpo.policy_loss_and_grad(make(64), make(64), make(8), batch, gate)
            everything = (result.loss, result.metrics.vector, computed.loss, computed.grad, computed.metrics.vector)
            assert all(isinstance(tensor, FakeTensor) and tensor.device.type == "cuda" for tensor in everything)
        for mode in (hpo.aggregation.seq_mean_token_mean, hpo.aggregation.seq_mean_token_sum):
            assert mode(batch, total=7).device.type == mode(batch).device.type == "cuda"
        with pytest.raises(DataDependentOutputException):
            result.loss.item()


class Dataless(Given):
    """A drawn batch for estimators, with shapes and dtypes but no data."""

    def __init__(self, units):
        def tensor(array):
            dtypes = {"f": torch.float32, "b": torch.bool, "i": torch.int64}
            return torch.empty(array.shape, dtype=dtypes[array.dtype.kind], device="meta")

        for name, array in units._asdict().items():
            setattr(self, name, tensor(array))
        self.units, self.backend, self.tensor = units, None, tensor
        self.rest = {"mask": self.mask}
        self.steps = (self.reward, self.group, self.trajectory, self.anchor)


@pytest.mark.parametrize("name", CASES)
def test_no_estimator_synchronises(name):
    units = Dataless(draw(1))
    with OnDevice(ordered=True), NoHostData():
        assert CASES[name](units).device.type == "meta"


# Their documentation says so: values are checked, lengths are read.
SYNCHRONISE = {"PackedBatch", "PackedBatch.from_lengths", "PackedBatch.replace", "PackedBatch.select"}
OF_NUMBERS = {"hpo_core.gates.experts.ink_grpo_coefficient"}  # without a tensor


def is_for_eager_calls(call):
    """Whether simulated devices are refused."""
    aggregates = getattr(call.arguments.get("gate_inputs"), "aggregates", None)
    return aggregates or "report" in call.arguments or call.function is hpo.policy_loss_from_logits


CALLS = [
    call
    for call in calls()
    if call.name not in SYNCHRONISE | OF_NUMBERS and not call.is_of_testing() and not is_for_eager_calls(call)
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name.removeprefix("hpo_core."))
def test_no_public_function_synchronises(call):
    call = call.moved("meta")
    with OnDevice(ordered=True), NoHostData():
        call.run()


def test_areals_means_of_rows_have_an_order():
    make, mask = Device(), torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.bool)
    areal = importlib.import_module("hpo_core.integrations.areal")
    with OnDevice(ordered=True):
        areal._row_means(make(64), make(64, dtype=torch.bool), make.batch())
    batch = hpo.PackedBatch(torch.tensor([0, 3, 3, 5]), mask)  # an empty row, and a token in none
    assert areal._row_means(torch.tensor([1.0, 2, 9, 4, 8, 9]), mask, batch).tolist() == [1.5, 0, 6]


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "dvao", "m_grpo", "stratified", "treepo", "peco", "opo", "maxrl", "lite_ppo", "flow_grpo"]
)
def test_estimators_inside_groups_are_one_kernel(name):
    """One kernel is ours; the kernels of torch renumber ids and stack inputs."""
    units = Dataless(draw(1))
    with OnDevice(ordered=True) as device, NoHostData():
        CASES[name](units)
    assert device.kernels.count("hpo_core::group_normalise") == 1
    assert sum(kernel.startswith("hpo_core::") for kernel in device.kernels) == 1


@pytest.mark.parametrize(("name", "kernels"), [("gigpo", 5), ("hgpo", 3), ("gdpo", 2), ("reinforce_pp_baseline", 2)])
def test_kernels_of_estimators_with_returns_or_a_second_stage(name, kernels):
    units = Dataless(draw(1))
    with OnDevice(ordered=True) as device, NoHostData():
        CASES[name](units)
    assert sum(kernel.startswith("hpo_core::") for kernel in device.kernels) == kernels
