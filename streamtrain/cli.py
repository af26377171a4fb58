"""The command line. Heavy imports happen inside commands, so that ``--help`` answers at once."""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from streamtrain import __version__
from streamtrain._siblings import strangers
from streamtrain.errors import (
    EXIT_CORRUPT,
    EXIT_UNEXPECTED,
    EXIT_USAGE,
    StrangePackage,
    StreamtrainError,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

    from streamtrain.config import Config
    from streamtrain.doctor import Finding
    from streamtrain.quickstart import Outcome, Score
    from streamtrain.report import Report

_EXITS = """
\b
Exit codes: 0 done, or ended cleanly by a signal; 1 unexpected; 2 usage or
configuration; 3 the start was refused, and restarting will not help;
4 data on disk is corrupt; 128+n ended at once by a second signal n.
"""


_SECONDS = click.FloatRange(min=0.001)


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


@click.group(epilog=_EXITS)
@click.version_option(__version__, prog_name="streamtrain")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
def cli(log_level: str, log_format: str) -> None:
    """Train a recommender continuously from a stream, and serve it within a second."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_Json())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    if click.get_current_context().invoked_subcommand != "doctor":
        found = strangers()
        if found:
            raise StrangePackage("\n".join(found))


_config = click.option("-c", "--config", "path", required=True, metavar="FILE", help="YAML file.")
_set = click.option(
    "--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Replace a value of the file."
)
_until = click.option(
    "--until-samples",
    type=click.IntRange(min=1),
    metavar="N",
    help="End cleanly once N samples were learned since the model's birth.",
)
_touch = click.option(
    "--touch",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file that is touched whenever something came through; for health checks.",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


@cli.command()
@_config
@_set
@_until
@_as_json
@click.option(
    "--fresh", is_flag=True, help="Start empty, even where something was stored or published."
)
def run(
    path: str, overrides: Sequence[str], until_samples: int | None, as_json: bool, fresh: bool
) -> None:
    """Train from the topic until stopped.

    SIGTERM or SIGINT: finish the step, ship the last delta, write the last cut, exit 0.
    A second signal ends at once.

    \b
    Example: streamtrain run -c ctr.yaml --set export.every=250ms
    """
    config = _loaded(path, overrides)
    from streamtrain import assembly
    from streamtrain.daemon import Daemon, stopping_on_signals
    from streamtrain.faults import hook
    from streamtrain.timeline import Parts

    on_step = hook()
    parts = Parts(
        source=assembly.kafka_source(config),
        sinks=assembly.sinks(config),
        trainer=lambda cut: assembly.trainer(config, cut),
        environment=assembly.environment(config),
        on_cut=lambda cut: assembly.warn_of_another_environment(config, cut),
    )
    daemon = Daemon(config, parts, fresh=fresh, until_samples=until_samples, on_step=on_step)
    with stopping_on_signals(daemon):
        report = daemon.run()
    _show(report, as_json=as_json)


@cli.command()
@_config
@_set
@_until
@_as_json
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--publish",
    is_flag=True,
    help="Continue from checkpoint.dir, write cuts there, and ship to the sinks.",
)
@click.option(
    "--save", metavar="DIR", help="Write the final state as the first cut of an empty directory."
)
def replay(
    path: str,
    overrides: Sequence[str],
    until_samples: int | None,
    as_json: bool,
    paths: Sequence[str],
    publish: bool,
    save: str | None,
) -> None:
    """Train on recorded samples: Avro container files.

    Starts empty and touches neither checkpoints nor sinks, unless --publish is given.

    \b
    Example: streamtrain replay -c ctr.yaml --save /data/cuts monday.avro tuesday.avro
    """
    if publish and save is not None:
        raise click.UsageError(
            "--save is for a replay without --publish, which writes its own cuts"
        )
    config = _loaded(path, overrides)
    from streamtrain.replaying import replay as replayed

    report = replayed(config, paths, until_samples=until_samples, publish=publish, save=save)
    _show(report, as_json=as_json)


@cli.command()
@_config
@_set
@click.option("--offline", is_flag=True, help="Reach nothing; check the configuration alone.")
@click.option("--json", "as_json", is_flag=True, help="Print findings and configuration as JSON.")
def check(path: str, overrides: Sequence[str], offline: bool, as_json: bool) -> None:
    """Check a configuration, and reach what it names.

    Prints what is in force as a line of JSON, and on stderr how schema, Kafka,
    Redis, checkpoint directory and model were found. Ends with 1 when one of
    them is not well. Starts nothing and changes nothing there.

    \b
    Example: streamtrain check -c ctr.yaml --offline
    """
    from streamtrain.config import effective

    config = _loaded(path, overrides)
    findings: list[Finding] = []
    if not as_json:
        click.echo(effective(config))
    if not offline:
        with _quiet():
            import streamtrain.assembly  # noqa: F401
            from streamtrain.doctor import services
        findings += _found(services(config), show=not as_json, err=True)
    if as_json:
        shown = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"config": json.loads(effective(config)), "services": shown}))
    if not all(finding.ok for finding in findings):
        sys.exit(EXIT_UNEXPECTED)


@cli.command()
@click.option("-c", "--config", "path", metavar="FILE", help="Reach what it names, too.")
@_set
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(path: str | None, overrides: Sequence[str], as_json: bool) -> None:
    """Look at this machine: versions, CPU, threads, kernels, packages.

    Ends with 1 when something stands in the way; each such line says the cure.

    \b
    Example: streamtrain doctor -c ctr.yaml
    """
    config = None if path is None else _loaded(path, overrides)
    from streamtrain.doctor import machine, services

    findings = _found(machine(), show=not as_json)
    if config is not None:
        with _quiet():
            import streamtrain.assembly  # noqa: F401
        findings += _found(services(config), show=not as_json)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    if not all(finding.ok for finding in findings):
        sys.exit(EXIT_UNEXPECTED)


@cli.command()
@click.option("--seconds", type=click.FloatRange(min=3), default=60, show_default=True)
@click.option(
    "--rate", type=click.FloatRange(min=1), default=5000, show_default=True, help="Clicks a second."
)
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("quickstart.svg"),
    show_default=True,
    help="Where the learning curve goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
def quickstart(seconds: float, rate: float, seed: int, picture: Path, as_json: bool) -> None:
    """Take the tour: train on a generated stream for a minute, and see what comes of it.

    Starts a small Kafka, a small Redis and a replica beside the trainer, on
    loopback, and removes everything at the end except for the picture.

    \b
    Example: streamtrain quickstart --seconds 30 --json
    """
    from streamtrain.display import display

    shown = display()
    shown.note("loading TensorFlow")
    with _quiet():
        from streamtrain.quickstart import quickstart as tour
    outcome = tour(seconds=seconds, rate=rate, seed=seed, picture=picture, shown=shown)
    if as_json:
        click.echo(json.dumps(outcome.as_dict()))
    else:
        _show_outcome(outcome)
    if not outcome.equal:
        sys.exit(EXIT_UNEXPECTED)


@cli.command()
@click.option("--brokers", required=True, metavar="HOST:PORT,...")
@click.option("--topic", default="clicks", show_default=True, help="Made when it is missing.")
@click.option("--rate", type=click.FloatRange(min=0.001), default=1000, show_default=True)
@click.option("--partitions", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--count", type=click.IntRange(min=0), help="How many; 0 makes the topic. Else until stopped."
)
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True)
@click.option("--life", type=_SECONDS, default=600, show_default=True, help="Of an item, seconds.")
@click.option(
    "--drift", type=_SECONDS, default=3600, show_default=True, help="Period of taste, seconds."
)
@click.option("--start-ms", type=int, help="Event time of the first click; else now.")
@_touch
def clicks(
    brokers: str,
    topic: str,
    rate: float,
    count: int | None,
    seed: int,
    life: float,
    drift: float,
    start_ms: int | None,
    partitions: int,
    touch: Path | None,
) -> None:
    """Send a generated click stream to a Kafka topic, each click at its event time.

    \b
    Example: streamtrain clicks --brokers localhost:9092 --topic clicks --rate 2000
    """
    import threading

    from streamtrain.clickfeed import feed, make_topic
    from streamtrain.clickstream import ClickStream, Shape
    from streamtrain.clock import wall

    shape = Shape(life_ms=round(life * 1000), drift_ms=round(drift * 1000))
    make_topic(brokers, topic, partitions=partitions)
    stop = threading.Event()
    with _stopping(stop):
        sent = feed(
            ClickStream(seed=seed, shape=shape),
            brokers=brokers,
            topic=topic,
            rate=rate,
            start_ms=round(wall() * 1000) if start_ms is None else start_ms,
            count=count,
            stop=stop,
            on_sent=lambda _: _touched(touch),
        )
    logging.getLogger(__name__).info("sent %d clicks", sent)


@cli.command()
@click.option("--redis", "url_env", default="REDIS_URL", show_default=True, metavar="VARIABLE",
              help="Environment variable that holds the URL.")  # fmt: skip
@click.option("--model", required=True, help="Its name, as in the configuration.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
@_touch
def follow(url_env: str, model: str, as_json: bool, touch: Path | None) -> None:
    """Follow a published model as a serving process does, and print each version.

    \b
    Example: REDIS_URL=redis://localhost:6379 streamtrain follow --model ctr
    """
    import threading

    from exporters import Replica
    from streamtrain.following import Served
    from streamtrain.following import follow as followed

    url = os.environ.get(url_env)
    if not url:
        raise click.UsageError(f"the environment variable {url_env} is not set; put the URL there")
    stop = threading.Event()
    replica = Replica(url, model=model).start(timeout_s=0)
    try:
        with _stopping(stop):
            for seen in followed(replica, stop):
                if isinstance(seen, Served):
                    _touched(touch)
                if as_json:
                    line = asdict(seen) if isinstance(seen, Served) else {"reason": seen}
                    click.echo(json.dumps(line))
                elif isinstance(seen, Served):
                    rows = ", ".join(f"{table} {n}" for table, n in seen.rows.items())
                    click.echo(f"version {seen.version}, {seen.age_s:.2f} s old; rows {rows}")
                else:
                    click.echo(f"waiting: {seen}", err=True)
    finally:
        replica.stop()


def _found(findings: "Iterable[Finding]", *, show: bool, err: bool = False) -> "list[Finding]":
    """Gather findings; show each as soon as it is there."""
    gathered = []
    for finding in findings:
        gathered.append(finding)
        if show:
            mark = "ok " if finding.ok else "BAD"
            click.echo(f"{mark} {finding.what:16} {finding.said}", err=err)
    return gathered


def _touched(path: Path | None) -> None:
    if path is not None:
        path.touch()


@contextmanager
def _stopping(stop: "threading.Event") -> Iterator[None]:
    """Let SIGTERM and SIGINT set an event."""
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the screen free for a display, unless a log level was asked for, while TensorFlow loads.

    TensorFlow greets on file descriptor 2 before any of its switches are read.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    root = click.get_current_context().find_root()
    if root.get_parameter_source("log_level") is not ParameterSource.DEFAULT:
        yield
        return
    logging.getLogger().setLevel(logging.WARNING)
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as greeting:
        os.dup2(greeting.fileno(), 2)
        try:
            yield
        except BaseException:
            greeting.seek(0)
            os.write(before, greeting.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def _show_outcome(outcome: "Outcome") -> None:
    def line(name: str, score: "Score") -> None:
        loss = "-" if score.loss is None else f"{score.loss:.4f}"
        area = "-" if score.auc is None else f"{score.auc:.4f}"
        click.echo(f"  {name:34}{loss:>10}{area:>10}")

    o = outcome
    click.echo(f"{o.samples:,} samples in {o.seconds:.0f} s ({o.samples_per_s:,.0f} a second)\n")
    click.echo(f"  {'':34}{'log loss':>10}{'AUC':>10}")
    line("first tenth, live model", o.start)
    line("first tenth, best possible", o.best_start)
    line("last tenth, live model", o.end)
    line("last tenth, frozen at half time", o.frozen)
    line("last tenth, best possible", o.best_end)
    click.echo(
        f"\nrows       {o.admitted:,} admitted, {o.evicted:,} evicted, {o.rows:,} held\n"
        f"deltas     {o.deltas:,} published\n"
        f"freshness  event to servable: p50 {o.fresh_p50_ms:.0f} ms, p99 {o.fresh_p99_ms:.0f} ms"
    )
    if o.equal:
        said = f"equals the trainer: {o.compared_rows:,} rows and the dense weights, bit for bit"
    else:
        dense = "equal" if o.dense_equal else "different"
        said = (
            f"DIFFERS from the trainer: {o.different_rows:,} of {o.compared_rows:,} rows; "
            f"dense weights {dense}"
        )
    click.echo(f"replica    {said}\npicture    {o.picture}")


def _loaded(path: str, overrides: Sequence[str]) -> "Config":
    from streamtrain.config import load

    return load(path, overrides)


def _show(report: "Report", *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report.as_dict()))
        return
    click.echo(f"learned   {report.learned} samples in {report.steps} steps")
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(report.dropped.items()))
    click.echo(f"dropped   {dropped or 'none'}")
    for task, figures in report.window.items():
        shown = [f"{figures.samples} samples"]
        for name, value in (
            ("loss", figures.loss),
            ("AUC", figures.auc),
            ("calibration", figures.calibration),
            ("loss since birth", report.mean_loss[task]),
        ):
            shown.append(f"{name} {'-' if value is None else format(value, '.5f')}")
        click.echo(f"{task:9} newest {', '.join(shown)}")
    rows = ", ".join(f"{name} {n}" for name, n in report.rows.items())
    click.echo(f"rows      {rows}")
    if report.version:
        click.echo(f"version   {report.version}")


def _leaf_exit(error: Exception) -> int | None:
    """Return the exit code of an error that a leaf raised on purpose, or None."""
    import consumers.errors as c
    import exporters.errors as e
    import sparse_store.errors as s

    for kinds, code in (
        ((c.SpecError, s.ConfigChanged), EXIT_USAGE),
        ((e.LogCorrupt, s.StoreCorrupt, s.ChainBroken, c.SourceCorrupt), EXIT_CORRUPT),
        ((c.ConsumerError, e.ExportError, s.SparseStoreError), EXIT_UNEXPECTED),
    ):
        if isinstance(error, kinds):
            return code
    return None


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line, and end with the exit code of what went wrong.

    Parameters
    ----------
    words : sequence of str or None
        What follows the program's name; None takes it from the process.
    """
    # TensorFlow greets with a page about GPUs; what it raises is told all the same.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        cli(words, standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except StreamtrainError as error:
        for line in str(error).splitlines():
            click.echo(f"streamtrain: {line}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        code = _leaf_exit(error)
        if code is not None:
            click.echo(f"streamtrain: {error}", err=True)
            sys.exit(code)
        logging.getLogger(__name__).exception("unexpected")
        click.echo(f"streamtrain: unexpected: {error}", err=True)
        sys.exit(EXIT_UNEXPECTED)
