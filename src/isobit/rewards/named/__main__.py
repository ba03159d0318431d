"""`python -m isobit.rewards.named` prints the table of rewards by name."""

from isobit.rewards.named import markdown

if __name__ == "__main__":
    print(markdown(), end="")
