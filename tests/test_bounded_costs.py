"""What a caller can hand over does not decide how long a call takes, how much it keeps, or what it reads twice."""

import subprocess
import sys
import textwrap
import time

import pytest
import torch

import hpo_core as hpo
from hpo_core import native
from hpo_core.backends import resolve
from hpo_core.segments import statistics

UNITS, ROWS, TOKENS = 20_000, 1 << 14, 1 << 18


def cost(call, times=5):
    """The least process time: what else the machine does only adds to it."""
    call()
    took = []
    for _ in range(times):
        begin = time.process_time()
        call()
        took.append(time.process_time() - begin)
    return min(took)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ids_chosen_to_meet_in_a_multiplicative_hash_cost_what_others_do():
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)  # of 2^64 / phi: all of these products are small
    products = ((number * inverse) % (1 << 64) for number in range(3 * UNITS))
    chosen = torch.tensor([id for id in products if id < 1 << 63][:UNITS])
    others = torch.randint(0, 1 << 62, (UNITS,), generator=torch.Generator().manual_seed(0))
    values = torch.randn(UNITS, generator=torch.Generator().manual_seed(1))
    assert len(chosen) == UNITS
    assert cost(lambda: statistics(values, chosen)) < 3 * cost(lambda: statistics(values, others))


CALLS = {
    "ppo_clip": lambda x, batch: hpo.policy_loss_and_grad(x, x, x[:ROWS], batch, weights=x[:ROWS]),
    "gspo": lambda x, batch: hpo.policy_loss_and_grad(x, x, x[:ROWS], batch, hpo.gates.gspo(), weights=x[:ROWS]),
    "window": lambda x, batch: hpo.entropy.ares().score(x, batch),
    "quantile": lambda x, batch: hpo.entropy.ares(scope="call").fit(x, batch),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_broken_offset_costs_little(name):
    offsets = torch.arange(ROWS + 1) * (TOKENS // ROWS)
    broken = offsets.clone()
    broken[ROWS // 2] = -1
    x = torch.zeros(TOKENS)
    sound, other = (hpo.PackedBatch(each, total_tokens=TOKENS, validate=False) for each in (offsets, broken))
    assert cost(lambda: CALLS[name](x, other)) < 4 * cost(lambda: CALLS[name](x, sound))


def test_rows_in_disorder_have_the_same_owners_as_in_the_reference():
    generator = torch.Generator().manual_seed(3)
    reference = resolve("segments", torch.empty(0), "reference")
    for rows in (1, 7, 300, 2000):
        offsets = torch.randint(-5, 5000, (rows + 1,), generator=generator)
        counts = torch.ops.hpo_core.row_counts(None, offsets, 4990, "")
        assert torch.equal(counts, reference.row_counts(None, offsets, 4990))
        offsets = (torch.arange(rows + 1) * (4990 // rows)).clone()
        offsets[rows // 2] += 4000  # two rows overlap others
        counts = torch.ops.hpo_core.row_counts(None, offsets, 4990, "")
        assert torch.equal(counts, reference.row_counts(None, offsets, 4990))


def test_a_schedule_of_epsilons_keeps_a_bounded_number_of_specs():
    batch = hpo.PackedBatch.from_lengths([2])
    for number in range(2 * native._SPECS):
        hpo.policy_loss_and_grad(torch.zeros(2), None, torch.ones(1), batch, hpo.gates.ppo_clip(0.1 + 1e-4 * number))
    kept = resolve("gates", torch.empty(0), "cpu")._spec.cache_info()
    assert kept.maxsize == kept.currsize == native._SPECS


def test_offsets_rewritten_during_calls():
    """Another thread exchanges offsets, and ids, with wild ones while kernels, which release the lock, read them."""
    program = """
        import threading
        import torch
        import hpo_core as hpo
        from hpo_core.segments import statistics

        offsets = torch.arange(0, 40_001, 20)
        good, wild = offsets.clone(), torch.randint(-(1 << 40), 1 << 40, offsets.shape)
        ids = torch.zeros(40_000, dtype=torch.int64)
        done = threading.Event()

        def rewrite():
            while not done.is_set():
                offsets.copy_(wild), ids.fill_(1 << 40), offsets.copy_(good), ids.fill_(0)

        threading.Thread(target=rewrite).start()
        x = torch.zeros(40_000)
        batch = hpo.PackedBatch(offsets, total_tokens=40_000, validate=False)
        for _ in range(300):
            hpo.policy_loss_and_grad(x, x, x[:2000], batch, weights=x[:2000])
            hpo.entropy.ares(scope="call").fit(x, batch)
            torch.ops.hpo_core.row_counts(None, batch.cu_seqlens, 40_000, "")
            statistics(x, ids)
        done.set()
        print("done")
    """
    worker = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert (worker.returncode, worker.stdout) == (0, "done\n"), worker.stderr
