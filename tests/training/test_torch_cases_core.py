"""The cases of torch's core suite: a sharded model trains as a replicated one.

Covered: nested units, units made by ``always_wrap_policy``, a transformer with tied embeddings and buffers, experts
that belong to one rank beside shared parts, both with each prefetch setting; one step in low precision; parameters
changed between wrapping and the first step; which units are gathered before, during and after forward and backward,
also after a state dict; forward without gradients; the kind of tensor that a module holds in forward.

Not covered: the delayed optimizer step, the delayed reduce-scatter and the delayed free, which make an accelerator
wait; how often internal functions register hooks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import assert_close
from tests.support.beside import adamw
from tests.support.both_sides import TOLERANCE, Layout, batch_of, build
from tests.support.models import Layer
from tests.support.torch_and_ours import BLOCKS, SHARDED, Side, beside_replica, on_both_sides, state_of, train
from tests.support.zoo import CASES

PREFETCH = {"pre": ("BACKWARD_PRE", False), "post and forward": ("BACKWARD_POST", True), "none": (None, True)}


@on_both_sides(layouts=SHARDED)
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_nested_units_train_as_a_replicated_model_with_every_prefetch(
    side: Side, layout: Layout, use_orig_params: bool, prefetch: str
) -> Any:
    backward, forward = PREFETCH[prefetch]
    case = CASES["nested units"]
    model = side.wrap_case(
        case,
        layout,
        use_orig_params=use_orig_params,
        backward_prefetch=backward and side.api.BackwardPrefetch[backward],
        forward_prefetch=forward,
    )
    replica = build(case)
    return beside_replica(model, replica, case.loss_of, lambda rank, step: batch_of(case, rank, step), num_steps=2)


@on_both_sides()
def test_a_unit_for_each_module_trains_as_a_replicated_model(side: Side, layout: Layout, use_orig_params: bool) -> Any:
    case = CASES["uneven sizes"]
    policy = side.wrapping.always_wrap_policy
    model = side.wrap(build(case), layout, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    return beside_replica(model, build(case), case.loss_of, lambda rank, step: batch_of(case, rank, step))


class TiedTransformer(nn.Module):
    """Encoder and decoder layers below an embedding that is also the head; buffers of two dtypes; batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, dim_feedforward=6, dropout=0.0)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.ones(8))
        self.register_buffer("offset", torch.zeros(8, dtype=torch.long))
        self.norm = nn.BatchNorm1d(2, track_running_stats=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        source = self.embedding(tokens) + self.shift + self.offset
        target = self.norm(self.embedding(tokens[:3]))
        return self.head(self.transformer(source, target))


@on_both_sides()
def test_a_transformer_with_tied_ends_trains_as_a_replicated_model(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    def batch(rank: int, step: int) -> torch.Tensor:
        return torch.randint(0, 11, (5, 2), generator=torch.Generator().manual_seed(10 * step + rank))

    def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens[:3].flatten())

    torch.manual_seed(3)
    replica = TiedTransformer()
    torch.manual_seed(3)
    units = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    model = side.wrap(TiedTransformer(), layout, units=units, use_orig_params=use_orig_params)
    return beside_replica(model, replica, loss_of, batch, num_steps=2)


@on_both_sides(layouts=SHARDED, tolerance={"rtol": 1e-2, "atol": 1e-2})
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_step_in_low_precision_gives_the_same_loss_and_parameters(
    side: Side, layout: Layout, use_orig_params: bool, dtype: torch.dtype
) -> Any:
    case = BLOCKS
    precision = side.api.MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params, mixed_precision=precision)
    loss = model(batch_of(case, dist.get_rank(), 0)["x"]).float().square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {"loss": loss.detach(), "state": state_of(model)}


class Experts(nn.Module):
    """A shared layer before and after an expert that is this rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = Layer(5, 5)
        self.last = Layer(5, 1)
        torch.manual_seed(100 + rank)
        self.expert = Layer(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.expert(self.first(x)))


@on_both_sides(layouts=SHARDED)
def test_an_expert_of_one_rank_trains_alone_beside_shared_units(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    rank, case = dist.get_rank(), CASES["uneven sizes"]
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    replicas = [Experts(each) for each in range(dist.get_world_size())]
    for replica in replicas[1:]:
        replica.first, replica.last = replicas[0].first, replicas[0].last
    model = Experts(rank)
    with pytest.warns(UserWarning, match="NO_SHARD|world size|one rank") if side.is_torch else side.quiet():
        model.expert = side.wrap(model.expert, layout, process_group=groups[rank], use_orig_params=use_orig_params)
    model.first = side.wrap(model.first, layout, use_orig_params=use_orig_params)
    model = side.wrap(model, layout, use_orig_params=use_orig_params)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = [*replicas[0].first.parameters(), *replicas[0].last.parameters()]
    plain = torch.optim.SGD([*shared, *[p for replica in replicas for p in replica.expert.parameters()]], lr=0.1)
    for step in range(2):
        ours.zero_grad()
        plain.zero_grad()
        for source, replica in enumerate(replicas):
            (case.loss_of(replica, batch_of(case, source, step)) / len(replicas)).backward()
        for replica in replicas:
            for param in replica.expert.parameters():
                param.grad.mul_(len(replicas))  # an expert's loss is its own rank's alone
        case.loss_of(model, batch_of(case, rank, step)).backward()
        ours.step()
        plain.step()
    state = state_of(model)
    assert_close(state, {name: p.detach() for name, p in replicas[rank].state_dict().items()}, **TOLERANCE)
    return state


@on_both_sides()
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_parameters_changed_after_wrapping_are_those_of_the_first_forward(
    side: Side, layout: Layout, use_orig_params: bool, low: bool
) -> Any:
    case = CASES["uneven sizes"]
    precision = side.api.MixedPrecision(param_dtype=torch.bfloat16) if low else None
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params, mixed_precision=precision)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    plain = build(case)
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(0.25)
    x = batch_of(case, dist.get_rank(), 0)["x"]
    output = model(x).float()
    expected = plain.bfloat16()(x.bfloat16()).float() if low else plain(x)
    assert_close(output.detach(), expected.detach(), rtol=1e-2 if low else 1e-6, atol=1e-6)
    return output.detach()


class Watched(nn.Module):
    """Notes in forward and in backward which units are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.notes: list[tuple[str, bool]] = []
        self.is_sharded: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.append(("forward", self.is_sharded(self)))
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _grad: self.notes.append(("backward", self.is_sharded(self))))
        return torch.tanh(y)


def watched_model(side: Side, layout: Layout, use_orig_params: bool) -> tuple[Any, list[Watched]]:
    torch.manual_seed(1)
    inner = [Watched(), Watched()]
    model = side.wrap(nn.Sequential(*inner, nn.Linear(5, 1)), layout, units=(Watched,), use_orig_params=use_orig_params)
    owners = {unit.module: unit for unit in side.units(model)}
    for module in inner:
        module.is_sharded = lambda watched: side.sharded_units(owners[watched])[0]
    return model, inner


@on_both_sides()
@pytest.mark.parametrize("with_state_dict", [False, True], ids=["plain", "after a state dict"])
def test_units_are_gathered_for_forward_and_backward_and_sharded_after(
    side: Side, layout: Layout, use_orig_params: bool, with_state_dict: bool
) -> Any:
    model, inner = watched_model(side, layout, use_orig_params)
    optimizer = adamw(model)
    seen = []
    for step in range(2):
        loss = model(torch.ones(2, 5) + step).sum()
        seen.append([*side.sharded_units(model)])
        loss.backward()
        seen.append([*side.sharded_units(model)])
        optimizer.step()
        optimizer.zero_grad()
        if with_state_dict:
            model.load_state_dict(model.state_dict())
    notes = [module.notes for module in inner]
    if layout.strategy == "FULL_SHARD":
        assert all(not sharded for some in notes for _, sharded in some)
        assert all(all(units) for units in seen[1::2])
    return {"notes": notes, "after backward": seen[1::2], "state": state_of(model)}


@on_both_sides()
def test_forward_without_gradients_gives_the_outputs_of_forward_with_them(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    case = CASES["transformer"]
    model = side.wrap_case(case, layout, use_orig_params=use_orig_params)
    batch = batch_of(case, dist.get_rank(), 0)
    train(model, case, adamw(model), range(1))
    model.eval()
    with torch.no_grad():
        quiet = model(**batch)
    with torch.inference_mode():
        inferred = model(**batch)
    loud = model(**batch)
    assert loud.requires_grad
    assert not quiet.requires_grad
    assert_close(quiet, loud.detach(), **TOLERANCE)
    assert_close(inferred.clone(), loud.detach(), **TOLERANCE)
    return quiet


class TypeWatcher(nn.Module):
    """Notes the kind of its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        self.seen.append([tuple(weight.shape), weight.requires_grad])
        return self.linear(x)


@on_both_sides()
def test_a_module_holds_whole_weights_under_autograd_in_forward(
    side: Side, layout: Layout, use_orig_params: bool
) -> Any:
    model = side.wrap(
        nn.Sequential(TypeWatcher(), TypeWatcher()), layout, units=(TypeWatcher,), use_orig_params=use_orig_params
    )
    watchers = [module for module in model.modules() if isinstance(module, TypeWatcher)]
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 4))
    for watcher in watchers:
        assert [shape for shape, *_ in watcher.seen] == [(4, 4)] * 2
    return [watcher.seen for watcher in watchers]
