"""
A stand-in for the Hub on 127.0.0.1: the requests by which huggingface_hub's own client pushes and downloads, without
Xet and LFS, so all files are sent in the commit.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sysconfig
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit


TOKEN, USER = "hf_writer", "someone"


class Repo:
    def __init__(self, private: bool):
        self.private, self.files, self.messages = private, {}, []

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr([*self.files.items(), self.messages]).encode()).hexdigest()


class StandInHub:
    """The server, as a context manager, with `repos` by name, `requests` (method and path of each), and `fault`, which
    gets both and may return the status of a refusal."""

    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandInHub

    def log_message(self, *args):
        pass

    def _handle(self):
        path, hub = unquote(urlsplit(self.path).path), self.hub
        hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        writes = self.command == "POST" or "whoami" in path
        if status := hub.fault(self.command, path):
            return self._answer({"error": "a fault of the stand-in"}, status)
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid username or password."}, 401)
        if "whoami" in path:
            return self._answer({"name": USER, "type": "user", "orgs": []})
        if "validate-yaml" in path:
            return self._answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+?)(?:/(\w+)(?:/([^/]+)(?:/(.+))?)?)?", path)
        if match is None or (repo := hub.repos.get(match[1])) is None:
            return self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return getattr(self, f"_{match[2] or 'revision'}")(repo, match[4], body)

    do_GET = do_HEAD = do_POST = _handle

    def _answer(self, content, status=200, headers=None):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _create(self, asked):
        repo_id = f"{asked.get('organization') or USER}/{asked['name']}"
        if not repo_id.startswith(f"{USER}/"):
            return self._answer({"error": f"You may not create {repo_id}"}, 403)
        is_new = repo_id not in self.hub.repos
        self.hub.repos.setdefault(repo_id, Repo(asked.get("visibility") == "private"))
        return self._answer({"url": f"{self.hub.endpoint}/{repo_id}"}, 200 if is_new else 409)

    def _revision(self, repo, path, body):
        siblings = [{"rfilename": path} for path in repo.files]
        self._answer({"id": "", "sha": repo.commit, "private": repo.private, "siblings": siblings, "tags": []})

    def _tree(self, repo, folder, body):
        self._answer([{"type": "file", "path": p, "size": len(c), "oid": ""} for p, c in repo.files.items()])

    def _preupload(self, repo, path, body):
        files = json.loads(body)["files"]
        self._answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})

    def _commit(self, repo, path, body):
        for operation in map(json.loads, body.splitlines()):
            value = operation["value"]
            if operation["key"] == "header":
                repo.messages.append(value["summary"])
            elif operation["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            else:
                del repo.files[value["path"]]
        self._answer({"commitOid": repo.commit, "commitUrl": f"{self.hub.endpoint}/x/x/commit/{repo.commit}"})

    def _resolve(self, repo, path, body):
        if path not in repo.files:
            return self._answer({}, 404, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha1(repo.files[path]).hexdigest()
        return self._answer(repo.files[path], headers={"X-Repo-Commit": repo.commit, "ETag": f'"{etag}"'})


def local_files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def pushed_files(hub: StandInHub, repo_id: str = "someone/policy") -> dict[str, bytes]:
    return dict(hub.repos[repo_id].files)


def fails_at(part: str, status: int) -> Callable[[str, str], int | None]:
    """A fault of the requests with `part` in method or path."""
    return lambda method, path: status if part in f"{method} {path}" else None


def run_hf(hub: StandInHub, home: Path, *arguments: str, **options) -> None:
    """Run the command `hf` in a process whose Hub is the stand-in."""
    program = os.path.join(sysconfig.get_path("scripts"), "hf")
    env = {**os.environ, **environment(hub, home)}
    done = subprocess.run([program, *arguments], env=env, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr


def environment(hub: StandInHub, home: Path) -> dict[str, str]:
    """Environment of a process whose Hub is the stand-in."""
    online = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(home), **online}


def use(hub: StandInHub, monkeypatch, home: Path) -> None:
    """Makes it the Hub of this process, which has imported huggingface_hub with other settings."""
    import time

    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _http
    from transformers.utils import hub as transformers_hub

    for name, value in {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(transformers_hub, "_hf_api", None)
    # PEFT has imported functions of it.
    monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # The client waits a second and more before it tries again.
    clock = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    monkeypatch.setattr(_http, "time", SimpleNamespace(**(clock | {"sleep": lambda seconds: None})))
