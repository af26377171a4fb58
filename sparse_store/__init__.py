"""Embedding tables: index, rows, admission, eviction, optimizers, save and load.

Names of the store itself are loaded when they are first asked for, so that whoever only needs
the configuration pays for neither Numba nor pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from sparse_store.config import (
    DAY,
    HOUR,
    MINUTE,
    SECOND,
    Adagrad,
    Always,
    Count,
    Evict,
    Ftrl,
    Normal,
    Table,
    Uniform,
    Zeros,
)
from sparse_store.errors import (
    BadAck,
    BadInput,
    ChainBroken,
    ClockFell,
    ConfigChanged,
    NonFinite,
    SparseStoreError,
    StalePlan,
    StepOpen,
    StoreCorrupt,
    TableFull,
    UnknownReader,
    UnknownTable,
)

if TYPE_CHECKING:
    from sparse_store.files import Frozen, merge, rows_of
    from sparse_store.store import (
        Change,
        Dump,
        Explained,
        Keys,
        Plan,
        Rows,
        SparseStore,
        warm_up,
    )

__distribution__ = "streamtrain"

__all__ = [
    "DAY",
    "HOUR",
    "MINUTE",
    "SECOND",
    "Adagrad",
    "Always",
    "BadAck",
    "BadInput",
    "ChainBroken",
    "Change",
    "ClockFell",
    "ConfigChanged",
    "Count",
    "Dump",
    "Evict",
    "Explained",
    "Frozen",
    "Ftrl",
    "Keys",
    "NonFinite",
    "Normal",
    "Plan",
    "Rows",
    "SparseStore",
    "SparseStoreError",
    "StalePlan",
    "StepOpen",
    "StoreCorrupt",
    "Table",
    "TableFull",
    "Uniform",
    "UnknownReader",
    "UnknownTable",
    "Zeros",
    "merge",
    "rows_of",
    "warm_up",
]

_ROOMS = {
    "Change": "store",
    "Dump": "store",
    "Explained": "store",
    "Frozen": "files",
    "Keys": "store",
    "Plan": "store",
    "Rows": "store",
    "SparseStore": "store",
    "merge": "files",
    "rows_of": "files",
    "warm_up": "store",
}


def __getattr__(name: str) -> object:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{room}"), name)
