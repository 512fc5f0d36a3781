"""Tests of what users of FSDP1 code rely on: programs that must run, mistakes that must not pass in silence.

The number in a file's name orders the promises: 1 is programs that are right, 2 is mistakes, 3 is clients, 4 is what a
package index shows.
"""
