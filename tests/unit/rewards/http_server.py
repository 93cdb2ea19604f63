"""Serve scripted replies in order over real HTTP on a thread, and keep the requests that came."""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, dict[str, str], bytes]  # status, headers, body
Script = Reply | Callable[[BaseHTTPRequestHandler], None]  # a function writes whatever it likes to the connection


class ScriptedServer:
    """Replies to the n-th request with the n-th item of the script; to all further ones with the last."""

    def __init__(self, *script: Script) -> None:
        self.script = list(script)
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []  # method, path, headers, body
        self.times: list[float] = []  # of the requests, time.monotonic
        self.is_closing = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                headers = {key.lower(): value for key, value in self.headers.items()}
                owner.requests.append((self.command, self.path, headers, body))
                owner.times.append(time.monotonic())
                script = owner.script[min(len(owner.requests), len(owner.script)) - 1]
                if callable(script):
                    script(self)
                    return
                status, reply_headers, content = script
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **reply_headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                """No lines in the test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.is_closing.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "ScriptedServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hang(self, _handler: BaseHTTPRequestHandler) -> None:
        """Says nothing until the server is closed."""
        self.is_closing.wait(60)

    def trickle(self, handler: BaseHTTPRequestHandler) -> None:
        """A reply of one byte every 50 ms, without an end."""
        handler.send_response(200)
        handler.end_headers()
        while not self.is_closing.wait(0.05):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    def trickle_header(self, handler: BaseHTTPRequestHandler) -> None:
        """A header without an end."""
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while not self.is_closing.wait(0.05):
            try:
                handler.wfile.write(b"y")
            except OSError:
                return


def reset(handler: BaseHTTPRequestHandler) -> None:
    """Closes the connection without a word."""
    handler.close_connection = True


def free_port_url() -> str:
    """An address on which nothing listens."""
    with ScriptedServer((200, {}, b"")) as server:
        return server.url
