"""Groups over 2 and 4 processes: every rank gets, to the bit, what one process computes; ranks without units, too."""

import datetime
import functools
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from hpo_core import advantages
from hpo_core.advantages import over_ranks

UNITS = 29
# world -> how many units each rank has, in turn; one rank has none.
SHARES = {2: (17, 12), 4: (9, 0, 13, 7)}


def units():
    draw = torch.Generator().manual_seed(3)
    rewards = torch.randint(0, 5, (UNITS,), generator=draw) / 4
    rewards[5] = torch.nan
    groups = torch.randint(-1, 5, (UNITS,), generator=draw)
    trajectories = torch.where(groups < 0, -1, groups * 4 + torch.randint(0, 3, (UNITS,), generator=draw))
    return {
        "rewards": rewards,
        "several": torch.randn(2, UNITS, generator=draw),
        "groups": groups,
        "trajectories": trajectories,
        "anchors": torch.randint(0, 3, (UNITS,), generator=draw),
        "lengths": torch.randint(1, 9, (UNITS,), generator=draw).float(),
        "flags": torch.rand(UNITS, generator=draw) < 0.6,
    }


A = advantages
CALLS = {
    "grpo": lambda wrap, u: wrap(A.grpo)(u["rewards"], u["groups"], mask=u["flags"]),
    "lite_ppo": lambda wrap, u: wrap(functools.partial(A.lite_ppo, ddof=0))(u["rewards"], u["groups"]),
    "gdpo": lambda wrap, u: wrap(A.gdpo)(u["several"], u["groups"], lengths=u["lengths"]),
    "dvao": lambda wrap, u: wrap(A.dvao)(u["several"], u["groups"], (1.0, 2.0)),
    "gigpo": lambda wrap, u: wrap(functools.partial(A.gigpo, anchor_ids=u["anchors"]))(
        u["rewards"].nan_to_num(), u["groups"], u["trajectories"]
    ),
    "hgpo": lambda wrap, u: wrap(A.hgpo)(u["rewards"].nan_to_num(), u["groups"], u["trajectories"], u["anchors"]),
    "treepo": lambda wrap, u: wrap(A.treepo)(u["rewards"], [u["groups"], u["anchors"]]),
    "peco": lambda wrap, u: wrap(A.peco)(u["rewards"], u["groups"], u["flags"]),
    "equal rewards": lambda wrap, u: wrap(A.grpo)(torch.full_like(u["rewards"], 0.1), u["groups"], eps=0.0),
}


def part(values, begin, end):
    return {name: value[..., begin:end] for name, value in values.items()}


def run(rank, world, folder):
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=patience)
    begin = sum(SHARES[world][:rank])
    own = part(units(), begin, begin + SHARES[world][rank])
    torch.save({name: call(over_ranks, own) for name, call in CALLS.items()}, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=SHARES)
def ranks(request, tmp_path_factory):
    """What each rank found: this file, run as a program."""
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    programs = [
        subprocess.Popen(
            [sys.executable, __file__, *map(str, (rank, world, folder))], stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    errors = [program.communicate(timeout=120)[1] for program in programs]
    assert not any(program.returncode for program in programs), "\n".join(errors)
    return [torch.load(folder / str(rank)) for rank in range(world)], SHARES[world]


@pytest.mark.parametrize("name", CALLS)
def test_ranks_are_one_process(ranks, name):
    found, shares = ranks
    alone = CALLS[name](lambda estimator: estimator, units())
    assert [each[name].shape[-1] for each in found] == list(shares)
    assert torch.equal(torch.cat([each[name] for each in found], dim=-1), alone)
    if name == "equal rewards":
        assert not alone.any()


def test_what_cannot_be_gathered_is_refused():
    with pytest.raises(ValueError, match="estimator: expected one of rows or steps, got one of tokens"):
        over_ranks(advantages.reinforce_pp)
    with pytest.raises(TypeError, match="estimator: expected one of hpo_core"):
        over_ranks("grpo")


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
