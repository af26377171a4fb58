"""What a run says at its end, as a table and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from streamtrain.trainer import Trainer
from streamtrain.validation import Figures


@dataclass(frozen=True, slots=True)
class Report:
    """Counts and figures of a trainer; all since the model's birth.

    Attributes
    ----------
    steps, consumed, learned : int
    dropped : dict of str to int
        By reason.
    version : int
        Newest version in the log, 0 when nothing was published.
    clock : int or None
        Event time reached, ms.
    window : dict of str to Figures
        Progressive figures of each task's window.
    mean_loss : dict of str to float or None
        Over everything.
    rows : dict of str to int
    """

    steps: int
    consumed: int
    learned: int
    dropped: dict[str, int]
    version: int
    clock: int | None
    window: dict[str, Figures]
    mean_loss: dict[str, float | None]
    rows: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)


def report_of(trainer: Trainer, *, version: int) -> Report:
    """Read a report off a trainer."""
    store = trainer.store
    return Report(
        steps=store.step,
        consumed=trainer.consumed,
        learned=trainer.learned,
        dropped=dict(trainer.dropped),
        version=version,
        clock=trainer.clock,
        window={task: p.figures() for task, p in trainer.validation.items()},
        mean_loss={task: p.mean_loss() for task, p in trainer.validation.items()},
        rows={name: store.rows(name) for name in store.tables},
    )
