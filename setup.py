"""Builds the native part with make, and names the wheel: one for every Python."""

import os
import subprocess

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution


class Build(build_py):
    def run(self):
        subprocess.run(["make", "python", *os.environ.get("ADZE_MAKE", "").split()], check=True)
        super().run()


class Wheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", os.environ.get("ADZE_WHEEL") or super().get_tag()[2]


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Binary)
