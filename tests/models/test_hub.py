"""Names on the Hugging Face Hub: from a hub that serves files here, from the cache, and from neither."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig, is_hub_name
from gapless.models.find_weights import find_weights
from gapless.models.hub import of_cache_folder
from tests.support.tiers import HANGS_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"tensors",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.safetensors": b"the same again",
    "README.md": b"words",
}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a snapshot needs, for one model."""

    fetched: list[str]

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/we/small/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self._send(200, json.dumps(rows).encode(), send)
        elif path.startswith("/api/models/we/small"):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "we/small", "modelId": "we/small", "sha": COMMIT, "siblings": siblings, "private": False}
            self._send(200, json.dumps(info).encode(), send)
        elif path.startswith("/we/small/resolve/") and (name := path.split("/", 5)[5]) in FILES:
            if send:
                type(self).fetched.append(name)
            self._send(200, FILES[name], send)
        else:
            self._send(404, b"", send, {"X-Error-Code": "RepoNotFound"})

    def _send(self, code: int, data: bytes, send: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        etag = hashlib.sha1(data).hexdigest()
        every = {"Content-Length": str(len(data)), "ETag": f'"{etag}"', "X-Repo-Commit": COMMIT} | (headers or {})
        for key, value in every.items():
            self.send_header(key, value)
        self.end_headers()
        if send:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.fetched = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


FIND = """
import sys
from gapless.conf.errors import ConfigError
from gapless.models.hub import snapshot
try:
    print(snapshot(sys.argv[1], None, tensors=sys.argv[2] == "tensors"))
except ConfigError as error:
    print("refused:", error)
"""


def find(name: str, endpoint: str, home: Path, kind: str = "tensors") -> str:
    """Look for a model in a process of its own, for the library reads its environment once."""
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PATH": "", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", FIND, name, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=True)
    return done.stdout.strip()


def test_a_name_is_fetched_once_and_only_what_is_read(hub: str, tmp_path: Path) -> None:
    found = Path(find("we/small", hub, tmp_path))
    assert sorted(Hub.fetched) == ["config.json", "model.safetensors"]
    assert (found / "config.json").read_bytes() == FILES["config.json"]
    nobody = "http://127.0.0.1:9"
    assert find("we/small", nobody, tmp_path) == str(found)  # without the hub, from the cache
    assert of_cache_folder(tmp_path / "hub" / "models--we--small") == found
    said = find("we/other", nobody, tmp_path)
    assert said.startswith(f"refused: model.weights=we/other: no such folder, not in the cache {tmp_path / 'hub'}, and")
    assert "\n" not in said


def test_a_simulation_fetches_no_weights_and_an_unknown_name_is_refused(hub: str, tmp_path: Path) -> None:
    find("we/small", hub, tmp_path, "config")
    assert Hub.fetched == ["config.json"]
    assert find("we/unknown", hub, tmp_path).startswith(
        "refused: model.weights=we/unknown: no such folder, and no such"
    )


def test_a_folder_of_the_cache_is_its_newest_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "models--we--small"
    for name in ("a", "b"):
        (folder / "snapshots" / name).mkdir(parents=True)
        (folder / "snapshots" / name / "config.json").write_text("{}")
        (folder / "snapshots" / name / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="give one of the folders in"):
        find_weights(ModelConfig(weights=str(folder)))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("b")
    assert find_weights(ModelConfig(weights=str(folder))) == folder / "snapshots" / "b"


def test_what_is_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "we" / "here").mkdir(parents=True)
    assert is_hub_name("we/small")
    assert [is_hub_name(each) for each in ("we/here", "small", "./we/small", "/we/small", "a/b/c", "we/x.gguf")] == [
        False
    ] * 6
