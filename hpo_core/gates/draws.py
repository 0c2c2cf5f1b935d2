"""Pseudo-random numbers that depend on a seed and a place alone, whatever the device and its threads."""

from __future__ import annotations

import torch

_SPREAD = 6364136223846793005  # a factor of seeds, of which near ones then differ in all bits


def draws_of(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """A pseudo-random number for every int64: splitmix64 of (seed, number), its upper 53 bits."""
    golden, first, second = -7046029254386353131, -4658895280553007687, -7723592293110705685
    z = (numbers + 1).mul_(golden).add_(_signed(seed * _SPREAD, 64))
    return _shifted(_mixed(z, (30, first), (27, second), 31), 11)


def key_of_places(seed: int) -> tuple[int, int]:
    """The factor, which is odd, and the offset, of 32 bits each, with which places draw; no two seeds of 64 bits have
    the same."""
    # The factor of the square is even; without the square, seeds of opposite sign would draw alike.
    key = seed * (2 * seed * _SPREAD + 1442695040888963407)
    return (key // 2**32 * 2 + 1) % 2**32, key % 2**32


def _mixed(z: torch.Tensor, first: tuple[int, int], second: tuple[int, int], last: int) -> torch.Tensor:
    """``z`` in place, after two rounds of a shift and a factor and a last shift."""
    for shift, factor in (first, second):
        z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
    return z.bitwise_xor_(_shifted(z, last))


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """``z >> bits`` of unsigned numbers."""
    return (z >> bits).bitwise_and_((1 << (torch.iinfo(z.dtype).bits - bits)) - 1)


def _signed(number: int, bits: int) -> int:
    """The lowest bits of a number as one with a sign."""
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half
