"""A receiver of alerts on this machine: an HTTP server that keeps what is posted, and may refuse or hang."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DEADLINE_SECONDS = 60.0


class ReceivingServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.alerts: list[dict[str, Any]] = []
        self.codes: list[int] = []
        """Answers to the next requests; 200 when they are used up."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.has_changed = threading.Condition()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/services/hunter2path"

    @property
    def events(self) -> list[str]:
        return [alert["event"] for alert in self.alerts]

    def wait_for(self, event: str) -> dict[str, Any]:
        """Wait until an event was posted, and return its newest message."""
        with self.has_changed:
            assert self.has_changed.wait_for(lambda: event in self.events, DEADLINE_SECONDS), self.alerts
        return [alert for alert in self.alerts if alert["event"] == event][-1]


class Handler(BaseHTTPRequestHandler):
    server: ReceivingServer

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.may_answer.wait(DEADLINE_SECONDS)
        code = self.server.codes.pop(0) if self.server.codes else 200
        if code == 200:
            with self.server.has_changed:
                self.server.alerts.append(content)
                self.server.has_changed.notify_all()
        with contextlib.suppress(OSError):
            self.send_response(code)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def receiving() -> Iterator[ReceivingServer]:
    server = ReceivingServer()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.may_answer.set()
        server.shutdown()
        server.server_close()
