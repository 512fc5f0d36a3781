"""``python -m tests.mutations``: what the quick suite finds of the mistakes that ``make test-cover`` finds."""
