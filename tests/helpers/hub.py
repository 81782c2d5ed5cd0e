"""A Hub on loopback, which answers `huggingface_hub` and `datasets` as the Hugging Face Hub does, for HF_ENDPOINT.

Small files come from /resolve/ at once, large ones by a redirect to another host and path, the Hub's storage. A renamed
repository redirects by a relative path. Listings have one entry a page. Tests put faults before what it answers.
"""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_BYTES = 4096
"""From this size on a file lies behind a redirect."""

Fault = Callable[["_Request"], bool]
"""Answers a request in place of the Hub, or returns False."""


@dataclass
class Repository:
    files: dict[str, bytes]
    token: str | None = None
    """Without which the repository is not there, as a private one of the Hub."""

    @property
    def sha(self) -> str:
        """The commit: it changes with every byte, and with every name."""
        return hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(self.files.items()))).hexdigest()

    def entry(self, path: str) -> dict:
        data = self.files[path]
        large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        entry = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        return entry | ({"lfs": large} if len(data) >= LARGE_BYTES else {})


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    range: str | None
    status: int = 0


@dataclass(eq=False)
class Hub:
    """`with Hub() as hub`: repositories by kind and name, such as ("datasets", "someone/texts")."""

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    def __enter__(self) -> "Hub":
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), _Request) for _ in range(2)]
        for server in self.servers:
            server.daemon_threads, server.hub = True, self
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self.servers)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def add(self, kind: str, name: str, files: dict[str, bytes] | Path, token: str | None = None) -> Repository:
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()
            }
        self.repositories[kind, name] = Repository(files, token)
        return self.repositories[kind, name]

    def environment(self, cache: Path) -> dict[str, str]:
        """Return what a process needs to take this for the Hub, with a cache of its own."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
        return own | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1"}

    def statuses(self, part: str, method: str = "GET") -> list[int]:
        """Return the status of each request so far whose path has `part`."""
        return [one.status for one in self.asked if part in one.path and one.method == method]


# --------------------------------------------------------------------------------------------------------- faults


def too_many(part: str, times: int, method: str = "GET") -> Fault:
    """Answer 429 with Retry-After to the first `times` requests for a path that has `part`."""
    left = [times]

    def answer(request: "_Request") -> bool:
        if part not in request.path or request.command != method or not left[0]:
            return False
        left[0] -= 1
        request.send(429, b"{}", {"Retry-After": "1"})
        return True

    return answer


def cut(part: str, times: int, share: float = 0.5) -> Fault:
    """Announce the whole of the content, send this share of it and close the connection, `times` times."""
    left = [times]

    def answer(request: "_Request") -> bool:
        if part not in request.path or request.command != "GET" or not left[0]:
            return False
        left[0] -= 1
        request.cut_after = share
        request.answer()
        return True

    return answer


def broken(part: str, status: int) -> Fault:
    """Answer every request for a path that has `part` with a status."""

    def answer(request: "_Request") -> bool:
        if part in request.path:
            request.send(status, b"{}", {"X-Error-Message": f"status {status}, by a test"})
        return part in request.path

    return answer


# -------------------------------------------------------------------------------------------------------- requests


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def handle_request(self) -> None:
        self.cut_after = 1.0
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked = Asked(self.command, self.path, self.headers.get("Range"))
        self.hub.asked.append(self.asked)
        if not any(fault(self) for fault in self.hub.faults):
            self.answer()

    do_GET = do_HEAD = do_POST = handle_request

    def answer(self) -> None:
        """Answer as the Hub does."""
        path = unquote(urlsplit(self.path).path)
        for old, new in self.hub.renamed.items():
            if old in path:
                self.send(307, b"", {"Location": self.path.replace(old, new)})
                return
        if match := re.fullmatch(r"/storage/(\w+)/(.+?)/-/(.+)", path):
            self._send_file(self.hub.repositories[match[1], match[2]].files[match[3]], {})
        elif match := re.fullmatch(r"/api/(models|datasets)/([\w.-]+/[\w.-]+)(?:/(.+))?", path):
            self._send_api(match[1], match[2], match[3] or "")
        elif match := re.fullmatch(r"/(datasets/)?([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            self._resolve("datasets" if match[1] else "models", match[2], match[3], match[4])
        else:
            self.send(404, b"{}", {})

    def _find(self, kind: str, name: str) -> Repository | None:
        found = self.hub.repositories.get((kind, name))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if found is not None and found.token in (None, token):
            return found
        self.send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        return None

    def _send_api(self, kind: str, name: str, rest: str) -> None:
        if (found := self._find(kind, name)) is None:
            return
        verb, _, revision = rest.partition("/")
        revision, _, under = revision.partition("/")
        if revision not in ("", "main", found.sha):
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif verb in ("", "revision"):
            siblings = [{"rfilename": path} for path in sorted(found.files)]
            self._send_json({"_id": "1", "id": name, "sha": found.sha, "private": False, "siblings": siblings})
        elif verb == "tree":
            self._send_tree(found, under)
        elif verb == "paths-info":
            self._send_json(self._paths_info(found))
        else:
            self.send(404, b"{}", {})

    def _paths_info(self, found: Repository) -> list[dict]:
        is_json = "json" in (self.headers.get("Content-Type") or "")
        paths = json.loads(self.body)["paths"] if is_json else parse_qs(self.body.decode()).get("paths", [])
        entries = [found.entry(path) for path in paths if path in found.files]
        folders = [path for path in paths if any(file.startswith(f"{path}/") for file in found.files)]
        return entries + [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]

    def _send_tree(self, found: Repository, under: str) -> None:
        """Send one entry a page, with the next page in Link."""
        asked = parse_qs(urlsplit(self.path).query)
        prefix = f"{under}/" if under else ""
        below = [path for path in sorted(found.files) if path.startswith(prefix)]
        folders = {path[:at] for path in below for at, letter in enumerate(path) if letter == "/" and at >= len(prefix)}
        entries = [found.entry(path) for path in below]
        entries += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in sorted(folders)]
        if asked.get("recursive", ["false"])[0].lower() != "true":
            entries = [entry for entry in entries if "/" not in entry["path"].removeprefix(prefix)]
        if under and not entries:
            self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        at = int(asked.get("cursor", ["0"])[0])
        query = "&".join(f"{key}={value[0]}" for key, value in asked.items() if key != "cursor")
        more = f"{self.hub.url}{urlsplit(self.path).path}?{query}&cursor={at + 1}"
        self._send_json(entries[at : at + 1], {"Link": f'<{more}>; rel="next"'} if at + 1 < len(entries) else {})

    def _resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        if (found := self._find(kind, name)) is None:
            return
        if revision not in ("main", found.sha):
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Repo-Commit": found.sha})
            return
        headers = {"X-Repo-Commit": found.sha}
        if path not in found.files:
            self.send(404, b"{}", {**headers, "X-Error-Code": "EntryNotFound"})
            return
        entry = found.entry(path)
        if "lfs" not in entry:
            self._send_file(found.files[path], {**headers, "ETag": f'"{entry["oid"]}"'})
            return
        linked = {"X-Linked-ETag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(entry["size"])}
        place = f"{self.hub.storage_url}/storage/{kind}/{name}/-/{path}?signature=1"
        self.send(302, b"", {**headers, **linked, "Location": place})

    def _send_file(self, data: bytes, headers: dict[str, str]) -> None:
        """Send the content, or the range of it that was asked for."""
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', **headers, "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None:
            self.send(200, data, headers)
        elif int(match[1]) >= len(data):
            self.send(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
        else:
            first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
            self.send(206, data[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _send_json(self, content: object, headers: dict[str, str] | None = None) -> None:
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.asked.status = status
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: int(len(content) * self.cut_after)])
        self.close_connection = self.cut_after < 1.0

    def log_message(self, format, *args):
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that has left
            super().handle()
