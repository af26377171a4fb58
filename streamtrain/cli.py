"""The command line. Heavy imports happen inside commands, so that ``--help`` answers at once."""

import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from streamtrain import __version__
from streamtrain.errors import EXIT_CORRUPT, EXIT_UNEXPECTED, EXIT_USAGE, StreamtrainError

if TYPE_CHECKING:
    from streamtrain.config import Config
    from streamtrain.report import Report

_EXITS = """
\b
Exit codes: 0 done, or ended cleanly by a signal; 1 unexpected; 2 usage or
configuration; 3 the start was refused, and restarting will not help;
4 data on disk is corrupt; 128+n ended at once by a second signal n.
"""


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
def check(path: str, overrides: Sequence[str]) -> None:
    """Check a configuration without starting anything; print what is in force."""
    from streamtrain.config import effective

    click.echo(effective(_loaded(path, overrides)))


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
