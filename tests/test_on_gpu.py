"""Tensors of a GPU through the whole package: public calls, a compiler, CUDA graphs, streams, NCCL, large offsets."""

import functools

import pytest
import torch
from conftest import NATIVE, ON_GPU
from valid_calls import calls, moved, tensors_of

import hpo_core as hpo

if not ON_GPU:
    pytest.skip("this machine has no GPU", allow_module_level=True)

backends = pytest.mark.parametrize("backend", [name for name in NATIVE if name in ("cuda", "triton")])
GATES = {
    "token": hpo.gates.ppo_clip(),
    "correction": hpo.gates.icepop(),
    "sequence": hpo.gates.gspo(),
    "levels": hpo.gates.fiberpo(),
    "term": hpo.gates.sapo(),
}
each_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


CALLS = [call for call in calls() if "generator" not in call.arguments and not call.is_of_testing()]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_call_gives_what_it_gives_on_the_cpu(call):
    expected = tensors_of(call.run())
    found = tensors_of(call.moved("cuda").run())
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        if other.is_floating_point():
            assert torch.allclose(one.cpu(), other, 1e-5, 1e-6, equal_nan=True)
        else:
            assert torch.equal(one.cpu(), other)


def batch_on_gpu():
    rows, draw = 12, torch.Generator().manual_seed(12)
    lengths = torch.randint(0, 70, (rows,), generator=draw).tolist()
    tokens = sum(lengths)
    old_logp = -torch.rand(tokens, generator=draw) - 0.1
    logp = old_logp + 0.2 * torch.randn(tokens, generator=draw)
    rollout_logp = old_logp + 0.1 * torch.randn(tokens, generator=draw)
    batch = hpo.PackedBatch.from_lengths(lengths, mask=torch.rand(tokens, generator=draw) < 0.9)
    advantages = torch.randn(rows, generator=draw)
    return moved((logp, old_logp, rollout_logp, advantages, batch), "cuda")


def loss_of(gate, backend, old_logp, rollout_logp, advantages, batch, **options):
    given = {"rollout_logp": rollout_logp} if gate.reads_rollout else {}
    return lambda leaf: (
        hpo.policy_loss(leaf, old_logp, advantages, batch, gate, backend=backend, **given, **options).loss
    )


def made(gate, backend):
    """Log-probabilities, and the loss as a function of them."""
    logp, *given = batch_on_gpu()
    return logp, loss_of(gate, backend, *given)


def differentiated(function, logp, factor=1.0):
    leaf = logp.detach().clone().requires_grad_()
    loss = function(leaf)
    (loss if factor == 1.0 else loss * factor).backward()
    return loss.detach().clone(), leaf.grad.clone()


@backends
@each_gate
def test_a_factor_multiplies_the_gradient(backend, gate):
    logp, function = made(gate, backend)
    grad = differentiated(function, logp)[1]
    for factor in (3.0, -0.5, 0.0):
        assert torch.equal(differentiated(function, logp, factor)[1], grad * factor)
    leaf = logp.clone().requires_grad_()
    kept = function(leaf)
    (first,) = torch.autograd.grad(kept, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(kept * 2, leaf)
    assert torch.equal(first, grad) and torch.equal(second, 2 * grad)


@backends
@each_gate
def test_a_compiled_function_gives_the_same(backend, gate):
    logp, function = made(gate, backend)
    expected = differentiated(function, logp)
    torch._dynamo.reset()
    found = differentiated(torch.compile(function, fullgraph=True), logp)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@backends
@each_gate
def test_a_graph_replays_on_new_numbers(backend, gate):
    logp, function = made(gate, backend)
    static = logp.clone().requires_grad_()

    def call():
        (grad,) = torch.autograd.grad(function(static), static)
        return grad

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grad = call()
    for shift in (0.0, 0.05):
        with torch.no_grad():
            static.copy_(logp + shift)
        graph.replay()
        assert torch.equal(grad, differentiated(function, logp + shift)[1])


@backends
@each_gate
def test_graphs_run_beside_each_other(backend, gate):
    """One stream has recorded both."""
    logp, function = made(gate, backend)
    expected = differentiated(function, logp)
    graphs, results = [], []
    for _ in range(2):
        static, graph = logp.clone().requires_grad_(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = function(static)
            (grad,) = torch.autograd.grad(loss, static)
        graphs.append((graph, torch.cuda.Stream()))
        results.append((loss.detach(), grad))
    for _ in range(50):
        for graph, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        assert torch.equal(differentiated(function, logp)[0], expected[0])
    torch.cuda.synchronize()
    for found in results:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@backends
@each_gate
def test_a_call_waits_for_its_stream_alone(backend, gate):
    """Inputs that an earlier kernel of the same stream still writes."""
    logp, function = made(gate, backend)
    expected = differentiated(function, logp)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        late = torch.zeros_like(logp)
        torch.cuda._sleep(20_000_000)
        late.copy_(logp)
        found = differentiated(function, late)
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    store = tmp_path_factory.mktemp("nccl") / "store"
    torch.distributed.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@backends
@pytest.mark.parametrize("name", ["sequence", "levels"])
def test_a_group_of_one_rank_changes_nothing(backend, name, nccl):
    logp, *given = batch_on_gpu()
    *tensors, batch = given
    rows = torch.arange(len(batch.cu_seqlens) - 1, device="cuda")
    batch = hpo.PackedBatch(batch.cu_seqlens, batch.mask, trajectory_ids=rows // 2)
    alone = differentiated(loss_of(GATES[name], backend, *tensors, batch), logp)
    shared = differentiated(loss_of(GATES[name], backend, *tensors, batch, process_group=nccl), logp)
    for one, other in zip(shared, alone, strict=True):
        assert torch.allclose(one, other, 1e-5, 1e-9)
    logits, targets = torch.randn(9, 60, device="cuda"), torch.arange(9, device="cuda")
    for one, other in zip(
        hpo.token_logprobs(logits, targets, process_group=nccl, backend=backend),
        hpo.token_logprobs(logits, targets, backend=backend),
        strict=True,
    ):
        assert torch.allclose(one, other, 1e-6, 1e-6)


@backends
def test_a_vocabulary_of_several_ranks_waits_for_no_copy(backend, nccl):
    logits, targets = torch.randn(9, 60, device="cuda"), torch.arange(9, device="cuda")
    for mode in ("default", "error"):  # the first call makes NCCL's communicator
        torch.cuda.set_sync_debug_mode(mode)
        try:
            hpo.token_logprobs(logits, targets, process_group=nccl, backend=backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@backends
def test_more_logits_than_an_int32_counts(backend):
    vocabulary, tokens = 65_536, 33_000
    logits = torch.empty(tokens, vocabulary, dtype=torch.bfloat16, device="cuda")
    last = 3 * torch.randn(5, vocabulary, device="cuda")
    logits[-5:] = last
    targets = torch.full((tokens,), -100, device="cuda")
    targets[-5:] = torch.tensor([0, 7, 65_535, 65_534, 1], device="cuda")
    call = functools.partial(hpo.token_logprobs, backend=backend)
    few = logits[-5:].clone().requires_grad_()
    many = logits.requires_grad_()
    for part, at in ((few, slice(None)), (many, slice(-5, None))):
        result = call(part, targets[-5:] if part is few else targets)
        (result.logp[at].sum() + result.entropy[at].sum()).backward()
        if part is few:
            expected = result
    assert torch.equal(result.logp[-5:], expected.logp) and torch.equal(result.entropy[-5:], expected.entropy)
    assert torch.equal(many.grad[-5:], few.grad) and not many.grad[:100].any()
