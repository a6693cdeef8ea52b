"""Test that the repository follows its own rules. Each failure prints the rule and its reason."""

import pytest

from tests.architecture.content_rules import CONTENT_RULES
from tests.architecture.rules import IMPORT_RULES, LAYER_OF, Rule, package_of
from tests.architecture.source_tree import SourceTree

RULES = (*IMPORT_RULES, *CONTENT_RULES)

FEWEST_MODULES = 15
"""Minimum number of modules, because rules hold over an empty folder, too."""


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    """Return the repository's source, after a check that it is complete."""
    tree = SourceTree.from_disk()
    if len(tree.package) < FEWEST_MODULES:
        pytest.fail(f"{len(tree.package)} modules in asymcheck/, expected at least {FEWEST_MODULES}: nothing is proved")
    return tree


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_tree_keeps_the_rule(tree: SourceTree, rule: Rule) -> None:
    """Test that no module breaks the rule."""
    violations = sorted(rule.check(tree), key=lambda violation: (violation.path, violation.line))
    assert not violations, "\n".join([rule.reason, *map(str, violations)])


def test_the_layers_name_real_packages(tree: SourceTree) -> None:
    """Test that the layers of a save and a load exist, so that their imports are really checked."""
    packages = {package_of(module.name) for module in tree.package}
    names = ("cli", "store", "capture", "commit", "restore", "storage", "format", "errors")
    needed = {f"asymcheck.{name}" for name in names}
    assert needed <= packages & LAYER_OF.keys()


def test_reference_reader_exists(tree: SourceTree) -> None:
    """Test that the reference reader, whose isolation is tested below, exists."""
    assert "format_spec/reference_reader.py" in {module.path for module in tree.below("format_spec")}
