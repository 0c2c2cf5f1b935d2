"""Every example in the documentation and in the docstrings runs, and prints the output that it shows."""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import itertools
import math
import operator
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import hpo_core
from hpo_core.integrations.prompt_advantages import _DIVIDING, ESTIMATORS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
MANUAL = sorted(ROOT.glob("docs/**/*.md"))
_NEED_TRAINERS = ("axolotl", "ms_swift", "nemo_rl", "rllm", "roll", "skyrl", "torchrl", "trinity", "trl", "verl")
# These need a trainer or hypothesis.
OPTIONAL = ("hpo_core.testing", *(f"hpo_core.integrations.{name}" for name in _NEED_TRAINERS))


def _modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(hpo_core.__path__, "hpo_core.")]
    return [name for name in names if not name.startswith("hpo_core._") and name not in OPTIONAL]


def _imported(name: str) -> types.ModuleType | None:
    """None for a part of an integration where its trainer is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in _NEED_TRAINERS:
            raise
        return None


def listed_in(page: str, before: str) -> list[str]:
    """The names of the sentence that ``before`` ends at a colon."""
    text = (ROOT / f"docs/{page}.md").read_text()
    [sentence] = re.findall(rf"{re.escape(before)}: ([\w,\s]+?)\.\s", text)
    return re.split(r",\s+", sentence)


def test_pages_of_verl_list_what_is_registered() -> None:
    module = ast.parse((ROOT / "hpo_core/integrations/verl.py").read_text())  # verl itself may be missing
    [presets] = [node.value for node in module.body if ast.unparse(node).startswith("PRESETS = ")]
    assert listed_in("verl", "Gates with the bounds of their papers, `hpo_<name>`") == list(eval(ast.unparse(presets)))
    assert listed_in("verl_advantages", "are there as `algorithm.adv_estimator=hpo_<name>`") == list(ESTIMATORS)
    refused = re.search(r"([\w,\s]+) and (\w+) refuse it", (ROOT / "docs/verl_advantages.md").read_text())
    assert refused is not None
    assert [*re.split(r",\s+", refused[1].strip()), refused[2]] == list(_DIVIDING)


def test_the_table_of_heads_has_every_head() -> None:
    page = (ROOT / "docs/gate_operator.md").read_text().partition("| head | Phi | for |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [head.name for head in hpo_core.gates.Head]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page: Path) -> None:
    failures, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0


@pytest.mark.parametrize("name", _modules())
def test_docstrings(name: str) -> None:
    module = _imported(name)
    if module is None:
        pytest.skip("its trainer is not installed")
    if name == "hpo_core.integrations.trl_config":  # its example alone imports TRL
        pytest.importorskip("trl")
    failures, _ = doctest.testmod(module, globs={**vars(module)}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0


def test_every_page_is_in_the_navigation() -> None:
    """MkDocs itself, which `make docs` installs, checks the rest of the site."""
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in MANUAL)


def test_no_docstring_is_broken_by_reflow() -> None:
    """No literal runs over the end of its line, no line ends before a word or two, no entry holds two arguments."""
    broken = []
    for path in sorted((ROOT / "hpo_core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
            if documented:
                prose = re.split(r"^ *>>>", documented, maxsplit=1, flags=re.MULTILINE)[0].split("\n")
                names = "|".join(each.arg for each in ast.walk(node) if isinstance(each, ast.arg)) or "(?!)"
                for line, following in itertools.pairwise([*prose, ""]):
                    rules = {
                        "ends before a word or two": len(line) < 20 and _continues(line, following),
                        "holds two arguments": re.search(rf"\. ({names}): ", line),
                        "ends inside a literal": line.count("``") % 2,
                    }
                    place = f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}: {line.strip()}"
                    broken.extend(f"{place} {rule}" for rule, holds in rules.items() if holds)
    assert broken == []


def _continues(line: str, following: str) -> bool:
    """Whether a sentence continues in the next line of the same paragraph."""
    indents = [len(each) - len(each.lstrip()) for each in (line, following)]
    is_item = following.lstrip().startswith(("*", "|", "-"))
    return bool(line and following) and indents[0] == indents[1] and not is_item and not line.endswith((":", "."))


@pytest.mark.parametrize("name", ["", "advantages", "aggregation", "entropy", "gates", "kl", "segments"])
def test_every_argument_is_described(name: str) -> None:
    """Its function describes it, or the common arguments of the package, which ``help()`` and the API page show."""
    package = importlib.import_module(f"hpo_core.{name}".rstrip("."))
    common = (package.__doc__ or "").partition("Common arguments:")[2]
    described = [package, package.reconstructed] if hasattr(package, "reconstructed") else [package]
    elsewhere = re.compile(r"the same arguments|Arguments as there|(are those of|the rest is as in)\s+:func:")
    unsaid = []
    for function in filter(
        inspect.isfunction, [getattr(module, each) for module in described for each in module.__all__]
    ):
        text = f"{inspect.getdoc(function)} {common} backend"
        if not elsewhere.search(text):
            said, names = set(re.findall(r"\w+", text)), inspect.signature(function).parameters
            unsaid += [f"{function.__name__}: {name}" for name in names if name not in said]
    assert unsaid == []


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = filter(None, map(_imported, _modules()))
    examples = sum(len(test.examples) for module in modules for test in finder.find(module))
    assert examples > 40, examples


def test_every_method_is_in_the_table_of_its_page_and_every_gate_in_the_readme() -> None:
    gates, estimators = hpo_core.gates, hpo_core.advantages
    made = [name for name in gates.__all__ if _annotation(getattr(gates, name)) == "RatioGate" and name != "compose"]
    given = [name for name in estimators.__all__ if getattr(getattr(estimators, name), "provenance", None)]
    assert len(made) > 40 and len(given) > 50
    reconstructed = gates.reconstructed.__all__
    of_tokens = [name for name in given if getattr(estimators, name).level == "token"]
    for page, names in (
        ("README", made),
        ("docs/gates", [*made, *reconstructed]),
        ("docs/advantages", [name for name in given if name not in of_tokens]),
        ("docs/advantages_tokens", of_tokens),
    ):
        words = set(re.findall(r"\w+", (ROOT / f"{page}.md").read_text()))
        assert [name for name in names if name not in words] == [], page


def test_every_op_is_in_the_table_of_status() -> None:
    """A new one has its row, and each room what was tried of it there. ``support_floor`` has no kernels."""
    operators = [each for each in torch._C._dispatch_get_all_op_names() if each.startswith("hpo_core::")]
    names = {each.removeprefix("hpo_core::").removesuffix("_backward") for each in operators} - {"support_floor"}
    rows = [line for line in (ROOT / "docs/status.md").read_text().splitlines() if line.startswith("| `")]
    assert len(names) > 10 and names - set(re.findall(r"`(\w+)`", "".join(rows))) == set()


def _annotation(value: object) -> object:
    return inspect.signature(value).return_annotation if inspect.isfunction(value) else None


# ----------------------------------------------------------------------------------------------------------- the manual

GENERATED = {"gpu.md"}
WORDS = 1500


@pytest.mark.parametrize("page", MANUAL, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_a_page_is_read_in_one_go(page: Path) -> None:
    words = len(page.read_text().split())
    assert words <= WORDS or page.name in GENERATED, (
        f"{words} words of {WORDS}: move a section of {page.name} to a page of its own"
    )


FIRST = ("index", "start", "own_loop", "which_method", "migrating", "gating_explained", "entropy_explained", "faq")


@pytest.mark.parametrize("name", FIRST)
def test_code_of_the_first_pages_fits_its_column(name: str) -> None:
    fences = re.findall(r"^```\w[^\n]*\n(.*?)^```", (ROOT / f"docs/{name}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [line for fence in fences for line in fence.splitlines() if len(line) > 92] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_trainers_of_the_readme_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines name what they use, and verl's are what the loss accepts."""
    trainer = types.ModuleType("hpo_core.integrations.trl")
    trainer.HPOTrainer = lambda *_, **told: told  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    text = (ROOT / "README.md").read_text().partition("## In a trainer")[2]
    python, verl = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[:2]
    names: dict[str, object] = dict.fromkeys(("model", "reward", "config", "dataset"))
    exec(python, names)
    assert names["trainer"]["gate"] == hpo_core.gates.dapo()  # type: ignore[index]
    assert "loss_mode=hpo_dapo" in verl and "actor_rollout_ref.actor.clip_ratio_high=0.28" in verl


def test_the_readme_names_the_trainers_of_their_page() -> None:
    readme, page = (ROOT / "README.md").read_text(), (ROOT / "docs/trainers.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| (?!none|hook|-)", page, re.MULTILINE)
    [named] = re.findall(r"\[all trainers\]\(docs/trainers.md\): (.*?) ·", readme)
    assert set(named.split(", ")) == set(rows) and len(rows) == 20 and "twenty more trainers" in readme


def _prose(page: Path) -> str:
    """A page without what is inside its fences."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("C*.md")], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        is_inside = page.parent == ROOT or place.resolve().is_relative_to(ROOT / "docs")  # the site has docs/ alone
        found = is_inside and place.exists() and (not anchor or anchor in _anchors(place))
        if "://" not in target and not found:
            broken.append(target)
    assert broken == []


def test_every_call_of_the_table_by_situation_is_one() -> None:
    calls = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/which_method.md").read_text(), re.MULTILINE)
    names = {name: getattr(hpo_core, name) for name in ("advantages", "aggregation", "entropy", "gates")}
    assert len(calls) > 25
    assert [call for call in calls if eval(call, names) is None] == []


@pytest.mark.parametrize(("name", "least"), [("migrating", 75), ("migrating_more", 70), ("migrating_on_verl", 30)])
def test_every_call_that_migrating_names_is_ours(name: str, least: int) -> None:
    """Names and keywords; the first arguments of a call in the table have the names of its parameters."""
    page = (ROOT / f"docs/{name}.md").read_text()
    calls = re.findall(r"`((?:advantages|aggregation|entropy|gates|kl)\.\w+\([^`]*\))`", page)
    assert len(calls) > least
    for call in calls:
        tree = ast.parse(call, mode="eval").body
        function = operator.attrgetter(call.partition("(")[0])(hpo_core)
        positional = {at: argument.id for at, argument in enumerate(tree.args) if isinstance(argument, ast.Name)}
        bound = inspect.signature(function).bind_partial(*tree.args, **{each.arg: each for each in tree.keywords})
        names = list(bound.arguments)
        assert all(names[at] == name for at, name in positional.items()), call


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_without_prompts_is_python(page: Path) -> None:
    for block in re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        ast.parse(block)


def test_the_parts_of_your_own_gate_have_their_arguments_and_defaults() -> None:
    page, names = (ROOT / "docs/own_gate.md").read_text(), {**vars(hpo_core.gates), "inf": math.inf}
    for part in ("RatioGate", "Level", "Correction", "Clip", "LogClip"):
        [call] = re.findall(rf"^{part}\([^`]*?\)$", page, re.MULTILINE)[:1]
        tree = ast.parse(call, mode="eval").body
        said = {each.id: inspect.Parameter.empty for each in tree.args}
        said |= {each.arg: eval(ast.unparse(each.value), names) for each in tree.keywords}
        has = {name: each.default for name, each in inspect.signature(names[part]).parameters.items()}
        assert list(said.items()) == list(has.items()), part


def test_the_loop_of_the_page_is_the_example_and_learns() -> None:
    script = (ROOT / "examples/own_loop.py").read_text()
    page = (ROOT / "docs/own_loop.md").read_text()
    assert f'```python title="examples/own_loop.py"\n{script}```' in page and len(script.splitlines()) < 50
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "own_loop.py", "exec"), {})
    lines = re.findall(
        r"^(\d+) reward (\d\.\d\d) clipped (\d\.\d\d) entropy (\d\.\d\d)$", printed.getvalue(), re.MULTILINE
    )
    assert [line[0] for line in lines] == ["10", "20", "30", "40"] and float(lines[-1][1]) > 0.9
    assert len(re.findall(r"^\d+ reward ", page, re.MULTILINE)) == len(lines)


def test_markdown_means_the_same_to_both_of_its_readers() -> None:
    """Lists and tables stand behind an empty line, and nothing in them is indented by two: MkDocs asks for four."""
    wrong = []
    for page in MANUAL:
        lines = _prose(page).splitlines()
        for line, following in itertools.pairwise(lines):
            starts_list = _is_item(following) and line.strip() and not _is_item(line) and not line.startswith(" ")
            starts_table = following.lstrip().startswith("|") and line.strip() and not line.lstrip().startswith("|")
            continues = line.startswith("|") and following.strip() and not following.startswith("|")
            if starts_list or starts_table or continues or re.match(r" {1,3}\|", following):
                wrong.append(f"{page.name}: {following}")
    assert wrong == []


def _is_item(line: str) -> bool:
    return re.match(r"([*-]|\d+\.) ", line) is not None
