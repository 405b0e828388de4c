"""The reasoning harness against scripted answers whose scores are known, and against single runs of the engine."""

from itertools import product

import pytest
from scripted_solver import Scripted, same_box

from conftest import tiny_model
from looplm.data.tokenizer import CHAT_TOKENS, train_tokenizer
from looplm.engine import Engine, ExitCDF, FixedLoops, SamplingParams
from looplm.evals.depths import fixed_depths
from looplm.evals.marking import boxed_letter, boxed_math
from looplm.evals.prompts import Problem, Prompting, Worked
from looplm.evals.reasoning import ReasoningTest, accuracy_by_loops, budget_curve, k_shot_saturation, solve
from looplm.evals.solvers import Attempt, EngineSolver
from looplm.tasks.answers import BOX_INSTRUCTION
from looplm.tasks.math_answers import MathGrader

PROBLEMS = [Problem(id=f"p{n}", question=f"What is {n} + {n}?", answer=str(2 * n)) for n in range(4)]
BOX = r"\boxed{%s}"  # eight characters and the answer's


def asked(prompt: str) -> int:
    """Which problem a prompt asks."""
    return next(n for n in range(4) if f"What is {n} + {n}?" in prompt)


def scores(found, task, depth):
    return {score.metric: score.value for score in found.scores if (score.task, score.depth) == (task, depth)}


# Scripted answers ---------------------------------------------------------------------------------------------


def by_depth(prompt: str, loops: int, sample: int) -> str:
    """Problem n is solved from loop n + 1 on, after 10·n characters."""
    n = asked(prompt)
    return " " * 10 * n + BOX % (2 * n if loops > n else 9)


def test_budgets_are_read_of_one_generation_at_each_depth():
    solver = Scripted(by_depth)
    test = ReasoningTest(task="sums")
    found = budget_curve(solver, PROBLEMS, test, same_box, fixed_depths([1, 2, 4]), budgets=(9, 25, 100))
    assert solver.calls == 3
    table = {
        (budget, loops): scores(found, f"sums tokens={budget}", f"loops={loops}")["right"]
        for budget, loops in product((9, 25, 100), (1, 2, 4))
    }
    # Answers take 9, 19, 29 and 39 characters.
    assert table == {
        (9, 1): 0.25, (9, 2): 0.25, (9, 4): 0.25, (25, 1): 0.25, (25, 2): 0.5, (25, 4): 0.5,
        (100, 1): 0.25, (100, 2): 0.5, (100, 4): 1.0,
    }  # fmt: skip
    cut = scores(found, "sums tokens=25", "loops=4")
    assert (cut["tokens"], cut["hit_limit"], cut["loops"]) == ((9 + 19 + 25 + 25) / 4, 0.5, 4.0)
    assert scores(found, "sums tokens=9", "loops=4")["hit_limit"] == 0.75  # the first ends at the very limit
    item = found.items["sums tokens=25"]["loops=2"][3]
    assert (item.id, item.tokens, item.loops) == ("p3", 25, 2.0)
    assert item.metrics == {"right": 0.0, "tokens": 25.0, "hit_limit": 1.0}


def test_a_score_has_the_standard_error_of_its_items():
    found = accuracy_by_loops(Scripted(by_depth), PROBLEMS, ReasoningTest(task="sums"), same_box, [2])
    right = next(score for score in found.scores if score.metric == "right")
    assert (right.value, right.items) == (0.5, 4)
    assert right.stderr == pytest.approx((4 * 0.25 / 3 / 4) ** 0.5)


def test_samples_by_seed_and_pass_at_k():
    """Problem n is right in the first n of four samples."""
    solver = Scripted(lambda prompt, _, sample: BOX % (2 * asked(prompt) if sample < asked(prompt) else 9))
    test = ReasoningTest(task="sums", seeds=(5, 6, 7, 8), pass_at=(1, 2, 4), budgets=(64,))
    found = accuracy_by_loops(solver, PROBLEMS, test, same_box, [3])
    told = scores(found, "sums tokens=64", "loops=3")
    assert [told[f"right/seed={seed}"] for seed in (5, 6, 7, 8)] == [0.75, 0.5, 0.25, 0.0]
    assert told["right"] == told["pass@1"] == 0.375
    assert told["right/deviation"] == pytest.approx((2 * (0.375**2 + 0.125**2) / 3) ** 0.5)
    # Of 4 samples c are right; two drawn are both wrong with chance C(4 - c, 2) / 6.
    assert told["pass@2"] == pytest.approx((0 + (1 - 3 / 6) + (1 - 1 / 6) + 1) / 4)
    assert told["pass@4"] == 0.75
    assert found.items["sums tokens=64"]["loops=3"][1].metrics["right"] == 0.25
    (seeds,) = solver.seeds
    assert len({seed for each in seeds for seed in each}) == 16
    alone = Scripted(lambda *_: "")
    accuracy_by_loops(alone, PROBLEMS[2:3], test, same_box, [3])
    assert alone.seeds == [[seeds[2]]]  # a problem's seeds are its own, whatever else is asked


def test_what_cannot_be_marked_is_in_no_mean_and_named():
    problems = [*PROBLEMS, Problem(id="odd", question="What is 1 + 1?", answer="?")]
    found = accuracy_by_loops(Scripted(by_depth), problems, ReasoningTest(task="sums"), same_box, [4])
    assert found.settings["reasoning"]["sums"]["unmarked"] == ["odd"]
    assert scores(found, "sums tokens=2048", "loops=4")["right"] == 1.0
    assert [item.id for item in found.items["sums tokens=2048"]["loops=4"]] == ["p0", "p1", "p2", "p3"]
    with pytest.raises(ValueError, match="no answer of sums can be marked"):
        accuracy_by_loops(Scripted(by_depth), problems[-1:], ReasoningTest(task="sums"), same_box, [4])


def test_more_examples_need_more_loops():
    """With k examples a model is right from loop k + 1 on, and with none never past a half."""
    examples = [Worked(question=f"Example {n}?", solution=BOX % n) for n in range(5)]

    def script(prompt: str, loops: int, sample: int) -> str:
        shots = prompt.count("Example ")
        return BOX % (2 * asked(prompt) if loops > shots and (shots or asked(prompt) < 2) else 9)

    test = ReasoningTest(task="sums", budgets=(64,), prompting=Prompting(chat=False))
    found = k_shot_saturation(
        Scripted(script), PROBLEMS, test, same_box, examples, fixed_depths([1, 2, 4]), shots=(0, 1, 3)
    )  # fmt: skip
    table = [
        [scores(found, f"sums shots={shots} tokens=64", f"loops={loops}")["right"] for loops in (1, 2, 4)]
        for shots in (0, 1, 3)
    ]
    assert table == [[0.5, 0.5, 0.5], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    assert [told["shots"] for told in found.settings["reasoning"].values()] == [0, 1, 3]
    with pytest.raises(ValueError, match="from 0 to that of the examples, 5"):
        k_shot_saturation(Scripted(script), PROBLEMS, test, same_box, examples, fixed_depths([1]), shots=(0, 50))
    leak = [Worked(question=PROBLEMS[1].question, solution=BOX % 2)]
    with pytest.raises(ValueError, match=r"an example is a problem, too: 'What is 1 \+ 1\?'"):
        k_shot_saturation(Scripted(script), PROBLEMS, test, same_box, leak, fixed_depths([1]), shots=(1,))


def test_settings_tell_tests_apart():
    def settings(problems=PROBLEMS, **changes):
        test = ReasoningTest(task="sums", **changes)
        return solve(Scripted(by_depth), problems, test, same_box, fixed_depths([4]), {"hash": "x"}).settings

    plain = settings()
    assert plain == settings()
    assert plain["hash"] == "x"
    assert plain["reasoning"]["sums"]["temperature"] == 0.5
    assert plain["reasoning"]["sums"]["depths"] == {"loops=4": repr(FixedLoops(4))}
    others = [
        settings(PROBLEMS[:3]), settings(budgets=(99,)), settings(seeds=(1,)),
        settings(prompting=Prompting(chat=False)),
        settings(prompting=Prompting(examples=(Worked(question="1?", solution="1"),))),
        settings(prompting=Prompting(instruction="Answer.")),
    ]  # fmt: skip
    assert all(other != plain for other in others)


# Prompts and marks --------------------------------------------------------------------------------------------


def test_prompts_with_and_without_examples():
    examples = (Worked(question="1 + 1?", solution=r"\boxed{2}"),)
    assert Prompting().ask("Q?") == [{"role": "user", "content": f"{BOX_INSTRUCTION}\n\nQ?"}]
    assert Prompting(chat=False).ask("Q?") == f"{BOX_INSTRUCTION}\n\nQ?\n\n"
    assert Prompting(instruction="I.", examples=examples).ask("Q?") == [
        {"role": "user", "content": "I.\n\n1 + 1?"},
        {"role": "assistant", "content": r"\boxed{2}"},
        {"role": "user", "content": "I.\n\nQ?"},
    ]
    assert Prompting(instruction="", examples=examples, chat=False).ask("Q?") == "1 + 1?\n\n\\boxed{2}\n\nQ?\n\n"


def test_boxes_marked_by_meaning():
    with MathGrader(workers=1) as grader:
        golds, texts = ["0.5", "0.5", "0.5"], [r"\boxed{2} or \boxed{\frac{1}{2}}", r"\boxed{2}", "0.5"]
        assert list(boxed_math(grader)(golds, texts)) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "right",
    [
        "B",
        "(b)",
        "(B)",
        r"\text{B}",
        "B. Paris",
        "b) Paris",
        r"\text{(B)}",
        "B.",
        "(B) NATO",
        "B. A and C only",
        r"B\text{. Paris}",
    ],
)
def test_boxed_letters(right):
    assert boxed_letter(["B", "C", "(B)"], [BOX % right] * 3) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "wrong", ["Berlin", "A or B", "", "2", "BB", "B, C", "(B) or (C)", "(B)(C)", "B, C, and D.", r"B\text{ or C}"]
)
def test_what_is_no_letter_is_wrong(wrong):
    assert boxed_letter(["B", "A"], [BOX % wrong, "B"]) == [0.0, 0.0]
    with pytest.raises(ValueError, match="'7' is no letter"):
        boxed_letter(["7"], [BOX % "B"])


# The engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["What is one and one? Two. " * 9], 300, CHAT_TOKENS)


@pytest.fixture(scope="module")
def engine(tokenizer):
    model = tiny_model(3, vocab_size=300, exit_gate=True, max_position_embeddings=512)
    return Engine(model, tokenizer, max_length=512, deterministic=True, max_rows=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("depth", [FixedLoops(1), FixedLoops(3), ExitCDF(0.6)])
def test_a_budget_is_what_a_run_at_that_limit_makes(engine, tokenizer, temperature, depth):
    stops = ("t", "ne", "}", "W", "9")
    solver = EngineSolver(
        engine=engine, tokenizer=tokenizer, sampling=SamplingParams(temperature=temperature, stop=stops)
    )
    prompts = [f"What is {n}?" for n in range(3)]
    seeds = [[11 * n + run for run in range(3 if temperature else 1)] for n in range(3)]
    attempts = [each for told in solver.complete(prompts, seeds, depth, 24) for each in told]
    asked = [(prompt, seed) for prompt, each in zip(prompts, seeds, strict=True) for seed in each]
    ended = []
    for budget in (1, 5, 11, 24):
        sampling = [
            SamplingParams(temperature=temperature, stop=stops, max_tokens=budget, seed=seed) for _, seed in asked
        ]
        alone = engine.generate([prompt for prompt, _ in asked], sampling, depth=depth)
        for attempt, run in zip(attempts, alone, strict=True):
            cut = attempt.within(budget)
            ended.append(cut.finished)
            assert cut == Attempt(token_ids=run.token_ids, loops=run.loops, finished=run.finish_reason == "stop")
            assert solver.text(cut.token_ids) == run.text
    assert {True, False} <= set(ended)
    counts = {count for attempt in attempts for count in attempt.loops}
    assert len(counts) > 1 if isinstance(depth, ExitCDF) else counts == {depth.loops}


def test_an_engine_at_a_depth_is_a_model_of_that_depth(engine, tokenizer):
    """The engine of three loops, asked for two, completes as one that has no more."""
    model = tiny_model(3, vocab_size=300, exit_gate=True, max_position_embeddings=512)
    shallow = Engine(model, tokenizer, loops=2, max_length=512, deterministic=True, max_rows=4)
    found = EngineSolver(engine=engine, tokenizer=tokenizer).complete(["What is it?"], [[0]], FixedLoops(2), 30)
    (alone,) = shallow.generate(["What is it?"], SamplingParams(max_tokens=30))
    assert found[0][0].token_ids == alone.token_ids


def test_seeds_reproduce_and_differ(engine, tokenizer):
    solver = EngineSolver(engine=engine, tokenizer=tokenizer, sampling=SamplingParams(temperature=1.0))
    test = ReasoningTest(task="sums", budgets=(8, 16), seeds=(0, 1))
    first, again, other = (
        solver.complete([test.prompting.ask("Q?")], [seeds], FixedLoops(2), 16) for seeds in ([0, 1], [0, 1], [2, 3])
    )
    assert first == again
    assert len({tuple(attempt.token_ids) for attempt in first[0] + other[0]}) == 4
    found = [accuracy_by_loops(solver, PROBLEMS, test, same_box, [1, 3]) for _ in range(2)]
    assert found[0] == found[1]
    item = found[0].items["sums tokens=16"]["loops=3"][0]
    assert (item.loops, item.metrics["right"]) == (3.0, 0.0)


def test_mistakes_are_named(engine, tokenizer):
    greedy = EngineSolver(engine=engine, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="greedy answers are the same for every seed"):
        greedy.complete(["Q?"], [[0, 1]], FixedLoops(1), 4)
    with pytest.raises(ValueError, match="max_tokens is 4096, together more than max_length=512"):
        budget_curve(greedy, PROBLEMS, ReasoningTest(task="sums"), same_box, fixed_depths([1]))
    plain = EngineSolver(engine=engine, tokenizer=train_tokenizer(["x"], 257))
    with pytest.raises(ValueError, match="no chat template"):
        plain.complete([Prompting().ask("Q?")], [[0]], FixedLoops(1), 4)
    with pytest.raises(ValueError, match="two problems have the id 'p0'"):
        solve(Scripted(by_depth), PROBLEMS[:1] * 2, ReasoningTest(task="sums"), same_box, fixed_depths([1]))
    with pytest.raises(ValueError, match="there is no problem"):
        solve(Scripted(by_depth), [], ReasoningTest(task="sums"), same_box, fixed_depths([1]))
    with pytest.raises(ValueError, match="at least one depth"):
        solve(Scripted(by_depth), PROBLEMS, ReasoningTest(task="sums"), same_box, {})


@pytest.mark.parametrize(
    "wrong",
    [{"budgets": ()}, {"budgets": (8, 8)}, {"budgets": (0,)}, {"seeds": ()}, {"seeds": (-1,)}, {"pass_at": (2,)}],
)
def test_impossible_tests_are_refused(wrong):
    with pytest.raises(ValueError, match=r"budgets|seeds|pass@k"):
        ReasoningTest(task="sums", **wrong)
