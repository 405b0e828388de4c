"""The speculation benchmark counts what it says."""

import pytest

from conftest import tiny_model
from looplm.engine import Engine, SamplingParams
from looplm.studies.bench_speculate import bench_speculate

PROMPTS = [[1, 2, 3, 4], [9, 8, 7]]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def test_every_way_makes_the_same_tokens_and_another_is_compared():
    model = tiny_model().double()

    def other(prompts, tokens):
        """Plain decoding, but for one token of each completion."""
        made = [done.token_ids for done in Engine(model, max_length=32).generate(prompts, PARAMS)]
        return [[(made[0][0] + 1) % 61, *own[1:tokens]] for own in made]

    rows = bench_speculate(model, PROMPTS, PARAMS, repeats=2, deterministic=False, against=other)
    ways = {row.way: row for row in rows}
    assert list(ways) == [
        "plain", "adaptive", "entry 1", "entry 1, read once", "entry 2", "entry 2, read once", "other",
    ]  # fmt: skip
    assert [row.differing for row in rows] == [0] * 6 + [2]
    plain = ways["plain"]
    assert plain.ticks == 3 * 5 / 6  # the first token is read from its prompt
    for row in rows:
        assert row.speedup == pytest.approx(plain.seconds / row.seconds)
        assert row.of_ceiling == pytest.approx(row.speedup / row.ceiling)
    assert ways["entry 1"].ticks <= ways["entry 2"].ticks <= plain.ticks
