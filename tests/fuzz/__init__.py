"""Random models, flows, batches and schedules, of which no bit may differ between rollout and
learner.

`python -m tests.fuzz --minutes 10`; a failure prints the seed and the command that repeats it
alone.
"""
