"""A local S3 server in a process of its own, and proxies before it: one drops connections, one refuses requests.

`Faults` says what the second one does to which request, by a seeded die.
"""

import asyncio
import os
import random
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch

from tests.helpers.launch import free_port

POLL_SECONDS = 0.01
"""Time between two looks of a server whether it has to shut down."""
BACK_OFF_FACTOR = 0.01


@contextmanager
def s3_server():
    """The server's port, once it answers. Meanwhile s3fs tries again as often as usual, and waits less between."""
    port = free_port()
    environment = {**os.environ, "MOTO_PORT": str(port), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5).read()
                break
            time.sleep(0.1)
        import s3fs  # here, because it takes long and other tests need only the proxies

        # The endpoint may come from the environment, which is no part of the key by which clients are cached. So a
        # test would get the client of an earlier server.
        s3fs.S3FileSystem.clear_instance_cache()
        sleep = asyncio.sleep
        with patch.object(asyncio, "sleep", lambda seconds, *result: sleep(BACK_OFF_FACTOR * seconds, *result)):
            yield port
    finally:
        process.kill()
        process.wait()


class DroppingProxy(socketserver.ThreadingTCPServer):
    """Passes bytes both ways; some connections, chosen by a seeded die, are cut in the middle of the traffic."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, target: int, drop_rate: float, seed: int = 0):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target = target
        self.drop_rate = drop_rate
        self.random = random.Random(seed)
        self.num_dropped = 0
        threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), daemon=True).start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def handle_error(self, request, client_address):
        pass


class _Connection(socketserver.BaseRequestHandler):
    server: DroppingProxy

    def handle(self) -> None:
        budget = self.server.random.randint(0, 300_000) if self.server.random.random() < self.server.drop_rate else None
        with socket.create_connection(("127.0.0.1", self.server.target)) as other:
            there = threading.Thread(target=self._pump, args=(self.request, other, budget), daemon=True)
            there.start()
            self._pump(other, self.request, None)
            there.join()

    def _pump(self, source: socket.socket, sink: socket.socket, budget: int | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if budget is not None:
                    budget -= len(data)
                    if budget < 0:
                        self.server.num_dropped += 1
                        break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


STATUS = {"SlowDown": 503, "InternalError": 500, "ExpiredToken": 400, "AccessDenied": 403}
STATUS |= {"NotImplemented": 501, "ConditionalRequestConflict": 409}
"""HTTP status that S3 sends with a code of its own."""
UNHEARD, ANSWER_LOST, ANSWER_CUT, SLOW = "unheard", "answer lost", "answer cut", "slow"
"""What else may happen to a request: it never arrives; it does, but all or half of the answer is lost; it waits."""
SLOW_SECONDS = 0.3


class RefusingProxy(ThreadingHTTPServer):
    """Passes requests on, but those for which `refuses` (method, path, headers) names a code, or one of the above."""

    daemon_threads = True

    def __init__(self, target: int):
        super().__init__(("127.0.0.1", 0), _Request)
        self.target = target
        self.refuses: Callable[[str, str, dict[str, str]], str | None] = lambda method, path, headers: None
        self.num_refused = 0
        threading.Thread(target=self.serve_forever, args=(POLL_SECONDS,), daemon=True).start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    server: RefusingProxy
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        code = self.server.refuses(self.command, self.path, dict(self.headers))
        self.server.num_refused += code is not None
        if code == UNHEARD:
            self.close_connection = True
            return
        if code in STATUS:
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}, by a proxy</Message></Error>"
            self._send(STATUS[code], [("Content-Type", "application/xml")], text.encode())
            return
        if code == SLOW:
            time.sleep(SLOW_SECONDS)
        other = HTTPConnection("127.0.0.1", self.server.target)
        other.request(self.command, self.path, content, dict(self.headers))
        found = other.getresponse()
        skipped = ("transfer-encoding", "connection", "server", "date")
        headers = [(name, value) for name, value in found.getheaders() if name.lower() not in skipped]
        answer = found.read()
        other.close()
        self.close_connection = code in (ANSWER_LOST, ANSWER_CUT)
        if code != ANSWER_LOST:
            self._send(found.status, headers, answer, len(answer) // 2 if code == ANSWER_CUT else None)

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, num_sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:num_sent])

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, format, *args):
        pass


class Faults:
    """`RefusingProxy.refuses`: one fault at a time, which begins somewhere in an operation and ends with it."""

    KINDS = ("storm", "unheard", "answer lost", "answer cut", "slow lists", "expired token")

    def __init__(self, seed: int, credentials: Path):
        self.random = random.Random(seed)
        self.credentials = credentials
        self.num_hit = Counter[str]()
        self._lock = threading.Lock()
        self._num_keys = 0
        self._kind: str | None = None
        self._give_key()

    def _give_key(self) -> None:
        self._num_keys += 1
        text = f"[default]\naws_access_key_id = key{self._num_keys}\naws_secret_access_key = test\n"
        self.credentials.with_suffix(".new").write_text(text)
        self.credentials.with_suffix(".new").replace(self.credentials)

    @contextmanager
    def one(self) -> Iterator[str]:
        """Let one fault happen to what is asked within. A token that has expired is replaced now, or afterwards."""
        self._begins, self._left = self.random.randint(0, 12), self.random.randint(1, 12)
        self._code = self.random.choice(("SlowDown", "InternalError"))
        self._expired, self._replaces_at_once = f"Credential=key{self._num_keys}/", self.random.random() < 0.5
        self._has_hit = False
        self._kind = kind = self.random.choice(self.KINDS)
        try:
            yield kind
        finally:
            with self._lock:
                self._kind = None
            self.num_hit[kind] += self._has_hit
            if kind == "expired token" and self._has_hit and not self._replaces_at_once:
                self._give_key()

    def __call__(self, method: str, path: str, headers: dict[str, str]) -> str | None:
        with self._lock:
            if self._kind is None:
                return None
            self._begins -= 1
            if self._begins >= 0:
                return None
            code = self._answer(method, path, headers)
            self._has_hit |= code is not None
            return code

    def _answer(self, method: str, path: str, headers: dict[str, str]) -> str | None:
        if self._kind == "slow lists":
            return SLOW if method == "GET" and "list-type=2" in path else None
        if self._kind == "expired token":
            if self._expired not in str(headers):
                return None
            if self._replaces_at_once and not self._has_hit:
                self._give_key()
            return "ExpiredToken"
        if self._left == 0 or (self._kind == "answer cut" and method != "GET"):
            return None
        self._left -= 1
        return self._code if self._kind == "storm" else self._kind
