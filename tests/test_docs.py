"""Every example in the documentation and in the docstrings runs, and prints what it says."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import hpo_core

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
OPTIONAL = (
    "hpo_core.integrations.trl",
    "hpo_core.integrations.verl",
    "hpo_core.testing",
)  # need a trainer or hypothesis


def _modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(hpo_core.__path__, "hpo_core.")]
    return [name for name in names if not name.startswith("hpo_core._") and name not in OPTIONAL]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path) -> None:
    failures, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0


@pytest.mark.parametrize("name", _modules())
def test_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, globs={**vars(module)}, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failures == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = sum(len(test.examples) for name in _modules() for test in finder.find(importlib.import_module(name)))
    assert examples > 40, examples
