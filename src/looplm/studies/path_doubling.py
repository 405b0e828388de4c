"""Theorem 1 of Ouro as real weights: one layer, set by hand, whose loops double the paths that it knows.

A token names an ordered pair of nodes: (u, v) is the edge u -> v, (u, u) the node u. Its state has 2 n + 1 channels:

    name   one-hot of u
    row    1 at every node that u is known to reach, u among them
    one    K, so large that an RMS norm is a fixed scale for the rest (to n / K^2), which the norms' weights undo

The embedding of (u, v) is u's name and the row {u, v} with u's row of the graph stored in the weights. Attention
averages the rows of all tokens whose name lies in the asking token's row; the MLP makes every row entry above 0 a 1:

    R  <-  [R + R R > 0]

After k loops a row holds all that is at most 2^k edges away, if it held its node's own edges before. A reading layer in
front of the loop (the prelude: the same layer, but asking for its own name) gathers them; without it the first loop
does, and k loops reach 2^k - 1.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from looplm.models import LoopLMConfig, LoopLMForCausalLM

Edge = tuple[int, int]
_ONE = 2.0**20  # K
_SHARPNESS = 60.0  # a token that is asked for outweighs one that is not by e^60
_STEEP = 10.0  # GELU(x) is 0 or x to 1e-16 from |x| = 9 on


def doubling_model(nodes: int, stored: Iterable[Edge], reader: bool = True) -> LoopLMForCausalLM:
    """The model for graphs of up to `nodes` nodes; its weights know the graph `stored`, and no other.

    It is right for prompts of up to nodes^2 tokens: every edge there can be, once.
    """
    width = 2 * nodes + 1
    config = LoopLMConfig(
        vocab_size=nodes**2, hidden_size=width, intermediate_size=3 * nodes, num_attention_heads=1, head_dim=nodes,
        prelude_layers=int(reader), core_layers=1, loops=1, norm_placement="pre", norm_in_loop=False, rope="none",
        mlp="gelu", exit_gate=False, max_position_embeddings=nodes**2,
    )  # fmt: skip
    model = LoopLMForCausalLM(config).double().eval()
    model.set_attn_implementation("eager")
    name, row, one = slice(nodes), slice(nodes, 2 * nodes), 2 * nodes
    eye = torch.eye(nodes).double()
    known = eye.clone()
    for source, target in stored:
        known[source, target] = 1
    pairs, answers = torch.zeros(2, nodes, nodes, width).double()
    pairs[..., name] = eye[:, None]
    pairs[..., row] = torch.maximum(known[:, None], eye[None])
    pairs[..., one] = _ONE
    for node in range(nodes):  # the logit of (v, v): is v in the row?
        answers[node, node, nodes + node] = 1
        answers[node, node, one] = -0.5 / _ONE
    layers = {"core.0": _layer(nodes, asks_for=row)} | ({"prelude.0": _layer(nodes, asks_for=name)} if reader else {})
    weights = {f"model.{layer}.{key}": weight for layer, found in layers.items() for key, weight in found.items()}
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = pairs.flatten(0, 1), answers.flatten(0, 1)
    weights["model.norm.weight"] = _undone_norm(width)
    model.load_state_dict(weights)
    return model


def _layer(nodes: int, asks_for: slice) -> dict[str, Tensor]:
    """Average the rows of all tokens whose names lie in the channels `asks_for`, add them to one's own, and saturate.

    An average is 0 or at least 1 / nodes^2. A ramp from 1/4 to 1/2 of that makes it 0 or 1; a third unit for every
    channel, x itself for x >= 0, is taken off.
    """
    name, row, one = slice(nodes), slice(nodes, 2 * nodes), 2 * nodes
    width, eye = 2 * nodes + 1, torch.eye(nodes).double()
    query, key, value = torch.zeros(3, nodes, width).double()
    query[:, asks_for] = _SHARPNESS * nodes**0.5 * eye
    key[:, name] = eye
    value[:, row] = eye
    up, down = torch.zeros(3 * nodes, width).double(), torch.zeros(width, 3 * nodes).double()
    steepness = 4 * _STEEP * nodes**2
    for unit, (start, gain) in enumerate([(0.25, 1 / _STEEP), (0.5, -1 / _STEEP), (0.0, -1 / steepness)]):
        units = slice(unit * nodes, (unit + 1) * nodes)
        up[units, row] = steepness * eye
        up[units, one] = -steepness * start / nodes**2 / _ONE
        down[row, units] = gain * eye
    return {
        "attention_norms.pre.weight": _undone_norm(width),
        "attention.q_proj.weight": query,
        "attention.k_proj.weight": key,
        "attention.v_proj.weight": value,
        "attention.o_proj.weight": value.T,
        "mlp_norms.pre.weight": _undone_norm(width),
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": down,
    }


def _undone_norm(width: int) -> Tensor:
    return torch.full((width,), _ONE / width**0.5, dtype=torch.float64)


def prompts(nodes: int, graphs: Sequence[Iterable[Edge]]) -> Tensor:
    """Token ids [B, S] of graphs given in context: all nodes, then the edges, and node 0 again up to equal lengths."""
    rows = [
        [*range(0, nodes**2, nodes + 1), *(source * nodes + target for source, target in graph)] for graph in graphs
    ]
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


@torch.no_grad()
def reached(model: LoopLMForCausalLM, ids: Tensor, loops: int) -> Tensor:
    """[loops, B, n, n], whether the model says after each loop that node u reaches node v; `ids` [B, S] of `prompts`.

    Tokens see each other in both directions, by a mask of zeros.
    """
    nodes = math.isqrt(model.config.vocab_size)
    mask = torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1], dtype=model.dtype)
    out = model.model(input_ids=ids, attention_mask=mask, loops=loops, keep_loops="all", use_cache=False)
    logits = [model.lm_head(model.model.hidden_at(out, loop)) for loop in range(1, loops + 1)]
    return torch.stack(logits)[:, :, :nodes, :: nodes + 1] > 0


def loops_needed(diameter: int) -> int:
    """ceil(log2 D), and 1 where that is 0: a model runs at least one loop."""
    return max(1, (diameter - 1).bit_length())
