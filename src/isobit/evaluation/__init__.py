"""How good a model is on held-out prompts: measured, summarized with intervals, compared in pairs, kept in files.

`measure.py` asks the engine and the rewards; all else works on the graded completions and imports no torch. Left out:
the command `isobit eval` (`evaluate.py`) and the formulas of single estimates (`intervals.py`).
"""
