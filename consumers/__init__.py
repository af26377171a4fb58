"""Sample streams: sources, decode, position.

Import the adapters from their modules (:mod:`consumers.kafka`, :mod:`consumers.files`,
:mod:`consumers.memory`, :mod:`consumers.avro`): each brings a library with it.
"""

from consumers.errors import (
    ConsumerError,
    DecodeError,
    PositionLost,
    RegistryUnavailable,
    SourceCorrupt,
    SourceUnavailable,
    SpecError,
)
from consumers.features import Layout, Spec
from consumers.source import (
    Bad,
    Batch,
    Columns,
    Decoded,
    Decoder,
    Ids,
    Message,
    Partition,
    Source,
)

__all__ = [
    "Bad",
    "Batch",
    "Columns",
    "ConsumerError",
    "DecodeError",
    "Decoded",
    "Decoder",
    "Ids",
    "Layout",
    "Message",
    "Partition",
    "PositionLost",
    "RegistryUnavailable",
    "Source",
    "SourceCorrupt",
    "SourceUnavailable",
    "Spec",
    "SpecError",
]

__distribution__ = "streamtrain"
