"""A completion's text as its tokens come: whole characters only, ended by the earliest stop string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"  # what a decoder gives for bytes that are no whole character (yet)
_WINDOW = 6  # tokens at least that are decoded with the new ones, for tokenizers that look back


class TextBuilder:
    """Decodes tokens one by one and looks for stop strings.

    `text` is all that is final; `pending` what may still become part of a stop string. The earliest stop is the one
    that ends first, of several that end together the longest: however the text is cut into tokens, it is the same one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.longest = max((len(stop) for stop in stops), default=0)
        self.tokens: list[int] = []
        self.text = ""
        self.pending = ""
        self.stopped = False
        self._start = self._next_start = 0  # places between tokens at which a character ends
        self._taken = 0  # characters known of the tokens from `_start` on

    def add(self, token: int, may_stop: bool = True) -> bool:
        """Take one token; True if the text now ends at a stop string, which then is no part of it.

        may_stop: False passes over stop strings that are complete with this token.
        """
        self.tokens.append(token)
        decoded = self._decode()
        whole = decoded.rstrip(_BROKEN)
        new = whole[self._taken :]
        self._taken += len(new)
        if whole == decoded:
            self._slide()
        return bool(new) and self._settle(new, may_stop)

    def finish(self) -> None:
        """No token follows: what was held back is text, broken bytes included, unless a stop string ended it."""
        if self.stopped:
            return
        decoded = self._decode()
        self.text += self.pending + decoded[self._taken :]
        self.pending, self._taken = "", len(decoded)

    def _settle(self, new: str, may_stop: bool) -> bool:
        """Find a stop string that ends in `new`; else keep back what may begin one."""
        old = len(self.pending)
        self.pending += new
        found = [(place + len(stop), place) for stop in self.stops if (place := self._place(stop, old)) >= 0]
        if found and may_stop:
            self.stopped = True
            self.text, self.pending = self.text + self.pending[: min(found)[1]], ""
            return True
        cut = len(self.pending) - self._could_begin_a_stop()
        self.text, self.pending = self.text + self.pending[:cut], self.pending[cut:]
        return False

    def _place(self, stop: str, old: int) -> int:
        """Where in `pending` the first `stop` begins that ends after `old` characters; -1 if there is none."""
        return self.pending.find(stop, max(0, old - len(stop) + 1))

    def _could_begin_a_stop(self) -> int:
        """How many characters at the end of `pending` a stop string may begin with."""
        for size in range(min(self.longest - 1, len(self.pending)), 0, -1):
            if any(len(stop) > size and stop.startswith(self.pending[-size:]) for stop in self.stops):
                return size
        return 0

    def _slide(self) -> None:
        """Leave behind tokens that are too old to matter."""
        if len(self.tokens) - self._next_start >= _WINDOW:
            self._start, self._next_start = self._next_start, len(self.tokens)
            self._taken = len(self._decode())

    def _decode(self) -> str:
        return str(self.tokenizer.decode(self.tokens[self._start :], skip_special_tokens=True))
