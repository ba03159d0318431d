"""The lists of keys in docs/how-to/serve.md, made of the declarations of requests:

    python -m tests.serve.keys

prints them as the page has them.
"""

import json
from collections.abc import Iterable

from isobit.options.declare import options_of
from isobit.serve.generating import SGLangRequest, SGLangSampling, VLLMRequest
from isobit.serve.neutral import IGNORED, NOT_SERVED
from isobit.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    SamplingKeys,
    TokenizeRequest,
    TokenSampling,
)
from isobit.serve.requests import Declared
from isobit.serve.responses import ResponsesRequest

REQUESTS: dict[str, type[Declared]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/generate": SGLangRequest,
    "its `sampling_params`": SGLangSampling,
    "/generate with a `prompt`": VLLMRequest,
    "/inference/v1/generate": GenerateRequest,
    "its sampling_params": TokenSampling,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def served() -> str:
    """The keys of each route; those of sampling are listed once."""
    sampling = options_of(SamplingKeys).keys()
    lines = [f"- of sampling: {_names(sampling)}"]
    for route, schema in REQUESTS.items():
        more = " and those of sampling" if issubclass(schema, SamplingKeys) else ""
        lines.append(f"- {route}: {_names(options_of(schema).keys() - sampling)}{more}")
    return "\n".join(lines)


def not_served() -> str:
    """A table of what is not served, with the keys and their neutral values."""
    rows: dict[str, dict[str, list[str]]] = {}
    for what, values, keys in NOT_SERVED:
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in values)
        rows.setdefault(what, {}).setdefault(neutral and f": {neutral}", []).extend(keys.split())
    table = [
        f"| {what} | {'; '.join(_names(keys) + neutral for neutral, keys in cells.items())} |"
        for what, cells in rows.items()
    ]
    return "\n".join(["| not served | keys, and values that are taken |", "|---|---|", *table])


def ignored() -> str:
    """The keys of which every value is taken."""
    return _names(IGNORED.split())


def _names(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys))


if __name__ == "__main__":
    print(served(), not_served(), ignored(), sep="\n\n")
