"""Test that the public names equal a reviewed list."""

import importlib
import re
from types import ModuleType

import pytest

from tests.architecture.source_tree import REPOSITORY, SourceTree

EXPECTED = [
    "AutoInterval",
    "CaptureConfig",
    "Checkpoint",
    "Checkpointer",
    "Grace",
    "Publish",
    "Publisher",
    "Push",
    "Ranks",
    "RemoteConfig",
    "Retention",
    "RngState",
    "Store",
    "StoreConfig",
    "Subscriber",
    "TensorShard",
    "__version__",
    "errors",
    "events",
    "merge",
    "trace",
]
"""Public names of `import asymcheck`. An added name is a promise, and a removed name breaks a user's training loop."""


def _sub_packages() -> list[str]:
    return [module.name for module in SourceTree.from_disk().package if module.is_package and "." in module.name]


def _public_attributes(module: ModuleType) -> set[str]:
    """Return the attributes without underscore, except for modules that an import statement leaves behind."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }


def _is_ours(package: ModuleType, name: str) -> bool:
    """Return whether a value is a constant, or defined in the package; `Path` or `Any` are not exports."""
    home = getattr(getattr(package, name), "__module__", "asymcheck")
    return str(home).split(".", 1)[0] == "asymcheck"


def test_public_names_match_the_list() -> None:
    """Test that `__all__` is exactly the list above, sorted."""
    package = importlib.import_module("asymcheck")
    assert sorted(EXPECTED) == EXPECTED
    assert list(package.__all__) == EXPECTED


def test_every_public_name_exists() -> None:
    """Test that every promised name can be imported."""
    package = importlib.import_module("asymcheck")
    assert [name for name in EXPECTED if not hasattr(package, name)] == []


def test_nothing_else_is_public() -> None:
    """Test that every other attribute has an underscore, because users would use it sooner or later."""
    package = importlib.import_module("asymcheck")
    modules_and_dunders = {
        name for name in EXPECTED if name.startswith("__") or isinstance(getattr(package, name), ModuleType)
    }
    assert _public_attributes(package) == set(EXPECTED) - modules_and_dunders


def test_sub_packages_exist() -> None:
    """Test that sub-packages exist, because the next test passes without them."""
    assert len(_sub_packages()) >= 5


@pytest.mark.parametrize("name", _sub_packages())
def test_sub_package_exports_its_public_names(name: str) -> None:
    """Test that an `__init__` with `__all__` names each public name once, and no others."""
    package = importlib.import_module(name)
    declared = getattr(package, "__all__", None)
    if declared is None:
        return
    assert len(set(declared)) == len(declared)
    modules = {entry for entry in declared if isinstance(getattr(package, entry), ModuleType)}
    assert set(declared) - modules == {entry for entry in _public_attributes(package) if _is_ours(package, entry)}


def test_the_version_is_that_of_the_distribution() -> None:
    """Test that `asymcheck.__version__` equals the version in pyproject.toml."""
    declared = re.search(r'^version = "([^"]+)"$', (REPOSITORY / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert declared is not None
    assert importlib.import_module("asymcheck").__version__ == declared.group(1)
