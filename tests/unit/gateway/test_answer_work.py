"""What the gateway does for one token does not grow with the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import byte_level, write

from ekiden.core.types import Delta, SamplingParams, TokenLogprobs
from ekiden.text.tokenizer import Tokenizer
from gateway.openai.answer import Answer, StreamedAnswer
from gateway.openai.shapes import ChatShape, ChunkFrame, CompletionShape, Shape

TOP = 2
TOKENS = 8000


class Counting:
    """A tokenizer that counts the texts of tokens that it is asked for, and gives no longer one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lookups = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def token_bytes(self, token: int) -> bytes:
        self.lookups += 1
        return self._tokenizer.token_bytes(token)

    def decode(self, *_: object, **__: object) -> str:
        raise AssertionError("decoded more than a token")


@pytest.mark.parametrize("shape", [ChatShape(), CompletionShape()])
def test_a_stream_with_logprobs_looks_every_token_up_once(tmp_path: Path, shape: Shape) -> None:
    """F127."""
    tokenizer = Counting(Tokenizer.load(write(tmp_path, byte_level())))
    sampling = SamplingParams(seed=1, max_tokens=TOKENS, logprobs=TOP)
    answer = StreamedAnswer(
        Answer(shape, tokenizer, sampling),  # type: ignore[arg-type]
        ChunkFrame(shape, request_id="r", created=1, model="m"),
        prompt_tokens=1,
        include_usage=True,
        continuous_usage=True,
    )
    token = 40
    entry = TokenLogprobs(token=token, logprob=-1.0, top=((token, -1.0), (token + 1, -2.0)))
    delta = Delta(request_id="r", choice=0, tokens=(token,), logprobs=(entry,))
    sizes = [len(answer.push([delta])) for _ in range(TOKENS)]
    assert tokenizer.lookups == TOKENS * (1 + TOP)
    # Only the counts in them grow.
    assert max(sizes) < 2 * min(sizes)
