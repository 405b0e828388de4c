"""`looplm bench speculate`: a checkpoint's own continuations of real text."""

from transformers import PreTrainedTokenizerBase

from looplm.cli.paths import open_checkpoint
from looplm.data.text import read_documents
from looplm.data.tokenizer import encode, load_tokenizer
from looplm.engine import SamplingParams
from looplm.models import load
from looplm.studies.against import given_to
from looplm.studies.bench_speculate import SpeculationRow, bench_speculate
from looplm.studies.padded import padded

_PROMPT = 24  # tokens of a prompt


def measure_speculation(
    checkpoint: str, text: str | None, prompts: int, tokens: int, temperature: float, deterministic: bool, repeats: int,
    width: int | None = None, layers: int | None = None, against: str | None = None,
) -> list[SpeculationRow]:  # fmt: skip
    """Every way to speculate on the beginnings of the text's documents; the model is padded to a size, if given."""
    folder = open_checkpoint(checkpoint)
    model, tokenizer = load(folder), load_tokenizer(folder)
    if width is not None or layers is not None:
        model = padded(model, width or model.config.hidden_size, layers or model.config.core_layers)
    chosen = beginnings(tokenizer, text, prompts)
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0, ignore_eos=True)
    with given_to(against, model) as other:
        return bench_speculate(model, chosen, params, repeats, deterministic, other)


def beginnings(tokenizer: PreTrainedTokenizerBase, text: str | None, prompts: int) -> list[list[int]]:
    """The first tokens of the text's first documents that have as many, as prompts."""
    documents = encode(tokenizer, read_documents(text), plain=True)
    chosen = [document[:_PROMPT] for document in documents if len(document) >= _PROMPT][:prompts]
    if len(chosen) < prompts:
        raise ValueError(f"the text has {len(chosen)} documents of {_PROMPT} tokens; ask for as many prompts or fewer")
    return chosen
