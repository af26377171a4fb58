"""YAML as version 1.2 reads it: ``1e-3`` is a number, ``no`` and ``1:30`` are strings.

Keys that are written twice are refused; underscores in numbers are allowed.
"""

import re
from typing import Any

import yaml

from streamtrain.errors import ConfigError


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


def parse(text: str, name: str) -> Any:
    """Return what a YAML text says; `name` is where it is from, for the error.

    Raises
    ------
    ConfigError
        Not valid YAML, with line and column.
    """
    try:
        return yaml.load(text, Loader=_Yaml12)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError([f"{where}: not valid YAML: {error.problem}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}: not valid YAML: {error}"]) from error
