"""Every engine's recipe of docs/distributed.md: two ranks have the gradient of one process."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from recipes import CASES, MODES, MOST_TOKENS, data, judge, losses, policy, weights_of

import hpo_core as hpo
from hpo_core import aggregation


def gradients(model):
    return [
        (parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad).tolist()
        for parameter in model.parameters()
    ]


def ddp(rank, mode, steps):
    model = torch.nn.parallel.DistributedDataParallel(policy())
    for is_last, loss in losses(model, rank, weights_of(mode, rank), steps):
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss().backward()
    return gradients(model.module)


def fsdp2(rank, mode, steps):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    model = policy()
    for module in (model.embedding, model.head, model):
        fully_shard(module, mesh=mesh)
    for is_last, loss in losses(model, rank, weights_of(mode, rank), steps):
        model.set_requires_gradient_sync(is_last)
        loss().backward()
    return gradients(model)


def accelerate(rank, mode, steps):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    # The variables that torchrun sets; the process group is there already.
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    PartialState._reset_state(), AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    torch.set_num_threads(1)  # it has set as many as there are cores, of which a forked process has one
    assert accelerator.num_processes == 2
    model = accelerator.prepare(policy())
    weights = weights_of(mode, rank) * accelerator.gradient_accumulation_steps
    for is_last, loss in losses(model, rank, weights, steps):
        with accelerator.accumulate(model):
            assert accelerator.sync_gradients == is_last
            accelerator.backward(loss())
    return gradients(accelerator.unwrap_model(model))


class Averaging:
    """The arithmetic of DeepSpeed on losses and gradients, and nothing else of it."""

    def __init__(self, model, steps):
        self.model, self.steps = model, steps

    def backward(self, loss):
        (loss / self.steps).backward()

    def step(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def averaging(rank, mode, steps):
    engine = Averaging(policy(), steps)
    weights = weights_of(mode, rank) * engine.steps
    for _, loss in losses(engine.model, rank, weights, steps):
        engine.backward(loss())
    engine.step()
    return gradients(engine.model)


def megatron(rank, mode, steps, context=1):
    """The arithmetic of Megatron on a loss function of two results, of which the second is for its log: ``context``
    ranks share each row, the others are data parallel."""
    model = policy()
    weights = MODES[mode](data(rank)[0], process_group=dist.group.WORLD, ranks=2 // context) * steps
    for _, loss in losses(model, rank, weights, steps):
        out = loss()
        out *= context
        out /= steps
        out.backward()
    for parameter in model.parameters():
        parameter.grad /= 2
        dist.all_reduce(parameter.grad)
    return gradients(model)


def megatron_over_contexts(rank, mode, steps):
    return megatron(rank, mode, steps, 2)


def added(rank, mode, steps):
    """An engine that adds gradients."""
    model = policy()
    weights = MODES[mode](data(rank)[0], process_group=dist.group.WORLD, gradient_reduction="sum")
    for _, loss in losses(model, rank, weights, steps):
        loss().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return gradients(model)


def said(rank, mode, steps):
    """A trainer that says its counts: tokens, rows and groups of the step, and ranks."""
    model, (batch, *_), (whole, *_) = policy(), data(rank), data(0, 1)
    groups = whole.group_ids[whole.row_counts > 0].unique().numel()
    filled = int((whole.row_counts > 0).sum())
    totals = {"token_mean": whole.row_counts.sum(), "fixed_length": whole.rows, "prompt_mean": groups}
    totals["vl_norm"] = (whole.row_counts[whole.row_counts > 0].double() ** -0.5).sum()
    weights = MODES[mode](batch, total=totals.get(mode, filled), ranks=2)
    assert torch.equal(weights, weights_of(mode, rank))
    for _, loss in losses(model, rank, weights, steps):
        loss().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    return gradients(model)


ENGINES = {
    engine.__name__: engine
    for engine in (ddp, fsdp2, accelerate, averaging, megatron, megatron_over_contexts, added, said)
}


def every_case(rank, engine):
    return {case: ENGINES[engine](rank, *case) for case in CASES}


@pytest.fixture(scope="module")
def ranks():
    """The results of both ranks of an engine, once for all cases."""
    found = {}

    def of(engine):
        if engine not in found:
            found[engine] = on_ranks(2, every_case, engine)
        return found[engine]

    return of


@pytest.mark.parametrize("steps", MOST_TOKENS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_have_the_gradient_of_one_process(ranks, engine, mode, steps):
    if engine == "accelerate":
        pytest.importorskip("accelerate")
    judge(mode, [found[mode, steps] for found in ranks(engine)])


class Head(torch.nn.Linear):
    def forward(self, hidden, ids, batch):
        return hpo.linear_token_logprobs(hidden, self.weight, ids, bias=self.bias, batch=batch).logp


def gradients_of_a_head(step, weights, prepare=lambda model: None, gathered=None):
    """``gathered``: what the weight and bias of a head are outside of its forward; None: inside."""
    batch, ids, old, advantages = step
    torch.manual_seed(0)
    model = torch.nn.ModuleList((torch.nn.Embedding(8, 4), Head(4, 8)))
    prepare(model)
    hidden = model[0](ids)
    if gathered is None:
        logp = model[1](hidden, ids, batch)
    else:
        weight, bias = (gathered(each) for each in (model[1].weight, model[1].bias))
        logp = hpo.linear_token_logprobs(hidden, weight, ids, bias=bias, batch=batch).logp
    hpo.policy_loss(logp, old, advantages, batch, weights=weights).loss.backward()
    return gradients(model)


def heads_of_fsdp2(rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Partial

    mesh = dist.init_device_mesh("cpu", (2,))

    def shard(model):
        for module in model:
            fully_shard(module, mesh=mesh)

    def gather(tensor):
        return tensor.full_tensor(grad_placements=[Partial("avg")])

    batch, *given = data(rank)
    batch = batch.without_first_tokens()
    weights = aggregation.token_mean(batch, process_group=dist.group.WORLD, gradient_reduction="mean")
    return [gradients_of_a_head((batch, *given), weights, shard, gathered) for gathered in (None, gather)]


def test_a_head_that_fsdp2_shards_has_the_gradient_of_one_process():
    batch, *given = data(0, 1)
    batch = batch.without_first_tokens()
    expected = gradients_of_a_head((batch, *given), aggregation.token_mean(batch))
    for found in (each for rank in on_ranks(2, heads_of_fsdp2) for each in rank):
        for got, grad in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(grad), rtol=2e-6, atol=2e-7)


# ------------------------------------------------------------------------------------------------- what is refused


def refused(rank, function):
    batch, ids, old, advantages = data(rank)
    with pytest.raises(ValueError) as raised:
        function(batch, policy()(ids), old, advantages)
    dist.all_reduce(torch.ones(1))  # and on all ranks alike
    return str(raised.value)


def by_default(batch, logp, old, advantages):
    hpo.policy_loss(logp, old, advantages, batch)


def by_default_in_the_single_call(batch, logp, old, advantages):
    hpo.hierarchical_policy_loss(logp, old, advantages, batch)


def by_default_with_a_window(batch, logp, old, advantages):
    window, weights = hpo.entropy.forking_tokens("0.5"), torch.ones(batch.rows)
    hpo.hierarchical_policy_loss(logp, old, advantages, batch, weights=weights, window=window, entropy=old.abs())


def by_default_with_a_selection(batch, logp, old, advantages):
    hpo.entropy.forking_tokens("0.5").selection(old.abs(), batch)


def fitted_by_default(batch, logp, old, advantages):
    hpo.entropy.forking_tokens("0.5").fit(old.abs(), batch)


def fitted_and_applied_by_default(batch, logp, old, advantages):
    hpo.entropy.forking_tokens("0.5").fit_apply(old.abs(), batch)


def unsaid(batch, *_):
    aggregation.token_mean(batch, process_group=dist.group.WORLD)


def unsaid_total(batch, *_):
    aggregation.seq_mean_token_mean(batch, total=12)


def of_this_rank(batch, *_):
    aggregation.prompt_mean(batch)


def added_of_this_rank(batch, *_):
    aggregation.token_mean(batch, gradient_reduction="sum")


def averaged_of_this_rank(batch, *_):
    aggregation.fixed_length(batch, 9, gradient_reduction="mean")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (by_default, "weights: 2 ranks are initialised, .*gradient_reduction='mean'"),
        (by_default_in_the_single_call, "weights: 2 ranks are initialised"),
        (by_default_with_a_window, r"threshold: 2 ranks are initialised, .*=window\.fit\(.*process_group="),
        (by_default_with_a_selection, r"batch: 2 ranks are initialised, .*; pass state=window\.fit\(.*process_group="),
        (fitted_by_default, "batch: 2 ranks are initialised, .*; pass process_group=.*, or a window with scope='call'"),
        (fitted_and_applied_by_default, "batch: 2 ranks are initialised, .*; pass .* fit with process_group="),
        (unsaid, "gradient_reduction: 2 ranks are initialised: .*'mean' if the engine averages gradients"),
        (unsaid_total, "gradient_reduction: 2 ranks"),
        (of_this_rank, "gradient_reduction: 2 ranks .* pass process_group="),
        (
            added_of_this_rank,
            "gradient_reduction: 2 ranks .* pass process_group=.*; ranks=1 if this batch is the whole",
        ),
        (averaged_of_this_rank, "gradient_reduction: 2 ranks .* pass process_group="),
    ],
)
def test_a_step_of_several_ranks_needs_its_counts(function, message):
    first, second = on_ranks(2, refused, function)
    assert first == second
    with pytest.raises(ValueError, match=message):
        raise ValueError(first)


def said_to_be_alone(rank):
    """Weights of this rank's tokens alone, and losses with them, are still to be had."""
    batch, ids, old, advantages = data(rank)
    alone = aggregation.token_mean(batch, ranks=1)
    return hpo.policy_loss(policy()(ids), old, advantages, batch, weights=alone).loss.item()


def test_one_rank_alone_is_said():
    for found, rank in zip(on_ranks(2, said_to_be_alone), range(2), strict=True):
        batch, ids, old, advantages = data(rank)
        assert found == hpo.policy_loss(policy()(ids), old, advantages, batch).loss.item()


def test_a_part_does_not_know_the_counts_of_the_step():
    batch, ids, old, advantages = data(0)
    model = policy()
    for part in batch.micro_batches(10):
        assert part.batch.is_part and not batch.is_part
        given = (model(ids[part.tokens]), old[part.tokens], advantages[part.rows])
        with pytest.raises(ValueError, match=r"weights: this batch is a part of a larger one, .* weights\[part.rows\]"):
            hpo.policy_loss(*given, part.batch)
        with pytest.raises(ValueError, match=r"threshold: this batch is a part of a larger one, .*=window\.fit\("):
            by_default_with_a_window(part.batch, *given)
        for mode in MODES.values():
            with pytest.raises(ValueError, match="total: this batch is a part of a larger one"):
                mode(part.batch)
        for changed in (part.batch.replace(mask=None), part.batch.select([0])[0], part.batch.to("cpu")):
            assert changed.is_part
        assert aggregation.token_mean(part.batch, total=21).tolist() == pytest.approx([1 / 21] * len(part.rows))
    (only,) = batch.micro_batches(1000)
    assert only.batch.is_part  # whatever the sizes happen to be


def test_the_named_weights_of_a_gate_of_steps_are_those_of_the_step():
    """Tokens outside every step count in no denominator, neither by default nor in the weights that the error names."""
    steps = torch.tensor([[0, 2], [4, 6], [6, 8], [10, 12]])
    batch, gate = hpo.PackedBatch.from_lengths([6, 6], steps=steps), hpo.gates.step_gspo()
    logp, advantages = torch.linspace(-2, -1, 12), torch.tensor([1.0, -1.0, 2.0, 0.5])
    whole = hpo.policy_loss_and_grad(logp, logp, advantages, batch, gate, advantage_level="step").grad
    for part in batch.micro_batches(6):
        given = (logp[part.tokens], logp[part.tokens], advantages[part.steps], part.batch, gate)
        with pytest.raises(ValueError, match="weights: this batch is a part") as error:
            hpo.policy_loss(*given, advantage_level="step")
        named = str(error.value).partition("weights = ")[2].removesuffix(" of the whole")
        weights = eval(named, {"aggregation": aggregation, "batch": batch})
        found = hpo.policy_loss_and_grad(*given, advantage_level="step", weights=weights[part.rows]).grad
        assert torch.equal(found, whole[part.tokens])


def test_micro_batches_add_up_to_the_step():
    batch, ids, old, advantages = data(0)
    whole, cut = policy(), policy()
    hpo.policy_loss(whole(ids), old, advantages, batch).loss.backward()
    weights = aggregation.token_mean(batch)
    for part in batch.micro_batches(10):
        logp = cut(ids[part.tokens])
        keywords = {"weights": weights[part.rows]}
        hpo.policy_loss(logp, old[part.tokens], advantages[part.rows], part.batch, **keywords).loss.backward()
    for got, expected in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=2e-6, atol=2e-7)


def test_ranks_in_numbers():
    batch = data(0)[0]
    for mode in MODES.values():
        torch.testing.assert_close(mode(batch, total=5, ranks=3), 3 * mode(batch, total=5), rtol=2e-7, atol=0)
    with pytest.raises(ValueError, match="ranks: give it, or gradient_reduction, not both"):
        aggregation.token_mean(batch, ranks=2, gradient_reduction="sum")
    with pytest.raises(ValueError, match="ranks: expected a number of ranks > 0, got 0"):
        aggregation.token_mean(batch, ranks=0)
