"""Package metadata of fsdp_flat."""

from setuptools import find_packages, setup

TEST = ["pytest", "hypothesis", "safetensors"]
DEMO = ["tqdm", "matplotlib"]
# What `make test-clients` tests; the versions are in constraints-clients.txt.
CLIENTS = ["accelerate", "transformers", "lightning", "peft"]
MIGRATE = ["libcst"]

setup(
    name="fsdp-flat",
    version="0.1.0",
    description="Fully sharded data parallelism for PyTorch on flat parameters, with FSDP1's interface",
    author="the fsdp_flat authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["fsdp_flat", "fsdp_flat.*"]),
    package_data={"fsdp_flat": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.8", "numpy", "packaging"],
    extras_require={
        "test": TEST,
        "demo": DEMO,
        "progress": ["tqdm"],
        "migrate": MIGRATE,
        "clients": CLIENTS,
        "dev": ["ruff", "mypy", *MIGRATE, *TEST],
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
