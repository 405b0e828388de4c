"""Training: typed recipes, one flat loop, atomic checkpoints with exact resume."""

from looplm.training.recipe import Recipe, load_recipe
from looplm.training.run import RunResult, train

__all__ = ["Recipe", "RunResult", "load_recipe", "train"]
