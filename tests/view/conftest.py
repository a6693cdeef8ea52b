"""Fixtures: a store with branches, and a page server in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asymcheck
from asymcheck.cli.view_command import document_of
from asymcheck.view.documents import Documents
from asymcheck.view.server import PageServer

Serve = Callable[..., contextlib.AbstractContextManager[PageServer]]
HOSTILE = "<img src=x onerror='window.owned=1'></script><script>window.owned=1</script>\"'&\u202e" + "x" * 3000


@pytest.fixture
def store(store_path: Path) -> Path:
    """Return a store with a line of training, an abandoned branch, a second run and hostile names."""
    config = asymcheck.StoreConfig(partition_bytes=8192, bundle_below_bytes=4096, inline_bytes=64)
    weight = torch.arange(10_000, dtype=torch.float32)
    with asymcheck.Store.open(store_path, config=config, create=True) as opened:
        for step in (10, 20, 30):
            opened.save(
                {"model": {"weight": weight, HOSTILE: torch.full((3000,), float(step))}, "lr": 0.1 / step},
                step=step,
                metrics={"loss": 1.0 / step, HOSTILE: float(step), "bad": float("nan")},
            )
        generation = opened.training.begin_generation(opened.checkpoints()[1])
        opened.save({"model": {"weight": weight + 1}}, step=25, generation=generation, metrics={"loss": 0.5})
        opened.save({"x": torch.ones(5)}, step=1, run="other")
    return store_path


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Return a context manager that serves the page of a store."""

    @contextlib.contextmanager
    def run(store: Path | str, *, remote: str | None = None, trace: Path | None = None) -> Iterator[PageServer]:
        opened = Documents(str(store), remote, tmp_path, trace, document_of)
        with contextlib.closing(opened) as documents, PageServer(documents, 0) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            try:
                yield server
            finally:
                server.shutdown()
                thread.join()

    return run


def fetch(server: PageServer, path: str) -> Any:  # noqa: ANN401 - JSON
    """Return a document of the server."""
    with urllib.request.urlopen(f"{server.url}api/{path}") as answer:  # noqa: S310 - http
        return json.load(answer)
