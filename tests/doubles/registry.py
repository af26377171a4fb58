"""A schema registry over HTTP: the two calls that are made, their 404, and its absence."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class StubRegistry:
    """Serves ``schemas`` by key (``ids/7``, ``guids/…``) and notes what was asked for."""

    def __init__(self) -> None:
        self.schemas: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.status = 200
        stub = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = self.path.split("?")[0].removeprefix("/schemas/")
                stub.asked.append(key)
                found = stub.schemas.get(key)
                status, body = 200, dict(found or {})
                if stub.status != 200:
                    status, body = stub.status, {"error_code": stub.status, "message": "broken"}
                elif found is None:
                    status, body = 404, {"error_code": 40403, "message": "Schema not found"}
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, key: str, schema: Any, **more: Any) -> None:
        self.schemas[key] = {"schema": json.dumps(schema), **more}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
