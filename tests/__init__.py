"""Tests of fsdp_flat."""
