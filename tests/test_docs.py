"""Every example in the documentation and in the docstrings runs, and prints the output that it shows."""

import ast
import doctest
import importlib
import itertools
import pkgutil
import re
from pathlib import Path

import pytest

import hpo_core

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
MANUAL = sorted(ROOT.glob("docs/**/*.md"))
_NEED_TRAINERS = ("axolotl", "ms_swift", "nemo_rl", "rllm", "roll", "skyrl", "torchrl", "trinity", "trl", "verl")
# These need a trainer or hypothesis.
OPTIONAL = (
    "hpo_core.testing",
    *(f"hpo_core.integrations.{name}" for name in _NEED_TRAINERS),
)


def _modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(hpo_core.__path__, "hpo_core.")]
    return [name for name in names if not name.startswith("hpo_core._") and name not in OPTIONAL]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page: Path) -> None:
    failures, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0


@pytest.mark.parametrize("name", _modules())
def test_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, globs={**vars(module)}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0


def test_every_page_is_in_the_navigation() -> None:
    """MkDocs itself, which `make docs` installs, checks the rest of the site."""
    listed = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in MANUAL)


def test_no_docstring_is_broken_by_reflow() -> None:
    """No literal runs over the end of its line, and no line ends before a word or two."""
    broken = []
    for path in sorted((ROOT / "hpo_core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
            if documented:
                prose = re.split(r"^ *>>>", documented, maxsplit=1, flags=re.MULTILINE)[0].split("\n")
                pairs = itertools.pairwise(prose)
                alone = any(len(line) < 20 and _continues(line, following) for line, following in pairs)
                if alone or any(line.count("``") % 2 for line in prose):
                    broken.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}")
    assert broken == []


def _continues(line: str, following: str) -> bool:
    """Whether a sentence continues in the next line of the same paragraph."""
    indents = [len(each) - len(each.lstrip()) for each in (line, following)]
    is_item = following.lstrip().startswith(("*", "|", "-"))
    return bool(line and following) and indents[0] == indents[1] and not is_item and not line.endswith((":", "."))


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = sum(len(test.examples) for name in _modules() for test in finder.find(importlib.import_module(name)))
    assert examples > 40, examples
