"""D1: what a boundary publishes, from the trainer's state to the exporters' terms."""

from collections.abc import Mapping

from consumers.source import Partition
from exporters.version import Delta, TableRows
from streamtrain.trainer import Trainer


def draft(trainer: Trainer, *, generation: int) -> Delta:
    """Freeze what the serving reader has not got, with the dense weights; changes nothing.

    Returns
    -------
    Delta
        Without version and range, which the publisher gives it. Its arrays are copies.
    """
    store = trainer.store
    change = store.peek("serving")
    tables = {
        name: TableRows(rows.keys, rows.values, rows.removed)
        for name, rows in change.tables.items()
        if rows.keys.size or rows.removed.size
    }
    return Delta(
        version=0,
        since=0,
        generation=generation,
        step=change.until,
        watermark=trainer.clock or 0,
        positions=positions(trainer.position),
        tables=tables,
        dense=trainer.dense.vector(),
        dims={name: table.dim for name, table in store.tables.items()},
        rows={name: store.rows(name) for name in store.tables},
    )


def positions(position: Mapping[Partition, int]) -> dict[str, int]:
    """Return a position as the wire has it: ``topic/partition`` to next offset."""
    return {f"{p.topic}/{p.number}": offset for p, offset in sorted(position.items())}
