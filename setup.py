"""What pyproject.toml cannot say: a wheel carries the configs of the quickstart, and the compiled
operators, where a compiler is found that can make them.

They are called through ctypes and not linked with Python, so the wheel is for every Python 3 on the
platform. Without a compiler, on other platforms, in an editable installation and with
ISOBIT_PREBUILT=0 it carries none, and is pure; ISOBIT_PREBUILT=1 makes it an error that they cannot
be compiled.
"""

import os
import runpy
import shutil
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_py import build_py

NATIVE = Path("isobit/kernels/native")
RECIPE = runpy.run_path(str(Path(__file__).parent / "src" / NATIVE / "recipe.py"))
CONFIGS = sorted((Path(__file__).parent / "configs").glob("quickstart*.yaml"))
WANTED = os.environ.get("ISOBIT_PREBUILT", "")


class BuildNative(Command):
    """Compiles the libraries into the build folder; `libraries` are their files."""

    def initialize_options(self) -> None:
        self.build_lib = ""
        self.editable_mode = False
        self.libraries: list[str] = []

    def finalize_options(self) -> None:
        self.build_lib = self.build_lib or self.get_finalized_command("build_py").build_lib

    def run(self) -> None:
        if self.editable_mode or WANTED == "0":
            return
        folder = Path(self.build_lib) / NATIVE / RECIPE["PREBUILT"].name
        try:
            self.libraries = [str(path) for path in RECIPE["build_levels"](folder)]
        except RECIPE["BuildFailed"] as error:
            if WANTED == "1":
                raise SystemExit(f"ISOBIT_PREBUILT=1: {error}") from None
            self.warn(f"the operators will be compiled on first use: {error}")

    def get_outputs(self) -> list[str]:
        return self.libraries

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return []


class Modules(build_py):
    """Adds the configs of `isobit quickstart`, which a checkout has in `configs`."""

    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib) / "isobit" / "configs"
        for path in [] if self.editable_mode else CONFIGS:
            self.mkpath(str(folder))
            self.copy_file(str(path), str(folder / path.name))


class Build(build):
    sub_commands = [*build.sub_commands, ("build_native", None)]


class Wheel(bdist_wheel):
    """Of a platform if it carries libraries, and then for every Python 3."""

    def run(self) -> None:
        # a module that is gone since the last build in this folder would be in the wheel too
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        self.run_command("build_native")  # decides what the wheel is before its files are laid out
        libraries = self.get_finalized_command("build_native").libraries
        self.root_is_pure = not libraries
        self.distribution.has_ext_modules = lambda: bool(
            libraries
        )  # files then go where a platform's go
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(
    cmdclass={
        "build": Build,
        "build_py": Modules,
        "build_native": BuildNative,
        "bdist_wheel": Wheel,
    }
)
