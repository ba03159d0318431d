"""`python -m isobit.tasks.named` prints the table of rewards by name."""

from isobit.tasks.named import markdown

if __name__ == "__main__":
    print(markdown(), end="")
