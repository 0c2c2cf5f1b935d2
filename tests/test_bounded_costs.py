"""Arguments cannot make a call slow, fill a cache, or change between two reads of a kernel."""

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
    """The least process time, because other load only adds to it."""
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


def test_ids_that_collide_in_a_multiplicative_hash_cost_no_more():
    inverse = pow(0x9E3779B97F4A7C15, -1, 1 << 64)  # the inverse of 2^64 / phi: all of these products are small
    products = ((number * inverse) % (1 << 64) for number in range(3 * UNITS))
    chosen = torch.tensor([id for id in products if id < 1 << 63][:UNITS])
    others = torch.randint(0, 1 << 62, (UNITS,), generator=torch.Generator().manual_seed(0))
    values = torch.randn(UNITS, generator=torch.Generator().manual_seed(1))
    assert len(chosen) == UNITS
    # The first ten milliseconds of a process are slow, whatever it does.
    assert cost(lambda: statistics(values, chosen), 20) < 3 * cost(lambda: statistics(values, others), 20)


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


def test_log_ratios_beyond_the_saturation_cost_little():
    noise = torch.randn(TOKENS, generator=torch.Generator().manual_seed(2))
    batch = hpo.PackedBatch(torch.arange(0, TOKENS + 1, TOKENS // 16))
    old_logp, advantages = torch.zeros(TOKENS), torch.ones(batch.rows)

    def of_spread(spread):
        logp, gate = spread * noise, hpo.gates.gspo()
        return cost(lambda: hpo.policy_loss_and_grad(logp, old_logp, advantages, batch, gate))

    assert of_spread(100.0) < 30 * of_spread(0.1)


def test_one_factor_on_all_advantages_costs_one_pass():
    x, batch = torch.zeros(TOKENS), hpo.PackedBatch(torch.tensor([0, TOKENS]))
    advantages = torch.randn(TOKENS, generator=torch.Generator().manual_seed(4))

    def of_gate(gate):
        return cost(lambda: hpo.policy_loss_and_grad(x, x, advantages, batch, gate, advantage_level="token"), 20)

    assert of_gate(hpo.gates.opmd()) < 3 * of_gate(hpo.gates.reinforce())


def test_unordered_rows_have_the_owners_of_the_reference():
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
    kept = resolve("gates", torch.empty(0), "cpu")._gate.cache_info()
    assert kept.maxsize == kept.currsize == native._SPECS


def test_offsets_rewritten_during_calls(native_backends):
    """Another thread exchanges offsets, steps, ids and targets with wild ones while kernels read them."""
    program = """
        import sys
        import threading
        import torch
        import hpo_core as hpo
        from hpo_core import ops
        from hpo_core.segments import statistics

        def call_all(backend, rows, calls):
            tokens, number = 20 * rows, 5000  # more units than CUDA handles without a table
            static = (torch.arange(0, tokens + 1, 20), torch.arange(0, tokens + 1, 4), torch.arange(number) % 700)
            static = (*static, torch.arange(32))
            offsets, steps, ids, targets = static
            good = [tensor.clone() for tensor in static]
            wild = [torch.randint(-(1 << 40), 1 << 40, tensor.shape) for tensor in static]
            done = threading.Event()

            def rewrite():
                while not done.is_set():
                    for tensor, values in (*zip(static, wild), *zip(static, good)):
                        tensor.copy_(values)

            given = {"total_tokens": tokens, "group_ids": ids[:rows], "cu_steps": steps, "validate": False}
            batch, x, values = hpo.PackedBatch(offsets, **given), torch.zeros(tokens), torch.zeros(number)
            gates = (hpo.gates.ppo_clip(), hpo.gates.gspo(), hpo.gates.fiberpo(), hpo.gates.step_gspo())
            writer = threading.Thread(target=rewrite)
            writer.start()
            try:
                for _ in range(calls):
                    for gate in gates:
                        hpo.policy_loss_and_grad(x, x, x[:rows], batch, gate, weights=x[:rows], backend=backend)
                    hpo.entropy.ares(scope="call").fit(x, batch, backend=backend)
                    torch.ops.hpo_core.row_counts(None, offsets, tokens, backend)
                    torch.ops.hpo_core.row_spans(x > 0, offsets, tokens, backend)
                    torch.ops.hpo_core.covariance(x, x[:rows], offsets, None, None, [0.0] * 4, 1, 0, backend)
                    ops.recurrence(x.double(), x.double(), offsets, backend)
                    statistics(values, ids, backend=backend)
                    hpo.token_logprobs(torch.zeros(32, 100), targets, backend=backend)
            finally:
                done.set()
                writer.join()

        for backend, size in {"cpu": (500, 60), "cuda_emulated": (24, 5)}.items():
            if backend in sys.argv:
                call_all(backend, *size)
        print("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(program), *native_backends]
    worker = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (worker.returncode, worker.stdout) == (0, "done\n"), worker.stderr
