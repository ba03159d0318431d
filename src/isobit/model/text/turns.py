"""Which tokens stand for the turns of a chat: what the template itself writes around messages.

Vocabularies flag some of these as special, and others not: DeepSeek's `<｜User｜>` is an added token
like any other. A message that spells one would open a turn, so for content it counts as
special, whatever its flag says. The rule: of the added tokens that a template writes into a plain
conversation, outside its messages, all stand for turns, but for tags of which the vocabulary has
the opening and the closing one, `<think>` and `</think>`, unless one of them is written before a
system's or a user's message. Such pairs mark parts of a message, which content may spell.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import AddedToken

from isobit.errors import IsobitError
from isobit.model.text.chat import TookTooMuch

_TAG = re.compile(r"<(/?)([^<>/|]+)>")
_PLAIN = (
    (("system", "user", "assistant", "user", "assistant"), False),
    (("user", "assistant", "user"), True),
    (("user", "assistant", "tool", "assistant", "user"), True),
    (("user",), True),
)
"""Roles of conversations, and whether the start of an answer follows. A template may refuse
some."""
Render = Callable[[Sequence[dict[str, Any]], bool], str]


def turn_tokens(added: Iterable[AddedToken], render: Render) -> set[str]:
    """Return the added tokens that are not special and stand for turns under a template; `render`
    writes messages with it, and the start of an answer where the second argument is true. Raises
    TookTooMuch as that does."""
    special = {
        token.content: token.special
        for token in added
        if token.content and not token.content.isspace()
    }
    names = sorted(special, key=len, reverse=True)
    if all(special.values()):
        return set()
    pattern = re.compile("|".join(map(re.escape, names)))
    written, before_others = set[str](), set[str]()
    for roles, answering in _PLAIN:
        contents = [f"qz{number}x" for number in range(len(roles))]
        try:
            text = render(
                [{"role": role, "content": text} for role, text in zip(roles, contents)], answering
            )
        except TookTooMuch:
            raise
        except IsobitError:
            continue
        for role, content in zip(roles, contents):
            text_before, content_found, text = text.partition(content)
            written.update(pattern.findall(text_before))
            if content_found and role in ("system", "user"):
                before_others.update(pattern.findall(text_before))
        written.update(pattern.findall(text))
    tags = {name: _TAG.fullmatch(name) for name in names}
    twins = {
        name: f"<{'' if tag[1] else '/'}{tag[2]}>" for name, tag in tags.items() if tag is not None
    }
    paired = {name for name, twin in twins.items() if twin in tags}
    turns = {name for name in written if name not in paired or {name, twins[name]} & before_others}
    return {name for name in turns if not special[name]}
