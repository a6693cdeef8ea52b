"""Test that ``--json`` output follows docs/schemas: every document is valid, and every property occurs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import asymcheck
from asymcheck.cli.main import commands
from tests.cli.conftest import Outcome
from tests.cli.rings import leave_ring
from tests.convert.test_trainer_folder import checkpoint
from tests.damage.flips import flip

Call = Callable[..., Outcome]
SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"

WORDS: dict[str, list[tuple[str, ...]]] = {
    "inspect": [(), ("--step", "20"), ("--step", "20", "--values"), ("--tier", "memory", "--ring-folder", "{here}")],
    "verify": [(), ("--shard", "0/2")],
    "restore": [("--to", "{new}.safetensors"), ("--to", "{new}.pt"), ("--to", "{new}")],
    "convert": [("{new}.pt",), ("{new}.pt", "--dry-run")],
    "delete": [("10", "--yes")],
    "gc": [("--dry-run",), ("--dry-run", "--keep-last", "1"), ()],
    "push": [("file://{new}",)],
    "publish": [("--to", "{new}")],
    "subscribe": [("--to", "{new}.safetensors")],
    "pull": [("{new}",)],
    "rebuild-catalog": [()],
    "log": [(), ("--all",), ("--run", "other")],
    "merge": [
        ("--steps", "10,20", "--search", "--evaluate", "echo {{folder}} 1", "--trials", "1", "--study", "{new}"),
        ("--steps", "20,25", "--method", "ties", "--base", "10"),
    ],
    "diff": [("10", "20"), ("20", "25"), ("20", "other@1"), ("10", "10"), ("10", "20", "--no-norms")],
    "doctor": [("--quick",), ("--quick", "--state-size", "1GB", "--mtbf", "3h")],
    "du": [(), ("--run", "other")],
}
"""Calls of each command."""


def schema_of(name: str) -> dict[str, Any]:
    """Return the schema of a command, after a check of the schema itself."""
    schema: dict[str, Any] = json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def objects(schema: Any, where: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:  # noqa: ANN401 - JSON
    """Yield each object schema with its path."""
    if isinstance(schema, dict):
        if "properties" in schema:
            yield where, schema
        for key, value in schema.items():
            yield from objects(value, f"{where}/{key}")
    elif isinstance(schema, list):
        for number, value in enumerate(schema):
            yield from objects(value, f"{where}/{number}")


def seen_in(schema: dict[str, Any], where: str, root: dict[str, Any], value: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Yield the paths of the properties of a schema that a valid value has."""
    if "$ref" in schema:
        target = schema["$ref"]
        yield from seen_in(root["$defs"][target.rsplit("/", 1)[-1]], target, root, value)
    for keyword in ("oneOf", "anyOf"):
        for number, choice in enumerate(schema.get(keyword, ())):
            if jsonschema.Draft202012Validator({**choice, "$defs": root["$defs"]}).is_valid(value):
                yield from seen_in(choice, f"{where}/{keyword}/{number}", root, value)
    if isinstance(value, list):
        for item in value:
            yield from seen_in(schema.get("items", {}), f"{where}/items", root, item)
    if isinstance(value, dict):
        for key, below in schema.get("properties", {}).items():
            if key in value:
                yield f"{where}/properties/{key}"
                yield from seen_in(below, f"{where}/properties/{key}", root, value[key])


def damage(store: Path) -> None:
    """Damage a manifest, the largest pack and one copy of the descriptor."""
    (manifest,) = next((store / "manifests" / "default").iterdir()).iterdir()
    manifest.write_bytes(b"x")
    pack = max((store / "packs").iterdir(), key=lambda path: path.stat().st_size)
    for path, place in ((pack, 4096 + 300), (store / "asymcheck.store", 20)):
        flip(path, 8 * place)


def test_every_command_has_a_schema() -> None:
    """Test that every schema belongs to a command; commands without --json have none."""
    with_json = {name for name, command in commands.commands.items() if "as_json" in {p.name for p in command.params}}
    with_json.remove("merge-reports")  # It follows the schema of verify, see test_verify_shards.
    assert {path.stem for path in SCHEMAS.glob("*.json")} == with_json
    assert with_json == set(WORDS)


@pytest.mark.parametrize("name", sorted(WORDS))
def test_schemas_are_closed_and_described(name: str) -> None:
    """Test that objects allow only named properties, all of which are required and described."""
    schema = schema_of(name)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    found = list(objects(schema))
    assert found
    for where, one in found:
        assert one["additionalProperties"] is False, where
        assert one["required"] == list(one["properties"]), where
        assert all(below.get("description") for below in one["properties"].values()), where


@pytest.mark.slow(quick=["restore"])
@pytest.mark.parametrize("name", sorted(WORDS))
def test_output_is_valid_and_every_property_occurs(call: Call, name: str, store: Path, tmp_path: Path) -> None:
    """Test an intact store, an empty one and a damaged one."""
    schema = schema_of(name)
    validator = jsonschema.Draft202012Validator(schema)
    asymcheck.Store.open(tmp_path / "empty", create=True).close()
    numbers = itertools.count()

    def documents_of(path: Path) -> list[Outcome]:
        where: object = path
        if name == "pull":
            where = f"file://{tmp_path}/remote{next(numbers)}"
            call("push", path, where)
        if name == "subscribe":
            where = tmp_path / f"releases{next(numbers)}"
            call("publish", path, "--to", where)
        return [
            call(
                name,
                where,
                *(word.format(new=tmp_path / f"new{next(numbers)}", here=tmp_path) for word in words),
                "--json",
            )
            for words in WORDS[name]
        ]

    if name == "doctor":
        # Codecs are measured on tensors that are stored in packs.
        with asymcheck.Store.open(store) as opened:
            opened.save({"x": torch.arange(10_000.0)}, step=40)
    documents = documents_of(store)
    assert all(outcome.status == 0 for outcome in documents)
    documents += documents_of(tmp_path / "empty")
    if name == "convert":
        documents.append(call(name, tmp_path / "new0.pt", tmp_path / "other", "--json"))
        checkpoint(tmp_path / "trainer", 10)
        documents.append(call(name, tmp_path / "trainer", tmp_path / "other", "--all", "--json"))
    if name in {"inspect", "gc"}:
        (tmp_path / "rings").mkdir()
        leave_ring(store, tmp_path / "rings")
        words = ("--tier", "memory") if name == "inspect" else ("--dry-run",)
        documents.append(call(name, store, *words, "--ring-folder", tmp_path / "rings", "--json"))
    damage(store)
    documents += documents_of(store)
    if name == "verify":
        documents.append(call(name, store, "--repair", "--json"))
    # A failing command prints a message on standard error and no document.
    printed = [outcome.json for outcome in documents if outcome.out]
    assert all(outcome.err for outcome in documents if not outcome.out)
    for document in printed:
        validator.validate(document)
    seen = {place for document in printed for place in seen_in(schema, "#", schema, document)}
    promised = {f"{where}/properties/{key}" for where, one in objects(schema) for key in one["properties"]}
    assert promised - seen == set()
