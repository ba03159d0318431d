"""A cage for programs that a model wrote: `launch.py` is its outside, `jail.py` its wall,
`harness.py` runs inside."""
