"""A decode replica by gRPC, without the gateway: token ids in, token ids out.

    ekiden up --redis redis://127.0.0.1:6379/0       (prints where its logs are)
    python examples/grpc_client.py HOST:PORT MODEL_DIR "What is a relay race?"

HOST:PORT is a decode replica: `ekiden audit` lists the replicas, and each writes its address into
its log. Needs no more than the gateway does (`pip install .`). If the services have a secret, set
EKIDEN_SECRET. The replica takes prefill replicas from the registry, as it does for the gateway.
"""

import asyncio
import os
import sys
from pathlib import Path

from tokenizers import Tokenizer

from ekiden.rpc import common_pb2, decode_pb2
from ekiden.rpc.channel import auth_metadata, open_channel
from ekiden.rpc.decode_pb2_grpc import DecodeStub

CHAT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


async def main(address: str, model_dir: Path, question: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = tokenizer.encode(CHAT.format(question=question)).ids
    request = common_pb2.Request(
        model=os.environ.get("MODEL", model_dir.name),
        prompt=prompt,
        sampling=common_pb2.SamplingParams(max_tokens=64, temperature=0.0, top_p=1.0),
    )
    tokens: list[int] = []
    shown = ""
    async with open_channel(address) as channel:
        call = DecodeStub(channel).Generate(
            decode_pb2.GenerateRequest(request=request),
            metadata=auth_metadata(os.environ.get("EKIDEN_SECRET", "")),
            timeout=60,
        )
        async for event in call:
            if event.WhichOneof("kind") == "completion":
                print("\n", event.completion, sep="")
                continue
            tokens += event.delta.tokens
            text = tokenizer.decode(tokens)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else half a character
                print(text[len(shown) :], end="", flush=True)
                shown = text


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
