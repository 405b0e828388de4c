"""A local server that answers as `vllm serve` 0.32 does, with what looplm's own engine samples."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

import looplm
from local_server import listening
from looplm.data.tokenizer import load_tokenizer
from looplm.engine import Engine, SamplingParams

NAME = "policy"


@dataclass(kw_only=True)
class Stub:
    """folder: of the checkpoint that it serves at first · mode: its logprobs_mode · deaf: it loads no weights
    before: called with the path and body of each request; ConnectionError drops it, another answer replaces it
    after: called with path and answer, which it may change · seen: paths and bodies of requests
    loaded: the folders that weights came from.
    """

    folder: Path
    mode: str = "processed_logprobs"
    deaf: bool = False
    before: Callable[[str, Any], tuple[int, Any] | None] = lambda path, body: None
    after: Callable[[str, Any], Any] = lambda path, answer: answer
    seen: list[tuple[str, Any]] = field(default_factory=list)
    loaded: list[Path] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, folder: Path) -> None:
        tokenizer = load_tokenizer(self.folder)
        self.engine = Engine(looplm.load(folder, self.dtype), tokenizer, max_rows=16, max_length=64)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if (other := self.before(path, body)) is not None:
            return other
        with self.lock:
            self.seen.append((path, body))
            return 200, self.after(path, getattr(self, path.strip("/").replace("/", "_"))(body))

    def v1_models(self, _):
        card = {"id": NAME, "object": "model", "owned_by": "vllm", "root": str(self.folder), "max_model_len": 64}
        return {"object": "list", "data": [card]}

    def server_info(self, _):
        return {"vllm_config": {"model_config": {"model": NAME, "logprobs_mode": self.mode}}, "vllm_env": {}}

    def collective_rpc(self, body):
        assert body["method"] == "reload_weights"
        folder = Path(body["kwargs"]["weights_path"])
        self.loaded.append(folder)
        if not self.deaf:
            self.serve(folder)
        return {"results": [None]}

    def reset_prefix_cache(self, _):
        return {"success": True}

    def v1_completions(self, body):
        assert body["n"] == 1 or body["temperature"] > 0  # vLLM refuses other requests
        params = SamplingParams(
            max_tokens=body["max_tokens"], temperature=body["temperature"], top_p=body["top_p"], top_k=body["top_k"],
            seed=body["seed"], n=body["n"], stop=body["stop"], stop_token_ids=body["stop_token_ids"],
            logprobs_mode="processed",
        )  # fmt: skip
        done = self.engine.generate([body["prompt"]], params)
        choices = [choice(index, one) for index, one in enumerate(done)]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": sum(len(one.token_ids) for one in done)}
        return {"id": "cmpl-1", "object": "text_completion", "model": NAME, "choices": choices, "usage": usage}


def choice(index, done):
    words = [f"token_id:{token}" for token in done.token_ids]
    return {
        "index": index, "text": "",  # which looplm reads off the tokens
        "logprobs": {
            "text_offset": list(range(len(words))), "token_logprobs": done.logprobs, "tokens": words,
            "top_logprobs": [{word: value} for word, value in zip(words, done.logprobs, strict=True)],
        },
        "finish_reason": done.finish_reason, "stop_reason": None, "token_ids": done.token_ids,
        "prompt_logprobs": None, "prompt_token_ids": done.prompt_token_ids, "routed_experts": None,
    }  # fmt: skip


@contextmanager
def serving(folder, **changes):
    """A stub on what `folder` holds, under a free port."""
    stub = Stub(folder=folder, **changes)
    stub.serve(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            try:
                status, told = stub.answer(urlsplit(self.path).path, body)
                told = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)
            except ConnectionError:  # to be dropped, or the client has gone
                self.close_connection = True

        def do_GET(self):
            self.do_POST()

        def log_message(self, *args):
            pass

    with listening(Handler) as root:
        stub.url = root
        yield stub
