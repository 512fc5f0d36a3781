"""Python imports this file when a process starts that has its folder on the path: the process records."""

from tests.mutations.executed import Record

Record().start()
