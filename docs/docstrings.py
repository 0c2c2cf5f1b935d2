"""Docstrings as Markdown, for the API pages: a griffe extension that mkdocs.yml names.

Docstrings are written for readers of the source and of ``help()``. They hold roles of reStructuredText such as
``:func:`policy_loss```, literal blocks behind a double colon, and formulas whose stars and bars stand for themselves.
"""

from __future__ import annotations

import linecache
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`(~?)([\w.]+)`")
_BLOCK = re.compile(r"::$", re.MULTILINE)
_COMMON = re.compile(r"^Common arguments:$", re.MULTILINE)


class Readable(griffe.Extension):
    """Roles become links, double colons single ones, examples a section, and members of enumerations and fields of
    named tuples a list."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value, obj)
            has_list = obj.is_class and any(str(base).endswith(("Enum", "NamedTuple")) for base in obj.bases)
            if has_list and "Attributes:" not in obj.docstring.value:
                obj.docstring.value += "\n\n" + "\n".join(f"* {member}" for member in _members(obj))


def readable(text: str, obj: griffe.Object) -> str:
    text = _ROLE.sub(lambda role: _link(role, obj), text)
    text = _COMMON.sub("Args:", _BLOCK.sub(":", text))
    return _titled(text)


def _link(role: re.Match[str], obj: griffe.Object) -> str:
    """A link where the name is documented, code everywhere."""
    short, target = role.groups()
    target = target.lstrip(".")
    name = target.rsplit(".", 1)[-1] if short else target
    scope = obj if obj.is_module or obj.is_class else obj.parent
    while "." not in target and scope is not None:
        if target in scope.members:
            target = f"{scope.canonical_path}.{target}"
            break
        scope = scope.parent
    return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'


def _members(of_class: griffe.Object) -> list[str]:
    """The names of an enumeration, each with its text or the comment behind it, or the fields of a named tuple, each
    with its type."""
    members = []
    for name, member in of_class.members.items():
        if member.is_attribute and not name.startswith("_"):
            lines = range(member.lineno, member.endlineno + 1)
            comment = re.search(r"#(.*)", "".join(linecache.getline(str(member.filepath), line) for line in lines))
            text = str(member.value).strip("'\"") if str(member.value)[0] in "'\"" else ""
            meaning = comment[1].strip() if comment else text and f"`{text}`"
            kind = f" (`{member.annotation}`)" if member.annotation else ""
            members.append(f"`{name}`{kind}" + (f": {meaning}" if meaning else ""))
    return members


def _titled(text: str) -> str:
    """The same with a title before the first example, unless the author gave one."""
    found = re.search(r"^>>> ", text, re.MULTILINE)
    if found is None:
        return text
    before, after = text[: found.start()].rstrip(), text[found.start() :]
    indented = "\n".join(f"    {line}" if line else line for line in after.splitlines())
    return f"{before}\n\nExamples:\n{indented}\n"
