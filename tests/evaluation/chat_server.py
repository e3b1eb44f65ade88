"""A server on the loopback that speaks /v1/chat/completions as a test scripts it."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """``respond(number, body)`` is (status, content); ("drip", content) sends it byte by byte until the client goes."""

    def __init__(self, respond):
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.hung_up = threading.Event()
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append({**body, "path": self.path})
                    outer.headers.append(dict(self.headers))
                status, content = respond(number, body)
                if status == "drip":
                    self.send_response(200)
                    self.end_headers()
                    try:
                        while True:
                            self.wfile.write(content)
                            self.wfile.flush()
                            time.sleep(0.02)
                    except OSError:
                        outer.hung_up.set()
                    return
                if status is None and content is None:  # dies before its answer
                    self.close_connection = True
                    return
                if status is None:  # dies in the middle of it
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    self.wfile.write(content)
                    self.close_connection = True
                    return
                self.send_response(status)
                if status == 429:
                    self.send_header("Retry-After", "0.25")
                if status in (301, 307):
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


def completion(text="42", reason="stop", tokens=7):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}
