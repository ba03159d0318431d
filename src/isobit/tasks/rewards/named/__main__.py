"""`python -m isobit.tasks.rewards.named` prints the table of rewards by name."""

from isobit.tasks.rewards.named import markdown

if __name__ == "__main__":
    print(markdown(), end="")
