"""Multi-head latent attention (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1), with the heads
expanded: the same operators and pages as other attention.

Of a layer's rows x, normed: (q', c, r) = x · qkv_a; q = norm(q') · q_b, or q' itself; (k, v) =
norm(c) · kv_b, head by head; each head's key is k and r, which all heads share. Queries and keys
have their rotated dimensions where rotation of whole halves takes them (`weights/permute_heads.py`), values
are filled with zeros to the width of keys, and what attention makes of these is dropped. Left out:
a cache of c and r alone, which is smaller by the number of heads (docs/decisions/model.md).
"""

import torch
from torch import Tensor
from torch.nn import functional

from isobit.kernels import Ops
from isobit.model.forward import autograd
from isobit.model.hub.latent import EPS, Latent
from isobit.model.weights.layout import LatentAttention
from isobit.model.weights.permute_heads import in_halves


def expanded_heads(
    rows: Tensor, own: LatentAttention, sizes: Latent, heads: int, ops: Ops
) -> Tensor:
    """Return rows [T, first + kv_rank + rotated], of qkv_a, to queries, keys and values [T, 3 H,
    D]."""
    parts = (sizes.first_rows(heads), sizes.kv_rank, sizes.rotated)
    q, latent, shared = (part.contiguous() for part in rows.split(parts, dim=1))
    if own.q_b is not None and own.q_a_norm is not None:
        q, _ = autograd.norm_linear(q, None, own.q_a_norm, EPS, own.q_b, ops)
    kv, _ = autograd.norm_linear(latent, None, own.kv_a_norm, EPS, own.kv_b, ops)
    plain, turned = q.view(-1, heads, sizes.head_dim).split((sizes.plain, sizes.rotated), 2)
    keys, values = kv.view(-1, heads, sizes.plain + sizes.value).split(
        (sizes.plain, sizes.value), 2
    )
    turned_keys = shared.unsqueeze(1).expand(-1, heads, -1)
    both = torch.cat((torch.cat((turned, turned_keys), 1), torch.cat((plain, keys), 1)), 2)
    wide = functional.pad(values, (0, sizes.head_dim - sizes.value))
    return torch.cat((in_halves(both, sizes.rotated, interleaved=True), wide), 1)
