"""The repository as parsed source: modules, their imports, their comments.

No examined code is imported. A tree is read from disk, or made from a mapping of paths to text, so that
every rule can be shown a violation that the repository does not contain.
"""

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parents[2]

PACKAGE = "asymcheck"

READ_FOLDERS = (PACKAGE, "format_spec", "tools", "benchmarks", "tests")
"""The folders of our own Python code. Everything else in the repository (.venv, build) is not ours to judge."""


@dataclass(frozen=True)
class Import:
    """One imported thing: a module (`name` is None), or `name` out of the module `target`."""

    line: int
    target: str
    name: str | None = None
    bound_as: str | None = None
    """The name that the importing module uses for it; None when nothing is bound (a star, a dynamic import)."""

    @property
    def full_name(self) -> str:
        """`target.name`, which is a module or an object in a module; the tree decides."""
        return f"{self.target}.{self.name}" if self.name else self.target

    @property
    def top(self) -> str:
        """The distribution-level name: `torch` for `torch.nn.functional`."""
        return self.target.split(".", 1)[0]


@dataclass(frozen=True)
class Module:
    """One parsed source file."""

    path: str
    """Relative to the repository, with forward slashes."""
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; a file that does not parse fails the test that asks."""
        return ast.parse(self.source, filename=self.path)

    @property
    def is_package(self) -> bool:
        """True for the `__init__` of a package."""
        return PurePosixPath(self.path).name == "__init__.py"

    @property
    def name(self) -> str:
        """The dotted name by which the module is imported."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if self.is_package else parts)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import anywhere in the file: at module level, in a function, under TYPE_CHECKING, by `import_module`.

        All imports count, because otherwise a rule could be avoided.
        """
        return tuple(self._imports())

    def _imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.split(".", 1)[0]
                    yield Import(node.lineno, alias.name, bound_as=bound)
            elif isinstance(node, ast.ImportFrom):
                target = self._absolute(node)
                for alias in node.names:
                    bound_as = None if alias.name == "*" else alias.asname or alias.name
                    yield Import(node.lineno, target, alias.name, bound_as)
            elif isinstance(node, ast.Call) and (named := _dynamic_import(node)):
                yield Import(node.lineno, named)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = self.name.split(".")
        base = here[: len(here) - node.level + (1 if self.is_package else 0)]
        return ".".join([*base, node.module] if node.module else base)

    @cached_property
    def comments(self) -> tuple[tuple[int, str], ...]:
        """Line and text of every real comment; a `#` inside a string is none."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return tuple((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)


def _dynamic_import(call: ast.Call) -> str | None:
    """The module that `__import__("x")` or `importlib.import_module("x")` names, if it names one literally."""
    function = call.func
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
    if called not in {"__import__", "import_module"} or not call.args:
        return None
    argument = call.args[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and not argument.value.startswith("."):
        return argument.value
    return None


@dataclass(frozen=True)
class SourceTree:
    """All modules that the rules look at."""

    modules: tuple[Module, ...]

    @classmethod
    def from_sources(cls, sources: Mapping[str, str]) -> "SourceTree":
        """A tree made of text, as an example for a rule."""
        return cls(tuple(Module(path, source) for path, source in sorted(sources.items())))

    @classmethod
    def from_disk(cls, root: Path = REPOSITORY) -> "SourceTree":
        """The tree of the repository."""
        paths = (path for folder in READ_FOLDERS for path in (root / folder).rglob("*.py"))
        return cls.from_sources({path.relative_to(root).as_posix(): path.read_text("utf-8") for path in paths})

    @cached_property
    def package(self) -> tuple[Module, ...]:
        """The modules that are shipped."""
        return self.below(PACKAGE)

    @cached_property
    def by_name(self) -> dict[str, Module]:
        """The shipped modules by dotted name."""
        return {module.name: module for module in self.package}

    def below(self, folder: str) -> tuple[Module, ...]:
        """The modules in one top-level folder."""
        return tuple(module for module in self.modules if module.path.startswith(f"{folder}/"))

    def resolve(self, found: Import) -> str:
        """The imported module: `from a import b` imports `a.b` if that is a module, else `a`."""
        return found.full_name if found.full_name in self.by_name else found.target
