"""`looplm export`: a checkpoint rewritten in another layout."""

from pathlib import Path

from looplm.cli.paths import open_checkpoint
from looplm.data.tokenizer import load_tokenizer
from looplm.models import load, save
from looplm.models.checkpoint import LayoutName


def export_checkpoint(checkpoint: str, out: Path, layout: LayoutName) -> Path:
    """Read `checkpoint` in its own dtype and write it to `out`, with its tokenizer if it has one."""
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; give a new folder")
    folder = open_checkpoint(checkpoint)
    save(load(folder, dtype="auto"), out, layout)
    if (folder / "tokenizer.json").exists():
        load_tokenizer(folder).save_pretrained(out)
    return out
