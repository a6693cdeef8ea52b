"""State of the global random number generators, so that a resumed run draws the same numbers."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import torch

from asymcheck.errors import RefusedStateError, StateDifferenceWarning, warn_user

MT19937_WORDS = 624
"""Numbers in the block of a Mersenne Twister."""
_TORCH_POSITIONS = struct.Struct("<8xi4xQ")
"""Numbers that are left in the block plus 1, and position of the next one, in the state of a CPU generator of torch."""


def set_torch_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set the state of a generator. torch would read numbers beyond the block from foreign memory.

    Raises:
        RefusedStateError: a number is outside of the block.
    """
    state = state.cpu()
    if generator.device.type == "cpu" and state.nbytes >= _TORCH_POSITIONS.size:
        left, position = _TORCH_POSITIONS.unpack_from(state.numpy().tobytes())
        if left + position > MT19937_WORDS + 1:
            raise RefusedStateError(f"the position {position} of a torch-generator is outside its block", (), None)
    generator.set_state(state)


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

        Warns:
            StateDifferenceWarning: the number of CUDA devices differs, and is not 0.
        """
        stored: dict[str, Any] = dict(state_dict)
        position = stored["numpy"][2]
        # numpy does not check the position, with which it reads from memory.
        if type(position) is not int or not 0 <= position <= MT19937_WORDS:
            problem = f"the position {position!r:.20} of the generator of numpy is outside its block"
            raise RefusedStateError(problem, (), None)
        set_torch_state(torch.default_generator, stored["torch"])
        saved, present = len(stored["cuda"]), torch.cuda.device_count() if torch.cuda.is_available() else 0
        if saved == present > 0:
            torch.cuda.set_rng_state_all([state.cpu() for state in stored["cuda"]])
        np.random.set_state(tuple(stored["numpy"]))  # noqa: NPY002 - as above
        version, words, gauss = stored["random"]
        random.setstate((version, tuple(map(int, words)), gauss))
        if present and saved not in (0, present):
            # Last, because warnings may be errors.
            told = f"the random numbers of {saved} CUDA devices are not restored, because this process has {present}"
            warn_user(told, StateDifferenceWarning)
