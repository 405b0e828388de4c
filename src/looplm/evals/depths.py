"""At which depths a model is evaluated: fixed loops, or an exit policy with its threshold."""

from collections.abc import Sequence
from dataclasses import dataclass

from looplm.engine import DepthPolicy, FixedLoops
from looplm.engine.calibration import FAMILIES
from looplm.models import LoopLMConfig

_ALIASES = {"q": "exit_cdf"}  # Ouro's threshold
_FIXED = "loops="


@dataclass(frozen=True, kw_only=True)
class Depth:
    """A name for tables, the most loops that a token may do, and when it leaves."""

    name: str
    loops: int
    policy: DepthPolicy

    @property
    def fixed(self) -> bool:
        """Whether every token does the same loops."""
        return isinstance(self.policy, FixedLoops)


def fixed_depths(loops: Sequence[int]) -> list[Depth]:
    """One for each loop count, called "loops=4".

    Raises:
        ValueError: if there is none, or one is below 1.
    """
    if not loops:
        raise ValueError("loops is empty; name at least one loop count, such as 4")
    if min(loops) < 1:
        raise ValueError(f"loops={list(loops)} must be whole numbers of at least 1")
    return [Depth(name=f"{_FIXED}{count}", loops=count, policy=FixedLoops(count)) for count in dict.fromkeys(loops)]


def is_fixed(name: str) -> bool:
    """Whether the depth of this name is one of `fixed_depths`."""
    return name.startswith(_FIXED)


def exit_depth(rule: str, config: LoopLMConfig, loops: int | None = None) -> Depth:
    """An exit policy written as "q=0.5" or "FAMILY=THRESHOLD", of at most `loops`, the model's own by default.

    Raises:
        ValueError: for another form, an unknown family, or a model that has not what it looks at.
    """
    family, _, threshold = rule.partition("=")
    known = _ALIASES.get(family, family)
    try:
        value = float(threshold)
    except ValueError:
        value = None
    if known not in FAMILIES or value is None:
        raise ValueError(f"'{rule}' is no exit rule; write q=0.5, or one of {', '.join(FAMILIES)} with its threshold")
    policy, most = FAMILIES[known].policy(value), config.loops if loops is None else loops
    policy.check_model(config, most)
    return Depth(name=f"exit {rule}", loops=most, policy=policy)
