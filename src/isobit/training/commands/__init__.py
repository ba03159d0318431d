"""What the commands of `isobit` do once their arguments are read: one file a command. `train` is
`training/train.py`."""
