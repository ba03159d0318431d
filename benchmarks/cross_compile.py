"""Compile recorded launches of Triton kernels for a GPU that need not be there, and read off what
was made of them.

ptxas reports registers and spills, the disassembly shows which matrix instructions a kernel runs
on. Needs Triton's own toolchain and no GPU; must not run where TRITON_INTERPRET is set.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend

from isobit.kernels.triton.launch import KernelLaunch

_POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
_MATRIX = re.compile(r"\b(QGMMA|HGMMA|IGMMA|HMMA|QMMA|IMMA|DMMA)\.(\S+)")


@dataclass(frozen=True)
class Compiled:
    """What a kernel became: registers a thread, bytes spilled and of shared memory, matrix
    instructions by shape."""

    kernel: str
    constants: dict[str, object]
    num_warps: int
    num_stages: int
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int
    instructions: dict[str, int]

    @property
    def instruction_class(self) -> str:
        """QGMMA (FP8 warpgroup), HGMMA (BF16 warpgroup), HMMA (a warp's own: slower), or none."""
        return "+".join(sorted({name.split(".")[0] for name in self.instructions})) or "none"


def kernel_name(launch: KernelLaunch) -> str:
    """Its room, its file where the room has several, and its function, such as
    product.block_product."""
    path = launch.kernel.fn.__module__.split(".")[2:]
    places = [part for part in path if part not in ("triton", "kernels")]
    return ".".join([*places, launch.kernel.__name__.strip("_")])


def compile_launch(launch: KernelLaunch, capability: int = 90) -> Compiled:
    """Compile what `launch` would have run, with the specialization that Triton would have
    chosen."""
    made = triton_compile(launch, GPUTarget("cuda", capability, 32))
    registers, stack, spills = _resources(made.asm["ptx"], capability)
    instructions = Counter(".".join(match) for match in _MATRIX.findall(made.asm["sass"]))
    return Compiled(
        kernel_name(launch), dict(launch.constants), launch.num_warps, launch.num_stages, registers,
        spills, stack,
        made.metadata.shared, dict(instructions),
    )  # fmt: skip


def matrix_loop(sass: str) -> list[str]:
    """The instructions of a warp in a kernel's innermost loop around matrix instructions, of the
    longest if there are several, in the words of Triton's disassembly; empty where there is
    none."""
    lines, labels = list[str](), dict[str, int]()
    found: list[tuple[int, list[str]]] = []
    for line in sass.splitlines():
        if (label := re.match(r"\s*\.?(L\w+):", line)) is not None:
            labels[label[1]] = len(lines)
        elif "\t" in line:
            lines.append(line.split("\t")[1].rstrip(";"))
            jump = re.search(r"BRA (L\w+)", lines[-1])
            if jump is not None and jump[1] in labels:
                start = labels[jump[1]]
                found.append((start, lines[start:]))
    loops = [(start, loop) for start, loop in found if any(map(_MATRIX.search, loop))]
    inner = [
        loop
        for start, loop in loops
        if not any(start < other < start + len(loop) for other, _ in loops)
    ]
    return max(inner, key=len, default=[])


def matrix_layouts(launch: KernelLaunch, capability: int = 90) -> set[str]:
    """How a launch's matrix products lie in registers: instructions, and warps along both sides, in
    Triton's words."""
    made = triton_compile(launch, GPUTarget("cuda", capability, 32))
    return set(re.findall(r"#ttg\.nvidia_mma<[^>]*>", made.asm["ttgir"]))


def triton_compile(launch: KernelLaunch, target: GPUTarget) -> Any:
    """What Triton's compiler makes of a launch."""
    source, options = _source(launch)
    return triton.compile(source, target=target, options=options)


def triton_ir(launch: KernelLaunch, capability: int = 90) -> str:
    """A launch in Triton's own IR, functions inlined, before anything is laid out for a GPU."""
    target = GPUTarget("cuda", capability, 32)
    source, given = _source(launch)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options(given)
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, functions, modules, context)
    return str(backend.make_ttir(module, {}, options, capability))


def _source(launch: KernelLaunch) -> tuple[ASTSource, dict[str, object]]:
    """(a launch with the specialization that Triton would have chosen, its options)."""
    signature, constants, attributes = {}, {}, {}
    given = dict(zip(launch.kernel.arg_names, launch.arguments)) | launch.constants
    for index, name in enumerate(launch.kernel.arg_names):
        value = given[name]
        parameter = launch.kernel.params[index]
        one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float), f"{name}: {value!r}"
            signature[name] = "fp32"
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options: dict[str, object] = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": False,
    }
    options |= {"maxnreg": launch.constants["maxnreg"]} if "maxnreg" in launch.constants else {}
    return source, options


def _resources(ptx: str, capability: int) -> tuple[int, int, int]:
    """(registers, stack bytes, spilled bytes) by ptxas."""
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [
            get_ptxas(capability).path,
            "-v",
            f"-arch=sm_{capability}{suffix}",
            str(source),
            "-o",
            str(Path(folder, "kernel.cubin")),
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", report)
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    assert used is not None, report
    assert frame is not None, report
    registers, (stack, stores, loads) = int(used[1]), map(int, frame.groups())
    return registers, stack, stores + loads
