"""The pictures of speed and of learning in the manual: they show what the pages say, and the scripts draw them."""

import json
from pathlib import Path

import pytest
from lazily import script

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
PAGES = {"step_time.png": "trl_measured.md", "cpu_floors.png": "benchmarks.md", "gpu_model.png": "benchmarks.md"}


@pytest.mark.parametrize("name", PAGES)
def test_a_picture_shows_the_numbers_of_its_page(name):
    pictures = script("bench/speed_pictures.py")
    _, numbers = pictures.PICTURES[name]
    picture = (ROOT / "docs/pictures" / name).read_bytes()
    assert pictures.digest(numbers()).encode() in picture, "run: python bench/speed_pictures.py"
    assert picture.startswith(b"\x89PNG") and len(picture) < 120_000
    assert f"(pictures/{name})" in (ROOT / "docs" / PAGES[name]).read_text()


def test_the_parts_of_a_step_add_up_to_the_whole_of_the_page():
    (_, parts), page = script("bench/speed_pictures.py").parts_of_a_step(), (ROOT / "docs/trl_measured.md").read_text()
    (whole,) = [line.split("|") for line in page.splitlines() if line.startswith("| whole |")]
    for at in (1, 2):
        said = float(whole[at + 1].split()[0])
        assert sum(part[at] for part in parts) == pytest.approx(said, rel=0.01)


def test_floors_of_peers_are_times_the_call_with_autograd():
    # docs/benchmarks_losses.md: 0.64 ms, 0.421 without autograd, 1.3 floors, eager 35.9x
    (case,) = [case for case in script("bench/speed_pictures.py").losses() if case.name == "ppo_clip"]
    assert case.ours == 1.3
    assert case.with_autograd == pytest.approx(1.3 * 0.64 / 0.421)
    assert case.peers["eager PyTorch"] == pytest.approx(35.9 * case.with_autograd)


def test_the_gpu_model_is_that_of_the_page_of_log_probabilities():
    """8,192 rows of 151,936 logits: 10.4 instructions a logit take 0.56 to 0.69 ms, two bytes of each 0.83 ms."""
    model, logits = script("bench/speed_pictures.py"), 8192 * 151_936
    slow, fast = (1e3 * logits * 10.4 / share for share in model.ISSUED)
    assert (round(fast, 2), round(slow, 2)) == (0.56, 0.69)
    assert round(1e3 * logits * 2 / model.BYTES_A_SECOND, 2) == 0.83


def test_a_preset_takes_what_its_kernels_do():
    page = (ROOT / "docs/gpu.md").read_text()
    (loop,) = [
        line.split("|")
        for line in page.splitlines()
        if line.startswith("| `sweep<0, 0>` |") and len(line.split("|")) == 16
    ]
    first = script("bench/speed_pictures.py").gpu_presets()[0]
    assert first.name.startswith("reinforce, ppo_clip")
    ((kernel, issue, memory),) = first.kernels
    assert kernel == "sweep<0, 0>"
    assert issue[0] == pytest.approx(1e6 * 2**20 * float(loop[4]) / (132 * 1.7e9 * 4 * 0.8 * 32))
    assert memory == pytest.approx(1e6 * 2**20 * 4 * (int(loop[9]) + int(loop[10])) / 3.0e12)


def test_a_table_that_a_page_lacks_is_an_error(tmp_path, monkeypatch):
    model = script("bench/speed_pictures.py")
    monkeypatch.setattr(model, "DOCS", tmp_path)
    (tmp_path / "trl_measured.md").write_text(
        "| | GRPOTrainer | HPOTrainer | ratio |\n|---|---|---|---|\n| a | 1 s | 2 s | 2 |\n"
    )
    with pytest.raises(ValueError, match="named 'whole'"):
        model.parts_of_a_step()


def test_the_pictures_of_speed_are_drawn(tmp_path, capsys):
    script("bench/speed_pictures.py").main(["--output", str(tmp_path)])
    assert capsys.readouterr().out.count("written") == len(PAGES)
    assert {path.name for path in tmp_path.iterdir()} == set(PAGES)


def test_curves_are_smoothed_over_the_last_ten_and_have_the_error_of_their_seeds():
    curves = script("bench/curve_pictures.py")
    assert curves.smoothed(range(12)) == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5.5, 6.5]
    mean, error = curves.over_seeds([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    assert mean == [1, 1] and error == pytest.approx([3**-0.5, 0])


def results_in(folder):
    """The files that three short runs would leave: a constant curve for each kind, so that a mix-up of names shows."""
    curve = iter(range(100))
    kinds = ("GRPOTrainer", "HPOTrainer", "GRPO nudged")
    methods = ("none", "forking_tokens", "ares", "epo", "adaptive", "random")
    runs = {str(seed): {kind: [next(curve) / 100] * 4 for kind in kinds} for seed in range(2)}
    (folder / "learning_curves.json").write_text(json.dumps(runs))
    runs = {str(seed): {kind: {"rewards": [next(curve) / 100] * 4} for kind in methods} for seed in range(2)}
    (folder / "entropy_curves.json").write_text(json.dumps(runs))
    names = ("grpo", "gigpo", "hgpo", "grpo_discounted")
    runs = [{"estimator": name, "success": [next(curve) / 100] * 4} for name in names for _ in range(2)]
    (folder / "agent.json").write_text(json.dumps({"runs": runs}))


def test_learning_curves_are_those_of_the_runs(tmp_path, capsys):
    results_in(tmp_path)
    curves = script("bench/curve_pictures.py")
    first = {name: [curve[0] for curve in of_seeds] for name, of_seeds in curves.trainers(tmp_path).items()}
    assert first == {
        "GRPOTrainer": [0.0, 0.03], "HPOTrainer": [0.01, 0.04], "GRPOTrainer, nudged (control)": [0.02, 0.05],
    }  # fmt: skip
    assert curves.entropies(tmp_path)["random fifth (control)"][1] == [0.17] * 4
    assert curves.agents(tmp_path)["grpo, discounted (control)"] == [[0.24] * 4, [0.25] * 4]
    curves.main(["--results", str(tmp_path), "--output", str(tmp_path / "pictures")])
    assert capsys.readouterr().out.count("written") == 2
    for name in curves.PICTURES:
        assert (tmp_path / "pictures" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "page"), [("learning_curves.png", "trl_measured.md"), ("agent_curves.png", "demo_agent.md")]
)
def test_the_page_shows_curves_that_are_small(name, page):
    picture = (ROOT / "docs/pictures" / name).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 120_000
    assert f"(pictures/{name})" in (ROOT / "docs" / page).read_text()
