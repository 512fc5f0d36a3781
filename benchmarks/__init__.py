"""Compares fsdp_flat with torch's own data parallelism and with training without communication.

``python -m benchmarks`` measures time, memory and bytes in fresh processes. ``python -m benchmarks.scale`` measures the
cost per unit and per rank with a fake process group. CONTRIBUTING.md has the others.
"""
