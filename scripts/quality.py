"""`make quality`: what quantised weights and a quantised KV cache cost in a model's answers.

Every form is compared with bfloat16 on the same model:

    perplexity   of a text (scripts/benchmarks/quality_text.txt), in windows of 512 tokens
    same token   after prompts from that text, bfloat16 goes on greedily; a form reads along, and
                 at every position its most likely token is that of bfloat16, or it is not

The figures go to build/bench/quality.json, and the table to docs/quantisation.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from benchmarks.models import SMOLLM2, model_dir
from benchmarks.results import Row, markdown, publish, row
from tokenizers import Tokenizer
from torch import Tensor

from ekiden.cache.tensors import allocate_cache
from ekiden.core.config import EngineConfig
from ekiden.layers.batch import ForwardBatch, Span
from ekiden.models.config import ModelConfig
from ekiden.models.layout import kv_layout
from ekiden.models.registry import load_model
from ekiden.parallel.local import local_meshes

TEXT = Path(__file__).parent / "benchmarks" / "quality_text.txt"
DOCS = Path(__file__).parents[1] / "docs" / "quantisation.md"
START, END = "<!-- quality: begin -->", "<!-- quality: end -->"
WINDOW = 512
BLOCK = 16
SEQUENCES = 16
"""Prompts of ``PROMPT`` tokens, spread over the text, each followed by ``ANSWER`` greedy tokens."""
PROMPT, ANSWER = 32, 32


class Form(NamedTuple):
    """One way to hold weights and KV."""

    name: str
    quantization: str = "auto"
    kv: str = "auto"
    dtype: str = "bfloat16"


BASE = Form("bfloat16")
FORMS = (
    Form("float32", dtype="float32"),
    Form("weights fp8", quantization="fp8"),
    Form("weights int8", quantization="int8"),
    Form("weights int4", quantization="int4"),
    Form("KV int8", kv="int8"),
    Form("KV fp8", kv="fp8"),
    Form("weights int8, KV int8", quantization="int8", kv="int8"),
    Form("weights int4, KV fp8", quantization="int4", kv="fp8"),
)


class Runner:
    """A model in one form, its cache large enough for all sequences at once."""

    def __init__(self, path: Path, form: Form, kernels: str) -> None:
        config = EngineConfig(
            model_dir=path,
            model_name=form.name,
            dtype=form.dtype,
            quantization=form.quantization,
            kv_cache_dtype=form.kv,
            kernels=kernels,
            block_size=BLOCK,
        ).check()
        model = ModelConfig.from_dir(path)
        (mesh,) = local_meshes(1, 1, timeout_s=60.0)
        self.layout = kv_layout(model, config)
        self.model = load_model(model, config, mesh, "cpu")
        self.width = max(WINDOW, PROMPT + ANSWER) // BLOCK
        self.cache = allocate_cache(self.layout, 0, SEQUENCES * self.width)

    def step(self, parts: list[tuple[int, list[int], int, int]]) -> Tensor:
        """(sequence, tokens, start, rows of logits) of each; logits [rows of all, V]."""
        spans = [
            Span(tokens, start, range(s * self.width, (s + 1) * self.width), rows)
            for s, tokens, start, rows in parts
        ]
        logits = self.model.forward(ForwardBatch.build(spans, BLOCK), self.cache)
        assert logits is not None
        return logits


def perplexity(runner: Runner, tokens: list[int]) -> float:
    total, count = 0.0, 0
    for first in range(0, len(tokens) - 1, WINDOW):
        window = tokens[first : first + WINDOW]
        logits = runner.step([(0, window, 0, len(window))])[:-1]
        wanted = torch.tensor(window[1:])
        total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        count += len(wanted)
    return float(torch.tensor(total / count).exp())


def prompts_of(tokens: list[int]) -> list[list[int]]:
    step = (len(tokens) - PROMPT) // SEQUENCES
    return [tokens[s * step : s * step + PROMPT] for s in range(SEQUENCES)]


def greedy(runner: Runner, prompts: list[list[int]]) -> list[list[int]]:
    """What the model says after each prompt."""
    answers: list[list[int]] = [[] for _ in prompts]
    parts = [(s, prompt, 0, 1) for s, prompt in enumerate(prompts)]
    for at in range(ANSWER):
        best = runner.step(parts).argmax(1).tolist()
        for answer, token in zip(answers, best, strict=True):
            answer.append(token)
        parts = [(s, [token], PROMPT + at, 1) for s, token in enumerate(best)]
    return answers


def same_tokens(runner: Runner, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """The share of answers' tokens that this form would have said as well, reading along."""
    same = 0
    for s, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        logits = runner.step([(s, prompt + answer[:-1], 0, ANSWER)])
        same += int((logits.argmax(1) == torch.tensor(answer)).sum())
    return same / (len(prompts) * ANSWER)


class Quality(NamedTuple):
    form: Form
    perplexity: float
    same: float
    kv_bytes: int
    """Of a token."""


def measure(path: Path, kernels: str) -> list[Quality]:
    tokens = Tokenizer.from_file(str(path / "tokenizer.json")).encode(TEXT.read_text()).ids
    prompts = prompts_of(tokens)
    print(f"{len(tokens)} tokens, {SEQUENCES * ANSWER} greedy ones", flush=True)
    found: list[Quality] = []
    answers: list[list[int]] = []
    for form in (BASE, *FORMS):
        begin = time.monotonic()
        runner = Runner(path, form, kernels)
        answers = answers or greedy(runner, prompts)
        quality = Quality(
            form,
            perplexity(runner, tokens),
            same_tokens(runner, prompts, answers),
            runner.layout.token_bytes(),
        )
        found.append(quality)
        print(
            f"{form.name:24} perplexity {quality.perplexity:.3f}, same token {quality.same:.1%} "
            f"({time.monotonic() - begin:.0f} s)",
            flush=True,
        )
    return found


def as_rows(found: list[Quality]) -> list[Row]:
    base = found[0]
    rows: list[Row] = []
    for form, value, same, _ in found:
        name, peer = f"perplexity, {form.name}", base.perplexity
        rows.append(row(name, value, "", peer=peer, peer_name=BASE.name))
        rows.append(row(f"same greedy token, {form.name}", 100 * same, "%"))
    return rows


def as_table(found: list[Quality]) -> str:
    base = found[0]
    head = ("form", "perplexity", "more", "same greedy token", "KV bytes a token")
    lines = [
        (
            q.form.name,
            f"{q.perplexity:.3f}",
            f"{q.perplexity / base.perplexity - 1:+.2%}",
            f"{q.same:.1%}",
            f"{q.kv_bytes:,}",
        )
        for q in found
    ]
    return markdown(head, lines)


def write_docs(table: str) -> None:
    text = DOCS.read_text()
    before, _, rest = text.partition(START)
    DOCS.write_text(f"{before}{START}\n{table}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=SMOLLM2, help=f"name or directory (default: {SMOLLM2})")
    parser.add_argument("--kernels", default="auto", help="as of the server (default: auto)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    parser.add_argument("--no-docs", action="store_true", help=f"leave {DOCS.name} as it is")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = measure(model_dir(args.model), args.kernels)
    publish("quality", as_rows(found))
    if not args.no_docs:
        write_docs(as_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
