"""State of the global random number generators, so that a resumed run draws the same numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RngState:
    """The global generators of torch (CPU and every CUDA device), numpy and ``random``, as one ``Stateful`` object.

    Put one instance into the state: ``{"model": model, "optimizer": optimizer, "rng": RngState()}``.
    """

    def state_dict(self) -> dict[str, object]:
        """Return the current state of all generators."""
        algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - the global generator is what must be saved
        version, words, gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": [algorithm, np.asarray(keys), int(position), int(has_gauss), float(cached)],
            "random": [version, np.array(words, dtype=np.uint32), gauss],
        }

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Set all generators.

        CUDA generators are set when this process has as many devices as the one that saved.
        """
        stored: dict[str, Any] = dict(state_dict)
        torch.set_rng_state(stored["torch"].cpu())
        if torch.cuda.is_available() and len(stored["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([state.cpu() for state in stored["cuda"]])
        np.random.set_state(tuple(stored["numpy"]))  # noqa: NPY002 - as above
        version, words, gauss = stored["random"]
        random.setstate((version, tuple(map(int, words)), gauss))
