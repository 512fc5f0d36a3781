"""A model of ``fully_shard`` beside its plain replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat import clean_tensor_name
from fsdp_flat.composable import FSDPModule

from .case import Case, Options, Rows
from .models import Part, build
from .rows import fitted, shard_by_rows, sharded_dim
from .session import Mismatch, NotLegal, Session, Sides, clean_path


def full(value: Any) -> Any:
    """Return the full tensor of a DTensor, and any other value itself. Every rank must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class RowSession(Session):
    """Compares the parameters that the optimizer holds: DTensors; and parts of the wrapper's, where it has units."""

    params: dict[str, nn.Parameter]
    cached: dict[str, torch.Tensor]

    def make_model(self) -> tuple[Any, Case]:
        return self.sharded_by_rows(build(self.case), fitted(self.case), self.case.options)

    def sharded_by_rows(self, module: Part, rows: Rows, options: Options) -> tuple[Any, Case]:
        """Shard a new model. Every rank must call this."""
        model = shard_by_rows(module, rows, options)
        self.remember(model)
        return model, replace(self.case, rows=rows, options=options)

    def remember(self, model: nn.Module) -> None:
        """Keep the parameters that an optimizer made now would hold."""
        found = {clean_tensor_name(name): param for name, param in model.named_parameters()}
        self.params = {name: param for name, param in found.items() if isinstance(param, DTensor)}
        self.cached = {}

    @property
    def has_wrappers(self) -> bool:
        """Whether some units are the wrapper's."""
        return bool(FSDP.fsdp_modules(self.model))

    def sharded_modules(self) -> list[FSDPModule]:
        """List the modules of units of ``fully_shard``, the root's first."""
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    # -- differences between fronts ----------------------------------------------------------------------------------

    @contextmanager
    def unreduced(self, mode: str) -> Iterator[None]:
        if isinstance(self.model, FSDP):
            with self.model.no_sync():
                yield
            return
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        if self.has_wrappers:
            raise NotLegal("norms of both fronts' gradients")
        if norm_type == float("inf") and any(self.has_empty_part(name) for name in self.params):
            raise NotLegal("torch's infinity norm refuses parts without elements")
        return full(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type))

    @contextmanager
    def writable(self, *, with_grads: bool) -> Iterator[None]:
        self.show_sharded()
        yield

    def show_sharded(self) -> None:
        for module in self.sharded_modules():
            module.reshard()

    def converted(self) -> None:
        self.show_sharded()
        before = self.params
        self.remember(self.model)
        if any(param is not before[name] for name, param in self.params.items()):
            raise Mismatch("parameters after a conversion", "the optimizer's are other objects")

    def callable_units(self) -> list[tuple[nn.Module, nn.Module]]:
        rows = self.case.rows
        assert rows is not None
        single = {unit[0] for unit in rows.units if len(unit) == 1}
        units = [(m, m) for m in self.sharded_modules() if m.node_id in single]
        wrappers = [unit for unit in FSDP.fsdp_modules(self.model) if unit is not self.model]
        return [*units, *((unit, unit.module) for unit in wrappers)]

    # -- expected parts ----------------------------------------------------------------------------------------------

    @property
    def num_shards(self) -> int:
        """The number of ranks that a parameter is sharded over."""
        return self.case.options.mesh[-1] if self.case.options.mesh else self.num_ranks

    def part(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor like a parameter."""
        assert self.case.rows is not None
        dim = sharded_dim(self.plain.get_parameter(name), self.case.rows, self.num_shards)
        chunks = value.chunk(self.num_shards, dim)
        place = self.rank % self.num_shards
        return chunks[place] if place < len(chunks) else value.narrow(dim, value.shape[dim], 0)

    def has_empty_part(self, name: str) -> bool:
        """Return whether some rank has no element of a parameter."""
        assert self.case.rows is not None
        param = self.plain.get_parameter(name)
        dim = sharded_dim(param, self.case.rows, self.num_shards)
        return param.numel() == 0 or len(param.chunk(self.num_shards, dim)) < self.num_shards

    # -- comparing ---------------------------------------------------------------------------------------------------

    def compare_all(self) -> None:
        self.show_sharded()
        shown = {clean_tensor_name(name): param for name, param in self.model.named_parameters()}
        if other := [name for name, param in self.params.items() if shown[name] is not param]:
            raise Mismatch("shown parameters", f"{other} are not those of the optimizer")
        # Ranks that find no gradient must not be missed in the collectives below.
        self.compare_slices()
        expected = {name: self.plain.get_parameter(name) for name in self.params}
        self.compare("parameters", *self.pairs({n: (p.detach(), expected[n].detach()) for n, p in self.params.items()}))
        if not self.unsynced:
            grads = {name: (p.grad, expected[name].grad) for name, p in self.params.items() if p.grad is not None}
            self.compare("gradients", *self.pairs(grads))

    def pairs(self, values: dict[str, tuple[Any, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {n: full(value) for n, (value, _) in values.items()}, {n: other for n, (_, other) in values.items()}

    def compare_slices(self) -> None:
        params, grads = Sides({}, {}), Sides({}, {})
        for name, param in self.params.items():
            theirs = self.plain.get_parameter(name)
            params.add(name, param.to_local().detach(), self.part(name, theirs.detach()))
            if self.unsynced:
                continue
            if (param.grad is None) != (theirs.grad is None):
                raise Mismatch("presence of gradients", f"{name}: got {param.grad}, expected {theirs.grad}")
            if theirs.grad is not None:
                grads.add(name, param.grad.to_local(), self.part(name, theirs.grad))
        for path, module in self.model.named_modules():
            for flat_param in module.params if isinstance(module, FSDP) else ():
                self._add_slices(clean_path(path), flat_param, params, grads)
        self.compare("parameters", params.actual, params.expected)
        self.compare("gradients", grads.actual, grads.expected)
        cached = {name: value.to_local() for name, value in self.cached.items() if isinstance(value, DTensor)}
        names = {name: self.part(name, self.plain.get_parameter(name).detach()) for name in cached}
        self.compare("values of an earlier state dict", cached, names)
        self.compare_buffers()

    def compare_shown(self, unit: FSDPModule) -> None:
        """Compare the full parameters that a unit shows."""
        full_params = {
            clean_tensor_name(name): param.detach()
            for name, param in self.model.named_parameters()
            if not isinstance(param, DTensor) and clean_tensor_name(name) in self.params
        }
        expected = {name: self.plain.get_parameter(name).detach() for name in full_params}
        own = [p for p in unit.parameters(recurse=False) if isinstance(p, DTensor)]
        if own:
            raise Mismatch("shown parameters", f"{len(own)} are sharded after unshard")
        self.compare("unsharded parameters", full_params, expected)

    def compare_optimizers(self) -> None:
        actual, expected = {}, {}
        theirs = self.plain_optimizer_state()
        for name, param in self.params.items():
            mine = self.optim.state.get(param, {})
            if bool(mine) != bool(theirs.get(name)):
                raise Mismatch("presence of optimizer states", f"{name}: got {mine}, expected {theirs.get(name)}")
            for key, value in mine.items():
                is_sharded = isinstance(value, DTensor)
                actual[f"{name}.{key}"] = value.to_local() if is_sharded else value
                expected[f"{name}.{key}"] = self.part(name, theirs[name][key]) if is_sharded else theirs[name][key]
        self.compare("optimizer state", actual, expected)

    # -- changing models ---------------------------------------------------------------------------------------------

    def grads_to_plain(self) -> None:
        for name, param in self.params.items():
            if param.grad is not None:
                self.plain.get_parameter(name).grad = full(param.grad).detach().clone()
