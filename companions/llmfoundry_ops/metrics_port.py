"""The port at which Prometheus asks for the numbers of a run, opened by the observer of its launch. No torch."""

import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from llmfoundry_lite.errors import printable

if TYPE_CHECKING:
    from llmfoundry_ops.launch_observer import LaunchObserver
    from llmfoundry_ops.prometheus import Numbers

PORT_SECONDS = 3.0
"""How long a port that is taken is tried again: the observer of the launch before may still have it."""


class MetricsPort:
    """The port at which Prometheus asks, if the run has one.

    Standard error is that of the launch until the port is open, or cannot be opened. It is let go then, because a
    program that reads the launch's output waits for all processes that could still write there.
    """

    def __init__(self, description: dict[str, Any], observer: "LaunchObserver"):
        self._description = description
        self._observer = observer
        self._deadline = time.monotonic() + PORT_SECONDS
        self._server: Any = None
        self._is_settled = False
        """The port is open, or is not tried again."""
        if description["metrics_port"] is None:
            self._settle()

    def open(self) -> None:
        """Open the port, or try again later if it is taken. Prints a line when it is given up."""
        if self._is_settled:
            return
        from llmfoundry_ops.prometheus import serve

        host, port = self._description["metrics_host"], self._description["metrics_port"]
        try:
            self._server = serve(host, port, self._numbers)
        except OSError as error:
            if time.monotonic() < self._deadline:
                return
            text = f"warning: no metrics: metrics_port: {host}:{port}: {error.strerror or error}; the run goes on"
            print(printable(text), file=sys.stderr, flush=True)
        self._settle()

    def close(self) -> None:
        """Close the port."""
        self._is_settled = True
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _settle(self) -> None:
        """Let the launch's standard error go."""
        self._is_settled = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stderr.fileno())
        os.close(null)

    def _numbers(self) -> "Numbers":
        """Return what the metrics are made of, now. Called by the server's threads."""
        from llmfoundry_ops.prometheus import Numbers

        observer = self._observer
        return Numbers(
            run_name=self._description["run_name"],
            run_folder=self._description["run_folder"],
            host=socket.gethostname(),
            state=observer.state,
            launch=observer.launch,
            batch=observer.batch,
            failed_saves=observer.run.failed_saves if observer.run is not None else 0,
            saved_at=observer.saved_at,
            is_saved_in_second=observer.is_saved_in_second,
            idle_seconds=observer.idle_seconds,
            logged=dict(observer.logged),
            validation=dict(observer.validation),
            rank_times=observer.rank_times,
            num_slow_ranks=len(observer.slow_ranks),
        )
