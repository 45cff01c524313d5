"""Checkpoints: where and how much, on the span `verl.checkpoint` and in an event of that name.

verl hands the folder to its ranks, or to the handler of the SFT trainer. How much is in it is looked up in a thread of
its own when verl has saved: on a shared file system that can take long.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry._logs import Logger

from verl_otel import border, config, events
from verl_otel.identity import Identity, remember_run
from verl_otel.semconv import attributes as attr
from verl_otel.semconv.stages import CHECKPOINT_TIMER
from verl_otel.tracing.steps import WAIT_FOR_RESULT, Scope, current_scope

_FOLDER_OF_STEP = re.compile(r"(.*?/global_step_\d+)(/|$)")


class Checkpoints:
    """See the module. The methods never raise.

    Args:
        on_saved: called when the event of a checkpoint is there to be sent.
    """

    def __init__(
        self,
        logger: Logger,
        identity: Identity,
        event_attributes: Mapping[str, Any],
        on_saved: Callable[[], Any],
    ) -> None:
        self._logger = logger
        self._identity = identity
        self._event_attributes = event_attributes
        self._on_saved = on_saved

    def saving(self, path: Any) -> None:
        """In the stage of a checkpoint: verl saves to `path`, a folder inside that of the step (`global_step_<n>`)."""
        try:
            scope = current_scope()
            found = _FOLDER_OF_STEP.match(path) if isinstance(path, str) else None
            if scope is None or scope.timer != CHECKPOINT_TIMER or scope.on_left is not None or found is None:
                return
            folder = found[1]

            def on_left(left: Scope, end: int, seconds: float) -> Callable[[], Mapping[str, Any] | None]:
                return self._look(left, folder, end, seconds)

            scope.span.set_attribute(attr.CHECKPOINT_PATH, config.shown_path(folder))
            scope.on_left = on_left
        except Exception:
            border.caught("noting where a checkpoint goes")

    def _look(self, scope: Scope, folder: str, end: int, seconds: float) -> Callable[[], Mapping[str, Any] | None]:
        found: list[dict[str, Any]] = []
        if scope.failed:
            return dict

        def look() -> None:
            written: dict[str, Any] = {}
            try:
                remember_run(os.path.dirname(folder), self._identity.run_id, self._identity.attempt)
                written = _content(folder)
            except Exception:
                border.caught("looking at a checkpoint")
            self._emit(scope, folder, written, end, seconds)
            found.append(written)

        threading.Thread(target=look, name="verl-otel-checkpoint", daemon=True).start()
        return lambda: found[0] if found else None

    def _emit(self, scope: Scope, folder: str, written: Mapping[str, Any], end: int, seconds: float) -> None:
        attributes = {**self._event_attributes, attr.CHECKPOINT_PATH: config.shown_path(folder), **written}
        if scope.number is not None:
            attributes[attr.STEP_NUMBER] = scope.number
        body = {"seconds": seconds}
        events.emit(self._logger, attr.EVENT_CHECKPOINT, body, attributes, context=scope.context, time_ns=end)
        self._on_saved()


def _content(folder: str) -> dict[str, Any]:
    """Bytes and number of the files that this node sees; nothing if it sees none. Gives up after a while."""
    size = files = 0
    give_up = time.monotonic() + WAIT_FOR_RESULT
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if time.monotonic() > give_up:
                    return {}
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_size
    return {attr.CHECKPOINT_BYTES: size, attr.CHECKPOINT_FILES: files} if files else {}
