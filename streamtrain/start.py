"""From a directory and some sinks to a trainer that may go on.

====  ====================================================================================
S1    lock the checkpoint directory, or end (exit 3)
S2    find the newest valid cut; refuse an empty start where something was stored or published
S3    claim a generation: above GENERATION, the cut's and every reachable sink's fence; make it
      durable, then raise each fence and be told the head
S4    look again: a newer cut than the one found means S2 again
S5    repair what was published: every key in log entries above m is changed again, and one
      delta (m, v] goes to the log before anything is learned
S6    cut the files written with each step back to the cut's lengths; seek; go
====  ====================================================================================

S1 to S4 are `claim`, S5 is `repair`; S6 belongs to the daemon, which owns source and files.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exporters.errors import FenceTaken, SinkRefused, SinkUnavailable
from exporters.log import Log, keys_above
from exporters.repair import Repair, plan
from exporters.sink import Sink
from exporters.version import Delta, Head
from streamtrain.cut import Checkpoints, Cut
from streamtrain.delta import draft
from streamtrain.errors import EmptyStartRefused
from streamtrain.faults import OnStep
from streamtrain.trainer import Trainer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a start has found and made its own.

    Attributes
    ----------
    generation : int
        Ours from here on.
    cut : Cut or None
        To be loaded; None is an empty start.
    heads : mapping of str to Head or None
        Of each sink that could be reached, read after its fence was ours.
    """

    generation: int
    cut: Cut | None
    heads: Mapping[str, Head | None]


def claim(
    checkpoints: Checkpoints, sinks: Sequence[Sink], *, fresh: bool, on_step: OnStep
) -> Claim:
    """S1 to S4.

    Parameters
    ----------
    checkpoints : Checkpoints
    sinks : sequence of Sink
        A sink that can't be reached doesn't stop a start that has a cut.
    fresh : bool
        Start empty even where something was stored or published before.
    on_step : callable
        Told each step's name after it.

    Raises
    ------
    LockHeld
        Another process holds the directory.
    EmptyStartRefused
        No valid cut, and not `fresh`, though something is or may be there.
    """
    checkpoints.lock()
    on_step("S1")
    while True:
        cut = None if fresh else checkpoints.newest()
        if cut is None and not fresh:
            _refuse_unless_empty(checkpoints, sinks)
        on_step("S2")
        generation, heads = _raise_fences(checkpoints, sinks, cut)
        on_step("S3")
        again = None if fresh else checkpoints.newest()
        on_step("S4")
        if _order(again) == _order(cut):
            return Claim(generation, cut, heads)


def _order(cut: Cut | None) -> tuple[int, int]:
    return (-1, -1) if cut is None else cut.order


def _refuse_unless_empty(checkpoints: Checkpoints, sinks: Sequence[Sink]) -> None:
    cure = (
        "An empty start would make serving empty. Bring the checkpoint directory back, or start "
        "with --fresh to begin from nothing on purpose"
    )
    found = checkpoints.strangers()
    if found:
        raise EmptyStartRefused(
            f"checkpoint.dir: {checkpoints.folder} has no valid cut, but holds {', '.join(found[:5])}. "
            f"{cure}"
        )
    for sink in sinks:
        try:
            head = sink.read_head()
        except (SinkUnavailable, SinkRefused) as error:
            raise EmptyStartRefused(
                f"export: {error}. A first start must know that nothing is served yet, or it would "
                "replace it by an empty model: see to the sink and start again"
            ) from error
        if head is not None:
            raise EmptyStartRefused(
                f"checkpoint.dir: {checkpoints.folder} has no cut, but {sink.name} serves version "
                f"{head.version}. {cure}"
            )


def _raise_fences(
    checkpoints: Checkpoints, sinks: Sequence[Sink], cut: Cut | None
) -> tuple[int, dict[str, Head | None]]:
    """S3: claim a generation above everyone's and raise every reachable fence to it."""
    known = max(checkpoints.generation(), cut.generation if cut else 0)
    for sink in sinks:
        try:
            known = max(known, sink.read_fence() or 0)
        except (SinkUnavailable, SinkRefused) as error:
            _log.warning("%s can't be asked and is left for later: %s", sink.name, error)
    while True:
        generation = known + 1
        checkpoints.claim(generation)
        heads: dict[str, Head | None] = {}
        try:
            for sink in sinks:
                try:
                    heads[sink.name] = sink.take_fence(generation)
                except (SinkUnavailable, SinkRefused) as error:
                    _log.warning("%s can't be fenced and is left for later: %s", sink.name, error)
        except FenceTaken as taken:
            known = max(generation, taken.fence)
            continue
        return generation, heads


def repair(trainer: Trainer, claimed: Claim, log: Log, *, floor: int) -> tuple[Repair, Delta]:
    """S5, as far as it is the store's: mark what was published after the cut, and draft the delta.

    Parameters
    ----------
    trainer : Trainer
        As restored; its serving reader is moved back.
    claimed : Claim
        What S1 to S4 found.
    log : Log
    floor : int
        The version of the cut that was loaded or just written.

    Returns
    -------
    Repair
        Above which version the log is repaired, and which sinks need a snapshot.
    Delta
        The draft to be appended with ``since`` = ``Repair.m``, before anything is learned.
    """
    found = plan(log.entries(), claimed.heads, floor)
    keys = {
        table: ids
        for table, ids in keys_above(log, found.m).items()
        if table in trainer.store.tables
    }
    trainer.store.mark_changed(keys, reader="serving")
    if found.versions_above:
        _log.warning(
            "versions above %d were published after the cut: %d keys are published again",
            found.m,
            sum(len(ids) for ids in keys.values()),
        )
    return found, draft(trainer, generation=claimed.generation)
