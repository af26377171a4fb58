"""Fault points for tests: kill this process right after a numbered step.

``STREAMTRAIN_FAULT=D4:3`` kills with SIGKILL when D4 is reached for the third time. Without the
variable no hook exists, and the steps call a function that does nothing.
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping

from streamtrain.errors import ConfigError

OnStep = Callable[[str], None]

VARIABLE = "STREAMTRAIN_FAULT"


def nothing(step: str) -> None:
    """Do nothing: the hook of every run that is not a test."""
    del step


def hook(environment: Mapping[str, str] = os.environ) -> OnStep:
    """Return what the numbered steps are to call.

    Raises
    ------
    ConfigError
        The variable is set and not of the form ``STEP:COUNT``.
    """
    text = environment.get(VARIABLE)
    if not text:
        return nothing
    name, _, count = text.partition(":")
    if not name or not count.isdigit() or int(count) < 1:
        raise ConfigError([f"{VARIABLE}={text}: write it as STEP:COUNT, such as D4:3"])
    left = int(count)
    guard = threading.Lock()

    def die(step: str) -> None:
        nonlocal left
        if step != name:
            return
        with guard:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return die
