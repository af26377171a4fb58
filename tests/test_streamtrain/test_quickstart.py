"""The tour as a newcomer takes it: whole processes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streamtrain import cli
from streamtrain.quickstart import Outcome, Recorded, Score

TIMEOUT_S = 240


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "scratch").mkdir()
    command = [
        sys.executable,
        "-m",
        "streamtrain",
        "quickstart",
        "--picture",
        str(folder / "p.svg"),
    ]
    return subprocess.Popen(
        [*command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder / "scratch")},
        start_new_session=True,
    )


def processes_in(folder: Path) -> list[str]:
    """Command lines of processes that speak of a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.endtoend
def test_the_replica_equals_the_trainer_and_nothing_is_left(tmp_path: Path) -> None:
    with started(tmp_path, "--json", "--seconds", "6", "--rate", "1000") as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    outcome = json.loads(out)
    assert outcome["equal"]
    assert outcome["different_rows"] == 0
    assert outcome["compared_rows"] == outcome["rows"] > 100
    assert outcome["samples"] == 6000
    assert outcome["evicted"] > 0
    assert outcome["deltas"] >= 3
    assert 0 < outcome["fresh_p50_ms"] <= outcome["fresh_p99_ms"]
    for when in ("start", "end"):
        assert outcome[f"best_{when}"]["loss"] < outcome[when]["loss"]
    assert 0 < outcome["frozen_at"] < 6000
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert "log loss" in err
    assert "tensorflow" not in err.lower().replace("loading tensorflow", "")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert processes_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.endtoend
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    with started(tmp_path, "--seconds", "120", "--rate", "500") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "samples/s" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert out == ""
    assert list((tmp_path / "scratch").iterdir()) == []
    assert processes_in(tmp_path) == []


def test_recorded_keeps_what_the_window_forgets() -> None:
    recorded = Recorded(10)
    for at in range(5):
        recorded.add(np.full(4, at / 10 + 0.1), np.ones(4), np.ones(4))
    assert np.concatenate(recorded.predictions).tolist() == pytest.approx(
        np.repeat([0.1, 0.2, 0.3, 0.4, 0.5], 4).tolist()
    )
    assert recorded.figures().samples == 10


def test_the_table_says_whether_the_replica_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    score = Score(10, 0.5, 0.75)
    values = {
        "seconds": 60.0, "samples": 300_000, "samples_per_s": 5000.0, "start": score, "end": score, "frozen": score,
        "best_start": score, "best_end": Score(0, None, None), "frozen_at": 5, "admitted": 9, "evicted": 4, "rows": 5,
        "deltas": 3, "fresh_p50_ms": 200.0, "fresh_p99_ms": 400.0, "compared_rows": 5, "picture": "p.svg",
    }  # fmt: skip
    cli._show_outcome(Outcome(**values, different_rows=0, dense_equal=True))  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "equals the trainer: 5 rows and the dense weights, bit for bit" in out
    assert "9 admitted, 4 evicted, 5 held" in out
    cli._show_outcome(Outcome(**values, different_rows=2, dense_equal=True))  # type: ignore[arg-type]
    assert "DIFFERS from the trainer: 2 of 5 rows; dense weights equal" in capsys.readouterr().out
