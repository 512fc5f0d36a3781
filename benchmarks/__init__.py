"""Compares fsdp_flat with torch's own data parallelism and with training without communication.

``python -m benchmarks`` measures time, memory and bytes in fresh processes. ``python -m benchmarks.scale`` measures the
cost per unit and per rank with a fake process group. ``python -m benchmarks.plans`` measures rank 0's part in a save of
a checkpoint by many ranks. ``python -m benchmarks.micro`` measures collectives alone. ``python -m benchmarks.report``
writes docs/performance.md from the results.
"""
