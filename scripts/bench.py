"""Time `qwen35 convert` beside `cp -r` of the same folder, and `qwen35 inspect`; print the tables as Markdown.

    python scripts/bench.py --folder /big/disk --gb 1,4,8            # add --mlx-lm for mlx-lm's load and save beside it
    python scripts/bench.py --folder /big/disk --gb 4 --cold         # the source is not in the page cache
    python scripts/bench.py --folder /big/disk --gb 4 --schemes      # FP8 to bfloat16, and quantised on the way
    python scripts/bench.py --folder /xfs/disk --gb 4 --clones       # on a file system that shares blocks

Checkpoints are made for it: names and config of a transformers export, random weights, gains as real ones lie, vision
tower and draft head along. Commands run whole (start-up and checks included), each followed by `sync`, in turn and in
changing order, so that all meet the same disk and page cache; the tables hold medians. "Disk" is what the file system
has less free afterwards; nothing else should write to it meanwhile. Everything made is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from qwen35conv.facts.header import Dtype, TensorInfo, build_header, n_bytes_of

Tensor = tuple[str, Dtype, tuple[int, ...]]
CONVERT = (sys.executable, "-m", "qwen35conv", "convert")
INSPECT = (sys.executable, "-m", "qwen35conv", "inspect")
MLX_LM = """
import sys
from pathlib import Path
from mlx_lm.utils import load_model, save_config, save_model
source, target = Path(sys.argv[1]), Path(sys.argv[2])
model, config = load_model(source, lazy=True)
save_model(target, model, donate_model=True)
save_config(config, target / "config.json")
"""
MLX_LM_QUANTIZE = """
import sys
from pathlib import Path
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
source, target = Path(sys.argv[1]), Path(sys.argv[2])
model, config = load_model(source, lazy=True)
model, config = quantize_model(model, config, 64, 4)
save_model(target, model, donate_model=True)
save_config(config, target / "config.json")
"""
FP8_PLAIN = ("norm", "conv1d", "embed_tokens", "lm_head", "visual", "in_proj_a", "in_proj_b", "mtp.fc")
FP8_BLOCK = 128
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}


@dataclass(frozen=True)
class Sizes:
    """What a synthetic model is made of."""

    hidden: int = 2048
    intermediate: int = 6144
    layers: int = 0
    vocab: int = 32768
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    key_heads: int = 16
    value_heads: int = 32
    experts: int = 0
    expert_size: int = 512
    vision_blocks: int = 1
    mtp: bool = True
    fp8: bool = False

    @property
    def conv(self) -> int:
        """Channels of the short convolution; keys and values have 128 dimensions a head."""
        return 128 * (2 * self.key_heads + self.value_heads)


B27 = Sizes(5120, 17408, 64, 248320, 24, 4, 256, 16, 48, vision_blocks=27)
SPARSE = Sizes(2048, 0, 40, 248320, 16, 2, 256, 16, 32, experts=128, vision_blocks=27)


@dataclass(frozen=True)
class Run:
    """One command: how long it took, what of that the processors worked, and the most memory it held."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def tensors_of(sizes: Sizes) -> Iterator[Tensor]:
    """Every tensor of a raw export, in the order of a model's modules; of an FP8 one with the scales of its blocks."""
    for name, dtype, shape in _plain_tensors(sizes):
        if not sizes.fp8 or len(shape) != 2 or any(part in name for part in FP8_PLAIN):
            yield name, dtype, shape
            continue
        yield name, Dtype.F8_E4M3, shape
        yield f"{name}_scale_inv", Dtype.BF16, (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))


def _plain_tensors(sizes: Sizes) -> Iterator[Tensor]:
    outer, hidden = "model.language_model.", sizes.hidden
    yield f"{outer}embed_tokens.weight", Dtype.BF16, (sizes.vocab, hidden)
    for i in range(sizes.layers):
        yield from _layer(f"{outer}layers.{i}.", sizes, full=(i + 1) % 4 == 0)
    yield f"{outer}norm.weight", Dtype.BF16, (hidden,)
    yield "lm_head.weight", Dtype.BF16, (sizes.vocab, hidden)
    if sizes.vision_blocks:
        yield "model.visual.patch_embed.proj.weight", Dtype.BF16, (1152, 3, 2, 16, 16)
    for i in range(sizes.vision_blocks):
        yield f"model.visual.blocks.{i}.attn.qkv.weight", Dtype.BF16, (3456, 1152)
        yield f"model.visual.blocks.{i}.mlp.linear_fc1.weight", Dtype.BF16, (4304, 1152)
        yield f"model.visual.blocks.{i}.mlp.linear_fc2.weight", Dtype.BF16, (1152, 4304)
    if not sizes.mtp:
        return
    yield "mtp.fc.weight", Dtype.BF16, (hidden, 2 * hidden)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{norm}.weight", Dtype.BF16, (hidden,)
    yield from _layer("mtp.layers.0.", sizes, full=True)


def _layer(at: str, sizes: Sizes, *, full: bool) -> Iterator[Tensor]:
    hidden, values = sizes.hidden, 128 * sizes.value_heads
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    yield f"{at}input_layernorm.weight", Dtype.BF16, (hidden,)
    if full:
        yield f"{at}self_attn.q_proj.weight", Dtype.BF16, (2 * queries, hidden)
        yield f"{at}self_attn.k_proj.weight", Dtype.BF16, (keys, hidden)
        yield f"{at}self_attn.v_proj.weight", Dtype.BF16, (keys, hidden)
        yield f"{at}self_attn.o_proj.weight", Dtype.BF16, (hidden, queries)
        yield f"{at}self_attn.q_norm.weight", Dtype.BF16, (sizes.head_dim,)
        yield f"{at}self_attn.k_norm.weight", Dtype.BF16, (sizes.head_dim,)
    else:
        yield f"{at}linear_attn.A_log", Dtype.F32, (sizes.value_heads,)
        yield f"{at}linear_attn.dt_bias", Dtype.BF16, (sizes.value_heads,)
        yield f"{at}linear_attn.conv1d.weight", Dtype.BF16, (sizes.conv, 1, 4)
        yield f"{at}linear_attn.in_proj_qkv.weight", Dtype.BF16, (sizes.conv, hidden)
        yield f"{at}linear_attn.in_proj_z.weight", Dtype.BF16, (values, hidden)
        yield f"{at}linear_attn.in_proj_a.weight", Dtype.BF16, (sizes.value_heads, hidden)
        yield f"{at}linear_attn.in_proj_b.weight", Dtype.BF16, (sizes.value_heads, hidden)
        yield f"{at}linear_attn.out_proj.weight", Dtype.BF16, (hidden, values)
        yield f"{at}linear_attn.norm.weight", Dtype.F32, (128,)
    yield f"{at}post_attention_layernorm.weight", Dtype.BF16, (hidden,)
    if not sizes.experts:
        yield from _three(f"{at}mlp.", sizes.intermediate, hidden)
        return
    yield f"{at}mlp.gate.weight", Dtype.BF16, (sizes.experts, hidden)
    yield f"{at}mlp.shared_expert_gate.weight", Dtype.BF16, (1, hidden)
    yield from _three(f"{at}mlp.shared_expert.", sizes.expert_size, hidden)
    for e in range(sizes.experts):
        yield from _three(f"{at}mlp.experts.{e}.", sizes.expert_size, hidden)


def _three(at: str, wide: int, hidden: int) -> Iterator[Tensor]:
    for name, shape in (("gate_proj", (wide, hidden)), ("up_proj", (wide, hidden)), ("down_proj", (hidden, wide))):
        yield f"{at}{name}.weight", Dtype.BF16, shape


def n_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    found = n_bytes_of(tensor[1], tensor[2])
    assert found is not None
    return found


def sized(gigabytes: float, of: Sizes | None = None) -> Sizes:
    """A dense model of about that many bytes; layers make it up."""
    of = of or Sizes()
    one, two = (sum(map(n_bytes, tensors_of(replace(of, layers=n)))) for n in (4, 8))
    return replace(of, layers=max(4, 4 + 4 * round((gigabytes * 1e9 - one) / (two - one))))


def write_checkpoint(folder: Path, sizes: Sizes, n_shards: int, sparse: bool) -> None:
    """Write a checkpoint; where `sparse`, only headers and the values that decide the generation take any room."""
    tensors = list(tensors_of(sizes))
    limit = -(-sum(map(n_bytes, tensors)) // n_shards)
    groups: list[list[Tensor]] = [[]]
    n_group = 0
    for tensor in tensors:
        if n_group and n_group + n_bytes(tensor) > limit and len(groups) < n_shards:
            groups.append([])
            n_group = 0
        groups[-1].append(tensor)
        n_group += n_bytes(tensor)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups, 1):
        file = f"model.safetensors-{i:05d}-of-{len(groups):05d}.safetensors"
        _write_shard(folder / file, group, seed=i, sparse=sparse)
        weight_map |= {name: file for name, _, _ in group}
    index = {"metadata": {"total_size": sum(map(n_bytes, tensors))}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config_of(sizes), indent=2))


def _write_shard(path: Path, tensors: Sequence[Tensor], *, seed: int, sparse: bool) -> None:
    import numpy as np  # in the process that makes the files alone: the parent's peak counts as its children's

    random = np.random.default_rng(seed)
    # Without the highest bit of the exponent every bfloat16 and every FP8 value is finite, and below two.
    noise = memoryview((random.integers(0, 1 << 16, 32 << 20, dtype="<u2") & 0xBFBF).tobytes())
    infos, end = [], 0
    for tensor in tensors:
        begin, end = end, end + n_bytes(tensor)
        infos.append(TensorInfo(*tensor, begin, end))
    header = build_header(infos, {"format": "pt"})
    with path.open("wb") as opened:
        opened.write(header)
        for info in infos:
            opened.seek(len(header) + info.begin)
            if len(info.shape) > 1:
                for begin in range(0, 0 if sparse else info.n_bytes, len(noise)):
                    opened.write(noise[: min(len(noise), info.n_bytes - begin)])
                continue
            mean, spread = _values(info.name)
            values = (mean + spread * random.standard_normal(info.shape)).astype("<f4")
            if info.dtype is Dtype.BF16:
                opened.write((values.view("<u4") >> 16).astype("<u2").tobytes())
            else:
                opened.write(values.tobytes())
        opened.truncate(len(header) + end)


def _values(name: str) -> tuple[float, float]:
    """Mean and spread of a vector's values: gains are stored less one, as raw exports have them."""
    for part, found in {
        "input_layernorm": (-0.03, 0.09),
        "post_attention_layernorm": (-0.2, 0.09),
        "_norm.": (0.7, 0.09),
        "linear_attn.norm": (0.9, 0.05),
        "pre_fc_norm": (-0.3, 0.09),
        "norm.": (0.9, 0.09),
        "A_log": (-2.0, 0.5),
    }.items():
        if part in name:
            return found
    return 0.0, 0.2


def config_of(sizes: Sizes) -> dict[str, object]:
    """config.json as transformers writes it."""
    kind = "qwen3_5_moe" if sizes.experts else "qwen3_5"
    text: dict[str, object] = {
        "model_type": f"{kind}_text",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "vocab_size": sizes.vocab,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(sizes.layers)],
        "full_attention_interval": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "mtp_num_hidden_layers": int(sizes.mtp),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    }
    if sizes.experts:
        text |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": sizes.expert_size,
            "shared_expert_intermediate_size": sizes.expert_size,
        }
    else:
        text["intermediate_size"] = sizes.intermediate
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if sizes.experts else "Qwen3_5ForConditionalGeneration"],
        "model_type": kind,
        "text_config": text,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **({"vision_config": {"in_channels": 3, "depth": sizes.vision_blocks}} if sizes.vision_blocks else {}),
        **({"quantization_config": FP8_CONFIG} if sizes.fp8 else {}),
    }


def make(folder: Path, sizes: Sizes, n_shards: int, *, sparse: bool = False) -> None:
    """Write a checkpoint from a process of its own, so that this one stays small."""
    process = get_context("spawn").Process(target=write_checkpoint, args=(folder, sizes, n_shards, sparse))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"making {folder} failed")


def run(command: Sequence[str | Path], *, then_sync: bool = True) -> Run:
    """Run a command whole. Its peak memory is that of the process, as the kernel counts it."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode
    with tempfile.TemporaryFile() as output:
        begun = time.perf_counter()
        process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if then_sync:
            os.sync()
        seconds = time.perf_counter() - begun
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(map(str, command))}: exit {process.returncode}\n{output.read().decode()}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def _cpu(runs: Sequence[Run]) -> float:
    return statistics.median(one.cpu_seconds for one in runs)


def evict(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def used_bytes(folder: Path) -> int:
    """Bytes in use of the file system of a folder; what was written before must be synced."""
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def bench_convert(folder: Path, gigabytes: float, *, n_rounds: int, with_mlx_lm: bool, cold: bool) -> None:
    """Print the rows of one size."""
    commands: Commands = {"`cp -r`": ("cp", "-r"), "`qwen35 convert`": CONVERT}
    if with_mlx_lm:
        commands["mlx-lm, lazy load and save"] = (sys.executable, "-c", MLX_LM)
    _bench(folder, sized(gigabytes), commands, n_rounds=n_rounds, cold=cold)


def bench_schemes(folder: Path, gigabytes: float, *, n_rounds: int, with_mlx_lm: bool, cold: bool) -> None:
    """Print the rows of an FP8 source of one size, which mlx-lm cannot load, and of a plain one that is quantised."""
    commands: Commands = {"`cp -r` of FP8": ("cp", "-r"), "`qwen35 convert --dequantize`": (*CONVERT, "--dequantize")}
    _bench(folder, sized(gigabytes, Sizes(fp8=True)), commands, n_rounds=n_rounds, cold=cold)
    commands = {"`cp -r`": ("cp", "-r"), "`qwen35 convert --quantize 4`": (*CONVERT, "--quantize", "4")}
    if with_mlx_lm:
        commands["mlx-lm, load, quantise and save"] = (sys.executable, "-c", MLX_LM_QUANTIZE)
    _bench(folder, sized(gigabytes), commands, n_rounds=n_rounds, cold=cold)


def bench_clones(folder: Path, gigabytes: float, *, n_rounds: int, with_mlx_lm: bool, cold: bool) -> None:
    """Print the rows of one size of a source that keeps all its tensors, and of one that leaves some out."""
    commands: Commands = {
        "`cp -r --reflink=never`": ("cp", "-r", "--reflink=never"),
        "`cp -r --reflink=always`": ("cp", "-r", "--reflink=always"),
        "`qwen35 convert --link clone`": (*CONVERT, "--link", "clone"),
        "`qwen35 convert --link copy`": (*CONVERT, "--link", "copy"),
    }
    if with_mlx_lm:
        commands["mlx-lm, lazy load and save"] = (sys.executable, "-c", MLX_LM)
    for kind in (Sizes(vision_blocks=0, mtp=False), Sizes()):
        _bench(folder, sized(gigabytes, kind), commands, n_rounds=n_rounds, cold=cold)


Commands = dict[str, tuple[str | Path, ...]]


def _bench(folder: Path, sizes: Sizes, commands: Commands, *, n_rounds: int, cold: bool) -> None:
    """Print a row for each command; `cp -r` is the first."""
    source, target = folder / "source", folder / "target"
    make(source, sizes, max(2, round(sum(map(n_bytes, tensors_of(sizes))) / 2e9)))
    os.sync()
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    written: dict[str, int] = {}
    disk: dict[str, list[int]] = {name: [] for name in commands}
    for i in range(n_rounds):
        for name in list(commands)[:: 1 if i % 2 == 0 else -1]:
            if cold:
                evict(source)
            n_before = used_bytes(folder)
            runs[name].append(run((*commands[name], source, target)))
            disk[name].append(used_bytes(folder) - n_before)
            written[name] = folder_bytes(target)
            shutil.rmtree(target)
            os.sync()
    n_read, copy = folder_bytes(source), statistics.median(one.seconds for one in next(iter(runs.values())))
    for name, found in runs.items():
        seconds = [one.seconds for one in found]
        middle, peak = statistics.median(seconds), max(one.peak_bytes for one in found)
        print(
            f"| {n_read / 1e9:.2f} GB | {name} | {middle:.2f} s | {min(seconds):.2f}-{max(seconds):.2f} s "
            f"| {middle / copy:.2f} | {_cpu(found):.2f} s | {peak / 1e6:.0f} MB | {written[name] / 1e9:.2f} GB "
            f"| {statistics.median(disk[name]) / 1e9:.3f} GB |",
            flush=True,
        )
    shutil.rmtree(source)
    os.sync()


def bench_inspect(folder: Path, n_rounds: int) -> None:
    """Print how long a look at large checkpoints takes; their files are sparse, headers and gains are real."""
    print("\n| inspect | tensors | time | least-most | CPU | peak memory |\n| --- | --- | --- | --- | --- | --- |")
    for name, sizes, n_shards in (("27B, 15 shards", B27, 15), ("experts one by one, 14 shards", SPARSE, 14)):
        source = folder / "source"
        make(source, sizes, n_shards, sparse=True)
        found = [run((*INSPECT, source), then_sync=False) for _ in range(n_rounds)]
        seconds, peak = [one.seconds for one in found], max(one.peak_bytes for one in found)
        n_tensors = sum(1 for _ in tensors_of(sizes))
        print(
            f"| {name} | {n_tensors:,} | {statistics.median(seconds):.2f} s "
            f"| {min(seconds):.2f}-{max(seconds):.2f} s | {_cpu(found):.2f} s | {peak / 1e6:.0f} MB |",
            flush=True,
        )
        shutil.rmtree(source)


def main() -> None:
    """Read the arguments, run what they ask for, and leave nothing behind."""
    parser = argparse.ArgumentParser(description="Time qwen35 beside cp -r.")
    parser.add_argument("--folder", type=Path, default=None, help="a disk with three times the largest size free")
    parser.add_argument("--gb", default="1,4,8", help="sizes in GB, with commas; empty for inspect alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mlx-lm", action="store_true", help="time mlx-lm's load and save too")
    parser.add_argument("--schemes", action="store_true", help="time what is dequantised and quantised instead")
    parser.add_argument("--clones", action="store_true", help="time what shares blocks with the source instead")
    parser.add_argument("--cold", action="store_true", help="drop the source from the page cache before each run")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="qwen35-bench-") as made:
        sizes = [float(text) for text in asked.gb.split(",") if text]
        if sizes:
            print("| source | command | time | least-most | of `cp` | CPU | peak memory | written | disk |")
            print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        bench = bench_schemes if asked.schemes else bench_clones if asked.clones else bench_convert
        for gigabytes in sizes:
            bench(Path(made), gigabytes, n_rounds=asked.rounds, with_mlx_lm=asked.mlx_lm, cold=asked.cold)
        if asked.schemes or asked.clones:
            return
        bench_inspect(Path(made), asked.rounds)


if __name__ == "__main__":
    main()
