"""Files of strangers, made hostile: whatever a loader is given, it succeeds or raises one line, and
does not hang.

`python -m tests.loaders --cases N --seed S` damages valid files, knowing their structure, and calls
the loaders.
"""
