"""`python -m looplm` is the `looplm` command."""

from looplm.cli.main import main

main()
