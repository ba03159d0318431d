"""Evaluation on held-out prompts: measured, summarized with intervals, compared in pairs, saved in
files.

`measure.py` uses the engine and the rewards; everything else works on graded completions and
imports no torch. Left out: the command `isobit eval` (`training/commands/evaluate.py`).
"""
