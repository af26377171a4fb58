"""What a restored trainer must publish again (step S5); pure.

A trainer that comes back at a cut has forgotten what it published after it. Rows that were changed
in that forgotten stretch must be written again as they are now, or removed, in every sink. The
log still has the keys of all of them: that is what it is kept for.

One delta (m, v] with the keys of all log entries above m repairs every sink whose head is at or
above m and known to the log: whatever such a sink holds differs from the restored state at most
in keys of these entries. That needs the log to be without a hole from the cut onwards. If it has
one, no delta can repair, so m is a version above all: the log's chain is broken there on purpose,
and every sink takes a snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from exporters.log import covers, knows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exporters.sink import Entry
    from exporters.version import Head

__all__ = ["Repair", "plan"]


class Repair(NamedTuple):
    """What S5 found.

    Parameters
    ----------
    m
        Version from which the repair covers: it is the delta (m, v].
    versions_above
        Versions in the log above m, whose keys are to be published again.
    snapshot_sinks
        Names of sinks that no delta can repair.
    needed
        Whether the delta has to be written, even if no key is in it.
    """

    m: int
    versions_above: list[int]
    snapshot_sinks: frozenset[str]
    needed: bool


def plan(entries: Sequence[Entry], heads: Mapping[str, Head | None], cut_version: int) -> Repair:
    """Plan the repair after a restore.

    Parameters
    ----------
    entries
        What the log holds.
    heads
        By sink the head that was read after its fence became ours; None: it has no head. Sinks
        that could not be reached are left out.
    cut_version
        The version of the cut that was loaded.
    """
    found = [head for head in heads.values() if head is not None]
    if not covers(entries, cut_version):
        highest = max([cut_version, *(e.version for e in entries), *(h.version for h in found)])
        return Repair(highest + 1, [], frozenset(heads), needed=True)
    lows = [cut_version]
    snapshots = set()
    for name, head in heads.items():
        low = min(head.version, cut_version) if head is not None else 0
        # An entry missing at the end of the log would go unnoticed by picking alone.
        complete = low == cut_version or (bool(entries) and entries[-1].version >= cut_version)
        if head is not None and knows(entries, head) and complete and covers(entries, low):
            lows.append(low)
        else:
            snapshots.add(name)
    m = min(lows)
    above = [entry.version for entry in entries if entry.version > m]
    return Repair(m, above, frozenset(snapshots), needed=bool(above))
