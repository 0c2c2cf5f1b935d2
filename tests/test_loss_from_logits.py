"""policy_loss_from_logits: the two calls, to the bit, with the gradient of the logits made while they are at hand."""

import importlib
import math

import pytest
import torch
from breadth import is_interpreted
from catalogue import CATALOGUE, Example
from conftest import NATIVE, ON_GPU
from cover import COVER
from devices import garbage_in_new_memory
from torch.autograd import forward_ad

import hpo_core as hpo
from hpo_core import gates, loss_from_logits
from hpo_core.backends import resolve
from hpo_core.gates import Channel
from hpo_core.prepared import prepare
from hpo_core.specs import BOOLS_OF_TOKENS, FLOATS_OF_TOKENS, LogitRows, LogitType, PolicyLossInputs

native = pytest.mark.parametrize("backend", NATIVE)
V = 37


def data(dtype=torch.float32):
    """Rows of several lengths, an empty one among them, with holes; logits and targets are NaN and wrong there."""
    draw = torch.Generator().manual_seed(0)
    lengths = [5, 0, 9, 3, 4]
    total = sum(lengths)
    mask = torch.rand(total, generator=draw) < 0.8
    batch = hpo.PackedBatch.from_lengths(lengths, mask=mask).without_first_tokens()
    logits = (2 * torch.randn(total, V, generator=draw)).to(dtype)
    targets = torch.randint(0, V, (total,), generator=draw)
    logp = torch.log_softmax(logits.float() / 0.7, -1).gather(-1, targets.roll(-1)[:, None]).squeeze(-1)
    old = logp.roll(1) + 0.3 * torch.randn(total, generator=draw)
    advantages = torch.randn(len(lengths), generator=draw)
    logits[~batch.mask.roll(-1)], targets[~batch.mask] = math.nan, 10**6
    return logits, targets, old, advantages, batch


def two_calls(logits, targets, old, advantages, batch, gate, **options):
    logp, entropy = hpo.token_logprobs(logits, targets, 0.7, batch=batch, backend=options.get("backend"))
    options = {"entropy": entropy.detach()} | options
    out = hpo.policy_loss(logp, old, advantages, batch, gate, **options)
    return out.loss, out.metrics, logp, entropy


def both(logits, *given, factor=1.0, inplace=False, **options):
    """Loss, metrics, logp, entropy and the gradient of the logits, of one call and of two."""
    results = []
    for run in (hpo.policy_loss_from_logits, two_calls):
        leaf = logits.clone().requires_grad_()
        fused = run is hpo.policy_loss_from_logits
        keywords = {"temperature": 0.7, "inplace_gradient": inplace} if fused else {}
        loss, metrics, logp, entropy = run(leaf * 1 if inplace else leaf, *given, **keywords, **options)
        (loss * factor).backward()
        results.append((loss.detach(), metrics.vector, logp.detach(), entropy.detach(), leaf.grad))
    return results


def are_same(one, two):
    """Whether they are the same to the bit: +0 and -0 differ, a NaN equals itself."""
    bits = [[each.contiguous().reshape(-1).view(torch.uint8) for each in tensors] for tensors in (one, two)]
    return all(torch.equal(mine, theirs) for mine, theirs in zip(*bits, strict=True))


GATES = {
    "ppo_clip": (gates.ppo_clip(), {}),
    "cispo": (gates.cispo(), {}),
    "sapo": (gates.sapo(), {}),
    "tis": (gates.tis(), {"rollout_logp": True}),
    "total": (
        gates.RatioGate("total", gates.Clip((0.8, 0.8), (1.2, 1.2)), channel=Channel.TOTAL),
        {"rollout_logp": True},
    ),
    "kl": (gates.dapo(), {"ref_logp": True, "kl": hpo.kl.k3(0.1)}),
    "kl_weight": (gates.dapo(), {"ref_logp": True, "kl": hpo.kl.k3(0.1), "kl_weight": True}),
    "weights": (gates.dapo(), {"token_weight": True, "token_mask": True}),
}
FEW = ("sapo", "weights")  # in the interpreter
# The tensors of a loss that are not always of tokens.
NOT_OF_TOKENS = {
    *("advantages", "weights", "cu_seqlens", "threshold", "target", "leaf_begin", "leaf_end", "leaf_row", "ancestors")
}


def test_every_tensor_of_tokens_moves_with_its_logits():
    tensors = {name for name, kind in PolicyLossInputs.__annotations__.items() if "Tensor" in str(kind)}
    of_tokens = {*FLOATS_OF_TOKENS, *BOOLS_OF_TOKENS}
    assert tensors == NOT_OF_TOKENS | of_tokens, "each tensor of tokens stands in one of the two lists, by dtype"
    of_triton = pytest.importorskip("hpo_core._triton.tokens")._of_tokens
    names = PolicyLossInputs(*PolicyLossInputs._fields)  # each field holds its own name
    assert {*of_triton(names)} == of_tokens | {"advantages", "target"}, "whose alignment Triton asks for"


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, marks=[pytest.mark.long] if is_interpreted(backend) and name not in FEW else [])
        for backend in NATIVE
        for name in GATES
    ],
)
def test_one_call_is_two(name, backend, monkeypatch):
    """Over chunks of two rows of logits, of which rows of the batch are cut."""
    monkeypatch.setattr(loss_from_logits, "_CHUNK", 2 * 4 * V)
    gate, asked = GATES[name]
    logits, targets, old, advantages, batch = data()
    draw = torch.Generator().manual_seed(3)
    options = {key: value for key, value in asked.items() if key == "kl"}
    for key in ("rollout_logp", "ref_logp"):
        if key in asked:
            options[key] = old + 0.1 * torch.randn(old.shape, generator=draw)
    if "token_weight" in asked:
        options |= {"token_weight": torch.rand(old.shape, generator=draw), "token_mask": old > old.median()}
    if "kl_weight" in asked:
        options["selection"] = hpo.entropy.Selection(kl_weight=torch.rand(old.shape, generator=draw))
    before = None if gate.channel is Channel.TOTAL else old  # the ratio to the sampler needs no other
    for inplace in (False, True):
        with garbage_in_new_memory():  # the one call corrects before it knows log-probabilities
            one, two = both(
                logits, targets, before, advantages, batch, gate, inplace=inplace, backend=backend, **options
            )
        assert are_same(one, two)
        read = batch.mask.roll(-1)
        assert one[-1][read].any() and (one[-1][~read] == 0).all()


# ---------------------------------------------------------------------------------------------- read once on a GPU


def is_on_tokens(gate):
    alone = all(each.unit is None and each.channel is Channel.DISCREPANCY for each in gate.corrections)
    return alone and not gate.levels and gate.channel is not Channel.TOTAL


ON_TOKENS = {name: gate for name, gate in CATALOGUE.items() if is_on_tokens(gate)}
CALLS = ("needed", "everything", "paying")


def from_logits(example, dtype):
    """Logits and targets of an example, whose other log-probabilities keep their distance from the policy's."""
    draw, tokens = torch.Generator().manual_seed(7), example.logp.numel()
    logits = torch.randn(tokens, V, generator=draw).to(dtype)
    targets = torch.randint(0, V, (tokens,), generator=draw)
    logp = torch.log_softmax(logits.float() / 0.7, -1).roll(1, 0).gather(-1, targets[:, None]).squeeze(-1)
    for name in ("old_logp", "rollout_logp", "ref_logp"):
        setattr(example, name, getattr(example, name) + logp - example.logp)
    example.batch = example.batch.without_first_tokens()
    return logits, targets


def launches(backend):
    module = "hpo_core._triton.launch" if backend == "triton" else f"hpo_core._{backend}"
    counted = importlib.import_module(module).launches
    return dict(counted if backend == "triton" else counted())


def launched(backend, call):
    before = launches(backend)
    result = call()
    return result, {name: n - before.get(name, 0) for name, n in launches(backend).items() if n != before.get(name, 0)}


METRICS = {
    ("triton", False): {"_sweep": 1, "_finalise": 1},
    ("cuda_emulated", False): {"sweep": 1},
    ("triton", True): {"_prepare_leaves": 1 if ON_GPU else 3, "_sweep_leaves": 1, "_finalise": 1},  # 3: by steps
    ("cuda_emulated", True): {"sweep_leaves": 1},  # of few tokens
}
ONCE = {"triton": "_differentiate_loss", "cuda_emulated": "differentiate_loss"}
on_gpus = pytest.mark.parametrize("backend", [backend for backend in NATIVE if backend in ONCE])


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(backend, name, marks=[] if name in COVER else [pytest.mark.long])
        for backend in NATIVE
        for name in ON_TOKENS
    ],
)
def test_every_gate_on_tokens(name, backend):
    """The inputs are few, or all, or a penalty of each token: every other time in place."""
    gate, dtypes = ON_TOKENS[name], (torch.float32, torch.bfloat16, torch.float16)
    for at, (call, dtype) in enumerate(zip(CALLS, dtypes, strict=True)):
        if is_interpreted(backend) and at != len(name) % 3:
            continue
        example = Example(seed=at, lengths=(5, 0, 7, 1, 4))
        logits, targets = from_logits(example, dtype)
        given = example.needed(gate) if call == "needed" else getattr(example, call)(gate)
        asked = example.call(gate, **given)
        arguments = (targets, asked.old_logp, asked.advantages, asked.batch, gate)
        one, two = both(logits, *arguments, inplace=at % 2 == 1, backend=backend, **asked.keywords)
        assert are_same(one, two) and one[-1].any(), call


@on_gpus
@pytest.mark.parametrize("gate", [gates.dapo(), gates.sapo()], ids=["clip", "term"])
def test_one_launch_reads_the_logits(gate, backend):
    logits, *given = data()
    leaf = logits.requires_grad_()

    def call(leaf):
        return hpo.policy_loss_from_logits(leaf, *given, gate, backend=backend)

    out, counted = launched(backend, lambda: call(leaf))
    assert counted == {ONCE[backend]: 1} | METRICS[backend, gate.spec().is_hierarchical]
    _, counted = launched(backend, out.loss.backward)
    assert counted == {}
    _, counted = launched(backend, lambda: call(leaf.detach()))  # no gradient is wanted
    assert ONCE[backend] not in counted


@on_gpus
def test_a_gradient_that_is_aligned_otherwise_than_its_logits(backend):
    """Rows of logits begin where 128 bits can be loaded, those of the gradient, which has no gaps, do not."""
    draw = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(4, 4104, generator=draw)[:, :4101], torch.tensor([0, 4100, 7, 5])
    batch = hpo.PackedBatch.from_lengths([4]).without_first_tokens()
    given = (targets, None, torch.ones(1), batch, gates.ppo_clip())
    leaf, packed = logits.detach().requires_grad_(), logits.contiguous().requires_grad_()
    for each in (leaf, packed):
        hpo.policy_loss_from_logits(each, *given, backend=backend).loss.backward()
    assert torch.equal(leaf.grad, packed.grad) and leaf.grad.any()


@on_gpus
@pytest.mark.parametrize(
    ("dtype", "columns"),
    [(torch.float32, 4096), (torch.float32, 12_288), (torch.float32, 12_300), (torch.float32, 12_301),
     (torch.bfloat16, 24_576), (torch.float16, 16_392)],
)  # fmt: skip
@pytest.mark.parametrize("inplace", [False, True])
def test_rows_of_several_steps(inplace, dtype, columns, backend):
    """A step of the CUDA kernel is 4,096 float32 or 8,192 others, and rows may end with one, or begin between words."""
    draw = torch.Generator().manual_seed(columns)
    logits, targets = (
        torch.randn(4, columns, generator=draw).to(dtype),
        torch.tensor([0, columns - 1, 7, 4100 % columns]),
    )
    batch = hpo.PackedBatch.from_lengths([4]).without_first_tokens()
    call = (targets, None, torch.ones(1), batch, gates.ppo_clip())
    (one, two), counted = launched(backend, lambda: both(logits, *call, inplace=inplace, backend=backend))
    assert counted[ONCE[backend]] == 1
    assert are_same(one, two) and (one[-1][:3] != 0).float().mean() > 0.5 and (one[-1][3] == 0).all()


@on_gpus
def test_rows_too_long_for_the_cache_are_read_twice(backend, monkeypatch):
    """The bits are the same. The emulated device has three processors and a cache of one megabyte."""
    columns = 100_000
    if backend == "triton":
        monkeypatch.setattr(
            f"hpo_core._triton.{loss_from_logits.__name__[9:]}.processors_and_cache", lambda _: (3, 4000)
        )
        columns = 500
    draw = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(3, columns, generator=draw), torch.tensor([5, 7, columns - 1])
    batch = hpo.PackedBatch.from_lengths([3]).without_first_tokens()
    call = (targets, None, torch.ones(1), batch, gates.ppo_clip())
    (one, two), counted = launched(backend, lambda: both(logits, *call, backend=backend))
    assert ONCE[backend] not in counted
    assert are_same(one, two) and one[-1].any()


@on_gpus
def test_rows_at_once_fit_the_cache(backend):
    """Three quarters of it; two blocks on each multiprocessor or four programs of Triton's, and never fewer."""
    if backend != "triton":
        kernels = resolve("loss_from_logits", torch.zeros(1), backend)
        blocks, float32 = kernels.module.loss_from_logits_blocks, int(LogitType.FLOAT32)
        assert [blocks(rows, 1000, float32) for rows in (1, 5, 8, 1000)] == [1, 5, 8, 8]
        assert [blocks(1000, columns, float32) for columns in (24_576, 24_577, 39_000)] == [8, 0, 0]
        assert [blocks(rows, 39_000, float32) for rows in (1, 5, 6)] == [1, 5, 0]
        assert blocks(1, 100_000, float32) == 1 and blocks(1, 200_000, float32) == 0
        assert [blocks(rows, 100_000, int(LogitType.BFLOAT16)) for rows in (3, 4)] == [3, 0]
        return
    kernels = importlib.import_module("hpo_core._triton.loss_from_logits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "processors_and_cache", lambda _: (4, 160_000))
        programs = lambda columns, rows: kernels._programs(torch.empty(1, columns), rows)  # noqa: E731
        assert [programs(10, rows) for rows in (1, 15, 16, 1000)] == [1, 15, 16, 16]
        assert [programs(columns, 1000) for columns in (1_875, 1_876, 3_000)] == [16, 0, 0]
        assert programs(1_876, 15) == 15 and programs(7_501, 3) == 3 and programs(7_501, 4) == 0


@native
@pytest.mark.parametrize("inplace", [False, True])
def test_logits_that_are_not_finite(inplace, backend):
    """Undefined rows are NaN, and the others what they are without them."""
    logits, *given = data()
    mask = given[-1].mask
    rows = mask.roll(-1).nonzero().flatten()
    targets = given[0]
    logits[rows[0], 3] = math.nan
    logits[rows[1], 4] = math.inf
    logits[rows[2]] = -math.inf
    logits[rows[3], targets[rows[3] + 1]] = -math.inf
    logits[rows[4], (targets[rows[4] + 1] + 1) % V] = -math.inf
    one, two = both(logits, *given, gates.ppo_clip(), inplace=inplace, backend=backend)
    assert are_same(one, two)
    assert one[-1][rows[:3]].isnan().all() and not one[-1][rows[4:]].isnan().any()


def test_a_target_outside_the_vocabulary_is_no_token(backend):
    """Neither is -100, which labels have at what the loss leaves out, where the mask counts it, nor the least number of
    32 or 64 bits, which NaN becomes as an integer."""
    logits, targets, *given = data()
    counted = given[-1].mask.nonzero().flatten()[:3]
    found = []
    for target in (-100, -1, V, -(2**31), -(2**63)):
        leaf, tokens = logits.clone().requires_grad_(), targets.index_fill(0, counted, target)
        tokens = tokens.int() if target == -(2**31) else tokens
        out = hpo.policy_loss_from_logits(leaf, tokens, *given, backend=backend)
        out.loss.backward()
        assert out.metrics["nan_tokens"] == 3 and out.logp[counted].isnan().all()
        found.append((out.loss.detach(), leaf.grad))
    assert all(are_same(each, found[0]) for each in found)


@native
def test_padded_rows_and_a_temperature_of_each_token(backend):
    """Rows of logits at strides of their own, a slice of a longer vocabulary; on-policy in place."""
    draw = torch.Generator().manual_seed(11)
    model, tokens = torch.randn(3, 6, V + 5, generator=draw), torch.randint(0, V, (3, 6), generator=draw)
    mask = torch.rand(3, 6, generator=draw) < 0.7
    mask[:, 0] = False
    each = 0.5 + torch.rand(3, 6, generator=draw)
    batch, advantages = hpo.PackedBatch.from_padded(mask), torch.randn(3, generator=draw)
    for old in (-torch.rand(3, 6, generator=draw), None):
        given, results = (old, advantages, batch, gates.dapo()), []
        for fused in (True, False):
            leaf = model.clone().requires_grad_()
            if fused:
                out = hpo.policy_loss_from_logits(
                    (leaf * 1)[..., :V], tokens, *given, temperature=each, inplace_gradient=old is None, backend=backend
                )
                loss, logp = out.loss, out.logp
            else:
                logp, entropy = hpo.token_logprobs(leaf[..., :V], tokens, each, batch=batch, backend=backend)
                loss = hpo.policy_loss(logp, *given, entropy=entropy.detach(), backend=backend).loss
            loss.backward()
            results.append((loss.detach(), logp.detach(), leaf.grad))
        assert are_same(*results) and results[0][-1].any()


@on_gpus
@pytest.mark.parametrize(
    "offsets",
    [[0, 5, 5, 14, 17, 21], [0, 9, 5, 14, 17, 21], [-3, 5, 5, 14, 17, 21], [0, 5, 5, 14, 17, 40], [0, 0, 0, 0, 0, 0],
     [9, 5, 30, -1, 4, 21]],
)  # fmt: skip
def test_offsets_are_data(offsets, backend):
    """Whatever offsets are, a token has the row that the sweep of the loss finds; Triton's looks for it elsewhere."""
    logits, targets, old, advantages, batch = data()
    logits[logits.isnan()] = 0.0
    targets = targets.clamp(max=V - 1).roll(-1)
    targets[-1] = -100
    zeros = torch.zeros(old.numel())
    inputs, spec, *_ = prepare(zeros, old, advantages, batch, gates.dapo(), backend=backend, _logp_known=False)
    inputs = inputs._replace(mask=None, cu_seqlens=torch.tensor(offsets))
    rows = LogitRows(logits, targets, None, 0.7, -100, None, 0, V)
    once, kernels, run = (
        resolve("loss_from_logits", logits, backend).loss_from_logits,
        resolve("logprobs", logits, backend),
        resolve("gates", logits, backend).policy_loss,
    )
    into = torch.full_like(logits, math.nan)
    logp, _ = once(rows, inputs, spec, into)
    expected = torch.empty_like(logits)
    logps, _, statistics = kernels.token_logprobs(rows, 3)
    of_logp = run(inputs._replace(logp=logp), spec, True, False)[2].roll(-1)
    kernels.token_logprobs_backward(rows, statistics, of_logp, None, expected)
    assert torch.equal(logp, logps.roll(1))
    assert torch.equal(into, expected) or (backend == "triton" and offsets != sorted(offsets))
    assert torch.isfinite(into).all()


# ------------------------------------------------------------------------------------------------------------ every way


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_and_an_incoming_gradient(dtype, backend):
    one, two = both(*data(dtype), gates.ppo_clip(), backend=backend)
    assert one[-1].dtype == dtype and are_same(one, two)
    one, two = both(*data(), gates.ppo_clip(), factor=3.0, backend=backend)
    assert torch.allclose(one[-1], two[-1], 1e-6, 0)


@pytest.mark.parametrize("backend", ["reference", *NATIVE])
def test_padded_logits_on_policy_with_an_advantage_for_each_token(backend, monkeypatch):
    monkeypatch.setattr(loss_from_logits, "_CHUNK", 3 * 4 * V)
    draw = torch.Generator().manual_seed(5)
    model = torch.randn(3, 8, V, generator=draw)
    tokens = torch.randint(0, V, (3, 8), generator=draw)
    mask = torch.rand(3, 8, generator=draw) < 0.7
    mask[:, 0] = False
    batch = hpo.PackedBatch.from_padded(mask)
    advantages = torch.randn(3, 8, generator=draw)
    given = (tokens, None, advantages, batch, gates.reinforce())
    one, two = both(model, *given, advantage_level="token", backend=backend)
    assert are_same(one, two)
    plain = hpo.policy_loss_from_logits(model, *given, temperature=0.7, advantage_level="token", backend=backend)
    assert torch.equal(plain.loss, one[0]) and not plain.loss.requires_grad


def test_its_loss_may_be_divided_in_place():
    logits, *given = data()
    whole, halved = (logits.clone().requires_grad_() for _ in range(2))
    hpo.policy_loss_from_logits(whole, *given).loss.backward()
    loss = hpo.policy_loss_from_logits(halved, *given).loss
    loss /= 2
    loss.backward()
    assert torch.equal(halved.grad, whole.grad / 2)


def test_memory_and_a_second_backward():
    logits, *given = data()
    leaf = logits.requires_grad_()
    computed = leaf * 1
    loss = hpo.policy_loss_from_logits(computed, *given, inplace_gradient=True).loss
    version = computed._version
    loss.backward()
    assert version > 0
    with pytest.raises(ValueError, match="loss: its gradient has been handed on"):
        loss.backward()
    computed = leaf * 1
    loss = hpo.policy_loss_from_logits(computed, *given, inplace_gradient=True).loss
    with torch.no_grad():
        computed.div_(2)
    with pytest.raises(ValueError, match="logits: expected those that the call has written its gradient over"):
        loss.backward()
    loss = hpo.policy_loss_from_logits(leaf * 1, *given).loss
    leaf.grad = None
    loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    loss.backward()
    assert torch.equal(leaf.grad, 2 * once)


@pytest.mark.parametrize("inplace", [False, True])
def test_other_derivatives_are_refused_by_name(inplace):
    logits, *given = data()
    leaf = logits.requires_grad_()

    def loss(logits):
        return hpo.policy_loss_from_logits(logits, *given, inplace_gradient=inplace).loss

    (expected,) = torch.autograd.grad(3 * loss(leaf * 1), leaf)
    (grad,) = torch.autograd.grad(3 * loss(leaf * 1), leaf, create_graph=True)
    assert torch.equal(grad, expected), "the first derivative alone is fine"
    batched = torch.autograd.grad(loss(leaf * 1), leaf, torch.tensor([1.0, 3.0]), is_grads_batched=True)[0]
    assert torch.equal(batched[1], expected), "several at once are, too"
    refused = "policy_loss_from_logits: {} derivatives .*are not supported"
    with pytest.raises(RuntimeError, match=refused.format("second")):
        torch.autograd.grad(grad.square().sum() + loss(leaf * 1), leaf)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=refused.format("forward-mode")):
        loss(forward_ad.make_dual(leaf.detach(), leaf.detach()))


@pytest.mark.parametrize(
    ("gate", "options", "error", "message"),
    [
        (gates.gspo(), {}, ValueError, "gate: expected one on tokens alone, got 'gspo'"),
        (gates.fiberpo(), {}, ValueError, "gate: expected one on tokens alone, got 'fiberpo'"),
        (gates.opsm(0.1), {}, ValueError, "gate: expected one on tokens alone"),
        (None, {"report": ("tokens",)}, ValueError, "report, process_group: .* call token_logprobs and policy_loss"),
        (None, {"report": ("tokens",), "backend": "reference"}, ValueError, "report, process_group: .*neither"),
        (None, {"process_group": object(), "backend": "reference"}, ValueError, "report, process_group: .*neither"),
        (None, {"inplace_gradient": True}, ValueError, "inplace_gradient: expected logits that a model has computed"),
        (None, {"temperature": 0.0}, ValueError, "temperature: expected"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_named(gate, options, error, message):
    logits, *given = data()
    with pytest.raises(error, match=message):
        hpo.policy_loss_from_logits(logits.requires_grad_(), *given, gate, **options)


OTHERS, LATER = "gate: expected one on tokens alone, got 'gspo', under which", "gate: '{}' corrects by logp, which this"


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_backend_refuses_the_same_gates_and_says_why(backend):
    logits, targets, old, *given = data()
    cases = [(gates.gspo(), old, {}, OTHERS), (gates.opsm(0.1), old, {}, OTHERS.replace("gspo", "opsm"))]
    for gate in (gates.dppo_tv(), gates.dppo_kl(), gates.rec()):  # tokens alone, but factors of their own staleness
        cases.append((gate, old, {}, LATER.format(gate.name)))
    for gate in (gates.tis(), gates.icepop(0.5, 2.0)):
        message = f"old_logp: without it '{gate.name}' compares rollout_logp with logp, .*; pass old_logp, or call"
        cases.append((gate, None, {"rollout_logp": old}, message))
    message = "rollout_logp: the gate 'tis' corrects by the sampler's log-probabilities, and got none"
    cases.append((gates.tis(), None, {}, message))
    for gate, old_logp, options, message in cases:
        with pytest.raises(ValueError, match=f"^{message}"):
            hpo.policy_loss_from_logits(logits, targets, old_logp, *given, gate, backend=backend, **options)
