"""``python -m hpo_core``: what is installed, which backend runs where and why, why another does not."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import warnings
from importlib import metadata

import torch

from ._version import __version__
from .backends import OPS, backends, choice


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hpo_core", description=__doc__.split(": ", 1)[1].capitalize())
    parser.add_argument("--version", action="version", version=f"hpo_core {__version__}")
    parser.parse_args(argv)
    print(
        f"hpo_core {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    for package in ("triton", "trl", "verl"):
        found = importlib.util.find_spec(package) is not None
        print(f"  {package:8} {metadata.version(package) if found else 'not installed'}")

    gpus = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    print(f"\ndevices: {', '.join([f'cpu ({torch.get_num_threads()} threads)', *gpus])}")

    print("\nbackends")
    for name, available in backends().items():
        print(f"  {name:14} {'yes' if available else 'no '}  {available.detail or available.reason}")

    print("\nused when nothing is asked")
    width, kinds = max(map(len, OPS)), ("cpu", "cuda") if gpus else ("cpu",)
    for op in OPS:
        print(f"  {op:{width}} {';  '.join(f'{kind} tensors: {_chosen(op, kind)}' for kind in kinds)}")


def _chosen(op: str, device: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the fallback, whose reasons the report has just given
        return choice(op, device)


if __name__ == "__main__":
    main()
