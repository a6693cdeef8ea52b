"""Test the options that the callbacks of trainers share."""

from pathlib import Path

import pytest

from asymcheck import Store
from asymcheck.integrations.trainer_callback import SavingCallback


@pytest.mark.parametrize("name", ["evry", "publish", "save_on_exit"])
def test_unknown_options_are_refused_at_once(name: str, tmp_path: Path) -> None:
    """Test that a callback does not wait for the begin of the training before it refuses an option."""
    with Store.open(tmp_path / "store", create=True) as store, pytest.raises(TypeError, match=name):
        SavingCallback(store, **{name: None})
