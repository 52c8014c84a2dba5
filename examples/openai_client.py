"""The gateway through the `openai` package (pip install openai). Start `ekiden up` first.

python examples/openai_client.py [URL]
"""

import os
import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("EKIDEN_API_KEY", "none"))
    model = client.models.list().data[0].id

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is a relay race?"}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            # Where every prompt token came from, and the time split: ekiden's own addition.
            print("\n\nusage:", chunk.usage.model_dump().get("ekiden"))

    completion = client.completions.create(
        model=model, prompt="The sash goes from", max_tokens=16, n=3, seed=7, temperature=1
    )
    for choice in completion.choices:
        print(f"{choice.index}: {choice.text!r}")


if __name__ == "__main__":
    main()
