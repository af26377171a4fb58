"""The schema registry: what is kept, what is asked for again, and what an outage does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from consumers.config import Registry
from consumers.errors import DecodeError, RegistryUnavailable, SpecError
from consumers.registry import TRIES, RegistrySchemas
from tests.doubles.registry import StubRegistry
from tests.test_consumers.clicks import SCHEMA

GUID = "89791762-2336-4186-9674-299b90a802e2"


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def stub() -> Iterator[StubRegistry]:
    with StubRegistry() as stub:
        stub.add("ids/7", SCHEMA)
        stub.add(f"guids/{GUID}", "long")
        yield stub


def schemas(stub: StubRegistry, clock: Clock, cache: Path | None = None) -> RegistrySchemas:
    return RegistrySchemas(Registry(url=stub.url, timeout=500), cache=cache, now=clock)


def test_what_was_found_is_kept_for_ever_and_on_disk(stub: StubRegistry, tmp_path: Path) -> None:
    """A restart in an outage of the registry must not be an outage of the trainer."""
    found = schemas(stub, Clock(), tmp_path / "schemas")
    assert found.schema("id-7") == found.schema("id-7") == SCHEMA
    assert found.schema(f"guid-{GUID}") == "long"
    assert stub.asked == ["ids/7", f"guids/{GUID}"]
    stub.status = 503
    again = schemas(stub, Clock(), tmp_path / "schemas")
    assert again.schema("id-7") == SCHEMA
    assert len(stub.asked) == 2
    (tmp_path / "schemas" / "id-7.avsc").write_text("{", encoding="utf-8")
    stub.status = 200
    assert schemas(stub, Clock(), tmp_path / "schemas").schema("id-7") == SCHEMA
    assert [path.name for path in sorted((tmp_path / "schemas").iterdir())] == [
        f"guid-{GUID}.avsc",
        "id-7.avsc",
    ]


def test_a_cache_that_cannot_be_written_stops_nothing(stub: StubRegistry, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert schemas(stub, Clock(), tmp_path / "file").schema("id-7") == SCHEMA


def test_an_unknown_id_is_given_up_after_some_tries_and_not_asked_for_each_message(
    stub: StubRegistry,
) -> None:
    """One request for each message has brought registries down."""
    clock = Clock()
    found = schemas(stub, clock)
    for _ in range(TRIES - 1):
        for _ in range(5):
            with pytest.raises(RegistryUnavailable, match="doesn't know id-9; asking again"):
                found.schema("id-9")
        clock.time += 3.0
    for _ in range(5):
        with pytest.raises(DecodeError, match="unknown_schema: the registry doesn't know id-9"):
            found.schema("id-9")
    assert stub.asked == ["ids/9"] * TRIES
    stub.add("ids/9", SCHEMA)
    clock.time += 10.0
    assert found.schema("id-9") == SCHEMA


def test_a_registry_that_is_down_says_nothing_about_a_message(stub: StubRegistry) -> None:
    clock = Clock()
    found = schemas(stub, clock)
    stub.status = 500
    for _ in range(5):
        with pytest.raises(RegistryUnavailable, match="doesn't answer"):
            found.schema("id-7")
    assert len(stub.asked) == 1
    stub.status = 200
    clock.time += 5.0
    assert found.schema("id-7") == SCHEMA


def test_nobody_listens(stub: StubRegistry) -> None:
    found = RegistrySchemas(Registry(url="http://127.0.0.1:1", timeout=500))
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:1 doesn't answer"):
        found.schema("id-7")


def test_schemas_of_another_kind(stub: StubRegistry) -> None:
    stub.add("ids/1", {}, schemaType="JSON")
    stub.add("ids/2", SCHEMA, references=[{"name": "a", "subject": "a", "version": 1}])
    found = schemas(stub, Clock())
    with pytest.raises(DecodeError, match="id-1 is a schema of JSON"):
        found.schema("id-1")
    with pytest.raises(DecodeError, match="id-2 refers to other schemas"):
        found.schema("id-2")


def test_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="holds a login"):
        Registry(url="http://user:secret@registry")
    with pytest.raises(ValueError, match="both username_env and password_env"):
        Registry(url="http://registry", username_env="A")
    config = Registry(url="http://registry", username_env="REG_USER", password_env="REG_PASSWORD")
    monkeypatch.setenv("REG_USER", "ada")
    with pytest.raises(SpecError, match="REG_PASSWORD in the environment"):
        RegistrySchemas(config)
    monkeypatch.setenv("REG_PASSWORD", "secret")
    RegistrySchemas(config)
    with pytest.raises(SpecError, match="registry: Invalid url"):
        RegistrySchemas(Registry(url="registry:8081"))
