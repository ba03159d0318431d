"""`python -m isobit` is the `isobit` command."""

from isobit.cli import main

main()
