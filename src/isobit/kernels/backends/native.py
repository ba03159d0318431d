"""The native backend: the table of operators in C++ (`*.cpp` in the operators' rooms), called
through ctypes with data pointers.

Same definitions and signatures as the reference backend. Products, norms, gates and attention under
`bitwise`, FP8 products under `exact`, linear attention, quantization, keys and values and sampled
tokens are its bits; elsewhere sums run in another fixed order in float64, and results differ by at
most a unit in the last place (`tests/kernels/test_native.py`), gradients of linear attention in
float32 (`test_delta.py`). What C++ does not cover goes to the reference operators: `unsupported`
names what of a precision flow that is, and `check_precision` adds it to `why`, which a run shows
and records.

Left out: the library (`native/build.py`), the C interface (`native/interface.py`).
"""

from isobit.kernels.attention import native as attention_native
from isobit.kernels.backends.composed import Composed
from isobit.kernels.backends.reference import ReferenceOps
from isobit.kernels.delta import native as delta
from isobit.kernels.experts import definition as routing
from isobit.kernels.experts import native as experts
from isobit.kernels.head import native as head
from isobit.kernels.heads import native as heads
from isobit.kernels.low_rank import native as low_rank
from isobit.kernels.native.base import NativeBase
from isobit.kernels.native.build import library
from isobit.kernels.norms import native as norms
from isobit.kernels.ops import Ops
from isobit.kernels.optim import native as optim
from isobit.kernels.product import native as product_native
from isobit.kernels.product.ordered_native import OrderedProducts
from isobit.kernels.quantize import native as quantize_native
from isobit.kernels.sampling import native as sampling
from isobit.precision import Flow, Precision


class NativeOps(NativeBase, Composed):
    """`isobit.kernels.ops.Ops` in C++."""

    backend = "native"

    def __init__(self, consistency: str = "bitwise", why: str = "") -> None:
        definition = ReferenceOps(consistency, why)
        self._start(definition, definition)

    def _start(self, definition: ReferenceOps, reference: Ops) -> None:
        """Compute at the level of `definition`, and by `reference` what C++ does not cover."""
        self.lib, self.reference, self.fallbacks = library(), reference, set()
        self.consistency, self.order = definition.consistency, definition.order
        self.why = self._chosen = definition.why
        self.fast, self.single = self.consistency == "fast", definition.sums is not None
        self.ordered = None if definition.sums is None else OrderedProducts(definition.sums)
        if self.single:
            norms.check_rows()

    def check_precision(self, precision: Precision) -> None:
        """Every flow can be computed; `why` says what of it is not in C++."""
        found = unsupported(precision, self.consistency)
        slower = (
            f"; by the reference operators, which are slower: {', '.join(found)}" if found else ""
        )
        self.why = self._chosen + slower

    quantize = quantize_native.quantize
    quantize_along_tokens = quantize_native.quantize_along_tokens
    error_sums = quantize_native.error_sums
    prepare = product_native.prepare
    product = product_native.product
    gradient_product = product_native.gradient_product
    rounds_last = product_native.rounds_last
    grouped_product = experts.grouped_product
    prepare_factors = low_rank.prepare_factors
    adapted_product = low_rank.adapted_product
    add_low_rank = low_rank.add_low_rank
    rms_norm = norms.rms_norm
    rms_norm_quantized = norms.rms_norm_quantized
    rms_norm_backward = norms.rms_norm_backward
    gate_mul = norms.gate_mul
    gate_mul_quantized = norms.gate_mul_quantized
    gate_mul_backward = norms.gate_mul_backward
    rotary = heads.rotary
    kv_write = heads.kv_write
    attention_inputs = heads.attention_inputs
    attention = attention_native.attention
    attention_backward = attention_native.attention_backward
    short_convolution = delta.short_convolution
    short_convolution_backward = delta.short_convolution_backward
    delta_rule = delta.delta_rule
    delta_rule_backward = delta.delta_rule_backward
    head_backward = head.head_backward
    cap_logits = sampling.cap_logits
    head_backward_kept = head.head_backward_kept
    token_logprobs = sampling.token_logprobs
    sample = sampling.sample
    square_sums = optim.square_sums
    round_stochastically = optim.round_stochastically
    route = staticmethod(routing.route)


def unsupported(precision: Precision, consistency: str) -> list[str]:
    """Return what of a precision flow C++ leaves to the reference operators, each as `operator of
    format`."""
    found = [
        text
        for flow in (precision.rollout, precision.learner)
        for text in _of_flow(flow, consistency)
    ]
    gradient = precision.gradient
    if gradient is not None and not quantize_native.has_scales(gradient):
        found.append(f"quantize of {gradient}")
    for other in (precision.learner.weight, precision.learner.activation):
        if gradient is not None and other is not None:
            found += product_native.unsupported(gradient, other, consistency)
    return list(dict.fromkeys(found))


def _of_flow(flow: Flow, consistency: str) -> list[str]:
    found = []
    for spec in (flow.weight, flow.activation, flow.query):
        if spec is not None and not quantize_native.has_scales(spec):
            found.append(f"quantize of {spec}")
    if flow.weight is not None and flow.activation is not None:
        found += product_native.unsupported(flow.activation, flow.weight, consistency)
    if flow.kv is not None and not heads.writes(flow.kv):
        found.append(f"kv_write of {flow.kv}")
    if flow.kv is not None and not attention_native.reads(flow.kv):
        found.append(f"attention of {flow.kv}")
    return found
