"""One YAML file into strict structs, and every mistake named with its path."""

from pathlib import Path

import msgspec
import pytest

import sparse_store.config
from streamtrain.config import effective, load, loads, signature
from streamtrain.errors import ConfigError

MINIMAL = """
source:
  kafka: {brokers: "localhost:9092", topics: [clicks]}
  decode: {avro: {schema: click.avsc}}
sample:
  time: {field: ts}
  labels: {click: {field: click}}
features:
  user: {tables: [user]}
  item: {tables: [item]}
tables:
  user: {dim: 8}
  item: {dim: 8}
checkpoint: {dir: cuts}
"""


def _mistakes(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        loads(text, overrides)
    return caught.value.mistakes


def test_ten_lines_are_a_config() -> None:
    config = loads(MINIMAL)
    assert config.batch.size == 2048
    assert config.tables["user"].name == "user"
    assert config.export.every == 1000


def test_scalars_are_those_of_yaml_1_2() -> None:
    """PyYAML alone reads 1e-3 as a string, 1:30 as 90 and no as false."""
    config = loads(
        MINIMAL,
        [
            "model.optimizer={adam: {rate: 1e-3}}",
            "tables.user.admit={count: 3, candidates: 50_000_000}",
        ],
    )
    assert config.model.optimizer.rate == 0.001
    admit = config.tables["user"].admit
    assert isinstance(admit, sparse_store.config.Count)
    assert admit.candidates == 50_000_000
    assert _mistakes(MINIMAL, "checkpoint.every=1:30")[0].startswith(
        "checkpoint.every: expected a duration with a unit"
    )
    assert "got 'no'" in _mistakes(MINIMAL, "batch.size=no")[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch.sise=3", "batch.sise: unknown key; did you mean `size`?"),
        ("batch.wait=50", "batch.wait: expected a duration with a unit"),
        ("batch.wait=50 parsecs", "batch.wait: expected a duration with a unit"),
        ("batch.size=0", "batch.size: expected int >= 1, got 0"),
        ("batch.size=true", "batch.size: expected int, got bool, got True"),
        ("batch.shapes=[64, 32]", "batch.shapes: must rise without repeats"),
        ("batch.shapes=[64]", "batch.shapes: the largest must be at least batch.size (2048)"),
        ("tables.user.evict.ttl=30", "tables.user.evict.ttl: expected a duration with a unit"),
        ("tables.user.admit=never", "tables.user.admit: expected one of: always, count; got"),
        ("tables.user.optimizer={adagrad: {rate: -1}}", "tables.user.optimizer.adagrad.rate:"),
        ("tables.extra={dim: 4}", "tables.extra: no feature uses it"),
        ("features.user.tables=[usr]", "features.user.tables: no table `usr` under `tables`"),
        ("features.user.dense=[log2p]", "features.user.dense[0]: expected one of: log1p, clip"),
        ("sample.labels={}", "sample.labels: at least one label is needed"),
        ("features.user.dense=true", "features.user.dense: expected a list, such as [True]"),
        ("source.kafka.topics=views", "source.kafka.topics: expected a list, such as [views]"),
        ("sample.time.unit=seconds", "sample.time.unit: expected one of: s, ms, us, got"),
        ("model.build=deepfm", "model.build: expected str matching regex"),
        ("checkpoint=null", "checkpoint"),
        ("guard={}", "guard: unknown key"),
    ],
)
def test_a_mistake_is_named_with_its_path(override: str, message: str) -> None:
    assert any(line.startswith(message) for line in _mistakes(MINIMAL, override)), _mistakes(
        MINIMAL, override
    )


def test_all_mistakes_are_told_at_once() -> None:
    found = _mistakes(MINIMAL, "batch.size=0", "modle={}", "tables.user.dim=x")
    assert len(found) == 3


def test_a_missing_section_is_named() -> None:
    text = MINIMAL.replace("checkpoint: {dir: cuts}", "")
    assert _mistakes(text) == ("checkpoint: missing",)


def test_a_key_written_twice_is_refused() -> None:
    """The second would silently win."""
    assert (
        "the key `checkpoint` is written twice" in _mistakes(MINIMAL + "checkpoint: {dir: x}\n")[0]
    )


def test_broken_yaml_is_located() -> None:
    assert _mistakes("source: [")[0].startswith("config:1:")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: can't be read"):
        load(tmp_path / "none.yaml")


def test_paths_are_taken_from_the_file_s_folder(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL)
    config = load(tmp_path / "c.yaml")
    assert config.checkpoint.dir == str(tmp_path / "cuts")
    assert config.source.decode.avro.schema == str(tmp_path / "click.avsc")
    config = load(
        tmp_path / "c.yaml",
        [
            "source.kafka.security={ca: ca.pem, password_file: /run/secrets/kafka}",
            "source.decode.avro.framing=confluent",
            'source.decode.avro.registry={url: "https://registry:8081", ca: registry.pem}',
        ],
    )
    kafka, registry = config.source.kafka, config.source.decode.avro.registry
    assert kafka is not None
    assert kafka.security is not None
    assert kafka.security.ca == str(tmp_path / "ca.pem")
    assert kafka.security.password_file == "/run/secrets/kafka"
    assert registry is not None
    assert registry.ca == str(tmp_path / "registry.pem")


def test_secrets_are_not_shown() -> None:
    """The effective configuration goes to the log at every start."""
    config = loads(
        MINIMAL,
        [
            'source.kafka.options={"ssl.key.password": "hunter2"}',
            "source.kafka.security={password_env: KAFKA_PASSWORD}",
        ],
    )
    shown = effective(config)
    assert "hunter2" not in shown
    assert "KAFKA_PASSWORD" in shown


def test_the_effective_config_holds_defaults() -> None:
    shown = msgspec.json.decode(effective(loads(MINIMAL)))
    assert shown["batch"]["size"] == 2048


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("tables.user.dim=16", "tables.user.dim"),
        ("tables.user.optimizer={ftrl: {}}", "tables.user.optimizer.ftrl.beta"),
        ("tables.user.init={uniform: 0.1}", "tables.user.init.uniform.uniform"),
        ("model.build=my.models:other", "model.build"),
        ("model.optimizer={sgd: {}}", "model.optimizer.sgd.momentum"),
        ("model.seed=8", "model.seed"),
        ("features.user.field=uid", "features.user.field"),
        ("sample.labels.click.at_least=4.0", "sample.labels.click.at_least"),
    ],
)
def test_the_signature_names_what_an_old_cut_refuses(override: str, path: str) -> None:
    before, after = signature(loads(MINIMAL)), signature(loads(MINIMAL, [override]))
    assert path in {
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    }


@pytest.mark.parametrize(
    "override",
    [
        "tables.user.optimizer={adagrad: {rate: 0.01}}",
        "tables.user.admit={count: 2}",
        "tables.user.evict={ttl: 3d}",
        "model.optimizer={adam: {rate: 0.1}}",
        "batch.size=64",
        "checkpoint.every=3s",
    ],
)
def test_rates_ttl_and_admission_may_change(override: str) -> None:
    assert signature(loads(MINIMAL)) == signature(loads(MINIMAL, [override]))
