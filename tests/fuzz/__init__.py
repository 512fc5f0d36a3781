"""A differential fuzzer: random models, wrappings, options and programs, beside an unwrapped replica."""
