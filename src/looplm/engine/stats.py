"""What an engine has done so far, counted."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class Stats:
    """Counts since the engine began.

    ticks: those with a core step of generated tokens · core_steps: applications of the core to one of them; times its
        layers, of blocks
    loops: of the tokens made · near_ties: greedy choices by a lead below 1e-4
    proposed: tokens that were proposed before they were final, agreed: rightly, the first time · rejected: tokens that
        had entered and were replaced.
    """

    ticks: int = 0
    core_steps: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    loops: int = 0
    near_ties: int = 0
    proposed: int = 0
    agreed: int = 0
    rejected: int = 0
