"""Two ranks of two micro-batches each compute what one process does: gradients to the bit, sums within the budget."""

import functools

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

import hpo_core as hpo
from hpo_core import aggregation, entropy
from hpo_core.distributed import running_sum, sum_in_order
from hpo_core.gates import Level, LogClip, RatioGate, Tanh, Unit

LENGTHS = [4, 9, 1, 0, 6, 3, 3, 8]
SHARES = ([[0, 1, 2], [3, 4]], [[5], [6, 7]])  # rank -> its micro-batches, rows of the step
ROWS = ([0, 1, 2, 3, 4], [5, 6, 7])
GATES = {"token": hpo.gates.ppo_clip(0.1, 0.2), "trajectory": hpo.gates.gspo(0.05, 0.05)}
WINDOWS = {"token": entropy.forking_tokens("0.3"), "window": entropy.ares(3, "0.6"), "all": entropy.forking_tokens("1")}
MODES = {
    "token_mean": (aggregation.token_mean, "tokens"),
    "seq_mean_token_mean": (aggregation.seq_mean_token_mean, "filled"),
    "seq_mean_token_sum": (aggregation.seq_mean_token_sum, "filled"),
    "fixed_length": (functools.partial(aggregation.fixed_length, length=9), "rows"),
    "vl_norm": (functools.partial(aggregation.vl_norm, length=9, alpha=0.75), "shares"),
    "prompt_mean": (aggregation.prompt_mean, "groups"),
}
OF_GROUPS = RatioGate("groups", LogClip((-0.2, -0.2), (0.2, 0.2)), (Level(Tanh(0.05), unit=Unit.GROUP),))
STATISTICS = {
    "distinct": lambda x: x,
    "tied": lambda x: (4 * x).round(),
    "with NaN": lambda x: x.where(x < 1.5, torch.nan),
}


class Step:
    """One optimiser step, the same in every process."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        tokens, rows = sum(LENGTHS), len(LENGTHS)
        self.logp, noise, self.entropy = torch.randn(3, tokens, generator=generator)
        self.old_logp, self.entropy = self.logp + 0.3 * noise, self.entropy.abs()
        self.advantages = torch.randn(rows, generator=generator)
        mask = torch.rand(tokens, generator=generator) > 0.2
        # no prompt group is spread over the ranks
        self.batch = hpo.PackedBatch.from_lengths(LENGTHS, mask=mask, group_ids=torch.tensor([0, 0, 1, 1, 1, 4, 9, 9]))
        counts = self.batch.row_counts
        self.totals = {"tokens": int(counts.sum()), "filled": int((counts > 0).sum()), "rows": rows, "groups": 4}
        self.totals["shares"] = (counts[counts > 0].double() ** -0.75).sum().item()

    def part(self, rows):
        batch, tokens = self.batch.select(rows)
        return batch, tokens, (self.logp[tokens], self.old_logp[tokens], self.advantages[rows], batch)


def compute(rank):
    """The results of one rank, for the tests to look at."""
    step, world, found = Step(), dist.group.WORLD, {}
    mine = ROWS[rank]
    local, local_tokens, _ = step.part(mine)

    for mode, (weights_of, count) in MODES.items():
        found[mode, "reduced"] = weights_of(local, process_group=world, gradient_reduction="sum")
        found[mode, "mean"] = weights_of(local, process_group=world, gradient_reduction="mean")
        found[mode, "given"] = weights_of(local, total=step.totals[count], gradient_reduction="sum")
    selected = step.entropy[local_tokens] > 0.5
    found["selected"] = aggregation.token_mean(local, process_group=world, gradient_reduction="sum", selected=selected)

    weights = aggregation.token_mean(step.batch, total=step.totals["tokens"], gradient_reduction="sum")
    for name, gate in GATES.items():
        loss, grads, metrics = torch.zeros(()), torch.zeros_like(step.logp), None
        for rows in SHARES[rank]:
            _, tokens, arguments = step.part(rows)
            result = hpo.policy_loss_and_grad(*arguments, gate, weights=weights[rows])
            loss, grads[tokens] = loss + result.loss, result.grad
            metrics = result.metrics if metrics is None else metrics + result.metrics
        dist.all_reduce(loss)
        dist.all_reduce(grads)  # the other rank's tokens are 0 here
        found[name] = loss, grads, metrics.vector, metrics.all_reduce(world).vector

    for name, window in WINDOWS.items():
        for kind, change in STATISTICS.items():
            values = change(step.entropy[local_tokens])
            found["fit", name, kind] = window.fit(values, local, process_group=world)
    averaged = found["token_mean", "mean"]
    found["penalised"] = penalised(local, local_tokens, mine, step, averaged).all_reduce(world).compute()
    for gate in SINGLE_CALLS:
        found["single call", gate] = single_call(local, local_tokens, mine, step, weights[mine], gate, world)
    nobody = hpo.PackedBatch(local.cu_seqlens, torch.zeros_like(local.mask))
    found["fit one rank"] = WINDOWS["token"].fit(
        step.entropy[local_tokens], local if rank else nobody, process_group=world
    )
    found["fit nothing"] = WINDOWS["token"].fit(step.entropy[local_tokens], nobody, process_group=world)
    found["ddp"] = train(step, rank)
    return found


def penalised(batch, tokens, rows, step, weights):
    """Metrics of a loss with a penalty."""
    logp, old_logp = step.logp[tokens], step.old_logp[tokens]
    options = {"ref_logp": old_logp, "kl": hpo.kl.k3(0.5)}
    return hpo.policy_loss(logp, old_logp, step.advantages[rows], batch, weights=weights, **options).metrics


SINGLE_CALLS = (OF_GROUPS, hpo.gates.dapo(), None)  # a gate that spans ranks, one that does not, and the default


def single_call(batch, tokens, rows, step, weights, gate, group=None):
    """dL/dlogp, with a threshold that the call fits itself."""
    logp = step.logp[tokens].requires_grad_()
    hpo.hierarchical_policy_loss(
        logp, step.old_logp[tokens], step.advantages[rows], batch, gate=gate, weights=weights,
        window=WINDOWS["token"], entropy=step.entropy[tokens], process_group=group,
    ).loss.backward()  # fmt: skip
    return logp.grad


class Policy(torch.nn.Module):
    """Log-probabilities with a parameter that all ranks share."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, logp, tokens):
        return logp + self.table[tokens % 5].tanh()


def train(step, rank):
    """The gradient that DistributedDataParallel leaves; the second rank's second micro-batch is empty."""
    model = torch.nn.parallel.DistributedDataParallel(Policy())
    total = step.totals["tokens"]
    weights = aggregation.token_mean(step.batch, total=total, gradient_reduction="mean")
    first, second = SHARES[rank] if rank == 0 else (ROWS[rank], [])
    for rows in (first, second):
        batch, tokens, (logp, old_logp, advantages, _) = step.part(rows)
        model.require_backward_grad_sync = rows is second
        hpo.policy_loss(
            model(logp, tokens), old_logp, advantages, batch, weights=weights[rows], advantage_level="row"
        ).loss.backward()
    return model.module.table.grad


@pytest.fixture(scope="module")
def ranks():
    """The results of each rank."""
    return on_ranks(2, compute)


@pytest.fixture(scope="module")
def step():
    return Step()


@pytest.mark.parametrize("gate", GATES)
def test_the_gradient_of_two_ranks_is_that_of_one_process(ranks, step, gate):
    whole = hpo.policy_loss_and_grad(step.logp, step.old_logp, step.advantages, step.batch, GATES[gate])
    for found in ranks:
        loss, grads, _, _ = found[gate]
        assert torch.equal(grads, whole.grad)
        torch.testing.assert_close(loss, whole.loss, rtol=0, atol=1e-6 * whole.grad.abs().sum().item())


def test_metrics_under_averaged_gradients(ranks, step):
    weights = aggregation.token_mean(step.batch)
    whole = penalised(step.batch, torch.arange(len(step.logp)), range(len(LENGTHS)), step, weights).compute()
    for name, times in {"loss": 2, "penalty": 2, "kl_reference_k3": 1}.items():
        for found in ranks:
            assert found["penalised"][name] == pytest.approx(times * whole[name], rel=1e-5)


@pytest.mark.parametrize("gate", SINGLE_CALLS)
def test_the_single_call_fits_over_the_ranks(ranks, step, gate):
    weights = aggregation.token_mean(step.batch)
    whole = single_call(step.batch, torch.arange(len(step.logp)), range(len(LENGTHS)), step, weights, gate)
    assert torch.equal(torch.cat([found["single call", gate] for found in ranks]), whole)


@pytest.mark.parametrize("gate", GATES)
def test_metrics_of_all_ranks(ranks, step, gate):
    whole = hpo.policy_loss_and_grad(step.logp, step.old_logp, step.advantages, step.batch, GATES[gate])
    one, other = (found[gate][3] for found in ranks)
    assert torch.equal(one, other), "every rank has the same bits"
    torch.testing.assert_close(one, whole.metrics.vector, rtol=1e-6, atol=1e-6)
    folded = hpo.Metrics(ranks[0][gate][2]) + hpo.Metrics(ranks[1][gate][2])
    assert torch.equal(folded.vector, one)
    for extremum in ("log_ratio_min", "log_ratio_max", "tokens", "rows", "selected"):
        assert hpo.Metrics(one)[extremum] == whole.metrics[extremum]


def test_a_tensor_that_is_still_gathered_has_a_gradient_of_its_own():
    """The tensor behind it has none."""
    from torch.distributed import _functional_collectives as collectives

    logp = collectives.AsyncCollectiveTensor(torch.tensor([-0.5, -0.25])).requires_grad_()
    hpo.policy_loss(logp, None, torch.ones(1), hpo.PackedBatch.from_lengths([2])).loss.backward()
    assert (logp.grad + 0).tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_all_ranks(ranks, step, mode):
    expected = MODES[mode][0](step.batch)
    for found, rows in zip(ranks, ROWS, strict=True):
        mine = expected[rows]
        assert torch.equal(found[mode, "reduced"], mine)
        assert torch.equal(found[mode, "given"], mine)
        assert torch.equal(found[mode, "mean"], 2 * mine)


def test_selected_denominators_of_all_ranks(ranks, step):
    expected = aggregation.token_mean(step.batch, selected=step.entropy > 0.5)
    assert all((found["selected"] == expected[0]).all() for found in ranks)


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("name", WINDOWS)
def test_thresholds_of_all_ranks_are_exact(ranks, step, name, kind):
    expected = WINDOWS[name].fit(STATISTICS[kind](step.entropy), step.batch)
    for found in ranks:
        for got, wanted in zip(found["fit", name, kind][:3], expected[:3], strict=True):
            assert torch.equal(got, wanted)
        assert found["fit", name, kind].scored_by == expected.scored_by


def test_thresholds_with_nothing_on_a_rank(ranks, step):
    rows = ROWS[1]
    batch, tokens, _ = step.part(rows)
    expected = WINDOWS["token"].fit(step.entropy[tokens], batch)
    for found in ranks:
        assert torch.equal(found["fit one rank"].threshold, expected.threshold)
        assert found["fit nothing"].threshold.isnan() and found["fit nothing"].population == 0


def test_data_parallel_training(ranks, step):
    """DistributedDataParallel averages, hence gradient_reduction="mean"."""
    model = Policy()
    new = model(step.logp, torch.arange(len(step.logp)))
    hpo.policy_loss(new, step.old_logp, step.advantages, step.batch).loss.backward()
    for found in ranks:
        torch.testing.assert_close(found["ddp"], model.table.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 2**20 + 3])
def test_a_sum_in_order(size):
    values = torch.arange(size) % 7
    for rows in (values, torch.stack((values, -values))):
        assert sum_in_order(rows.float()).tolist() == rows.sum(-1).tolist()
    assert torch.equal(running_sum(values.double()), values.cumsum(0).double())
    drawn, threads = torch.randn(size, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    found = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        found.append(sum_in_order(drawn))
    torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found)


def test_errors():
    batch = Step().batch
    with pytest.raises(ValueError, match=r"gradient_reduction: 'mean' needs torch\.distributed to be initialised"):
        aggregation.token_mean(batch, gradient_reduction="mean")
    with pytest.raises(ValueError, match="gradient_reduction: expected one of sum, mean, got 'average'"):
        aggregation.token_mean(batch, gradient_reduction="average")
    with pytest.raises(ValueError, match="total: give the global count, or process_group to sum it over, not both"):
        aggregation.token_mean(batch, total=3, process_group=dist.ProcessGroup(0, 1))


def of_a_group_without_this_process(rank):
    """The errors of calls whose group is the object that torch makes for a group without this process."""
    group = dist.new_group([0])
    if rank == 0:
        return []
    batch, rewards = hpo.PackedBatch.from_lengths([2, 1]), torch.zeros(2)
    metrics = hpo.policy_loss(torch.zeros(3), None, rewards, batch, weights=rewards).metrics
    calls = [
        lambda: hpo.aggregation.token_mean(batch, process_group=group, gradient_reduction="mean"),
        lambda: hpo.entropy.forking_tokens("0.5").fit(torch.rand(3), batch, process_group=group),
        lambda: hpo.entropy.quantiles(torch.rand(3), batch, "0.5", process_group=group),
        lambda: hpo.advantages.over_ranks(hpo.advantages.grpo, group),
        lambda: metrics.all_reduce(group),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except TypeError as error:
            said.append(str(error))
    return said


def test_a_group_without_this_process_is_refused():
    """Torch's collectives pass over it without a word, and its size is -1."""
    said = on_ranks(2, of_a_group_without_this_process)[1]
    assert len(said) == 5
    for each in said:
        assert "group: expected a torch.distributed.ProcessGroup that this process is in" in each
