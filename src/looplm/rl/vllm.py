"""Completions sampled by a vLLM server that holds the policy's weights, asked over HTTP."""

import shutil
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar
from uuid import uuid4

import httpx2
from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from looplm.engine.text import TextBuilder
from looplm.models.checkpoint import LayoutName
from looplm.rl.rollouts import Rollout
from looplm.training.distribution import World

T = TypeVar("T")
_AT_ONCE = 64  # requests under way; the server batches what it has room for, and queues the rest
_PAUSE = 0.5  # seconds before the second try, twice as many before each further one
_PASSING = (408, 425, 429, 502, 503, 504)  # what another try may not meet
_UNFILTERED = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VLLMServer:
    """A `vllm serve` that samples in place of this process's engine.

    url: its root, as http://localhost:8000 · model: its name there; the first that it serves by default
    layout: of the checkpoints that the server's model class reads (as `looplm export` writes them)
    folder: for the weights on their way, on a disk that the server sees under the same path; `served` in the run's
        folder by default · limit: seconds to wait for an answer · tries: of a request whose transport fails.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}  # for recipes

    url: str
    model: str | None = None
    layout: LayoutName = "ouro"
    folder: str | None = None
    limit: float = 600.0
    tries: int = 3

    def __post_init__(self) -> None:
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"server.url={self.url!r} is no URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or url.path != "/" or url.query:
            raise ValueError(f"server.url={self.url!r} must be a server's root, as http://localhost:8000")
        if self.limit <= 0 or self.tries < 1:
            raise ValueError(f"server.limit={self.limit} must be above 0, and server.tries={self.tries} at least 1")


class VLLMRollouts:
    """Rollouts by a vLLM server: one request a prompt, all at once, every token with its log-probability.

    vLLM does the same loops for every token, so the depth is declared and not observed. Nothing cuts the distribution;
    the server must report the log-probabilities of what it drew from (`--logprobs-mode processed_logprobs`), and still
    computes in a precision and by kernels of its own: the loop measures how far off they lie, and its ratio is taken
    against them, an importance weight of what `max_drift` lets pass, which the objective's clip truncates.

    New weights go over a disk: of what an unchanged server offers, `reload_weights` alone needs neither vLLM nor NCCL
    in this process. They are written to a folder of their own, `/collective_rpc` lets all workers of the server load
    that, and `/reset_prefix_cache` drops what the old ones computed. Both are development endpoints: the server must
    run with VLLM_SERVER_DEV_MODE=1 in its environment, and listen to nobody else.

    Args:
        loops: that the server's model does · vocab_size: of the policy · ends: token ids that end a completion
        write: writes the policy's weights, as they are, as a checkpoint in a folder · folder: where such folders go
        temperature: of sampling · stop: strings that end a completion · max_tokens: of one
        max_prompt: tokens of a prompt at most · world: whose leading process hands weights over.

    Raises:
        ValueError: if no server answers, or it serves another model, too short a context or raw log-probabilities, or
            takes no weights; from `sample`, for an answer without what training needs. Each is one line.
    """

    def __init__(
        self, server: VLLMServer, tokenizer: PreTrainedTokenizerBase, *, loops: int, vocab_size: int,
        ends: Collection[int], write: Callable[[Path], object], folder: Path, temperature: float = 1.0,
        stop: Sequence[str] = (), max_tokens: int = 64, max_prompt: int = 512, world: World | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self.loops, self.vocab_size, self.stop = tokenizer, loops, vocab_size, tuple(stop)
        self.write, self.folder = write, folder.absolute()
        self.world = world or World()
        self.http = _Http(server)
        self.body = {
            "model": self.http.served(server.model, max_prompt + max_tokens), "max_tokens": max_tokens,
            "temperature": temperature, **_UNFILTERED, "stop": list(stop), "stop_token_ids": sorted(ends),
            "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        self.http.check_mode()

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], group: int) -> list[list[Rollout]]:
        """`group` rollouts of every prompt [B], drawn by its own seed."""
        with ThreadPoolExecutor(_AT_ONCE, "vllm") as threads:
            return list(threads.map(lambda prompt, seed: self._group(list(prompt), seed, group), prompts, seeds))

    def weights_changed(self) -> None:
        """The server loads the policy's weights; every process comes here, and the leading one sees to it."""
        self.world.led(self._hand_over)

    def _hand_over(self) -> None:
        # Under a name of its own no file can be one that the server's disk cache still knows as it was.
        target = self.folder / f"policy-{uuid4().hex}"
        self.write(target)
        self.http.load(target)
        for older in self.folder.glob("policy-*"):
            if older != target:
                shutil.rmtree(older)

    def _group(self, prompt: list[int], seed: int, group: int) -> list[Rollout]:
        answer = self.http.call(
            "POST", "/v1/completions", json=self.body | {"prompt": prompt, "seed": seed, "n": group}
        )
        choices = self.http.read(_COMPLETIONS, answer).choices
        if len(choices) != group:
            raise self.http.fault(f"gives {len(choices)} completions where {group} were asked for")
        return [self._rollout(prompt, choice) for choice in choices]

    def _rollout(self, prompt: list[int], choice: "_Choice") -> Rollout:
        tokens, logprobs = choice.token_ids, choice.logprobs.token_logprobs
        if choice.prompt_token_ids != prompt:
            raise self.http.fault("answers another prompt than it was given")
        if len(tokens) != len(logprobs):
            raise self.http.fault(f"gives {len(logprobs)} log-probabilities for {len(tokens)} tokens")
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise self.http.fault(f"gives tokens beyond the policy's {self.vocab_size}: it serves another model")
        return Rollout(
            prompt_ids=prompt, token_ids=tokens, loops=[self.loops] * len(tokens), logprobs=logprobs,
            text=self._text(tokens), finished=choice.finish_reason == "stop", max_loops=self.loops,
        )  # fmt: skip

    def _text(self, tokens: Sequence[int]) -> str:
        """As the engine decodes it; vLLM's own text is without an end token that is a word."""
        text = TextBuilder(self.tokenizer, self.stop)
        for token in tokens:
            text.add(token)
        text.finish()
        return text.text


# What is read of the server's answers -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Logprobs:
    token_logprobs: list[float]


@dataclass(frozen=True, kw_only=True)
class _Choice:
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class _Completions:
    choices: list[_Choice]


@dataclass(frozen=True, kw_only=True)
class _Model:
    id: str
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class _Models:
    data: list[_Model]


_COMPLETIONS, _MODELS = TypeAdapter(_Completions), TypeAdapter(_Models)


class _Http:
    """Requests to one server; whatever goes wrong is one line that names it."""

    def __init__(self, server: VLLMServer) -> None:
        self.server = server
        limits = httpx2.Limits(max_connections=_AT_ONCE)
        self.client = httpx2.Client(base_url=server.url, timeout=server.limit, limits=limits)

    def served(self, name: str | None, length: int) -> str:
        """The model of that name, or the first, if it takes so many tokens of prompt and completion."""
        found = {model.id: model for model in self.read(_MODELS, self.call("GET", "/v1/models")).data}
        if not found or (name is not None and name not in found):
            raise self.fault(f"serves {', '.join(found) or 'nothing'}, and no {name!r}: set sampling.server.model")
        model = found[name or next(iter(found))]
        if model.max_model_len < length:
            raise self.fault(
                f"takes {model.max_model_len} tokens, fewer than sampling.max_prompt + max_tokens = {length}; start it "
                "with a larger --max-model-len"
            )
        return model.id

    def check_mode(self) -> None:
        """Refuse a server whose log-probabilities are not those of what it draws from."""
        told = self.call("GET", "/server_info", params={"config_format": "json"})
        try:
            mode = told["vllm_config"]["model_config"]["logprobs_mode"]
        except (LookupError, TypeError) as error:
            raise self.fault("does not say its logprobs_mode") from error
        if mode != "processed_logprobs":
            raise self.fault(f"reports {mode}; start it with --logprobs-mode processed_logprobs")

    def load(self, folder: Path) -> None:
        """Let all workers load the checkpoint in `folder`, and forget what they computed before."""
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.call("POST", "/collective_rpc", json=asked)
        reset = self.call("POST", "/reset_prefix_cache", params={"reset_running_requests": "true"})
        if isinstance(reset, dict) and not reset.get("success", True):
            raise self.fault("does not let go of what its old weights computed: is it sampling for somebody else?")

    def call(self, method: str, path: str, **given: Any) -> Any:
        """The answer's JSON; None where it is empty."""
        why = ""
        for attempt in range(self.server.tries):
            time.sleep(_PAUSE * 2.0 ** (attempt - 1) if attempt else 0)
            try:
                response = self.client.request(method, path, **given)
            except httpx2.TransportError as error:
                why = f"{type(error).__name__} {error}"
                continue
            why = f"HTTP {response.status_code} {response.text}"
            if response.status_code not in _PASSING:
                break
        else:
            raise self.fault(
                f"did not answer {path} in {self.server.tries} tries of at most {self.server.limit:g} s: {why}"
            )
        if response.status_code == 404 and not path.startswith("/v1"):
            raise self.fault(f"has no {path}, which new weights need: start it with VLLM_SERVER_DEV_MODE=1 set")
        if not response.is_success:
            raise self.fault(f"refuses {path}: {why}")
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise self.fault(f"answers {path} with no JSON: {response.text}") from error

    def read(self, form: TypeAdapter[T], answer: Any) -> T:
        """`answer` in vLLM's form."""
        try:
            return form.validate_python(answer)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise self.fault(f"answers without what is needed: {place}: {first['msg']}") from error

    def fault(self, what: str) -> ValueError:
        """A line that names the server."""
        return ValueError(f"the vLLM server at {self.server.url} {' '.join(what.split())[:300]}")
