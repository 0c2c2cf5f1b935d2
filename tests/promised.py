"""Calls that the promises of a policy loss compare, for all gates of the catalogue."""

import functools

import pytest
from breadth import number, tried
from catalogue import CATALOGUE, Example, run
from cover import COVER


def of_every_gate(names=CATALOGUE):
    """The test for each of these gates, on every backend; but for those of the cover at length, where slow backends try
    all of them, too."""
    cases = [pytest.param(name, marks=[] if name in COVER else pytest.mark.long) for name in names]

    def on_each(test):
        return pytest.mark.usefixtures("at_length")(pytest.mark.parametrize("name", cases)(test))

    return on_each


def plain(example, gate, backend, **inputs):
    """Loss, gradient and metrics of the call without autograd, which on the CPU has quick ways of its own."""
    out = example.run(gate, backend, **inputs)
    return [out.loss, out.grad, out.metrics.vector]


def complete(example, gate, backend, **inputs):
    """The same of the call with autograd, and the loss of every token."""
    out = run(backend, example.call(gate, **inputs))
    return [out.loss, out.grad, out.metrics.vector, out.tokens]


def is_slow(backend):
    """Triton's interpreter takes a hundred times as long as the others."""
    return tried(backend, False, True)


def ways(example, gate, backend):
    """Calls with their inputs: all that the gate takes; few as well where calls are cheap; and few with a penalty that
    has a coefficient for each token where they are cheapest."""
    whole = (complete, example.everything(gate))
    few = ((plain, example.needed(gate)), (complete, example.paying(gate)))
    return whole, *few[: number(backend, at_length=2, machine_code=2, emulated=1, interpreted=0)]


TWELVE = (3, 7, 1, 0, 6, 2, 9, 4, 0, 5, 2, 8)


@functools.cache
def twelve_rows(*third):
    """Rows in several domains, the third of these lengths where it is given; nobody changes them."""
    example = Example(3, (*TWELVE[:2], *third, *TWELVE[2 + len(third) :]))
    assert len(example.batch.domain_ids.unique()) > 1
    return example


@functools.cache
def of_twelve_rows(name, backend, way, *third):
    """The result of a gate, with which several promises compare."""
    example = twelve_rows(*third)
    call, inputs = ways(example, CATALOGUE[name], backend)[way]
    return call(example, CATALOGUE[name], backend, **inputs)
