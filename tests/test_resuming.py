"""What a resumed run may change: one declaration, in code, docs, `--help` and docstring."""

import inspect
import re
from pathlib import Path

import pytest

from isobit import resume
from isobit.cli import training
from isobit.config import RESUMABLE, check_resumed
from isobit.errors import IsobitError


def test_what_a_resume_may_change_is_said_everywhere_as_it_is() -> None:
    """One declaration: the page, `--help`, the docstring and the check agree."""
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "resume.md").read_text()
    hints = inspect.signature(training.train).parameters["resume"].annotation.__metadata__[0].help
    for text in (page, hints, resume.__doc__ or ""):
        assert RESUMABLE in " ".join(text.replace("`", "").split())
    words = re.findall(r"[\w.*]+", RESUMABLE.replace(" and ", " "))
    allowed = words[: words.index("except")]
    check_resumed([f"{word.replace('*', 'report')}=1" for word in allowed])
    for override in (
        "run.dir=elsewhere",
        "seed=1",
        "steps.x=1",
        "run={dir: x}",
        "stepsize=2",
        "tracking=wandb",
    ):
        with pytest.raises(IsobitError, match="only these may change"):
            check_resumed([override])
