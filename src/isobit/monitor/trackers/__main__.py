"""`python -m isobit.monitor.trackers`: the process of one tracker, started by a run (`follow.py`)."""

from isobit.monitor.trackers.follow import main

main()
