"""The model under evaluation: its depths in order, what is told of it, and what exits cost."""

import pytest

import looplm
from conftest import tiny_model
from harness_tasks import character_tokenizer
from looplm.engine import SamplingParams
from looplm.evals.accounting import costs_of
from looplm.evals.asking import asked_ids, text_ids, turn_ends
from looplm.evals.results import Evaluation, Item
from looplm.evals.solvers import engine_solver
from looplm.evals.subject import ModelSettings, open_subject


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    looplm.save(tiny_model(vocab_size=98), folder)
    character_tokenizer(starts=True).save_pretrained(folder)
    return folder


def opened(folder, **settings):
    return open_subject(ModelSettings(model=str(folder), **settings))


def test_depths_grow_and_exits_come_last(folder):
    depths = opened(folder, loops=(4, 1, 4), exits=("q=0.5",)).depths
    assert [depth.name for depth in depths] == ["loops=1", "loops=4", "exit q=0.5"]
    assert [depth.name for depth in opened(folder).depths] == ["loops=3"]
    assert [depth.name for depth in opened(folder, exits=("q=0.5",)).depths] == ["exit q=0.5"]


def costs(subject, *items):
    made = [Item(id=str(n), metrics={}, tokens=tokens, loops=loops) for n, (tokens, loops) in enumerate(items)]
    found = Evaluation(settings={"limit": 2}, scores=[], items={"t": {"exit q=0.5": made}})
    return subject.result(found).costs["exit q=0.5"]


def test_an_exit_rule_costs_what_its_tokens_did(folder):
    subject = opened(folder, exits=("q=0.5",), kv="last", dtype="bfloat16")
    config = subject.model.config
    flops = [costs_of(config, loops)["flops per token"] for loops in (1, 2, 3)]
    found = costs(subject, (6, 1.5), (2, 3.0), (0, None))  # (9 + 6) / 8 = 1.875 loops
    assert found["mean loops"] == 1.875
    assert found["flops per token"] == pytest.approx(flops[0] + 0.875 * (flops[1] - flops[0]))
    assert found["kv bytes per token"] == 2 * 2 * 32 * 2  # one slot of two layers: keys, values; 32 wide, two bytes
    whole = opened(folder, exits=("q=0.5",))
    assert costs(whole, (3, 3.0)) == costs_of(config, 3, dtype=whole.model.dtype)
    assert costs(whole, (0, None)) == {}


def test_what_is_told_of_a_model_changes_with_it(folder, tmp_path):
    first = opened(folder).settings
    looplm.save(tiny_model(seed=1, vocab_size=98), tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    second = opened(tmp_path).settings
    assert {name for name in first if first[name] != second[name]} == {"model", "checkpoint", "tokenizer"}
    assert opened(folder).result(Evaluation(settings={"limit": 2}, scores=[])).settings == {**first, "limit": 2}


def test_text_begins_as_the_tokenizer_does_and_turns_as_the_template(folder):
    starts, plain = character_tokenizer(starts=True), character_tokenizer()
    assert asked_ids(starts, "ab") == text_ids(starts, "<s>ab") == [0, 68, 69]
    assert asked_ids(plain, "ab") == [68, 69]
    turns = [{"role": "user", "content": "a"}]
    assert asked_ids(starts, turns) == text_ids(plain, "<user>a|<assistant>")
    begun = [*turns, {"role": "assistant", "content": "b"}]
    assert asked_ids(starts, begun) == text_ids(plain, "<user>a|<assistant>b")
    assert turn_ends(starts) == []


def test_a_solver_reads_the_start_token_and_has_room_for_the_longest_prompt(folder):
    subject = opened(folder, loops=(1, 2))
    prompts = ["a", "a longer prompt"]
    heard = []
    solver = engine_solver(
        subject, prompts, SamplingParams(), 5, advance=lambda *told: heard.append(told)
    )  # fmt: skip
    attempts = solver.complete(prompts, [[0], [0]], subject.depths[0].policy, 5)
    ids = [[0, *text_ids(character_tokenizer(), prompt)] for prompt in prompts]
    engine = looplm.Engine(subject.model, loops=2, depth=subject.depths[0].policy)
    alone = engine.generate(ids, SamplingParams(max_tokens=5))
    assert [attempt.token_ids for (attempt,) in attempts] == [each.token_ids for each in alone]
    assert heard == [("answers at loops=1", done, 2) for done in range(3)]
    with pytest.raises(ValueError, match="together more than max_length=21"):
        solver.complete(["a longer prompt."], [[0]], subject.depths[0].policy, 5)
