"""A small model and its samples, for tests that train: one schema, one config, seeded values."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fastavro
import numpy as np

from streamtrain.config import Config, loads

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "ts", "type": "long"},
        {"name": "user", "type": "long"},
        {"name": "item", "type": "string"},
        {"name": "price", "type": ["null", "double"]},
        {"name": "click", "type": "int"},
    ],
}

# `own` is the sample's own id: its count is 1 if and only if the sample was learned exactly once.
# `item` forgets within the stream, so that evictions, removals and returns are part of every run.
CONFIG = """
model: {{name: small, build: "streamtrain.models:{build}", seed: 7}}
source:
  {kafka}
  decode: {{avro: {{schema: click.avsc}}}}
sample:
  time: {{field: ts}}
  labels: {{click: {{field: click}}}}
features:
  own: {{field: id, tables: [own]}}
  user: {{tables: [user, user_bias]}}
  item: {{tables: [item, item_bias]}}
  price: {{dense: [log1p]}}
tables:
  own: {{dim: 1, optimizer: {{ftrl: {{alpha: 0.1}}}}}}
  user: {{dim: 4, admit: {{count: 2}}}}
  item: {{dim: 4, admit: {{count: 2, forget: 20m}}, evict: {{ttl: 10m}}}}
  user_bias: {{dim: 1, optimizer: {{ftrl: {{alpha: 0.1}}}}}}
  item_bias: {{dim: 1, optimizer: {{ftrl: {{alpha: 0.1}}}}, evict: {{ttl: 10m}}}}
batch: {{size: 32, wait: null, shapes: [32]}}
validation: {{window: 1000}}
checkpoint: {{dir: cuts, every: {cut_every}, keep: 3}}
export: {{every: {every}, {redis}}}
dead_letters: {{file: bad.jsonl}}
telemetry: {{listen: null}}
"""


def config_text(
    *,
    build: str = "fm",
    brokers: str = "localhost:1",
    topic: str = "clicks",
    redis_env: str | None = None,
    every: str = "50ms",
    cut_every: str = "150ms",
) -> str:
    """Return the YAML of the small model."""
    kafka = f'kafka: {{brokers: "{brokers}", topics: ["{topic}"]}}'
    redis = f"redis: {{url_env: {redis_env}, expected_rows: {{own: 2000}}}}" if redis_env else ""
    return CONFIG.format(build=build, kafka=kafka, redis=redis, every=every, cut_every=cut_every)


def config_in(folder: Path, *overrides: str, **values: str | None) -> Config:
    """Write schema and config into a folder and load them."""
    (folder / "click.avsc").write_text(json.dumps(SCHEMA))
    text = config_text(**values)  # type: ignore[arg-type]
    (folder / "small.yaml").write_text(text)
    return loads(text, overrides, base=folder)


def records(n: int, *, seed: int = 0, first: int = 0) -> Iterator[dict[str, Any]]:
    """Yield clicks: a second apart, few users, items that come, go, and come back."""
    rng = np.random.default_rng(seed)
    for i in range(first, first + n):
        user = int(rng.integers(40))
        item = int(rng.integers(30)) + 20 * (i // 700 % 3)
        p = 1 / (1 + np.exp(-(np.sin(user) + np.cos(item))))
        yield {
            "id": i,
            "ts": 1_700_000_000_000 + i * 1000,
            "user": user - 20,
            "item": f"item-{item}",
            "price": float(np.round(rng.random() * 10, 2)) if i % 7 else None,
            "click": int(rng.random() < p),
        }


def encode(record: dict[str, Any]) -> bytes:
    """Return the bare Avro value of a record."""
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(SCHEMA), record)
    return buffer.getvalue()


def values(n: int, *, seed: int = 0) -> list[bytes]:
    """Return `n` encoded clicks."""
    return [encode(record) for record in records(n, seed=seed)]


def write_container(path: Path, samples: Sequence[dict[str, Any]]) -> None:
    """Write an Avro container file."""
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(SCHEMA), samples)
