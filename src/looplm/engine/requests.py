"""A request, what it has come to so far, and what its user gets."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from looplm.engine.pages import Block
from looplm.engine.policies import DepthPolicy
from looplm.engine.sampling import Asked, SamplingParams
from looplm.engine.speculation import RowAcceptance
from looplm.engine.store import PAGE
from looplm.engine.text import TextBuilder

FinishReason = Literal["stop", "length", "cancelled", "error"]
Alternatives = list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be made, for one completion.

    loops: the depth of its prefill, and the most that a token may do · min_loops: the least, on top of the policy's.
    ends: ids that end it · replay: the loops of each token, instead of the policy's decisions.
    state_seed: of the random start state, where the model has one · warm_start: each token starts from the state that
        the one before it left with (Huginn's continuous chain of thought).
    """

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    depth: DepthPolicy
    loops: int
    seed: int
    min_loops: int = 1
    ends: frozenset[int] = frozenset()
    replay: tuple[int, ...] = ()
    state_seed: int = 0
    warm_start: bool = False

    @property
    def longest(self) -> int:
        """Tokens of prompt and completion at most."""
        return len(self.prompt) + self.params.max_tokens


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished completion.

    loops: how many each token did · logprobs: of each token, as `SamplingParams.logprobs_mode` says
    top_logprobs: alternatives to each, where asked for · error: why, where the reason is "error".
    """

    number: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    loops: list[int]
    logprobs: list[float]
    top_logprobs: list[Alternatives]
    text: str | None
    finish_reason: FinishReason
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One token of a stream.

    index: its place in the completion · text: what it adds to the text that is final (whole characters only)
    provisional: read from an earlier loop; a later event of the same index says what it came to
    completion: with the last event of a request.
    """

    number: int
    index: int
    token: int | None
    loops: int
    logprob: float
    text: str = ""
    alternatives: Alternatives = field(default_factory=list)
    provisional: bool = False
    completion: Completion | None = None


@dataclass(kw_only=True, eq=False)
class Choice:
    """What one reading of a state chose as the next token."""

    token: int
    logprob: float
    lead: float
    alternatives: Alternatives


@dataclass(kw_only=True, eq=False)
class Lane:
    """One token on its way through the loop; lanes of one row follow one another in position.

    loop: loops that it has done · last: that it may do · forced: that it must do, 0 if the policy decides
    entered: it is embedded, and in the loop · left: it is out again · dropped: it is done, or was not to be
    choice: the next token by its newest reading · settled: that reading was of its exit
    behind: it left early, and later tokens may still ask for its deeper loops
    proposals: the next token by each loop at which it was read.
    """

    row: "Row"
    number: int
    token: int
    position: int
    last: int
    forced: int = 0
    loop: int = 0
    left: bool = False
    settled: bool = False
    entered: bool = False
    behind: bool = False
    dropped: bool = False
    proposals: dict[int, int] = field(default_factory=dict)
    choice: Choice | None = None


@dataclass(kw_only=True, eq=False)
class PromptBlock:
    """A block of a row's prompt on its way through the loop, all loops of it.

    index: which block of the prompt · slot: where its tokens' states are kept · loop: loops that it has done
    states: those [D] of the prompt's last token, before and after every loop, if it is in this block.
    """

    row: "Row"
    index: int
    slot: int
    loop: int = 0
    states: list[Tensor] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The loops that it is to do."""
        return self.row.request.loops

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its tokens, PAGE of them or, in a prompt's last block, fewer."""
        return self.row.request.prompt[self.index * PAGE : (self.index + 1) * PAGE]

    @property
    def ends(self) -> bool:
        """Whether the prompt's last token is in it."""
        return self.index + 1 == self.row.prompt_blocks


@dataclass(kw_only=True, eq=False)
class Row:
    """A request in the engine: tokens so far, pages, and lanes.

    number: its place in the page tables, -1 while it waits · blocks: pages in order of position
    weights: the memory's count of the model's weights when it came in
    begun, prefilled: blocks of the prompt that are in the loop or have been, and that are done
    made, loops, ...: what is known of the completion; `done` tokens of it lie before the head lane, and after a
        preemption the rest is made anew, as it was.
    """

    request: Request
    number: int = -1
    weights: int = 0
    text: TextBuilder | None = None
    blocks: list[Block] = field(default_factory=list)
    begun: int = 0
    prefilled: int = 0
    made: list[int] = field(default_factory=list)
    loops: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    done: int = 0
    lanes: deque[Lane] = field(default_factory=deque)
    behind: list[Lane] = field(default_factory=list)
    last_state: Tensor | None = None
    acceptance: RowAcceptance | None = None

    @property
    def prompt_blocks(self) -> int:
        """Blocks that the prompt takes."""
        return -(-len(self.request.prompt) // PAGE)

    def forced_loops(self, index: int) -> int:
        """The loops that token `index` of the completion must do, 0 if its policy decides."""
        if index < len(self.loops):
            return self.loops[index]
        return self.request.replay[index] if index < len(self.request.replay) else 0

    def index(self, position: int) -> int:
        """Which token of the completion follows the token at `position`."""
        return position - len(self.request.prompt) + 1

    def asked(self, lane: Lane) -> Asked:
        """What the sampler is asked for after `lane`: its tokens include those that are only proposed."""
        index = self.index(lane.position)
        proposed = [other.token for other in self.lanes if self.done < self.index(other.position) <= index]
        return Asked(
            params=self.request.params, seed=self.request.seed, index=index, prompt=self.request.prompt,
            made=self.made[: self.done] + proposed, ends=self.request.ends,
        )  # fmt: skip

    def add(self, choice: Choice, loops: int) -> None:
        """One more token of the completion."""
        self.made.append(choice.token)
        self.loops.append(loops)
        self.logprobs.append(choice.logprob)
        self.top_logprobs.append(choice.alternatives)

    def add_text(self, token: int, may_stop: bool) -> tuple[str, bool]:
        """What `token` adds to the text that is final, and whether a stop string ends it."""
        if self.text is None:
            return "", False
        before = len(self.text.text)
        stopped = self.text.add(token, may_stop)
        return self.text.text[before:], stopped

    def end_text(self) -> str:
        """What was held back, now that no token follows."""
        if self.text is None:
            return ""
        before = len(self.text.text)
        self.text.finish()
        return self.text.text[before:]

    def completion(self, reason: FinishReason, error: str | None = None) -> Completion:
        """What the user gets."""
        return Completion(
            number=self.request.number, prompt_token_ids=list(self.request.prompt), token_ids=list(self.made),
            loops=list(self.loops), logprobs=list(self.logprobs), top_logprobs=list(self.top_logprobs),
            text=None if self.text is None else self.text.text, finish_reason=reason, error=error,
        )  # fmt: skip
