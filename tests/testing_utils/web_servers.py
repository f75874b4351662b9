"""Web servers in this process, their certificates, and what is asked of a server of vLLM."""

import asyncio
import datetime
import ipaddress
import threading
import time
from pathlib import Path

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

    def __init__(self, app, port=0, **options):
        uvicorn = pytest.importorskip("uvicorn")
        # It does not recognize bound methods by itself.
        config = uvicorn.Config(app, port=port, interface="asgi3", lifespan="off", log_level="error", **options)
        self.server, listening = uvicorn.Server(config), config.bind_socket()
        self.port = listening.getsockname()[1]
        self.url = f"{'https' if options else 'http'}://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=asyncio.run, args=[self.server.serve([listening])])
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)

    def stop(self):
        self.server.should_exit = self.server.force_exit = True
        self.thread.join()


def write_certificate(folder, days=1, since=-9) -> tuple[Path, Path]:
    """
    A certificate for 127.0.0.1 that has signed itself, and its key; expired with a negative number of days, and with a
    positive `since` made by a clock that is so many days ahead.
    """
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server of a test")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now + datetime.timedelta(since))
    builder = builder.not_valid_after(now + datetime.timedelta(days))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(*encoding))
    return paths


def complete(url, **options):
    """The answer of a server of vLLM that is asked for two tokens."""
    model = requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 2}
    return requests.post(f"{url}/v1/completions", json=body, timeout=60, **options)
