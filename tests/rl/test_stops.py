"""Runs that cannot start write nothing, those that must stop keep what they reached, resumed ones find it as it was."""

import json
from io import StringIO

import pytest
import torch
from rich.console import Console
from rl_runs import read_log, write_recipe
from safetensors.torch import load_file

import looplm
from looplm.models import save
from looplm.rl import FunctionEnvironment, run
from looplm.rl.recipe import load_rl_recipe
from looplm.rl.run import reinforce
from looplm.training.distribution import World
from looplm.training.logs import StepProgress

QUIET = Console(file=StringIO())


def trained(recipe):
    return reinforce(recipe, QUIET)


def weights_of(checkpoint):
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture
def failing(monkeypatch):
    """Lets the rewards of the call number `at` fail; the first is about no answer, before anything is written."""

    def at(number, error="the market is closed"):
        calls, real = [], FunctionEnvironment.reward

        def reward(self, questions, texts, token_ids):
            calls.append(len(texts))
            if len(calls) == number:
                raise ValueError(error)
            return real(self, questions, texts, token_ids)

        monkeypatch.setattr(FunctionEnvironment, "reward", reward)

    return at


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.held_out=0", "no question of the test split; raise environment.held_out"),
        ("environment.path=nowhere.jsonl", "'nowhere.jsonl' does not exist"),
        ('environment.functions=["tests.rl.rl_runs:nothing"]', "has no attribute 'nothing'"),
        ("sampling.depth={kind: early, family: exit_cdf, threshold: 0.5, min_loops: 9}", "at most the engine's loops"),
        ("sampling.stop=['']", "none of them empty"),
        ("sampling.kv_bytes=10", "kv_bytes=10 is too little"),
    ],
)
def test_a_run_that_cannot_start_writes_nothing(tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        trained(write_recipe(tmp_path, (override,)))
    assert not (tmp_path / "run").exists()


def test_questions_that_the_tokenizer_cannot_read_are_named_before_anything_is_written(tmp_path):
    recipe = write_recipe(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"word {n}"}) + "\n" for n in range(40)))
    with pytest.raises(ValueError, match=r"prompts.jsonl line \d+ cannot be asked: the text holds more than the words"):
        trained(recipe)
    assert not (tmp_path / "run").exists()


def test_minibatches_that_processes_cannot_share_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "open_world", lambda: World(rank=1, size=4))
    with pytest.raises(ValueError, match=r"sampling.prompts=4 cannot be cut into minibatches=2 on 4 processes"):
        trained(write_recipe(tmp_path, ("minibatches=2",)))
    assert not (tmp_path / "run").exists()


def test_a_run_that_must_stop_keeps_what_it_reached_and_goes_on_from_there(tmp_path, failing, monkeypatch):
    more = ("steps=4", "save_every=4", "evaluate_every=4")
    whole = trained(write_recipe(tmp_path, more, out="whole"))
    failing(1 + 3)  # the third step's
    with pytest.raises(ValueError, match=r"^the market is closed; step 2 is saved: the same command resumes, and "):
        trained(write_recipe(tmp_path, more))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.undo()
    ours, theirs = weights_of(trained(write_recipe(tmp_path, more)).checkpoint), weights_of(whole.checkpoint)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    pairs = zip(read_log(tmp_path / "run"), read_log(tmp_path / "whole"), strict=True)
    assert all(one.get("reward") == other.get("reward") for one, other in pairs)


def test_what_fails_before_the_first_step_is_done_leaves_the_folder_free(tmp_path, failing):
    failing(1 + 1)
    with pytest.raises(ValueError, match=r"^the market is closed$"):
        trained(write_recipe(tmp_path))
    assert not list((tmp_path / "run/checkpoints").iterdir())
    trained(write_recipe(tmp_path, ("sampling.temperature=0.9", "steps=1")))  # another recipe


def test_an_evaluation_that_fails_comes_after_the_save(tmp_path, failing):
    failing(1 + 2 + 1)  # at the first loop count after the second step
    with pytest.raises(ValueError, match=r"^the market is closed; step 2 is saved"):
        trained(write_recipe(tmp_path, ("evaluate_every=2", "save_every=3")))
    assert (tmp_path / "run/checkpoints/step-00000002/trainer.json").exists()


def test_a_gradient_that_is_not_finite_stops_with_what_was_reached(tmp_path, monkeypatch):
    from_step = iter([1.0, 1.0, *[float("nan")] * 9])
    monkeypatch.setattr("looplm.rl.loop.clip_grad_norm_", lambda *_: torch.tensor(next(from_step)))
    with pytest.raises(ValueError, match=r"not finite at step 2; .*; step 2 is saved"):
        trained(write_recipe(tmp_path, ("nonfinite.policy=stop", "save_every=3")))
    assert (tmp_path / "run/checkpoints/step-00000002/trainer.json").exists()


class Crash(BaseException):
    """Nothing is saved for it."""


def crashed_after(step, recipe, monkeypatch):
    """Run `recipe` until the end of a step, whose log and samples are written."""

    def advance(self, done, note):
        if done == step:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(StepProgress, "advance", advance)
        with pytest.raises(Crash):
            trained(recipe)


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_samples_of_a_lost_future_are_forgotten(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, ("steps=4", "save_every=2"))
    crashed_after(3, recipe, monkeypatch)
    assert [sample["step"] for sample in samples(tmp_path / "run")] == [step for step in (1, 2, 3) for _ in range(4)]
    trained(recipe)
    assert [sample["step"] for sample in samples(tmp_path / "run")] == [step for step in (1, 2, 3, 4) for _ in range(4)]


def test_samples_of_a_run_that_never_saved_are_forgotten(tmp_path, monkeypatch):
    crashed_after(2, write_recipe(tmp_path, ("save_every=3",)), monkeypatch)
    trained(write_recipe(tmp_path, ("steps=1", "sampling.max_tokens=3")))
    found = samples(tmp_path / "run")
    assert [sample["step"] for sample in found] == [1] * 4
    assert all(len(sample["loops"]) <= 3 for sample in found)


def test_a_resumed_run_refuses_other_questions(tmp_path, monkeypatch):
    more = ("steps=2", "save_every=1")
    crashed_after(1, write_recipe(tmp_path, more), monkeypatch)
    prompts = tmp_path / "prompts.jsonl"
    before = prompts.read_text()
    for other in (before.replace("07.", "70."), before.replace("}", ', "bound": 1}'), before + before.splitlines()[0]):
        assert other != before
        prompts.write_text(other)
        with pytest.raises(ValueError, match=r"does not give the questions any more that the run in .*run learns from"):
            trained(load_rl_recipe(tmp_path / "recipe.yaml", more))
    prompts.write_text(before)
    assert trained(load_rl_recipe(tmp_path / "recipe.yaml", more)).finished


def test_adapters_resume_on_their_own_base_alone_without_a_reference_too(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, ("lora={rank: 2}", "objective.kl=0", "steps=2", "save_every=1"))
    crashed_after(1, recipe, monkeypatch)
    model = looplm.load(tmp_path / "model")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    save(model, tmp_path / "model")
    with pytest.raises(ValueError, match=r"the adapters in .*run belong to what .*model held"):
        trained(recipe)
