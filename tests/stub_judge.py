"""A judge on this machine that replies by rule, after whatever it is told to do first."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from local_server import listening


@dataclass
class Stub:
    """rule: the reply to a prompt · first: steps that take the place of the rule, one a request, in order
    seen: the requests' bodies · headers: theirs · busiest: how many were under way at once.
    """

    rule: Callable[[str], str]
    first: list[dict[str, Any]] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    delay: float = 0.0
    url: str = ""
    under_way: int = 0
    busiest: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.seen]


def completion(text: str | None) -> str:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"model": "stub-2", "choices": [choice]})


@contextmanager
def judging(rule, first=(), delay=0.0):
    stub = Stub(rule=rule, first=list(first), delay=delay)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stub.lock:
                stub.seen.append({"path": self.path, **body})
                stub.headers.append(dict(self.headers))
                step = stub.first.pop(0) if stub.first else {}
                stub.under_way += 1
                stub.busiest = max(stub.busiest, stub.under_way)
            time.sleep(step.get("sleep", stub.delay))
            with stub.lock:
                stub.under_way -= 1
            told = step.get("body", completion(stub.rule(body["messages"][0]["content"]))).encode()
            try:
                self.send_response(step.get("status", 200))
                for name, value in step.get("headers", {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                size = 1 if "drip" in step else len(told)
                for place in range(0, len(told), size):
                    self.wfile.write(told[place : place + size])
                    time.sleep(step.get("drip", 0))
            except OSError:
                pass  # the client has gone

        def log_message(self, *args):
            pass

    with listening(Handler) as root:
        stub.url = f"{root}/v1"
        yield stub
