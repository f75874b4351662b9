"""Training through a real vLLM server: its gate, its session, and what happens when either side goes away."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests

from testing_utils import is_running, logged, make_tiny_model, make_vllm_trainer, path_without
from testing_utils.children import start
from testing_utils.web_servers import complete, wait_until
from trl_qarl.engines.client import QaRLClient
from trl_qarl.engines.server import ServerEngine
from trl_qarl.engines.server_process import free_port
from trl_qarl.sync.channels import FileChannel
from trl_qarl.vllm_plugin.gate import _GENERATING_PATHS, _HARMLESS_PATHS


pytest.importorskip("vllm")
# One server for all of them.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.xdist_group("server")]


class Server:
    """`trl-qarl vllm-serve` as a user would start it."""

    def __init__(self, directory: Path, *options: str):
        self.port, self.directory = free_port(), directory
        self.url = f"http://127.0.0.1:{self.port}"
        self.transfer_dir = directory / "transfer"
        self.token_file = self.transfer_dir / "token"
        self.log = directory / "server.log"
        command = [sys.executable, "-m", "trl_qarl.cli", "vllm-serve", "--model", make_tiny_model(directory, "qwen2")]
        command += ["--scheme", "w4a16", "--dtype", "float32", "--port", str(self.port), "--max-model-len", "128"]
        command += ["--transfer_dir", str(self.transfer_dir), *options]
        environment = os.environ | {"PYTHONPATH": path_without(directory)}
        with self.log.open("wb") as log:
            self.process = start(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        wait_until(self.answers, 900, self.log.read_text)
        self.first_answer, self.first_state = self.complete(), self.state()

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    def connect(self) -> QaRLClient:
        return QaRLClient(self.url)

    def close(self) -> None:
        """Have it refuse to generate, as before its first publication: an update is begun and given up."""
        client = self.connect()
        ServerEngine(client, FileChannel(client)).begin()
        client.close_session()
        self.wait_until_free()

    def state(self) -> dict:
        return requests.get(f"{self.url}/qarl/state").json()

    def complete(self) -> requests.Response:
        return complete(self.url)

    def wait_until_free(self) -> None:
        wait_until(lambda: self.state()["holder"] is None, 20, lambda: "the session outlives its trainer")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        # Set by an engine in this process; a server with it has no worker, whose queues a test looks at.
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
        server = Server(tmp_path_factory.mktemp("server"))
        yield server
        server.stop()


@pytest.fixture
def client(server):
    server.wait_until_free()
    client = server.connect()
    yield client
    client.close_session()
    server.wait_until_free()


@pytest.fixture
def make_trainer(server, tmp_path):
    """Makes trainers one after the other; the last one's session ends with the test."""
    sessions = []

    def make(**arguments):
        release()
        defaults = {
            "scheme": "w4a16",
            "vllm_mode": "server",
            "vllm_server_base_url": server.url,
            "vllm_server_timeout": 5,
        }
        trainer = make_vllm_trainer(tmp_path, "qwen2", **(defaults | arguments))
        sessions.append(trainer.vllm_generation.vllm_client)
        return trainer

    def release():
        while sessions:
            sessions.pop().close_session()
        server.wait_until_free()

    yield make
    release()


def test_a_new_server_answers_but_does_not_generate(server):
    assert server.first_answer.status_code == 503
    assert "published" in server.first_answer.json()["error"]
    assert server.first_state["is_open"] is False
    command = server.log.read_text()
    assert "Equivalent command:" in command and "vllm.entrypoints.openai.api_server" in command


def test_a_stranger_changes_nothing(server):
    """Every route that this server has, as the server itself lists them."""
    server.wait_until_free()
    server.close()
    before = server.state()
    assert server.token_file.stat().st_mode & 0o777 == 0o600
    routes = requests.get(f"{server.url}/openapi.json").json()["paths"]
    routes = {route for route, methods in routes.items() if "post" in methods}
    assert {"/collective_rpc", "/update_weights", "/pause", "/v1/completions"} <= routes
    calls = {"method": "update_environment_variables", "args": [{"LD_PRELOAD": "x"}], "trainer": "a stranger"}
    statuses = {route: requests.post(f"{server.url}{route}", json=calls).status_code for route in routes}
    everybodys = _GENERATING_PATHS | _HARMLESS_PATHS
    assert {route for route, status in statuses.items() if status not in (409, 503)} <= _HARMLESS_PATHS
    assert {route for route, status in statuses.items() if status == 409} == routes - everybodys
    for headers in ({}, {"Origin": "http://evil.example"}, {"X-QaRL-Session": "0" * 32}):
        for route in ("/qarl/session", "/collective_rpc", "/pause"):
            assert requests.post(f"{server.url}{route}", json=calls, headers=headers).status_code in (403, 409)
        assert requests.post(f"{server.url}/qarl/session", json=calls, headers=headers).status_code == 403
    assert server.state() == before


def test_training_publishes_and_agrees(server, make_trainer):
    trainer = make_trainer()
    trainer.train()
    assert max(logged(trainer, "mismatch/abs_logp_max")) < 1e-5
    assert logged(trainer, "rollout/weight_version") == [0, 2]
    assert server.complete().status_code == 200
    assert requests.get(f"{server.url}/weight_info").json()["weight_version"].startswith("2-")
    # But for the server's own mark.
    left = [path for path in server.transfer_dir.iterdir() if path.name != server.state()["transfer_mark"]]
    assert left == [server.token_file]


def test_a_second_trainer_is_refused_and_named_the_first(server, client):
    holder = f"process {os.getpid()} on "
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ValueError, match=f"works for {holder}.*one trainer at a time"):
            server.connect()
    assert server.state()["holder"].startswith(holder)


def test_a_server_that_is_named_twice_is_refused(server, make_trainer):
    urls = [server.url, server.url.replace("127.0.0.1", "localhost")]
    with pytest.raises(ValueError, match="names a server twice"):
        make_trainer(vllm_server_base_url=urls)


def test_a_context_shorter_than_completions_is_refused(make_trainer):
    with pytest.raises(ValueError, match="max_completion_length=300 is more than the server's context of "):
        make_trainer(max_completion_length=300)


def test_an_engine_that_waits_leaves_the_processor_to_others(server, make_trainer):
    """vLLM's own processes poll for a second after each message."""
    make_trainer().vllm_generation.sync_weights()
    assert server.complete().status_code == 200

    def seconds() -> float:
        children = psutil.Process(server.process.pid).children(recursive=True)
        return sum(sum(process.cpu_times()[:2]) for process in children)

    time.sleep(0.1)
    start = seconds()
    time.sleep(0.7)
    assert seconds() - start < 0.2


def test_the_engine_ends_with_a_server_that_is_killed(server):
    """The last test: it is their server."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    queues = {Path(map.path) for process in processes for map in process.memory_maps() if "/dev/shm/psm_" in map.path}
    assert len(processes) >= 2 and queues
    server.process.kill()
    server.process.wait()
    psutil.wait_procs(processes, timeout=60)
    assert [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert not any(queue.exists() for queue in queues)


@pytest.mark.nightly
def test_nothing_of_a_killed_server_stays(tmp_path):
    """One of its processes, vLLM's coordinator of replicas, loads no plugins."""
    server = Server(tmp_path, "--data-parallel-size", "2")
    pids = [process.pid for process in psutil.Process(server.process.pid).children(recursive=True)]
    assert len(pids) > 2
    server.process.kill()
    wait_until(lambda: not any(map(is_running, pids)), 60)
