"""What notes say of a head, and which writes they let through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import Corrupt, Half, SinkLostTime
from exporters.notes import Ledger, Note, Notes, judge
from tests.test_exporters.test_log import HEAD

NUMBERS = st.integers(0, 2**53 - 1)
DONE = Note(2, 2, 1, 9, 2, Half(2, 1))


def pending(version: int, done: int, reach: int, epoch: int = 2) -> Note:
    return Note(epoch, version, 1, 1, done, Half(reach, 1))


@given(st.lists(NUMBERS, min_size=7, max_size=7))
def test_a_note_reads_back(numbers: list[int]) -> None:
    epoch, version, generation, chunks, done, *reach = numbers
    note = Note(epoch, version, generation, chunks, done, Half(*reach))
    assert Note.decode(note.encode()) == note


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1",
        b"1 2 3 4 5 6",
        b"1 2 3 4 5 6 7 8",
        b"1 2 3 4 5 6 -7",
        b"1 2 3 4 5 6 x",
        b"9" * 999,
    ],
)
def test_what_is_no_note_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt, match="not a note"):
        Note.decode(data)


@pytest.mark.parametrize(
    ("notes", "whole", "half"),
    [
        (Notes(pending(5, 5, 5), DONE), True, None),
        (Notes(pending(5, 4, 5), DONE), False, None),
        (Notes(pending(6, 5, 6), DONE), True, Half(6, 1)),
        (Notes(pending(5, 5, 8), DONE), True, Half(8, 1)),
        (Notes(pending(5, 5, 5, epoch=1), DONE), False, None),
        (Notes(None, DONE), False, None),
        (Notes(pending(5, 5, 5), None), False, None),
        (Notes(pending(5, 5, 5), DONE._replace(epoch=9, version=9)), True, None),
        (Notes(pending(5, 5, 5), DONE._replace(epoch=9, version=9, done=9)), False, None),
    ],
)
def test_a_head_at_5_in_epoch_2(notes: Notes, whole: bool, half: Half | None) -> None:
    found = judge(HEAD, [notes])
    assert (found.whole, found.half) == (whole, half)
    good = Notes(pending(5, 5, 5), DONE)
    both = judge(HEAD, [good, notes])
    assert (both.whole, both.half) == (whole, half)


def test_a_ledger_lets_through_what_follows_on() -> None:
    ledger = Ledger("s")
    nothing = Notes(None, None)
    ledger.reset(nothing)
    first = ledger.next(nothing, epoch=1, version=1, generation=3, of=3, seal=False)
    assert first == Notes(None, Note(1, 1, 3, 1, 0, Half(1, 3)))
    ledger.sent(first)
    # Not known whether it was taken: from both the next write goes on, each to another note.
    assert ledger.next(nothing, epoch=1, version=1, generation=3, of=3, seal=False) == first
    second = ledger.next(first, epoch=1, version=1, generation=3, of=3, seal=False)
    assert second == Notes(None, Note(1, 1, 3, 2, 0, Half(1, 3)))
    ledger.acknowledged(first)
    with pytest.raises(SinkLostTime, match="older than"):
        ledger.next(nothing, epoch=1, version=1, generation=3, of=3, seal=False)
    sealed = ledger.next(first, epoch=1, version=1, generation=3, of=3, seal=True)
    assert sealed.filling == Note(1, 1, 3, 2, 1, Half(1, 3))
    ledger.acknowledged(sealed)
    delta = ledger.next(sealed, epoch=1, version=2, generation=3, of=3, seal=False)
    assert delta == Notes(Note(1, 2, 3, 1, 1, Half(2, 3)), sealed.filling)


def test_a_version_shipped_again_is_not_done_before_it_is_sealed() -> None:
    ledger = Ledger("s")
    before = Notes(Note(1, 9, 3, 4, 9, Half(9, 3)), DONE)
    ledger.reset(before)
    begun = ledger.next(before, epoch=1, version=8, generation=3, of=3, seal=False)
    assert begun.pending == Note(1, 8, 3, 1, 7, Half(9, 3))


def test_a_version_that_a_newer_trainer_ships_stays_of_the_one_that_made_it() -> None:
    """By its maker the log knows a half-written version; else its shipping could not go on."""
    ledger = Ledger("s")
    ledger.reset(Notes(None, DONE))
    begun = ledger.next(Notes(None, DONE), epoch=2, version=3, generation=7, of=1, seal=False)
    assert begun.pending == Note(2, 3, 7, 1, 2, Half(3, 1))


def test_what_is_about_to_be_dropped_is_not_complete() -> None:
    """A fail-over to the moment between would else show an empty epoch as a whole one."""
    ledger = Ledger("s")
    flipped = Notes(None, Note(4, 4, 1, 7, 4, Half(4, 1)))
    ledger.reset(flipped)
    assert ledger.before_dropping(flipped, 4) is None
    emptied = ledger.before_dropping(flipped, 2)
    assert emptied == Notes(None, Note(4, 4, 1, 8, 0, Half(4, 1)))
    with pytest.raises(SinkLostTime):
        ledger.before_dropping(Notes(None, None), 4)


def test_the_other_note_stays_as_it_was_found() -> None:
    """It may be the one whose write was not known to have been taken."""
    ledger = Ledger("s")
    before = Notes(Note(1, 2, 3, 1, 2, Half(2, 3)), DONE)
    ledger.reset(before)
    taken = ledger.next(before, epoch=1, version=3, generation=3, of=3, seal=False)
    ledger.sent(taken)
    after = ledger.next(taken, epoch=9, version=9, generation=3, of=3, seal=False)
    assert after.pending == taken.pending
