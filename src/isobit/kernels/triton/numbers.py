"""Casts, scales and the dot product of all Triton kernels, for GPU and interpreter.

On a GPU these are the hardware's instructions. Triton 3.6's interpreter, in which kernels are
tested on a CPU, rounds float32 to FP8 and BF16 wrongly and multiplies BF16 as integers; there the
same rounding is written out in integers. Its product is replaced too (`interpreter.py`). The
results are the same bits (`tests/kernels/triton/test_numbers.py`; on a GPU against the reference
quantizer).

FP8 codes are passed as uint8 pointers and reinterpreted after the load, so kernels need no FP8
tensors from PyTorch. INT8 codes are int8: the type of a pointer tells which they are. Left out:
block sizes and launches (`launch.py`).
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
SMALLEST_SCALE = tl.constexpr(2.0**-126)
NAN_CODE = tl.constexpr(0x7F)

if INTERPRETED:
    from isobit.kernels.triton import interpreter

    interpreter.install()


@triton.jit
def to_bf16(x):
    """Convert float32 to bfloat16, to nearest even; NaN and infinity stay."""
    if INTERPRETED:
        word = x.to(tl.uint32, bitcast=True)
        rounded = word + 0x7FFF + ((word >> 16) & 1)
        finite = (word & 0x7F800000) != 0x7F800000
        return (
            (tl.where(finite, rounded, word) & 0xFFFF0000)
            .to(tl.float32, bitcast=True)
            .to(tl.bfloat16)
        )
    else:
        return x.to(tl.bfloat16)


@triton.jit
def cast(x, like: tl.constexpr):
    """Return float32 `x` rounded to the element type `like`: bfloat16 or float32."""
    if like == tl.bfloat16:
        return to_bf16(x)
    else:
        return x.to(like)


@triton.jit
def to_e4m3(x):
    """Convert float32 to E4M3 codes (uint8), to nearest even, saturating at 448; NaN becomes
    NaN."""
    if INTERPRETED:
        word = x.to(tl.uint32, bitcast=True)
        sign = (word >> 24) & 0x80
        magnitude = tl.minimum(tl.abs(x), 448.0)
        bits = magnitude.to(tl.uint32, bitcast=True)
        # normal numbers: 3 bits of mantissa, exponent bias 7 instead of 127
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # below 2**-6 codes count steps of 2**-9: adding 1.5 * 2**14 leaves them, rounded, in the
        # last bits
        steps = ((magnitude + 24576.0).to(tl.uint32, bitcast=True)) - 0x46C00000
        code = tl.where(magnitude < 0.015625, steps, normal) | sign
        return tl.where(x == x, code, NAN_CODE).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(code):
    """Convert E4M3 codes (uint8) to float32, exactly; NaN codes to NaN."""
    if INTERPRETED:
        exponent = ((code >> 3) & 0xF).to(tl.int32)
        mantissa = (code & 7).to(tl.int32)
        normal = ((exponent + 120) << 23) | (mantissa << 20)
        value = tl.where(
            exponent > 0, normal.to(tl.float32, bitcast=True), mantissa.to(tl.float32) * 0.001953125
        )
        value = tl.where((code & 0x7F) == NAN_CODE, float("nan"), value)
        # a negation is 0 - value here, which would lose the sign of zero
        word = value.to(tl.uint32, bitcast=True) | ((code & 0x80).to(tl.uint32) << 24)
        return word.to(tl.float32, bitcast=True)
    else:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def from_nibbles(pair, k, scale, common):
    """Return the values, in float32, of NVFP4 codes two to a byte (uint8), of which an even `k` is
    in the low half, times scales in E4M3 (uint8) times `common`, where 0 stands for 1: code times
    scale, rounded once, as `PackedFP4` are."""
    code = (pair >> ((k % 2) * 4).to(tl.uint8)) & 15
    magnitude = (code & 7).to(tl.int32)
    # two bits of exponent under a bias of 1, one of mantissa; 0.5 is the only subnormal number
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    # a negation is 0 - value in the interpreter, which would lose the sign of zero
    word = value.to(tl.uint32, bitcast=True) | ((code & 8).to(tl.uint32) << 28)
    return word.to(tl.float32, bitcast=True) * tl.where(scale == 0, 1.0, from_e4m3(scale) * common)


@triton.jit
def to_int8(x):
    """Convert float32 within 127 to whole numbers (int8), to nearest even; NaN to any."""
    # 1.5 * 2**23 leaves the rounded number in the last bits
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def from_codes(codes):
    """Convert codes to float32, exactly: INT8 as int8, E4M3 as uint8."""
    if codes.dtype == tl.int8:
        return codes.to(tl.float32)
    else:
        return from_e4m3(codes)


# What unpacks a word of two pairs of codes, $2, into the first of both, $0, and the second of both,
# $1; in PTX, since Triton has no operation on two numbers of a register. Each number is exact
# (`tests/kernels/triton/test_pairs.py`).
INT8_TO_FP16 = tl.constexpr("""{
.reg .b32 high, magic;
mov.b32 magic, 0x64806480;
shr.u32 high, $2, 8;
lop3.b32 $0, $2, 0x00ff00ff, magic, 0x6a;
lop3.b32 $1, high, 0x00ff00ff, magic, 0x6a;
sub.f16x2 $0, $0, magic;
sub.f16x2 $1, $1, magic;
}""")
"""The last bits of 1024 take code + 128 (an exclusive or of its sign), and 1152 is taken off."""
INT8_TO_BF16 = tl.constexpr("""{
.reg .b32 high, less, magic, minus;
mov.b32 magic, 0x43004300;
mov.b32 minus, 0xbf80bf80;
shr.u32 high, $2, 8;
lop3.b32 $0, $2, 0x007f007f, magic, 0xea;
lop3.b32 less, $2, 0x00800080, magic, 0xea;
fma.rn.bf16x2 $0, less, minus, $0;
lop3.b32 $1, high, 0x007f007f, magic, 0xea;
lop3.b32 less, high, 0x00800080, magic, 0xea;
fma.rn.bf16x2 $1, less, minus, $1;
}""")
"""The last bits of 128 take the lower 7, and 128 is taken off, or 256 where the sign made it so."""
E4M3_TO_FP16 = tl.constexpr("""{
.reg .b32 sorted;
.reg .b16 low, high;
prmt.b32 sorted, $2, 0, 0x3120;
mov.b32 {low, high}, sorted;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@triton.jit
def pair_pointer(codes_ptr):
    """Return a pointer to codes as one to pairs of them: INT8 as int16, E4M3 as uint16."""
    if codes_ptr.dtype.element_ty == tl.int8:
        return codes_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return codes_ptr.to(tl.pointer_type(tl.uint16), bitcast=True)


@triton.jit
def pairs(codes, like: tl.constexpr):
    """Return (first codes, second codes) of pairs, INT8 as int16, E4M3 as uint16, as float16 or
    bfloat16: exactly; NaN codes to NaN."""
    if INTERPRETED:
        form: tl.constexpr = tl.int8 if codes.dtype == tl.int16 else tl.uint8
        low, high = (codes & 0xFF).to(form), ((codes >> 8) & 0xFF).to(form)
        return cast(from_codes(low), like), cast(from_codes(high), like)
    elif codes.dtype == tl.uint16:
        low, high = tl.inline_asm_elementwise(
            E4M3_TO_FP16, "=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        if like == tl.float16:
            return low, high
        else:
            return low.to(tl.float32).to(like), high.to(tl.float32).to(like)
    elif like == tl.float16:
        return tl.inline_asm_elementwise(
            INT8_TO_FP16, "=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            INT8_TO_BF16,
            "=&r,=&r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


SIGMOID = tl.constexpr("""{
.reg .f32 e;
mul.rn.f32 e, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 e, e;
add.rn.f32 e, e, 0f3F800000;
rcp.approx.ftz.f32 $0, e;
}""")


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), for gradients alone, which need not agree with a rollout: on a GPU
    by two approximate instructions, each within 2^-22 of its result, in 4 for 24 of an exact
    quotient (`tests/test_gpu_approximate.py`, and the card itself in
    `benchmarks/gpu/approximate.py`)."""
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def block_scale(amax, UE8M0: tl.constexpr, form: tl.constexpr = tl.uint8):
    """Return the scale of a block with this largest magnitude, float32: as
    `isobit.precision.quantize.scales`. `form` is the type of its codes.

    amax / 448, of INT8 amax / 127, at least 2**-126; 1 for a zero block; with UE8M0 rounded up to a
    power of two. NaN where amax is NaN or infinite, so that whatever the block is multiplied with
    becomes NaN too.
    """
    if UE8M0 and form != tl.int8:
        # 448 is 1.75 · 2^8, so the quotient's power of two is known without it: a division is 20
        # instructions, and a call where numbers are tiny
        exponent = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
        scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    else:
        most: tl.constexpr = 127.0 if form == tl.int8 else 448.0
        scale = tl.maximum(tl.div_rn(amax, most), SMALLEST_SCALE)
        if UE8M0:
            word = scale.to(tl.uint32, bitcast=True)
            scale = ((word + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0, 1.0, scale)
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def quantize_block(x, scale, form: tl.constexpr = tl.uint8):
    """Return the codes of float32 `x` under scales that broadcast to it: E4M3 as uint8, or INT8 as
    int8."""
    scaled = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    if form == tl.int8:
        return to_int8(tl.minimum(tl.maximum(scaled, -127.0), 127.0))
    else:
        return to_e4m3(
            tl.minimum(tl.maximum(scaled, -448.0, tl.PropagateNan.ALL), 448.0, tl.PropagateNan.ALL)
        )


@triton.jit
def e4m3_pointer(codes_ptr):
    """Return a pointer to codes (uint8) as one to E4M3, on a GPU: what it loads for `dot` then goes
    from shared memory right into the matrix unit. Codes cast after their load take a detour through
    registers, and back through shared memory."""
    if INTERPRETED:
        return codes_ptr
    else:
        return codes_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)


@triton.jit
def load_step(w_tile, x_tile, k, left, EVEN: tl.constexpr):
    """Return one step along K of both operands of `dot`, w [N, K] and x [K, T]: zeros for `k` from
    `left` on, and no mask where sizes are EVEN."""
    if EVEN:
        return tl.load(w_tile), tl.load(x_tile)
    else:
        inside = k < left
        return tl.load(w_tile, mask=inside[None, :], other=0.0), tl.load(
            x_tile, mask=inside[:, None], other=0.0
        )


@triton.jit
def dot(a, b, acc):
    """Return acc + a · b with float32 sums: BF16, float32 or E4M3 operands [M, K] and [K, N]; codes
    also as uint8."""
    if a.dtype == tl.uint8:
        return tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def steps(count):
    """Return `count`, a number that only the kernel knows, as the bound of a `range`.

    Triton 3.6's interpreter asks NumPy for it in a way that NumPy 2.4 refuses.
    """
    if INTERPRETED:
        return count if isinstance(count, int) else int(count.handle.data.item())
    else:
        return count
