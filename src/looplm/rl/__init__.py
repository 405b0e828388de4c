"""Reinforcement learning that sees the loops: rollouts, rewards, advantages, and the loop that trains on them."""

from looplm.rl.environments import (
    Environment,
    FunctionEnvironment,
    GymEnvironment,
    MathEnvironment,
    TaskEnvironment,
)
from looplm.rl.questions import Question
from looplm.rl.reward_functions import as_dataset, as_reward_function
from looplm.tasks.math_answers import GradeCounts, MathGrader

__all__ = [
    "Environment",
    "FunctionEnvironment",
    "GradeCounts",
    "GymEnvironment",
    "MathEnvironment",
    "MathGrader",
    "Question",
    "TaskEnvironment",
    "as_dataset",
    "as_reward_function",
]
