"""What a run says of itself: rewards, lengths, loops, how the policy moved, and some completions to read."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from looplm.rl.collect import Experience, mean_loops
from looplm.rl.evaluate import evaluate
from looplm.rl.module import PolicyModule
from looplm.rl.recipe import RLRecipe
from looplm.rl.rollouts import merged_model
from looplm.rl.signals import signals
from looplm.training.distribution import World
from looplm.training.logs import Log, forget_after

_SAMPLES = "samples.jsonl"


class Diary:
    """Writes `log.jsonl`, TensorBoard, and `samples.jsonl` under the run's folder; the same on every process.

    start: steps done before; samples of later ones are those of a lost future · reward: the mean of the last step.
    """

    def __init__(
        self, recipe: RLRecipe, folder: Path, module: PolicyModule, tokenizer: PreTrainedTokenizerBase, loops: int,
        world: World, log: Log, start: int,
    ) -> None:  # fmt: skip
        self.recipe, self.folder, self.module, self.tokenizer = recipe, folder, module, tokenizer
        self.loops, self.world, self.log = loops, world, log
        self.reward = float("nan")
        if world.leads:
            forget_after(folder / _SAMPLES, start)

    def step(self, step: int, experience: Experience, learnt: Mapping[str, float], more: Mapping[str, float]) -> None:
        """After `step` steps, the last of which learnt from `experience`."""
        values = self._rollouts(experience) | self._signals(experience)
        values |= {f"learned_weight_loop{t}": w for t, w in enumerate(self.module.loop_weights(), start=1)}
        counted = self._summed({f"graded/{k}": float(v) for k, v in self.recipe.environment.drain_counts().items()})
        self.reward = values["reward"]
        self.log.write(step, {**values, **learnt, **counted, **more})
        if self.world.leads and experience.groups:
            self._keep_samples(step, experience)

    def evaluation(self, step: int) -> None:
        """Held-out questions at every loop; each process asks them all, since they are few."""
        rules = self.recipe.evaluation
        loops = rules.loops or range(1, self.module.model.config.loops + 1)
        found = evaluate(
            merged_model(self.module.model), self.tokenizer, self.recipe, list(loops),
            rules.max_tokens or self.recipe.sampling.max_tokens,
        )  # fmt: skip
        self.log.write(step, found)

    def _rollouts(self, experience: Experience) -> dict[str, float]:
        """Means over completions, or tokens of them, of all processes."""
        scored = [one for group in experience.scored for one in group]
        rewards = [reward for group in experience.groups for reward in group.rewards]
        marks = [mark for group in experience.groups for mark in group.marks if mark is not None]
        tokens = sum(len(one.rollout.token_ids) for one in scored)
        sums = self._summed({
            "completions": len(scored), "marked": len(marks), "tokens": tokens, "groups": len(experience.groups),
            "reward": sum(rewards), "squares": sum(reward * reward for reward in rewards), "mark": sum(marks),
            "truncated": sum(not one.rollout.finished for one in scored),
            "loops": sum(sum(one.rollout.loops) for one in scored),
            "surprise": -sum(sum(one.rollout.logprobs) for one in scored),
            "dead": sum(group.dead for group in experience.groups), **experience.counts,
        })  # fmt: skip
        count = max(1.0, sums["completions"])
        mean = sums["reward"] / count
        return {
            "reward": mean, "reward_std": max(0.0, sums["squares"] / count - mean**2) ** 0.5,
            "mark": sums["mark"] / max(1.0, sums["marked"]), "length": sums["tokens"] / count,
            "truncated": sums["truncated"] / count, "mean_loops": sums["loops"] / max(1.0, sums["tokens"]),
            "surprise": sums["surprise"] / max(1.0, sums["tokens"]),
            "dead_groups": sums["dead"] / max(1.0, sums["groups"]),
            **{name: sums[name] for name in experience.counts},
        }  # fmt: skip

    def _signals(self, experience: Experience) -> dict[str, float]:
        """Of this step's first group with something to learn, on the leading process."""
        groups = [group for group in experience.scored if any(one.advantage for one in group if one.counts)]
        if not (self.world.leads and groups):
            return {}
        group = [one for one in groups[0] if one.rollout.token_ids]
        logits = self.module.loop_logits
        return signals(
            self.module.model, self.module.objective, group, self.loops, self.tokenizer.pad_token_id or 0,
            self.recipe.sampling.kv == "recomputed", None if logits is None else logits.detach(),
        )  # fmt: skip

    def _summed(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value's sum over the processes, which all name the same."""
        sums = self.world.sum(torch.tensor([float(value) for value in values.values()], dtype=torch.float64))
        return dict(zip(values, sums.tolist(), strict=True))

    def _keep_samples(self, step: int, experience: Experience) -> None:
        """The first group's prompt and completions, each token's loops with them."""
        group = experience.groups[0]
        with (self.folder / _SAMPLES).open("a") as file:
            for rollout, mark, reward in zip(group.rollouts, group.marks, group.rewards, strict=True):
                record = {
                    "step": step, "prompt": group.question.prompt, "completion": rollout.text, "mark": mark,
                    "reward": reward, "finished": rollout.finished, "mean_loops": mean_loops(rollout),
                    "loops": rollout.loops,
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
