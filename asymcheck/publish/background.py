"""Releases of a training loop: copy the weights in ``step()``, and publish the copies on a background thread."""

from __future__ import annotations

from concurrent.futures import Future, wait
from functools import partial

from asymcheck.config import check_type
from asymcheck.errors import AsymcheckError, GivenUpError, InvalidInputError, PublishError, PublishWarning, warn_user
from asymcheck.executor import begin
from asymcheck.publish.release import Publish, Publisher, Release
from asymcheck.store import Store


class BackgroundPublisher:
    """Publishes every few steps of a training. For the training thread."""

    def __init__(self, store: Store, rules: Publish | None, *, publishes: bool, raises: bool) -> None:
        """Follow ``rules``. Releases for a remote location are committed to ``store`` first.

        Args:
            store: the store of the training.
            rules: the rules; None publishes nothing.
            publishes: whether this process publishes; with several ranks, only rank 0 does.
            raises: whether a failed release is an error, or a warning.

        Raises:
            InvalidInputError: ``rules`` are no rules.
        """
        if rules is not None:
            check_type("publish", rules, Publish)
        self._rules = rules if publishes else None
        self._raises = raises
        self._store = store
        self._publisher: Publisher | None = None
        self._running: Future[Release] | None = None
        self._last_step: int | None = None

    def step(self, step: int, state: object) -> None:
        """Publish ``state`` if a release is due and no other one is in flight. Otherwise a later step publishes it.

        A release is due when ``step`` reaches or passes a multiple of ``Publish.every``.

        Raises:
            InvalidInputError: no tensor matches, or a tensor cannot be published.
            PublishError: the previous release failed, and failures are raised.
        """
        if self._rules is None:
            return
        every, last = self._rules.every, self._last_step
        is_due = step % every == 0 if last is None else step < last or step // every > last // every
        # Without a release, count from the first step, because the training may call with no multiple at all.
        self._last_step = step if last is None else last
        if not is_due or (self._running is not None and not self._running.done()):
            return
        self._collect()
        self._last_step = step
        try:
            if self._publisher is None:
                self._publisher = Publisher(self._rules, self._store)
            copies = self._publisher.take(state)
            self._running = begin(partial(self._publisher.commit, copies, step), "publish")
        except InvalidInputError:
            raise
        except AsymcheckError as error:
            self._fail(error)

    def _collect(self) -> None:
        """Wait for the release in flight, and report its failure."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            running.result()
        except AsymcheckError as error:
            self._fail(error)

    def _fail(self, error: AsymcheckError) -> None:
        # The next release opens the location again.
        self._close()
        where = self._rules.location if self._rules is not None else ""
        message = f"step {self._last_step} was not published to {where}: {error}"
        if self._raises:
            raise PublishError(message) from error
        warn_user(message, PublishWarning)

    def close(self) -> None:
        """Wait for the release in flight, for at most ``Publish.close_s``, and close the location.

        Raises:
            PublishError: the release failed or took too long, and failures are raised.
        """
        try:
            self._give_up()
            self._collect()
        finally:
            self._close()

    def _give_up(self) -> None:
        """Leave a release that takes longer than ``Publish.close_s`` to its thread."""
        rules, running, publisher = self._rules, self._running, self._publisher
        if rules is None or running is None or publisher is None or wait([running], rules.close_s).done:
            return
        self._running = self._publisher = None
        # The thread uses the location until its end.
        running.add_done_callback(lambda _: publisher.close())
        advice = "check the location, or give Publish a larger close_s"
        self._fail(GivenUpError(f"the release took longer than {rules.close_s:g} s after the last step; {advice}"))

    def _close(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
