"""meson-python, and what it does not know: the torch that a build is for, and what a build needs beside it.

A build is for the torch of the environment that pip installs into, though pip hides it from the build: torch_info.py looks
there, too. Where there is none, the newest that libfsdp supports is a requirement of the build.
"""

import importlib.metadata
import os
import sys
import sysconfig

import mesonpy

SUPPORTED = "torch>=2.11,<2.16"
ENVIRONMENT = sysconfig.get_path("platlib")
# Without build isolation: Meson and ninja are the environment's, whether or not it is activated.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])


class Metadata(mesonpy.Metadata):
    """What a wheel requires is known when it is built."""

    requirement = SUPPORTED

    @classmethod
    def from_pyproject(cls, data, *arguments, **options):
        project = {**data["project"], "dependencies": [cls.requirement], "dynamic": ["version"]}
        metadata = super().from_pyproject({**data, "project": project}, *arguments, **options)
        metadata.dynamic_metadata = ["requires-dist"] if cls.requirement == SUPPORTED else []
        return metadata


mesonpy.Metadata = Metadata


def version_of(package, places):
    found = importlib.metadata.distributions(name=package, path=places)
    return next((distribution.version for distribution in found), None)


def require_torch_of_the_build():
    """With another minor version its functions and classes have other layouts."""
    major, minor = map(int, version_of("torch", [*sys.path, ENVIRONMENT]).split(".")[:2])
    Metadata.requirement = f"torch>={major}.{minor},<{major}.{minor + 1}"


def get_requires_for_build_wheel(config_settings=None):
    toolkit = version_of("cuda-toolkit", [ENVIRONMENT])
    needed = []
    if version_of("torch", [ENVIRONMENT]) is None:
        needed = [SUPPORTED, "cuda-toolkit[cccl,crt]"]
    elif toolkit is not None:  # else a torch without CUDA
        # Headers that torch's include and torch does not depend on.
        needed = [f"cuda-toolkit[cccl,{'nvcc' if toolkit.startswith('12.') else 'crt'}]=={toolkit}"]
    return [*mesonpy.get_requires_for_build_wheel(config_settings), *needed]


get_requires_for_build_editable = get_requires_for_build_sdist = get_requires_for_build_wheel
build_sdist = mesonpy.build_sdist


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    require_torch_of_the_build()
    return mesonpy.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    require_torch_of_the_build()
    return mesonpy.build_editable(wheel_directory, config_settings, metadata_directory)
