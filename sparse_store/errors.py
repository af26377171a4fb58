"""What can go wrong in a sparse store.

    SparseStoreError
    ├── BadInput        (ValueError)       an argument has the wrong shape, dtype or content
    ├── ClockFell       (ValueError)       a step came with a clock below the store's
    ├── UnknownTable    (LookupError)      no table of that name
    ├── UnknownReader   (LookupError)      no reader of that name
    ├── BadAck          (ValueError)       an acknowledgement outside (cursor, step]
    ├── StepOpen        (RuntimeError)     a boundary was needed between resolve and push
    ├── StalePlan       (RuntimeError)     a plan was used after its time
    ├── NonFinite       (ArithmeticError)  a gradient that would poison a row; nothing was moved
    ├── TableFull       (MemoryError)      more entries than an index can number
    ├── ConfigChanged   (ValueError)       saved tables do not fit the tables asked for
    └── StoreCorrupt    (ValueError)       a saved file is torn, altered or of another format
        └── ChainBroken                    the folders given do not follow one another

Whatever raises leaves the store as it was, unless the class says otherwise.
"""


class SparseStoreError(Exception):
    """Base of every error that this package raises on purpose."""


class BadInput(SparseStoreError, ValueError):
    """An argument has the wrong shape, dtype or content."""


class ClockFell(SparseStoreError, ValueError):
    """A step came with a clock below the store's."""


class UnknownTable(SparseStoreError, LookupError):
    """No table of that name."""


class UnknownReader(SparseStoreError, LookupError):
    """No reader of that name."""


class BadAck(SparseStoreError, ValueError):
    """A reader acknowledged a step that it can't have seen, or went back."""


class StepOpen(SparseStoreError, RuntimeError):
    """Something that needs a step boundary was called between resolve and push."""


class StalePlan(SparseStoreError, RuntimeError):
    """A plan was pushed twice, or used after a later resolve or abandon."""


class NonFinite(SparseStoreError, ArithmeticError):
    """A gradient is not finite, or so large that its square would overflow. No row moved."""


class TableFull(SparseStoreError, MemoryError):
    """A table would need more entries than its index can number (2^31 - 2).

    Raised amid a step: some tables have taken it, so the store is no longer fit for use.
    """


class ConfigChanged(SparseStoreError, ValueError):
    """The tables asked for can't take over what was saved."""


class StoreCorrupt(SparseStoreError, ValueError):
    """A saved file is missing, torn, altered or of a format that this release can't read."""


class ChainBroken(StoreCorrupt):
    """The folders given do not follow one another: a base, then each increment in turn."""
