"""The built-in recipes load, with the papers' numbers; and the verb runs one."""

from rl_runs import write_recipe
from typer.testing import CliRunner

from looplm.cli.main import app
from looplm.objectives.loop_weights import ExitWeights, LastLoopWeight
from looplm.rl.recipe import BUILT_IN, load_rl_recipe
from looplm.training.recipe import built_in_recipes, load_recipe


def test_every_built_in_recipe_loads():
    names = built_in_recipes(BUILT_IN)
    assert {"rltt_ouro", "grpo_ouro", "ouro_rl_fixed", "ouro_rl_simulated", "rltt_cpu"} <= set(names)
    for name in names:
        assert load_rl_recipe(name).out == f"runs/{name}"


def test_rltt_has_the_papers_numbers():
    recipe = load_rl_recipe("rltt_ouro")
    sampling, objective = recipe.sampling, recipe.objective
    assert (recipe.steps, sampling.prompts, sampling.group) == (140, 32, 8)
    assert (sampling.max_prompt, sampling.max_tokens, sampling.temperature) == (1024, 2048, 1.0)
    assert sampling.depth.policy(4).loops == 4
    assert (objective.kl, objective.clip_low, objective.clip_high) == (1e-3, None, None)
    assert objective.loop_weights == ExitWeights()
    assert (recipe.optimizer.lr, recipe.optimizer.betas, recipe.optimizer.weight_decay) == (1e-6, (0.9, 0.99), 0.1)
    assert (recipe.schedule.warmup_steps, recipe.clip_norm) == (14, 0.1)
    grpo = load_rl_recipe("grpo_ouro")
    assert grpo.objective.loop_weights == LastLoopWeight()
    assert (grpo.sampling, grpo.optimizer, grpo.steps) == (sampling, recipe.optimizer, recipe.steps)
    assert recipe.optimizer.bits == 8


def test_the_sft_arm_asks_the_same_problems_in_the_same_words():
    sft, rltt = load_recipe("rltt_ouro_sft"), load_rl_recipe("rltt_ouro")
    source, environment = sft.data.sources["math"], rltt.environment
    assert (source.path, source.prompt, source.answer) == (environment.path, environment.problem, environment.solution)
    assert (source.instruction, sft.init_from) == (environment.instruction, rltt.init_from)
    assert (sft.steps, sft.optimizer, sft.schedule) == (rltt.steps, rltt.optimizer, rltt.schedule)


def test_the_verb_runs_a_recipe_and_names_mistakes(tmp_path):
    recipe = write_recipe(tmp_path, ("steps=1",))
    done = CliRunner().invoke(app, ["rl", str(tmp_path / "recipe.yaml"), "steps=1", "save_every=1"])
    assert done.exit_code == 0, done.output
    assert "step-00000001" in done.output
    again = CliRunner().invoke(app, ["rl", str(tmp_path / "recipe.yaml"), "steps=2"])
    assert again.exit_code == 0  # every rate of a constant schedule is the same, however many there will be
    other = CliRunner().invoke(app, ["rl", str(tmp_path / "recipe.yaml"), "objective.kl=0.5"])
    assert other.exit_code == 1
    assert "holds a run of another recipe (objective.kl differs)" in other.output
    missing = CliRunner().invoke(app, ["rl", "nothing"])
    assert missing.exit_code == 1
    assert missing.output.startswith("looplm: no recipe 'nothing'")
    assert recipe.out == str(tmp_path / "run")
