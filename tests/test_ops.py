"""The ops in torch: autograd and operators; saved tensors, workspaces and calls."""

import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import sys

import pytest
import torch
from catalogue import CATALOGUE
from conftest import NATIVE
from lazily import Lazy
from op_inputs import GATES, Inputs, Log, gradient, inputs
from torch.utils.checkpoint import checkpoint
from valid_calls import calls

import hpo_core as hpo
from hpo_core import ops, testing
from hpo_core.native import Native
from hpo_core.specs import Boundary, Invalid, OrderRule, PolicyLossInputs, TokenDraw, WindowAggregate

OPERATORS = torch.ops.hpo_core
OPERATOR_CALLS = [each for each in calls() if each.name.startswith("torch.ops.")]
compiled_autograd = Lazy("torch._dynamo.compiled_autograd")


# ---------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_gradient_is_that_of_the_call_without_autograd(gate, backend):
    given = inputs(backend=backend)
    arguments = (given.old_logp, given.advantages, given.batch, gate)
    expected = hpo.policy_loss_and_grad(given.logp, *arguments, backend=backend)
    leaf = given.leaf()
    result = hpo.policy_loss(leaf, *arguments, backend=backend)
    result.loss.backward()
    assert torch.equal(leaf.grad, expected.grad)
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(result.metrics.vector, expected.metrics.vector)
    assert not result.metrics.vector.requires_grad and not expected.grad.requires_grad


@pytest.mark.parametrize("factor", [0.0, 1.0, 65536.0])
def test_upstream_gradient(factor):
    given = inputs()
    expected = gradient(given.loss, given)
    assert torch.equal(gradient(lambda logp: given.loss(logp) * factor, given), expected * factor)


def test_a_batch_of_upstream_gradients():
    given, factors = inputs(), torch.tensor([1.0, -2.0])
    leaf = given.leaf()
    (got,) = torch.autograd.grad(given.loss(leaf), leaf, factors, is_grads_batched=True)
    assert torch.equal(got, gradient(given.loss, given) * factors[:, None])


def test_upstream_gradient_of_stride_zero():
    given = inputs()
    leaf = given.leaf()
    (got,) = torch.autograd.grad(given.loss(leaf), leaf, torch.tensor([3.0]).expand(2)[0])
    assert torch.equal(got, gradient(given.loss, given) * 3)
    (got,) = torch.autograd.grad(given.loss(leaf).expand(2, 5), leaf, torch.tensor(0.5).expand(2, 5))
    assert torch.equal(got, gradient(given.loss, given) * 5)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_gradient_has_no_graph_unless_one_is_asked_for(factor):
    """This also holds if the saved tensor itself is returned, as for an incoming gradient of 1."""
    given = inputs()
    leaf = given.leaf()
    (grad,) = torch.autograd.grad(given.loss(leaf) * factor, leaf)
    assert not grad.requires_grad and grad.is_leaf
    compiled = torch.compile(lambda logp: given.loss(logp), fullgraph=True, backend="eager")
    assert not torch.autograd.grad(compiled(leaf) * factor, leaf)[0].requires_grad


def test_an_upstream_gradient_is_differentiated_where_the_graph_of_the_loss_is_not_kept():
    """A graph of the gradient alone: the result depends on the upstream, of 1, too, as on any other number."""
    given = inputs()
    for number in (1.0, 2.0):
        leaf, upstream = given.leaf(), torch.tensor(number, requires_grad=True)
        (grad,) = torch.autograd.grad(given.loss(leaf), leaf, upstream, retain_graph=False, create_graph=True)
        (slope,) = torch.autograd.grad(grad.sum(), upstream)
        torch.testing.assert_close(slope, gradient(given.loss, given).sum())


def test_the_reference_without_autograd_in_inference_mode():
    """Its backward would save inputs, but autograd cannot save inference tensors."""
    given = inputs()
    expected = hpo.policy_loss_and_grad(*given[:3], given.batch, backend="reference").grad
    with torch.inference_mode():
        tensors = [tensor + 0 for tensor in given[:3]]
        inside = hpo.policy_loss_and_grad(*tensors, given.batch, backend="reference")
    outside = hpo.policy_loss_and_grad(*tensors, given.batch, backend="reference")
    assert torch.equal(inside.grad, expected) and torch.equal(outside.grad, expected)


def test_backward_twice():
    given = inputs()
    leaf = given.leaf()
    loss = given.loss(leaf)
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, 2 * once)
    leaf.grad.zero_()  # the caller must not write to a tensor that is saved for another backward
    (again,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(again, once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize(
    ("context", "wants"), [(torch.no_grad, True), (torch.inference_mode, True), (torch.enable_grad, False)]
)
def test_no_gradient_is_computed_where_none_is_wanted(context, wants, monkeypatch):
    given, seen, run = inputs(), [], Native.policy_loss

    def spy(self, inputs, spec, want_grad, *others):
        seen.append(want_grad)
        return run(self, inputs, spec, want_grad, *others)

    monkeypatch.setattr(Native, "policy_loss", spy)
    leaf = given.leaf().requires_grad_(wants)
    with context():
        loss = given.loss(leaf)
    assert seen == [False] and not loss.requires_grad
    assert torch.equal(loss, given.loss(given.leaf())) and seen == [False, True]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "flat view"])
def test_padded_logp_of_any_layout(layout):
    given = inputs(rows=4, length=6)
    mask = given.batch.mask.view(4, 6)
    views = {
        "contiguous": (given.logp.view(4, 6), lambda x: x),
        "transposed": (given.logp.view(4, 6).t().contiguous(), torch.t),
        "sliced": (torch.cat((given.logp.view(4, 6), torch.full((4, 2), torch.nan)), 1), lambda x: x[:, :6]),
        "flat view": (given.logp, lambda x: x.view(4, 6)),
    }
    base, view = views[layout]
    leaf = base.clone().requires_grad_()
    old_logp = given.old_logp.view(4, 6)
    hpo.policy_loss(view(leaf), old_logp, given.advantages, mask, GATES["token"]).loss.backward()
    assert leaf.grad.shape == leaf.shape
    assert torch.equal(view(leaf.grad).reshape(-1), gradient(given.loss, given))
    assert layout != "sliced" or (leaf.grad[:, 6:] == 0).all()


def test_autocast_leaves_inputs_as_they_are():
    given = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaf = given.leaf()
        loss = given.loss(leaf)
        loss.backward()
    assert loss.dtype == torch.float32 and torch.equal(leaf.grad, gradient(given.loss, given))


def test_checkpointing():
    given = inputs()
    expected = gradient(lambda logp: given.loss(2 * logp), given)
    got = gradient(lambda logp: checkpoint(lambda x: given.loss(2 * x), logp, use_reentrant=False), given)
    assert torch.equal(got, expected)


def test_hooks_and_accumulation():
    """DDP and FSDP use hooks on gradients, and several losses on one parameter."""
    given, seen = inputs(), []
    parameter = torch.nn.Parameter(given.logp.clone())
    parameter.register_hook(lambda grad: seen.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    (given.loss(parameter) + given.loss(parameter, GATES["trajectory"])).backward()
    assert seen == ["hook", "accumulated"]
    expected = gradient(given.loss, given) + gradient(lambda logp: given.loss(logp, GATES["trajectory"]), given)
    assert torch.equal(parameter.grad, expected)


def test_loss_may_be_changed_in_place():
    """verl adds its own terms in place."""
    given = inputs()
    leaf = given.leaf()
    loss = given.loss(leaf)
    loss -= leaf.sum()
    loss.backward()
    assert torch.equal(leaf.grad, gradient(given.loss, given) - 1)


@pytest.mark.parametrize("nothing", ["valid", "selected", "tokens", "rows"])
def test_a_loss_of_no_tokens_is_a_connected_zero(nothing, backend):
    given = inputs(backend=backend)
    keywords = {}
    if nothing == "valid":
        given = given._replace(batch=hpo.PackedBatch(given.batch.cu_seqlens, torch.zeros_like(given.batch.mask)))
    elif nothing == "selected":
        keywords = {"token_mask": torch.zeros_like(given.batch.mask)}
    else:
        rows = 3 if nothing == "tokens" else 0
        empty, batch = given.logp[:0], hpo.PackedBatch.from_lengths([0] * rows)
        given = Inputs(empty, empty, empty.new_ones(rows), empty, batch.to(empty.device))
        keywords = {"advantage_level": "row"}
    leaf = given.leaf()
    loss = given.loss(leaf, backend=backend, **keywords)
    loss.backward()
    assert loss == 0 and (leaf.grad == 0).all()
    assert nothing == "selected" or not leaf.grad.signbit().any()


def test_only_the_gradient_is_saved():
    given, saved = inputs(), []
    leaf = given.leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = given.loss(leaf, kl=hpo.kl.k3(0.1), ref_logp=given.old_logp, report=("tokens",))
    assert len(saved) == 1
    (grad,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(saved[0], grad)


@pytest.mark.parametrize("backend", NATIVE)
def test_tensors_of_hooks_are_not_written(backend):
    """Hooks may keep equal tensors once, so that a tensor stands for those of two nodes."""
    given, store = inputs(), {}

    def pack(tensor):
        return store.setdefault(tuple(tensor.tolist()), tensor)

    leaf, alone = given.leaf(), given.leaf()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        one, other = (given.loss(leaf, backend=backend) for _ in range(2))
    (2 * one + 3 * other).backward()
    given.loss(alone, backend=backend).backward()
    assert len(store) == 1 and torch.allclose(leaf.grad, 5 * alone.grad, rtol=1e-6, atol=0)


def test_per_token_loss_and_metrics_carry_no_graph():
    given = inputs()
    result = hpo.policy_loss(given.leaf(), given.old_logp, given.advantages, given.batch, report=("tokens",))
    assert not result.tokens.requires_grad and not result.metrics.vector.requires_grad
    with Log():
        watched = hpo.policy_loss(given.leaf(), given.old_logp, given.advantages, given.batch, report=("tokens",))
    assert not watched.tokens.requires_grad and not watched.metrics.vector.requires_grad


# --------------------------------------------------------------------------------------------- second derivatives


def test_second_derivative_is_refused():
    given = inputs()
    leaf = given.leaf()
    (grad,) = torch.autograd.grad(given.loss(leaf), leaf, create_graph=True)
    assert torch.equal(grad, gradient(given.loss, given)), "the first derivative alone is fine"
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.autograd.grad(grad.square().sum() + given.loss(leaf), leaf)


def test_second_derivative_is_refused_in_a_graph_that_is_not_kept(native_backends):
    for backend in native_backends:
        given = inputs(backend=backend)
        leaf = given.leaf()
        loss = given.loss(leaf, backend=backend) + leaf.square().sum()
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True, retain_graph=False)
        with pytest.raises(RuntimeError, match="second derivatives are not supported"):
            torch.autograd.grad(grad.sum(), leaf)


def test_second_derivative_is_refused_by_the_operator():
    given = inputs()
    leaf = given.leaf()
    with Log() as log:
        (grad,) = torch.autograd.grad(given.loss(leaf), leaf, create_graph=True)
    assert "hpo_core.policy_loss.default" in log.names
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        grad.sum().backward()


def test_second_derivative_is_refused_in_a_transform():
    given = inputs()
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.func.grad(lambda logp: torch.func.grad(given.loss)(logp).sum())(given.logp)


def test_second_derivative_is_refused_when_compiled():
    """The message is ours or, if torch itself has compiled the backward, torch's: first that of torch 2.10."""
    given = inputs()
    of_torch = "does not require grad|double backward"
    for compiler, words in (("eager", "second derivatives are not supported"), ("aot_eager", of_torch)):
        compiled = torch.compile(lambda logp: given.loss(logp), fullgraph=True, backend=compiler)
        leaf = given.leaf()
        with pytest.raises(RuntimeError, match=words):
            torch.autograd.grad(compiled(leaf), leaf, create_graph=True)[0].sum().backward()


def test_reference_is_differentiable_twice():
    given = inputs()
    leaf = given.logp.double().requires_grad_()
    loss = given.loss(leaf, hpo.gates.reinforce(), kl=hpo.kl.k2(0.1), ref_logp=given.old_logp, backend="reference")
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), leaf)
    valid = given.batch.mask
    torch.testing.assert_close(second[valid], torch.full_like(second[valid], 0.1 / valid.sum()))


# ------------------------------------------------------------------------------------------ operators and fakes


def operator_arguments(gate, requires_grad):
    given = inputs()
    pack = PolicyLossInputs(
        given.logp.clone().requires_grad_(requires_grad),
        given.old_logp,
        given.advantages,
        hpo.aggregation.token_mean(given.batch),
        given.batch.cu_seqlens,
        given.batch.mask,
        ref_logp=given.old_logp,
        entropy=given.entropy,
        kl_weight=given.entropy,
    )
    return (*pack, *ops.gates._numbers_of(gate.spec(hpo.kl.k3(0.1))), "")


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_opcheck_policy_loss(gate):
    for want_grad, want_tokens in ((True, True), (False, False)):
        torch.library.opcheck(OPERATORS.policy_loss, (*operator_arguments(gate, False), want_grad, want_tokens))
    # The last of opcheck's tests differentiates every output, but dL/dlogp refuses it: see test_compiled.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (*operator_arguments(gate, True), True, True)
    torch.library.opcheck(OPERATORS.policy_loss, arguments, test_utils=utilities)


def test_factors_on_a_penalty_need_the_reference():
    *given, backend = operator_arguments(hpo.gates.dapo(), False)
    given[PolicyLossInputs._fields.index("ref_logp")] = None
    with pytest.raises(ValueError, match="ref_logp: expected a tensor beside kl_weight, got None; pass it"):
        OPERATORS.policy_loss(*given, backend, False, False)


def test_corrections_of_rows_need_leaves_that_are_rows():
    *given, _, _, backend = operator_arguments(hpo.gates.step_gspo(), False)
    rule = hpo.gates.Correction(hpo.gates.Action.CLAMP, unit=hpo.gates.Unit.TRAJECTORY).spec()
    spec = hpo.gates.step_gspo().spec()._replace(row_corrections=(rule,))
    of_tokens, of_leaves = torch.zeros_like(inputs().logp), torch.zeros(1, dtype=torch.int64)
    tensors = PolicyLossInputs(*given)._replace(
        correction_second=of_tokens, leaf_begin=of_leaves, leaf_end=of_leaves, leaf_row=of_leaves
    )
    with pytest.raises(ValueError, match=r"leaf_begin: expected None beside corrections of rows, .* drop leaf_begin"):
        OPERATORS.policy_loss(*tensors, *ops.gates._numbers_of(spec), backend, False, False)


def test_an_address_that_is_no_number_is_an_error():
    class Broken:
        data_ptr = staticmethod(lambda: "nowhere")

    with pytest.raises(TypeError):
        importlib.import_module("hpo_core._cpu").row_counts(0, 0, Broken(), None, None, None, 0, 0.0, 0)


@pytest.mark.parametrize("call", OPERATOR_CALLS, ids=[each.name.rpartition(".")[2] for each in OPERATOR_CALLS])
def test_opcheck(call):
    torch.library.opcheck(call.function, (), call.arguments)


def test_opcheck_other_arguments():
    given = inputs()
    batch = given.batch
    one_scope = torch.zeros_like(batch.cu_seqlens[1:])
    for operator, arguments in (
        (OPERATORS.row_counts, (None, batch.cu_seqlens, batch.total_tokens, "cpu")),
        (OPERATORS.window_score, (given.entropy, batch.mask, batch.cu_seqlens, 0, 3, 1, 0, 0, "")),
        (OPERATORS.order_statistics, (given.entropy, batch.cu_seqlens, None, batch.rows, 19, 20, 0, batch.mask, "")),
        (OPERATORS.order_statistics, (given.entropy, batch.cu_seqlens, one_scope, 1, 19, 20, 3, None, "")),
        (OPERATORS.select_exact, (given.entropy, batch.cu_seqlens, one_scope, torch.tensor([3]), None, None, "")),
        (OPERATORS.select, (given.entropy, torch.tensor([0.5]), True, None, None, "")),
        (OPERATORS.select_top, (given.entropy, 19, 20, 0, True, None, None, "")),
    ):
        torch.library.opcheck(operator, arguments)


def test_specs_survive_the_operator():
    """The specs are those of every gate, with and without a penalty."""
    penalties = (None, hpo.kl.k1(0.1, "importance"), hpo.kl.k3(0.2, "straight_through"))
    for gate, kl, strict in itertools.product(CATALOGUE.values(), penalties, (False, True)):
        spec = gate.spec(kl, strict)
        rebuilt = ops.gates._spec_of(*ops.gates._numbers_of(spec))
        assert rebuilt == spec and [type(field) for field in rebuilt] == [type(field) for field in spec]


# -------------------------------------------------------------------------------------------------------- cost


def test_calls_into_python_and_torch():
    """The cost of an eager call besides the kernel is proportional to its calls; a clock would measure the machine."""
    given = inputs()
    leaf, weights = given.leaf(), hpo.aggregation.token_mean(given.batch)
    given.loss(leaf, weights=weights).backward()
    calls = {"call": 0, "c_call": 0}

    def count(frame, event, argument):
        if event in calls:
            calls[event] += 1

    gc.disable()  # what a collection calls would count
    sys.setprofile(count)
    try:
        given.loss(leaf, weights=weights)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert calls["call"] <= 65, calls
    assert calls["c_call"] <= 50, calls


def test_a_backward_under_compiled_autograd_is_one_graph():
    given = inputs()
    one, other = given.leaf(), given.leaf()
    given.loss(one).backward()
    loss = given.loss(other)
    with compiled_autograd.module()._enable(torch.compile(backend="eager", fullgraph=True)):
        loss.backward()
    assert torch.equal(one.grad, other.grad)


def _loss_in_child(given, results):
    results.put(given.loss(given.logp).item())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_worker_does_not_hang():
    """The child has none of OpenMP's threads, which the parent has used for this many tokens."""
    torch.set_num_threads(2)
    given = inputs(rows=8, length=16384)
    expected = given.loss(given.logp).item()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_loss_in_child, args=(given, results))
    child.start()
    child.join(60)
    alive = child.is_alive()
    child.kill()
    assert not alive, "the child hangs"
    assert results.get() == expected


@pytest.fixture
def workspaces(monkeypatch):
    """Those of a test, of which the end is known: on the CPU most are the beginning of a larger one, which hides it."""
    given = []

    def guarded(self, size, like):
        whole = torch.full((16 + size + 65_536,), 0xA5, dtype=torch.uint8, device=like.device)
        given.append((size, whole[16:]))  # kernels are promised no more
        return given[-1][1]

    monkeypatch.setattr(Native, "_workspace", guarded)
    yield given
    for size, workspace in given:
        assert bool((workspace[size:] == 0xA5).all()), f"a kernel writes behind its workspace of {size} bytes"


@pytest.mark.parametrize("backend", [name for name in NATIVE if name != "triton"])
def test_no_kernel_writes_behind_its_workspace(backend, workspaces):
    torch.set_num_threads(3)
    rows, length = (48, 90) if backend == "cuda_emulated" else (400, 90)
    tokens, each = inputs(rows, length, backend), torch.arange(5_000, device=testing.device_of(backend))
    batch, scores, quantile = tokens.batch, tokens.entropy, (3, 4, OrderRule.CEIL)
    scopes = (batch.cu_seqlens, batch.group_ids, rows // 2)
    for gate in (*GATES.values(), hpo.gates.fiberpo(), hpo.gates.mis()):
        rollout = {"rollout_logp": tokens.old_logp - 0.1} if gate.corrections else {}
        for entropy in (None, scores):
            loss = functools.partial(hpo.policy_loss_and_grad, gate=gate, entropy=entropy, backend=backend, **rollout)
            loss(tokens.logp, tokens.old_logp, tokens.advantages, batch)
    window = (-3, 4, Boundary.ZERO, Invalid.SKIP, WindowAggregate.MEAN)
    ops.window_score(scores, batch.mask, batch.cu_seqlens, *window, backend)
    ops.select_top(scores, *quantile, True, batch.mask, batch.cu_seqlens, backend)
    ops.order_statistics(scores, *scopes, *quantile, batch.mask, backend)
    ops.select_exact(scores, *scopes[:2], each[: rows // 2], None, batch.mask, backend)
    ops.covariance(scores, each[:rows].float(), batch.cu_seqlens, batch.mask, *TokenDraw(), backend)
    ops.group_statistics(each.float(), each // 3, None, None, backend)
    hpo.advantages.grpo(each.float(), each // 3, backend=backend)
    assert len(workspaces) >= 13, "the workspaces of these calls come from elsewhere"


@pytest.mark.parametrize("backend", [name for name in NATIVE if name != "triton"])
def test_nor_do_those_of_unusual_sizes(backend, workspaces):
    """Ids as far apart as those that are numbers already may be; segments that overlap; rows of no or one token, for
    CUDA more than all blocks of a launch take at once; as many tokens as whole tasks of the CPU have."""
    place = testing.device_of(backend)
    for units in (100, 4096, 4097):  # CUDA keeps a table for more than 4096
        reach = 2 * units + 63
        ids = torch.nn.functional.pad(torch.zeros(units - 1, dtype=torch.int64), (0, 1), value=reach).to(place)
        values, expected = torch.arange(units).float().to(place), torch.zeros(6, dtype=torch.float64)
        statistics = ops.group_statistics(values, ids, None, None, backend)[:, -1].cpu()
        alone = ops.group_statistics(values[-1:], ids[-1:], None, None, backend)[:, 0].cpu()
        assert torch.equal(statistics, alone) and not torch.equal(alone, expected)
        advantages = hpo.advantages.grpo(values, ids, backend=backend).cpu()
        assert advantages[-1] == 0 and advantages[0] < 0 < advantages[units - 2]
        term = hpo.advantages.Term(values, ids)
        assert torch.equal(hpo.advantages.combine([term] * 2, backend=backend).cpu(), 2 * advantages)
    overlapping = torch.tensor([0, 160, 60, 300]).to(place)
    scores, of_scopes = torch.arange(300).float().to(place), torch.zeros(3, dtype=torch.int64, device=place)
    ops.order_statistics(scores, overlapping, of_scopes, 1, 3, 4, OrderRule.CEIL, None, backend)
    ops.select_exact(scores, overlapping, of_scopes, of_scopes[:1] + 7, None, None, backend)
    short = torch.arange(0, 301, 5).to(place)
    ops.select_exact(scores, short, torch.zeros_like(short[1:]), of_scopes[:1] + 7, None, None, backend)
    torch.set_num_threads(3)  # more than the CPU has blocks of windows
    window = (Boundary.SHRINK, Invalid.SKIP, WindowAggregate.MEAN, backend)
    for tokens, widths in ((3000, (2048, 2049)), (16_384, (2049,) if backend == "cpu" else ())):
        x, offsets = torch.zeros(tokens, device=place), torch.tensor([0, tokens]).to(place)
        for width in widths:
            ops.window_score(x, None, offsets, 1 - width, 0, *window)
    tokens = 32_768 if backend == "cpu" else 512
    steps, x = torch.arange(0, tokens + 1, 2), torch.zeros(tokens, device=place)
    batch = hpo.PackedBatch(steps[:: tokens // 2], cu_steps=steps).to(place)
    hpo.policy_loss_and_grad(x, x, x[:1] + 1, batch, hpo.gates.step_gspo(), backend=backend)
    for lengths in ([tokens], [1] * 4200, [0] * 2000 + [1, 1]):
        batch = hpo.PackedBatch.from_lengths(lengths).to(place)
        x, ones = torch.zeros(sum(lengths), device=place), torch.ones(len(lengths), device=place)
        every = (hpo.gates.ppo_clip(), hpo.gates.gspo(), hpo.gates.fiberpo())
        for gate in every[: 1 if len(lengths) > 4000 and backend == "cuda_emulated" else 3]:
            given = {"group_ids": torch.arange(len(lengths)).to(place) // 2} if gate.levels else {}
            hpo.policy_loss_and_grad(x, x, ones, batch.replace(**given), gate, backend=backend)
        mask = hpo.gates.Correction(hpo.gates.Action.MASK, (-1.0, -1.0), (1.0, 1.0), hpo.gates.Unit.TRAJECTORY)
        inputs = PolicyLossInputs(
            x, x, ones, ones, batch.cu_seqlens, leaf_begin=batch.cu_seqlens[:-1], leaf_end=batch.cu_seqlens[1:],
            leaf_row=torch.arange(batch.rows, device=place), ancestors=torch.arange(batch.rows, device=place)[None],
        )  # fmt: skip
        assert bool((ops.correction(inputs, mask.spec(), backend) == 1).all())


@pytest.mark.skipif("cuda_emulated" not in NATIVE, reason="the emulated streams are numbers")
def test_more_streams_than_there_are_counters(monkeypatch, workspaces):
    """A launch on a stream without a counter of its own clears one in its workspace."""
    x, ones, batch = torch.zeros(4), torch.ones(2), hpo.PackedBatch.from_lengths([1, 3])
    for stream in range(1, 1030):
        monkeypatch.setattr(torch, "get_num_threads", lambda stream=stream: stream)
        for _ in range(1 + (stream > 1024)):
            out = hpo.policy_loss_and_grad(x, x, ones, batch, weights=ones, backend="cuda_emulated")
            assert out.loss == -4 and out.metrics["rows"] == 2


@pytest.mark.parametrize("backend", [name for name in NATIVE if name != "triton"])
def test_the_last_check_of_memory(backend):
    """An operator that nothing checked before refuses what is freed, as well: kernels take a null pointer for None."""
    given = torch.zeros(8).double(), torch.tensor([0, 8]), torch.tensor([0, 0])
    x, offsets, none = (each.to(testing.device_of(backend)) for each in given)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="a tensor: expected a tensor with memory, got elements without any"):
        ops.recurrence(freed, x, offsets, backend)
    nothing = x[:0].clone()
    assert ops.recurrence(nothing, nothing, none, backend).numel() == 0


@pytest.mark.skipif("cpu" not in NATIVE, reason="workers of the CPU")
def test_workspaces_of_the_cpu_grow_with_no_more_than_tokens():
    """At most 64 workers have a scratch; results do not depend on their number."""
    module = importlib.import_module("hpo_core._cpu")
    assert module.window_score_workspace(1 << 24, 9) == module.window_score_workspace(1 << 30, 9) < 1 << 23
    assert module.window_score_workspace(100, 1 << 40) < 1 << 17
    for size in (module.order_statistic_workspace, module.covariance_workspace):
        assert size(1 << 30) < 5 << 30
    assert module.order_statistics_workspace(1 << 30, 3) < 5 << 30
    assert module.policy_loss_workspace(1 << 30, 1) < 1 << 28


def test_logits_without_rows_or_columns():
    """An empty rank has logits of no rows; of no vocabulary there are none."""
    call = next(each for each in OPERATOR_CALLS if each.name.endswith(".token_logprobs"))
    of_rows = ("logits", "targets", "temperatures", "floors")
    no_rows = {name: each[:0] for name, each in call.arguments.items() if name in of_rows and each is not None}
    assert call.run(call.arguments | no_rows)[0].numel() == 0
    with pytest.raises(ValueError, match=r"^logits: expected shape \[\.\.\., V\], got \[\d+, 0\]"):
        call.run(call.arguments | {"logits": call.arguments["logits"][:, :0]})
