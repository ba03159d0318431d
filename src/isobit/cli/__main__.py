"""`python -m isobit.cli` is the `isobit` command."""

from isobit.cli import main

main()
