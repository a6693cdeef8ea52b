"""What README shows is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def snippets() -> dict[str, str]:
    """Return the tagged Python examples of README, by tag."""
    return dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", README, re.DOTALL))


def commands() -> list[str]:
    """Return the asymcheck commands that README shows."""
    return re.findall(r"^    \$ (asymcheck .*)$", README, re.MULTILINE)


@pytest.mark.slow
def test_the_examples_run_one_after_the_other(tmp_path: Path) -> None:
    """The training example makes a store, a second start resumes from it, and the other examples work on it."""
    examples = snippets()
    assert set(examples) == {"training", "store"}
    loop = "range(restored.step + 1 if restored else 0, 100)"
    shorter = examples["training"].replace(loop, "range(0, 96)")
    resumed = examples["training"] + "\nassert restored.step == 90, restored\n"
    assert shorter != examples["training"]
    both = f"{shorter}\nstore.close()\n{resumed}\n{examples['store']}\nassert store.verify() == []\n"
    subprocess.run([sys.executable, "-W", "error", "-c", both], cwd=tmp_path, check=True)
    shown = commands()
    assert len(shown) == 3
    for command in shown:
        words = [word.strip("'") for word in command.split()]
        # The example deletes step 90 at its end.
        words = ["80" if word == "90" else word for word in words]
        subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, check=True, capture_output=True)


def test_every_python_example_is_tagged() -> None:
    """An example without a tag would not be run."""
    assert README.count("```python") == len(snippets())
