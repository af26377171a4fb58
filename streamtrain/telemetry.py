"""What an operator sees: metrics for Prometheus, and whether the daemon is alive and ready.

``/metrics``; ``/healthz`` answers 503 when the loop has not come round for too long; ``/readyz``
answers 503 with the reasons. Bound to loopback unless the configuration says otherwise.
"""

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from streamtrain.clock import Now, monotonic

_SILENT_S: Final = 60.0


class Telemetry:
    """The metrics of one trainer, and its health.

    Parameters
    ----------
    model : str
        A label of every metric's registry entry ``streamtrain_info``.
    now : callable
        Monotonic clock in seconds.
    """

    def __init__(self, model: str, *, now: Now = monotonic) -> None:
        self.registry = CollectorRegistry()
        self._now = now
        self._beat: float | None = None
        self._reasons: Callable[[], Mapping[str, str]] = lambda: {"start": "starting"}

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"streamtrain_{name}", text, labels, registry=self.registry)

        gauge("info", "The model that is trained here", "model").labels(model).set(1)
        self.samples = Counter(
            "streamtrain_samples",
            "Samples by fate: learned, or dropped with the reason",
            ["fate"],
            registry=self.registry,
        )
        self.samples.labels("learned")  # A rate needs the zero.
        self.step_seconds = Histogram(
            "streamtrain_step_seconds",
            "Duration of one step",
            registry=self.registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
        )
        self.lag = gauge("lag", "Messages between position and end", "topic", "partition")
        self.step = gauge("step", "Steps learned")
        self.clock = gauge("clock_seconds", "Event time that the model has reached")
        self.loss = gauge("progressive_loss", "Loss of the validation window", "task")
        self.auc = gauge("progressive_auc", "AUC of the validation window", "task")
        self.calibration = gauge(
            "progressive_calibration", "Mean prediction over mean label in the window", "task"
        )
        self.rows = gauge("rows", "Admitted rows", "table")
        self.candidates = gauge("candidates", "Keys seen and not admitted yet", "table")
        self.evicted = gauge("evicted", "Rows evicted since birth", "table")
        self.forgotten = gauge("forgotten", "Candidates forgotten since birth", "table")
        self.generation = gauge("generation", "Generation of this trainer")
        self.version = gauge("version", "Newest version in the log")
        self.published = gauge("published_version", "Newest version in a sink", "sink")
        self.version_age = gauge(
            "version_age_seconds", "Seconds since the last version was written"
        )
        self.cut_age = gauge("cut_age_seconds", "Seconds since the last cut became durable")
        self.cuts_failed = Counter(
            "streamtrain_cuts_failed", "Cuts that could not be written", registry=self.registry
        )
        self.cuts_skipped = Counter(
            "streamtrain_cuts_skipped",
            "Cuts due while one was being written",
            registry=self.registry,
        )

    def beat(self) -> None:
        """Note that the loop came round."""
        self._beat = self._now()

    def ready_when(self, reasons: Callable[[], Mapping[str, str]]) -> None:
        """Give what tells why the daemon is not ready: ``{what: reason}``, empty when it is."""
        self._reasons = reasons

    def unhealthy(self) -> dict[str, str]:
        """Return why the process should be restarted, empty when it should not.

        A start may take as long as the model is large, so nothing is said before the first beat.
        """
        silent = 0.0 if self._beat is None else self._now() - self._beat
        if silent > _SILENT_S:
            return {"loop": f"the training loop has not come round for {silent:.0f} s"}
        return {}

    def unready(self) -> dict[str, str]:
        """Return why the daemon should get no traffic, empty when it may."""
        return {**self.unhealthy(), **self._reasons()}

    def page(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class TelemetryServer:
    """Answers `Telemetry` over HTTP from a thread of its own.

    Parameters
    ----------
    telemetry : Telemetry
    listen : str
        ``host:port``; port 0 takes a free one.
    """

    def __init__(self, telemetry: Telemetry, listen: str) -> None:
        host, _, port = listen.rpartition(":")
        self._server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), _handler(telemetry))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="telemetry", daemon=True
        )

    @property
    def address(self) -> str:
        """Where it listens, ``host:port``."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


def _handler(telemetry: Telemetry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, telemetry.page())
            elif path in ("/healthz", "/readyz"):
                reasons = telemetry.unhealthy() if path == "/healthz" else telemetry.unready()
                body = json.dumps({"ok": not reasons, "reasons": reasons}).encode()
                self._answer(503 if reasons else 200, "application/json", body)
            else:
                self._answer(404, "text/plain", b"/metrics, /healthz, /readyz\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep scrapes out of the log."""

    return Handler
