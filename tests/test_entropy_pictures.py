"""The pictures of docs/entropy_explained.md: what they show, and that the script draws them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lazily import script

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/entropy_pictures.py"
NAMES = ("entropy_windows.png", "entropy_slots.png")


def pictures():
    return script(SCRIPT)


def test_the_page_shows_pictures_that_are_small():
    page = (ROOT / "docs/entropy_explained.md").read_text()
    for name in NAMES:
        path = ROOT / "docs/pictures" / name
        assert f"(pictures/{name})" in page
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 120_000


def test_every_slot_changes_the_gradient_where_it_should():
    given = pictures().made_up()
    panels = {title.partition(":")[0]: (torch.tensor(a), torch.tensor(b)) for title, _, a, b in pictures().slots(given)}
    assert panels.keys() == {"mask", "weight", "bounds", "advantage", "KL weight", "penalty"}
    for without, with_slot in panels.values():
        assert not torch.equal(without, with_slot)
    without, masked = panels["mask"]
    assert ((masked == 0) | (masked == without)).all() and (masked != 0).sum() <= 8
    without, weighted = panels["weight"]
    assert (weighted.abs() <= without.abs()).all()
    without, wide = panels["bounds"]
    assert (wide != 0).sum() > (without != 0).sum()
    assert panels["penalty"][0].unique().tolist() == pytest.approx([1.0])
    assert {round(x) for x in panels["penalty"][1].tolist()} == {-1, 1, 3}


def test_numbers_of_no_model_are_drawn(tmp_path, capsys):
    pictures().main(["--made-up", "--output", str(tmp_path)])
    assert capsys.readouterr().out.count("written") == 2
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in NAMES)


def test_the_help_is_a_sentence(capsys):
    with pytest.raises(SystemExit):
        pictures().main(["--help"])
    assert "on the gradient of the loss." in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
@pytest.mark.peers
def test_answers_of_the_demo_are_drawn(tmp_path):
    pytest.importorskip("trl")
    subprocess.run([sys.executable, SCRIPT, "--output", tmp_path], check=True, capture_output=True)
    assert all(10_000 < (tmp_path / name).stat().st_size < 120_000 for name in NAMES)
