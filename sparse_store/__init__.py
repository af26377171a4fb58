"""Embedding tables: index, rows, admission, eviction, optimizers, save and load.

Import the store from `sparse_store.store` and saved folders from `sparse_store.files`: they bring
Numba and pyarrow with them, which whoever only needs the configuration should not pay for.
"""

from sparse_store.config import (
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

__all__ = [
    "Adagrad",
    "Always",
    "BadAck",
    "BadInput",
    "ChainBroken",
    "ClockFell",
    "ConfigChanged",
    "Count",
    "Evict",
    "Ftrl",
    "NonFinite",
    "Normal",
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
    "warm_up",
]

__distribution__ = "streamtrain"


def warm_up() -> None:
    """Compile every kernel, or load it from the cache; see `sparse_store.store.warm_up`."""
    from sparse_store import store

    store.warm_up()
