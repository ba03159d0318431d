"""Options: declared once, as fields of the frozen dataclass that the code runs with.

    @dataclass(frozen=True)
    class Clip:
        low: Annotated[float, above(0), at_most(1), "lower bound of the ratio"] = 0.2
        name: NotAnOption[str] = ""

The field carries its type, its range, its default and what it means. From it come the value and the
messages when a file is read (`reading.py`), the reference of keys, and what a tab completes. A
field marked `NotAnOption` is set by the code. Consistency of several fields is checked in
`__post_init__`, which raises IsobitError.
"""
