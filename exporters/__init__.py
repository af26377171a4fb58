"""Published versions: deltas, the log, sinks such as Redis, and replicas that follow.

A trainer gives drafts to a `Publisher`, which numbers them, writes them to the `Log` and ships
them to each `Sink`. A serving process holds a `Replica`.
"""

from exporters.errors import (
    Corrupt,
    Duplicate,
    ExportError,
    FenceLost,
    FenceTaken,
    Gap,
    HeadMismatch,
    LogCorrupt,
    NotReady,
    OutcomeUnknown,
    ReplicaError,
    SinkError,
    SinkLostTime,
    SinkRefused,
    SinkUnavailable,
    SinkUnfit,
    SnapshotHeld,
    StaleGeneration,
    UnknownTable,
    WireError,
)
from exporters.log import Entry, Log, covers, keys_above, knows, pick
from exporters.publisher import Publisher
from exporters.repair import Repair, plan
from exporters.replica import Looked, Replica
from exporters.shipper import Shipper
from exporters.sink import Feed, Published, Sink, Snapshot, SnapshotSource, Status
from exporters.version import Delta, DenseInfo, Half, Head, TableInfo, TableRows

__all__ = [
    "Corrupt",
    "Delta",
    "DenseInfo",
    "Duplicate",
    "Entry",
    "ExportError",
    "Feed",
    "FenceLost",
    "FenceTaken",
    "Gap",
    "Half",
    "Head",
    "HeadMismatch",
    "Log",
    "LogCorrupt",
    "Looked",
    "NotReady",
    "OutcomeUnknown",
    "Published",
    "Publisher",
    "Repair",
    "Replica",
    "ReplicaError",
    "Shipper",
    "Sink",
    "SinkError",
    "SinkLostTime",
    "SinkRefused",
    "SinkUnavailable",
    "SinkUnfit",
    "Snapshot",
    "SnapshotHeld",
    "SnapshotSource",
    "StaleGeneration",
    "Status",
    "TableInfo",
    "TableRows",
    "UnknownTable",
    "WireError",
    "covers",
    "keys_above",
    "knows",
    "pick",
    "plan",
]

__distribution__ = "streamtrain"
