"""The environment variables of workers' processes: few, and named in the message if a user's code
fails because it lacks one.

A worker has the variables with which programs, libraries and the network are found (PATH, proxies,
certificates), those that an option such as `rewards.environment` names, and no hash randomization:
a key of a judge is passed on only to workers whose option names it. Left out: the environment of
programs that a model wrote (`sandbox/`).
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import isobit
from isobit.errors import IsobitError, brief

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
PASSED_ON = (
    *("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "HF_HOME", "OMP_NUM_THREADS"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *(*_PROXIES, *(name.lower() for name in _PROXIES)),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOOKED_FOR = re.compile(r"KeyError(?:: |\()'([^']*)'\)? of os\.environ")
_MISSING = re.compile(
    _LOOKED_FOR.pattern + r"|([A-Z][A-Z0-9_]{2,}) environment variable|\$([A-Z][A-Z0-9_]{2,})"
)
_REFUSED = re.compile(
    r"\b(?:401|403)\b|unauthori[sz]ed|forbidden|api[ _-]?key|authenticat|credential", re.IGNORECASE
)
OF_REWARDS = "rewards.environment"
_KEY = re.compile(r"(?:_KEY|_TOKEN|_SECRET|_PASSWORD)$")


def environment(names: Sequence[str]) -> dict[str, str]:
    """Return the variables that a worker's process gets; `names`: those in addition to the usual
    ones."""
    passed = {name: os.environ[name] for name in (*PASSED_ON, *names) if name in os.environ}
    passed.update({name: value for name, value in os.environ.items() if name.startswith("LC_")})
    source = str(Path(isobit.__file__).resolve().parent.parent)
    passed["PYTHONPATH"] = os.pathsep.join(filter(None, [source, passed.get("PYTHONPATH")]))
    return passed | {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def check_names(names: Sequence[str], option: str = OF_REWARDS) -> None:
    """Raise IsobitError for a text that is not the name of a variable; print a warning on stderr
    for each variable that is not set here, since its user counts on it."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise IsobitError(
                f"{option}: {brief(name)!r} is not the name of a variable, whose value is taken from "
                "the environment"
            )
        if name not in os.environ:
            print(f"warning: {option}: {name} is not set in the environment", file=sys.stderr)


def hint(
    error: str,
    names: Sequence[str],
    here: Mapping[str, str] = os.environ,
    option: str = OF_REWARDS,
) -> str:
    """Return the end of a message about a function that failed, if it seems to lack a variable;
    else an empty text. `names`: the variables that are passed on already in addition to the usual
    ones; `here`: the variables of this process; `option`: the option that gives more names."""
    passed = {*PASSED_ON, *names}
    held_back = sorted(name for name in here if name not in passed and not name.startswith("LC_"))
    words, looked_for = set(_NAME.findall(error)), set(_LOOKED_FOR.findall(error))
    spelled = [
        name
        for name in held_back
        if name in looked_for or (name in words and name.isupper() and len(name) > 2)
    ]
    if not spelled and _REFUSED.search(error):
        spelled = [name for name in held_back if _KEY.search(name)]
        if spelled:
            return (
                f"; it gets a small environment, without {_listed(spelled)}: name what it "
                f"needs in {option}"
            )
    if spelled:
        return f"; {_listed(spelled)} is set here, and passed on where it is named in {option}"
    missing = [
        name for groups in _MISSING.findall(error) for name in groups if name and name not in here
    ]
    if missing:
        also = "" if missing[0] in passed else f", and name it in {option}"
        return f"; {missing[0]} is not set: set it{also}"
    return ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
