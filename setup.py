"""Package metadata of fsdp_flat."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
TEST = ["pytest", "hypothesis", "safetensors"]
PICTURES = ["matplotlib"]
DEMO = ["tqdm", *PICTURES]
# What `make test-clients` tests; the versions are in constraints-clients.txt.
CLIENTS = ["accelerate", "transformers", "lightning", "peft", "tensorboard", "wandb"]
MIGRATE = ["libcst"]
CLI = ["typer>=0.29", "rich", "tqdm", "safetensors"]
# What `make docs` builds the site with.
DOCS = ["mkdocs-material", "mkdocstrings[python]"]

setup(
    name="fsdp-flat",
    # The file alone: a build has no torch, which the package imports.
    version=runpy.run_path(str(HERE / "fsdp_flat" / "version.py"))["__version__"],
    description="FSDP1 code kept alive, and a step-by-step way to fully_shard: sharded data parallelism for PyTorch",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the fsdp_flat authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["pytorch", "fsdp", "fully_shard", "distributed training", "zero", "sharding"],
    packages=find_packages(include=["fsdp_flat", "fsdp_flat.*"]),
    package_data={"fsdp_flat": ["py.typed"]},
    entry_points={"console_scripts": ["fsdp-flat=fsdp_flat.__main__:main"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.8", "numpy", "packaging"],
    extras_require={
        "test": TEST,
        "demo": DEMO,
        "pictures": PICTURES,
        "progress": ["tqdm"],
        "safetensors": ["safetensors"],
        "hub": ["huggingface_hub"],
        "remote": ["fsspec"],
        "migrate": MIGRATE,
        "cli": CLI,
        "clients": CLIENTS,
        "docs": DOCS,
        "dev": ["ruff", "mypy", *MIGRATE, *CLI, *TEST],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
