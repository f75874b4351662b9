"""
A server for trainers to lose: what `trl-qarl vllm-serve` starts, without vLLM, and failing on command.

The gate is the real one; behind it is an engine that reads what a learner publishes, insists on complete publications,
and answers with completions that are a function of the prompt and of every byte it holds. Whatever goes wrong with the
weights therefore shows in the next completions, and in the weights that are trained on them.

It is started with the command line of the real server. `CAMPAIGN` in the environment names a folder in which it notes
its calls, and which may hold `faults.json`, a list of such as

    {"endpoint": "/update_weights", "step": 2, "call": 3, "kind": "hang", "late": false}

On the third request to that endpoint, counted from the beginning of the trainer's second step, the server fails:
before the request has an effect, or `late`, after it. The next fault of the list waits until this one has happened,
and counts from there. `"endpoint": "*"` counts all requests, and a worker's method is an endpoint of its own. A fault
of kind `"answer"` is an answer to `/v1/completions` that is valid and makes no sense, which [`ANSWERS`] makes of the
right one. With `LIAR` in the environment it is somebody else's process, without gate and secret. Standard library
only, so that it starts at once.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from trl_qarl._version import __version__
from trl_qarl.vllm_plugin.gate import PublicationGate
from trl_qarl.wire.handshake import TOKEN_FILE_VARIABLE
from trl_qarl.wire.protocol import SESSION_HEADER, SESSION_PATH, STATE_PATH


def change_token(token):
    """A change of the third token of the second completion, and of what its log-prob says that it is of."""

    def change(choices):
        choice, logprobs = choices[1], choices[1]["logprobs"]
        choice["token_ids"][2] = token
        logprobs["tokens"][2] = f"token_id:{token}"
        logprobs["top_logprobs"][2] = {f"token_id:{token}": logprobs["token_logprobs"][2]}

    return change


def change_logprob(value):
    """A change of the log-prob of the third token of the second completion."""

    def change(choices):
        logprobs = choices[1]["logprobs"]
        logprobs["token_logprobs"][2] = value
        logprobs["top_logprobs"][2] = {logprobs["tokens"][2]: value}

    return change


def shorten(choice, length: int, also_tokens: bool):
    names = ("tokens", "token_logprobs", "top_logprobs")
    choice["logprobs"] |= {name: choice["logprobs"][name][:length] for name in names}
    if also_tokens:
        choice["token_ids"] = choice["token_ids"][:length]


def repeat_tokens(choices):
    """200 more tokens, with their log-probs."""
    choice = choices[1]
    for row in (choice["token_ids"], *(choice["logprobs"][name] for name in choice["logprobs"])):
        row.extend(row[-1:] * 200)


def name_other_tokens(choices):
    logprobs = choices[1]["logprobs"]
    logprobs["tokens"] = [
        f"token_id:{(int(token.removeprefix('token_id:')) + 1) % 260}" for token in logprobs["tokens"]
    ]
    values = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    logprobs["top_logprobs"] = [{token: value} for token, value in values]


def name_another_prompt(choices):
    choices[0]["prompt_token_ids"] = choices[0]["prompt_token_ids"][::-1] + [5]


def drop_logprobs(choices):
    for choice in choices:
        choice["logprobs"] = None


def cut_short(choices):
    """As vLLM's `/pause?mode=abort` does, with status 200."""
    shorten(choices[1], 2, also_tokens=True)
    choices[1]["finish_reason"] = "abort"


ANSWERS = {
    "one completion fewer": lambda choices: choices.pop(),
    "one completion more": lambda choices: choices.append(choices[-1]),
    "no completions": lambda choices: choices.clear(),
    "token 99999": change_token(99999),
    "token 260, the first outside the vocabulary": change_token(260),
    "token -7": change_token(-7),
    "token '12'": change_token("12"),
    "token 12.5": change_token(12.5),
    "no tokens": lambda choices: shorten(choices[1], 0, also_tokens=True),
    "200 tokens more": repeat_tokens,
    "no log-probs": drop_logprobs,
    "log-prob null": change_logprob(None),
    "log-prob NaN": change_logprob(float("nan")),
    "log-prob inf": change_logprob(float("inf")),
    "log-prob -inf": change_logprob(float("-inf")),
    "log-prob -9999, as vLLM writes -inf": change_logprob(-9999.0),
    "log-prob 3": change_logprob(3.0),
    "one log-prob fewer": lambda choices: shorten(choices[1], -1, also_tokens=False),
    "log-probs of other tokens": name_other_tokens,
    "another prompt's ids": name_another_prompt,
    "a completion cut short": cut_short,
}
"""Changes of an answer's choices, in place, that make it invalid."""


class Faults:
    """Faults and their moments: each happens once, after the one before it."""

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / "faults.json"
        self.faults = json.loads(path.read_text()) if path.is_file() else []
        self.counts: dict[str, int] = {}

    def on_start(self) -> None:
        """Notes the start, and dies as often as the folder's `deaths` says once the first fault has happened."""
        with (self.folder / "starts").open("a") as file:
            file.write(f"{os.getpid()}\n")
        deaths = self.folder / "deaths"
        if deaths.exists() and self.num_fired():
            left = int(deaths.read_text())
            if left:
                deaths.write_text(str(left - 1))
                sys.exit("The stand-in was told to die while it starts.")

    def num_fired(self) -> int:
        return len(list(self.folder.glob("fired-*")))

    def take(self, endpoint: str) -> dict | None:
        """The fault that this request meets, if any."""
        with (self.folder / "calls").open("a+") as file:
            file.write(endpoint + "\n")
            file.seek(0)
            step = file.read().split().count("step")
        num_fired = self.num_fired()
        if num_fired >= len(self.faults):
            return None
        fault = self.faults[num_fired]
        if fault["endpoint"] not in (endpoint, "*") or fault.get("step", 0) > step:
            return None
        key = f"{num_fired} {fault['endpoint']}"
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] < fault["call"]:
            return None
        (self.folder / f"fired-{num_fired}").write_text(endpoint)
        return fault


class Engine:
    """Holds the bytes of the published tensors; its answers depend on all of them."""

    def __init__(self, argv: list[str]):
        options = dict(zip(argv, argv[1:], strict=False))
        self.model = Path(options["--model"])
        self.dtype = options["--dtype"]
        overrides = json.loads(options.get("--hf-overrides", "{}"))
        self.quantization_config = overrides.get("quantization_config", {})
        self.backend = json.loads(options["--weight-transfer-config"])["backend"]
        self.directory = Path(os.environ["TRL_QARL_TRANSFER_DIR"])
        self.held: dict[str, str] = {}
        self.published: dict[str, str] = {}
        self.arrived: set[str] = set()
        self.expected: dict[str, str] | None = None
        self.is_updating = False
        self.weight_version: str | None = None
        self.running = asyncio.Event()
        self.running.set()

    def qarl_describe(self):
        return {
            "trl_qarl": __version__,
            "quantization_config": self.quantization_config,
            "dtype": self.dtype,
            "logprobs_mode": "processed_logprobs",
            "tensor_parallel_size": 1,
            "device": "cpu",
            "backend": self.backend,
            "published": len(self.published),
            "kernels": {},
        }

    def qarl_begin(self):
        if self.is_updating:
            # As vLLM's reload: what an update has touched and not finished is gone.
            self.held, self.published, self.is_updating = {}, {}, False

    def qarl_clear_cache(self):
        pass

    def qarl_finish(self, fingerprints):
        self.expected = fingerprints

    def start_weight_update(self, body):
        if self.is_updating:
            raise RuntimeError("An update is in progress.")
        self.is_updating, self.arrived, self.expected = True, set(), None

    def update_weights(self, body):
        if not self.is_updating:
            raise RuntimeError("No update is in progress.")
        data = (self.directory / body["update_info"]["file"]).read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            kind = f"{name} {entry['dtype']} {entry['shape']}".encode()
            self.held[name] = hashlib.sha256(kind + data[8 + size + begin : 8 + size + end]).hexdigest()
            self.arrived.add(name)

    def finish_weight_update(self, body):
        if not self.is_updating or self.expected is None:
            raise RuntimeError("Nothing to finish.")
        self.is_updating = False
        kept = self.held.keys() - self.arrived
        problems = sorted(self.expected.keys() ^ self.held.keys())
        problems += sorted(name for name in kept if self.published.get(name) != self.expected.get(name))
        if problems:
            self.held, self.published = {}, {}
            raise RuntimeError(f"The published weights are not the learner's: {problems[:5]}")
        self.published, self.weight_version = self.expected, body["weight_version"]

    async def complete(self, body):
        await self.running.wait()
        if "prompt_logprobs" in body:
            # Log-probs of a fixed text, about those of a model that knows nothing.
            entries = [{str(token): {"logprob": -5.5}} for token in body["prompt"]]
            return {"choices": [{"prompt_logprobs": [None, *entries[1:]]}]}
        weights = json.dumps(sorted(self.held.items()))
        choices = []
        for prompt in body["prompt"]:
            for number in range(body["n"]):
                seed = hashlib.sha256(f"{weights} {prompt} {number}".encode()).digest()
                draw = random.Random(seed)
                ids = [draw.randrange(4, 260) for _ in range(draw.randrange(4, body["max_tokens"] + 1))]
                logprobs = [-5.5 - draw.randrange(64) / 512 for _ in ids]
                tokens = [f"token_id:{token}" for token in ids]
                tops = [{token: value} for token, value in zip(tokens, logprobs, strict=True)]
                choices.append(
                    {
                        "prompt_token_ids": prompt,
                        "token_ids": ids,
                        "finish_reason": "stop",
                        "logprobs": {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops},
                    }
                )
        return {"choices": choices, "weight_version": self.weight_version}

    async def answer(self, path: str, body: dict) -> tuple[int, dict]:
        try:
            if path == "/collective_rpc":
                kwargs = body.get("kwargs", {})
                reply = {"call": kwargs.pop("call", ""), "replica": 0}
                return 200, {"results": [reply | {"value": getattr(self, body["method"])(**kwargs)}]}
            if path == "/pause":
                self.running.clear()
            elif path == "/resume":
                self.running.set()
            elif path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
                getattr(self, path[1:])(body)
            elif path == "/reset_prefix_cache":
                return 200, {"success": True}
            elif path == "/weight_info":
                return 200, {"weight_version": self.weight_version}
            elif path == "/v1/models":
                return 200, {"data": [{"id": str(self.model)}]}
            elif path == "/v1/completions":
                return 200, await self.complete(body)
            elif path != "/health":
                return 404, {"error": f"no {path} here"}
        except Exception as error:
            return 500, {"error": f"{type(error).__name__}: {error}"}
        return 200, {}

    async def __call__(self, scope, receive, send):
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        status, content = await self.answer(scope["path"], json.loads(body or b"{}"))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})


class Liar:
    """In place of the gate: believes everybody, answers everything, proves nothing, and notes what it is told."""

    def __init__(self, engine: Engine, folder: Path):
        self.engine, self.log = engine, folder / "told to the liar"

    async def __call__(self, scope, receive, send):
        headers = dict(scope["headers"])
        with self.log.open("a") as file:
            file.write(json.dumps([scope["path"], SESSION_HEADER.encode() in headers]) + "\n")
        if scope["path"] not in (STATE_PATH, SESSION_PATH):
            return await self.engine(scope, receive, send)
        content = {"instance": "liar", "holder": None, "nonce": "0" * 32, "session": "0" * 32, "proof": "0" * 64}
        content |= {"transfer_dir": str(self.engine.directory), "token_file": os.environ.get(TOKEN_FILE_VARIABLE)}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(content).encode() + b"\n"})


class Connection:
    """HTTP/1.1 as far as `requests` speaks it, with the means to fail in the middle."""

    def __init__(self, server: "Server", reader, writer):
        self.server, self.reader, self.writer = server, reader, writer

    async def serve(self):
        try:
            while await self.serve_request():
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writer.close()

    async def serve_request(self) -> bool:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = [tuple(part.strip() for part in line.split(":", 1)) for line in head[1:] if line]
        headers = [(name.lower().encode(), value.encode()) for name, value in headers]
        body = await self.reader.readexactly(int(dict(headers).get(b"content-length", 0)))
        path, _, query = target.partition("?")
        endpoint = path
        if path == "/collective_rpc":
            endpoint = json.loads(body)["method"]
        fault = self.server.faults.take(endpoint)
        is_late = fault is not None and fault.get("late", False)
        if fault is not None and not is_late and await self.fail(fault):
            return False
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
        scope |= {"root_path": "", "client": ("127.0.0.1", 1)}
        # Nothing follows on the connection of a session. Of others, this would take the first byte of the next
        # request.
        ended_by_peer = self.reader.read(1) if path == SESSION_PATH else asyncio.sleep(1e9)
        request, gone = [body], asyncio.ensure_future(ended_by_peer)

        async def receive():
            if request:
                return {"type": "http.request", "body": request.pop(), "more_body": False}
            await gone
            return {"type": "http.disconnect"}

        status, is_chunked, ended = 0, False, False

        async def send(message):
            nonlocal status, is_chunked, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                return
            if is_late and await self.fail(fault):
                ended = True
                raise ConnectionError
            more = message.get("more_body", False)
            content = message.get("body", b"")
            if fault is not None and fault["kind"] == "answer":
                answer = json.loads(content)
                ANSWERS[fault["answer"]](answer["choices"])
                content = json.dumps(answer).encode()
            if not is_chunked:
                length = "Transfer-Encoding: chunked" if more else f"Content-Length: {len(content)}"
                self.writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{length}\r\n\r\n".encode()
                )
                is_chunked = more
            if is_chunked:
                content = b"%x\r\n%s\r\n" % (len(content), content) + (b"" if more else b"0\r\n\r\n")
            self.writer.write(content)
            await self.writer.drain()

        try:
            await self.server.gate(scope, receive, send)
        finally:
            gone.cancel()
        return not ended and not is_chunked

    async def fail(self, fault) -> bool:
        """Fail the request; true where nothing more is to be sent."""
        kind = fault["kind"]
        if kind in ("500", "400"):
            content = b'{"error": "The stand-in was told to fail."}'
            head = f"HTTP/1.1 {kind} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            self.writer.write(head.encode() + content)
            await self.writer.drain()
            return True
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind in ("garbage", "truncated"):
            length = 7 if kind == "garbage" else 70
            self.writer.write(f"HTTP/1.1 200 X\r\nContent-Length: {length}\r\n\r\n".encode() + b"<html/>")
            await self.writer.drain()
            return True
        if kind == "hang":
            # Until the client gives up.
            await self.reader.read()
            return True
        if kind in ("reset", "refuse"):
            if kind == "refuse":
                await self.server.refuse_for(fault.get("seconds", 0.5))
            self.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            self.writer.transport.abort()
            return True
        if kind == "answer":
            # Not now, but when the right one is there.
            return False
        if kind == "signal":
            threading.Thread(target=send_signal, args=(fault,), daemon=True).start()
            return False
        raise ValueError(f"unknown fault {kind!r}")


def send_signal(fault) -> None:
    """A signal some time after a request; what SIGSTOP stops, goes on after a second."""
    target = os.getpid() if fault["target"] == "server" else os.getppid()
    number = signal.Signals[fault["signal"]]
    time.sleep(fault["seconds"])
    if number == signal.SIGSTOP:
        # A process of its own, which a stopped one cannot be woken without.
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {target}"])
    with contextlib.suppress(ProcessLookupError):
        os.kill(target, number)


class Server:
    def __init__(self, argv: list[str], folder: Path):
        options = dict(zip(argv, argv[1:], strict=False))
        self.port = int(options["--port"])
        self.faults = Faults(folder)
        self.gate = Liar(Engine(argv), folder) if "LIAR" in os.environ else PublicationGate(Engine(argv))
        self.listener = None

    async def listen(self):
        self.listener = await asyncio.start_server(
            lambda reader, writer: Connection(self, reader, writer).serve(), "127.0.0.1", self.port, limit=2**24
        )

    async def refuse_for(self, seconds: float):
        """Closes the door for new connections and opens it again later."""
        self.listener.close()
        asyncio.get_running_loop().call_later(seconds, lambda: asyncio.ensure_future(self.listen()))

    async def run(self):
        self.faults.on_start()
        await self.listen()
        await asyncio.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    asyncio.run(Server(sys.argv[1:], Path(os.environ["CAMPAIGN"])).run())
