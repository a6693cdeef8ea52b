"""Weight transfer engine of vLLM that follows the releases of a location.

vLLM finds the backend ``asymcheck`` by the package's entry point in all its processes. A controller, or the trainer,
then updates the weights between requests::

    llm = vllm.LLM(model, weight_transfer_config=WeightTransferConfig(backend="asymcheck"))
    llm.init_weight_transfer_engine({"init_info": {"location": "s3://bucket/releases"}})
    ...
    llm.start_weight_update()
    llm.update_weights({"update_info": {"number": 12}})
    llm.finish_weight_update()

The client classes of ``vllm.distributed.weight_transfer.clients`` have the same methods for a server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from asymcheck.errors import InvalidInputError
from asymcheck.publish.subscriber import Subscriber

BACKEND = "asymcheck"
"""Name of the engine in ``WeightTransferConfig``."""


def register() -> None:
    """Register the engine. vLLM calls this in each of its processes."""
    WeightTransferEngineFactory.register_engine(BACKEND, __name__, "ReleaseEngine")


@dataclasses.dataclass
class ReleaseInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Argument of ``init_weight_transfer_engine``."""

    location: str
    """Directory or URI to which releases are published."""


@dataclasses.dataclass
class ReleaseUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Argument of ``update_weights``."""

    number: int | None = None
    """Number of the release; None for the newest. With several workers, give it, so that all have the same release."""


class ReleaseEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Engine of one worker. It has a verified copy of the release in host memory before it changes the model."""

    init_info_cls = ReleaseInitInfo
    update_info_cls = ReleaseUpdateInfo
    _subscriber: Subscriber | None = None
    _is_mixture = False

    def init_transfer_engine(self, init_info: ReleaseInitInfo) -> None:
        """Follow another location. The model stays as it is until the next update."""
        self.shutdown()
        self._weights: dict[str, object] = {}
        self._subscriber = Subscriber(init_info.location, self._weights, buffering="double")

    def start_weight_update(self) -> None:
        """Do nothing: the model changes after the release was verified."""

    def finish_weight_update(self) -> None:
        """Do nothing: the model has all weights."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Update the model to a release. Do nothing if it has this release, or if there is no newer one.

        Raises:
            ValueError: ``update_info`` has an unknown key.
            AsymcheckError: the release cannot be read; see ``Subscriber.update``. The model was not changed.
            Exception: vLLM cannot load the weights into this model, which may be a mixture until the next update.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ReleaseUpdateInfo) -> None:
        """Read a release, then load it into the model."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._subscriber is None:
            raise InvalidInputError("no location: call init_weight_transfer_engine first")
        update = self._subscriber.update(update_info.number)
        if update is None and not self._is_mixture:
            return
        self._is_mixture = True
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(self._named())
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_mixture = False

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights by the names of the model, without a common prefix such as ``model.``."""
        parts = [f"{name}.".split(".")[:2] for name in self._weights]
        outer, inner = {part[0] for part in parts}, {part[1] for part in parts}
        own = {name for name, _ in self.model.named_children()}
        # The prefix may also be the name of a part of the model.
        is_own = outer <= own and inner.isdisjoint(own)
        start = len(outer.pop()) + 1 if len(outer) == 1 and not is_own else 0
        for name, tensor in self._weights.items():
            assert isinstance(tensor, torch.Tensor)  # noqa: S101 - for mypy
            yield name[start:], tensor

    def shutdown(self) -> None:
        """Close the location."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None
