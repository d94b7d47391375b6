"""A server for S3 on this machine, and a proxy before it that fails as servers and networks do."""

import http.client
import http.server
import itertools
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import fsspec

from support.ports import free_port

BUCKET = "bucket"


def variables(port):
    """The environment variables by which clients find the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "4",
    }


@contextmanager
def server():
    """Runs the server with one empty bucket, and yields its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("PUT", f"/{BUCKET}")
                assert connection.getresponse().status == 200
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


class Faults:
    """What the proxy does to a request: 'pass', 'busy' (503), 'lost' (the connection is closed), 'slow' or 'frozen' (it
    is never answered).

    Args:
        weights: the probability of each fault; the rest passes.
        seed: of the choices.
    """

    def __init__(self, seed=0, **weights):
        self.weights, self._rng, self._mutex = weights, random.Random(seed), threading.Lock()
        self.seen = dict.fromkeys(("pass", *weights), 0)

    def choose(self):
        with self._mutex:
            value = self._rng.random()
            limits = itertools.accumulate(self.weights.values())
            fault = next((name for name, limit in zip(self.weights, limits, strict=True) if value < limit), "pass")
            self.seen[fault] = self.seen.get(fault, 0) + 1
            return fault


@contextmanager
def proxy(port, faults):
    """Runs a proxy before the server at a port, and yields its own port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self):
            try:
                super().handle_one_request()
            except (ConnectionError, http.client.HTTPException):
                self.close_connection = True

        def forward(self):
            fault = faults.choose()
            body = self.read_body()
            if fault == "lost":
                self.close_connection = True
                self.connection.close()
                return
            if fault == "busy":
                self.answer(503, {}, b"<Error><Code>SlowDown</Code><Message>later</Message></Error>")
                return
            if fault == "frozen":
                time.sleep(3600)
            if fault == "slow":
                time.sleep(0.3)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            self.answer(response.status, dict(response.getheaders()), response.read())
            connection.close()

        def read_body(self):
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def answer(self, status, headers, body):
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
            pass

    own = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=own.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield own.server_address[1]
    finally:
        own.shutdown()
        own.server_close()
        thread.join()


@contextmanager
def clients(port):
    """Directs the clients of this process to a port."""
    before = dict(os.environ)
    os.environ.update(variables(port))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
