"""The notebook examples/tour.ipynb: its cells run, and print what the notebook shows."""

import contextlib
import io
import json

import pytest
from changed import ROOT


def test_the_tour_prints_what_it_shows(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setattr(matplotlib, "use", lambda *_, **__: None)
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    names: dict[str, object] = {}
    cells = [
        cell for cell in json.loads((ROOT / "examples/tour.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    pictures = 0
    for cell in cells:
        before, printed = len(pyplot.get_fignums()), io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), names)
        shown = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        assert printed.getvalue() == shown
        has_picture = any("image/png" in output.get("data", {}) for output in cell["outputs"])
        assert has_picture == (len(pyplot.get_fignums()) > before)
        pictures += has_picture
    pyplot.close("all")
    assert len(cells) > 8 and pictures == 4
