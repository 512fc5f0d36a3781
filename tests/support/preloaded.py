"""The last module that a process imports from which ranks or sessions fork: imported code is in no later collection.

A collection that looks at a million objects takes half a second, and copies their memory in each forked process.
"""

import gc

from .worker import torch_caches

CACHES = torch_caches()
gc.collect()
gc.freeze()
