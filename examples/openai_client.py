"""OpenAI's client against `isobit serve`: an answer, log-probabilities, a stream, and a
conversation whose answers stay the tokens that were sampled.

    isobit serve MODEL --token serve.token
    python examples/openai_client.py http://127.0.0.1:8000 serve.token
"""

import sys
from pathlib import Path

from openai import OpenAI


def main(url: str, token: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=Path(token).read_text().split()[0])
    names = [model.id for model in client.models.list()]
    print("models:", ", ".join(names))

    answer = client.completions.create(
        model=names[0], prompt="Once upon a time", max_tokens=16, seed=1, logprobs=1
    )
    print("answer:", repr(answer.choices[0].text))
    print("log-probability:", sum(answer.choices[0].logprobs.token_logprobs))

    again = client.completions.create(
        model=names[0], prompt="Once upon a time", max_tokens=16, seed=1, stream=True
    )
    streamed = "".join(chunk.choices[0].text for chunk in again)
    print("the same, streamed:", streamed == answer.choices[0].text)

    messages = [{"role": "user", "content": "Tell me about rain."}]
    for question in ("And the sea?", None):
        turn = client.chat.completions.create(
            model=names[0],
            messages=messages,
            max_tokens=16,
            seed=2,
            extra_headers={"X-Session-ID": "rain"},
            extra_body={"return_token_ids": True},
        )
        print("turn:", len(turn.prompt_token_ids), "tokens, then", len(turn.choices[0].token_ids))
        messages += [turn.choices[0].message.to_dict(), {"role": "user", "content": question}]


if __name__ == "__main__":
    main(*sys.argv[1:])
