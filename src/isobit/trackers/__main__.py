"""`python -m isobit.trackers`: the process of one tracker, started by a run (`follow.py`)."""

from isobit.trackers.follow import main

main()
