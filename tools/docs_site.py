"""Hooks of the documentation site: pages outside docs/, cross references in docstrings, and a check of the reference.

`mkdocs.yml` loads this file twice. MkDocs calls the functions `on_…`, and Griffe, which reads the docstrings, uses
:class:`Roles`.
"""

from __future__ import annotations

import logging
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PACKAGE = "asymcheck"
OUTSIDE = {
    "README.md": "index.md",
    "SPEC.md": "SPEC.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "LICENSE": "LICENSE.txt",
    "benchmarks/README.md": "comparisons.md",
    "benchmarks/report.schema.json": "schemas/report.json",
    "format_spec": "format_spec/README.md",
    "format_spec/README.md": "format_spec/README.md",
    "format_spec/PROVENANCE.md": "format_spec/PROVENANCE.md",
}
"""Files outside docs/ that pages link to, with their paths in the site."""
INTEGRATIONS = ("accelerate", "dcp", "deepspeed", "exporters", "lightning", "transformers")

_log = logging.getLogger("mkdocs.hooks.docs_site")
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
_CODE = re.compile(r"^```.*?^```$|``.*?``|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_NESTED = re.compile(r"^ {2,3}(?=- )", re.MULTILINE)
_ID = re.compile(r'\bid="(asymcheck[\w.]*)"')
_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc):`~?([\w.]+)`")
_RAISES = re.compile(r"^( *)(?:Raises|Warns):\n((?:\1 +\S.*\n?)+)", re.MULTILINE)
_LITERAL = re.compile(r"(\S?)::\n\n((?: +[^\n]*\n*)+)")
_sources: dict[str, str] = {}
_ids: set[str] = set()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/."""
    _ids.clear()
    _sources.clear()
    # Only names of the reference may be targets of cross references. A heading such as "bytes" is not a target.
    config.plugins["autorefs"].scan_toc = False
    for source, uri in OUTSIDE.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
            _sources[uri] = source
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite links that are valid in the repository, so that they point to the same files in the site."""
    uri = page.file.src_uri
    if uri == "index.md":
        page.meta["hide"] = ["navigation"]
    source = _sources.get(uri, f"docs/{uri}")

    def in_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if target in OUTSIDE:
            target = OUTSIDE[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
            if (ROOT / "docs" / target / "README.md").is_file():
                target += "/README.md"
        else:
            return link[1]  # MkDocs reports a missing page.
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    def converted(text: str) -> str:
        # Python-Markdown nests a list that is indented by 4. Git forges also nest a list that is indented by 2 or 3.
        return _LINK.sub(in_site, _NESTED.sub("    ", text))

    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [converted(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, converted(markdown[end:])])


def on_post_page(output: str, **_: object) -> str:
    """Collect the names that the reference documents."""
    _ids.update(_ID.findall(output))
    return output


def on_post_build(**_: object) -> None:
    """Report public names without a docstring or a reference entry. With ``--strict``, the build fails."""
    for path, problem in check_names(_ids):
        _log.warning("%s %s", path, problem)


def check_names(documented: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each public name with a problem, and the problem.

    Public are the names of `asymcheck/__init__.pyi`, what the modules among them define, the integrations, the public
    methods of public classes, and the types of this package that these methods return.
    """
    package = griffe.load(PACKAGE, search_paths=[ROOT], allow_inspection=False)
    assert isinstance(package, griffe.Module)
    waiting = [package[name] for name in package.exports or () if name != "__version__"]
    waiting += [package[f"integrations.{name}"] for name in INTEGRATIONS]
    shown = {item.final_target.path: item.path for item in waiting if item.is_alias}
    seen: set[str] = set()
    while waiting:
        item = waiting.pop().final_target if waiting[-1].is_alias else waiting.pop()
        if item.path in seen:
            continue
        seen.add(item.path)
        if not item.docstring and not item.is_attribute:
            yield item.path, "has no docstring"
        owner = item.path if item.path in shown or item.parent is None else item.parent.path
        anchor = shown.get(owner, owner) + item.path.removeprefix(owner)
        if anchor not in documented and not (item.is_module and item.name in INTEGRATIONS):
            yield item.path, "is not in the reference (docs/reference/)"
        if item.is_module or item.is_class:
            waiting += [
                member
                for name, member in item.members.items()
                if not name.startswith("_") and not member.is_alias and not (item.is_module and member.is_attribute)
            ]
        for annotation in (getattr(item, "returns", None), getattr(item, "annotation", None)):
            waiting += _types(annotation, package)


def _types(annotation: griffe.Expr | str | None, package: griffe.Module) -> Iterator[griffe.Object | griffe.Alias]:
    """Yield the classes of this package in an annotation."""
    if isinstance(annotation, griffe.Expr):
        for part in annotation.iterate(flat=True):
            if isinstance(part, griffe.ExprName) and part.canonical_path.startswith(f"{PACKAGE}."):
                found = package[part.canonical_path.removeprefix(f"{PACKAGE}.")]
                if found.is_class:
                    yield found


class Roles(griffe.Extension):  # type: ignore[misc]  # Griffe is optional
    """Convert cross references of docstrings, such as ``:meth:`load```, to links of the site."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        """Rewrite the docstrings of a package."""
        waiting: list[griffe.Object] = [pkg]
        while waiting:
            item = waiting.pop()
            waiting += [member for member in item.members.values() if isinstance(member, griffe.Object)]
            if item.docstring:
                item.docstring.value = in_markdown(item.docstring.value, item)


def in_markdown(text: str, item: griffe.Object) -> str:
    """Return a docstring as Markdown, with one error class a line in ``Raises:``."""

    def linked(role: re.Match[str]) -> str:
        first, *rest = role[1].split(".")
        try:
            path = ".".join([item.resolve(first), *rest])
        except griffe.NameResolutionError:
            path = role[1]
        return f'<autoref identifier="{path}" optional><code>{role[1]}</code></autoref>'

    def one_a_line(section: re.Match[str]) -> str:
        lines: list[str] = []
        for line in section[2].splitlines():
            is_more = lines and (lines[-1].endswith(",") or len(line) - len(line.lstrip()) > len(section[1]) + 4)
            lines[len(lines) - bool(is_more) :] = [f"{lines[-1]} {line.strip()}" if is_more else line.strip()]
        found = []
        for line in lines:
            classes, _, reason = line.partition(": ")
            for name in map(str.strip, classes.split(",")):
                found.append(f"{section[1]}    {name}: {reason.strip()}\n")
                if name in item.package["errors"].members and name not in item.module.members:
                    # The link needs the import, because a module need not import the errors that it propagates.
                    item.module.imports[name] = path = f"{PACKAGE}.errors.{name}"
                    item.module.set_member(name, griffe.Alias(name, path))
        return section[0].partition("\n")[0] + "\n" + "".join(found)

    def fenced(literal: re.Match[str]) -> str:
        language = "text" if "─" in literal[2] else "python"
        return f"{literal[1] and literal[1] + ':'}\n\n```{language}\n{textwrap.dedent(literal[2]).rstrip()}\n```\n\n"

    return _ROLE.sub(linked, _LITERAL.sub(fenced, _RAISES.sub(one_a_line, text)))
