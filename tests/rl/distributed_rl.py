"""One process of a reinforcement-learning run (run by torchrun): the recipe, then its overrides."""

import sys

from looplm.rl.recipe import load_rl_recipe
from looplm.rl.run import reinforce

reinforce(load_rl_recipe(sys.argv[1], sys.argv[2:]))
