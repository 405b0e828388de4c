"""One process of several training runs (run by torchrun): each argument after the recipe is `out;override;override`."""

import sys

from looplm.training import load_recipe, train

recipe, *runs = sys.argv[1:]
for one in runs:
    out, *overrides = one.split(";")
    train(load_recipe(recipe, [f"out={out}", *overrides]))
