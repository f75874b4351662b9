"""
A web server in place of vLLM's that fails on command. As a program it prints its port, and fails as the first part of
a path says.
"""

import json
import os
import socket
import struct
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's `failure` says."""

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        failure = self.server.failure or self.path.split("/")[1]
        if failure == "die":
            os._exit(9)
        elif failure == "hang":
            self.server.released.wait(60)
            self.close_connection = True
        elif failure == "reset":
            # Without lingering, closing sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif failure == "drip" or (failure == "drip later" and self.command == "POST"):
            # A header without end: with each byte that arrives, a time-out of `requests` begins anew.
            with suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                while not self.server.released.wait(0.02):
                    self.wfile.write(b"x")
            self.close_connection = True
        elif failure == "break off" and self.command == "POST":
            self.reply(200, b"", length=9)
        elif failure == "garbage":
            self.reply(200, b"<html>")
        elif str(failure).isdigit():
            self.reply(int(failure), b'{"error": {"message": "EngineCore encountered an issue."}}')
        else:
            self.reply(200, json.dumps({"data": [{"id": "model"}], "weight_version": "7"}).encode())

    def reply(self, status, body, length=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *args):
        pass

    def finish(self):
        # The connection may have been reset.
        with suppress(OSError, ValueError):
            super().finish()


def make_server() -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.failure, server.released = None, threading.Event()
    return server


if __name__ == "__main__":
    server = make_server()
    print(server.server_port, flush=True)
    server.serve_forever()
