"""A completion's text as its tokens come: whole characters only, ended by the earliest stop string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_BROKEN = "\ufffd"  # what a decoder gives for bytes that are no whole character (yet)
_WINDOW = 6  # tokens before the new ones that are decoded with them, for tokenizers that look back


class TextBuilder:
    """Decodes tokens one by one and looks for stop strings.

    `text` is all that is final; `pending` what may still become part of a stop string or of a character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.longest = max((len(stop) for stop in stops), default=0)
        self.tokens: list[int] = []
        self.text = ""
        self.pending = ""
        self._start = self._read = 0

    def add(self, token: int, may_stop: bool = True) -> bool:
        """Take one token; True if the text now ends at a stop string, which then is no part of it."""
        self.tokens.append(token)
        before = self._decode(self._start, self._read)
        after = self._decode(self._start, len(self.tokens))
        if len(after) <= len(before) or after.endswith(_BROKEN):
            return False
        self.pending += after[len(before) :]
        self._start, self._read = max(self._start, self._read - _WINDOW), len(self.tokens)
        if may_stop:
            return self._settle()
        self.text, self.pending = self.text + self.pending, ""
        return False

    def finish(self) -> None:
        """No token follows: what was held back is text, broken bytes included."""
        before = self._decode(self._start, self._read)
        after = self._decode(self._start, len(self.tokens))
        self.text += self.pending + after[len(before) :]
        self.pending = ""
        self._read = len(self.tokens)

    def _settle(self) -> bool:
        found = [(self.pending.find(stop), stop) for stop in self.stops if stop in self.pending]
        if found:
            place, _ = min(found)
            self.text, self.pending = self.text + self.pending[:place], ""
            return True
        held = self._could_begin_a_stop()
        cut = len(self.pending) - held
        self.text, self.pending = self.text + self.pending[:cut], self.pending[cut:]
        return False

    def _could_begin_a_stop(self) -> int:
        """How many characters at the end of `pending` a stop string may begin with."""
        for size in range(min(self.longest - 1, len(self.pending)), 0, -1):
            if any(stop.startswith(self.pending[-size:]) for stop in self.stops):
                return size
        return 0

    def _decode(self, start: int, stop: int) -> str:
        return str(self.tokenizer.decode(self.tokens[start:stop], skip_special_tokens=True))
