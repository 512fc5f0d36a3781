"""Offers what FSDP1 does not (layer 5): averages, matrix optimizers, descriptions, comparisons, and clean names."""

from __future__ import annotations

from fsdp_flat.extras.compare import Difference, compare_with
from fsdp_flat.extras.debug import debug
from fsdp_flat.extras.describe import ModelDescription, UnitDescription, describe
from fsdp_flat.extras.ema import ShardedEMA
from fsdp_flat.extras.matrix_optimizer import MatrixOptimizer, matrix_params
from fsdp_flat.extras.names import clean_named_modules, clean_named_parameters, clean_tensor_name, whole_shape
