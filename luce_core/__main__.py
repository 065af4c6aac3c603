"""`python -m luce_core`: the same as `luce-core`."""

from luce_core.cli.main import main

main()
