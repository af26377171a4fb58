"""Settings of the export."""

from __future__ import annotations

import msgspec
import pytest

from exporters.config import Export, Log, Redis


def test_defaults() -> None:
    assert msgspec.convert({}, Export) == Export(
        every=1000, log=Log(max_bytes=20 << 30), redis=None
    )
    redis = msgspec.convert({"url_env": "REDIS_URL"}, Redis)
    assert redis.resolve_url({"REDIS_URL": "redis://x"}) == "redis://x"
    assert Redis(url="redis://y").resolve_url({}) == "redis://y"


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"redis": {}}, "exactly one"),
        ({"redis": {"url": "redis://x", "url_env": "X"}}, "exactly one"),
        ({"redis": {"url": "redis://x", "layout": "plain"}}, "layout"),
        ({"redis": {"url": "redis://x", "expected_rows": {"user": 0}}}, "expected_rows"),
        ({"redis": {"url": "redis://x", "keep_versions": 1}}, "keep_versions"),
        ({"every": 0}, "every"),
        ({"log": {"max_bytes": 0}}, "max_bytes"),
        ({"evry": 5}, "evry"),
    ],
)
def test_what_is_refused(raw: dict, text: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=text):
        msgspec.convert(raw, Export)


def test_a_url_that_is_not_set_is_named() -> None:
    for environ in ({}, {"REDIS_URL": ""}):
        with pytest.raises(ValueError, match="REDIS_URL is not set"):
            Redis(url_env="REDIS_URL").resolve_url(environ)
