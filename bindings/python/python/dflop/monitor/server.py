"""An HTTP server for Prometheus on the loopback device."""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, Self

from dflop.monitor._loader import metrics_of
from dflop.monitor.prometheus import CONTENT_TYPE, TimesModules, _rank_labels, text

LOGGER = logging.getLogger("dflop")
ADDRESS = "127.0.0.1"
# A connection ends after this time, whatever has come by then: a byte from time to time does not hold it.
REQUEST_SECONDS_MAX = 5.0
# Above this number, the oldest connection ends.
CONNECTIONS_MAX = 16
# Names of this machine in a request. Any other is a page of another site that was led here by its DNS.
_HOSTS = frozenset({ADDRESS, "localhost"})


class Server:
    """A running server of metrics, see `serve`.

    Attributes:
        port: port on 127.0.0.1.
        url: address of the metrics.

    Examples:
        >>> loader = dflop.Loader("shards/")
        >>> with dflop.monitor.serve(loader) as server:
        ...     print(server)
        Server('http://127.0.0.1:.../metrics')
    """

    def __init__(self, page: Any, port: int) -> None:
        self._server = _LoopbackServer((ADDRESS, port), _Handler)
        self._server.page = page
        self.port: int = self._server.server_address[1]
        self.url = f"http://{ADDRESS}:{self.port}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="dflop-metrics",
            daemon=True,
        )
        self._thread.start()
        LOGGER.info("serves metrics at %s", self.url)

    def close(self) -> None:
        """Stops the server and frees the port; a second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.end_connections()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Server({self.url!r})"


def serve(
    loader: object,
    port: int = 0,
    *,
    timer: TimesModules | None = None,
    labels: Mapping[str, str] | None = None,
) -> Server:
    """Serves the metrics of a loader to Prometheus, at ``/metrics`` of a port on 127.0.0.1.

    Daemon threads answer, at most 16 connections at a time, each for at most 5 s: callers that are slow or send
    nothing do not keep others waiting. Only ``GET /metrics`` is answered, and only if ``Host`` names this
    machine, so that no web page can read it. The server runs until it is closed; it does not keep the process
    alive.

    Args:
        loader: a `dflop.BalancedLoader` or `dflop.Loader`, or a `Record` or `Progress` of one; a record adds
            loss and step time.
        port: the port; 0 for a free one, which ``Server.port`` names.
        timer: see `text`.
        labels: see `text`.

    Returns:
        Server: the server, a context manager.

    Raises:
        TypeError: the object has no metrics.
        ValueError: a label is invalid.
        OSError: the port is in use.

    Examples:
        >>> import urllib.request
        >>> loader = dflop.Loader("shards/", batch_size=64)
        >>> with dflop.monitor.serve(loader) as server:
        ...     batches = list(loader)
        ...     page = urllib.request.urlopen(server.url).read().decode()
        >>> "dflop_stage_items_total" in page
        True
    """
    metrics_of(loader)
    _rank_labels(loader, labels or {})
    return Server(lambda: text(loader, timer=timer, labels=labels), port)


class _LoopbackServer(socketserver.ThreadingMixIn, HTTPServer):
    page: Any
    # Two servers on one port would share its requests.
    allow_reuse_port = False
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        # Ends of open connections, in seconds of the monotonic clock, oldest first.
        self._ends: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._ends) >= CONNECTIONS_MAX:
                self._end(next(iter(self._ends)))
            self._ends[request] = time.monotonic() + REQUEST_SECONDS_MAX
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends the connections whose time is over; the loop of the server calls it."""
        now = time.monotonic()
        with self._lock:
            for request in [request for request, end in self._ends.items() if end < now]:
                self._end(request)

    def end_connections(self) -> None:
        """Ends all connections."""
        with self._lock:
            for request in list(self._ends):
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Ends a connection, under the lock; its thread, which reads from it or writes to it, closes it."""
        del self._ends[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The client has ended it.

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        # `HTTPServer` would ask a name server for the name of this machine.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drops a request whose client went away."""


class _Handler(BaseHTTPRequestHandler):
    server: _LoopbackServer
    timeout = REQUEST_SECONDS_MAX

    def do_GET(self) -> None:  # the name that `http.server` calls
        if not self._is_local():
            self._answer(403, "expected `Host` to name this machine\n")
        elif self.path != "/metrics":
            self._answer(404, "expected /metrics\n")
        else:
            try:
                status, page = 200, self.server.page()
            except Exception as error:  # noqa: BLE001  # Prometheus shows the status of a failed scrape
                status, page = 503, f"{type(error).__name__}: {error}\n"
            self._answer(status, page)

    def _refuse(self) -> None:
        self._answer(405, "expected GET\n")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def _is_local(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1:
            return False
        name, colon, port = hosts[0].strip().partition(":")
        return name.lower() in _HOSTS and (not colon or port == str(self.server.server_port))

    def _answer(self, status: int, page: str) -> None:
        body = page.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == 405:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "dflop"

    def log_message(self, format: str, *args: Any) -> None:  # the name in the base class
        """Logs nothing: a scrape every few seconds is no event."""
