"""From plain data to frozen structs: strict, and every mistake is collected with its path.

A field marked with ``extra={"unit": "duration" | "size"}`` wants a unit (``30d``, ``256MiB``) and
becomes an integer of milliseconds or bytes; one marked with ``extra={"choices": ...}`` is written
as a name, as ``{name: {...}}``, or as a mapping that has the name as a field (``{count: 3}``).
"""

import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

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


def convert(value: Any, kind: Any, path: str, mistakes: list[str]) -> Any:
    """Convert one node and all below it.

    Parameters
    ----------
    value : Any
        As YAML gives it.
    kind : Any
        A type, perhaps annotated with `msgspec.Meta`.
    path : str
        Where the node stands, for the mistakes.
    mistakes : list of str
        Appended to, a line per mistake; the result is None or has None in it then.
    """
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
            return convert(value, rest[0], path, mistakes)
        return _plain(value, kind, path, mistakes)
    if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
        return _struct(value, bare, path, mistakes)
    if origin is dict:
        return _mapping(value, typing.get_args(bare)[1], path, mistakes)
    if origin in (list, tuple, Sequence):
        if not isinstance(value, list):
            mistakes.append(f"{path}: expected a list, such as [{value or '...'}]; got {value!r}")
            return None
        (item, *_) = typing.get_args(bare)
        children = [convert(child, item, f"{path}[{i}]", mistakes) for i, child in enumerate(value)]
        return tuple(children) if origin is tuple else children
    return _plain(value, kind, path, mistakes)


def _plain(value: Any, kind: Any, path: str, mistakes: list[str]) -> Any:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "")
        allowed = _allowed(kind)
        if allowed:
            text = f"expected one of: {allowed}"
        text = re.sub(r" - at \$(\S*)$", r" (at \1)", text)
        mistakes.append(f"{path}: {text[:1].lower()}{text[1:]}, got {value!r}")
        return None


def _allowed(kind: Any) -> str:
    """Return the words that a literal allows, or nothing for another type."""
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is not typing.Literal:
        return ""
    return ", ".join(str(word) for word in typing.get_args(kind))


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
            mistakes.append(f"{joined(path, key)}: unknown key; {hint}")
    given = {}
    for name, field in fields.items():
        if name in value:
            given[field.name] = convert(
                value[name], hints[field.name], joined(path, name), mistakes
            )
        elif field.required:
            mistakes.append(f"{joined(path, name)}: missing")
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
            mistakes.append(f"{joined(path, key)}: names are strings; put it in quotes")
            continue
        result[key] = convert(child, kind, joined(path, key), mistakes)
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
                return _struct(inner or {}, choices[name], joined(path, name), mistakes)
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


def joined(path: str, key: object) -> str:
    """Return the path of a member."""
    return f"{path}.{key}" if path else str(key)
