"""`python -m isobit.monitor.trackers`: the follower of a run, which starts it (`follow.py`)."""

from isobit.monitor.trackers.follow import main

main()
