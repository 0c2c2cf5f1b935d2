"""Where a published method comes from."""

from __future__ import annotations

import enum


class Provenance(enum.Enum):
    """Where a preset's formula comes from."""

    VERIFIED = "official code run, or the paper's equations and independent numbers"
    PAPER = "the paper's equations"
    RECONSTRUCTED = "reconstructed from partial sources"
