"""The live page behind a reverse proxy that serves it below a path."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from tests.support.browser import CHROMIUM, DRIVER, browsing
from tests.support.server import serving


@contextmanager
def proxy_of(url: str) -> Iterator[str]:
    """Pass `/llm/X` on as `/X`, and answer 404 to all else; yield the address of `/llm/`."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith("/llm/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            kept = {name: self.headers[name] for name in ("content-type", "accept") if name in self.headers}
            with httpx2.stream(self.command, url + self.path[4:], content=body, headers=kept, timeout=60) as answer:
                self.send_response(answer.status_code)
                for name in ("content-type", "content-security-policy"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(part)
                    self.wfile.flush()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *words: object) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except (OSError, httpx2.HTTPError):  # the browser or the server has ended
                self.close_connection = True

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}/llm/"
    finally:
        proxy.shutdown()
        proxy.server_close()


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs Chromium and its driver")
def test_the_page_works_below_a_path(tmp_path: Path) -> None:
    with (
        serving(tmp_path, "parallel=pp2", "parallel.threads=1") as server,
        proxy_of(server.url) as url,
        browsing(tmp_path) as browser,
    ):
        browser.open(url)
        browser.until("document.getElementById('model').textContent === 'shipped'")
        browser.run("document.getElementById('max-tokens').value = 300; document.getElementById('send').click()")
        browser.until("/^[0-9]+ tokens/.test(document.getElementById('answer-note').innerText)")
        browser.until("Number(document.getElementById('rate').textContent) > 0")
        browser.until("document.querySelectorAll('#stages > *').length === 2")
        browser.run("document.getElementById('explain').click()")
        browser.until("document.querySelector('#explained a') !== null")
        link = browser.run("return document.querySelector('#explained a').href")
        assert link.startswith(f"{url}recordings/")
        assert httpx2.get(link).status_code == 200
