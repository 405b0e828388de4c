"""The mark that a judge's reply gives, or none: what is unclear is never guessed."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

_NUMBER = r"(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*(\d+))?"
_FREE = r"[ \t#*_>`\"'-]*"
_LINE = re.compile(
    rf"^{_FREE}(?:the\s*)?(?:(?:final|overall)\s+)?(?:score|rating){_FREE}[:=][ \t*_`\"']*{_NUMBER}[ \t*_`\"'.,]*$",
    re.MULTILINE | re.IGNORECASE,
)
_BRACKETS = re.compile(rf"\[\[\s*{_NUMBER}\s*\]\]")
_FIELDS = ("score", "rating")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Marks from `low` to `high`; `whole` ones only, or fractions, too."""

    low: int
    high: int
    whole: bool = True

    def read(self, reply: str) -> float | None:
        """The mark of a reply: in a line of its own (`Score: 4`, `Score: 4/5`), as `[[4]]`, or as `{"score": 4}`.

        "rating" means the same as "score"; what a judge thinks before `</think>` is passed over. None if there is no
        such mark, if there are two that differ, or if one is not on the scale.
        """
        reply = reply.rpartition("</think>")[2]
        if "<think>" in reply:  # cut off while it was thinking
            return None
        marks = {self._on_scale(*found) for found in (*_written(reply), *_in_json(reply))}
        return marks.pop() if len(marks) == 1 else None

    def _on_scale(self, number: str, out_of: str | None) -> float | None:
        try:
            mark = float(number)
        except ValueError:
            return None
        good = self.low <= mark <= self.high and (mark.is_integer() or not self.whole)
        return mark if good and (out_of is None or float(out_of) == self.high) else None


def _written(reply: str) -> Iterator[tuple[str, str | None]]:
    for pattern in (_LINE, _BRACKETS):
        for found in pattern.finditer(reply):
            yield found[1], found[2]


def _in_json(reply: str) -> Iterator[tuple[str, None]]:
    """The marks of the JSON objects in a reply, as they would be printed; what is no number becomes none, either."""
    decoder = json.JSONDecoder()
    for brace in re.finditer(r"\{", reply):
        try:
            values, _ = decoder.raw_decode(reply, brace.start())
        except (ValueError, RecursionError):
            continue
        yield from ((str(value), None) for name, value in values.items() if name.lower() in _FIELDS)
