"""Weights over HTTP, piece by piece, through the gate; driven without a web framework."""

import asyncio
import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import test_gate
from test_gate import Server

from trl_qarl.vllm_plugin.uploads import Uploads
from trl_qarl.wire.protocol import SESSION_HEADER, TRANSFER_DIR_VARIABLE, UPLOAD_HEADER, UPLOAD_PATH


CONTENT = bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv(TRANSFER_DIR_VARIABLE, str(tmp_path))
    return tmp_path


async def upload(server, token, offset, *parts, content=CONTENT, header=None, ends=True, headers=()):
    """Status and content of the answer to a piece in `parts`, whose connection may be dropped then."""
    header = header or f"{hashlib.sha256(content).hexdigest()} {len(content)} {offset}"
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b""} if ends else {"type": "http.disconnect"})
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    fields = [(UPLOAD_HEADER.encode(), header.encode()), (b"content-type", b"application/octet-stream"), *headers]
    fields += [] if token is None else [(SESSION_HEADER.encode(), token.encode())]
    await server.gate({"type": "http", "path": UPLOAD_PATH, "method": "POST", "headers": fields}, receive, send)
    return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else None


def files(directory):
    return [path for path in directory.iterdir() if not path.name.endswith("here")]


def run(scenario):
    async def with_session():
        server = Server()
        _, token, hang_up, _ = await server.open_session()
        await scenario(server, token)
        hang_up.set()

    asyncio.run(with_session())


served = functools.partial(test_gate.served, run=run)


@served
async def test_pieces_become_a_file_that_an_update_reads_and_nothing_stays(server, token, directory):
    assert await upload(server, token, 0, CONTENT[:3000], CONTENT[3000:5000]) == (200, {"received": 5000})
    # Once more, and one that begins further on: said where to go on.
    assert await upload(server, token, 0, CONTENT[:4000]) == (200, {"received": 5000})
    assert await upload(server, token, 6000, CONTENT[6000:]) == (200, {"received": 5000})
    status, answer = await upload(server, token, 5000, CONTENT[5000:])
    assert status == 200 and answer["received"] == len(CONTENT)
    (path,) = files(directory)
    assert path.name == answer["file"] and path.read_bytes() == CONTENT and path.stat().st_mode & 0o777 == 0o600
    await server.request("/update_weights", token=token)
    assert files(directory) == []


@served
async def test_a_dropped_connection_costs_what_has_not_arrived(server, token, directory):
    assert await upload(server, token, 0, CONTENT[:700], ends=False) is None
    assert await upload(server, token, 0) == (200, {"received": 700})
    assert (await upload(server, token, 700, CONTENT[700:]))[1]["received"] == len(CONTENT)


def test_the_next_session_goes_on_where_the_last_one_was(directory):
    async def scenario():
        server = Server()
        _, token, hang_up, task = await server.open_session()
        await upload(server, token, 0, CONTENT[:700], ends=False)
        hang_up.set()
        await task
        assert (await upload(server, token, 700, CONTENT[700:]))[0] == 409
        _, token, hang_up, _ = await server.open_session()
        assert "file" in (await upload(server, token, 700, CONTENT[700:]))[1]
        hang_up.set()

    asyncio.run(scenario())


@served
async def test_what_does_not_have_its_hash_is_thrown_away(server, token, directory):
    header = f"{DIGEST} {len(CONTENT)} 0"
    changed = CONTENT[:-1] + b"x"
    status, answer = await upload(server, token, 0, changed, header=header)
    assert status == 400 and "announced hash" in answer["error"]
    assert files(directory) == []
    assert "file" in (await upload(server, token, 0, CONTENT))[1]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "must be the SHA-256"),
        (f"{DIGEST} 7", "must be the SHA-256"),
        (f"{DIGEST} -7 0", "must be the SHA-256"),
        (f"../{DIGEST[3:]} 7 0", "must be the SHA-256"),
        (f"{DIGEST} {2**33} 0", "A file of 8589934592 bytes is refused: this server accepts up to 4294967296"),
        (f"{DIGEST} 0 0", "A file of 0 bytes is refused"),
        (f"{DIGEST} 5 0", "the end of the file, at 5 bytes"),
        (f"{DIGEST} {len(CONTENT)} 9000", "the end of the file"),
    ],
)
@served
async def test_what_is_no_piece_is_refused(server, token, directory, header, message):
    status, answer = await upload(server, token, 0, CONTENT, header=header or " ")
    assert status == 400 and message in answer["error"]


@served
async def test_only_the_session_uploads_and_no_page(server, token, directory):
    assert (await upload(server, None, 0, CONTENT))[0] == 409
    assert (await upload(server, "0" * 32, 0, CONTENT))[0] == 409
    assert (await upload(server, token, 0, CONTENT, headers=[(b"origin", b"http://a")]))[0] == 403
    assert files(directory) == []


def test_a_server_without_room_or_directory_says_so(directory, monkeypatch):
    async def scenario(server, token):
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 10}))
        status, answer = await upload(server, token, 0, CONTENT)
        assert status == 507 and f"{len(CONTENT)} bytes are needed in {directory}, 10 are free" in answer["error"]
        directory.chmod(0o777)
        assert "others may write to it" in (await upload(server, token, 0, CONTENT))[1]["error"]

    run(scenario)
    monkeypatch.delenv(TRANSFER_DIR_VARIABLE)
    run(no_directory)


async def no_directory(server, token):
    status, answer = await upload(server, token, 0, CONTENT)
    assert status == 400 and "does not accept weights over HTTP" in answer["error"]


@served
async def test_a_directory_that_something_has_removed_is_made_again(server, token, directory):
    await upload(server, token, 0, CONTENT[:700], ends=False)
    shutil.rmtree(directory)
    # What was there is gone, which costs one more attempt.
    assert (await upload(server, token, 700, CONTENT[700:]))[0] == 507
    assert "file" in (await upload(server, token, 0, CONTENT))[1]
    assert directory.stat().st_mode & 0o777 == 0o700


def test_half_files_do_not_pile_up(directory):
    async def scenario():
        uploads = Uploads(str(directory), limit=25_000)
        for number in range(5):
            content = CONTENT + bytes([number])
            header = f"{hashlib.sha256(content).hexdigest()} {len(content)} 0".encode()
            messages = [{"type": "http.request", "body": content[:99], "more_body": True}, {"type": "http.disconnect"}]

            async def receive(messages=messages):
                return messages.pop(0)

            assert await uploads.receive({UPLOAD_HEADER.encode(): header}, receive) is None
        assert 1 <= len(files(directory)) <= 2

    asyncio.run(scenario())


@served
async def test_the_mark_tells_a_trainer_that_it_has_the_same_directory(server, token, directory):
    _, state, _ = await server.request("/qarl/state", method="GET")
    assert (Path(state["transfer_dir"]) / state["transfer_mark"]).exists()
    # It goes with its server: its name says which process made it.
    assert str(os.getpid()) in state["transfer_mark"]
