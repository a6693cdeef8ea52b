"""State of torch's ZeroRedundancyOptimizer: each rank saves and restores its part, without a collective."""

from __future__ import annotations

import sys

from asymcheck.errors import UnsupportedValueError
from asymcheck.types import Stateful

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def local_part(value: Stateful) -> Stateful:
    """Return the optimizer of this rank's parameters in a ZeroRedundancyOptimizer, and any other object unchanged.

    The ``state_dict()`` of the whole requires that all ranks consolidated it before.
    """
    module = sys.modules.get(_MODULE)
    if module is None or not isinstance(value, module.ZeroRedundancyOptimizer):
        return value
    if value._overlap_with_ddp:  # noqa: SLF001 - there is no public name
        problem = "ZeroRedundancyOptimizer(overlap_with_ddp=True) cannot be restored, because it exists only after the"
        raise UnsupportedValueError("", f"{problem} first steps; use overlap_with_ddp=False")
    part: Stateful = value.optim
    return part


def share_options(value: Stateful) -> None:
    """Copy the restored options of this rank's part, such as the learning rate, to the whole.

    Otherwise, the next step would replace them by the options of the whole.
    """
    part = local_part(value)
    if part is not value:
        for whole, restored in zip(value.param_groups, part.param_groups, strict=True):  # type: ignore[attr-defined]  # optimizers
            whole.update({key: option for key, option in restored.items() if key != "params"})
