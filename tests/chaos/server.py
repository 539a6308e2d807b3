"""Serves files over HTTP, honestly; scenarios make it lie."""

import email.utils
import http.server
import pathlib
import threading


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves files with ranges and entity tags."""

    # Part of a body that is sent.
    share = 1.0

    def do_GET(self) -> None:
        self.try_answer(is_body=True)

    def do_HEAD(self) -> None:
        self.try_answer(is_body=False)

    def try_answer(self, *, is_body: bool) -> None:
        """Answers a request, unless nobody waits for the answer any more."""
        try:
            self.answer(is_body=is_body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def content(self) -> bytes | None:
        path = pathlib.Path(self.translate_path(self.path))
        return path.read_bytes() if path.is_file() else None

    def version(self, content: bytes) -> dict[str, str]:
        """Returns the headers that tell versions apart."""
        return {"ETag": f'"{len(content)}"'}

    def answer(self, *, is_body: bool) -> None:
        content = self.content()
        if content is None:
            self.send_error(404)
            return
        version = self.version(content)
        if self.headers.get("If-Match", version.get("ETag")) != version.get("ETag"):
            self.send_error(412)
            return
        total = len(content)
        start, end = wanted_range(self.headers.get("Range"), total)
        self.send_response(206 if "Range" in self.headers else 200)
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{total}")
        self.send_header("Content-Length", str(end - start))
        for name, value in version.items():
            self.send_header(name, value)
        self.end_headers()
        if is_body:
            self.wfile.write(content[start : start + int(self.share * (end - start))])

    def log_message(self, *_args) -> None:
        pass


def wanted_range(header: str | None, total: int) -> tuple[int, int]:
    """Returns start and end of the requested bytes."""
    if not header:
        return 0, total
    first, last = header.removeprefix("bytes=").split("-")
    return int(first), min(int(last) + 1, total) if last else total


def time_header(seconds: int) -> str:
    return email.utils.formatdate(seconds, usegmt=True)


def serve(directory: pathlib.Path, handler: type = Server) -> tuple[http.server.ThreadingHTTPServer, str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: handler(*args, directory=str(directory)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"
