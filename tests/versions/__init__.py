"""``make test-versions``: a selection of the tests on each torch that docs/versions.md names."""
