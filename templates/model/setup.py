"""Builds the kernels with make, against an installed adze, and installs them as the Python package {{module}}."""

import pathlib
import shutil
import subprocess

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

HERE = pathlib.Path(__file__).resolve().parent


class Build(build_py):
    def run(self):
        subprocess.run(["make", "-C", str(HERE), "package"], check=True)
        variants = (HERE / "package/build").glob("torch-stable-abi*")
        variant = max(variants, key=lambda path: path.stat().st_mtime)  # what make has just made
        shutil.rmtree(HERE / "{{module}}", ignore_errors=True)
        shutil.copytree(variant, HERE / "{{module}}")
        super().run()


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(
    cmdclass={"build_py": Build},
    distclass=Binary,
    packages=["{{module}}"],
    package_data={"{{module}}": ["*.so", "*.json"]},
)
