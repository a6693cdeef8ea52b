"""Test the page in a headless Chromium. The tests are skipped on a machine without Chromium."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asymcheck
from asymcheck.view.page import static_page
from tests.view.chromium import BINARY, Chromium
from tests.view.conftest import HOSTILE, Serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BINARY is None, reason="Chromium is missing: apt-get install chromium"),
]

ROWS = "document.querySelectorAll('#checkpoints tbody tr').length"
CONTRASTS = """(() => {
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return /, 0\\)$/.test(color) ? ground(element.parentElement) : color;
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const found = {};
  for (const element of document.querySelectorAll("body, body *")) {
    if (!hasText(element) || element.closest(":disabled, script, style, [hidden]")) continue;
    const style = getComputedStyle(element), svg = element instanceof SVGElement;
    const color = svg ? style.fill : style.color;
    const [a, b] = [color, ground(svg ? element.closest("figure") : element)].map(luminance);
    const name = `${element.tagName}.${element.getAttribute("class") || ""}`;
    found[name] = Math.min(found[name] || 99, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """Start one browser for all tests."""
    with Chromium() as started:
        yield started


@pytest.fixture(autouse=True)
def no_problems(browser: Chromium) -> Iterator[None]:
    """Fail if the console has an error: an exception, a refused inline script, a file that is missing."""
    browser.problems.clear()
    yield
    assert browser.problems == []


def wait_for_run(browser: Chromium, rows: int) -> None:
    """Wait until the table of checkpoints has a number of rows."""
    browser.wait_for(f"{ROWS} === {rows}")


def test_hostile_names_are_shown_as_text(browser: Chromium, serve: Serve, store: Path) -> None:
    """Test names of tensors and metrics that contain elements, and a metric that is NaN."""
    with serve(store) as server:
        browser.open(server.url)
        wait_for_run(browser, 4)
        browser.evaluate("document.querySelector('#diff-form').a.value = '10'")
        browser.evaluate("document.querySelector('#diff-form').b.value = '20'")
        browser.evaluate("document.querySelector('#diff-form button').click()")
        browser.wait_for("document.querySelectorAll('#diff tbody tr').length === 1")
        text = browser.evaluate("document.querySelector('main').textContent")
        assert text.count(HOSTILE) >= 2
        assert f"model.{HOSTILE}" in text
        assert browser.evaluate("typeof window.owned") == "undefined"
        assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
        browser.open(server.url, width=400)
        wait_for_run(browser, 4)
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_page_shows_each_save_and_verify(browser: Chromium, serve: Serve, store: Path) -> None:
    """Test a save while the page is open, the choice of a run, and a verification on demand."""
    with serve(store) as server, asymcheck.Store.open(store) as opened:
        browser.open(server.url)
        wait_for_run(browser, 4)
        cells = browser.evaluate("[...document.querySelectorAll('#checkpoints tbody td:last-child')].length")
        assert cells == 4
        opened.save({"model": {"weight": torch.ones(9)}}, step=99)
        wait_for_run(browser, 5)
        assert browser.evaluate("document.querySelector('#checkpoints tbody td').textContent") == "99"
        browser.evaluate("document.querySelector('#verify').click()")
        browser.wait_for("document.querySelector('#health').className === 'good'")
        browser.evaluate(
            "[...document.querySelectorAll('nav a')].find((a) => a.textContent.startsWith('other')).click()"
        )
        wait_for_run(browser, 1)
        assert browser.evaluate("document.querySelector('h1').textContent") == "Run other"


def test_sizes_fit_beside_the_axis(browser: Chromium, serve: Serve, store_path: Path) -> None:
    """Test labels of three digits, such as 512.0 KiB: none begins outside the chart."""
    with asymcheck.Store.open(store_path, create=True) as opened:
        opened.save({"x": torch.ones(900 * 256)}, step=0)
    with serve(store_path) as server:
        browser.open(server.url)
        browser.wait_for("document.querySelectorAll('#bytes-chart svg text').length > 2")
        labels = (
            "[...document.querySelectorAll('#bytes-chart svg text')].filter((text) => text.textContent.endsWith('B'))"
        )
        assert browser.evaluate(f"{labels}.some((text) => text.textContent.length >= 9)")
        assert browser.evaluate(f"{labels}.every((text) => text.getBBox().x >= 0)")


def test_large_metrics_are_drawn(browser: Chromium, serve: Serve, store_path: Path) -> None:
    """Test the axes of metrics to which the distance of two labels adds nothing, such as floating-point operations."""
    with asymcheck.Store.open(store_path, create=True) as opened:
        for step in range(2):
            opened.save({"x": torch.ones(5)}, step=step, metrics={"flos": 3e17, "growing": 1e20 + 2e4 * step})
    with serve(store_path) as server:
        browser.open(server.url)
        wait_for_run(browser, 2)
        assert browser.evaluate("document.querySelectorAll('#metrics svg').length") == 2


def test_empty_and_damaged_stores_are_readable(browser: Chromium, serve: Serve, store: Path, tmp_path: Path) -> None:
    """Test that damage is named in the table and in the findings."""
    asymcheck.Store.open(tmp_path / "empty", create=True).close()
    with serve(tmp_path / "empty") as server:
        browser.open(server.url)
        browser.wait_for("document.querySelector('#live').textContent.startsWith('following')")
        assert browser.evaluate("document.querySelector('h1').textContent") == "No checkpoints yet"
    (manifest,) = min((store / "manifests" / "default").iterdir()).iterdir()
    manifest.write_bytes(b"x")
    sorted((store / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)[-2].unlink()  # step 25
    with serve(store) as server:
        browser.open(server.url)
        wait_for_run(browser, 4)
        assert browser.evaluate("document.querySelectorAll('#checkpoints tbody .bad').length") == 2  # status and copies
        assert "incomplete or damaged: " in browser.evaluate("document.querySelector('#checkpoints').textContent")
        browser.evaluate("document.querySelector('#verify').click()")
        browser.wait_for("document.querySelector('#health').className === 'bad'")
        browser.wait_for("document.querySelectorAll('#checkpoints tbody .bad').length === 3")
        assert "damaged-manifest" in browser.evaluate("document.querySelector('#findings').textContent")


def test_remote_checkpoints_follow_newest_first(
    browser: Chromium, serve: Serve, store_path: Path, tmp_path: Path
) -> None:
    """Test the order of checkpoints that only the remote location has."""
    location = f"file://{tmp_path}/remote"
    with asymcheck.Store.open(store_path, create=True) as opened:
        for step in (10, 20, 30):
            opened.save({"x": torch.ones(5) * step}, step=step)
            opened.push(location)
        for step in (10, 20):
            opened.delete(step)
    with serve(store_path, remote=location) as server:
        browser.open(server.url)
        wait_for_run(browser, 3)
        steps = "[...document.querySelectorAll('#checkpoints tbody td:first-child')].map((cell) => cell.textContent)"
        assert browser.evaluate(steps) == ["30", "20", "10"]


def test_page_follows_a_store_during_a_verification(browser: Chromium, serve: Serve, store: Path) -> None:
    """Test a checkpoint that is saved meanwhile. The page still tells that the verification runs."""
    with serve(store) as server, asymcheck.Store.open(store) as opened:
        browser.open(server.url)
        wait_for_run(browser, 4)
        with server.documents._heavy:
            browser.evaluate("document.querySelector('#verify').click()")
            opened.save({"model": {"weight": torch.ones(9)}}, step=99)
            wait_for_run(browser, 5)
            assert browser.evaluate("document.querySelector('#health').textContent").startswith("Reading every byte")
        browser.wait_for("document.querySelector('#health').className === 'good'")


def test_page_does_not_wait_for_the_remote_location(
    browser: Chromium, serve: Serve, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test a location that does not answer until the page shows the checkpoints of the store."""
    answers = threading.Event()
    with serve(store, remote=f"file://{tmp_path}/remote") as server:
        monkeypatch.setitem(server.documents._by_name, "remote", lambda _query: answers.wait(90) and {"error": "late"})
        browser.open(server.url)
        try:
            wait_for_run(browser, 4)
        finally:
            answers.set()


def test_unreadable_trace_hides_nothing_else(browser: Chromium, serve: Serve, store: Path, tmp_path: Path) -> None:
    """Test a trace file that does not exist, served and in an exported file."""
    with serve(store, trace=tmp_path / "missing.json") as server:
        browser.open(server.url)
        wait_for_run(browser, 4)
        browser.wait_for("document.querySelector('#message').textContent.startsWith('cannot read trace')")
        documents = server.documents.collect(verify=False, compare=None)
    exported = tmp_path / "page.html"
    exported.write_text(static_page(documents), "utf-8")
    browser.open(exported.as_uri())
    wait_for_run(browser, 4)
    browser.problems.clear()  # Chromium logs each refused request.


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_is_accessible(browser: Chromium, serve: Serve, store: Path, dark: bool) -> None:
    """Test landmarks, names of controls and charts, table headers, focus order, keys and contrast."""
    with serve(store) as server:
        browser.open(server.url, dark=dark)
        wait_for_run(browser, 4)
        browser.evaluate("document.querySelector('#diff-form button').click()")
        browser.wait_for("document.querySelectorAll('#diff tbody tr').length > 0")
        nodes = browser.send("Accessibility.getFullAXTree")["nodes"]
        roles: dict[str, list[str]] = {}
        for node in nodes:
            if not node["ignored"]:
                roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
        assert {"banner", "navigation", "main", "form", "region"} <= set(roles)
        for role in ("button", "textbox", "checkbox", "combobox", "image", "region", "form", "table"):
            assert all(roles[role]), role
        assert any("Arrow keys read the values" in name for name in roles["image"])
        assert browser.evaluate("[...document.querySelectorAll('th')].every((cell) => cell.scope === 'col')")
        assert (
            browser.evaluate(
                'document.querySelectorAll(\'[tabindex]:not([tabindex="0"]):not([tabindex="-1"])\').length'
            )
            == 0
        )
        ratios: dict[str, float] = browser.evaluate(CONTRASTS)
        assert {name: round(ratio, 2) for name, ratio in ratios.items() if ratio < 4.5} == {}
        order = []
        for _ in range(8):
            browser.press("Tab", 9)
            order.append(
                browser.evaluate(
                    "document.activeElement.className || document.activeElement.id || document.activeElement.tagName"
                )
            )
        assert order[:4] == ["skip", "pause", "A", "A"]
        browser.evaluate("document.querySelector('#metrics svg').focus()")
        browser.press("Home", 36)
        assert browser.evaluate("document.querySelector('#metrics output').textContent").startswith("step 10: ")
        browser.press("ArrowRight", 39)
        assert browser.evaluate("document.querySelector('#metrics output').textContent").startswith("step 20: ")
        browser.evaluate("document.querySelector('#checkpoints th button').focus()")
        browser.press("Enter", 13, "\r")
        assert browser.evaluate("document.querySelector('#checkpoints th').ariaSort") == "descending"
        browser.press("Enter", 13, "\r")
        assert browser.evaluate("document.querySelector('#checkpoints th').ariaSort") == "ascending"
        assert browser.evaluate("document.querySelector('#checkpoints tbody td').textContent") == "10"


def many(count: int) -> dict[str, Any]:
    """Return the documents of a run with many checkpoints in 20 generations."""
    entries: list[dict[str, Any]] = []
    used: list[dict[str, Any]] = []
    for number in range(count):
        name = {"run": "default", "step": number, "generation": 1 + number * 20 // count, "save_id": f"{number:032x}"}
        checkpoint = name | {"world_size": 1, "complete": True, "on_line": number % 500 < 450, "written_bytes": None}
        checkpoint |= {"created_ns": 17 * 10**17 + number * 10**10, "state_bytes": 10**9, "store_ranks": None}
        checkpoint["metrics"] = {"loss": 1 / (1 + number), "lr": number % 97}
        entries.append(
            {"checkpoint": checkpoint, "writer": "", "step_before": None, "since_before_ns": None, "problem": ""}
        )
        used.append({**name, "state_bytes": 10**9, "stored_bytes": 10**9, "new_bytes": 10**8})
    openings = [
        {"generation": g, "on_line": True, "opened_ns": 1, "writer": "", "parent_step": (g - 1) * count // 20 - 30}
        | {"parent_generation": g - 1, "parent_save_id": "", "abandoned": 0, "problem": ""}
        for g in range(20, 1, -1)
    ]
    totals = dict.fromkeys(
        (
            "pack_bytes",
            "live_bytes",
            "freeable_bytes",
            "locked_bytes",
            "pooled_bytes",
            "manifest_bytes",
            "catalog_bytes",
        ),
        1,
    )
    run = {"run": "default", "version": 1, "checkpoints": count, "read": count, "newest_step": count}
    return {
        "state": {
            "store": "s",
            "is_remote": False,
            "remote": None,
            "runs": [run],
            "verified": None,
            "trace": None,
            "now_ns": 1_800_000_000_000_000_000,
        },
        "log": {
            "default": {
                "history": {"run": "default", "entries": entries[::-1], "openings": openings, "line_problem": ""}
            }
        },
        "remote": {},
        "memory": {"rings": []},
        "du": {"accounting": {"checkpoints": used, **totals}},
        "diff": None,
        "trace": None,
    }


def test_ten_thousand_checkpoints_are_drawn_without_lag(browser: Chromium, tmp_path: Path) -> None:
    """Test that the page has few elements, and that drawing takes a fraction of a second."""
    report = tmp_path / "report.html"
    report.write_text(static_page(many(10_000)), "utf-8")
    browser.open(report.as_uri())
    wait_for_run(browser, 20)
    assert browser.evaluate("document.querySelectorAll('*').length") < 2500
    milliseconds = browser.evaluate(
        "(() => { const t = performance.now(); draw(); document.body.offsetHeight; return performance.now() - t; })()"
    )
    assert milliseconds < 1500  # Measured on two busy cores: 300 ms.
    browser.evaluate("document.querySelector('[data-turn=Last]').click()")
    assert "9,981 – 10,000 of 10,000" in browser.evaluate("document.querySelector('#checkpoints caption').textContent")
