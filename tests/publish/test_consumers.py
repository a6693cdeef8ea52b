"""Test consumers of releases: programs of the documentation, transformers, and files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file

from asymcheck import Publish, Publisher, Store, Subscriber
from asymcheck.cli.publish_commands import _Newest, _write_release
from asymcheck.convert import convert
from asymcheck.errors import RemoteUnreachableError
from asymcheck.format.manifest import Manifest
from asymcheck.storage.manifests import CheckpointFiles, ManifestReader
from asymcheck.types import Restored
from tests.cli.conftest import run_command as call
from tests.damage.flips import flip
from tests.docs.pages import ROOT, blocks_of
from tests.publish.loops import run_script
from tests.publish.models import check, model, train_to
from tests.publish.test_releases import damage_release
from tests.zygote import Zygote, wait_until


@pytest.mark.slow
def test_programs_of_the_page_continue_after_kills(zygote: Zygote, tmp_path: Path) -> None:
    """Test the trainer and the generator of docs/publish.md: both are killed, and numbers never go back."""
    for block in blocks_of((ROOT / "docs" / "publish.md").read_text()):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.body)
    numbers = tmp_path / "numbers.txt"

    def seen() -> list[int]:
        return [int(line) for line in numbers.read_text().split()] if numbers.exists() else []

    names = ("trainer.py", "generator.py")
    running = {name: zygote.start(run_script, folder=str(tmp_path), name=name) for name in names}
    for name in (*names, ""):
        goal = len(seen()) + 5
        wait_until(lambda goal=goal: len(seen()) >= goal, "five more releases")
        if name:
            running[name].kill()
            running[name].wait_killed()
            running[name] = zygote.start(run_script, folder=str(tmp_path), name=name)
    (tmp_path / "stop").touch()
    for child in running.values():
        child.finish()
    assert seen() == sorted(seen())
    assert len((tmp_path / "rollouts.txt").read_text().split()) > 20


@pytest.mark.slow
def test_generate_follows_releases(tmp_path: Path) -> None:
    """Test a transformers model: the same tokens as the published model, after each of several updates."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    trained, served = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
    prompt, answers = torch.tensor([[1, 2, 3]]), []
    rules = Publish(str(tmp_path / "releases"))
    with Publisher(rules) as publisher, Subscriber(rules.location, served) as subscriber:
        for step in range(3):
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.3)
            publisher.publish({"model": trained}, step)
            subscriber.update()
            expected, answer = (made.generate(prompt, max_new_tokens=8, do_sample=False) for made in (trained, served))
            assert torch.equal(expected, answer)
            answers.append(answer)
        assert served.lm_head.weight is served.transformer.wte.weight
    assert not torch.equal(answers[0], answers[-1])


def test_commands_publish_and_write_a_file(tmp_path: Path) -> None:
    """Test a store whose newest checkpoint is published, and a file that follows; errors leave the file."""
    trained = model()
    store, releases, file = tmp_path / "store", tmp_path / "releases", tmp_path / "model.safetensors"
    for step in (5, 6):
        train_to(trained, step)
        with Store.open(store, create=True) as opened:
            opened.save({"model": trained, "optimizer": {"lr": 0.1}}, step=step)
        published = call("publish", store, "--to", releases, "--dtype", "bfloat16", "--json").json
        assert (published["number"], published["step"], published["deltas"]) == (step - 4, step, step - 5)
        written = call("subscribe", releases, "--to", file, "--part", "model", "--json").json
        assert (written["number"], written["step"]) == (step - 4, step)
        served = model(torch.bfloat16)
        served.load_state_dict(load_file(file), strict=False)
        check(served, step)
    before = file.read_bytes()
    (tmp_path / "empty").mkdir()
    for location in (tmp_path / "nowhere", store):
        outcome = call("subscribe", location, "--to", file)
        assert (outcome.status, file.read_bytes() == before) == (3, True), outcome
    assert call("publish", store, "--to", releases, "--tensors", "x.*").status == 2
    assert call("publish", store, "--to", releases, "--follow", "--step", 5).status == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_follow_prints_a_line_for_each_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """Test that with ``--json``, each line is the document that the command prints without ``--follow``."""

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("asymcheck.cli.publish_commands.time", SimpleNamespace(sleep=interrupt))
    store, releases = tmp_path / "store", tmp_path / "releases"
    with Store.open(store, create=True) as opened:
        opened.save({"model": {"weight": torch.ones(100)}}, step=1)
    for words in (("publish", store, "--to", releases), ("subscribe", releases, "--to", tmp_path / "m.safetensors")):
        outcome = call(*words, "--follow", *more)
        assert (outcome.status, outcome.out.count("\n")) == (130, 1)
        if more:
            schema = ROOT / "docs" / "schemas" / f"{words[0]}.json"
            jsonschema.validate(outcome.json, json.loads(schema.read_text()))
        else:
            assert ": release 1, step 1, " in outcome.out


def test_follow_reads_no_manifest_of_published_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a look at a long run costs little beside the training."""
    with Store.open(tmp_path / "store", create=True) as opened:
        for step in range(5):
            opened.save({"model": {"weight": torch.full((5000,), float(step))}}, step=step)
    whole, read = ManifestReader.read_all, list[int]()

    def read_all(self: ManifestReader, listing: CheckpointFiles) -> list[Manifest]:
        read.append(listing.ref.step)
        return whole(self, listing)

    rules = Publish(str(tmp_path / "releases"))
    with Store.open(tmp_path / "store", read_only=True) as opened, Publisher(rules, opened) as publisher:
        newest = _Newest(opened, "default", publisher)
        newest.publish_newer()
        assert publisher.last_step() == 4
        monkeypatch.setattr(ManifestReader, "read_all", read_all)
        newest.publish_newer()
    assert read == []


def test_follow_publishes_once_where_the_newest_checkpoint_is_damaged(tmp_path: Path) -> None:
    """Test that an older checkpoint, published in place of a damaged one, is not published at every look."""
    with Store.open(tmp_path / "store", create=True) as opened:
        opened.save({"model": {"weight": torch.randn(100_000)}}, step=1)
        first = set((tmp_path / "store" / "packs").iterdir())
        opened.save({"model": {"weight": torch.randn(100_000)}}, step=2)
    for pack in set((tmp_path / "store" / "packs").iterdir()) - first:
        with pack.open("r+b") as file:
            file.seek(5000)
            file.write(b"x" * 30_000)
    rules = Publish(str(tmp_path / "releases"))
    with Store.open(tmp_path / "store", read_only=True) as opened, Publisher(rules, opened) as publisher:
        newest = _Newest(opened, "default", publisher)
        for _ in range(3):
            newest.publish_newer()
        assert publisher.last_step() == 1
    with Store.open(tmp_path / "releases") as releases:
        assert [row.step for row in releases.checkpoints("release")] == [1]


def test_follow_publishes_no_checkpoint_again_in_place_of_a_damaged_one(tmp_path: Path) -> None:
    """Test a damaged checkpoint after a published one, in the same process and after a restart."""
    path, rules = tmp_path / "store", Publish(str(tmp_path / "releases"))
    with Store.open(path, create=True) as saving:
        saving.save({"model": {"weight": torch.randn(100_000)}}, step=1)
        with Store.open(path, read_only=True) as opened, Publisher(rules, opened) as publisher:
            newest = _Newest(opened, "default", publisher)
            assert newest.publish_newer() is not None
            first = set((path / "packs").iterdir())
            saving.save({"model": {"weight": torch.randn(100_000)}}, step=2)
            (pack,) = set((path / "packs").iterdir()) - first
            flip(pack, 8 * 10_000)
            assert newest.publish_newer() is None
    with Store.open(path, read_only=True) as opened, Publisher(rules, opened) as publisher:
        assert _Newest(opened, "default", publisher).publish_newer() is None


def test_follow_publishes_a_checkpoint_once_that_is_saved_after_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a checkpoint that a training saves between the look and the restore."""
    restore, steps = Store.restore, iter((2,))

    def restore_late(self: Store, *arguments: Any, **options: Any) -> Restored:  # noqa: ANN401 - passed on
        for step in steps:
            self.save({"model": {"weight": torch.ones(1_000)}}, step=step)
        return restore(self, *arguments, **options)

    monkeypatch.setattr(Store, "restore", restore_late)
    with Store.open(tmp_path / "store", create=True) as store:
        store.save({"model": {"weight": torch.zeros(1_000)}}, step=1)
        with Publisher(Publish(str(tmp_path / "releases")), store) as publisher:
            newest = _Newest(store, "default", publisher)
            document = newest.publish_newer()
            assert document is not None
            assert document["step"] == 2
            assert newest.publish_newer() is None


def test_follow_publishes_a_step_of_another_generation(tmp_path: Path) -> None:
    """Test a step that was published, abandoned, and saved again while nobody followed."""
    path, rules = tmp_path / "store", Publish(str(tmp_path / "releases"))
    for again in (False, True):
        with Store.open(path, create=True) as store, Publisher(rules, store) as publisher:
            generation = store.training.begin_generation(store.checkpoints()[0]) if again else None
            for step in (20,) if again else (10, 20):
                store.save({"model": {"weight": torch.randn(1_000)}}, step=step, generation=generation)
            document = _Newest(store, "default", publisher).publish_newer()
            assert document is not None
            assert (document["number"], document["step"]) == (1 + again, 20)
            assert _Newest(store, "default", publisher).publish_newer() is None


def test_follow_publishes_again_what_did_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a location that fails during the first upload, when the spool already has the release."""
    location = f"file://{tmp_path}/releases"

    def fail(*_arguments: object) -> int:
        raise RemoteUnreachableError("the location does not answer")

    with Store.open(tmp_path / "store", create=True) as opened:
        opened.save({"model": {"weight": torch.randn(1_000)}}, step=1)
        with Publisher(Publish(location), opened) as publisher:
            newest = _Newest(opened, "default", publisher)
            with monkeypatch.context() as patch:
                patch.setattr(Publisher, "_send", fail)
                with pytest.raises(RemoteUnreachableError):
                    newest.publish_newer()
            for _ in range(2):
                newest.publish_newer()
            assert publisher.last_step() == 1
    with Store.open(location, read_only=True) as releases:
        assert [row.step for row in releases.checkpoints("release")] == [2]


def test_file_gets_the_next_release_if_one_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a release that is listed, and deleted before it is read, because newer ones appear."""
    rules, file, export = (
        Publish(str(tmp_path / "releases"), keep=1),
        tmp_path / "w.safetensors",
        convert.export_checkpoint,
    )
    steps = iter((2, 3))

    def export_late(*arguments: Any, **options: Any) -> convert.Exported:  # noqa: ANN401 - passed on
        for step in steps:
            publisher.publish({"model": {"w": torch.full((10_000,), float(step))}}, step)
            break
        return export(*arguments, **options)

    with Publisher(rules) as publisher:
        publisher.publish({"model": {"w": torch.ones(10_000)}}, 1)
        monkeypatch.setattr(convert, "export_checkpoint", export_late)
        assert _write_release(rules.location, file, None)["step"] == 3
    assert load_file(file)["model.w"][0] == 3


def test_follow_says_once_that_it_waits_for_the_first_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a location that does not exist, perhaps because its name is wrong."""
    looks = iter(range(2))

    def sleep(_seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr("asymcheck.cli.publish_commands.time", SimpleNamespace(sleep=sleep))
    outcome = call("subscribe", tmp_path / "nowhere", "--to", tmp_path / "m.safetensors", "--follow")
    assert (outcome.status, outcome.out) == (130, "")
    assert outcome.err.count("Check the path. Waiting for the first release\n") == 1


def test_follow_waits_for_the_release_after_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test that a damaged release is read and reported once, and that the next one is written."""
    rules, file = Publish(str(tmp_path / "releases"), full_every=1), tmp_path / "m.safetensors"
    with Publisher(rules) as publisher:
        for step in (1, 2):
            publisher.publish({"model": {"w": torch.randn(10_000)}}, step)
        damage_release(tmp_path / "releases", 2)
        looks = iter((lambda: None, lambda: publisher.publish({"model": {"w": torch.ones(10_000)}}, 3)))

        def sleep(_seconds: float) -> None:
            for act in looks:
                act()
                return
            raise KeyboardInterrupt

        monkeypatch.setattr("asymcheck.cli.publish_commands.time", SimpleNamespace(sleep=sleep))
        outcome = call("subscribe", rules.location, "--to", file, "--follow")
    assert (outcome.status, outcome.out.count("\n")) == (130, 1)
    assert ": release 3, step 3, " in outcome.out
    assert outcome.err.count("release 2 is damaged; waiting for the next one: ") == 1
    assert load_file(file)["model.w"][0] == 1
