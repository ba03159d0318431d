"""The identity of the model that a state's runs train: SHA-256 of its weights and its config.json,
wherever they lie. A copy is the same model; a folder of the same name with other weights is not.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isobit.data.foreign import check_readable, reason_of
from isobit.errors import IsobitError
from isobit.run.checkpoints import file_digest


def identity_of(directory: Path) -> str:
    """Return the identity of the model in a directory, as hexadecimal digits. All of its files are
    read, so that the system has them in memory when the model is loaded. Raises IsobitError for
    files that cannot be read."""
    files = [*sorted(directory.glob("*.safetensors")), *directory.glob("config.json")]
    try:
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(_digest, files))
    except OSError as error:
        raise IsobitError(f"model {directory}: cannot be read: {reason_of(error)}") from None
    lines = [f"{file.name} {digest}\n" for file, digest in zip(files, digests)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _digest(file: Path) -> str:
    check_readable(file)
    return file_digest(file)
