"""Whether the four packages that we ship are ours.

`consumers` and `exporters` are other people's names on PyPI, too: pip lets them overwrite our
files without a word, and a folder of such a name in the current directory hides ours.
"""

import re
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("streamtrain", "consumers", "sparse_store", "exporters")
_STAMP: Final = re.compile(r'^__distribution__ = "streamtrain"$', re.MULTILINE)


def strangers(find: Callable[[str], ModuleSpec | None] = find_spec) -> list[str]:
    """Return, one sentence each, which packages are not ours, and the cure; imports none of them.

    Parameters
    ----------
    find : callable
        From a package's name to where an import would find it, or None.
    """
    home = Path(__file__).resolve().parent.parent
    found = []
    for name in PACKAGES:
        spec = find(name)
        path = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if path is None:
            found.append(
                f"the package `{name}` is gone or hollow: another distribution of that name was "
                "installed over it and removed. Cure: pip install --force-reinstall --no-deps "
                "streamtrain, in an environment of its own"
            )
        elif path.parent.parent != home:
            found.append(
                f"`import {name}` finds {path}, which is not beside streamtrain in {home}. Cure: "
                "leave the folder that hides it (or use python -P), or use an environment of its own"
            )
        elif not _STAMP.search(path.read_text(encoding="utf-8", errors="replace")):
            found.append(
                f"{path} is not streamtrain's: another distribution named {name} was installed "
                f"over it. Cure: pip uninstall {name}; pip install --force-reinstall --no-deps "
                "streamtrain"
            )
    return found
