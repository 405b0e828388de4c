"""`looplm` as one of several processes (run by torchrun): with "alone" first, process 1 alone fails."""

import os
import sys
import time
from datetime import timedelta

import looplm.cli.errors
from looplm.cli.main import app, main


@app.command()
@looplm.cli.errors.one_line_errors
def alone() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the disk of one node is full")
    time.sleep(60)


looplm.cli.errors._PATIENCE = timedelta(seconds=2 if "alone" in sys.argv else 60)
main()
