"""One process of reinforcement-learning runs (run by torchrun): the recipe, then each run's overrides, joined by |."""

import sys

from looplm.rl.recipe import load_rl_recipe
from looplm.rl.run import reinforce

recipe, *runs = sys.argv[1:]
for overrides in runs:
    try:
        reinforce(load_rl_recipe(recipe, overrides.split("|")))
    except ValueError as error:
        print(f"stopped: {error}", flush=True)
