"""looplm as a model of lm-eval: every request at a depth, and many depths from one forward."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerFast

from looplm.data.chat import rendered
from looplm.data.tokenizer import load_tokenizer
from looplm.engine import Completion, Engine, SamplingParams
from looplm.evals.asking import begins, prefix_id, text_ids
from looplm.evals.depths import Depth, exit_depth, fixed_depths
from looplm.evals.memo import Keep, Memo
from looplm.evals.progress import Advance, each_of, unheard
from looplm.evals.results import Effort
from looplm.evals.scoring import Pair, likelihoods
from looplm.models import LoopLMForCausalLM, load
from looplm.training.opening import latest_checkpoint

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_AT_ONCE = 1024  # likelihoods that are asked together: what an interrupt may lose of them


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A model with all that decides its answers beside the depth.

    depths: those that one forward is read at · kv: how loops share keys in generation (prefill is always full)
    add_bos: whether texts begin with the start token; by default as the tokenizer does. Never twice.
    max_length: tokens of context and continuation, what is longer loses its beginning · max_gen_toks: by default
    seed: of sampling · advance: hears how many rows are scored and completions made.
    """

    model: LoopLMForCausalLM
    tokenizer: PreTrainedTokenizerFast
    depths: Sequence[Depth]
    kv: str = "full"
    batch_size: int = 8
    max_length: int = 2048
    max_gen_toks: int = 256
    add_bos: bool | None = None
    seed: int = 0
    memo: Memo = field(default_factory=Memo)
    advance: Advance = unheard

    @property
    def prefix(self) -> int:
        """See `prefix_id`."""
        return prefix_id(self.tokenizer)

    @cached_property
    def begins(self) -> bool:
        """Whether a text gets a start token."""
        return begins(self.tokenizer) if self.add_bos is None else self.add_bos

    @cached_property
    def special(self) -> dict[str, int]:
        """The ids of the tokenizer's special tokens, as they are written."""
        return dict(zip(map(str, self.tokenizer.all_special_tokens), self.tokenizer.all_special_ids, strict=True))

    def encode(self, text: str, starts: bool | None = None) -> list[int]:
        """Token ids of `text`, with one start token where `starts` (`self.begins`) says so, also if it holds it."""
        return text_ids(self.tokenizer, text, self.begins if starts is None else starts)

    def likelihoods(self, pairs: Sequence[Pair]) -> list[list[dict[str, Any]]]:
        """As `looplm.evals.scoring.likelihoods`; what was asked before is remembered."""

        def ask(some: Sequence[dict[str, Any]], keep: Keep) -> None:
            for first in range(0, len(some), _AT_ONCE):
                chosen = [Pair(**one) for one in some[first : first + _AT_ONCE]]
                told = likelihoods(
                    self.model, chosen, self.depths, self.batch_size, self.max_length, self.advance
                )  # fmt: skip
                for place, row in enumerate(told, start=first):
                    keep(place, [asdict(one) for one in row])

        return self.memo.answers([depth.name for depth in self.depths], [asdict(pair) for pair in pairs], ask)

    def completions(self, depth: Depth, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Completions of {"prompt", "params", "turn"} at `depth`: text, tokens made, mean loops, and why they ended.

        `turn` counts equal requests, each of which draws anew; what is drawn depends on the seed, the prompt and it.
        """
        longest = max((request["params"]["max_tokens"] for request in requests), default=1)
        if longest >= self.max_length:
            raise ValueError(f"{longest} tokens to generate leave no room in max_length={self.max_length}; lower them")

        def ask(some: Sequence[dict[str, Any]], keep: Keep) -> None:
            params = [SamplingParams(**request["params"], seed=_seed(self.seed, request)) for request in some]
            prompts = [request["prompt"][-self.room(request) :] for request in some]
            engine = Engine(
                self.model, self.tokenizer, depth=depth.policy, kv=self.kv, loops=depth.loops,
                max_rows=min(self.batch_size, len(prompts)), kv_bytes=2**40,
                max_length=max(len(prompt) + each.max_tokens for prompt, each in zip(prompts, params, strict=True)),
            )  # fmt: skip
            heard = each_of(len(prompts), f"completions at {depth.name}", self.advance)

            def told(done: Completion) -> None:
                keep(done.number, [_completion(done)])
                heard(done)

            engine.generate(prompts, params, told=told)

        return [row[0] for row in self.memo.answers([f"{depth.name} kv={self.kv}"], requests, ask)]

    def room(self, request: Mapping[str, Any]) -> int:
        """Tokens of its prompt that the model may see beside those that it is to make."""
        return self.max_length - request["params"]["max_tokens"]


@register_model("looplm")
class LoopLM(TemplateLM):
    """`lm_eval --model looplm --model_args pretrained=PATH,loops=2`, once `looplm.evals.lm` is imported.

    Args:
        pretrained: a checkpoint, run folder or hub id, or a `Reader` that several depths share · loops, exit: the depth
            ("q=0.5"); the model's own loops by default · tokenizer: another folder's; the others are `Reader`'s.
    """

    def __init__(
        self, pretrained: str | Path | Reader, loops: int | None = None, exit: str | None = None,
        kv: str = "full", batch_size: int | str = 8, max_length: int | None = None, max_gen_toks: int = 256,
        add_bos: bool | None = None, dtype: str = "float32", device: str = "cpu", tokenizer: str | None = None,
        seed: int = 0, max_batch_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.backend = "causal"
        self._noted: dict[tuple[str | None, int | None], list[Effort]] = defaultdict(list)
        if isinstance(pretrained, Reader):
            self.reader, (self.depth, *_) = pretrained, pretrained.depths
            return
        folder = latest_checkpoint(pretrained)
        model = load(folder, dtype=dtype, device=device)
        self.depth = _depth(model, loops, exit)
        self.reader = Reader(
            model=model, tokenizer=load_tokenizer(folder if tokenizer is None else Path(tokenizer)),
            depths=(self.depth,), kv=kv, batch_size=8 if batch_size == "auto" else int(batch_size),
            max_length=max_length or model.config.max_position_embeddings, max_gen_toks=max_gen_toks,
            add_bos=add_bos, seed=seed,
        )  # fmt: skip

    def at(self, depth: Depth) -> "LoopLM":
        """The same reader's answers at another of its depths."""
        other = LoopLM(self.reader)
        other.depth = depth
        return other

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The reader's."""
        return self.reader.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval tells requests under different chat templates apart by."""
        return str(self.reader.tokenizer.name_or_path).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """The end token, and the start token where there is none."""
        end = self.reader.tokenizer.eos_token_id
        return self.reader.prefix if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """See `Reader.prefix`."""
        return self.reader.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; with exactly one start token, or none."""
        return self.reader.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The turns as the tokenizer's own template writes them; a prefix of the answer may be the last turn.

        Raises:
            ValueError: if the tokenizer has no chat template, or it refuses the turns.
        """
        return rendered(
            self.reader.tokenizer, chat_history, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As in lm-eval; an empty continuation is refused.

        Raises:
            ValueError: naming the context whose continuation is empty.
        """
        told = self._told(requests, [[self._pair(*request.args)] for request in requests], rolling=False)
        return [(one["logprob"], one["greedy"]) for (one,) in told]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:  # fmt: skip
        told = self._at_depth([Pair(context=tuple(context), continuation=tuple(ids)) for _, context, ids in requests])
        return [(one["logprob"], one["greedy"]) for one in told]

    def _pair(self, context: str, continuation: str) -> Pair:
        """As lm-eval cuts them: the two are encoded as one text, a space between them goes with the continuation."""
        if context:
            before, ids = self._encode_pair(context, continuation)
        else:
            ids = self.tok_encode(continuation, add_special_tokens=False)
            before, ids = (ids[:1], ids[1:]) if ids[:1] == [self.prefix_token_id] else ([self.prefix_token_id], ids)
        if not continuation or not ids:
            raise ValueError(f"the continuation of '{context[-60:]}' is empty; nothing of it can be scored")
        return Pair(context=tuple(before), continuation=tuple(ids))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts; the first token follows the prefix token, once a text, and windows of
        `max_length` are disjoint in what they score."""
        told = self._told(requests, [self._windows(request.args[0]) for request in requests], rolling=True)
        return [sum(one["logprob"] for one in some) for some in told]

    def _windows(self, text: str) -> list[Pair]:
        prefix, tokens = self.reader.prefix, self.reader.encode(text, starts=False)
        tokens = tokens[1:] if tokens[:1] == [prefix] else tokens
        windows = get_rolling_token_windows(tokens, prefix, self.reader.max_length, context_len=1)
        disjoint = map(make_disjoint_window, windows)
        return [Pair(context=tuple(context), continuation=tuple(ids)) for context, ids in disjoint]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Completions up to the first stop string, which is left out, or an end token.

        Raises:
            ValueError: for a generation setting that is not supported, by name.
        """
        turns: Counter[str] = Counter()
        asked: list[dict[str, Any]] = []
        for context, settings in (request.args for request in requests):
            params = _with_stop_ids(_sampling(settings, self.reader.max_gen_toks), self.reader.special)
            drawn = f"{context}{params}" if params["temperature"] else ""
            asked.append({"prompt": self.tok_encode(context), "params": params, "turn": turns[drawn]})
            turns[drawn] += bool(drawn)
        told = self.reader.completions(self.depth, asked)
        for request, each, done in zip(requests, asked, told, strict=True):
            cut = len(each["prompt"]) > self.reader.room(each)
            self._note(request, Effort(tokens=done["tokens"], loops=done["loops"], cut=cut))
        return [done["text"] for done in told]

    def effort(self, task: str, doc_id: int) -> Effort:
        """What the requests of a task's question took, together."""
        return Effort.of(self._noted[task, doc_id])

    def _note(self, request: Instance, effort: Effort) -> None:
        self._noted[request.task_name, request.doc_id].append(effort)

    def _told(
        self, requests: Sequence[Instance], pairs: Sequence[Sequence[Pair]], rolling: bool
    ) -> list[list[dict[str, Any]]]:  # fmt: skip
        """What the pairs of each request come to; windows of a whole text are no cuts of it."""
        told = iter(self._at_depth([pair for some in pairs for pair in some]))
        found = [[next(told) for _ in some] for some in pairs]
        for request, some, parts in zip(requests, pairs, found, strict=True):
            for pair, one in zip(some, parts, strict=True):
                cut = not rolling and pair.length > self.reader.max_length
                self._note(request, Effort(tokens=len(pair.continuation), loops=one["loops"], cut=cut))
        return found

    def _at_depth(self, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
        place = [depth.name for depth in self.reader.depths].index(self.depth.name)
        return [row[place] for row in self.reader.likelihoods(pairs)]


def _depth(model: LoopLMForCausalLM, loops: int | None, rule: str | None) -> Depth:
    if rule is not None:
        return exit_depth(rule, model.config, loops)
    (depth,) = fixed_depths([model.config.loops if loops is None else loops])
    return depth


def _sampling(settings: dict[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """lm-eval's generation settings in the engine's words."""
    known: dict[str, Any] = dict(normalize_gen_kwargs(settings, max_gen_toks))
    greedy = not known.pop("do_sample")
    params = {
        "max_tokens": known.pop("max_gen_toks"), "stop": [stop for stop in known.pop("until") if stop],
        **{name: known.pop(name) for name in _SAMPLING if name in known},
    }  # fmt: skip
    if known:
        raise ValueError(f"the generation setting '{min(known)}' is not supported")
    return params | ({"temperature": 0.0} if greedy else {})


def _with_stop_ids(params: dict[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
    """A stop string that is a special token, with or without blanks, is that token: no text shows it."""
    ids = sorted({special[stop.strip()] for stop in params["stop"] if stop.strip() in special})
    return params | {"stop": [stop for stop in params["stop"] if stop.strip() not in special], "stop_token_ids": ids}


def _seed(seed: int, request: Mapping[str, Any]) -> int:
    """Its own for every prompt and turn, whatever else is asked: neither prompts nor neighbouring seeds share draws."""
    drawn = json.dumps([seed, request["prompt"], request["turn"]])
    return int.from_bytes(hashlib.blake2b(drawn.encode(), digest_size=7).digest())


def _completion(done: Completion) -> dict[str, Any]:
    if done.error is not None:
        raise ValueError(f"a completion failed: {done.error}")
    loops = sum(done.loops) / len(done.loops) if done.loops else None
    return {"text": done.text or "", "tokens": len(done.token_ids), "loops": loops, "reason": done.finish_reason}
