"""`python -m qwen35conv`: the same as the command `qwen35`."""

from qwen35conv.cli import main

main()
