"""Configuration of tables: frozen structs, durations in integer milliseconds.

Range limits stand in the annotations; they bind when a struct is converted from a mapping and
again when a store is built (see `validated`), so a struct made by hand can't slip through.
"""

from typing import Annotated, Literal

import msgspec

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

_NAME = "^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$"

Duration = Annotated[int, msgspec.Meta(ge=1, extra={"unit": "duration"})]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class Zeros(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="zeros", tag_field="kind"):
    """New rows are zero."""


class Normal(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="normal", tag_field="kind"
):
    """New rows are drawn from a bell of this standard deviation (bounded at 3.46 of them)."""

    normal: NonNegative = 0.01


class Uniform(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="uniform", tag_field="kind"
):
    """New rows are uniform in (-uniform, uniform)."""

    uniform: NonNegative


class Adagrad(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="adagrad", tag_field="kind"
):
    """Adagrad in Keras' form, on touched rows only.

    Attributes
    ----------
    rate
        Learning rate.
    initial
        First value of the accumulator.
    epsilon
        Added to the accumulator under the root.
    clip
        Largest L2 norm of a row's summed gradient; longer ones are scaled down. None: no limit.
    l2
        Weight of the row's own value in its gradient.
    decay, floor
        Before a gradient is added the accumulator is multiplied by `decay` and raised to `floor`,
        so that rates of an endless stream need not go to zero. 1 and 0 give plain Adagrad.
    """

    rate: Positive = 0.05
    initial: NonNegative = 0.1
    epsilon: NonNegative = 1e-7
    clip: Positive | None = None
    l2: NonNegative = 0.0
    decay: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    floor: NonNegative = 0.0

    def __post_init__(self) -> None:
        """Refuse an accumulator that could be zero under the root."""
        if self.epsilon == 0 and not (self.floor > 0 or (self.initial > 0 and self.decay == 1)):
            raise ValueError(
                "adagrad: epsilon 0 lets the root reach zero; give epsilon, floor, or initial "
                "without decay"
            )


class Ftrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ftrl", tag_field="kind"):
    """FTRL-proximal (McMahan et al. 2013, algorithm 1), on touched rows only.

    A coordinate whose |z| stays within `l1` is exactly zero.
    """

    alpha: Positive = 0.1
    beta: NonNegative = 1.0
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0

    def __post_init__(self) -> None:
        """Refuse a denominator that could be zero."""
        if self.beta == 0 and self.l2 == 0:
            raise ValueError("ftrl: beta and l2 can't both be 0; the step would divide by zero")


class Always(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="always", tag_field="kind"
):
    """Every key that is seen gets a row at once."""


class Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="count", tag_field="kind"):
    """A key gets a row once it has been seen `count` times, repeats within a batch included.

    Attributes
    ----------
    count
        Sightings needed.
    candidates
        Bound on keys that are counted but have no row; beyond it the oldest are forgotten.
    forget
        Milliseconds after which an unseen candidate is forgotten.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    candidates: Annotated[int, msgspec.Meta(ge=1)] = 50_000_000
    forget: Duration = 7 * DAY


class Evict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When rows leave.

    Attributes
    ----------
    ttl
        Milliseconds after which an untouched row leaves. None: never.
    rows
        Bound on rows; beyond it the longest untouched leave, down to 95 %. None: no bound.
    """

    ttl: Duration | None = None
    rows: Annotated[int, msgspec.Meta(ge=1)] | None = None


Init = Annotated[
    Zeros | Normal | Uniform,
    msgspec.Meta(extra={"choices": {"zeros": Zeros, "normal": Normal, "uniform": Uniform}}),
]
Optimizer = Annotated[
    Adagrad | Ftrl, msgspec.Meta(extra={"choices": {"adagrad": Adagrad, "ftrl": Ftrl}})
]
Admission = Annotated[
    Always | Count, msgspec.Meta(extra={"choices": {"always": Always, "count": Count}})
]


class _Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = ""


class Table(_Named, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One embedding table.

    Attributes
    ----------
    name
        In YAML the key under `tables`. Letters, digits, `_` and `-`, at most 64.
    dim
        Width of a row.
    init
        First values of a row. None: `zeros` under FTRL, whose published form starts there,
        otherwise `normal: 0.01`.
    optimizer, admit, evict
        See their structs.
    unadmitted
        What a key without a row reads as.
    """

    dim: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    init: Init | None = None
    optimizer: Optimizer = Adagrad()
    admit: Admission = Always()
    evict: Evict = Evict()
    unadmitted: Literal["zeros"] = "zeros"

    @property
    def start(self) -> Zeros | Normal | Uniform:
        """The initialiser in force."""
        if self.init is not None:
            return self.init
        return Zeros() if isinstance(self.optimizer, Ftrl) else Normal()


_named = msgspec.Meta(pattern=_NAME)


def validated(table: Table) -> Table:
    """Give the table back when every field is within its range.

    Raises
    ------
    ValueError
        Naming the table and the field.
    """
    try:
        msgspec.convert(table.name, Annotated[str, _named])
        return msgspec.convert(msgspec.to_builtins(table), Table)
    except msgspec.ValidationError as error:
        raise ValueError(f"table {table.name!r}: {error}") from error
