"""How a token is chosen from logits: a pure function of them, the text so far, a seed and the token's place.

No generator is drawn from, so what a request gets depends on no other one, and a speculated token that is proposed from
an earlier loop under the same noise is the one that the last loop will choose as often as their distributions allow
(Gumbel coupling, arXiv 2408.07978).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from looplm.engine.policies import is_number, is_whole
from looplm.models.noise import position_gumbel
from looplm.models.precision import at_least_float32

_SAMPLING = -2  # the noise stream of sampling
_LARGEST = 1e30  # what a logit may be changed by: float32 still holds its sums and multiples


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks of the sampler, in vLLM's words.

    max_tokens, min_tokens: of the completion; no end or stop before `min_tokens`.
    temperature: 0 is greedy · top_k: 0 is off · top_p, min_p: nucleus, and the least share of the largest probability.
    repetition_penalty: divides (multiplies) positive (negative) logits of tokens in prompt or completion;
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the completion.
    logit_bias: added to the logits of token ids · seed: of this request; None draws from the engine's own seed.
    stop: strings that end the text and are left out of it · stop_token_ids: ids that end it, beyond the model's.
    ignore_eos: go on past the model's end tokens · n: completions of each prompt.
    logprobs: how many alternatives to report with every token, beside its own log-probability.
    logprobs_mode: whether a token's own log-probability is that under the "raw" logits, or "processed": under what it
        was drawn from, after penalties, biases, temperature and filters, which is what reinforcement learning needs.
    """

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int = 0
    logprobs_mode: Literal["raw", "processed"] = "raw"

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("min_tokens", 0), ("n", 1), ("top_k", 0), ("logprobs", 0)):
            _need(is_whole(getattr(self, name), least), self, name, f"a whole number of at least {least}")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _need(_is_usual(getattr(self, name)), self, name, f"a number between -{_LARGEST:g} and {_LARGEST:g}")
        _need(isinstance(self.ignore_eos, bool), self, "ignore_eos", "True or False")
        _need(self.logprobs_mode in ("raw", "processed"), self, "logprobs_mode", "'raw' or 'processed'")
        _need(self.min_tokens <= self.max_tokens, self, "min_tokens", f"at most max_tokens, {self.max_tokens}")
        _need(self.temperature >= 0, self, "temperature", "at least 0, which is greedy")
        _need(0 < self.top_p <= 1, self, "top_p", "above 0 and at most 1, which is off")
        _need(0 <= self.min_p <= 1, self, "min_p", "from 0, which is off, to 1")
        _need(self.repetition_penalty >= 1 / _LARGEST, self, "repetition_penalty", "above 0; 1 is off")
        seeds = self.seed is None or (is_whole(self.seed, 0) and self.seed < 2**63)
        _need(seeds, self, "seed", "a whole number of at least 0 and below 2**63, or None")
        ids = isinstance(self.stop_token_ids, Collection) and all(is_whole(token, 0) for token in self.stop_token_ids)
        _need(ids, self, "stop_token_ids", "token ids")
        biases = isinstance(self.logit_bias, Mapping) and all(
            is_whole(token, 0) and _is_usual(bias) for token, bias in self.logit_bias.items()
        )
        _need(biases, self, "logit_bias", f"a mapping from token ids to numbers between -{_LARGEST:g} and {_LARGEST:g}")
        stops = isinstance(self.stop, Collection) and all(isinstance(stop, str) and stop for stop in self.stops)
        _need(stops, self, "stop", "one string or several, none of them empty, which every text contains")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def edits(self) -> bool:
        """Whether logits are changed before anything is chosen."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or bool(self.logit_bias) or self.min_tokens > 0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One token to choose: by whose rules, under which seed, as which of the completion, after which text.

    ends: ids that may not come yet (`min_tokens`).
    """

    params: SamplingParams
    seed: int
    index: int
    prompt: Sequence[int]
    made: Sequence[int]
    ends: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Tokens [R] with their log-probabilities [R] as their modes ask, and how far the best logit led [R].

    The lead is that which a greedy choice sees: after penalties, biases and bans.
    """

    tokens: list[int]
    logprobs: list[float]
    leads: list[float]


def choose(logits: Tensor, asked: Sequence[Asked]) -> Chosen:
    """A token for each row of `logits` [R, V]."""
    wide = judged = at_least_float32(logits)
    edited = [row for row, ask in enumerate(asked) if ask.params.edits]
    if edited:
        judged = wide.clone()
        for row in edited:
            judged[row] = _edited(wide[row], asked[row])
    best = judged.max(-1)  # the first of equals, as argmax
    tokens, others = best.indices, judged.scatter(-1, best.indices[:, None], -math.inf).amax(-1)
    drawn = [row for row, ask in enumerate(asked) if ask.params.temperature > 0]
    scores = judged[:0]
    if drawn:
        scores = _scores(judged[drawn], [asked[row] for row in drawn])
        tokens = tokens.index_put((torch.tensor(drawn),), _drawn(scores, [asked[row] for row in drawn]))
    logprobs = wide.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist()
    if any(ask.params.logprobs_mode == "processed" for ask in asked):
        greedy = [row for row, ask in enumerate(asked) if ask.params.temperature == 0]
        for rows, under in ((drawn, scores), (greedy, judged[greedy])):
            found = under.log_softmax(-1).gather(-1, tokens[rows, None])[:, 0].tolist()
            for row, value in zip(rows, found, strict=True):
                if asked[row].params.logprobs_mode == "processed":
                    logprobs[row] = value
    return Chosen(tokens=tokens.tolist(), logprobs=logprobs, leads=(best.values - others).tolist())


def best_alternatives(logits: Tensor, num: int) -> list[tuple[int, float]]:
    """The `num` likeliest tokens of one row of logits [V], with their log-probabilities."""
    best = at_least_float32(logits).log_softmax(-1).topk(min(num, logits.shape[-1]))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _edited(logits: Tensor, ask: Asked) -> Tensor:
    """One row [V] under the request's penalties, biases and bans."""
    params, logits = ask.params, logits.clone()
    if params.repetition_penalty != 1:
        met = torch.tensor(sorted({*ask.prompt, *ask.made}), device=logits.device)
        found = logits[met]
        logits[met] = torch.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
    if ask.made and (params.presence_penalty or params.frequency_penalty):
        counts = torch.bincount(torch.tensor(ask.made, device=logits.device), minlength=len(logits)).to(logits.dtype)
        logits = logits - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if ask.index < params.min_tokens:
        logits[[token for token in ask.ends if 0 <= token < len(logits)]] = -math.inf
    return logits


def _scores(logits: Tensor, asked: Sequence[Asked]) -> Tensor:
    """Unnormalised log-probabilities [R, V], float64, that tokens are drawn from: tempered, -inf where filtered out."""
    temperatures = torch.tensor([[ask.params.temperature] for ask in asked], device=logits.device, dtype=torch.float64)
    # From the best one down, else the least temperatures would overflow.
    scores = (logits.double() - logits.amax(-1, keepdim=True)) / temperatures.view(-1, 1)
    return _filtered(scores, [ask.params for ask in asked])


def _drawn(scores: Tensor, asked: Sequence[Asked]) -> Tensor:
    """argmax(log p + Gumbel noise)."""
    seeds = torch.tensor([ask.seed for ask in asked], device=scores.device)
    places = torch.tensor([[ask.index] for ask in asked], device=scores.device)
    return (scores + position_gumbel(places, scores.shape[-1], seeds, _SAMPLING)[:, 0]).argmax(-1)


def _filtered(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`scores` [R, V] with -inf for what top-k, then top-p, then min-p leaves out (vLLM's order; min-p on its own)."""
    if all(one.top_k == 0 and one.top_p == 1 and one.min_p == 0 for one in params):
        return scores
    size, device = scores.shape[-1], scores.device
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(size, device=device)
    most = torch.tensor([min(one.top_k or size, size) for one in params], device=device)[:, None]
    kept = ranks < most
    probs = ranked.masked_fill(~kept, -math.inf).softmax(-1)
    top_p = torch.tensor([one.top_p for one in params], device=device, dtype=torch.float64)[:, None]
    # The first token always stays; so does each whose predecessors do not reach top_p yet.
    kept &= (probs.cumsum(-1) - probs < top_p) | (top_p >= 1)
    min_p = torch.tensor([one.min_p for one in params], device=device, dtype=torch.float64)[:, None]
    kept &= probs >= min_p * probs[:, :1]
    return scores.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -math.inf)


def _need(good: bool, params: SamplingParams, name: str, what: str) -> None:
    if not good:
        raise ValueError(f"{name}={getattr(params, name)!r} must be {what}")


def _is_usual(value: object) -> bool:
    return is_number(value) and abs(value) <= _LARGEST
