"""A model by name: the cache without a connection, the download, and four messages for what goes wrong."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub.constants
import pytest
from _runs import arguments, chats, make_model, megatrain, write_rows

from megatrain.errors import UserError
from megatrain.hub import find_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download of one public repository takes; ``status`` and ``code`` make it refuse."""

    files: ClassVar[dict[str, bytes]] = {}
    refusal: ClassVar[tuple[int, str] | None] = None
    asked: ClassVar[list[str]] = []

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        self.asked.append(self.path)
        if self.refusal:
            status, code = self.refusal
            self._send(status, b"{}", body, {"X-Error-Code": code})
        elif self.path.startswith("/api/models/owner/model/tree/"):
            entries = [
                {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in self.files.items()
            ]
            self._send(200, json.dumps(entries).encode(), body)
        elif self.path.startswith("/api/models/owner/model"):
            siblings = [{"rfilename": n} for n in self.files]
            info = {"id": "owner/model", "modelId": "owner/model", "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(info).encode(), body)
        elif (name := self.path.rpartition("/")[2]) not in self.files:
            self._send(404, b"", body)
        else:
            tag = hashlib.sha1(self.files[name]).hexdigest()
            self._send(200, self.files[name], body, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


def use_endpoint(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    endpoint = f"http://127.0.0.1:{port}"
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    use_endpoint(monkeypatch, server.server_port)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    Hub.files, Hub.refusal, Hub.asked = {}, None, []
    yield Hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def cached(folder: Path, model: Path) -> Path:
    """The layout of the hub's cache with one complete revision, as other programs leave it."""
    repository = folder / "models--owner--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file in model.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    return snapshot


def find(name: str = "owner/model", revision: str | None = None) -> Path:
    return find_model(name, revision, False, lambda *_: None)


@pytest.mark.usefixtures("no_network")
def test_a_complete_cached_revision_is_used_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = cached(tmp_path / "cache", make_model(tmp_path / "model"))
    assert find() == snapshot
    assert find(revision=COMMIT) == snapshot
    write_rows(tmp_path / "chats.jsonl", chats(4))
    result = megatrain("train", *arguments(tmp_path, "model.name_or_path=owner/model"))
    assert result.exit_code == 0, result.output
    assert "model   model · " in result.stdout


@pytest.mark.usefixtures("no_network")
def test_offline_without_a_copy_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"(?s)owner/model: no complete copy.*HF_HUB_OFFLINE is set.*hf download"):
        find()


def test_only_what_training_reads_is_fetched(tmp_path: Path, hub: type[Hub]) -> None:
    model = make_model(tmp_path / "model")
    wanted = {f.name: f.read_bytes() for f in model.iterdir()}
    hub.files = wanted | dict.fromkeys(["README.md", "pytorch_model.bin", "modeling.py", "model.gguf"], b"x")
    told: list[tuple[str, int, int]] = []
    folder = find_model("owner/model", None, False, lambda *args: told.append(args))
    assert {f.name for f in folder.iterdir()} == set(wanted)
    assert (folder / "model.safetensors").read_bytes() == wanted["model.safetensors"]
    assert told[-1][0] == "downloading"
    assert told[-1][1] == told[-1][2] == sum(map(len, wanted.values()))
    hub.asked.clear()
    assert find() == folder
    assert hub.asked == []


def test_an_incomplete_copy_is_completed(tmp_path: Path, hub: type[Hub]) -> None:
    model = make_model(tmp_path / "model")
    hub.files = {f.name: f.read_bytes() for f in model.iterdir()}
    snapshot = cached(tmp_path / "cache", model)
    (snapshot / "model.safetensors").unlink()
    assert (find() / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", r"(?s)owner/model: the repository is gated.*hf auth login"),
        (401, "RepoNotFound", r"(?s)owner/model: the repository is private, or does not exist.*hf auth login"),
        (404, "RepoNotFound", r"(?s)owner/model: no such repository.*check owner and name"),
        (404, "RevisionNotFound", r"(?s)model.revision: 'v9' is not a branch, tag or commit of owner/model"),
        (500, "", r"(?s)owner/model: .*(refused|reached)"),
    ],
)
def test_each_refusal_has_its_message(hub: type[Hub], status: int, code: str, message: str) -> None:
    hub.refusal = (status, code)
    with pytest.raises(UserError, match=message):
        find(revision="v9")


def test_no_network_has_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    use_endpoint(monkeypatch, port)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"(?s)owner/model: not in the cache.*no network.*hf download owner/model"):
        find()


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "/nowhere", "~/model", "spa ce/x"])
def test_what_looks_like_a_path_is_not_asked_for(name: str) -> None:
    with pytest.raises(UserError, match="no such folder"):
        find(name)
