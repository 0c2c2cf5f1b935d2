"""The recipes of docs/distributed.md under DeepSpeed itself, on two CPUs; `make test-trainers` installs it."""

import os

import pytest
import torch
import torch.distributed as dist
from lazily import skip_without
from ranks import on_ranks
from recipes import CASES, MODES, MOST_TOKENS, judge, losses, policy, weights_of

skip_without("deepspeed")
pytestmark = pytest.mark.long

RATE = 1024.0  # a power of two: the step of SGD shows a gradient to the last bit


def divided(engine, rank, mode, steps):
    weights = weights_of(mode, rank) * engine.gradient_accumulation_steps()
    for _, loss in losses(engine, rank, weights, steps):
        engine.backward(loss())
        engine.step()


def undivided(engine, rank, mode, steps):
    for _, loss in losses(engine, rank, weights_of(mode, rank), steps):
        engine.backward(loss(), scale_wrt_gas=False)
        engine.step()


def any_number(engine, rank, mode, steps):
    """A step of any number of micro-batches, whatever the configuration says."""
    for is_last, loss in losses(engine, rank, weights_of(mode, rank), steps):
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(loss(), scale_wrt_gas=False)
        engine.step()


def added(engine, rank, mode, steps):
    weights = weights_of(mode, rank, "sum") * engine.gradient_accumulation_steps()
    for _, loss in losses(engine, rank, weights, steps):
        engine.backward(loss())
        engine.step()


def stage(number, **more):
    return {"zero_optimization": {"stage": number, **more}}


# A recipe and a configuration. Where a gradient is scaled before ranks add it and how much after changes nothing.
ENGINES = {
    **{f"{recipe.__name__} {n}": (recipe, stage(n)) for n in range(4) for recipe in (divided, undivided, any_number)},
    **{f"added {n}": (added, {**stage(n), "gradient_allreduce_op": "sum"}) for n in range(3)},
    "predivided 0": (divided, {**stage(0), "gradient_predivide_factor": 2.0}),
    "prescaled 0": (divided, {**stage(0), "prescale_gradients": True}),
    "predivided 2": (divided, {**stage(2, reduce_scatter=False), "gradient_predivide_factor": 4.0}),
    "prescaled 3": (divided, {**stage(3, reduce_scatter=False), "prescale_gradients": True}),
}


def every_case(rank):
    # The variables that the launcher sets; the process group is there already.
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "DS_ACCELERATOR": "cpu"}
    import deepspeed

    def gradients(recipe, configuration, mode, steps):
        model = policy()
        before = [parameter.tolist() for parameter in model.parameters()]
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            config=configuration
            | {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": steps,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,  # SGD
            },
            dist_init_required=False,
        )
        torch.set_num_threads(1)
        assert dist.get_world_size(engine.data_parallel_group) == 2
        recipe(engine, rank, mode, steps)
        assert engine.global_steps == 1
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            after = [parameter.tolist() for parameter in model.parameters()]
        engine.destroy()
        return [((torch.tensor(a) - torch.tensor(b)) / RATE).tolist() for a, b in zip(before, after, strict=True)]

    return {(name, *case): gradients(*engine, *case) for name, engine in ENGINES.items() for case in CASES}


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(2, every_case)


@pytest.mark.parametrize("steps", MOST_TOKENS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_have_the_gradient_of_one_process(ranks, engine, mode, steps):
    judge(mode, [found[engine, mode, steps] for found in ranks])
