"""One YAML file into frozen, strictly checked structs; every mistake is named with its path.

The leaves own their structs and this module only composes them. Scalars are read as YAML 1.2
reads them (``1e-3`` is a number, ``no`` is a string, ``1:30`` is a string). A field marked with
``extra={"unit": "duration" | "size"}`` wants a unit (``30d``, ``256MiB``) and becomes an integer
of milliseconds or bytes; one marked with ``extra={"choices": ...}`` is written as a name, as
``{name: {...}}``, or as a mapping that has the name as a field (``{count: 3}``).
"""

import difflib
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import yaml

import consumers.config
import exporters.config
import sparse_store.config
from streamtrain.errors import ConfigError

T = TypeVar("T")

_DURATIONS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
}
_SIZES: Final = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_SECRET: Final = re.compile(r"password|secret|token|credential", re.IGNORECASE)

Duration = Annotated[int, msgspec.Meta(ge=1, extra={"unit": "duration"})]


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Adam(_Struct, frozen=True, kw_only=True):
    """Keras' Adam for the dense weights."""

    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.001


class Sgd(_Struct, frozen=True, kw_only=True):
    """Keras' SGD for the dense weights."""

    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.01
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0


class Adagrad(_Struct, frozen=True, kw_only=True):
    """Keras' Adagrad for the dense weights."""

    rate: Annotated[float, msgspec.Meta(gt=0)] = 0.01


DenseOptimizer = Annotated[
    Adam | Sgd | Adagrad,
    msgspec.Meta(extra={"choices": {"adam": Adam, "sgd": Sgd, "adagrad": Adagrad}}),
]


class Model(_Struct, frozen=True, kw_only=True):
    """Which Keras model is trained, and under which name it is published."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] = "model"
    build: Annotated[str, msgspec.Meta(pattern=r"^[\w.]+:\w+$")] = "streamtrain.models:deepfm"
    optimizer: DenseOptimizer = Adam()
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] = 0


class Batch(_Struct, frozen=True, kw_only=True):
    """How samples are gathered into one step."""

    size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 2048
    wait: Annotated[int | None, msgspec.Meta(extra={"unit": "duration"})] = 50
    shapes: list[Annotated[int, msgspec.Meta(ge=1, le=65_536)]] = msgspec.field(
        default_factory=lambda: [64, 256, 1024, 2048]
    )


class Clock(_Struct, frozen=True, kw_only=True):
    """How far one step may raise the clock."""

    max_step: Duration = 3_600_000


class Validation(_Struct, frozen=True, kw_only=True):
    """Progressive validation over the newest ``window`` predictions."""

    window: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 50_000


class Checkpoint(_Struct, frozen=True, kw_only=True):
    """Where cuts are written, how often, and how many are kept."""

    dir: str
    every: Duration = 60_000
    keep: Annotated[int, msgspec.Meta(ge=1)] = 5


class DeadLetters(_Struct, frozen=True, kw_only=True):
    """The file that takes messages which could not be learned from."""

    file: str


class Shutdown(_Struct, frozen=True, kw_only=True):
    """How long a clean end may take to ship the last delta."""

    deadline: Duration = 30_000


class Telemetry(_Struct, frozen=True, kw_only=True):
    """Where metrics and health are answered; ``null`` turns them off."""

    listen: Annotated[str, msgspec.Meta(pattern=r"^[^:]*(:[^:]+)*:\d{1,5}$")] | None = (
        "127.0.0.1:9464"
    )


class Config(_Struct, frozen=True, kw_only=True):
    """The whole configuration of a trainer."""

    sample: consumers.config.Sample
    features: dict[str, consumers.config.Feature]
    source: consumers.config.Source
    checkpoint: Checkpoint
    model: Model = Model()
    threads: Literal["auto"] | Annotated[int, msgspec.Meta(ge=1, le=1024)] = "auto"
    tables: dict[str, sparse_store.config.Table] = {}
    batch: Batch = Batch()
    clock: Clock = Clock()
    validation: Validation = Validation()
    export: exporters.config.Export = exporters.config.Export()
    dead_letters: DeadLetters | None = None
    shutdown: Shutdown = Shutdown()
    telemetry: Telemetry = Telemetry()


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a configuration file.

    Parameters
    ----------
    path : str or Path
        The YAML file. Relative file names inside it are taken from its own folder.
    overrides : sequence of str
        ``a.b=value`` pairs that replace what the file says; values are YAML scalars.

    Raises
    ------
    ConfigError
        The file can't be read or has mistakes; each is named with its path.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from error
    return loads(text, overrides, base=path.resolve().parent, name=str(path))


def loads(
    text: str,
    overrides: Sequence[str] = (),
    *,
    base: Path | None = None,
    name: str = "config",
) -> Config:
    """Check a configuration given as YAML text; see `load`."""
    raw = _parse(text, name)
    if not isinstance(raw, dict):
        raise ConfigError([f"{name}: expected a mapping of sections such as `source:`"])
    for pair in overrides:
        _override(raw, pair)
    mistakes: list[str] = []
    config = _convert(raw, Config, "", mistakes)
    if mistakes:
        raise ConfigError(mistakes)
    assert isinstance(config, Config)
    config = _named_tables(config)
    if base is not None:
        config = _anchored(config, base)
    mistakes = _cross_check(config)
    if mistakes:
        raise ConfigError(mistakes)
    return config


def effective(config: Config) -> str:
    """Return the whole configuration, defaults included, as one line of JSON without secrets."""
    return json.dumps(_hide(_builtins(config)))


def signature(config: Config) -> dict[str, Any]:
    """Return what a cut must agree with, as ``path: value``.

    Rates, eviction and admission are left out: they may change between two runs. So are places
    and paces (brokers, folders, periods, batch size), which say nothing about the learned state.
    """
    tables = {}
    for name, table in config.tables.items():
        shown = _builtins(msgspec.structs.replace(table, init=table.start))
        tables[name] = {key: shown[key] for key in ("dim", "unadmitted", "init", "optimizer")}
    model = _builtins(config.model)
    whole = {
        "model": {key: model[key] for key in ("build", "seed", "optimizer")},
        "sample": _builtins(config.sample),
        "features": _builtins(config.features),
        "tables": tables,
    }
    flat: dict[str, Any] = {}
    _flatten("", whole, flat)
    return {path: value for path, value in flat.items() if not path.endswith((".rate", ".alpha"))}


def _builtins(value: Any, choices: Mapping[str, Any] | None = None) -> Any:
    """Turn structs into mappings; one that was chosen among several is shown under its name."""
    if isinstance(value, msgspec.Struct):
        hints = typing.get_type_hints(type(value), include_extras=True)
        fields = {
            name: _builtins(getattr(value, name), _choices(hints[name]))
            for name in value.__struct_fields__
        }
        for name, kind in (choices or {}).items():
            if type(value) is kind:
                return {name: fields}
        return fields
    if isinstance(value, dict):
        return {key: _builtins(child, choices) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_builtins(child, choices) for child in value]
    return value


def _choices(hint: Any) -> Mapping[str, Any] | None:
    """Return the choices of a field, or of the items of a list of them."""
    if typing.get_origin(hint) is Annotated:
        for note in typing.get_args(hint)[1:]:
            if isinstance(note, msgspec.Meta) and note.extra and "choices" in note.extra:
                return typing.cast("Mapping[str, Any]", note.extra["choices"])
    for inner in typing.get_args(hint):
        found = _choices(inner)
        if found is not None:
            return found
    return None


def _flatten(path: str, value: Any, into: dict[str, Any]) -> None:
    """Spread a tree into ``path: leaf``; lists of mappings are spread by index too."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            _flatten(_join(path, key), child, into)
    elif isinstance(value, list) and any(isinstance(child, dict) for child in value):
        for n, child in enumerate(value):
            _flatten(path if len(value) == 1 else f"{path}[{n}]", child, into)
    else:
        into[path] = value


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: "***"
            if _SECRET.search(str(key))
            and not str(key).endswith(("_env", "_file"))
            and child is not None
            else _hide(child)
            for key, child in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide(child) for child in value]
    return value


class _Yaml12(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema, and duplicate keys refused."""


_Yaml12.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9][0-9_]*$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
        "-+.0123456789",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
):
    _Yaml12.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        re.compile(_pattern),
        [*_first] if _tag != "null" else [*"~nN", ""],
    )


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)).replace("_", ""))


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.MarkedYAMLError(
                None, None, f"the key `{key}` is written twice", key_node.start_mark
            )
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


_Yaml12.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Yaml12.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Yaml12.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _parse(text: str, name: str) -> Any:
    try:
        return yaml.load(text, Loader=_Yaml12)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError([f"{where}: not valid YAML: {error.problem}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}: not valid YAML: {error}"]) from error


def _override(raw: dict[Any, Any], pair: str) -> None:
    path, equals, text = pair.partition("=")
    if not equals or not path:
        raise ConfigError([f"--set {pair}: write it as a.b=value"])
    *parents, last = path.split(".")
    where = raw
    for parent in parents:
        child = where.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError([f"--set {pair}: `{parent}` is not a section"])
        where = child
    where[last] = _parse(text, f"--set {path}")


def _convert(value: Any, kind: Any, path: str, mistakes: list[str]) -> Any:
    """Convert one node; on a mistake, append to `mistakes` and return None."""
    extra: dict[str, Any] = {}
    bare = kind
    if typing.get_origin(kind) is Annotated:
        bare, *notes = typing.get_args(kind)
        for note in notes:
            if isinstance(note, msgspec.Meta) and note.extra:
                extra |= note.extra
    if "unit" in extra:
        return _quantity(value, bare, kind, extra["unit"], path, mistakes)
    if "choices" in extra:
        return _choice(value, bare, extra["choices"], path, mistakes)
    origin = typing.get_origin(bare)
    if origin in (types.UnionType, typing.Union):
        arms = typing.get_args(bare)
        if value is None and type(None) in arms:
            return None
        rest = [arm for arm in arms if arm is not type(None)]
        if len(rest) == 1:
            return _convert(value, rest[0], path, mistakes)
        return _plain(value, kind, path, mistakes)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return _struct(value, bare, path, mistakes)
    if origin is dict:
        return _mapping(value, typing.get_args(bare)[1], path, mistakes)
    if origin in (list, tuple, Sequence) and isinstance(value, list):
        (item, *_) = typing.get_args(bare)
        children = [
            _convert(child, item, f"{path}[{i}]", mistakes) for i, child in enumerate(value)
        ]
        return tuple(children) if origin is tuple else children
    return _plain(value, kind, path, mistakes)


def _plain(value: Any, kind: Any, path: str, mistakes: list[str]) -> Any:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "")
        text = re.sub(r" - at \$(\S*)$", r" (at \1)", text)
        mistakes.append(f"{path}: {text[:1].lower()}{text[1:]}, got {value!r}")
        return None


def _struct(value: Any, kind: type[msgspec.Struct], path: str, mistakes: list[str]) -> Any:
    if not isinstance(value, dict):
        if value is None and not any(f.required for f in msgspec.structs.fields(kind)):
            value = {}
        else:
            mistakes.append(f"{path or 'config'}: expected a mapping, got {value!r}")
            return None
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    before = len(mistakes)
    for key in value:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(fields)}"
            mistakes.append(f"{_join(path, key)}: unknown key; {hint}")
    given = {}
    for name, field in fields.items():
        if name in value:
            given[field.name] = _convert(
                value[name], hints[field.name], _join(path, name), mistakes
            )
        elif field.required:
            mistakes.append(f"{_join(path, name)}: missing")
    if len(mistakes) > before:
        return None
    try:
        return kind(**given)
    except (ValueError, TypeError) as error:
        mistakes.append(f"{path or 'config'}: {error}")
        return None


def _mapping(value: Any, kind: Any, path: str, mistakes: list[str]) -> Any:
    if not isinstance(value, dict):
        mistakes.append(f"{path}: expected a mapping, got {value!r}")
        return None
    result = {}
    for key, child in value.items():
        if not isinstance(key, str):
            mistakes.append(f"{_join(path, key)}: names are strings; put it in quotes")
            continue
        result[key] = _convert(child, kind, _join(path, key), mistakes)
    return result


def _choice(
    value: Any, bare: Any, choices: Mapping[str, Any], path: str, mistakes: list[str]
) -> Any:
    if value is None and type(None) in typing.get_args(bare):
        return None
    names = ", ".join(choices)
    if isinstance(value, str) and value in choices:
        return _struct({}, choices[value], path, mistakes)
    if isinstance(value, dict):
        if len(value) == 1:
            ((name, inner),) = value.items()
            if name in choices and (inner is None or isinstance(inner, dict)):
                return _struct(inner or {}, choices[name], _join(path, name), mistakes)
        for name in value:
            kind = choices.get(name) if isinstance(name, str) else None
            if kind is not None and name in kind.__struct_fields__:
                return _struct(value, kind, path, mistakes)
    mistakes.append(f"{path}: expected one of: {names}; got {value!r}")
    return None


def _quantity(
    value: Any, bare: Any, kind: Any, unit: str, path: str, mistakes: list[str]
) -> int | None:
    if value is None and type(None) in typing.get_args(bare):
        return None
    units, example = (_DURATIONS, "30s") if unit == "duration" else (_SIZES, "256MiB")
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        mistakes.append(
            f"{path}: expected a {unit} with a unit ({', '.join(units)}), such as {example}; got {value!r}"
        )
        return None
    number = round(float(match[1]) * units[match[2]])
    return typing.cast("int | None", _plain(number, kind, path, mistakes))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _named_tables(config: Config) -> Config:
    tables = {
        name: msgspec.structs.replace(table, name=name) for name, table in config.tables.items()
    }
    return msgspec.structs.replace(config, tables=tables)


def _anchored(config: Config, base: Path) -> Config:
    replace = msgspec.structs.replace
    checkpoint = replace(config.checkpoint, dir=str(base / config.checkpoint.dir))
    decode = config.source.decode
    avro = replace(decode.avro, schema=str(base / decode.avro.schema))
    source = replace(config.source, decode=replace(decode, avro=avro))
    letters = config.dead_letters
    if letters is not None:
        letters = replace(letters, file=str(base / letters.file))
    return replace(config, checkpoint=checkpoint, source=source, dead_letters=letters)


def _cross_check(config: Config) -> list[str]:
    mistakes = []
    used: set[str] = set()
    if not config.features:
        mistakes.append("features: at least one is needed")
    for name, feature in config.features.items():
        for table in feature.tables:
            used.add(table)
            if table not in config.tables:
                known = ", ".join(config.tables) or "none"
                mistakes.append(
                    f"features.{name}.tables: no table `{table}` under `tables` (there: {known})"
                )
    mistakes += [
        f"tables.{table}: no feature uses it; name it under some feature's `tables` or remove it"
        for table in config.tables
        if table not in used
    ]
    if not config.sample.labels:
        mistakes.append("sample.labels: at least one label is needed")
    if config.batch.shapes != sorted(set(config.batch.shapes)):
        mistakes.append("batch.shapes: must rise without repeats")
    elif not config.batch.shapes or config.batch.shapes[-1] < config.batch.size:
        mistakes.append(
            f"batch.shapes: the largest must be at least batch.size ({config.batch.size})"
        )
    return mistakes
