"""Trains a byte-level GPT on the source of the Python standard library, sharded block by block.

    python examples/train_gpt.py --ranks 2 --steps 200      start two ranks on this machine
    python examples/train_gpt.py --ranks 3 --resume         resume from the checkpoint with three ranks
    python examples/train_gpt.py --demo                     run both and check the results
    torchrun --nproc-per-node 2 examples/train_gpt.py       the same under torchrun, on one machine or on several

It needs `pip install tqdm matplotlib`.

The script writes `checkpoint.pt` (the full model, for any number of ranks) and `loss_and_memory.png` to the output
folder. With several machines, the output folder must be on a shared file system.
"""

import argparse
import math
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, Block, GPTConfig, next_token_loss
from launch import compute_device, inside_rank, process_group, start_ranks
from report import Part, bytes_of_replication, bytes_per_rank, count_ranks, draw, memory_table
from stdlib_text import Text, load_text, training_batch, validation_batches
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from tqdm import tqdm

from fsdp_flat import FullOptimStateDictConfig, FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from fsdp_flat import FullyShardedDataParallel as FSDP
from fsdp_flat.wrap import ModuleWrapPolicy

STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
}
SIZES = {"layers": 4, "width": 256, "heads": 8, "seq_len": 128}
SAME_LOSS = {"fp32": 1e-3, "bf16": 2e-2}  # relative difference due to another order of summation
WARMUP_STEPS = 30
LOG_EVERY = 5
DEMO_STEPS = {2: 240, 3: 60}  # ranks: steps
DEMO_LOSS = 0.6  # of the untrained loss


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, help="ranks to start on this machine (default: 2; under torchrun: those it started)")
    add("--strategy", choices=STRATEGIES, default="full_shard")
    add("--replicas", type=int, help="hybrid_shard only: replicas of the model, each sharded over ranks / replicas")
    add("--precision", choices=SAME_LOSS, default="fp32")
    add("--device", choices=("auto", "cpu"), default="auto", help="auto: GPUs, if there is one for each rank")
    add("--use-orig-params", action=argparse.BooleanOptionalAction, default=False)
    add("--steps", type=int, default=200, help="steps to take now, in addition to those before --resume")
    add("--batch-size", type=int, default=12, help="sequences per step, over all ranks together (default: 12)")
    for name, size in SIZES.items():
        add(f"--{name.replace('_', '-')}", type=int, help=f"size of the model (default: {size}, or the checkpoint's)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default: 0.001)")
    add("--seed", type=int, default=0)
    add("--validate-every", type=int, default=20, help="steps between validations, each with a checkpoint")
    add("--out", type=Path, default=Path("runs/train_gpt"), help="folder for checkpoint and picture")
    add("--resume", action="store_true", help="resume from the checkpoint in --out, at any number of ranks")
    add("--demo", action="store_true", help="train with 2 ranks, resume with 3, check the losses")
    args = parser.parse_args(argv)
    if args.replicas is not None and args.strategy != "hybrid_shard":
        parser.error("--replicas goes with --strategy hybrid_shard")
    if args.demo and (args.resume or inside_rank()):
        parser.error("--demo starts its own ranks, and resumes by itself")
    if min(args.steps, args.validate_every, args.batch_size) < 1:
        parser.error("--steps, --validate-every and --batch-size must be at least 1")
    return args


# ------------------------------------------------------------------------------------------------------- the model


def model_config(args: argparse.Namespace, checkpoint: dict[str, Any] | None) -> GPTConfig:
    """Returns the sizes from the checkpoint or the flags; raises ValueError if they differ."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if checkpoint is None:
        return GPTConfig(**(SIZES | given))
    saved = checkpoint["config"]
    for name, size in given.items():
        if size != saved[name]:
            raise ValueError(f"--{name.replace('_', '-')} {size} does not fit the checkpoint, which has {saved[name]}")
    return GPTConfig(**saved)


def shard(model: GPT, args: argparse.Namespace, device: torch.device) -> FSDP:
    """Wraps each block, and the rest of the model, as a unit."""
    options: dict[str, Any] = {}
    if args.replicas is not None:
        num_shards, rest = divmod(dist.get_world_size(), args.replicas)
        if rest:
            raise ValueError(f"--replicas {args.replicas} does not divide the {dist.get_world_size()} ranks")
        options["device_mesh"] = init_device_mesh(
            device.type, (args.replicas, num_shards), mesh_dim_names=("replicate", "shard")
        )
    if args.precision == "bf16":
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FSDP(
        model,
        device_id=device,
        sharding_strategy=STRATEGIES[args.strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=args.use_orig_params,
        **options,
    )


# ------------------------------------------------------------------------------------------------------ checkpoints


def full_on_rank_0(model: FSDP) -> AbstractContextManager[None]:
    """Makes state dicts hold full tensors, on rank 0 only, inside the block."""
    return FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )


def save_checkpoint(path: Path, model: FSDP, optimizer: torch.optim.Optimizer, **progress: Any) -> None:
    """Writes model, optimizer and plain values to one file, from which any number of ranks can resume.

    Every rank must call this.
    """
    with full_on_rank_0(model):
        full = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if dist.get_rank() == 0:
        unfinished = path.with_suffix(".unfinished")
        torch.save({**full, **progress}, unfinished)
        unfinished.replace(path)  # atomic: a job killed during the write leaves the previous checkpoint


def open_checkpoint(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's content; tensors are read from the file only when used."""
    if not path.exists():
        raise FileNotFoundError(f"nothing to resume from: {path} does not exist; train without --resume first")
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def load_checkpoint(checkpoint: dict[str, Any], model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    """Copies each rank's shards of model and optimizer from an opened checkpoint. Every rank must call this."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, checkpoint["optimizer"]))


# --------------------------------------------------------------------------------------------------------- training


def train(args: argparse.Namespace) -> None:
    """Runs the training on every rank, from process-group initialization to the generated text."""
    device = compute_device() if args.device == "auto" else torch.device("cpu")
    with process_group(device):
        check_ranks(args)
        checkpoint = open_checkpoint(args.out / "checkpoint.pt") if args.resume else None
        if dist.get_rank() == 0:
            args.out.mkdir(parents=True, exist_ok=True)
        Trainer(args, device, checkpoint).run()


def check_ranks(args: argparse.Namespace) -> None:
    """Raises ValueError, on every rank, if the flags do not fit the number of ranks."""
    num_ranks = dist.get_world_size()
    if args.ranks not in (None, num_ranks):
        raise ValueError(f"--ranks {args.ranks} does not fit the {num_ranks} ranks that were started")
    if args.batch_size % num_ranks:
        raise ValueError(f"--batch-size {args.batch_size} is not divisible by the {num_ranks} ranks")


class Trainer:
    """One rank's part of a training run."""

    def __init__(self, args: argparse.Namespace, device: torch.device, checkpoint: dict[str, Any] | None) -> None:
        self.args = args
        self.device = device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.text: Text = load_text()
        self.config = model_config(args, checkpoint)
        self.seed: int = args.seed if checkpoint is None else checkpoint["seed"]
        torch.manual_seed(self.seed)  # every rank starts from the same weights
        model = GPT(self.config)
        self.part = Part(self.num_ranks, args.strategy, replicated=bytes_of_replication(model))
        numel = sum(parameter.numel() for parameter in model.parameters())
        self.say(f"{numel / 1e6:.2f} million parameters, {args.strategy} over {count_ranks(self.num_ranks)}")
        self.model = shard(model, args, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self.first_step = self.step = 0
        self.parts = [self.part]
        if checkpoint is not None:
            load_checkpoint(checkpoint, self.model, self.optimizer)
            self.first_step = self.step = checkpoint["step"]
            self.parts = [*(Part(**part) for part in checkpoint["parts"]), self.part]

    def say(self, text: str) -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def run(self) -> None:
        """Trains, validates, saves, draws the picture and generates text."""
        before = self.validate()
        if self.first_step:
            self.check_resumed(before)
        else:
            self.say(f"validation loss before training: {before:.4f}")
        seconds = 0.0
        losses: list[torch.Tensor] = []
        last = self.first_step + self.args.steps
        shown: dict[str, str] = {}
        with tqdm(
            initial=self.first_step, total=last, unit="step", mininterval=0.5, disable=self.rank != 0
        ) as progress:
            while self.step < last:
                start = time.perf_counter()
                losses.append(self.train_step())
                seconds += time.perf_counter() - start
                progress.update()
                if self.step % LOG_EVERY == 0 or self.step == last:
                    trained = (self.step - self.first_step) * self.args.batch_size * self.config.seq_len
                    loss = self.log_training_loss(losses)
                    shown |= {"train": f"{loss:.3f}", "speed": f"{trained / seconds:,.0f} tokens/s"}
                if self.step % self.args.validate_every == 0 or self.step == last:
                    shown["val"] = f"{self.validate():.3f}"
                    self.save()
                progress.set_postfix(shown, refresh=False)
        self.say(f"validation loss after step {self.step}: {self.part.validation[-1][1]:.4f}")
        self.say(memory_table(self.part))
        if self.rank == 0:
            draw(self.parts, self.args.out / "loss_and_memory.png")
        self.say(f"wrote {self.args.out / 'loss_and_memory.png'}")
        self.say(f"wrote {self.args.out / 'checkpoint.pt'}")
        self.say(f"generated: {self.generate(b'    def ', num_bytes=100)}")

    def train_step(self) -> torch.Tensor:
        """Takes one step and returns this rank's loss, a scalar."""
        inputs, targets = training_batch(
            self.text.train,
            seed=self.seed,
            step=self.step,
            batch_size=self.args.batch_size,
            seq_len=self.config.seq_len,
            rank=self.rank,
            num_ranks=self.num_ranks,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = next_token_loss(self.model(inputs.to(self.device)), targets.to(self.device)).mean()
        loss.backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        if not self.part.sharded:
            self.part.sharded = bytes_per_rank(self.model, self.optimizer, self.device)
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def learning_rate(self) -> float:
        """Returns the learning rate: a linear warm-up, then decay with the inverse square root of the step."""
        step = self.step + 1
        return self.args.lr * min(step / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / max(step, WARMUP_STEPS)))

    def log_training_loss(self, losses: list[torch.Tensor]) -> float:
        """Records and returns the mean of `losses` over ranks and steps, and clears the list."""
        mean = torch.stack(losses).mean()
        losses.clear()
        dist.all_reduce(mean)
        loss = mean.item() / self.num_ranks
        self.part.training.append((self.step, loss))
        return loss

    @torch.no_grad()
    def validate(self) -> float:
        """Records and returns the validation loss, over the same text at any number of ranks."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        batches = validation_batches(
            self.text.validation, seq_len=self.config.seq_len, rank=self.rank, num_ranks=self.num_ranks
        )
        for inputs, targets, weights in batches:
            losses = next_token_loss(self.model(inputs.to(self.device)), targets.to(self.device))
            weights = weights.to(self.device)
            total += torch.stack([(losses * weights).sum(), weights.sum()])
        dist.all_reduce(total)
        self.model.train()
        loss = (total[0] / total[1]).item()
        self.part.validation.append((self.step, loss))
        return loss

    def check_resumed(self, loss: float) -> None:
        """Raises RuntimeError, on every rank, if the validation loss differs from the saved one."""
        saved = self.parts[-2].validation[-1][1]
        self.say(f"resumed at step {self.step}: validation loss {loss:.4f}, when saved {saved:.4f}")
        if abs(loss - saved) > SAME_LOSS[self.args.precision] * saved:
            raise RuntimeError(f"resuming changed the validation loss: {saved:.6f} when saved, {loss:.6f} now")

    def save(self) -> None:
        """Writes the checkpoint. The step also gives the position in the data; nothing else is random."""
        save_checkpoint(
            self.args.out / "checkpoint.pt",
            self.model,
            self.optimizer,
            config=asdict(self.config),
            seed=self.seed,
            step=self.step,
            parts=[asdict(part) for part in self.parts],
        )

    @torch.no_grad()
    def generate(self, prompt: bytes, *, num_bytes: int, temperature: float = 0.7) -> str:
        """Returns the prompt with `num_bytes` sampled bytes, as a line of ASCII with escapes.

        Every rank must call this: each new byte takes a forward, which all-gathers the blocks.
        """
        self.model.eval()
        generator = torch.Generator().manual_seed(self.seed)
        tokens = torch.tensor([list(prompt)], device=self.device)
        for _ in range(num_bytes):
            logits = self.model(tokens[:, -self.config.seq_len :])[0, -1]
            probabilities = torch.softmax(logits.float().cpu() / temperature, dim=0)
            token = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, token[None].to(self.device)], dim=1)
        return ascii(bytes(tokens[0].tolist()).decode(errors="replace"))


# ------------------------------------------------------------------------------------------------------- starting it


def demo(args: argparse.Namespace, argv: list[str]) -> None:
    """Trains with two ranks, resumes with three, and checks the losses."""
    began = time.perf_counter()
    argv = [argument for argument in argv if argument != "--demo"]
    for index, (num_ranks, steps) in enumerate(DEMO_STEPS.items()):
        resume = ["--resume"] if index else []
        print(f"training on {count_ranks(num_ranks)}", flush=True)
        start_ranks(__file__, [*argv, "--ranks", str(num_ranks), "--steps", str(steps), *resume], num_ranks)
        print(flush=True)
    trained, resumed = (Part(**part).validation for part in open_checkpoint(args.out / "checkpoint.pt")["parts"])
    print(f"demo: {time.perf_counter() - began:.0f} seconds")
    for name, (step, loss) in {
        "untrained": trained[0],
        "trained with 2 ranks": trained[-1],
        "resumed with 3 ranks": resumed[0],
        "at the end": resumed[-1],
    }.items():
        print(f"  validation loss {name:<22} step {step:>4}  {loss:.4f}")
    if resumed[-1][1] > DEMO_LOSS * trained[0][1] or resumed[-1][1] > trained[-1][1]:
        raise RuntimeError(f"the demo should end below {DEMO_LOSS} of the untrained loss, and below the resumed one")


def main(argv: list[str]) -> int:
    """Runs a rank, the launcher of ranks, or the demo."""
    args = parse_arguments(argv)
    if inside_rank():
        record(train)(args)  # reports an error to what started the rank
        return 0
    try:
        demo(args, argv) if args.demo else start_ranks(__file__, argv, args.ranks or 2)
    except ChildFailedError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except SignalException:
        print("\ninterrupted; the ranks were stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
