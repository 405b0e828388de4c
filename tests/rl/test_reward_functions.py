"""Our environments in TRL's trainer, and TRL's rewards in our environments."""

import json

import pytest
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

from conftest import tiny_model
from looplm.data.tokenizer import CHAT_TOKENS, train_tokenizer
from looplm.rl import FunctionEnvironment, MathEnvironment, TaskEnvironment, as_dataset, as_reward_function
from looplm.tasks import RunningSum


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["aaaa bbbb Say it."], 300, CHAT_TOKENS)


@pytest.mark.parametrize("chat", [False, True])
def test_trl_trains_on_our_environment(tokenizer, tmp_path, chat):
    prompts = [[{"role": "user", "content": f"Say {n}."}] if chat else f"Say {n}." for n in range(8)]
    records = [{"prompt": prompt, "bound": n} for n, prompt in enumerate(prompts)]
    functions = ("sample_rewards:share_of_a", "sample_rewards:longer_than")
    environment = FunctionEnvironment(path=write(tmp_path / "p.jsonl", records), functions=functions)
    questions = {str(question.prompt): question for question in (environment.question(n, "train") for n in range(8))}
    expected = []

    def spy(prompts, completions, completion_ids, **columns):
        texts = [done[0]["content"] if chat else done for done in completions]
        asked = [questions[str(prompt)] for prompt in prompts]
        expected.append(environment.reward(asked, texts, completion_ids))
        return [0.0] * len(prompts)

    settings = GRPOConfig(
        output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=6, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        bf16=False,
    )  # fmt: skip
    values = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = tiny_model(**values, pad_token_id=tokenizer.pad_token_id).train()
    rewards = [as_reward_function(environment, "ours"), spy]
    data = as_dataset(environment, 8)
    trainer = GRPOTrainer(model, rewards, args=settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    logged = [record["rewards/ours/mean"] for record in trainer.state.log_history if "rewards/ours/mean" in record]
    assert logged == pytest.approx([sum(rewards) / len(rewards) for rewards in expected], abs=1e-6)
    assert any(logged)


def test_every_environment_marks_through_a_row_as_it_does_directly():
    environment = TaskEnvironment(task=RunningSum(terms=3))
    rows = as_dataset(environment, 20, "test", first=5)
    assert rows.column_names == ["prompt", "answer", "difficulty"]
    examples = [RunningSum(terms=3, split="test").example(seed) for seed in range(5, 25)]
    assert rows["prompt"][:] == [example.prompt for example in examples]
    reward = as_reward_function(environment)
    assert reward.__name__ == "looplm"
    columns = {name: rows[name][:] for name in rows.column_names if name != "prompt"}
    texts = [example.answer if seed % 2 else "#" for seed, example in enumerate(examples)]
    trl = {"trainer_state": object(), "log_extra": print, "log_metric": print}  # what TRL adds
    marks = reward(prompts=rows["prompt"][:], completions=texts, completion_ids=[[]] * 20, **columns, **trl)
    assert marks == [float(seed % 2) for seed in range(20)]


def test_a_reward_of_trl_marks_our_answers(tmp_path):
    solutions = [r"$\frac{1}{3}$", "$5$", "no"]
    records = [
        {"prompt": [{"role": "user", "content": f"Problem {n}"}], "problem": f"Problem {n}", "solution": solution}
        for n, solution in enumerate(solutions)
    ]
    path = write(tmp_path / "p.jsonl", records)
    theirs = FunctionEnvironment(path=path, functions=("trl.rewards:accuracy_reward",))
    texts = {solutions[0]: r"it is \boxed{\frac{2}{6}}", solutions[1]: r"\boxed{6}", solutions[2]: r"\boxed{6}"}
    questions = [theirs.question(seed, "train") for seed in range(3)]
    answers = [texts[question.columns["solution"]] for question in questions]
    rewards = theirs.reward(questions, answers, [[]] * 3)
    told = [[{"role": "assistant", "content": answer}] for answer in answers]
    assert rewards == accuracy_reward(told, [question.columns["solution"] for question in questions])
    assert sorted(rewards, key=str) == [0.0, 1.0, None]


def test_ours_and_trls_marker_agree(tmp_path):
    golds = [r"\frac{1}{3}", "5", "2x+4", r"\{1,2\}"]
    answers = [r"\boxed{\frac{2}{6}}", r"\boxed{6}", r"\boxed{2(x+2)}", "none"]
    path = write(tmp_path / "m.jsonl", [{"problem": gold, "answer": gold} for gold in golds])
    environment = MathEnvironment(path=path, workers=1)
    questions = [environment.question(seed, "train") for seed in range(4)]
    texts = [answers[golds.index(question.columns["answer"])] for question in questions]
    told = [[{"role": "assistant", "content": text}] for text in texts]
    expected = accuracy_reward(told, [f"${question.columns['answer']}$" for question in questions])
    assert environment.reward(questions, texts, [[]] * 4) == expected
    assert sorted(expected) == [0.0, 0.0, 1.0, 1.0]
    environment.close()
