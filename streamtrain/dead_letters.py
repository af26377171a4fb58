"""The file of messages that could not be learned from: one JSON object a line.

Lines are written with the step that passes the message, never ahead, so that a restart can cut
the file back to the length that its cut remembers and write the same lines again.
"""

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from consumers.source import Bad


class DeadLetters:
    """An append-only file of `Bad` messages.

    Parameters
    ----------
    path : Path
        Its folder is made if missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, bad: Sequence[Bad]) -> None:
        """Append a line per message: topic, partition, offset, reason, detail, value in base64."""
        if not bad:
            return
        lines = []
        for letter in bad:
            value = None if letter.value is None else base64.b64encode(letter.value).decode()
            line = {
                "topic": letter.topic,
                "partition": letter.partition,
                "offset": letter.offset,
                "reason": letter.reason,
                "detail": letter.detail,
                "value": value,
            }
            lines.append(json.dumps(line, ensure_ascii=False))
        data = memoryview(("\n".join(lines) + "\n").encode())
        while data:
            data = data[self._file.write(data) :]

    def length(self) -> int:
        """Return the bytes written so far (C1)."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Make what was written durable; before C4."""
        os.fsync(self._file.fileno())

    def cut_back(self, length: int) -> None:
        """S6: forget what was written after the cut that is being restored."""
        if length < self.length():
            self._file.truncate(length)
            self.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
