"""Side-by-side measurements of fsdp_flat, torch's own data parallelism and training without communication.

``python -m benchmarks`` measures time, memory and bytes in fresh processes; ``python -m benchmarks.scale``
measures what a unit and a rank cost with a group that only pretends to communicate; ``python -m
benchmarks.micro`` measures collectives alone; ``python -m benchmarks.report`` writes the page from the results.
"""
