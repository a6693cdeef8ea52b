"""Rules about the content of a module: names, raises, suppressions, and no pickle."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.architecture.rules import Rule, Violation
from tests.architecture.source_tree import PACKAGE, Module, SourceTree

EMPTY_NAMES = frozenset({"utils", "util", "helpers", "helper", "misc", "common", "manager"})

PICKLE_MODULES = frozenset({"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"})
PICKLING_CALLS = frozenset(
    {f"{home}.{verb}" for home in ("torch", "torch.serialization", "torch.jit") for verb in ("load", "save")}
)

BUILTIN_EXCEPTIONS = frozenset(
    name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
)

TORCH_FILES = "asymcheck/convert/torch_sink.py"
RESTRICTED_PICKLE = "asymcheck/convert/restricted_pickle.py"

NOQA_FORM = re.compile(r"# noqa: [A-Z]+[0-9]+(, [A-Z]+[0-9]+)* - \S.*")
TYPE_IGNORE_FORM = re.compile(r"# type: ignore\[[a-z-]+(, ?[a-z-]+)*\]  # (?!noqa)\S.*")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_say_something(tree: SourceTree) -> Iterator[Violation]:
    """A module or folder with a general name."""
    for module in tree.package:
        words = {word for part in PurePosixPath(module.path).with_suffix("").parts for word in part.split("_")}
        for word in sorted(words & EMPTY_NAMES):
            yield Violation(module.path, 1, f"the name contains {word!r}")


def errors_are_our_own(tree: SourceTree) -> Iterator[Violation]:
    """A raise of a builtin or foreign exception."""
    for module in tree.package:
        for node, inside in _raises(module.tree, None):
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if raised is not None and not _may_raise(module, raised, inside):
                yield Violation(module.path, node.lineno, f"raises {ast.unparse(raised)}")


def _raises(node: ast.AST, inside: Function | None) -> Iterator[tuple[ast.Raise, Function | None]]:
    """Every raise, with its function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise):
            yield child, inside
        yield from _raises(child, child if isinstance(child, Function) else inside)


def _may_raise(module: Module, raised: ast.expr, inside: Function | None) -> bool:
    in_cli = PurePosixPath(module.path).match(f"{PACKAGE}/cli/*") or module.name == f"{PACKAGE}.__main__"
    written = ast.unparse(raised)
    origin = next((found for found in module.imports if found.bound_as == written.split(".", 1)[0]), None)
    if origin is None and written in BUILTIN_EXCEPTIONS:
        return {
            "NotImplementedError": inside is not None and _is_abstract(inside),
            "AttributeError": inside is not None and inside.name == "__getattr__",
            "StopIteration": inside is not None and inside.name == "__next__",
            "SystemExit": in_cli,
        }.get(written, False)
    # A local name raises a caught error again, and an attribute of self creates an error of the package.
    return origin is None or origin.top == PACKAGE or (in_cli and origin.top == "click")


def _is_abstract(function: Function) -> bool:
    return any(ast.unparse(decorator).endswith("abstractmethod") for decorator in function.decorator_list)


def errors_have_one_home(tree: SourceTree) -> Iterator[Violation]:
    """An exception class defined outside `asymcheck.errors`."""
    for module in tree.package:
        if module.name == f"{PACKAGE}.errors":
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases]
                if any(base in BUILTIN_EXCEPTIONS or base.endswith(("Error", "Exception")) for base in bases):
                    yield Violation(module.path, node.lineno, f"{node.name} is an error class outside {PACKAGE}.errors")


def nothing_is_unpickled(tree: SourceTree) -> Iterator[Violation]:
    """An import of a pickling module, a use of torch's pickling calls, or `allow_pickle` that is not False.

    The module that writes torch's files may call `torch.save`. The module of restricted pickles may derive an unpickler
    that defines `find_class`, and call the derived unpickler.
    """
    for module in tree.package:
        if module.path == RESTRICTED_PICKLE:
            yield from _unpickles_what_is_named(module)
            continue
        for found in module.imports:
            if found.top in PICKLE_MODULES or found.full_name in PICKLING_CALLS:
                yield Violation(module.path, found.line, f"imports {found.full_name}")
        bound = {found.bound_as: _meant_by(found.bound_as, found.full_name) for found in module.imports}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                first, *rest = ast.unparse(node).split(".")
                called = ".".join([bound.get(first, first), *rest])
                if called in PICKLING_CALLS and (module.path, called) != (TORCH_FILES, "torch.save"):
                    yield Violation(module.path, node.lineno, f"uses {ast.unparse(node)}")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                yield Violation(module.path, node.value.lineno, "allows pickle")


def _unpickles_what_is_named(module: Module) -> Iterator[Violation]:
    bases = {
        id(base)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and "find_class" in {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        for base in node.bases
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and id(node) not in bases:
            written = ast.unparse(node)
            if re.fullmatch(r"pickle\.(?!UnpicklingError).*", written) or written in PICKLING_CALLS:
                yield Violation(module.path, node.lineno, f"uses {written}")
    for found in module.imports:
        if found.full_name != "pickle" and (found.top in PICKLE_MODULES or found.full_name in PICKLING_CALLS):
            yield Violation(module.path, found.line, f"imports {found.full_name}")


def _meant_by(bound_as: str | None, full_name: str) -> str:
    """`import torch.nn` binds `torch`; `import torch.serialization as s` binds the module itself."""
    return bound_as if bound_as == full_name.split(".", 1)[0] else full_name


def suppressions_give_a_reason(tree: SourceTree) -> Iterator[Violation]:
    """A linter or type checker silenced without a code and a reason."""
    for module in tree.modules:
        for line, comment in module.comments:
            text = comment.lower().replace(" ", "")
            wrong = (
                ("noqa" in text and not NOQA_FORM.search(comment) and "`# noqa: X123 - reason`")
                or (
                    "type:ignore" in text and not TYPE_IGNORE_FORM.match(comment) and "`# type: ignore[code]  # reason`"
                )
                or ("mypy:ignore-errors" in text and "a suppression at the line it is for")
            )
            if wrong:
                yield Violation(module.path, line, f"{comment!r} should read {wrong}")


CONTENT_RULES = (
    Rule(
        "A module with a general name collects unrelated code. Name the module after its content.",
        names_say_something,
    ),
    Rule(
        "Callers handle a failure by its class and kind, but a ValueError can come from anywhere. Raise an error of "
        "asymcheck.errors. Exceptions are NotImplementedError in an abstract method, StopIteration in __next__, "
        "AttributeError in __getattr__, and in the CLI SystemExit and the errors of click.",
        errors_are_our_own,
    ),
    Rule(
        "The tree of errors, with its stable kinds, is part of the public interface: asymcheck/errors.py.",
        errors_have_one_home,
    ),
    Rule(
        "Loading a checkpoint must never run code that is stored in it, not even for plain values.",
        nothing_is_unpickled,
    ),
    Rule(
        "A silenced check is a decision. Without its code, the comment also silences the next defect. Without a reason "
        "for it, nobody can remove it.",
        suppressions_give_a_reason,
    ),
)
