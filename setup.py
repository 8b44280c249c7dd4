"""Adds compiled kernels to a wheel where ``FORETELL_PREBUILD=1`` is set, as the recipe of cibuildwheel in pyproject.toml
does. Without it the package is pure Python, and kernels are compiled when they are first used."""

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILD = os.environ.get("FORETELL_PREBUILD") == "1"


class BuildPy(build_py):
    """Compiles after the package's files have been copied."""

    def run(self) -> None:
        """Copy the package's files, then compile."""
        super().run()
        if PREBUILD and not self.editable_mode:
            sys.path.insert(0, str(Path(__file__).parent / "src"))
            from foretell.kernels.build import prebuild

            prebuild(Path(self.build_lib, "foretell", "kernels", "prebuilt"))


class Binary(Distribution):
    """Its wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        """Whether anything is compiled."""
        return PREBUILD


class BdistWheel(bdist_wheel):
    """One wheel for every version of Python: the kernels are plain C."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform of the wheel's name."""
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if PREBUILD else tag


setup(distclass=Binary, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
