"""What a sync has written, by names that a message can show. Left out: its checksums
(`checksums.py`)."""

from collections.abc import Mapping

from torch import Tensor

from isobit.kernels import tensors_of
from isobit.model.weights.layout import Working


def names_of(working: Working) -> dict[int, str]:
    """Return the names of working weights, by `id` of what operators receive."""
    packs = {key: packed.weight for key, packed in working.packs().items()}
    names = {id(operand): name for name, operand, _ in working.tensors()}
    return names | {key: names[id(weight)] for key, weight in packs.items()}


def written(uses: Mapping[str, Working], apart: bool) -> dict[str, Tensor]:
    """Return the working weights of all uses, and what the backend packed of them, unless oneDNN
    hides the bytes. `apart`: a use has its own copies."""
    # by address: uses that share a storage are summed once
    named: dict[int, tuple[str, Tensor]] = {}
    for use, working in uses.items():
        names = names_of(working)
        stored = {id(operand): tensors_of(operand) for _, operand, _ in working.tensors()}
        packed = {key: (packed.panels, packed.values) for key, packed in working.packs().items()}
        whose = f"the {use}'s " if apart else ""
        for kind, second, tensors in (
            ("working weight", "scales", stored),
            ("packed weight", "values", packed),
        ):
            for key, pieces in tensors.items():
                suffixes = "", f" ({second})", " (their common factor)"
                for suffix, piece in zip(suffixes, pieces):
                    if piece is not None and not piece.is_mkldnn:
                        name = f"{whose}{kind} {names[key]}{suffix}"
                        named.setdefault(piece.data_ptr(), (name, piece))
    return dict(named.values())
