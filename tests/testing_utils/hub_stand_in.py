"""
A stand-in for the Hub on 127.0.0.1: as much of its HTTP interface as huggingface_hub's own client uses to push and
download.

Blobs lie on disk under their SHA-256. Xet is not spoken; the client has to be told (HF_HUB_DISABLE_XET=1).
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
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import yaml


TOKEN, USER = "hf_writer", "someone"


@dataclass
class Repo:
    private: bool
    # Commit id to its files, `{path: SHA-256}`, and branch to commit id.
    commits: dict[str, dict[str, str]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class StandInHub:
    """
    The server, as a context manager.

    Attributes:
        endpoint (`str`):
            What HF_ENDPOINT has to be.
        repos (`dict[str, Repo]`):
            Its repositories.
        requests (`list[str]`):
            Method and path of each request.
        fault (`Callable[[str, str], int | str | None]`):
            Called with method and path; a number is the status of the answer, `"drop"` closes the connection half-way
            through the body.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.fault: Callable[[str, str], int | str | None] = lambda method, path: None
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()

    def blob(self, oid: str) -> Path:
        return self.folder / oid

    def add_blob(self, content: bytes) -> str:
        oid = hashlib.sha256(content).hexdigest()
        self.blob(oid).write_bytes(content)
        return oid

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Content of a branch."""
        repo = self.repos[repo_id]
        return {path: self.blob(oid).read_bytes() for path, oid in repo.commits[repo.branches[revision]].items()}

    def commit(self, repo: Repo, branch: str, files: dict[str, str], message: str) -> str:
        commit_id = hashlib.sha1(f"{branch}{len(repo.commits)}{sorted(files.items())}".encode()).hexdigest()
        repo.commits[commit_id], repo.branches[branch] = files, commit_id
        repo.messages.append(message)
        return commit_id


def local_files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def pushed_files(hub: StandInHub, repo_id: str = "someone/policy", revision: str = "main") -> dict[str, bytes]:
    """Files of a repository but for the one that the Hub itself adds."""
    files = hub.files(repo_id, revision)
    del files[".gitattributes"]
    return files


def fails_at(part: str, how: int | str) -> Callable[[str, str], int | str | None]:
    """A fault of the requests with `part` in method or path."""
    return lambda method, path: how if part in f"{method} {path}" else None


def run_hf(hub: StandInHub, home: Path, *arguments: str) -> None:
    """Run the command `hf` in a process whose Hub is the stand-in."""
    program = os.path.join(sysconfig.get_path("scripts"), "hf")
    env = {**os.environ, **environment(hub, home)}
    done = subprocess.run([program, *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".pt", ".bin", ".png"))


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Refused(Exception):
    def __init__(self, status: int, code: str | None = None, message: str | None = None):
        super().__init__(status)
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandInHub

    # Method, pattern of the path, name of the method here, whether it writes.
    ROUTES = (
        ("GET", r"/api/whoami-v2", "whoami", True),
        ("POST", r"/api/validate-yaml", "validate_yaml", False),
        ("POST", r"/api/repos/create", "create_repo", True),
        ("GET", r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", "info", False),
        ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.+))?", "tree", False),
        ("POST", r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", "create_branch", True),
        ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", "preupload", True),
        ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", "commit", True),
        ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch", True),
        ("PUT", r"/lfs/([0-9a-f]{64})", "lfs_put", False),
        ("GET", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve", False),
    )

    def log_message(self, *args):
        pass

    def _handle(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        fault = self.hub.fault(self.command, path)
        if fault == "drop":
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self._read_body()
        try:
            if fault is not None:
                raise _Refused(fault, message="A fault of the stand-in")
            for method, pattern, name, writes in self.ROUTES:
                match = re.fullmatch(pattern, path)
                if match and method == self.command.replace("HEAD", "GET"):
                    if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                        raise _Refused(401, message="Invalid username or password.")
                    with self.hub.lock:
                        getattr(self, name)(body, *match.groups())
                    return
            raise _Refused(404)
        except _Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            self._answer({"error": refused.message}, refused.status, {k: v for k, v in headers.items() if v})

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, content, status: int = 200, headers: dict[str, str] | None = None):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _repo(self, repo_id: str) -> Repo:
        repo = self.hub.repos.get(repo_id)
        if repo is None or (repo.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            raise _Refused(404, "RepoNotFound", "Repository not found")
        return repo

    def _commit_id(self, repo: Repo, revision: str) -> str:
        commit_id = repo.branches.get(revision, revision)
        if commit_id not in repo.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit_id

    def whoami(self, body):
        self._answer({"name": USER, "type": "user", "orgs": []})

    def validate_yaml(self, body):
        # A failed request is an error of the client.
        assert isinstance(yaml.safe_load(json.loads(body)["content"].split("---")[1]), dict)
        self._answer({"errors": [], "warnings": []})

    def create_repo(self, body):
        asked = json.loads(body)
        repo_id = f"{asked['organization'] or USER}/{asked['name']}"
        if not repo_id.startswith(f"{USER}/"):
            raise _Refused(403, message=f"You don't have the rights to create a model under {repo_id.split('/')[0]}")
        url = {"url": f"{self.hub.endpoint}/{repo_id}"}
        if repo_id in self.hub.repos:
            self._answer({**url, "error": "You already created this model repo"}, 409)
            return
        repo = self.hub.repos[repo_id] = Repo(asked.get("visibility") == "private")
        files = {".gitattributes": self.hub.add_blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")}
        self.hub.commit(repo, "main", files, "initial commit")
        self._answer(url)

    def info(self, body, repo_id, revision):
        repo = self._repo(repo_id)
        commit_id = self._commit_id(repo, revision or "main")
        siblings = [{"rfilename": path} for path in repo.commits[commit_id]]
        self._answer({"id": repo_id, "sha": commit_id, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, body, repo_id, revision, folder):
        repo = self._repo(repo_id)
        rows = []
        for path, oid in repo.commits[self._commit_id(repo, revision)].items():
            if folder is None or path.startswith(f"{folder}/"):
                content = self.hub.blob(oid).read_bytes()
                row = {"type": "file", "path": path, "size": len(content), "oid": git_blob_id(content)}
                if is_lfs(path):
                    row["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
                rows.append(row)
        if folder is not None and not rows:
            raise _Refused(404, "EntryNotFound", f"{folder} does not exist")
        self._answer(rows)

    def create_branch(self, body, repo_id, branch):
        repo = self._repo(repo_id)
        if branch in repo.branches:
            raise _Refused(409, message="Reference already exists")
        repo.branches[branch] = repo.branches["main"]
        self._answer({})

    def preupload(self, body, repo_id, revision):
        repo = self._repo(repo_id)
        held = repo.commits[self._commit_id(repo, revision)]
        rows = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            row = {"path": path, "uploadMode": "lfs" if is_lfs(path) else "regular", "shouldIgnore": False}
            if path in held:
                row["oid"] = held[path] if is_lfs(path) else git_blob_id(self.hub.blob(held[path]).read_bytes())
            rows.append(row)
        self._answer({"files": rows})

    def lfs_batch(self, body, repo_id):
        self._repo(repo_id)
        rows = []
        for item in json.loads(body)["objects"]:
            row = {"oid": item["oid"], "size": item["size"]}
            if not self.hub.blob(item["oid"]).is_file():
                row["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{item['oid']}"}}
            rows.append(row)
        self._answer({"transfer": "basic", "objects": rows})

    def lfs_put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, message="The content is not what its name says")
        self.hub.add_blob(body)
        self._answer(b"")

    def commit(self, body, repo_id, revision):
        repo = self._repo(repo_id)
        files = dict(repo.commits[self._commit_id(repo, revision)])
        message = ""
        for line in body.splitlines():
            key, value = (operation := json.loads(line))["key"], operation["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = self.hub.add_blob(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                if not self.hub.blob(value["oid"]).is_file():
                    raise _Refused(400, message=f"No content was uploaded for {value['path']}")
                files[value["path"]] = value["oid"]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise _Refused(400, message=f"Unknown operation {key}")
        commit_id = self.hub.commit(repo, revision, files, message)
        self._answer({"commitOid": commit_id, "commitUrl": f"{self.hub.endpoint}/{repo_id}/commit/{commit_id}"})

    def resolve(self, body, repo_id, revision, path):
        repo = self._repo(repo_id)
        commit_id = self._commit_id(repo, revision)
        oid = repo.commits[commit_id].get(path)
        if oid is None:
            raise _Refused(404, "EntryNotFound", f"{path} does not exist")
        content = self.hub.blob(oid).read_bytes()
        etag = oid if is_lfs(path) else git_blob_id(content)
        self._answer(content, headers={"X-Repo-Commit": commit_id, "ETag": f'"{etag}"'})


def environment(hub: StandInHub, home: Path) -> dict[str, str]:
    """Environment of a process whose Hub is the stand-in."""
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def use(hub: StandInHub, monkeypatch, home: Path) -> None:
    """Makes it the Hub of this process, which has imported huggingface_hub with other settings."""
    import time

    from huggingface_hub import constants
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
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # The client waits a second and more before it tries again.
    clock = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    monkeypatch.setattr(_http, "time", SimpleNamespace(**(clock | {"sleep": lambda seconds: None})))
