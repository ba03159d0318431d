"""Engines in separate processes, on this machine or others, by Ray: the same bits as one
engine.

`settings.py` declares the options; `cluster.py` starts or joins Ray; `wire.py` is what travels;
`worker.py` is the process of an engine and `engines.py` how the run sees it; `fleet.py` gives
groups to engines, and to others when one dies or is slow. Ray is imported when a fleet starts.
"""
