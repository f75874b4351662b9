"""Web servers in this process, and what is asked of a server of vLLM."""

import asyncio
import threading
import time

import pytest
import requests


def wait_until(condition, seconds, said=lambda: ""):
    """Wait until the condition holds; fails with what is `said` by then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


class WebServer:
    """An ASGI application behind a real web server, in a thread."""

    def __init__(self, app, port=0):
        uvicorn = pytest.importorskip("uvicorn")
        # It does not recognize bound methods by itself.
        config = uvicorn.Config(app, port=port, interface="asgi3", lifespan="off", log_level="error")
        self.server, listening = uvicorn.Server(config), config.bind_socket()
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=asyncio.run, args=[self.server.serve([listening])])
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)

    def stop(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()


def complete(url, **options):
    """The answer of a server of vLLM that is asked for two tokens."""
    model = requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 2}
    return requests.post(f"{url}/v1/completions", json=body, timeout=60, **options)
