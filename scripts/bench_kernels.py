"""Time the gated delta rule's CUDA kernel beside flash-linear-attention's, and print the tables as Markdown.

    python scripts/bench_kernels.py            # on a machine with an NVIDIA GPU, MLX's CUDA build, torch and fla

All kernels get the same bfloat16 values (q and k normalised, decays and write strengths as a model makes them) and a
random float32 state, at a 27B model's head geometry. Three times per kernel, medians in milliseconds:

    call     one call, from Python to a synchronised device
    queued   the same call twenty times, each on the state the last one left, synchronised once; a twentieth of it
    graph    (torch only) the twenty calls captured in a CUDA graph and replayed: no launch cost at all
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

from qwen35conv import kernels

KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 48, 128
QUEUED = 20

Array = np.ndarray[Any, np.dtype[Any]]
MlxKernel = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs of one run, float32 in NumPy; kernels get q, k, v and beta rounded to bfloat16."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    state: Array


def make_case(batch: int, n_steps: int, seed: int = 7) -> Case:
    """Random inputs with the statistics of a trained layer: unit keys, decays mostly near 1."""
    random = np.random.default_rng(seed)

    def unit(*shape: int) -> Array:
        x: Array = random.standard_normal(shape)
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        return x.astype(np.float32)

    keys, values = (batch, n_steps, KEY_HEADS, HEAD_DIM), (batch, n_steps, VALUE_HEADS, HEAD_DIM)
    return Case(
        q=unit(*keys) * HEAD_DIM**-0.5,
        k=unit(*keys),
        v=random.standard_normal(values, dtype=np.float32),
        g=np.exp(-np.exp(random.uniform(-6, 0, values[:3]))).astype(np.float32),
        beta=random.uniform(0.1, 0.9, values[:3]).astype(np.float32),
        state=random.standard_normal((batch, VALUE_HEADS, HEAD_DIM, HEAD_DIM), dtype=np.float32),
    )


def median_ms(run: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """Median time of `run` over `repeats`, after three warm-ups, per call if it makes several."""
    times = []
    for i in range(repeats + 3):
        begin = time.perf_counter()
        run()
        if i >= 3:
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3 / calls


class Mlx:
    """Our kernel, or MLX's own call, on one case."""

    def __init__(self, case: Case) -> None:
        """Put the inputs on the GPU."""
        self.inputs = [
            mx.array(case.q).astype(mx.bfloat16),
            mx.array(case.k).astype(mx.bfloat16),
            mx.array(case.v).astype(mx.bfloat16),
            mx.array(case.g),
            mx.array(case.beta).astype(mx.bfloat16),
        ]
        self.state = mx.array(case.state)
        mx.eval(self.inputs, self.state)

    def _chain(self, kernel: MlxKernel, calls: int) -> None:
        state, outputs = self.state, []
        for _ in range(calls):
            y, state = kernel(*self.inputs, state)
            outputs.append(y)
        mx.eval(outputs, state)

    def call(self, kernel: MlxKernel, repeats: int) -> float:
        """Milliseconds of one call."""
        return median_ms(lambda: self._chain(kernel, 1), repeats)

    def queued(self, kernel: MlxKernel, repeats: int) -> float:
        """Milliseconds of one of many calls."""
        return median_ms(lambda: self._chain(kernel, QUEUED), repeats, QUEUED)

    def run(self, kernel: MlxKernel) -> tuple[Array, Array]:
        """Outputs and state, float32."""
        y, state = kernel(*self.inputs, self.state)
        return np.array(y.astype(mx.float32)), np.array(state)


class Fla:
    """flash-linear-attention's kernels on one case, in the same state layout."""

    def __init__(self, case: Case) -> None:
        """Put the inputs on the GPU."""
        torch = import_module("torch")

        def put(x: Array, dtype: Any) -> Any:
            return torch.from_numpy(x).to("cuda", dtype)

        self.torch = torch
        low = torch.bfloat16
        self.inputs = {
            "q": put(case.q, low),
            "k": put(case.k, low),
            "v": put(case.v, low),
            "g": put(np.log(case.g), torch.float32),
            "beta": put(case.beta, low),
            "scale": 1.0,
            "output_final_state": True,
            "state_v_first": True,
        }
        self.state = put(case.state, torch.float32)

    def _chain(self, kernel: Callable[..., Any], calls: int) -> tuple[Any, Any]:
        state, y = self.state, None
        for _ in range(calls):
            y, state = kernel(**self.inputs, initial_state=state)
        return y, state

    def times(self, kernel: Callable[..., Any], repeats: int) -> tuple[float, float, float]:
        """Milliseconds of one call, of a queued one, and of one in a replayed CUDA graph."""
        torch = self.torch

        def run(calls: int) -> None:
            self._chain(kernel, calls)
            torch.cuda.synchronize()

        with torch.no_grad():
            call = median_ms(lambda: run(1), repeats)
            queued = median_ms(lambda: run(QUEUED), max(repeats // 4, 5), QUEUED)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._chain(kernel, QUEUED)

            def replay() -> None:
                graph.replay()
                torch.cuda.synchronize()

            return call, queued, median_ms(replay, max(repeats // 4, 5), QUEUED)

    def run(self, kernel: Callable[..., Any]) -> tuple[Array, Array]:
        """Outputs and state, float32."""
        with self.torch.no_grad():
            y, state = self._chain(kernel, 1)
        return y.float().cpu().numpy(), state.cpu().numpy()


def reference(*inputs: mx.array) -> tuple[mx.array, mx.array]:
    """The recurrence in plain operations, float32 state."""
    return kernels.gated_delta(*inputs, backend="ops")


def ours(*inputs: mx.array) -> tuple[mx.array, mx.array]:
    """The kernel under test."""
    return kernels.gated_delta(*inputs, backend="cuda")


def show_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print one Markdown table."""
    print(f"\n{title}\n")
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def warm_up(seconds: float = 0.5) -> None:
    """Keep the GPU busy until its clocks have risen."""
    x = mx.random.normal((4096, 4096))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        mx.eval(x @ x)


def prefill(fla: dict[str, Callable[..., Any]]) -> None:
    """One row of a batch, from one step to a long prompt."""
    rows, errors = [], []
    for n_steps in (1, 128, 512, 2048):
        case = make_case(1, n_steps)
        mlx = Mlx(case)
        found = {"qwen35conv": mlx.run(ours), "MLX's own call": mlx.run(kernels.gated_delta_mlx)}
        line = [mlx.call(ours, 60), mlx.queued(ours, 20)]
        if fla:
            theirs = Fla(case)
            for name, kernel in fla.items():
                found[name] = theirs.run(kernel)
                line += theirs.times(kernel, 60)
        line.append(mlx.call(kernels.gated_delta_mlx, 5))
        rows.append([str(n_steps), *(f"{ms:.3f}" for ms in line)])
        want = mlx.run(reference)
        for name, got in found.items():
            y_off, state_off = (float(np.abs(a - b).max()) for a, b in zip(got, want, strict=True))
            errors.append([str(n_steps), name, f"{state_off:.1e}", f"{y_off:.1e}"])
    columns = ["T", "qwen35conv call", "queued"]
    for name in fla:
        columns += [f"{name} call", "queued", "graph"]
    show_table("Prefill, batch 1, milliseconds", [*columns, "MLX's own call"], rows)
    show_table("Largest difference from the float32 reference", ["T", "kernel", "state", "y (bfloat16)"], errors)


def decode(fla: dict[str, Callable[..., Any]]) -> None:
    """One step for several rows."""
    rows = []
    for batch in (1, 8, 32):
        case = make_case(batch, 1)
        mlx = Mlx(case)
        line = [mlx.call(ours, 200), mlx.queued(ours, 50)]
        if fla:
            line += Fla(case).times(fla["fla recurrent"], 200)
        rows.append([str(batch), *(f"{ms:.4f}" for ms in line)])
    columns = ["batch", "qwen35conv call", "queued"] + (["fla recurrent call", "queued", "graph"] if fla else [])
    show_table("Decode, one step, milliseconds", columns, rows)


def main() -> None:
    """Print all tables."""
    if "cuda" not in kernels.available_backends():
        sys.exit("bench_kernels: no NVIDIA GPU that MLX can use")
    fla: dict[str, Callable[..., Any]] = {}
    versions = [f"MLX {version('mlx')}"]
    try:
        torch, theirs = import_module("torch"), import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        print(f"without flash-linear-attention: {error}")
    else:
        fla = {"fla recurrent": theirs.fused_recurrent_gated_delta_rule, "fla chunked": theirs.chunk_gated_delta_rule}
        versions += [f"torch {torch.__version__}", f"fla {import_module('fla').__version__}"]
        versions.append(torch.cuda.get_device_name())
    print(f"{', '.join(versions)}; Hk {KEY_HEADS}, Hv {VALUE_HEADS}, Dk = Dv = {HEAD_DIM}, bfloat16 inputs")
    warm_up()
    decode(fla)
    prefill(fla)


if __name__ == "__main__":
    main()
