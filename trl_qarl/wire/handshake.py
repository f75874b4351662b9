"""
Secret shared by a trainer and its server, and the mutual proof of knowing it.

The holder of the session changes the weights, and the server receives them, so access to a port must not be enough for
either role. To open a session the trainer sends an HMAC-SHA256 with the secret over two nonces, one from each side;
the server's answer carries another HMAC over the same nonces and its whole content. The secret is never sent, and the
server's nonce is used once.

The server gets the secret through the environment of a child process ([`TOKEN_VARIABLE`]), or in a file that only its
owner can read ([`TOKEN_FILE_VARIABLE`]).
"""

import hmac
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any


TOKEN_VARIABLE = "TRL_QARL_TOKEN"
TOKEN_FILE_VARIABLE = "TRL_QARL_TOKEN_FILE"
TOKEN_FILE_NAME = "token"

_taken: str | None = None


def json_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content` from an untrusted sender, or an empty one if there is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def proof(token: str, *parts: Any) -> str:
    """Return the HMAC-SHA256 of `parts`, in JSON, in hexadecimal digits."""
    return hmac.new(token.encode(), json.dumps(parts, sort_keys=True).encode(), "sha256").hexdigest()


def is_proof(given: Any, token: str, *parts: Any) -> bool:
    """Return whether `given`, from an untrusted sender, is [`proof`] of the same parts, in constant time."""
    return hmac.compare_digest(str(given).encode(errors="replace"), proof(token, *parts).encode())


def make_token_file(path: str | Path) -> None:
    """Write a new secret to a file that only its owner can read, unless the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(32)}\n")


def read_token_file(path: str | Path) -> str:
    """Return the secret in a file of [`make_token_file`]. `ValueError` is raised if the file does not exist, other
    users can read or replace it, or it has other content."""
    try:
        # Without O_NONBLOCK a named pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"The token file {str(path)!r} is not a regular file. Name the file itself.")
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o077:
                raise ValueError(
                    f"The token file {str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o} and belongs to user "
                    f"{status.st_uid}, so users other than {os.getuid()} may know it. Run `chmod 600` on it as its owner, or "
                    "copy it and name the copy."
                )
            token = file.read(1000).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The token file {str(path)!r} cannot be read: {error}.") from error
    if not re.fullmatch(r"[0-9a-f]{64}", token):
        raise ValueError(
            f"The token file {str(path)!r} does not hold 64 hexadecimal digits, as `trl-qarl vllm-serve` writes them. Remove "
            "it and start the server again."
        )
    return token


def take_token() -> str | None:
    """Return the secret in [`TOKEN_VARIABLE`], and remove it from the environment that child processes inherit."""
    global _taken
    _taken = os.environ.pop(TOKEN_VARIABLE, None) or _taken
    return _taken


def server_token() -> str:
    """Return the secret this server was started with, or raise `ValueError`."""
    if token := take_token():
        return token
    if path := os.environ.get(TOKEN_FILE_VARIABLE):
        return read_token_file(path)
    raise ValueError(
        f"This server was started without the secret that its trainer must know: neither {TOKEN_VARIABLE} nor "
        f"{TOKEN_FILE_VARIABLE} is set. Start it with `trl-qarl vllm-serve`."
    )
