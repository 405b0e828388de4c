"""What a step asks: questions in their order, others where one cannot be used, and each process's share of groups."""

import pytest
import torch
from rl_runs import policy, write_recipe

from looplm.data.tokenizer import load_tokenizer
from looplm.rl.collect import Collector, own_places, prompt_tokens
from looplm.rl.questions import Question
from looplm.rl.rollouts import Rollout
from looplm.training.distribution import World

WRITES_ITSELF = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(policy(tmp_path_factory.mktemp("policy")))


class Numbered:
    """Questions `0` to `size - 1`, of which those that `fits` names are short; a reward of 0 for everything."""

    def __init__(self, size, fits=lambda number: True):
        self.size, self.fits, self.calls = size, fits, []

    def question(self, seed, split):
        number = seed % self.size
        return Question(prompt="1" if self.fits(number) else "1" * 99, columns={"number": number})

    def reward(self, questions, texts, token_ids):
        self.calls.append([question.columns["number"] for question in questions])
        return [0.0] * len(questions)


class Silent:
    """A source whose completions all say one digit."""

    def sample(self, prompts, seeds, group):
        one = Rollout(
            prompt_ids=[1], token_ids=[2], loops=[3], logprobs=[-1.0], text="1", finished=True, max_loops=3
        )  # fmt: skip
        return [[one] * group for _ in prompts]


def collector(folder, tokenizer, environment, *overrides):
    return Collector(write_recipe(folder, overrides), environment, tokenizer, Silent(), World())


@pytest.mark.parametrize("dead", ["keep", "resample"])
def test_every_question_is_asked_once_before_any_is_asked_again(tmp_path, tokenizer, dead):
    """All groups are dead: where they are drawn anew, others take their place, and the order stays what it was."""
    environment = Numbered(24)
    asks = collector(tmp_path, tokenizer, environment, f"advantages={{dead: {dead}, attempts: 2}}", "sampling.group=2")
    first = []
    for step in range(12):
        environment.calls.clear()
        asks.collect(step)
        assert len(environment.calls) == (3 if dead == "resample" else 1)
        once = [call[::2] for call in environment.calls]
        assert all(len({*places}) == len(places) for places in zip(*once, strict=True))  # other prompts, each time
        first += once[0]
    assert first == [*range(24), *range(24)]


@pytest.mark.parametrize("size", [64, 1000, 24])
def test_a_prompt_that_is_too_long_gives_way_to_any_other(tmp_path, tokenizer, size):
    """Only one question of a power of two, or of any number, fits: a thousand tries reach it from everywhere."""
    environment = Numbered(size, fits=lambda number: number == size - 1)
    asks = collector(tmp_path, tokenizer, environment, "sampling.prompts=1", "sampling.group=2")
    for step in (0, 3, 17):
        environment.calls.clear()
        assert 0 < asks.collect(step).counts["too_long_prompts"] < size
        assert environment.calls == [[size - 1] * 2]


def test_nothing_is_marked_where_nothing_is_missing(tmp_path, tokenizer):
    """A group that lives is not drawn anew, and rewards are not asked about no completion at all."""
    environment = Numbered(24)
    environment.reward = lambda questions, texts, ids: environment.calls.append(len(texts)) or [0.0, 1.0] * 4
    asks = collector(tmp_path, tokenizer, environment, "advantages={dead: resample}", "sampling.group=2")
    assert asks.collect(0).counts["resampled_groups"] == 0
    assert environment.calls == [8]


def test_processes_share_every_minibatch():
    assert own_places(8, 1, World()) == list(range(8))
    assert [own_places(8, 2, World(rank=rank, size=2)) for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [own_places(3, 1, World(rank=rank, size=2)) for rank in range(2)] == [[0], [1, 2]]
    for prompts, minibatches, size in ((32, 16, 4), (6, 3, 4), (6, 4, 1)):
        with pytest.raises(
            ValueError, match=f"sampling.prompts={prompts} cannot be cut into minibatches={minibatches}"
        ):
            own_places(prompts, minibatches, World(size=size))


def test_prompts_that_no_tokenizer_takes_are_named(tokenizer):
    assert prompt_tokens(tokenizer, Question(prompt="12=", columns={})) == tokenizer.encode("12=")
    tokenizer = load_tokenizer(tokenizer.name_or_path)
    tokenizer.chat_template = WRITES_ITSELF + "{{ m.content }}{% endfor %}"
    turn = {"role": "user", "content": "12="}
    assert prompt_tokens(tokenizer, Question(prompt=[turn], columns={})) == tokenizer.encode("12=")
    for prompt, why in (
        ("é", "more than the words"), ("", "no token"), ([turn | {"role": "system"}], "no system role"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^a.jsonl line 7 cannot be asked: .*{why}"):
            prompt_tokens(tokenizer, Question(prompt=prompt, columns={}, where="a.jsonl line 7"))
        with pytest.raises(ValueError, match=f"cannot be asked: .*{why}"):
            prompt_tokens(tokenizer, Question(prompt=prompt, columns={}))


def test_advantages_are_those_of_the_places(tmp_path, tokenizer):
    """A process that has the places 1 and 3 of a step reads its own rows of all processes' rewards."""
    environment = Numbered(24)
    environment.reward = lambda questions, texts, ids: [float(q.columns["number"] == 3) for q in questions[:-1]] + [5.0]
    asks = collector(tmp_path, tokenizer, environment, "sampling.group=2")
    asks.places = [1, 3]
    scored = asks.collect(0).scored
    rewards = torch.tensor([[0, 0], [0, 0], [0, 0], [1, 5]]).double()
    wanted = asks.recipe.advantages.of(rewards)[[1, 3]]
    assert [[one.advantage for one in group] for group in scored] == wanted.tolist()
