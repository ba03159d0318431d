"""The C interface of the native operators: argument structs and signatures, as the `.cpp` files
declare them.

Structs are compared with what the library's own compiler made of them (`interface.cpp`) whenever
one is loaded, and signatures with the sources by a test (`tests/kernels/test_interface.py`).
"""

import ctypes

import torch
from torch import Tensor

from isobit.errors import IsobitError
from isobit.kernels.ops import Activation
from isobit.precision import PackedFP4, QTensor

KINDS = {
    torch.float8_e4m3fn: 0, torch.bfloat16: 1, torch.float32: 2, torch.float8_e5m2: 3,
    torch.int8: 4, torch.uint8: 5,
}  # fmt: skip
"""`enum Kind` of native.h; uint8 are nibbles."""
PLAIN = {dtype: KINDS[dtype] for dtype in (torch.bfloat16, torch.float32)}
"""Of operands without scales."""
ACTIVATIONS: dict[Activation, int] = {
    "silu": 0,
    "gelu_pytorch_tanh": 1,
    "swiglu_clamped": 2,
    "sigmoid": 3,
}
"""`enum Activation` of norms.h."""
ALL_KEYS = 2**62
"""The window of a row that sees all earlier keys."""
_I, _P, _D = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class ProductArguments(ctypes.Structure):
    """`struct Product` of product.h. A grid of scales is (pointer, block rows, block columns,
    strides)."""

    _fields_ = [
        ("kind_a", _I), ("m", _I), ("n", _I), ("k", _I), ("a", _P), ("a_row", _I), ("a_column", _I),
        ("kind_b", _I), ("packed", _P), ("bias", _P), ("bias_kind", _I), ("out", _P),
        ("out_kind", _I),
        ("threads", _I), ("scaled", _I), ("scale_a", _I * 5), ("scale_b", _I * 5),
        ("isa", _I), ("order", _I), ("small_scales", _P), ("common", _P),
        ("b", _P), ("b_column", _I), ("adds", _I),
    ]  # fmt: skip


def pointer(x: Tensor | None) -> int | None:
    """Return the address of a tensor, None without one."""
    return None if x is None else x.data_ptr()


def product_arguments(
    left: Tensor, right: Tensor, panels: Tensor | None, bias: Tensor | None, result: Tensor
) -> ProductArguments:
    """Return the arguments of left [M, K] times right [N, K], which is packed in `panels`, plus a
    contiguous bias [N], into result [M, N]; scales are left to be set. The tensors must live until
    the call. Without panels right is read where it is, contiguous along its rows."""
    inner = 2 * right.shape[1] if right.dtype == torch.uint8 else right.shape[1]
    assert left.shape[1] == inner, f"product of {tuple(left.shape)} and {tuple(right.shape)}"
    arguments = ProductArguments(
        KINDS[left.dtype], *result.shape, left.shape[1], left.data_ptr(), *left.stride(),
        KINDS[right.dtype], pointer(panels), None if bias is None else bias.data_ptr(),
        0 if bias is None else KINDS[bias.dtype], result.data_ptr(), KINDS[result.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    arguments.b, arguments.b_column = right.data_ptr(), right.stride(1)
    return arguments


def nibble_arguments(
    left: Tensor, right: PackedFP4, bias: Tensor | None, result: Tensor
) -> ProductArguments:
    """Return the arguments of a product whose right operand is read in its stored form: FP4 codes
    two to a byte, with their scales."""
    assert all(tensor.is_contiguous() for tensor in right.tensors)
    arguments = product_arguments(left, right.codes, right.codes, bias, result)
    arguments.small_scales, arguments.common = right.scales.data_ptr(), right.common.data_ptr()
    return arguments


def grid(x: QTensor) -> tuple[int, ...]:
    """Return an operand's scales as its arguments have them."""
    return (x.scale.data_ptr(), *x.block, *x.scale.stride())


class AttentionArguments(ctypes.Structure):
    """`struct Attention` of attention.h."""

    _fields_ = [
        ("kind", _I), ("store_kind", _I), ("q", _P), ("k", _P), ("v", _P), ("k_scale", _P),
        ("v_scale", _P),
        ("row_start", _P), ("context", _P), ("page_table", _P), ("pages", _I), ("page_size", _I),
        ("sequences", _I),
        ("heads", _I), ("kv_heads", _I), ("dim", _I), ("scale", _D), ("out", _P), ("lse", _P),
        ("dout", _P),
        ("dq", _P), ("dk", _P), ("dv", _P), ("threads", _I), ("rows", _I), ("single", _I),
        ("scale_step", _I), ("probabilities", _I), ("window", _I), ("sinks", _P),
        ("boundaries", _P),
    ]  # fmt: skip


class HeadInputArguments(ctypes.Structure):
    """`struct HeadInputs` of heads.h."""

    _fields_ = [
        ("kind", _I), ("tokens", _I), ("heads", _I), ("kv_heads", _I), ("dim", _I), ("q", _P),
        ("k", _P), ("v", _P),
        ("q_stride", _I), ("k_stride", _I), ("v_stride", _I), ("q_norm", _P), ("k_norm", _P),
        ("norm_kind", _I), ("eps", _D),
        ("single", _I), ("cosine", _P), ("sine", _P), ("positions", _P),
        ("slots", _P), ("store_k", _P), ("store_v", _P), ("scale_k", _P), ("scale_v", _P),
        ("form", _I),
        ("power_of_two", _I), ("rotated_q", _P), ("rotated_k", _P), ("threads", _I),
    ]  # fmt: skip


class SequenceArguments(ctypes.Structure):
    """`struct Sequences` of delta.h."""

    _fields_ = [
        ("row_start", _P), ("context", _P), ("page_table", _P), ("pages", _I), ("page_size", _I),
        ("count", _I),
    ]  # fmt: skip


class DeltaArguments(ctypes.Structure):
    """`struct DeltaRule` of delta.h."""

    _fields_ = [
        ("kind", _I), ("key_heads", _I), ("value_heads", _I), ("key_dim", _I), ("value_dim", _I),
        ("qkv", _P),
        ("gates", _P), ("decay", _P), ("step_bias", _P), ("scale", _D), ("states", _P), ("out", _P),
        ("threads", _I), ("skip", _P), ("least_step", _D),
    ]  # fmt: skip


class DeltaGradientArguments(ctypes.Structure):
    """`struct DeltaGradients` of delta.h."""

    _fields_ = [
        ("key_heads", _I), ("value_heads", _I), ("key_dim", _I), ("value_dim", _I),
        ("sequences", _I),
        ("row_start", _P), ("q", _P), ("k", _P), ("v", _P), ("dout", _P), ("kept", _P),
        ("strength", _P),
        ("dq", _P), ("dk", _P), ("dv", _P), ("dkept", _P), ("dstrength", _P), ("threads", _I),
        ("corrects", _I),
    ]  # fmt: skip


class LowRankPartArguments(ctypes.Structure):
    """`struct LowRankPart` of low_rank.h."""

    _fields_ = [("b", _P), ("rank", _I), ("lo", _I), ("hi", _I)]


class LowRankFactorsArguments(ctypes.Structure):
    """`struct LowRankFactors` of low_rank.h."""

    _fields_ = [
        ("a", _P), ("ranks", _I), ("whole", _I), ("parts", _P), ("count", _I), ("scale", _D),
    ]  # fmt: skip


class LowRankArguments(ctypes.Structure):
    """`struct LowRank` of low_rank.h."""

    _fields_ = [
        ("product", ctypes.POINTER(ProductArguments)), ("x", _P), ("x_row", _I),
        ("rows_of_x", _I), ("k", _I), ("total", _P),
        ("out", _P), ("columns", _I), ("rows", _P), ("offsets", _P), ("adapters", _P),
        ("adapter_step", _I), ("count", _I), ("threads", _I), ("isa", _I), ("isa_of_few", _I),
        ("order", _I),
    ]  # fmt: skip


class _Field(ctypes.Structure):
    """A field as C++ has it; the last one has no name and the size of the struct."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", _I), ("size", _I)]


_STRUCTS = {
    "isobit_product_fields": ProductArguments,
    "isobit_low_rank_part_fields": LowRankPartArguments,
    "isobit_low_rank_factors_fields": LowRankFactorsArguments,
    "isobit_low_rank_fields": LowRankArguments,
    "isobit_attention_fields": AttentionArguments,
    "isobit_head_inputs_fields": HeadInputArguments,
    "isobit_sequences_fields": SequenceArguments,
    "isobit_delta_rule_fields": DeltaArguments,
    "isobit_delta_gradients_fields": DeltaGradientArguments,
}
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "isobit_pack": (None, [_I, _P, _I, _I, _I, _I, _P, _I]),
    "isobit_product": (None, [_P]),
    "isobit_ordered_isa": (_I, [_I, _I]),
    "isobit_ordered_self_test": (_I, [_I, _I]),
    "isobit_ordered_pack": (None, [_I, _P, _I, _I, _I, _I, _P, _I]),
    "isobit_ordered_product": (None, [_P]),
    "isobit_ordered_products": (None, [_P, _I, _I]),
    "isobit_ordered_sum": (None, [_P, _I, _I]),
    "isobit_low_rank": (None, [_P]),
    "isobit_rows32_self_test": (_I, []),
    "isobit_quantize": (_I, [_I, _P, _I, _I, _I, _I, _I, _P, _P, _I]),
    "isobit_requantize": (_I, [_P, _I, _I, _P, _I, _I, _I, _I, _P, _P, _I]),
    "isobit_error_sums": (None, [_I, _P, _P, _I, _I, _P, _P, _I, _I, _I, _I, _P, _P, _I]),
    "isobit_dequantize": (None, [_P, _I, _I, _P, _I, _I, _P, _I]),
    "isobit_kv_write": (_I, [_I, _P, _P, _I, _I, _P, _I, _I, _I, _I, _I, _P, _P, _P, _P]),
    "isobit_rms_norm": (_I, [_I, _I, _I, _P, _P, _P, _I, _I, _D, _P, _P, _P, _P, _P, _I, _I, _I]),
    "isobit_rms_norm_backward": (None, [_I, _I, _I, _P, _P, _P, _P, _I, _I, _P, _P, _I]),
    "isobit_rotary": (None, [_I, _P, _I, _P, _P, _P, _I, _I, _I, _I, _P, _I]),
    "isobit_head_inputs": (_I, [_P]),
    "isobit_gate_mul": (_I, [_I, _I, _I, _P, _I, _I, _P, _P, _P, _I, _I, _I]),
    "isobit_gate_mul_backward": (None, [_I, _I, _I, _P, _P, _I, _I, _P, _I]),
    "isobit_separate_rms_norm": (None, [_I, _P, _P, _P, _I, _I, _D, _P, _P, _P, _I]),
    "isobit_separate_gate_mul": (None, [_I, _P, _I, _I, _P, _I]),
    "isobit_square_sums": (None, [_P, _I, _I, _P, _I]),
    "isobit_round_stochastically": (None, [_P, _P, _I, _I, _I, _I, _I]),
    "isobit_replay": (_I, [_P, _I]),
    "isobit_token_logprobs": (_I, [_P, _P, _I, _I, _P, _I, _P, _P, _I]),
    "isobit_softmax": (None, [_P, _I, _I, _I]),
    "isobit_logits_gradient": (None, [_P, _I, _P, _P, _I, _I, _I]),
    "isobit_cap_logits": (None, [_P, _I, _D, _I]),
    "isobit_sample": (None, [_P, _P, _I, _I, _P, _I, _P, _I]),
    "isobit_attention": (None, [_P]),
    "isobit_attention_backward": (None, [_P]),
    "isobit_short_convolution": (None, [_P, _I, _P, _P, _P, _I, _I, _P, _P, _I]),
    "isobit_short_convolution_backward": (None, [_P, _I, _P, _P, _P, _P, _I, _I, _P, _P, _P, _I]),
    "isobit_delta_rule": (None, [_P, _P]),
    "isobit_delta_rule_backward": (None, [_P]),
}
OPERATORS = tuple(name for name in _SIGNATURES if name != "isobit_replay")


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Set the signatures once, so that calls need no conversion. Raises IsobitError
    where the library has other structs than these."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    compare_structs(lib)
    return lib


def compare_structs(lib: ctypes.CDLL) -> None:
    """Raise IsobitError where a struct's size or a field's name, offset or size differs between the
    two languages."""
    for name, struct in _STRUCTS.items():
        ours, theirs = _layout(struct), _layout_of(lib, name)
        if ours != theirs:
            odd = next(
                field for field in {**ours, **theirs} if ours.get(field) != theirs.get(field)
            )
            raise IsobitError(
                f"{lib._name}: {struct.__name__}.{odd} has (offset, size) {theirs.get(odd)} in C++ "
                f"and {ours.get(odd)} in Python: interface.py, interface.cpp and the struct must "
                "list the same fields"
            )


def _layout(struct: type[ctypes.Structure]) -> dict[str, tuple[int, int]]:
    """Return the offset and size of each field in bytes, and under `size` those of the whole
    struct."""
    fields = {name: getattr(struct, name) for name, *_ in struct._fields_}
    return {name: (field.offset, field.size) for name, field in fields.items()} | {
        "size": (0, ctypes.sizeof(struct))
    }


def _layout_of(lib: ctypes.CDLL, name: str) -> dict[str, tuple[int, int]]:
    """Return the same as the library says."""
    function = getattr(lib, name)
    function.restype = ctypes.POINTER(_Field)
    layout, fields = {}, function()
    for field in fields:
        layout[field.name.decode() if field.name else "size"] = (field.offset, field.size)
        if not field.name:
            break
    return layout
