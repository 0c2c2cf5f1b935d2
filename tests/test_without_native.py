"""Every public call on the reference, with PyTorch alone, as on a machine without a compiler or on Windows."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from valid_calls import calls, tensors_of


def results():
    """The result of every public call that names no backend."""
    found = {}
    for at, call in enumerate(calls()):
        if not call.name.startswith("torch.ops.") and "backend" not in call.arguments:
            try:
                found[f"{at} {call.name}"] = tensors_of(call.run())
            except Exception as error:
                found[f"{at} {call.name}"] = repr(error)
    return found


WITHOUT_NATIVE = """
import os, sys, warnings
sys.path.insert(0, sys.argv[1])
sys.modules.update(dict.fromkeys(("hpo_core._cpu", "hpo_core._cuda", "hpo_core._cuda_emulated")))
import torch
del os.register_at_fork  # as on Windows
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("default")
    from test_without_native import results
    found = results()
ours = {str(each.message) for each in seen if "hpo_core" in str(each.message)}
torch.save((found, ours), sys.argv[2])
"""


def test_every_public_call_without_a_native_build(tmp_path):
    """PyTorch alone gives the same numbers, within rounding, and one warning that names the fix."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run(
        [sys.executable, "-c", WITHOUT_NATIVE, Path(__file__).parent, tmp_path / "found"],
        check=True, env=environment,
    )  # fmt: skip
    found, warned = torch.load(tmp_path / "found", weights_only=False)
    (message,) = warned
    assert "HPO_CORE_BACKEND=reference" in message and "no native backend serves cpu tensors here" in message
    expected = results()
    assert list(found) == list(expected) and len(found) >= 150
    for name, ours in expected.items():
        assert isinstance(found[name], list) == isinstance(ours, list), (name, found[name])
        for one, other in zip(found[name], ours, strict=True) if isinstance(ours, list) else ():
            assert one.shape == other.shape, name
            assert torch.allclose(one.double(), other.double(), 1e-4, 1e-5, equal_nan=True), name
