"""A reverse proxy that serves another server below a path, as nginx does with `location /llm/`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_OF_THE_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length")


@contextmanager
def below_path(url: str, path: str) -> Iterator[str]:
    """Serve `url` below `path`, such as `/llm/`, while the context lasts; yield the URL of that path."""
    behind = urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.close_connection = True
            if not self.path.startswith(path):
                self.send_error(404, "outside of the path")
                return
            connection = HTTPConnection(behind)
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: text for name, text in self.headers.items() if name.lower() not in _OF_THE_CONNECTION}
            connection.request(self.command, "/" + self.path.removeprefix(path), body, headers)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, text in answer.getheaders():
                if name.lower() not in _OF_THE_CONNECTION:
                    self.send_header(name, text)
            self.end_headers()
            try:
                while part := answer.read1(1 << 16):
                    self.wfile.write(part)
            except OSError:  # the browser left
                pass
            connection.close()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        proxy.daemon_threads = True
        proxy.block_on_close = False
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}{path}"
        proxy.shutdown()
