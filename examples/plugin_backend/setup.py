"""Packaging of a backend outside portable: a name of its own, and entry points that portable finds."""

from setuptools import setup

setup(
    name="portable-acme",
    version="1.0",
    description="The simulated accelerator `acme` as a backend of portable",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=["portable_acme"],
    package_data={"portable_acme": ["slo.toml"]},
    install_requires=["portable"],
    entry_points={
        "portable.backends": ["acme = portable_acme:Acme"],
        "portable.kernels": ["acme = portable_acme.kernels"],
    },
)
