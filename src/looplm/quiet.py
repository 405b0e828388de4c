"""Importing torchao without its complaints; transformers does so in every process, wherever it is installed."""

import logging

_COMPLAINTS = {
    "torchao": "Failed to load ",  # libraries for GPUs, on a machine without one
    "torch.utils._pytree": "<enum ",  # how torchao registers its enums with torch
}


def _hush(name: str, opening: str) -> None:
    logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(opening))


for _name, _opening in _COMPLAINTS.items():
    _hush(_name, _opening)
